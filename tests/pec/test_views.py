"""Linear students: their summary is exact and additive, their errors those of the definition."""

import numpy as np
import pytest
import torch

from pecil.pec import views as module
from pecil.pec.scatter import Scatter

DIM, K, CLASSES, TRUST = 6, 2, 3, 0.3


def samples(n, seed=0):
    """Return features (n, DIM) of classes that differ in how features go along, and classes."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(CLASSES), rng.integers(CLASSES, size=n)])[:n]
    mixes = np.random.default_rng(1).normal(size=(CLASSES, DIM, DIM))
    x = np.einsum("nd,nde->ne", rng.normal(size=(n, DIM)), mixes[y]) + y[:, None]
    return torch.from_numpy(x).float(), y


def drawn():
    return torch.randn(DIM, K, generator=torch.Generator().manual_seed(0))


def summary(x, y, classes=CLASSES):
    made = Scatter(DIM, torch.device("cpu"), drawn())
    made.grow(classes)
    for part in np.array_split(np.arange(len(y)), 5):
        for slot in np.unique(y[part]):
            made.add(int(slot), x[part][y[part] == slot])
    return made


def scatters(x, y):
    """Return the means and the scatter of each class, straight from their definitions."""
    x = x.double().numpy()
    means = np.stack([x[y == c].mean(0) for c in range(CLASSES)])
    gaps = [x[y == c] - means[c] for c in range(CLASSES)]
    return means, np.stack([gap.T @ gap for gap in gaps])


def test_views_of_scatters_are_what_they_say():
    x, y = samples(200)
    made, (_, own), v = summary(x, y), scatters(x, y), drawn().double().numpy()
    np.testing.assert_allclose(made.seen.own, v.T @ own, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(made.seen.shared, v.T @ own.sum(0), rtol=1e-4, atol=1e-3)


def test_summaries_add_up_and_come_apart():
    x, y = samples(300)
    whole, one, two = summary(x, y), summary(x[:140], y[:140]), summary(x[140:], y[140:])
    alone = [part.clone() for part in (one.seen.own, one.seen.shared)]
    one.merge(two, range(CLASSES))
    for name in ("own", "shared"):
        mine, expected = getattr(one.seen, name), getattr(whole.seen, name)
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-3)
    one.merge(two, range(CLASSES), sign=-1)
    np.testing.assert_allclose(one.seen.own, alone[0], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(one.seen.shared, alone[1], rtol=1e-4, atol=1e-3)


def test_a_class_that_is_removed_leaves_what_all_share():
    x, y = samples(100)
    made = summary(x, y)
    own, shared = made.seen.own.clone(), made.seen.shared.clone()
    made.remove(1)
    assert torch.equal(made.seen.own, own[[0, 2]])
    assert torch.equal(made.seen.shared, shared)


def test_a_copy_learns_by_itself():
    x, y = samples(100)
    made = summary(x, y)
    other = made.handed_on()
    before = made.seen.own.clone(), made.seen.shared.clone()
    other.add(0, x[:9])
    assert torch.equal(made.seen.own, before[0]) and torch.equal(made.seen.shared, before[1])
    assert not torch.equal(other.seen.own, before[0])


def test_what_is_kept_for_a_file_is_enough():
    x, y = samples(100)
    made, other = summary(x, y), Scatter(DIM, torch.device("cpu"), drawn())
    other.restore(made.counts, made.means, made.matrix, made.total)
    other.seen.restore(made.seen.own, made.matrix)
    np.testing.assert_allclose(other.seen.shared, made.seen.shared, rtol=1e-5, atol=1e-3)
    centre = made.means.mean(0)
    asked = x - centre, made.means - centre
    expected = made.factor(None).students.changes(*asked, TRUST)
    np.testing.assert_allclose(
        other.factor(None).students.changes(*asked, TRUST), expected, rtol=1e-3
    )


@pytest.mark.parametrize("shrinkage", [None, 0.01, 0.9], ids=str)
@pytest.mark.parametrize("room", [1, 2**22])
def test_errors_are_those_of_the_students_as_defined(shrinkage, room, monkeypatch):
    monkeypatch.setattr(module, "ROOM", room)
    x, y = samples(400)
    made = summary(x, y)
    factor, v = made.factor(shrinkage), drawn().double().numpy()
    (means, own), n = scatters(x, y), len(y)
    shifted = own.sum(0) + factor.rho * np.eye(DIM)
    metric = np.linalg.inv(shifted) * factor.scale
    law = np.linalg.solve(v.T @ shifted @ v, v.T @ shifted)  # A
    asked = x[:20].double().numpy()
    expected = []
    for c in range(CLASSES):
        gram = v.T @ own[c] @ v
        prior = module.PRIOR / n * (v.T @ shifted @ v)
        student = TRUST * np.linalg.solve(gram + prior, v.T @ own[c] - gram @ law)
        constant = asked - means[c]
        linear = constant - constant @ v @ student
        squares = [((gap @ metric) * gap).sum(1) for gap in (constant, linear)]
        expected.append(squares[1] - squares[0])
    centre = torch.from_numpy(means.mean(0))
    told = factor.students.changes(x[:20] - centre, torch.from_numpy(means) - centre, TRUST)
    np.testing.assert_allclose(told, np.stack(expected, 1), rtol=1e-3, atol=1e-3)
    assert np.abs(expected).max() > 0.1


def test_classes_that_came_later_have_constant_students():
    x, y = samples(100)
    students = summary(x, y).factor(None).students
    means = torch.zeros(CLASSES + 2, DIM, dtype=torch.float64)
    told = students.changes(x, means, TRUST)
    assert told.shape == (100, CLASSES + 2)
    assert told[:, :CLASSES].abs().min() > 0 and not told[:, CLASSES:].any()


def test_a_class_without_samples_has_a_constant_student():
    x, y = samples(100)
    made = summary(x, y, classes=CLASSES + 1)
    told = made.factor(None).students.changes(x, made.means, TRUST)
    assert torch.isfinite(told).all() and not told[:, CLASSES].any()


def test_one_view_sample_after_sample_is_finite():
    """From the first sample on, when nothing is known of how features go along."""
    x, y = samples(20)
    made = Scatter(DIM, torch.device("cpu"), drawn())
    made.grow(CLASSES)
    for k in range(20):
        made.add(int(y[k]), x[k : k + 1])
        assert torch.isfinite(made.factor(None).students.changes(x, made.means, TRUST)).all()
