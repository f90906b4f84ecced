"""Counts, means and shared scatter: exact in any order, solved cheaply, sound after a million."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import OAS, empirical_covariance

from pecil.pec import scatter
from pecil.pec.scatter import Scatter, _oas

DIM = 7
VIEWS = torch.randn(DIM, 2, generator=torch.Generator().manual_seed(0))


def samples(n, dim=DIM, classes=3, seed=0, offset=2.0):
    """Return features (n, dim) of correlated classes, and their classes."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(classes), rng.integers(classes, size=n)])[:n]
    mix = np.random.default_rng(1).normal(size=(dim, dim))
    centres = np.random.default_rng(2).normal(scale=3, size=(classes, dim)) + offset
    x = centres[y] + rng.normal(size=(n, dim)) @ mix
    return torch.from_numpy(x).float(), y


def summary(x, y, classes=None, batches=None, views=None, waiting=None):
    """Return the summary of samples, taken in class by class or in the batches given."""
    made = Scatter(x.shape[1], torch.device("cpu"), views)
    if waiting is not None:
        made._waiting = made._waiting[:waiting]
    made.grow(classes or int(y.max()) + 1)
    for part in batches or [np.arange(len(y))]:
        for slot in np.unique(y[part]):
            made.add(int(slot), x[part][y[part] == slot])
    return made


def by_hand(x, y):
    """Return counts, means and scatter in float64, straight from their definitions."""
    x, classes = x.double().numpy(), range(int(y.max()) + 1)
    means = np.stack([x[y == c].mean(0) for c in classes])
    gap = x - means[y]
    return np.bincount(y).tolist(), means, gap.T @ gap


def assert_is(made, x, y, rtol=1e-5):
    counts, means, matrix = by_hand(x, y)
    assert made.counts == counts and made.total == len(y)
    np.testing.assert_allclose(made.means, means, rtol=rtol, atol=1e-5)
    np.testing.assert_allclose(made.matrix, matrix, rtol=rtol, atol=rtol * np.diag(matrix).max())


def shrunk_inverse(x, y, factor):
    """Return Σ̃⁻¹ in float64, by a dense inverse, and the means."""
    counts, means, matrix = by_hand(x, y)
    covariance, a, dim = matrix / len(y), factor.shrinkage, len(matrix)
    shrunk = (1 - a) * covariance + a * np.trace(covariance) / dim * np.eye(dim)
    return np.linalg.inv(shrunk), means


@pytest.fixture
def factorised(monkeypatch):
    """Return the list of dimensions of all matrices that are factorised."""
    seen, cholesky = [], scatter._cholesky

    def noting(matrix, rho):
        seen.append(len(matrix))
        return cholesky(matrix, rho)

    monkeypatch.setattr(scatter, "_cholesky", noting)
    return seen


# ------------------------------------------------------------------------------ learning


@given(st.data())
def test_neither_order_nor_batches_matter(data):
    x, y = samples(40)
    order = np.array(data.draw(st.permutations(range(40)), label="order"))
    cuts = data.draw(st.sets(st.integers(1, 39)), label="cuts")
    assert_is(summary(x, y, batches=np.split(order, sorted(cuts))), x, y)


@pytest.mark.parametrize("rows", [1, 7, 4096])
@pytest.mark.parametrize("waiting", [1, 10, 256])
def test_nor_do_the_sizes_of_chunk_and_waiting_list(rows, waiting, monkeypatch):
    monkeypatch.setattr(scatter, "ROWS", rows)
    monkeypatch.setattr(scatter, "FEWEST_WAITING", waiting)
    x, y = samples(100)
    assert_is(summary(x, y, batches=np.array_split(np.arange(100), 13)), x, y)


def test_classes_may_come_at_any_time():
    x, y = samples(60)
    made = summary(x[:30], np.zeros(30, int))
    made.grow()
    made.add(1, x[30:])
    assert_is(made, x, np.repeat([0, 1], 30))


def test_no_samples_change_nothing():
    x, y = samples(20)
    made = summary(x, y)
    made.add(1, x[:0])
    assert_is(made, x, y)


