"""The Gaussian-process rule, GP-PEC(B), and the paper's propositions about them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, Matern
from sklearn.kernel_approximation import Nystroem
from sklearn.utils.estimator_checks import check_estimator

from pecil.pec.gp import (
    FeaturePosterior,
    GPClassifier,
    KernelPosterior,
    NetworkKernel,
    expected_error,
    gp_pec,
    imitation_error,
    prior_draws,
    random_features,
)
from pecil.pec.networks import Architecture
from pecil.pec.teacher import Teacher

KERNELS = {
    "gelu": NetworkKernel(),
    "relu": NetworkKernel("relu"),
    "arc-cosine": NetworkKernel("relu", normalise=False),
    "gelu, not normalised": NetworkKernel(normalise=False),
    "rbf": RBF(1.5),
}
MODELS = {
    "exact": {},
    "rbf": {"kernel": RBF(2)},
    "sum": {"kernel": ConstantKernel(2) * Matern(2) + DotProduct()},
    "features": {"features": 40},
    "fourier": {"features": 40, "kernel": RBF(2)},
    "callable": {"features": lambda x: np.exp(x)[:, ::-1]},
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


# ----------------------------------------------------------------------------- kernels


@every_kernel
def test_random_features_average_to_the_kernel(kernel):
    x, y = drawn(6, 3), drawn(5, 3, seed=1)
    phi = random_features(kernel, 200_000, 3, random_state=0)
    np.testing.assert_allclose(phi(x) @ phi(y).T, kernel(x, y), atol=0.02)
    np.testing.assert_allclose(np.diag(kernel(x)), kernel.diag(x), rtol=1e-12)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_the_kernel_is_the_expected_product_of_activations(activation, normalise):
    kernel, x = NetworkKernel(activation, normalise), drawn(4, 2)
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    weights /= weights.sum()
    extended = np.hstack([x, np.ones((4, 1))])
    covariance = extended @ extended.T
    if normalise:
        covariance /= np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    f = getattr(torch.nn.functional, activation)
    for i, j in ((0, 1), (2, 3), (1, 3)):
        low = np.linalg.cholesky(covariance[np.ix_([i, j], [i, j])])
        u, v = low[0, 0] * nodes[:, None], low[1, 0] * nodes[:, None] + low[1, 1] * nodes
        product = f(torch.tensor(u)).numpy() * f(torch.tensor(v)).numpy()
        assert weights @ product @ weights == pytest.approx(kernel(x)[i, j], rel=3e-3)


def test_the_teacher_of_pec_tends_to_the_network_kernel():
    x = drawn(5, 8)
    teacher = Teacher(Architecture("mlp", (8,), 5000, 1000), "kaiming", 0, torch.device("cpu"))
    outputs = teacher(torch.tensor(x, dtype=torch.float32)).double().numpy()
    second_moment = outputs @ outputs.T / outputs.shape[1]
    np.testing.assert_allclose(3 * second_moment, NetworkKernel()(x), atol=0.06)


def test_kernels_combine_as_those_of_scikit_learn():
    kernel, x = 2.0 * NetworkKernel() + RBF(), drawn(4, 3)
    np.testing.assert_allclose(kernel(x), 2 * NetworkKernel()(x) + RBF()(x))
    assert clone(NetworkKernel("relu", False)).get_params() == {
        "activation": "relu",
        "normalise": False,
    }
    assert GaussianProcessRegressor(kernel).fit(x, drawn(4)).kernel_.n_dims == 2


def test_unknown_activations_are_refused():
    with pytest.raises(ValueError, match="activation must be one of gelu, relu, but it is 'tanh'"):
        NetworkKernel("tanh")([[1.0]])


def test_only_known_kernels_have_random_features():
    with pytest.raises(ValueError, match=r"NetworkKernel and RBF, but kernel is Matern"):
        random_features(Matern(), 10, 3)


# -------------------------------------------------------------------------- posteriors


@every_kernel
def test_the_variance_does_not_depend_on_targets(kernel):
    x, new = drawn(15, 3), drawn(7, 3, seed=1)
    ours = KernelPosterior.prior(kernel, 0.01, 3).given(x).variance(new)
    for seed in (2, 3):
        y = drawn(15, seed=seed) * 10**seed
        other = GaussianProcessRegressor(kernel, alpha=0.01, optimizer=None).fit(x, y)
        np.testing.assert_allclose(ours, other.predict(new, return_std=True)[1] ** 2, rtol=1e-9)
        np.testing.assert_allclose(
            KernelPosterior.prior(kernel, 0.01, 3).given(x).weights(new).T @ y,
            other.predict(new),
            rtol=1e-8,
        )


@every_model
def test_inputs_may_come_in_any_pieces(options, clusters):
    x, y = clusters()
    y = np.asarray(y)
    whole = GPClassifier(**options).fit(x, y)
    pieces = GPClassifier(**options)
    order = np.random.default_rng(0).permutation(len(x))
    for at in (order[:1], order[1:8], order[8:9], order[9:]):
        pieces.partial_fit(x[at], y[at])
    np.testing.assert_allclose(pieces.variances(x), whole.variances(x), atol=1e-9)
    assert pieces.classes_.tolist() == ["a", "b", "c"]


@every_model
def test_other_classes_do_not_matter(options, clusters):
    x, y = clusters()
    y = np.asarray(y)
    alone = GPClassifier(**options).fit(x[y == "b"], y[y == "b"]).variances(x)[:, 0]
    np.testing.assert_array_equal(GPClassifier(**options).fit(x, y).variances(x)[:, 1], alone)


def test_finite_features_are_exact():
    x, new = drawn(60, 3), drawn(9, 3, seed=1)
    phi = random_features(NetworkKernel(), 25, 3, random_state=0)  # fewer and more than samples
    for n in (10, 60):
        exact = KernelPosterior.prior(DotProduct(0), 0.01, 25).given(phi(x[:n])).variance(phi(new))
        streamed = FeaturePosterior.prior(phi, 0.01, 3).given(x[:n])
        np.testing.assert_allclose(streamed.variance(new), exact, rtol=1e-9)
        assert streamed.precision.shape == (25, 25)


@pytest.mark.parametrize("kernel", [NetworkKernel(), RBF(2)], ids=["network", "rbf"])
def test_many_random_features_agree_with_the_exact_rule(kernel, clusters):
    x, y = clusters(n=30)
    new, _ = clusters(seed=1)
    exact = GPClassifier(kernel=kernel, noise=0.01).fit(x, y)
    gaps = np.zeros(3)
    for seed in range(3):
        for k, dim in enumerate((10, 100, 1000)):
            streamed = clone(exact).set_params(features=dim, random_state=seed).fit(x, y)
            gaps[k] += np.abs(streamed.variances(new) - exact.variances(new)).mean()
    assert gaps[0] > 1.5 * gaps[1] > 2 * gaps[2]
    assert (streamed.predict(new) == exact.predict(new)).all()


def test_inducing_points_for_any_kernel(clusters):
    x, y = clusters()
    kernel = Matern(3)
    every_point = Nystroem(kernel, n_components=len(x)).fit(x)
    streamed = GPClassifier(features=every_point.transform).fit(x, y)
    exact = GPClassifier(kernel=kernel).fit(x, y)
    at_x = streamed.variances(x), exact.variances(x)
    np.testing.assert_allclose(*at_x, atol=1e-6)


# -------------------------------------------------------------------------- classifier


@pytest.mark.parametrize("options", [{}, {"features": 30}], ids=["exact", "features"])
def test_check_estimator(options):
    results = check_estimator(GPClassifier(**options), on_fail=None, on_skip=None)
    assert len(results) > 50
    assert not [result["check_name"] for result in results if result["status"] == "failed"]
    skipped = {result["check_name"] for result in results if result["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}


@every_model
def test_the_surest_class_wins(options, clusters):
    x, y = clusters()
    new, labels = clusters(seed=1)
    model = GPClassifier(**options).fit(x, y)
    assert model.score(new, labels) > 0.95
    np.testing.assert_array_equal(model.decision_function(new), -model.variances(new))
    two = GPClassifier(**options).fit(*clusters(labels=("a", "b")))
    assert (two.predict(new) == two.classes_[(two.decision_function(new) > 0).astype(int)]).all()


def test_parameters_last_until_the_next_fit(clusters):
    x, y = clusters()
    model = GPClassifier(features=20).fit(x, y)
    before = model.variances(x)
    model.set_params(features=None, noise=1.0, random_state=5).partial_fit(x[:1] + 1, ["d"])
    np.testing.assert_array_equal(model.variances(x)[:, :3], before)
    assert isinstance(model.posteriors_["d"], FeaturePosterior)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": 0}, "noise must be a positive number, but it is 0"),
        ({"kernel": "rbf"}, "kernel must be a kernel of scikit-learn, but it is 'rbf'"),
        ({"features": 0}, "features must be a whole number of at least 1, but it is 0"),
        ({"features": np.sin, "kernel": RBF()}, "give one or the other"),
        ({"features": np.ravel}, r"to an array of shape \(1, D\), but its shape is \(5,\)"),
        ({"features": 9, "kernel": DotProduct()}, "random features can be drawn for"),
        ({"kernel": DotProduct(), "noise": 1e-300}, "is too small for these inputs"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(options, message, clusters):
    x, y = clusters()
    model = GPClassifier().fit(x[:, :3], y)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=message):
        model.set_params(**options).fit(x, y)
    assert vars(model) == before | options


# ------------------------------------------------------------------------ propositions


@given(
    n=st.integers(1, 12),
    features=st.integers(1, 4),
    name=st.sampled_from(list(KERNELS)),
    noise=st.sampled_from([1e-6, 1e-3, 1.0]),
    off=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_student_beats_the_posterior_variance(n, features, name, noise, off, seed):
    """Proposition 1: s_∞ ≥ σ², whatever weights the student gives to what it saw."""
    rng = np.random.default_rng(seed)
    kernel, x, new = KERNELS[name], rng.normal(size=(n, features)), rng.normal(size=(5, features))
    posterior = KernelPosterior.prior(kernel, noise, features).given(x)
    best, variance = posterior.weights(new), posterior.variance(new)
    np.testing.assert_allclose(expected_error(kernel, x, new, best, noise), variance, atol=1e-9)
    students = {
        "bolder": KernelPosterior.prior(kernel, noise / 100, features).given(x).weights(new),
        "shyer": KernelPosterior.prior(kernel, noise * 100, features).given(x).weights(new),
        "constant": np.full((n, 5), 1 / n),
        "nearest": np.eye(n)[((x[:, None] - new) ** 2).sum(2).argmin(0)].T,
        "any": best + rng.normal(scale=off, size=best.shape),
    }
    for weights in students.values():
        expected = expected_error(kernel, x, new, weights, noise)
        change = weights - best
        excess = (change * (kernel(x) @ change + noise * change)).sum(0)
        assert (expected >= variance - 1e-9).all()
        np.testing.assert_allclose(expected, variance + excess, atol=1e-9, rtol=1e-9)


def test_gp_pec_tends_to_the_posterior_variance():
    classes, new = [drawn(10, 3), drawn(12, 3, seed=1) + 2], drawn(8, 3, seed=2)
    model = GPClassifier(kernel=RBF(2), noise=0.1).fit(np.vstack(classes), [0] * 10 + [1] * 12)
    options = {"noise": 0.1, "random_state": 0}
    gaps = [
        np.abs(gp_pec(RBF(2), classes, new, draws=b, **options) / model.variances(new) - 1).mean()
        for b in (10, 1000, 100_000)
    ]
    assert gaps[0] > 3 * gaps[1] > 9 * gaps[2]
    assert gaps[2] < 0.01


def test_gp_pec_asks_every_student_about_the_same_functions():
    x, new = drawn(9, 3), drawn(4, 3, seed=1)
    twice = gp_pec(RBF(), [x, x], new, draws=3, random_state=0, noise=1e-9)
    np.testing.assert_allclose(twice[:, 0], twice[:, 1], rtol=0.01)
    with pytest.raises(ValueError, match="draws must be a whole number of at least 1"):
        gp_pec(RBF(), [x], new, draws=0)


def test_draws_have_the_covariance_of_the_prior():
    x = drawn(5, 2)
    h = prior_draws(NetworkKernel(), x, 200_000, random_state=0)
    np.testing.assert_allclose(h @ h.T / h.shape[1], NetworkKernel()(x), atol=0.01)


def test_the_score_of_the_right_class_falls_with_samples():
    """Propositions 2 and 3: in distribution both scores go to 0; elsewhere they do not."""
    rng = np.random.default_rng(0)
    x, new = rng.uniform(-1, 1, (1000, 3)), rng.uniform(-1, 1, (100, 3))
    kernel, far = RBF(1.0), new + 4
    h = prior_draws(kernel, np.vstack([x, new]), 1, random_state=0)
    scores, variances = [], []
    for n in (10, 100, 1000):
        posterior = KernelPosterior.prior(kernel, 1e-8, 3).given(x[:n])
        scores.append(imitation_error(posterior, h[:n], new, h[1000:]).mean())
        variances.append(posterior.variance(new).mean())
    for falling in (scores, variances):
        assert falling[0] > 20 * falling[1] > 400 * falling[2]
    assert posterior.variance(far).mean() > 0.5
