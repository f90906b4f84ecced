"""The methods that can be run and compared, one registry."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pecil.methods.finetuning import FineTuning
from pecil.methods.learner import Learner
from pecil.methods.pec import PECLearner
from pecil.pec import PEC

__all__ = ["METHODS", "FineTuning", "Learner", "Method", "PECLearner", "check_settings"]

NOT_CHOSEN = {  # given by the dataset, the stream, the experiment or the machine
    *("n_classes", "input_shape", "mean", "std", "channels", "expected_samples", "shuffle"),
    *("seed", "random_state", "device", "teacher"),
}


@dataclass(frozen=True)
class Method:
    """A method's entry in the registry."""

    name: str
    title: str
    reference: str
    description: str
    learner: Callable[..., Learner]
    """Makes a learner from n_classes, input_shape, mean, std, seed, device and settings."""
    options: Callable[..., Any]
    """The class whose keyword parameters are the settings."""
    buffer: bool = False
    """Does it keep samples to replay them?"""
    independent: bool = False
    """Are classes learned apart, so that the stream may be handed over in any portions?"""

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of the settings that a user can choose."""
        own = inspect.signature(self.options).parameters
        stream = () if self.independent else ("batch_size", "epochs")
        return (*(name for name in own if name not in NOT_CHOSEN), *stream)


def check_settings(owner: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ValueError if a setting has a name that its owner does not know."""
    if unknown := sorted(set(given) - set(allowed)):
        raise ValueError(
            f"{owner} has no setting {', '.join(unknown)}; it has {', '.join(allowed)}"
        )


METHODS = {
    method.name: method
    for method in (
        Method(
            name="pec",
            title="PEC",
            reference="Zając, Tuytelaars and van de Ven (2024). Prediction Error-based "
            "Classification for Class-Incremental Learning. ICLR.",
            description="One student per class imitates a frozen random teacher; "
            "the student with the smallest error names the class.",
            learner=PECLearner,
            options=PEC,
            independent=True,
        ),
        Method(
            name="finetuning",
            title="Fine-tuning",
            reference="McCloskey and Cohen (1989). Catastrophic Interference in Connectionist "
            "Networks. Psychology of Learning and Motivation 24.",
            description="A network trained on the stream as it comes; forgets. The lower end.",
            learner=FineTuning,
            options=FineTuning,
        ),
    )
}
