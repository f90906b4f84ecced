"""What teachers of whitened PEC are, and what they share."""

from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor

PROBES = 32  # outputs that tell teachers apart
LARGE, NEAR = 64, 40  # pixels of a side from which on images are reduced, and to about what


class FeatureTeacher(Protocol):
    """What whitened PEC asks of a teacher."""

    output_dim: int
    """Features (D)."""
    checksum: Any
    """Tells whether two teachers are the same: a text, or outputs to be compared."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the features (n, D) of samples (n, *input_shape)."""


class Recipe(Protocol):
    """How a teacher is made; one with weights of its own says how many, as ``n_weights``."""

    def teacher(
        self, input_shape: tuple[int, ...], dim: int, seed: int, device: torch.device
    ) -> FeatureTeacher:
        """Draw a teacher of at most ``dim`` features."""


class Remade:
    """A teacher that leaves its numbers out of pickles: what it was made of makes them again."""

    _made_of: tuple[Any, ...]

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), self._made_of


def reduction(side: int, given: int | None) -> int:
    """Return the side of the squares of pixels that are averaged, for images of so many pixels."""
    return given or (max(1, round(side / NEAR)) if side > LARGE else 1)


def weights_of(recipe: Any) -> int:
    """Return how many numbers a teacher holds: none if it is drawn from the seed."""
    return int(getattr(recipe, "n_weights", 0))


def probe(teacher: Any, input_shape: tuple[int, ...], device: torch.device) -> list[float]:
    """Return some outputs for a fixed input; machines may differ in their last digits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, *input_shape, generator=generator).to(device)
    outputs = teacher(x).flatten()
    return outputs[:: max(1, len(outputs) // PROBES)][:PROBES].tolist()


def whole(value: Any) -> bool:
    """Tell whether a value is a whole number of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def between(value: Any, least: float, most_of: float) -> bool:
    """Tell whether a value is a number between two others."""
    return isinstance(value, int | float) and least < value < most_of