def test_features_are_left_as_they_were():
    x, y = samples(20)
    before = x.clone()
    summary(x, y).factor(None).quadratic(x)
    assert torch.equal(x, before)


@given(st.sets(st.integers(0, 59), min_size=1, max_size=59))
def test_summaries_add_up_and_come_apart(chosen):
    """Of any samples: the second one may have some, all or none of the first one's classes."""
    x, y = samples(60)
    part = np.isin(np.arange(60), list(chosen))
    other = summary(x[part], y[part], classes=3)
    both = summary(x[~part], y[~part], classes=3)
    both.merge(other, range(3))
    assert_is(both, x, y)
    both.merge(other, range(3), sign=-1)
    alone = summary(x[~part], y[~part], classes=3)
    assert (both.counts, both.total) == (alone.counts, alone.total)
    size = float(by_hand(x, y)[2].max())
    np.testing.assert_allclose(both.matrix, alone.matrix, atol=2e-6 * size)
    np.testing.assert_allclose(both.means, alone.means, atol=1e-4)


def test_merging_leaves_the_other_as_it_was():
    x, y = samples(60)
    one, two = summary(x[:30], y[:30]), summary(x[30:], y[30:])
    one.merge(two, [2, 0, 1])
    one.add(0, x)
    assert_is(two, x[30:], y[30:])


def test_slots_say_which_class_is_which():
    x, y = samples(60)
    one, two = summary(x[:30], y[:30]), summary(x[30:], (y[30:] + 1) % 3)
    one.merge(two, [2, 0, 1])
    assert_is(one, x, y)


def test_removing_a_class_leaves_the_scatter():
    x, y = samples(60)
    made = summary(x, y)
    matrix, means = made.matrix.clone(), made.means.clone()
    made.remove(1)
    assert torch.equal(made.matrix, matrix) and torch.equal(made.means, means[[0, 2]])
    assert len(made.counts) == 2 and made.total == 60
    inverse, _ = shrunk_inverse(x, y, factor := made.factor(None))
    weights = factor.weights() * factor.scale
    np.testing.assert_allclose(weights, means[[0, 2]].double().numpy() @ inverse, rtol=1e-4)


# ------------------------------------------------------------------------------- solving


@pytest.mark.parametrize("shrinkage", [None, 0.0, 0.01, 0.5, 1.0], ids=str)
def test_waiting_rows_count_as_if_they_were_factorised(shrinkage, factorised):
    """A stream that alternates updates and predictions agrees at each step with a dense inverse."""
    x, y = samples(150, classes=4)
    made = summary(x[:30], y[:30], classes=4, views=VIEWS)
    for end in range(31, 151):
        made.add(int(y[end - 1]), x[end - 1 : end])
        factor = made.factor(shrinkage)
        at_once = summary(x[:end], y[:end], views=VIEWS, waiting=1).factor(shrinkage)
        asked = x[:3] - made.means.mean(0), made.means - made.means.mean(0)
        expected = at_once.students.changes(*asked, 0.5)
        np.testing.assert_allclose(
            factor.students.changes(*asked, 0.5), expected, rtol=1e-2, atol=1e-2
        )
        inverse, means = shrunk_inverse(x[:end], y[:end], factor)
        np.testing.assert_allclose(
            factor.weights() * factor.scale, means @ inverse, rtol=2e-4, atol=1e-5
        )
        gap = x[:3].double().numpy() - means[0]
        expected = ((gap @ inverse) * gap).sum(1)
        squares = factor.quadratic(torch.from_numpy(gap)) * factor.scale
        np.testing.assert_allclose(squares, expected, rtol=1e-4)
    assert len(made.waiting) > 100  # none of them has been factorised


@pytest.mark.parametrize("shrinkage", [None, 0.1], ids=str)
@pytest.mark.parametrize(("dim", "n", "classes"), [(24, 600, 5), (24, 300, 1), (160, 300, 3)])
def test_a_stream_of_single_samples_is_rarely_factorised(dim, n, classes, shrinkage, factorised):
    x, y = samples(n, dim=dim, classes=classes)
    made = summary(x[:20], y[:20], classes=classes)
    for k in range(20, n):
        made.add(int(y[k]), x[k : k + 1])
        made.factor(shrinkage).weights()
    early = 12 if shrinkage is None else 2 * math.log2(n)  # while ρ still finds its place
    assert 1 <= len(factorised) <= n / max(256, dim / 8) + early


