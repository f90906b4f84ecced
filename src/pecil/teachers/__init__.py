"""Teachers of whitened PEC: frozen maps h from a sample to D features.

* :class:`Filters`, for images: random filters made for natural pictures (or for drawings),
  pooled over grids.
* :class:`Synthetic`, for images: a small network that was trained on synthetic pictures.
* :class:`RandomFeatures`, for vectors: random ReLU or Fourier features.
* :class:`Identity`, for ready-made embeddings.

A recipe is a small frozen record; ``recipe.teacher(input_shape, dim, seed, device)`` draws the
teacher.
"""

from pecil.teachers.base import FeatureTeacher, Recipe
from pecil.teachers.filters import Filters
from pecil.teachers.network import Synthetic
from pecil.teachers.vectors import Identity, RandomFeatures

__all__ = [
    "RECIPES",
    "FeatureTeacher",
    "Filters",
    "Identity",
    "RandomFeatures",
    "Recipe",
    "Synthetic",
]

RECIPES: dict[str, Recipe] = {
    "natural": Filters(),
    "strokes": Filters(
        prior="strokes", sizes=(7,), grids=(3,), ridge=3.0, threshold=0.4, spread=8, mirror=False
    ),
    "signs": Filters(sizes=(5, 8), grids=(3, 4), ridge=3.0, grey=1.0, signed=False, mirror=False),
    "relu": RandomFeatures("relu"),
    "rbf": RandomFeatures("rbf"),
    "identity": Identity(),
}
"""What the names stand for: photographs, drawings, signs of any colour on any ground, vectors."""
