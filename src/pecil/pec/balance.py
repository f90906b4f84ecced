"""Balancing: one factor for each class, so that the errors of different classes compare.

A student that has learned from more samples errs less, and where classes are of unequal size the
largest wins too often. Zając, Tuytelaars and van de Ven (ICLR 2024, Section 4.4) multiply errors
before they are compared, by factors that make the most of a few samples with labels (*Buffer
balancing*)::

    predict  argmin_c  s_c · error_c(x)
    balance  max_l  share of samples predicted right,   s_c = exp(l_c)      by CMA-ES

Errors are computed once; the search multiplies and compares. The paper tells neither how many
generations it takes (here 100) nor what becomes of ties (here :func:`merits` breaks them; left to
chance, the search may stay where it began).
"""

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from pecil.pec.base import SHARPNESS, ErrorClassifier, count, decision
from pecil.pec.inputs import check_labels

DEVIATION, POPULATION = 0.001, 100  # of CMA-ES, as in the paper
HELD = 2**22  # products held at a time


class Balanced(ClassifierMixin, BaseEstimator):
    """A fitted model whose class errors are multiplied by factors before they are compared.

    Parameters
    ----------
    model : PEC or WhitenedPEC
        Fitted; it is used as it is and never changed.
    generations : int
        Of the search, each of 100 candidates.
    random_state : int
        Seed of the search.

    Attributes
    ----------
    scales_ : ndarray of shape (n_classes,)
        The factors s_c, in the order of ``classes_``; their geometric mean is 1, and so is the
        factor of a class of which ``fit`` saw nothing.
    classes_ : ndarray
        The model's classes.

    References
    ----------
    Zając, Tuytelaars, van de Ven. Prediction Error-based Classification for
    Class-Incremental Learning. ICLR 2024.
    Hansen, Ostermeier. Completely Derandomized Self-Adaptation in Evolution Strategies.
    Evolutionary Computation 9, 2001.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.datasets import load_digits
    >>> from pecil import PEC
    >>> X, y = load_digits(return_X_y=True)
    >>> few = np.flatnonzero((y[:1300] > 1) & (np.arange(1300) % 4 > 0))  # 0 and 1: all there are
    >>> kept = np.setdiff1d(np.arange(1300), few)
    >>> model = PEC(lr=0.01, teacher_width=1000, mean=8, std=8).fit(X[kept], y[kept])
    >>> balanced = Balanced(model).fit(X[1300:1500], y[1300:1500])
    >>> balanced.score(X[1500:], y[1500:]) > model.score(X[1500:], y[1500:])
    True
    """

    def __init__(
        self, model: ErrorClassifier, *, generations: int = 100, random_state: int = 0
    ) -> None:
        self.model = model
        self.generations = generations
        self.random_state = random_state

    classes_: NDArray[Any]
    scales_: NDArray[np.float64]

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Find the factors with which the model is right most often; it learns nothing itself.

        Parameters
        ----------
        X : array-like or Tensor
            Samples such as a small buffer holds.
        y : array-like of n labels
            Each known to the model.
        """
        count("generations", self.generations)
        check_is_fitted(self.model, "classes_")
        classes = self.model.classes_
        column = {label: k for k, label in enumerate(classes.tolist())}
        errors = self.model.errors(X)
        labels = check_labels(y, len(errors))
        if unknown := [label for label in labels if label not in column]:
            raise ValueError(
                f"y must hold classes that the model knows, {', '.join(map(repr, column))}, but "
                f"it holds {unknown[0]!r}"
            )
        wanted = np.array([column[label] for label in labels])
        self.scales_ = search(errors, wanted, self.generations, self.random_state)
        self.classes_ = classes.copy()
        return self

    def errors(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the model's errors times the factors, (n, n_classes)."""
        check_is_fitted(self, "scales_")
        if self.model.classes_.tolist() != self.classes_.tolist():
            raise ValueError(
                f"the model's classes have changed since fit, from {self.classes_.tolist()} to "
                f"{self.model.classes_.tolist()}: balance it again"
            )
        return self.model.errors(X) * self.scales_

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the label with the smallest product for each sample."""
        nearest = self.errors(X).argmin(1)
        return self.classes_[nearest]

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the negative products; of two classes log(first / second), as ``PEC`` does."""
        return decision(self.errors(X))

    score = ErrorClassifier.score


