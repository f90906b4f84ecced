"""What all error-based classifiers share: the smallest prediction error wins."""

import contextlib
import copy
import os
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pecil.pec.inputs import (
    check_labels,
    check_samples,
    check_statistics,
    in_order,
    label_array,
    plain,
    to_tensor,
    warn_of_scale,
)

NOTHING = type("Nothing", (), {"__repr__": lambda self: "<nothing>"})()
RECENT = 256  # errors kept for each class, to tell the ordinary from the novel
LOOKED_AT = 256  # samples, to tell whether inputs are out of scale
ACCEPTED = 0.95  # share of known samples that the default threshold accepts
SHARPNESS = 10.0  # of predict_proba


class ErrorClassifier(ClassifierMixin, BaseEstimator):
    """A classifier that gives every class an error and picks the class of the smallest.

    A subclass writes :meth:`_class_errors`, keeps its classes in slots, in order of arrival,
    and tells of each new one (:meth:`_name_classes`) and of each learned sample's error
    (:meth:`_remember`); for files, :meth:`_state` and :meth:`_set_state`.
    """

    LASTING: ClassVar[tuple[str, ...]]
    """Parameters that a model keeps as they were when it began to learn."""

    classes_: NDArray[Any]
    threshold_: float
    input_shape_: tuple[int, ...]
    n_features_in_: int
    seed_: int
    _statistics: tuple[NDArray[Any] | None, NDArray[Any] | None]
    _settings: dict[str, Any]

    @abstractmethod
    def _class_errors(self, raw: Any) -> NDArray[np.float64]:
        """Return the error of each slot, (n, slots), for validated samples."""

    @abstractmethod
    def _check_parameters(self) -> None:
        """Raise ValueError for parameters that make no sense."""

    @abstractmethod
    def _start(self) -> None:
        """Draw the teacher; no classes yet."""

    @abstractmethod
    def _drop(self, slot: int) -> None:
        """Remove a class."""

    @property
    @abstractmethod
    def _teachers(self) -> list[Any]:
        """All teachers; each has a ``checksum``."""

    @abstractmethod
    def _state(self, optimizer: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a file must hold beside labels and parameters: plain values, tensors."""

    @abstractmethod
    def _set_state(self, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take over what :meth:`_state` returned; labels are in place."""

    # ------------------------------------------------------------------ predictions

    def errors(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the prediction error of every class.

        Parameters
        ----------
        X : array-like or Tensor of n samples

        Returns
        -------
        ndarray of shape (n, n_classes)
            Columns follow ``classes_``.
        """
        return self._class_errors(self._checked(X))[:, self._columns]

    def _checked(self, X: ArrayLike) -> Any:
        """Validate samples to be scored."""
        check_is_fitted(self, "classes_")
        return check_samples(self, X, reset=False, layout=self.channels)

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the negative errors; larger means more likely.

        As scikit-learn has it, two classes give a single number, positive for the second:
        log(error of the first / error of the second). :meth:`errors` always has one column
        for each class.
        """
        return decision(self.errors(X))

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
        errors = self.errors(X)
        labels = self.classes_[errors.argmin(1)]
        if reject_as is NOTHING:
            return labels
        novel = errors.min(1) > self._threshold()
        answer = [reject_as if new else label for new, label in zip(novel, labels, strict=True)]
        return label_array([plain(label) for label in answer])

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: Any = None) -> float:
        """Return the accuracy, for labels of any kind."""
        predicted = self.predict(X).tolist()
        wanted = check_labels(y, len(predicted))
        texts = {isinstance(label, str) for label in wanted}
        if wanted and texts.isdisjoint(isinstance(label, str) for label in self.classes_.tolist()):
            raise ValueError(
                f"y must hold labels of the kind that was learned, such as "
                f"{self.classes_.tolist()[0]!r}, but it holds {wanted[0]!r}"
            )
        right = [one == other for one, other in zip(predicted, wanted, strict=True)]
        return float(np.average(right, weights=sample_weight))

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return class probabilities, proportional to error^(−10): a scale-free softmax.

        They rank classes as the errors do; they are not calibrated.
        """
        errors = np.maximum(self.errors(X), np.finfo(np.float64).tiny)
        odds = (errors.min(1, keepdims=True) / errors) ** SHARPNESS
        return odds / odds.sum(1, keepdims=True)

    # ---------------------------------------------------------------------- novelty

    def novelty(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the smallest error of any class: large for "none of the known classes"."""
        return self.errors(X).min(1)

    def score_samples(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the negative novelty, as scikit-learn's outlier detectors have it."""
        return -self.novelty(X)

    def calibrate(self, X: ArrayLike | None = None, *, quantile: float = ACCEPTED) -> Self:
        """Set ``threshold_``, above which a sample counts as none of the known classes.

        Parameters
        ----------
        X : array-like or Tensor, optional
            Samples of known classes, preferably not learned from. Without them the
            threshold comes from the stream: the errors that the last quarter of each class's
            samples (at most 256) had just before they were learned.
        quantile : float
            The share of known samples to be accepted.
        """
        check_is_fitted(self, "classes_")
        if not isinstance(quantile, Real) or not 0 <= quantile <= 1:
            raise ValueError(f"quantile must be between 0 and 1, but it is {quantile!r}")
        self.threshold_ = self._threshold(quantile) if X is None else self._from(X, quantile)
        return self

    def _from(self, X: ArrayLike, quantile: float) -> float:
        return float(np.quantile(self.novelty(X), quantile))

    def _threshold(self, quantile: float | None = None) -> float:
        if quantile is None and hasattr(self, "threshold_"):
            return self.threshold_
        latest = self._latest()
        if not len(latest):
            raise ValueError(
                "too few samples were learned to tell the ordinary from the novel: calibrate(X) "
                "with samples of known classes"
            )
        share = ACCEPTED if quantile is None else quantile
        return float(np.quantile(latest, share))

    def _latest(self) -> NDArray[np.float64]:
        """Return the errors that the last quarter of each class's samples had."""
        each = zip(self._recent, self._seen, strict=True)
        return np.concatenate([errors[-max(1, seen // 4) :] for errors, seen in each])

    # ------------------------------------------------------------- forgetting, saving

    def _forget(self, label: Any) -> None:
        check_is_fitted(self, "classes_")
        slot = self._slot_of(label)
        if len(self._labels) == 1:
            raise ValueError(f"cannot forget {label!r}: it is the only class of this model")
        with self._whole_or_not():
            self._drop(slot)
            self._name_classes()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device = "auto",
        teacher: Callable[[Tensor], Tensor] | None = None,
    ) -> Self:
        """Read a saved model; the teacher is drawn anew from its seed and checked.

        Parameters
        ----------
        path : path-like
        device : str or torch.device
        teacher : callable, optional
            The callable that the model was trained with, if it was one.
        """
        from pecil.pec.saving import load_as

        return load_as(cls, path, device=device, teacher=teacher)

    # ------------------------------------------------------------------------ set-up

    @property
    def device_(self) -> torch.device:
        """Where the model lives."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        refused = f"device must be 'auto', 'cpu' or 'cuda', but it is {self.device!r}"
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(refused) from error
        if device.type not in ("cpu", "cuda"):
            raise ValueError(refused)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {self.device!r}, but there is no GPU that torch can use")
        return device

    def _set_up(self) -> None:
        """Begin without classes: settle seed, statistics of the inputs, lasting parameters."""
        self._statistics = (
            check_statistics("mean", self.mean, self.input_shape_),
            check_statistics("std", self.std, self.input_shape_),
        )
        if isinstance(self.random_state, Integral):
            if self.random_state < 0:
                raise ValueError(
                    f"random_state must not be negative, but it is {self.random_state}"
                )
            self.seed_ = int(self.random_state)
        else:
            self.seed_ = int(check_random_state(self.random_state).randint(2**31))
        self._reset_classes()
        self._settings = {name: getattr(self, name) for name in self.LASTING}
        for name in ("mean", "std"):  # a caller's arrays may change
            self._settings[name] = copy.deepcopy(self._settings[name])

    def _seed(self, use: int, member: int) -> int:
        words = np.random.SeedSequence([self.seed_, use, member]).generate_state(1, np.uint64)
        return int(words[0] >> np.uint64(1))

    def _warn_of_scale(self, raw: Any) -> None:
        """Look at the first samples and warn if they are out of scale."""
        if self._range != "bits":  # of which a warning was given
            warn_of_scale(self._tensor(raw[:LOOKED_AT]))

    def _tensor(self, raw: Any) -> Tensor:
        return to_tensor(raw, self.device_, *self._statistics)

    @contextlib.contextmanager
    def _unchanged_on_error(self) -> Iterator[None]:
        """Put everything back that a refused or interrupted call has set."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            for name in vars(self).keys() - before.keys():
                delattr(self, name)
            for name, value in before.items():
                setattr(self, name, value)
            if hasattr(self, "classes_") and len(self.classes_) != len(self._labels):
                self._name_classes()  # all was learned when Ctrl-C was heard
            raise

    @contextlib.contextmanager
    def _whole_or_not(self) -> Iterator[None]:
        """Change copies of what was learned, and drop them if that fails or is interrupted."""
        with self._unchanged_on_error():
            self._keep_the_old()
            yield

    # ----------------------------------------------------------------- slots, labels

    def _reset_classes(self) -> None:
        self._labels: list[Any] = []
        self._slots: dict[Any, int] = {}
        self._seen: list[int] = []
        self._recent: list[NDArray[np.float64]] = []
        self._forget_threshold()

    def _add_class(self, label: Any) -> int:
        self._slots[label] = len(self._labels)
        self._labels.append(label)
        self._seen.append(0)
        self._recent.append(self.NO_ERRORS)
        return self._slots[label]

    def _keep_the_old(self) -> None:
        """Go on with copies, so that a failure half-way can put the originals back."""
        self._labels, self._seen = list(self._labels), list(self._seen)
        self._recent, self._slots = list(self._recent), dict(self._slots)

    def _remove_class(self, slot: int) -> None:
        for values in (self._labels, self._seen, self._recent):
            del values[slot]
        self._slots.clear()
        self._slots.update((label, k) for k, label in enumerate(self._labels))
        self._forget_threshold()

    def _forget_threshold(self) -> None:
        if hasattr(self, "threshold_"):
            del self.threshold_

    NO_ERRORS: NDArray[np.float64] = np.empty(0)

    def _remember(self, slot: int, errors: NDArray[np.float64]) -> None:
        """Keep the latest errors of a class, each taken before its sample was learned."""
        self._recent[slot] = np.concatenate([self._recent[slot], errors])[-RECENT:]

    def _name_classes(self) -> None:
        """Bring ``classes_`` up to date: sorted where labels can be, else by arrival."""
        self._columns = in_order(self._labels)
        self.classes_ = label_array([self._labels[k] for k in self._columns])

    def _slot_of(self, label: Any) -> int:
        if not isinstance(label, Hashable) or (label := plain(label)) not in self._slots:
            raise ValueError(f"{label!r} is not a known class; known are {self._known()}")
        return self._slots[label]

    def _known(self) -> str:
        names = ", ".join(repr(label) for label in self._labels[:20])
        return names + (f" and {len(self._labels) - 20} more" if len(self._labels) > 20 else "")

    @property
    def samples_seen_(self) -> dict[Any, int]:
        """Samples learned of each class."""
        check_is_fitted(self, "classes_")
        return dict(zip(self._labels, self._seen, strict=True))


def decision(errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the negative errors; of two classes log(error of the first / of the second)."""
    if errors.shape[1] != 2:
        return -errors
    logs = np.log(np.maximum(errors, np.finfo(np.float64).tiny))
    return logs[:, 0] - logs[:, 1]


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless a parameter is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, but it is {value!r}")


def count(name: str, value: Any) -> None:
    """Raise ValueError unless a parameter is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, but it is {value!r}")


def grouped(labels: list[Any]) -> dict[Any, NDArray[np.intp]]:
    """Return the positions of each label, labels in order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for position, label in enumerate(labels):
        groups.setdefault(label, []).append(position)
    return {label: np.asarray(at) for label, at in groups.items()}


def split_order(order: ArrayLike | None, groups: dict[Any, NDArray[np.intp]]) -> dict[Any, Tensor]:
    """Return for each label the order in which its samples come, as positions in its group.

    >>> groups = {"a": np.array([0, 2]), "b": np.array([1])}
    >>> split_order([2, 1, 0, 2], groups)
    {'a': tensor([1, 0, 1]), 'b': tensor([0])}
    """
    if order is None:
        return {label: torch.arange(len(at)) for label, at in groups.items()}
    n = sum(map(len, groups.values()))
    asked = np.asarray(order)
    if asked.ndim != 1 or (len(asked) and asked.dtype.kind not in "iu"):
        raise ValueError(
            f"order must be a row of whole numbers, but it is {asked.dtype} of shape {asked.shape}"
        )
    asked = asked.astype(np.int64)
    if len(asked) and not 0 <= asked.min() <= asked.max() < n:
        raise ValueError(
            f"order must have positions from 0 to {n - 1}, but it has some from {asked.min()} to "
            f"{asked.max()}"
        )
    group, place = np.empty(n, np.int64), np.empty(n, np.int64)
    for k, at in enumerate(groups.values()):
        group[at], place[at] = k, np.arange(len(at))
    return {
        label: torch.from_numpy(place[asked[group[asked] == k]]) for k, label in enumerate(groups)
    }
