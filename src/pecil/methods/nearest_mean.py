"""Nearest mean: the class whose mean is nearest to the sample (Mensink et al. 2013).

With μ_c the mean of the inputs of class c,

    predict  argmin_c ‖x − μ_c‖²  =  argmax_c  x·μ_c − ½ ‖μ_c‖².
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pecil.methods.learner import Array, Inputs

HELD = 4096  # samples taken as floats at a time


class Summary(Protocol):
    """What is kept of the samples: their number and mean for each class, and perhaps more."""

    counts: list[int]
    means: Tensor

    def add(self, slot: int, features: Tensor) -> None:
        """Take in samples (b, D) of one class."""


class Means:
    """The number and the mean of the samples of each class."""

    def __init__(self, n_classes: int, dim: int, device: torch.device) -> None:
        self.counts = [0] * n_classes
        self.means = torch.zeros(n_classes, dim, device=device, dtype=torch.float64)

    def add(self, slot: int, features: Tensor) -> None:
        """Take in samples (b, D) of one class."""
        self.counts[slot] += len(features)
        step = features.mean(0, dtype=torch.float64) - self.means[slot]
        self.means[slot] += step * (len(features) / self.counts[slot])


class NearestMean:
    """The class whose mean is nearest in plain Euclidean distance (Mensink et al. 2013).

    Means are exact, whatever the order of the samples.

    Parameters
    ----------
    n_classes : int
        Classes that may come.
    input_shape : tuple of int
        Shape of one sample, channels last.
    size : int, optional
        Bring pictures to this height and width first.
    mean, std : float or sequence of float, optional
        Per channel; inputs become (x - mean) / std.
    seed : ignored
        Nothing is left to chance.
    device : str
        "auto", "cpu", "cuda", ...

    Examples
    --------
    >>> import numpy as np
    >>> learner = NearestMean(3, (5,))
    >>> learner.learn(np.eye(5)[:4], np.array([0, 0, 1, 1]))
    >>> learner.scores(np.eye(5)[:4]).argmax(axis=1).tolist()
    [0, 0, 1, 1]
    >>> learner.n_parameters  # two means
    10
    """

    summary: Summary

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        size: int | None = None,
        mean: Any = None,
        std: Any = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.inputs = Inputs(device, mean, std, size)
        self.n_classes = n_classes
        self.summary = self._empty(self.inputs.n_features(input_shape))
        self._weights: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the learner computes."""
        return torch.device(self.inputs.device)

    @property
    def n_parameters(self) -> int:
        """The numbers in the means."""
        return len(self._seen()) * self.summary.means.shape[1]

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Do nothing: nothing depends on what will come."""

    def learn(self, x: Array, y: Array) -> None:
        """Take samples into the means."""
        self._weights = None
        for label in np.unique(y).tolist():
            for features in self._features(x[y == label]):
                self.summary.add(label, features)

    def end_task(self) -> None:
        """Do nothing: there are no tasks to it."""

    def scores(self, x: Array) -> Array:
        """Return x·w_c − ½ μ_c·w_c, (n, n_classes)."""
        if self._weights is None:
            self._weights = self.weights()
        seen, weights = self._seen(), self._weights  # (seen, D)
        bias = 0.5 * (self.summary.means[seen] * weights).sum(1)
        scores = np.full((len(x), self.n_classes), -np.inf)
        parts = [features.double() @ weights.T - bias for features in self._features(x)]
        scores[:, seen] = torch.cat(parts).cpu().numpy() if parts else 0
        return scores

    def weights(self) -> Tensor:
        """Return w_c = μ_c for each class seen, (classes, D)."""
        return self.summary.means[self._seen()]

    def _empty(self, dim: int) -> Summary:
        """Return the summary of no samples."""
        return Means(self.n_classes, dim, self.device)

    def _seen(self) -> list[int]:
        return [label for label, count in enumerate(self.summary.counts) if count]

    def _features(self, x: Array) -> Iterator[Tensor]:
        """Yield samples as rows of numbers, some at a time."""
        return (self.inputs(x[start : start + HELD]) for start in range(0, len(x), HELD))