def balance(
    model: ErrorClassifier,
    X: ArrayLike,
    y: ArrayLike,
    *,
    generations: int = 100,
    random_state: int = 0,
) -> Balanced:
    """Return a classifier that balances a fitted model's classes; the model stays as it is.

    Parameters
    ----------
    model : PEC or WhitenedPEC
    X : array-like or Tensor
        Samples with labels, such as a small buffer holds.
    y : array-like of n labels
    generations, random_state : int
        Of the search: see :class:`Balanced`.

    Examples
    --------
    >>> from pecil import PEC
    >>> model = PEC(teacher_width=20, device="cpu").fit([[0.0], [1.0], [5.0]], [0, 0, 1])
    >>> balance(model, [[0.0], [5.0]], [0, 1]).predict([[0.0], [5.0]]).tolist()
    [0, 1]
    """
    return Balanced(model, generations=generations, random_state=random_state).fit(X, y)


def search(
    errors: NDArray[Any],
    wanted: NDArray[np.intp],
    generations: int = 100,
    seed: int = 0,
    *,
    ties: bool = True,
) -> NDArray[np.float64]:
    """Find one factor for each class by CMA-ES: the middle of the last generation.

    Samples tell how the classes among them compare, and nothing of any other: of those classes
    alone the factors are looked for, with a geometric mean of 1.

    Parameters
    ----------
    errors : ndarray of shape (n, n_classes)
    wanted : ndarray of n columns
        The right class of each sample.
    generations, seed : int
    ties : bool
        Whether ties are broken; see :func:`merits`.
    """
    CMA = _cma()
    scales = np.ones(errors.shape[1])
    present, wanted = np.unique(wanted, return_inverse=True)
    if len(present) < 2:
        return scales
    logs = np.log(np.maximum(errors.T[present], np.finfo(np.float32).tiny)).astype(np.float32)
    optimizer = CMA(np.zeros(len(present)), DEVIATION, seed=seed, population_size=POPULATION)
    for _ in range(generations):
        asked = [optimizer.ask() for _ in range(POPULATION)]
        found = merits(logs, wanted, np.array(asked, dtype=np.float32))
        told = found if ties else np.floor(found)
        optimizer.tell(list(zip(asked, (-told).tolist(), strict=True)))
    scales[present] = np.exp(optimizer.mean - optimizer.mean.mean())
    return scales


def merits(
    logs: NDArray[np.float32], wanted: NDArray[np.intp], candidates: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Count the samples that each candidate gets right; a fraction, below a half, breaks ties.

    The first steps of the search are so small that no prediction of a few samples may change.
    The fraction is half the mean probability of the right class against its strongest rival, by
    the rule of ``predict_proba``.

    Parameters
    ----------
    logs : ndarray of shape (n_classes, n)
        Of the errors.
    wanted : ndarray of n columns
    candidates : ndarray of shape (population, n_classes)
        Of l = log s.
    """
    total = np.zeros(len(candidates))
    held = max(1, HELD // candidates.size)
    for start in range(0, len(wanted), held):
        mine = wanted[start : start + held]
        rivals, place = logs[:, start : start + held].copy(), np.arange(len(mine))
        own = rivals[mine, place] + candidates[:, mine]  # (population, part)
        rivals[mine, place] = np.inf
        margins = (rivals + candidates[:, :, None]).min(1) - own
        sure = (1 + np.tanh(margins * (SHARPNESS / 2))) / 2  # the logistic function
        total += (margins >= 0).sum(1) + sure.sum(1) / (2 * len(wanted))
    return total


def _cma() -> Any:
    try:
        from cmaes import CMA
    except ImportError as error:
        raise ImportError('balancing needs cmaes: pip install "pecil[balance]"') from error
    return CMA
