"""What every method of the benchmark offers to the runner, and what many of them share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pecil.pec.machine import device_named

Array = NDArray[Any]


class Learner(Protocol):
    """A class-incremental learner: classes are 0 to n_classes - 1, tasks come in turn.

    `pecil.checks.check_learner` tells whether a class keeps to this.
    """

    @property
    def n_parameters(self) -> int:
        """The numbers that it holds: parameters trained, or statistics gathered."""

    @property
    def device(self) -> torch.device:
        """Where the learner computes."""

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Prepare for a task that brings so many samples of these classes, all passes together.

        ``passes`` are the samples of each pass; by default all are of one.
        """

    def learn(self, x: Array, y: Array) -> None:
        """Learn a batch; each sample is seen once a pass."""

    def end_task(self) -> None:
        """Finish a task."""

    def scores(self, x: Array) -> Array:
        """Return (n, n_classes), the higher the likelier; -inf for classes never seen."""


class Rehearser(Learner, Protocol):
    """A learner that keeps samples: it takes ``buffer``, the most that it may keep."""

    @property
    def n_buffered(self) -> int:
        """The samples that it keeps now."""


@dataclass(frozen=True)
class Inputs:
    """Turns samples into rows of numbers: bytes to [0, 1], resized, normalised, flattened.

    Parameters
    ----------
    device : str or torch.device
        "auto": the GPU if there is one.
    mean, std : float or sequence of float, optional
        Per channel (or feature); inputs become (x - mean) / std.
    size : int, optional
        Pictures of bytes are first brought to this height and width: bilinear, antialiased and
        rounded to bytes, as PIL does it.

    Examples
    --------
    >>> import numpy as np
    >>> Inputs("cpu", mean=0.5, std=0.5)(np.array([[0, 255]], dtype=np.uint8)).tolist()
    [[-1.0, 1.0]]
    """

    device: str | torch.device = "auto"
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", device_named(self.device))

    def __call__(self, x: Array) -> Tensor:
        """Return (n, features), float32."""
        inputs = torch.as_tensor(x, device=self.device)
        if self.size is not None:
            inputs = resized(inputs, self.size)
        inputs = scaled(inputs)
        if self.mean is not None:
            inputs = inputs - inputs.new_tensor(self.mean)
        if self.std is not None:
            inputs = inputs / inputs.new_tensor(self.std)
        return inputs.flatten(1)

    def n_features(self, input_shape: Sequence[int]) -> int:
        """Return the numbers in a row."""
        shape = torch.Size(input_shape)
        return (shape if self.size is None else shape[2:]).numel() * (self.size or 1) ** 2


def scaled(raw: Tensor) -> Tensor:
    """Return samples as floats: bytes between 0 and 1, others as they are."""
    return raw / 255 if raw.dtype == torch.uint8 else raw.float()


def resized(images: Tensor, size: int) -> Tensor:
    """Bring images of bytes, (n, h, w) or (n, h, w, c), to another height and width."""
    if images.dtype != torch.uint8 or images.ndim < 3:
        shape = tuple(images.shape)
        raise ValueError(f"size is for images of bytes, but samples are {images.dtype} {shape}")
    planes = images.movedim(-1, 1) if images.ndim == 4 else images.unsqueeze(1)
    planes = F.interpolate(planes.float(), (size, size), mode="bilinear", antialias=True)
    planes = planes.round().clamp(0, 255).to(torch.uint8)
    return planes.movedim(1, -1) if images.ndim == 4 else planes.squeeze(1)


def check_settings(owner: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ValueError if a setting has a name that its owner does not know."""
    if unknown := sorted(set(given) - set(allowed)):
        raise ValueError(
            f"{owner} has no setting {', '.join(unknown)}; it has {', '.join(allowed) or 'none'}"
        )
