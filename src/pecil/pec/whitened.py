"""Whitened PEC: the student that has a closed form, its error measured in its own metric.

The student of class c predicts the teacher's outputs h(x) by a constant: their mean m_c over
the class, exact after a single pass in any order. Its errors h(x) − m_c are far from isotropic;
their covariance Σ, shared by all classes, tells which are ordinary, and the class with the
smallest whitened error wins::

    Σ̃ = (1 − a)·Σ + a·tr(Σ)/D·I
    predict  argmin_c  (h(x) − m_c)ᵀ Σ̃⁻¹ (h(x) − m_c)  =  argmax_c  h(x)·w_c − ½ m_c·w_c
             with w_c = Σ̃⁻¹ m_c

This is linear discriminant analysis in the teacher's output space, streamed; kin to SLDA
(Hayes and Kanan 2020) and RanDumb (Prabhu et al. 2024). With ``views`` students are linear
(`pecil.pec.views`), in closed form as well.
"""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pecil.pec.base import NOTHING, ErrorClassifier, count, grouped, one_of
from pecil.pec.inputs import check_labels, check_samples
from pecil.pec.machine import in_full, most, one_thread, uninterrupted
from pecil.pec.scatter import Factor, Scatter
from pecil.pec.teacher import CustomTeacher
from pecil.teachers import RECIPES, FeatureTeacher, Filters, RandomFeatures, Recipe, Synthetic
from pecil.teachers.base import weights_of

FOR_PICTURES, OTHERWISE = 11_200_000, 1_000_000  # numbers that a model holds by default
ALONE, SMALL = 4, 1500  # samples below which, and features up to which, one thread is enough
SMALLEST = 4  # pixels of a side for which filters make sense
HELD = 4096  # samples whose features are held at a time
GAUGED = 128  # samples of a class whose errors are taken in one call
FEW = 16  # of a small first batch are measured
GAUGE_EVERY = 8  # single samples: one in so many
ENOUGH = 32  # errors for a threshold, even if some were measured long ago
TEMPERS = np.geomspace(0.05, 2, 60)  # of predict_proba, in question
USUAL_TEMPER, PRIOR_WEIGHT = 0.4, 4.0  # where and how firmly the temper starts
TEACHER, VIEWS = range(2)  # uses of the seed