def test_many_features_wait_longer(factorised):
    assert len(Scatter(8000, torch.device("cpu"))._waiting) == 1000
    assert len(Scatter(100, torch.device("cpu"))._waiting) == 256


@pytest.mark.parametrize("asked", [0.0, 0.001, 0.3, 0.99])
def test_a_given_shrinkage_is_kept_up_to_rounding(asked):
    """To the nearest power of √2 in a/(1 − a)."""
    a = summary(*samples(100)).factor(asked).shrinkage
    least = max(asked, scatter.LEAST)
    assert 2**-0.25 <= (a / (1 - a)) / (least / (1 - least)) <= 2**0.25 * (1 + 1e-9)


def test_a_factor_stays_as_it_is():
    """Whoever scores goes on with what was there when it began, whatever others learn."""
    rng = torch.Generator().manual_seed(0)
    scatter = Scatter(6, torch.device("cpu"))
    scatter.grow(2)
    scatter.add(0, torch.randn(40, 6, generator=rng))
    factor = scatter.factor(0.1)
    x = torch.randn(5, 6, generator=rng)
    before = factor.weights().clone(), factor.quadratic(x), factor.scale, list(factor.counts)
    scatter.add(1, torch.randn(1, 6, generator=rng))
    later = scatter.factor(0.1)
    assert later.weights().tolist() != before[0].tolist()
    assert torch.equal(factor.weights(), before[0])
    assert torch.equal(factor.quadratic(x), before[1])
    assert (factor.scale, factor.counts) == before[2:]


def test_what_was_measured_counts_on_through_merging_and_back():
    """The smaller one took its measures with few samples, the larger with nearly all."""
    x, y = samples(1000, classes=2)
    small, large, both = (
        summary(x[part], y[part]) for part in (slice(9), slice(9, 1000), slice(1000))
    )
    for one in (small, large, both):
        one.gauge(None, 0)
    small.merge(large, [0, 1])
    assert small.gauge(None, 0)[1] == 1
    both.merge(large, [0, 1], sign=-1)
    assert both.total == 9
    assert both.gauge(None, 0)[1] == 1


def test_the_gauge_is_rarely_made_anew(factorised):
    x, y = samples(1000, classes=2)
    made, new = summary(x[:10], y[:10]), []
    for k in range(10, 1000):
        gauged = made.gauged
        factor, counts = made.gauge(None, int(y[k]))
        assert counts == (1 if made.gauged == gauged else gauged / made.total)
        new.append(counts < 1)
        np.testing.assert_allclose(
            factor.means @ factor.lower @ factor.lower.T, made.means.double(), rtol=1e-6
        )
        made.add(int(y[k]), x[k : k + 1])
    assert new[0] and 5 < sum(new) <= 1 + math.log(100, scatter.GROWN)


@pytest.mark.parametrize(("n", "p"), [(20, 40), (200, 40), (50, 400), (2000, 3)])
def test_the_oracle_approximating_shrinkage(n, p):
    """Formula 23 of Chen et al.; scikit-learn's leaves 2/p away, which is small for large p."""
    x = np.random.default_rng(0).normal(size=(n, p)) * np.geomspace(1, 0.1, p)
    x -= x.mean(0)
    matrix = x.T @ x
    ours = _oas(n, p, np.trace(matrix), (matrix**2).sum())
    covariance = empirical_covariance(x, assume_centered=True)
    square, trace = np.trace(covariance @ covariance), np.trace(covariance)
    paper = ((1 - 2 / p) * square + trace**2) / ((n + 1 - 2 / p) * (square - trace**2 / p))
    assert ours == pytest.approx(min(1, paper))
    theirs = OAS(assume_centered=True, store_precision=False).fit(x).shrinkage_
    assert ours == pytest.approx(theirs, rel=2.5 / p)


