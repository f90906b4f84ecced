"""PEC (Zając, Tuytelaars and van de Ven 2024) as a learner of the benchmark."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pecil.methods.learner import Array
from pecil.pec import PEC


class PECLearner:
    """The estimator `pecil.PEC` on the benchmark's interface.

    Each task tells how many samples of its classes will come, which is what the linear
    learning-rate schedule needs. All classes at once are one `fit`, in the given order:
    the same model, and the only way to cut classes to equal budgets.

    Examples
    --------
    >>> import numpy as np
    >>> learner = PECLearner(3, (2,), architecture="mlp", teacher_width=20)
    >>> learner.begin_task({1: 4})
    >>> learner.learn(np.ones((4, 2)), np.ones(4, dtype=int))
    >>> learner.scores(np.ones((2, 2))).argmax(axis=1).tolist()
    [1, 1]
    """

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        mean: Any = None,
        std: Any = None,
        seed: int = 0,
        device: str = "auto",
        **settings: Any,
    ) -> None:
        self.n_classes = n_classes
        self.pec = PEC(
            **settings,
            expected_samples={},
            shuffle=False,
            mean=mean,
            std=std,
            random_state=seed,
            device=device,
        )

    @property
    def n_parameters(self) -> int:
        """The number of trainable parameters, all classes together."""
        return self.pec.n_parameters_

    @property
    def macs(self) -> int | None:
        """Operations for one sample: each teacher's, and those of every class's student."""
        return self.pec.macs_

    @property
    def device(self) -> torch.device:
        """Where the learner computes."""
        return self.pec.device_

    def begin_task(self, counts: Mapping[int, int]) -> None:
        """Tell the schedule how many samples of these classes will come."""
        self.pec.set_params(expected_samples=dict(counts))

    def learn(self, x: Array, y: Array) -> None:
        """Learn samples in their order."""
        whole = len(np.unique(y)) == self.n_classes and not hasattr(self.pec, "classes_")
        (self.pec.fit if whole else self.pec.partial_fit)(x, y)

    def end_task(self) -> None:
        """Do nothing: PEC needs no tasks."""

    def scores(self, x: Array) -> Array:
        """Return the negative prediction errors, (n, n_classes)."""
        scores = np.full((len(x), self.n_classes), -np.inf, dtype=np.float32)
        scores[:, self.pec.classes_] = -self.pec.errors(x)
        return scores