class WhitenedPEC(ErrorClassifier):
    """Learn classes from a single pass, exactly: no learning rate, no buffer, no forgetting.

    A frozen teacher turns a sample into D features; a class is the mean of its features, and
    all classes share one covariance. The class with the smallest whitened error wins. Errors
    do not depend on the order of the samples or on how they come in batches (beyond rounding),
    and models trained apart, on any samples, merge into what training together gives; only the
    temper of probabilities and the novelty threshold rest on what was met on the way.

    Parameters
    ----------
    teacher : str, recipe or callable
        "natural" (filters for photographs), "strokes" (for drawings and handwriting), "signs"
        (for signs of any colour on any ground), "relu" or "rbf" (random features of vectors),
        "identity" (inputs are embeddings already); "synthetic", "synthetic-strokes" or
        "synthetic-signs" (a network trained on synthetic pictures, filters beside it); a
        :class:`~pecil.teachers.Filters`, :class:`~pecil.teachers.RandomFeatures` or
        :class:`~pecil.teachers.Synthetic` of your own; or any callable, say a pre-trained
        ``torch.nn.Module``, that maps samples (n, *input_shape) to (n, D).
        "auto" takes "natural" for colour images, "strokes" for grey ones, "rbf" for vectors.
    memory : float, optional
        Numbers that the model may hold: D becomes the largest for which the upper triangle of
        the covariance, ``expected_classes`` students and the teacher's weights, if it has any,
        fit.
        By default 11.2 million for pictures but drawings, else 1 million.
    dim : int, optional
        D itself, instead of ``memory``; of images what fits into it, since each filter gives
        several features. "identity" has a D of its own whatever is asked for, and so has a
        callable, with which neither may be given.
    views : int
        k random mixtures of a sample's features from which each class's student predicts all of
        them: k·D numbers more for each class. 0: students are constants.
    trust : float
        How far such students are trusted, from 0 (as if they were constants) to 1. Errors and
        predictions take it as it is when they are asked for; the temper of probabilities and the
        novelty threshold are those of the time of learning.
    expected_classes : int
        Classes that ``memory`` is to hold; more may come, each takes D·(1 + views) numbers.
    mirror : bool, optional
        Whether mirror images belong to the same class; by default what the teacher says:
        yes for "natural" and "synthetic", no for those of strokes and signs.
    shrinkage : "oas" or float
        a in Σ̃: the oracle-approximating one, or a number between 0 and 1.
    mean, std : float or sequence, optional
        Inputs become ``(x − mean) / std``, one number or one per channel (or feature).
    channels : {"auto", "first", "last"}
        The channel axis of four-dimensional input.
    random_state : int, RandomState or None
        Seed of the teacher. Models must share it to be merged.
    device : str or torch.device
        "auto": the GPU if there is one.

    Attributes
    ----------
    classes_ : ndarray
        Known labels, sorted where they can be, else in order of arrival.
    input_shape_ : tuple
        (features,) or (channels, height, width).
    dim_ : int
        Features (D).
    n_parameters_ : int
        Numbers that the model holds: D(D + 1)/2, D·(1 + views) for each class, and the teacher's
        weights; a teacher drawn from the seed has none.
    shrinkage_ : float
        a, as it is now.
    temper_ : float
        What the discriminants are multiplied by in ``predict_proba``.
    seed_ : int
        What ``random_state`` came to.
    threshold_ : float
        Novelty above which ``predict(reject_as=…)`` rejects; set by ``calibrate``.

    Notes
    -----
    uint8 input is divided by 255. An update costs O(D²) a sample in batches. Predictions rest on
    a Cholesky factor, O(D³), made when they are asked for after updates: one for max(256, D/8)
    samples, and some more in the beginning, while the shrinkage settles. A stream which alternates
    updates and predictions pays O(D²) for each on average.

    References
    ----------
    Zając, Tuytelaars, van de Ven. Prediction Error-based Classification for
    Class-Incremental Learning. ICLR 2024.
    Hayes, Kanan. Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis.
    CVPR Workshops 2020.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> model = WhitenedPEC(dim=400, mean=8, std=8)
    >>> for label in range(10):                      # one class after another
    ...     model = model.partial_fit(X[:1500][y[:1500] == label], y[:1500][y[:1500] == label])
    >>> round(model.score(X[1500:], y[1500:]), 2)
    0.95
    """

    LASTING = ("teacher", "memory", "dim", "views", "expected_classes", "mirror", "mean", "std")

    def __init__(
        self,
        *,
        teacher: str | Recipe | Callable[[Tensor], Tensor] = "auto",
        memory: float | None = None,
        dim: int | None = None,
        views: int = 0,
        trust: float = 0.15,
        expected_classes: int = 10,
        mirror: bool | None = None,
        shrinkage: str | float = "oas",
        mean: Any = None,
        std: Any = None,
        channels: str = "auto",
        random_state: Any = 0,
        device: str | torch.device = "auto",
    ) -> None:
        self.teacher = teacher
        self.memory = memory
        self.dim = dim
        self.views = views
        self.trust = trust
        self.expected_classes = expected_classes
        self.mirror = mirror
        self.shrinkage = shrinkage
        self.mean = mean
        self.std = std
        self.channels = channels
        self.random_state = random_state
        self.device = device

    _teacher: FeatureTeacher | CustomTeacher
    _scatter: Scatter
    _excess: NDArray[np.float64]
    """Confidence minus right answers for each temper, on samples that were about to be learned."""

    # --------------------------------------------------------------------- learning

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from scratch.

        Parameters
        ----------
        X : array-like or Tensor
            (n, features), (n, h, w), (n, h, w, c) or (n, c, h, w).
        y : array-like of n hashable labels
        """
        return self._learn(X, y, first=True)

    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> Self:
        """Go on learning: one sample or many, of known classes or new ones.

        Parameters
        ----------
        X : array-like or Tensor
        y : array-like of n hashable labels
        classes : ignored
            New classes need no announcement; here for scikit-learn's sake.
        """
        return self._learn(X, y, first=not hasattr(self, "classes_"))

    def _learn(self, X: ArrayLike, y: ArrayLike, first: bool) -> Self:
        self._check_parameters()
        with self._unchanged_on_error():
            raw = check_samples(self, X, reset=first, layout=self.channels)
            groups = grouped(check_labels(y, len(raw)))
            if first:
                self._start()
                if isinstance(self._recipe(), RandomFeatures):
                    self._warn_of_scale(raw)
            elif len(raw) > self._held():
                self._keep_the_old()
            with one_thread(self._small(len(raw))):
                return self._take_in(raw, groups)

    def _keep_the_old(self) -> None:
        """Go on with copies, so that a failure half-way can put the originals back."""
        super()._keep_the_old()
        self._scatter, self._excess = self._scatter.handed_on(), self._excess.copy()

    def _take_in(self, raw: Any, groups: dict[Any, NDArray[np.intp]]) -> Self:
        """Learn validated samples: up to a chunk of them at once, after all their features.

        All new classes begin before errors are measured: none can be without a mean, and they are
        told best when the covariance knows all classes.
        """
        chunk, heads, rest = self._held(), {}, dict(groups)
        for label, at in groups.items():
            if not self._count(label):
                head = len(at) - max(len(at) // 8, min(len(at) // 2, FEW))
                heads[label], rest[label] = at[:head], at[head:]
        parts = [(label, at, 0) for label, at in heads.items()]
        parts += [(label, at, 1 if label in heads else GAUGE_EVERY) for label, at in rest.items()]
        asked = (
            (label, self._features(raw, at[start : start + chunk]), every)
            for label, at, every in parts
            for start in range(0, len(at), chunk)
        )
        if len(raw) > chunk:
            return self._take_all(asked)
        answers = list(asked)
        with uninterrupted():
            return self._take_all(answers)

    def _count(self, label: Any) -> int:
        return self._scatter.counts[self._slots[label]] if label in self._slots else 0

    def _take_all(self, asked: Iterable[tuple[Any, Tensor, int]]) -> Self:
        known = len(self._labels)
        for label, features, every in asked:
            if label not in self._slots:
                self._add_class(label)
                self._scatter.grow()
            self._take(self._slots[label], features, every)
        if len(self._labels) > known:
            self._name_classes()
        return self

    def _features(self, raw: Any, at: Any) -> Tensor:
        """Return the teacher's outputs for some samples."""
        return self._teacher(self._tensor(raw[at]))

    def _small(self, n: int) -> bool:
        """Whether other threads are no help with n samples."""
        return n < ALONE and self.dim_ <= SMALL and not isinstance(self._teacher, CustomTeacher)

    def _held(self) -> int:
        """Return how many samples' features are held at a time."""
        room = most(self.device_) // max(self.n_features_in_, self.dim_)
        return max(1, min(HELD, room))

    def _take(self, slot: int, features: Tensor, every: int) -> None:
        """Learn samples of one class; take some of their errors just before they are learned.

        Of a few samples every so many-th of the class is measured, none if that is 0.
        """
        scatter = self._scatter
        first, step = 0, max(1, len(features) // GAUGED)
        if len(features) < every:
            first, step = -scatter.counts[slot] % every, every
        if every and len(some := features[first::step][:GAUGED]):
            self._gauge(slot, some)
        scatter.add(slot, features)
        self._seen[slot] = scatter.counts[slot]

    def _gauge(self, slot: int, features: Tensor) -> None:
        """Measure coming samples of a class: their errors, and how sure one may be of classes.

        Of the latter, how far confidence is ahead of the right answers is kept for each temper in
        question: the temper that brings them together is the right one. A class tells only once
        the covariance knows it; what was measured with fewer samples counts less.
        """
        factor, counts = self._scatter.gauge(self._shrinkage, slot)
        self._excess *= counts
        if 2 * factor.known(slot) < self._scatter.counts[slot]:
            return
        means = self._scatter.means
        squares = factor.quadratic(features - means[slot]) * factor.scale
        changes = self._changes(factor, features - means.mean(0), means - means.mean(0))
        errors = ((squares + changes[:, slot]) / self.dim_).cpu().numpy()
        self._remember(slot, np.stack([errors, np.full(len(errors), factor.total)], 1))
        if len(means) > 1:
            weights = factor.weights() * factor.scale
            scores = (features - means.mean(0)) @ weights.T
            scores -= ((0.5 * means - means.mean(0)) * weights).sum(1) + 0.5 * changes
            tempered = scores.unsqueeze(2) * torch.from_numpy(TEMPERS).to(scores.device)
            surest = tempered.softmax(1).amax(1).sum(0).cpu().numpy()
            self._excess += surest - int((scores.argmax(1) == slot).sum())

    NO_ERRORS = np.empty((0, 2))
    """Of errors, each with the number of samples in the covariance that measured it."""

    def _latest(self) -> NDArray[np.float64]:
        """Return errors measured by a covariance of at least a quarter of all samples, if enough.

        A covariance of few samples measures badly, most of all classes that it does not know.
        """
        errors, samples = super()._latest().T
        if len(errors) <= ENOUGH:
            return errors
        least = min(self._scatter.total / 4, np.partition(samples, -ENOUGH)[-ENOUGH])
        return errors[samples >= least]

    # ---------------------------------------------------------------------- scoring

    @property
    def _shrinkage(self) -> float | None:
        return None if self.shrinkage == "oas" else float(self.shrinkage)

    def _class_errors(self, raw: Any) -> NDArray[np.float64]:
        """(h − g_c)ᵀ Σ̃⁻¹ (h − g_c) / D: about 1 for a sample of class c."""
        relative, own = self._distances(raw, whole=True)
        return np.maximum(relative + own[:, None], 0.0) / self.dim_

    def _distances(self, raw: Any, whole: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return errors less hᵀΣ̃⁻¹h, (n, slots), and if ``whole`` that, (n,)."""
        with one_thread(self._small(len(raw))):
            factor = self._scatter.factor(self._shrinkage)
            scale = factor.scale
            centre = self._scatter.means.mean(0)  # distances do not care, rounding does
            weights = factor.weights() * scale  # Σ̃⁻¹ m_c
            weights = weights - weights.mean(0)
            means = self._scatter.means - centre
            own_means = (means * weights).sum(1)
            relative, own = np.empty((len(raw), len(means))), np.zeros(len(raw))
            chunk = self._held()
            for start in range(0, len(raw), chunk):
                some = slice(start, start + chunk)
                features = self._features(raw, some) - centre.float()
                with in_full:
                    products = features @ weights.float().T
                changes = self._changes(factor, features, means)
                relative[some] = (own_means - 2 * products + changes).cpu().numpy()
                if whole:
                    own[some] = (factor.quadratic(features) * scale).cpu().numpy()
            return relative, own

    def _changes(self, factor: Factor, features: Tensor, means: Tensor) -> Tensor:
        """Return by how much errors differ from those of constant students, (n, slots)."""
        if factor.students is None:
            return features.new_zeros(1, len(means))
        return factor.students.changes(features, means, float(self.trust))

    def predict(self, X: ArrayLike, *, reject_as: Any = NOTHING) -> NDArray[Any]:
        """Return the label with the smallest error for each sample.

        Parameters
        ----------
        X : array-like or Tensor of n samples
        reject_as : object, optional
            If given, the answer for samples that belong to none of the known classes:
            those whose :meth:`novelty` exceeds ``threshold_`` (see :meth:`calibrate`).

        Returns
        -------
        ndarray of n labels
        """
        if reject_as is not NOTHING:
            return super().predict(X, reject_as=reject_as)
        scores = self.discriminants(X)
        return self.classes_[scores.argmax(1)]

    def discriminants(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return −½ D·error up to a term that x alone sets: h(x)·w_c − ½ m_c·w_c, (n, n_classes).

        The cheap part of the errors: O(D) for a class, O(kD) with k views, instead of O(D²) for a
        sample.
        """
        raw = self._checked(X)
        relative, _ = self._distances(raw, whole=False)
        return -0.5 * relative[:, self._columns]

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the discriminants; of two classes the difference, positive for the second."""
        scores = self.discriminants(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return class probabilities: a softmax of the discriminants, tempered to be calibrated.

        Plain discriminants are overconfident: features are not normal, and means are known up to
        Σ/n_c only. How much so is measured on the stream itself, on samples that are about to
        be learned.
        """
        scores = self.discriminants(X) * self.temper_
        scores -= scores.max(1, keepdims=True)
        odds = np.exp(scores)
        return odds / odds.sum(1, keepdims=True)

    @property
    def temper_(self) -> float:
        """What the discriminants are multiplied by in ``predict_proba``: 1 would be Bayes' rule."""
        check_is_fitted(self, "classes_")
        usual = PRIOR_WEIGHT * np.log(TEMPERS / USUAL_TEMPER)
        return float(TEMPERS[np.argmin(np.abs(self._excess + usual))])

    # ------------------------------------------------------------- merging, forgetting

    def merge(self, other: "WhitenedPEC") -> Self:
        """Take in a model trained apart, on any samples: as if trained together.

        Parameters
        ----------
        other : WhitenedPEC
            Fitted, with the same seed and settings; it may know the same classes.
        """
        from pecil.pec.merging import check_mergeable

        check_mergeable(self, other)
        with self._whole_or_not():
            self._forget_threshold()
            return self._join(other)

    def _join(self, other: "WhitenedPEC") -> Self:
        for label in other._labels:
            if label not in self._slots:
                self._add_class(label)
                self._scatter.grow()
        slots = [self._slots[label] for label in other._labels]
        self._scatter.merge(other._scatter, slots)
        for slot, recent in zip(slots, other._recent, strict=True):
            self._seen[slot] = self._scatter.counts[slot]
            self._remember(slot, recent)
        self._excess = self._excess + other._excess
        self._name_classes()
        return self

    def unlearn(self, other: "WhitenedPEC") -> Self:
        """Take the samples of another model out again: the inverse of :meth:`merge`.

        The way to remove a class, a client or a day exactly: keep a model of it.

        Parameters
        ----------
        other : WhitenedPEC
            Trained on a part of this model's samples, with the same seed and settings.
        """
        from pecil.pec.merging import check_mergeable

        check_mergeable(self, other, "unlearn")
        left = self.samples_seen_
        for label, n in other.samples_seen_.items():
            if n > left.get(label, 0):
                raise ValueError(
                    f"cannot unlearn {n} samples of {label!r}: this model has seen "
                    f"{left.get(label, 0)}"
                )
            left[label] -= n
        if not any(left.values()) or other._scatter.total >= self._scatter.total:
            raise ValueError("cannot unlearn everything: no class would be left")
        slots = [self._slots[label] for label in other._labels]
        with self._whole_or_not():
            self._scatter.merge(other._scatter, slots, sign=-1)
            for slot in sorted(slots, reverse=True):
                self._seen[slot] = self._scatter.counts[slot]
                if not self._seen[slot]:
                    self._drop(slot)
            self._excess = self._excess - other._excess
            self._forget_threshold()
            self._name_classes()
        return self

    def forget(self, label: Any) -> Self:
        """Remove a class: its mean and its count, so that it is never predicted again.

        What its samples told about the covariance, without saying whose they were, stays; to
        take that out too, :meth:`unlearn` a model of the class. A ``threshold_`` set by
        ``calibrate`` goes, since it may rest on that class.
        """
        self._forget(label)
        return self

    def _drop(self, slot: int) -> None:
        self._remove_class(slot)
        self._scatter.remove(slot)

    # ----------------------------------------------------------------- saving, loading

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model into one safetensors file, whole or not at all."""
        from pecil.pec.saving import save

        save(self, path)

    @property
    def _teachers(self) -> list[Any]:
        seen = self._scatter.seen
        return [self._teacher, seen] if seen.n else [self._teacher]

    def _state(self, optimizer: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        matrix, summary = self._scatter.matrix, self._scatter
        rows = [row[: k + 1] for k, row in enumerate(matrix.unbind())]
        values: dict[str, Any] = {"total": summary.total, "gauged": summary.gauged}
        values["excess"] = self._excess.tolist()
        tensors = {"means": summary.means, "scatter": torch.cat(rows)}
        if summary.seen.n:
            tensors["seen"] = summary.seen.own
        return values, tensors

    def _set_state(self, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        matrix = torch.zeros(self.dim_, self.dim_)
        for k, row in enumerate(tensors["scatter"].split(list(range(1, self.dim_ + 1)))):
            matrix[k, : k + 1] = row
        matrix += matrix.tril(-1).T
        self._excess = np.asarray(values["excess"])
        self._scatter.gauged = values["gauged"]
        means, matrix = (part.to(self.device_) for part in (tensors["means"], matrix))
        self._scatter.restore(self._seen, means, matrix, values["total"])
        no_views = torch.zeros(len(self._seen), 0, self.dim_)
        self._scatter.seen.restore(tensors.get("seen", no_views), matrix)

    # ------------------------------------------------------------------------ set-up

    @property
    def dim_(self) -> int:
        """Features (D)."""
        return self._teacher.output_dim

    @property
    def n_parameters_(self) -> int:
        """Numbers that the model holds."""
        check_is_fitted(self, "classes_")
        students = len(self._labels) * self.dim_ * (1 + self._scatter.seen.n)
        return self.dim_ * (self.dim_ + 1) // 2 + students + weights_of(self._recipe())

    @property
    def shrinkage_(self) -> float:
        """The shrinkage a, as it is now."""
        check_is_fitted(self, "classes_")
        return self._scatter.factor(self._shrinkage).shrinkage

    def _start(self) -> None:
        self._set_up()
        recipe = self._recipe()
        if not hasattr(recipe, "teacher"):
            self._begin(CustomTeacher(recipe, self.input_shape_, self.device_))
            return
        dim, seed = self._dim(recipe), self._seed(TEACHER, 0)
        try:
            self._begin(recipe.teacher(self.input_shape_, dim, seed, self.device_))
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            raise MemoryError(
                f"{dim:,} features, whose covariance takes {dim**2 / 2**28:,.1f} GiB, need more "
                "room than there is: give less memory or a smaller dim"
            ) from error

    def _begin(self, teacher: FeatureTeacher | CustomTeacher) -> None:
        self._teacher = teacher
        self._scatter = Scatter(self.dim_, self.device_, self._drawn_views())
        self._excess = np.zeros(len(TEMPERS))

    def _drawn_views(self) -> Tensor | None:
        """Draw V (D, k), on the CPU; None if students are constants."""
        if not self.views:
            return None
        if self.views > self.dim_:
            raise ValueError(
                f"views must be at most the number of features, {self.dim_}, but it is {self.views}"
            )
        generator = torch.Generator().manual_seed(self._seed(VIEWS, 0))
        views = torch.randn(self.dim_, int(self.views), generator=generator)
        return views / math.sqrt(self.dim_)

    def _recipe(self) -> Any:
        """Return the teacher's recipe, or the callable that is the teacher."""
        recipe: Any = self.teacher
        if isinstance(recipe, str):
            recipe = RECIPES[self._kind() if recipe == "auto" else recipe]
        if self.mirror is None:
            return recipe
        if not isinstance(recipe, Filters | Synthetic):
            raise ValueError(
                f"mirror={self.mirror} is for teachers of images, but teacher is {self.teacher!r}"
            )
        return replace(recipe, mirror=bool(self.mirror))

    def _kind(self) -> str:
        """Return what "auto" stands for."""
        if len(self.input_shape_) == 1 or min(self.input_shape_[1:]) < SMALLEST:
            return "rbf"
        return "strokes" if self.input_shape_[0] == 1 else "natural"

    def _dim(self, recipe: Recipe) -> int:
        """Return the largest D whose triangle and students fit the memory: D(D+1)/2 + C·(1+k)·D."""
        if self.dim is not None:
            return int(self.dim)
        pictures = isinstance(recipe, Filters) and recipe.prior != "strokes"
        pictures = pictures or isinstance(recipe, Synthetic)
        memory = float(self.memory or (FOR_PICTURES if pictures else OTHERWISE))
        half = self.expected_classes * (1 + int(self.views)) + 0.5
        weights = weights_of(recipe)
        dim = int(math.sqrt(half * half + 2 * max(0.0, memory - weights)) - half)
        if dim < 1:
            raise ValueError(
                f"memory={self.memory!r} is too small: one feature and {self.expected_classes} "
                f"classes take {int(half) + 1 + weights} numbers"
                + (f", {weights} of them the teacher's" if weights else "")
            )
        return dim

    def _check_parameters(self) -> None:
        if isinstance(self.teacher, str):
            one_of("teacher", self.teacher, ("auto", *RECIPES))
        elif not callable(self.teacher) and not callable(getattr(self.teacher, "teacher", None)):
            raise ValueError(
                f"teacher must be one of auto, {', '.join(RECIPES)}, a recipe or a callable, but "
                f"it is {self.teacher!r}"
            )
        self._check_size()
        one_of("channels", self.channels, ("auto", "first", "last"))
        _ = self.device_
        if self.mirror not in (None, True, False):
            raise ValueError(f"mirror must be None, True or False, but it is {self.mirror!r}")
        if not (_number(self.trust) and 0 <= float(self.trust) <= 1):
            raise ValueError(f"trust must be a number between 0 and 1, but it is {self.trust!r}")
        fits = _number(self.shrinkage) and 0 <= float(self.shrinkage) <= 1
        if self.shrinkage != "oas" and not fits:
            raise ValueError(
                f"shrinkage must be 'oas' or a number between 0 and 1, but it is {self.shrinkage!r}"
            )

    def _check_size(self) -> None:
        count("expected_classes", self.expected_classes)
        if isinstance(self.views, bool) or not isinstance(self.views, Integral) or self.views < 0:
            raise ValueError(
                f"views must be a whole number of at least 0, but it is {self.views!r}"
            )
        if self.dim is not None:
            count("dim", self.dim)
        if self.memory is not None and self.dim is not None:
            raise ValueError("give either memory or dim: the memory sets the dimension")
        if self.memory is not None and not (_number(self.memory) and 0 < self.memory < math.inf):
            raise ValueError(f"memory must be a positive number, but it is {self.memory!r}")
        given = self.memory is not None or self.dim is not None
        if given and callable(self.teacher):
            raise ValueError("a callable teacher sets the dimension: give neither memory nor dim")


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
