"""Teachers of whitened PEC: frozen maps h from a sample to D features.

* :class:`Filters`, for images: random filters made for natural pictures (or for drawings),
  pooled over grids.
* :class:`Synthetic`, for images: a small network that was trained on synthetic pictures.
* :class:`RandomFeatures`, for vectors: random ReLU or Fourier features.
* :class:`Identity`, for ready-made embeddings.

A recipe is a small frozen record; ``recipe.teacher(input_shape, dim, seed, device)`` draws the
teacher.
"""

from dataclasses import replace

from pecil.teachers.base import FeatureTeacher, Recipe
from pecil.teachers.filters import Filters
from pecil.teachers.network import Synthetic
from pecil.teachers.vectors import Identity, RandomFeatures

__all__ = [
    "FILTERS",
    "RECIPES",
    "FeatureTeacher",
    "Filters",
    "Identity",
    "RandomFeatures",
    "Recipe",
    "Synthetic",
]

FILTERS = {
    "natural": Filters(),
    "strokes": Filters(
        prior="strokes", sizes=(7,), grids=(3,), ridge=3.0, threshold=0.4, spread=8, mirror=False
    ),
    "signs": Filters(sizes=(5, 8), grids=(3, 4), ridge=3.0, grey=1.0, signed=False, mirror=False),
}
"""For photographs, drawings, signs of any colour on any ground."""


def _synthetic(name: str, weights: str) -> dict[str, Recipe]:
    """Name the teachers that some weights of the package make: for photographs, drawings, signs."""
    strokes, signs = replace(FILTERS["strokes"], spread=1), FILTERS["signs"]
    return {
        name: Synthetic(weights),
        f"{name}-strokes": Synthetic(weights, mirror=False, beside=strokes),
        f"{name}-signs": Synthetic(weights, mirror=False, beside=signs),
    }


RECIPES: dict[str, Recipe] = {
    **FILTERS,
    **_synthetic("synthetic", "small"),
    "relu": RandomFeatures("relu"),
    "rbf": RandomFeatures("rbf"),
    "identity": Identity(),
}
"""What the names stand for: filters, a network with filters beside it, features of vectors."""