def test_the_shrinkage_of_the_stream_is_the_oracle_approximating_one():
    """Moments are kept up to date row by row: waiting, settled and in batches."""
    x, y = samples(700, classes=1)
    made = summary(x[:50], y[:50])
    for k in range(50, 700):
        made.add(0, x[k : k + 1])
        if k % 29 == 0:
            matrix = by_hand(x[: k + 1], y[: k + 1])[2]
            expected = np.trace(matrix), (matrix**2).sum()
            np.testing.assert_allclose(made._moments(), expected, rtol=1e-5)


def test_one_feature_is_all_shrinkage():
    assert _oas(10, 1, 3.0, 9.0) == 1.0
    assert _oas(10, 5, 5.0, 5.0) == 1.0  # a sphere already


def test_without_spread_there_is_still_an_answer():
    made = Scatter(3, torch.device("cpu"))
    made.grow(2)
    for slot in (0, 1):
        made.add(slot, torch.full((1, 3), float(slot)))
    factor = made.factor(None)
    assert torch.isfinite(factor.weights() * factor.scale).all()


# ------------------------------------------------------------------------------ numerics


def test_a_million_samples_far_from_zero(factorised):
    """Offset a hundred deviations, with a direction of a thousandth of the usual deviation."""
    n, batch, dim = 1_000_000, 200, 24
    rng = np.random.default_rng(0)
    mix = np.linalg.qr(rng.normal(size=(dim, dim)))[0] * np.geomspace(1, 1e-3, dim)
    made = Scatter(dim, torch.device("cpu"))
    made.grow()
    total, square = np.zeros(dim), np.zeros((dim, dim))
    for _ in range(10):
        x = (rng.normal(size=(n // 10, dim)) @ mix.T + 100).astype(np.float32)
        for part in torch.from_numpy(x).split(batch):
            made.add(0, part)
        gap = x.astype(float) - 100
        total, square = total + gap.sum(0), square + gap.T @ gap
    mean = total / n
    matrix = square - n * np.outer(mean, mean)
    assert made.counts == [n] == [made.total]
    np.testing.assert_allclose(made.means[0], 100 + mean, atol=2e-3)
    error = np.linalg.norm(made.matrix.double().numpy() - matrix) / np.linalg.norm(matrix)
    assert error < 2e-5
    factor = made.factor(None)
    assert factor.rho < 1e-5 * made._trace and factorised == [dim]
    assert torch.isfinite(factor.weights()).all()


def test_means_do_not_stand_still():
    """Steps that grow ever smaller still move a mean far from zero."""
    x = torch.tensor([1e5] * 1000 + [1e5 + 1] * 1000)[:, None]
    made = summary(x, np.zeros(2000, int), batches=list(np.arange(2000)[:, None]))
    assert float(made.means[0, 0]) == pytest.approx(1e5 + 0.5, abs=0.02)


def test_rounding_that_makes_a_scatter_indefinite_is_outweighed():
    matrix = torch.diag(torch.tensor([1.0, -1e-3, 2.0]))
    lower, rho = scatter._cholesky(matrix, 1e-6)
    assert 1e-3 < rho < 2e-3
    shifted = matrix.double() + rho * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(lower @ lower.T, shifted)


def test_a_scatter_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite: are the teacher's outputs"):
        scatter._cholesky(torch.full((3, 3), math.nan), 1.0)


@pytest.mark.parametrize("n", [3, 9])
@pytest.mark.parametrize("dim", [5, 8, 11])
def test_products_are_added_by_halves(n, dim, monkeypatch):
    monkeypatch.setattr(scatter, "MANY", 4)
    monkeypatch.setattr(scatter, "BLOCK", 4)
    chance = torch.Generator().manual_seed(0)
    rows, matrix = torch.randn(n, dim, generator=chance), torch.eye(dim)
    scatter._add_products(matrix, rows)
    torch.testing.assert_close(matrix, torch.eye(dim) + rows.T @ rows)
    assert n < 4 or dim < 8 or torch.equal(matrix, matrix.T)
