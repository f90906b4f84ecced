"""The methods that can be run and compared, one registry."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pecil.methods.finetuning import FineTuning
from pecil.methods.joint import Joint
from pecil.methods.learner import Learner, Rehearser, check_settings
from pecil.methods.nearest_mean import NearestMean
from pecil.methods.pec import PECLearner
from pecil.methods.slda import SLDA
from pecil.methods.trained import Trained
from pecil.methods.whitened import RECIPE_SETTINGS, RanDumb, WhitenedLearner, whitened_pec
from pecil.pec import PEC, WhitenedPEC

__all__ = [
    "METHODS",
    "SLDA",
    "FineTuning",
    "Joint",
    "Learner",
    "Method",
    "NearestMean",
    "PECLearner",
    "RanDumb",
    "Rehearser",
    "Trained",
    "WhitenedLearner",
    "check_settings",
    "whitened_pec",
]

NOT_CHOSEN = {  # given by the dataset, the stream, the experiment or the machine
    *("n_classes", "input_shape", "mean", "std", "channels", "expected_samples", "shuffle"),
    *("expected_classes", "seed", "random_state", "device", "epochs", "buffer"),
}


def any_shape(input_shape: Sequence[int]) -> bool:
    """Say that samples of every shape will do."""
    return True


@dataclass(frozen=True)
class Method:
    """A method's entry in the registry.

    Examples
    --------
    >>> METHODS["slda"].settings
    ('shrinkage', 'size')
    """

    name: str
    title: str
    reference: str
    description: str
    learner: Callable[..., Learner]
    """Makes a learner from n_classes, input_shape, mean, std, seed, device and settings."""
    options: tuple[str, ...]
    """What can be said of it by name, in a file or on a command line."""
    buffer: bool = False
    """Does it keep samples to replay them? Then its learner is a `Rehearser`."""
    independent: bool = False
    """Is the model the same in whatever portions the stream is handed over?"""
    by_task: bool = False
    """Is it handed each pass over a task as a whole, to cut it into batches itself?"""
    revisits: bool = False
    """Does it go over a task's samples again when the task ends, and hold them until then?"""
    joint: bool = False
    """Are all classes one task?"""
    supports: Callable[[Sequence[int]], bool] = any_shape
    """Says whether it can learn samples of a shape, and so which datasets."""
    of_dataset: Mapping[str, str] = field(default_factory=dict)
    """Settings that a dataset decides, with the field of its `DatasetInfo` that does."""

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of the settings of an experiment."""
        stream = () if self.independent or self.by_task else ("batch_size",)
        return (*(name for name in self.options if name not in NOT_CHOSEN), *stream)


def _parameters(owner: Callable[..., Any], but: str = "") -> tuple[str, ...]:
    """Return the names of a class's own parameters."""
    return tuple(
        name
        for name, parameter in inspect.signature(owner).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and name != but
    )


def _trained(
    name: str,
    title: str,
    reference: str,
    description: str,
    learner: Callable[..., Learner],
    **about: Any,
) -> Method:
    """Describe a method that trains a network; see `pecil.methods.trained`."""
    options = dict.fromkeys((*_parameters(Trained), *_parameters(learner)))
    return Method(
        name,
        title,
        reference,
        description,
        learner,
        tuple(options),
        by_task=True,
        of_dataset={"flip": "mirror"},
        **about,
    )


METHODS = {
    method.name: method
    for method in (
        Method(
            name="whitened_pec",
            title="Whitened PEC",
            reference="Zając, Tuytelaars and van de Ven (2024), with closed-form students and "
            "the error in its own metric: see pecil.WhitenedPEC.",
            description="The mean of what a frozen teacher says of a class is its student; "
            "the smallest error, whitened by a shared covariance, names the class.",
            learner=WhitenedLearner,
            options=(*_parameters(WhitenedPEC), *RECIPE_SETTINGS),
            independent=True,
            of_dataset={"teacher": "pictures"},
        ),
        Method(
            name="pec",
            title="PEC",
            reference="Zając, Tuytelaars and van de Ven (2024). Prediction Error-based "
            "Classification for Class-Incremental Learning. ICLR.",
            description="One student per class imitates a frozen random teacher; "
            "the student with the smallest error names the class.",
            learner=PECLearner,
            options=_parameters(PEC, but="teacher"),  # a callable
            independent=True,
        ),
        Method(
            name="randumb",
            title="RanDumb",
            reference="Prabhu, Sinha, Kumaraguru, Torr, Sener and Dokania (2024). Random "
            "Representations Outperform Online Continually Learned Representations. NeurIPS.",
            description="Means and shared covariance of random Fourier features of the pixels.",
            learner=RanDumb,
            options=_parameters(RanDumb),
            independent=True,
            of_dataset={"flip": "mirror"},
        ),
        Method(
            name="slda",
            title="SLDA",
            reference="Hayes and Kanan (2020). Lifelong Machine Learning with Deep Streaming "
            "Linear Discriminant Analysis. CVPR Workshops.",
            description="Means of the pixels; the nearest one, in the metric of their shared "
            "covariance, names the class.",
            learner=SLDA,
            options=_parameters(SLDA),
            independent=True,
        ),
        Method(
            name="nearest_mean",
            title="Nearest mean",
            reference="Mensink, Verbeek, Perronnin and Csurka (2013). Distance-Based Image "
            "Classification: Generalizing to New Classes at Near-Zero Cost. TPAMI 35.",
            description="Means of the pixels; the nearest one names the class.",
            learner=NearestMean,
            options=_parameters(NearestMean),
            independent=True,
        ),
        _trained(
            "finetuning",
            "Fine-tuning",
            "McCloskey and Cohen (1989). Catastrophic Interference in Connectionist Networks. "
            "Psychology of Learning and Motivation 24.",
            "A network trained on the stream as it comes; forgets. The lower end.",
            FineTuning,
        ),
        _trained(
            "joint",
            "Joint",
            "Caruana (1997). Multitask Learning. Machine Learning 28.",
            "The network of fine-tuning, trained on all classes at once. The upper end.",
            Joint,
            joint=True,
        ),
    )
}
