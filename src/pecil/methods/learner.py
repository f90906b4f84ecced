"""What every method of the benchmark offers to the runner."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

Array = NDArray[Any]


class Learner(Protocol):
    """A class-incremental learner: classes are 0 to n_classes - 1, tasks come in turn."""

    @property
    def n_parameters(self) -> int:
        """The numbers that it holds: parameters trained, or statistics gathered."""

    @property
    def device(self) -> torch.device:
        """Where the learner computes."""

    def begin_task(self, counts: Mapping[int, int]) -> None:
        """Prepare for a task that brings so many samples of these classes."""

    def learn(self, x: Array, y: Array) -> None:
        """Learn a batch; each sample is seen once."""

    def end_task(self) -> None:
        """Finish a task."""

    def scores(self, x: Array) -> Array:
        """Return (n, n_classes), the higher the likelier; -inf for classes never seen."""


def check_settings(owner: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ValueError if a setting has a name that its owner does not know."""
    if unknown := sorted(set(given) - set(allowed)):
        raise ValueError(
            f"{owner} has no setting {', '.join(unknown)}; it has {', '.join(allowed) or 'none'}"
        )
