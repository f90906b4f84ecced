"""PEC (Zając, Tuytelaars and van de Ven 2024) as a learner of the benchmark."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pecil import PEC
from pecil.methods.buffer import Reservoir
from pecil.methods.learner import Array, resized
from pecil.methods.recording import Chance
from pecil.pec.balance import Balanced, balance
from pecil.pec.base import one_of


class PECLearner:
    """The estimator `pecil.PEC` on the benchmark's interface.

    Each task tells how many samples of its classes will come, which is what the linear
    learning-rate schedule needs. All classes at once are one `fit`, in the given order:
    the same model, and the only way to cut classes to equal budgets.

    With ``size``, images of bytes are brought to that height and width first.

    With ``balancing="buffer"`` it keeps ``buffer`` samples of the stream and balances its classes
    with them (:func:`pecil.balance`); with "oracle" the benchmark balances them with the test set.

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
        size: int | None = None,
        balancing: str | None = None,
        buffer: int = 0,
        **settings: Any,
    ) -> None:
        if balancing is not None:
            one_of("balancing", balancing, ("buffer", "oracle"))
        self.n_classes, self.size = n_classes, size
        self.seed = seed
        self.balanced: Balanced | None = None
        self.kept: Reservoir | None = None
        if balancing == "buffer":
            self.kept = Reservoir(buffer, seed, Chance(torch.device("cpu")))
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

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Tell the schedule how many samples of these classes will come."""
        self.pec.set_params(expected_samples=dict(counts))

    def learn(self, x: Array, y: Array, order: Array | None = None) -> None:
        """Learn samples in their order, or in another one in which they may come again."""
        if order is not None and self.pec.equal_budgets is True:  # needs all there is to learn
            x, y, order = x[order], y[order], None
        x = self._sized(x)
        whole = len(np.unique(y)) == self.n_classes and not hasattr(self.pec, "classes_")
        if whole and order is None:
            self.pec.fit(x, y)
        else:
            self.pec.partial_fit(x, y, order=order)
        if self.kept is not None:
            self.kept.add(x=torch.as_tensor(x), y=torch.as_tensor(y))
            self.balanced = None

    @property
    def n_buffered(self) -> int:
        """The samples that it keeps to balance its classes."""
        return 0 if self.kept is None else len(self.kept)

    def balance(self, x: Array, y: Array) -> None:
        """Balance the classes with some samples."""
        self._balance(self._sized(x), y)

    def _balance(self, x: Array, y: Array) -> None:
        self.balanced = balance(self.pec, x, y, random_state=self.seed)

    def end_task(self) -> None:
        """Do nothing: PEC needs no tasks."""

    def scores(self, x: Array) -> Array:
        """Return the negative prediction errors, balanced or not, (n, n_classes)."""
        if self.kept is not None and self.balanced is None:
            self._balance(*(self.kept.fields[name].numpy() for name in ("x", "y")))
        scores = np.full((len(x), self.n_classes), -np.inf, dtype=np.float32)
        scores[:, self.pec.classes_] = -(self.balanced or self.pec).errors(self._sized(x))
        return scores

    def _sized(self, x: Array) -> Array:
        """Return samples at the size at which they are looked at."""
        if self.size is None:
            return x
        sized: Array = resized(torch.as_tensor(x), self.size).numpy()
        return sized
