"""Whitened PEC and its relative RanDumb (Prabhu et al. 2024) as learners of the benchmark.

Both are one estimator, `pecil.WhitenedPEC`: class means and a shared covariance, shrunk by OAS,
of what a frozen teacher h says. They differ in h: filters for pictures, or random Fourier
features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from pecil import WhitenedPEC
from pecil.methods.learner import Array, check_settings
from pecil.teachers import RECIPES, Filters, RandomFeatures, Synthetic

NAMES = ("kind", "beside", "mirror")  # the teacher's name sets the first, the estimator the last
RECIPE_SETTINGS = tuple(
    dict.fromkeys(
        field.name
        for recipe in (Filters, RandomFeatures, Synthetic)
        for field in fields(recipe)
        if field.name not in NAMES
    )
)


def whitened_pec(teacher: Any = "auto", **settings: Any) -> WhitenedPEC:
    """Make the estimator; fields of the teacher's recipe are settings like any other.

    Parameters
    ----------
    teacher : str
        See `pecil.WhitenedPEC`; to be named if its recipe is to be changed.
    **settings
        Parameters of `pecil.WhitenedPEC`, and fields of `pecil.teachers.Filters`,
        `RandomFeatures` or `Synthetic`, whichever the teacher is.

    Examples
    --------
    >>> whitened_pec("signs", ridge=1, sizes=[5], dim=100).teacher.sizes
    (5,)
    """
    changes = {name: settings.pop(name) for name in RECIPE_SETTINGS if name in settings}
    return WhitenedPEC(teacher=_changed(teacher, changes) if changes else teacher, **settings)


def _changed(teacher: Any, changes: Mapping[str, Any]) -> Any:
    """Return the recipe of a named teacher, some of its fields changed."""
    recipe: Any = RECIPES.get(teacher) if isinstance(teacher, str) else None
    if recipe is None:
        raise ValueError(
            f"to change {', '.join(changes)}, name a teacher out of {', '.join(RECIPES)}, but "
            f"teacher is {teacher!r}"
        )
    allowed = [field.name for field in fields(recipe) if field.name in RECIPE_SETTINGS]
    check_settings(f"the teacher {teacher!r}", changes, allowed)
    return replace(recipe, **changes)


class WhitenedLearner:
    """The estimator `pecil.WhitenedPEC` on the benchmark's interface.

    Examples
    --------
    >>> import numpy as np
    >>> learner = WhitenedLearner(3, (2,), teacher="relu", dim=20)
    >>> learner.learn(np.array([[0, 1], [0, 2], [3, 0], [5, 0]]), np.array([0, 0, 1, 1]))
    >>> learner.scores(np.array([[0, 3], [4, 0]])).argmax(axis=1).tolist()
    [0, 1]
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
        self.model = whitened_pec(
            **settings,
            expected_classes=n_classes,
            mean=mean,
            std=std,
            random_state=seed,
            device=device,
        )

    @property
    def n_parameters(self) -> int:
        """The numbers in the triangle of the covariance and in the students."""
        return self.model.n_parameters_

    @property
    def device(self) -> torch.device:
        """Where the learner computes."""
        return self.model.device_

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Do nothing: nothing depends on what will come."""

    def learn(self, x: Array, y: Array) -> None:
        """Take samples into means and covariance."""
        self.model.partial_fit(x, y)

    def end_task(self) -> None:
        """Do nothing: there are no tasks to it."""

    def scores(self, x: Array) -> Array:
        """Return the discriminants, (n, n_classes)."""
        scores = np.full((len(x), self.n_classes), -np.inf)
        scores[:, self.model.classes_] = self.model.discriminants(x)
        return scores


class RanDumb(WhitenedLearner):
    """Random Fourier features of the inputs, then LDA (Prabhu et al. 2024).

    As in the authors' public code: inputs are divided by 255 and normalised per channel; the
    features are those of a Gaussian kernel, 25,000 of them, with γ = 1 / (features · variance of
    the inputs), scikit-learn's "scale"; the mirror image of each colour picture is learned too
    (digits are not mirrored); the covariance is shrunk by OAS, without a further ridge.

    Departures: OAS shrinks the covariance pooled over classes, not each class's own before they
    are averaged; classes have no priors; miniImageNet keeps its 84×84 pixels and 500 images a
    class instead of 32×32 and all of ImageNet's. The code behind the article adds 1e-4 to the
    diagonal as well, for features scaled by √(2/D).

    Parameters
    ----------
    dim : int
        Features.
    memory : float, optional
        Numbers to hold, instead of ``dim``.
    gamma : float, optional
        γ; by default 1 / features, right for normalised inputs.
    flip : bool
        Whether to learn mirror images.
    shrinkage : "oas" or float
    **given
        What every learner is given.

    Examples
    --------
    >>> import numpy as np
    >>> learner = RanDumb(2, (4, 4), dim=30, flip=True)
    >>> learner.learn(np.random.default_rng(0).random((10, 4, 4)), np.arange(10) % 2)
    >>> learner.model.samples_seen_
    {0: 10, 1: 10}
    """

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        dim: int | None = 25_000,
        memory: float | None = None,
        gamma: float | None = None,
        flip: bool = False,
        shrinkage: float | str = "oas",
        **given: Any,
    ) -> None:
        if flip and len(input_shape) == 1:
            raise ValueError(f"flip is for images, but samples are vectors of {input_shape[0]}")
        self.flip = flip
        super().__init__(
            n_classes,
            input_shape,
            teacher="rbf",
            dim=dim if memory is None else None,
            memory=memory,
            gamma=gamma,
            shrinkage=shrinkage,
            **given,
        )

    def learn(self, x: Array, y: Array) -> None:
        """Take samples, and their mirror images if wanted, into means and covariance."""
        super().learn(x, y)
        if self.flip:
            super().learn(np.ascontiguousarray(x[:, :, ::-1]), y)
