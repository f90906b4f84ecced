"""The Gaussian-process rule that PEC approximates (Zając, Tuytelaars, van de Ven, ICLR 2024).

A Gaussian process H with covariance k, conditioned on the inputs X of a class, is uncertain where
these inputs are far; the class that leaves it least uncertain wins::

    σ²_c(x) = k(x, x) − k(x, X_c) (k(X_c, X_c) + noise·I)⁻¹ k(X_c, x)
    predict   argmin_c  σ²_c(x)                                              GPClassifier

PEC asks instead how well functions h drawn from H are predicted at x by students g that saw them
on X_c alone. Over more and more functions the average error has a limit; for students that are
linear in what they saw, g(x) = a(x)·(h(X_c) + noise), it has a closed form::

    s_B(x) = 1/B Σ_b (g_b(x) − h_b(x))²                                      gp_pec
    s_∞(x) = k(x, x) − 2 a·k(X_c, x) + aᵀ(k(X_c, X_c) + noise·I)a            expected_error

s_∞ ≥ σ²_c whatever the student is, the paper's Proposition 1, and the posterior mean reaches it:
with that student GP-PEC(B) tends to the rule above. A wide random network with d outputs is about
d functions drawn from the process with the network's own kernel, NetworkKernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Real
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.gaussian_process.kernels import RBF, Kernel
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from pecil.pec.base import count, grouped, one_of
from pecil.pec.inputs import check_labels, in_order, label_array

HELD = 1024  # samples scored at a time
JITTER = 1e-10  # share of the mean variance that makes a covariance safe to draw from

Array = NDArray[np.floating[Any]]


# ----------------------------------------------------------------------------- kernels


def _relu_moment(c: Array, s: Array, t: Array) -> Array:
    """E[relu(u)·relu(v)], for normal u and v of variances s and t and covariance c."""
    scale = np.sqrt(s * t)
    r = np.clip(c / scale, -1, 1)
    return scale * (np.sqrt(1 - r * r) + r * (np.pi / 2 + np.arcsin(r))) / (2 * np.pi)


def _gelu_moment(c: Array, s: Array, t: Array) -> Array:
    """E[gelu(u)·gelu(v)].

    gelu(u) = u·P(z < u) for a standard normal z, so this is E[u·v] where a = u − z and b = v − z'
    are both positive; u and v are linear in (a, b), up to an independent rest of covariance q.
    """
    a, b = 1 + s, 1 + t
    det = a * b - c * c
    p, q, p_ = (s * b - c * c) / det, c / det, (t * a - c * c) / det  # u ≈ pa + qb, v ≈ qa + p_b
    r = c / np.sqrt(a * b)
    root, angle = np.sqrt(1 - r * r) / (2 * np.pi), np.arcsin(r) / (2 * np.pi)
    both = 1 / 4 + angle  # P(a, b > 0)
    square = both + r * root  # E[a²; a, b > 0] / a's variance
    product = np.sqrt(a * b) * (root + r * both)  # E[ab; a, b > 0]
    return q * both + q * (p * a + p_ * b) * square + (p * p_ + q * q) * product


ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array, Array, Array], Array]]] = {
    "gelu": (lambda u: F.gelu(torch.from_numpy(u)).numpy(), _gelu_moment),
    "relu": (lambda u: np.maximum(u, 0), _relu_moment),
}


class NetworkKernel(Kernel):
    """The covariance of a random network with one infinitely wide hidden layer.

    k(x, x') = E[f(u) f(u')] with u = w·(x, 1), u' = w·(x', 1), w ~ N(0, I) and f the activation;
    normalised, u and u' are divided by their deviations, which is what a layer norm does in a
    wide layer. With GELU it is the process that PEC's teacher for vectors tends to (up to a
    factor); with ReLU and not normalised, the arc-cosine kernel of order 1.

    Parameters
    ----------
    activation : {"gelu", "relu"}
    normalise : bool

    References
    ----------
    Cho, Saul. Kernel Methods for Deep Learning. NeurIPS 2009.

    Examples
    --------
    >>> NetworkKernel("relu")([[3.0]], [[3.0], [-3.0]]).round(3)
    array([[0.5  , 0.014]])
    """

    def __init__(self, activation: str = "gelu", normalise: bool = True) -> None:
        self.activation = activation
        self.normalise = normalise

    def __call__(
        self, X: ArrayLike, Y: ArrayLike | None = None, eval_gradient: bool = False
    ) -> Any:
        """Return k(X, Y), and if asked its gradient, which is empty: nothing is to be tuned."""
        moment, (x, s) = self._part(1), self._extended(X)
        y, t = (x, s) if Y is None else self._extended(Y)
        values = moment(x @ y.T, s[:, None], t[None, :])
        return (values, np.empty((*values.shape, 0))) if eval_gradient else values

    def diag(self, X: ArrayLike) -> Array:
        """Return k(x, x) for each sample."""
        moment, (_, s) = self._part(1), self._extended(X)
        return moment(s, s, s)

    def is_stationary(self) -> bool:
        """Return False: not only the distance of two inputs matters, but where they are."""
        return False

    def features(self, weight: Array, X: ArrayLike) -> Array:
        """Return the hidden layer of a network with finitely many weights (D, features + 1)."""
        return self._part(0)(self._extended(X)[0] @ weight.T) / np.sqrt(len(weight))

    def _part(self, which: int) -> Callable[..., Array]:
        one_of("activation", self.activation, tuple(ACTIVATIONS))
        return ACTIVATIONS[self.activation][which]

    def _extended(self, X: ArrayLike) -> tuple[Array, Array]:
        """Return (x, 1), of length 1 if normalised, and its squared length."""
        x = np.atleast_2d(np.asarray(X, dtype=np.float64))
        x = np.hstack([x, np.ones((len(x), 1))])
        squares = np.einsum("nf,nf->n", x, x)
        if not self.normalise:
            return x, squares
        return x / np.sqrt(squares)[:, None], np.ones(len(x))


def _fourier(weight: Array, bias: Array, X: ArrayLike) -> Array:
    return np.sqrt(2 / len(weight)) * np.cos(np.asarray(X) @ weight.T + bias)


def random_features(
    kernel: Kernel, dim: int, n_inputs: int, random_state: Any = None
) -> Callable[[ArrayLike], Array]:
    """Draw a map φ to ``dim`` features whose products φ(x)·φ(x') average to the kernel.

    Hidden units for a :class:`NetworkKernel`, random Fourier features for RBF.

    Parameters
    ----------
    kernel : NetworkKernel or sklearn.gaussian_process.kernels.RBF
    dim : int
    n_inputs : int
        Numbers of a sample.
    random_state : int, RandomState or None
    """
    rng = check_random_state(random_state)
    if isinstance(kernel, NetworkKernel):
        return partial(kernel.features, rng.normal(size=(dim, n_inputs + 1)))
    if type(kernel) is RBF:  # other kernels of scikit-learn inherit from it
        weight = rng.normal(size=(dim, n_inputs)) / kernel.length_scale
        return partial(_fourier, weight, rng.uniform(0, 2 * np.pi, dim))
    raise ValueError(
        f"random features can be drawn for NetworkKernel and RBF, but kernel is {kernel!r}; give "
        "features as a callable, say Nystroem(…).fit(some).transform"
    )


# -------------------------------------------------------------------------- posteriors


class Posterior(Protocol):
    """A Gaussian process that was conditioned on some inputs; what was seen there is no matter."""

    def given(self, x: Array) -> Self:
        """Condition on more inputs, (n, features)."""

    def variance(self, x: Array) -> Array:
        """Return the variance (n,) at each sample."""


def _solve(triangle: Array, right: Array, upper: bool = False) -> Array:
    pair = torch.from_numpy(triangle), torch.from_numpy(np.array(right))  # a copy: may be a view
    return torch.linalg.solve_triangular(*pair, upper=upper).numpy()


@dataclass(frozen=True, eq=False)
class KernelPosterior:
    """Exact for any kernel; holds the N inputs and an N×N factor, and grows by O(N²) a sample.

    Parameters
    ----------
    kernel : Kernel
    noise : float
    inputs : ndarray of shape (N, features)
    factor : ndarray of shape (N, N)
        Lower triangle L with LLᵀ = k(X, X) + noise·I.
    """

    kernel: Any
    noise: float
    inputs: Array
    factor: Array

    @classmethod
    def prior(cls, kernel: Kernel, noise: float, n_inputs: int) -> Self:
        """Return the process before any input."""
        return cls(kernel, noise, np.empty((0, n_inputs)), np.empty((0, 0)))

    def given(self, x: Array) -> Self:
        """Condition on more inputs: L gets new rows."""
        below = self._half(x).T
        inner = self.kernel(x) + self.noise * np.eye(len(x)) - below @ below.T
        try:
            corner = np.linalg.cholesky(inner)
        except np.linalg.LinAlgError as error:
            raise ValueError(
                f"noise={self.noise:g} is too small for these inputs: k(X, X) + noise·I is singular"
            ) from error
        factor = np.block([[self.factor, np.zeros_like(below.T)], [below, corner]])
        return replace(self, inputs=np.vstack([self.inputs, x]), factor=factor)

    def variance(self, x: Array) -> Array:
        """Return k(x, x) − ‖L⁻¹k(X, x)‖²."""
        return np.maximum(self.kernel.diag(x) - np.square(self._half(x)).sum(0), 0)

    def weights(self, x: Array) -> Array:
        """Return a (N, n): the posterior mean at x, given values h(X), is aᵀh(X)."""
        return _solve(self.factor.T, self._half(x), upper=True)

    def _half(self, x: Array) -> Array:
        """Return L⁻¹k(X, x), (N, n)."""
        return _solve(self.factor, self.kernel(self.inputs, x))


@dataclass(frozen=True, eq=False)
class FeaturePosterior:
    """For the kernel φ(x)·φ(x') of D features: D² numbers, whatever the number of inputs.

    The process is w·φ(x) with w ~ N(0, I); inputs add to the precision of w::

        A = I + ΦᵀΦ/noise        σ²(x) = φ(x)ᵀ A⁻¹ φ(x)

    Woodbury's identity makes this equal to :class:`KernelPosterior`. Sums do not depend on the
    order of samples.

    Parameters
    ----------
    features : callable
        φ, from (n, features) to (n, D).
    noise : float
    precision : ndarray of shape (D, D)
        A.
    """

    features: Callable[[Array], Any]
    noise: float
    precision: Array

    @classmethod
    def prior(cls, features: Callable[[Array], Any], noise: float, n_inputs: int) -> Self:
        """Return the process before any input."""
        nothing = cls(features, noise, np.empty((0, 0)))
        return replace(nothing, precision=np.eye(nothing._phi(np.zeros((1, n_inputs))).shape[1]))

    def given(self, x: Array) -> Self:
        """Condition on more inputs."""
        phi = self._phi(x)
        return replace(self, precision=self.precision + phi.T @ phi / self.noise)

    def variance(self, x: Array) -> Array:
        """Return ‖L⁻¹φ(x)‖², where LLᵀ = A."""
        return np.square(_solve(self._factor, self._phi(x).T)).sum(0)

    def _phi(self, x: Array) -> Array:
        phi = np.asarray(self.features(x), dtype=np.float64)
        if phi.ndim != 2 or len(phi) != len(x):
            raise ValueError(
                f"features must map {len(x)} samples to an array of shape ({len(x)}, D), but its "
                f"shape is {phi.shape}"
            )
        return phi

    @cached_property
    def _factor(self) -> Array:
        return np.linalg.cholesky(self.precision)


# -------------------------------------------------------------------------- classifier


class GPClassifier(ClassifierMixin, BaseEstimator):
    """Classify by the posterior variance of a Gaussian process: the surest class wins.

    Each class conditions the same prior on its own inputs; there are no targets, since the
    variance does not depend on them. Classes are learned apart, in any order, at any time, and
    nothing is forgotten. This is the rule that the paper shows PEC to approximate.

    Parameters
    ----------
    kernel : Kernel, optional
        Of the prior: any kernel of :mod:`sklearn.gaussian_process.kernels`; by default
        ``NetworkKernel()``, that of PEC's teacher.
    noise : float
        Variance of the noise that inputs are observed with, in units of the kernel.
    features : int or callable, optional
        None is exact, and keeps all samples: N² numbers for a class of N. A number D draws as
        many random features of the kernel, and memory is bounded: D² numbers for a class. A
        callable maps samples (n, features) to features (n, D) and replaces the kernel: a
        network's hidden layer, or inducing points: ``Nystroem(…).fit(some).transform``.
    random_state : int, RandomState or None
        Seed of the random features.

    Attributes
    ----------
    classes_ : ndarray
        Known labels, sorted where they can be, else in order of arrival.
    posteriors_ : dict
        For each label the process given its samples: a :class:`KernelPosterior`, or with features
        a :class:`FeaturePosterior`.
    n_features_in_ : int

    Notes
    -----
    Variances are no likelihoods, so there is no ``predict_proba``. A large variance for every
    class tells a sample that belongs to none.

    References
    ----------
    Zając, Tuytelaars, van de Ven. Prediction Error-based Classification for
    Class-Incremental Learning. ICLR 2024.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> model = GPClassifier()
    >>> for label in range(10):                      # one class after another
    ...     model = model.partial_fit(X[:1500][y[:1500] == label], y[:1500][y[:1500] == label])
    >>> round(model.score(X[1500:], y[1500:]), 2)
    0.95
    """

    def __init__(
        self,
        *,
        kernel: Kernel | None = None,
        noise: float = 1e-4,
        features: int | Callable[[Array], Any] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.kernel = kernel
        self.noise = noise
        self.features = features
        self.random_state = random_state

    classes_: NDArray[Any]
    n_features_in_: int
    _prior: Posterior
    posteriors_: dict[Any, Any]

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from scratch.

        Parameters
        ----------
        X : array-like of shape (n, features)
        y : array-like of n hashable labels
        """
        return self._learn(X, y, first=True)

    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> Self:
        """Go on learning: one sample or many, of known classes or new ones.

        Parameters
        ----------
        X : array-like of shape (n, features)
        y : array-like of n hashable labels
        classes : ignored
            New classes need no announcement; here for scikit-learn's sake.
        """
        return self._learn(X, y, first=not hasattr(self, "classes_"))

    def _learn(self, X: ArrayLike, y: ArrayLike, first: bool) -> Self:
        if first:
            x = check_array(X, dtype=np.float64, estimator=self)
        else:
            x = validate_data(self, X, reset=False, dtype=np.float64)
        groups = grouped(check_labels(y, len(x)))
        prior = self._start(x.shape[1]) if first else self._prior
        known = {} if first else self.posteriors_
        new = {label: known.get(label, prior).given(x[at]) for label, at in groups.items()}
        both = known | new
        if first:
            validate_data(self, X, skip_check_array=True)  # notes number and names of features
        labels = [list(both)[k] for k in in_order(list(both))]
        self._prior, self.posteriors_ = prior, {label: both[label] for label in labels}
        self.classes_ = label_array(labels)
        return self

    def _start(self, n_inputs: int) -> Posterior:
        """Return the prior that all classes share."""
        noise, features, kernel = self.noise, self.features, self.kernel
        if not isinstance(noise, Real) or not 0 < noise < float("inf"):
            raise ValueError(f"noise must be a positive number, but it is {noise!r}")
        if callable(features):
            if kernel is not None:
                raise ValueError("callable features are the kernel: give one or the other")
            return FeaturePosterior.prior(features, float(noise), n_inputs)
        kernel = NetworkKernel() if kernel is None else kernel
        if not isinstance(kernel, Kernel):
            raise ValueError(f"kernel must be a kernel of scikit-learn, but it is {kernel!r}")
        if features is None:
            return KernelPosterior.prior(kernel, float(noise), n_inputs)
        count("features", features)
        drawn = random_features(kernel, int(features), n_inputs, self.random_state)
        return FeaturePosterior.prior(drawn, float(noise), n_inputs)

    def variances(self, X: ArrayLike) -> Array:
        """Return the posterior variance at each sample given each class.

        Parameters
        ----------
        X : array-like of shape (n, features)

        Returns
        -------
        ndarray of shape (n, n_classes)
            Columns follow ``classes_``.
        """
        check_is_fitted(self, "classes_")
        x = validate_data(self, X, reset=False, dtype=np.float64)
        out = np.empty((len(x), len(self.classes_)))
        for start in range(0, len(x), HELD):
            some = slice(start, start + HELD)
            for column, posterior in enumerate(self.posteriors_.values()):
                out[some, column] = posterior.variance(x[some])
        return out

    def decision_function(self, X: ArrayLike) -> Array:
        """Return the negative variances; of two classes the difference, positive for the second."""
        variances = self.variances(X)
        return variances[:, 0] - variances[:, 1] if variances.shape[1] == 2 else -variances

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the label with the smallest posterior variance for each sample."""
        variances = self.variances(X)
        return self.classes_[variances.argmin(1)]


# ------------------------------------------------------------------------------ GP-PEC


def prior_draws(kernel: Kernel, X: ArrayLike, draws: int, random_state: Any = None) -> Array:
    """Return the values (n, draws) of functions drawn from the prior, at all samples jointly."""
    covariance = kernel(X)
    covariance.flat[:: len(covariance) + 1] += JITTER * covariance.trace() / len(covariance)
    normal = check_random_state(random_state).normal(size=(len(covariance), draws))
    return np.linalg.cholesky(covariance) @ normal


def expected_error(
    kernel: Kernel, inputs: ArrayLike, X: ArrayLike, weights: Array, noise: float = 0.0
) -> Array:
    """Return s_∞ (n,) of the student that weighs what it saw at N inputs by a(x).

    Parameters
    ----------
    kernel : Kernel
    inputs : array-like of shape (N, features)
    X : array-like of shape (n, features)
    weights : ndarray of shape (N, n)
        a(x) for each sample of X.
    noise : float
        Variance of the noise in what the student saw.
    """
    seen = kernel(inputs) @ weights + noise * weights
    return kernel.diag(X) + (weights * (seen - 2 * kernel(inputs, X))).sum(0)


def imitation_error(posterior: KernelPosterior, targets: Array, X: Array, values: Array) -> Array:
    """Return the mean squared error (n,) of the posterior mean as student of B functions.

    Parameters
    ----------
    posterior : KernelPosterior
        Given N inputs.
    targets : ndarray of shape (N, B)
        The functions at these inputs, as the student sees them.
    X : ndarray of shape (n, features)
    values : ndarray of shape (n, B)
        The functions at X.
    """
    return np.square(posterior.weights(X).T @ targets - values).mean(1)


def gp_pec(
    kernel: Kernel,
    classes: Sequence[ArrayLike],
    X: ArrayLike,
    *,
    draws: int,
    noise: float = 1e-4,
    random_state: Any = None,
) -> Array:
    """Return the scores of GP-PEC(B), (n, classes); the smallest wins.

    B functions are drawn from the prior; for each class the posterior mean, given their noisy
    values at the class's inputs, predicts their values at X. With more draws the scores tend to
    the posterior variances, ``GPClassifier.variances``.

    Parameters
    ----------
    kernel : Kernel
    classes : sequence of array-like of shape (N_c, features)
        The inputs of each class.
    X : array-like of shape (n, features)
    draws : int
        B.
    noise : float
        Variance of the noise in what students see.
    random_state : int, RandomState or None

    Examples
    --------
    >>> import numpy as np
    >>> x = np.linspace(-1, 1, 5)[:, None]
    >>> gp_pec(RBF(0.5), [x, x + 3], [[0.3]], draws=100, random_state=0).round(4)
    array([[0.0066, 1.0579]])
    """
    count("draws", draws)
    rng = check_random_state(random_state)
    inputs = [np.asarray(x, dtype=np.float64) for x in classes]
    x = np.asarray(X, dtype=np.float64)
    prior = KernelPosterior.prior(kernel, noise, x.shape[1])
    drawn = prior_draws(kernel, np.vstack([*inputs, x]), draws, rng)
    *targets, values = np.split(drawn, np.cumsum([len(own) for own in inputs]))
    scores = []
    for own, h in zip(inputs, targets, strict=True):
        seen = h + np.sqrt(noise) * rng.normal(size=h.shape)
        scores.append(imitation_error(prior.given(own), seen, x, values))
    return np.stack(scores, axis=1)
