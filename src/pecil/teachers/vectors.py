"""Teachers for vectors: random ReLU or Fourier features, and none for ready-made embeddings."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pecil.pec.machine import in_full, most
from pecil.teachers.base import FeatureTeacher, Remade, between, probe


@dataclass(frozen=True)
class Identity:
    """h(x) = x: for inputs that are embeddings already."""

    def teacher(
        self, input_shape: tuple[int, ...], dim: int, seed: int, device: torch.device
    ) -> FeatureTeacher:
        """Return the teacher; neither ``dim`` nor ``seed`` matters."""
        return _Identity(input_shape)


class _Identity:
    def __init__(self, input_shape: tuple[int, ...]) -> None:
        self.output_dim = math.prod(input_shape)
        self.checksum = f"identity {self.output_dim}"

    def __call__(self, x: Tensor) -> Tensor:
        return x.flatten(1).clone()


@dataclass(frozen=True)
class RandomFeatures:
    """Random features of vectors: h(x) = relu(Wx + b), or cos(Wx + b) for "rbf".

    "relu": W ~ N(0, 1/features), b ~ N(0, 1). "rbf": W ~ N(0, 2γ), b uniform, the random
    Fourier features of the kernel exp(−γ‖x − x'‖²) (Rahimi and Recht 2007); with them whitened
    PEC is RanDumb (Prabhu et al. 2024).

    Parameters
    ----------
    kind : {"relu", "rbf"}
    gamma : float, optional
        γ of "rbf"; by default 1/features, for inputs of deviation 1.
    """

    kind: str = "relu"
    gamma: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("relu", "rbf"):
            raise ValueError(f"kind must be 'relu' or 'rbf', but it is {self.kind!r}")
        if self.gamma is not None and not between(self.gamma, 0, math.inf):
            raise ValueError(f"gamma must be a positive number, but it is {self.gamma!r}")

    def teacher(
        self, input_shape: tuple[int, ...], dim: int, seed: int, device: torch.device
    ) -> FeatureTeacher:
        """Draw ``dim`` features."""
        return _RandomFeatures(self, input_shape, dim, seed, device)


class _RandomFeatures(Remade):
    def __init__(
        self,
        recipe: RandomFeatures,
        input_shape: tuple[int, ...],
        dim: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._made_of = (recipe, input_shape, dim, seed, device)
        features = math.prod(input_shape)
        generator = torch.Generator().manual_seed(seed)
        self.output_dim, self.kind = dim, recipe.kind
        weight = torch.randn(dim, features, generator=generator)
        if recipe.kind == "rbf":
            weight *= math.sqrt(2 * (recipe.gamma or 1 / features))
            bias = torch.rand(dim, generator=generator) * (2 * math.pi)
        else:
            weight /= math.sqrt(features)
            bias = torch.randn(dim, generator=generator)
        self.weight, self.bias = weight.to(device), bias.to(device)
        self.checksum = probe(self, input_shape, device)

    @in_full
    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.output_dim)
        rows = max(1, most(x.device) // self.output_dim)
        for part, target in zip(x.split(rows), out.split(rows), strict=True):
            torch.addmm(self.bias, part.flatten(1), self.weight.T, out=target)
            target.cos_() if self.kind == "rbf" else target.relu_()
        return out
