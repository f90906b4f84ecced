"""Balancing: factors that make the most of a few samples, and a model left as it is."""

import sys

import numpy as np
import pytest
from sklearn.base import is_classifier
from sklearn.exceptions import NotFittedError

from pecil import PEC, WhitenedPEC
from pecil.pec import balance as balancing
from pecil.pec.balance import Balanced, balance, merits, search


@pytest.fixture(scope="module")
def uneven(small, clusters):
    """Return a model that has seen much of class 0, and samples of all its classes."""
    x, y = clusters(labels=(0, 1, 2), n=400)
    few = [k for k, label in enumerate(y) if label > 0]
    kept = np.setdiff1d(np.arange(len(y)), few[:-60])
    model = small(lr=0.001).fit(x[kept], np.asarray(y)[kept])
    return model, *clusters(labels=(0, 1, 2), n=60, seed=1)


def unfair(n=400, seed=0):
    """Return errors of three classes that are fair once column k is divided by 4**k."""
    rng = np.random.default_rng(seed)
    wanted = np.arange(n) % 3
    errors = rng.uniform(1, 2, (n, 3))
    errors[np.arange(n), wanted] *= 0.7
    return errors * 4.0 ** np.arange(3), wanted, errors


def test_factors_undo_unfair_errors():
    errors, wanted, fair = unfair()
    assert (errors.argmin(1) == wanted).mean() < 0.4
    scales = search(errors, wanted)
    logs = np.log(scales)
    np.testing.assert_allclose(np.diff(logs), -np.log(4), atol=0.15)
    best = (fair.argmin(1) == wanted).mean()
    assert ((errors * scales).argmin(1) == wanted).mean() > best - 0.01


def test_without_breaking_ties_the_search_stays_where_it_began():
    errors, wanted, _ = unfair(n=30)
    stuck = search(errors, wanted, ties=False)
    assert np.abs(np.log(stuck)).max() < 0.5 < np.abs(np.log(search(errors, wanted))).max()


def test_merits_are_those_of_the_rule_itself(monkeypatch):
    errors, wanted, _ = unfair(n=50)
    candidates = np.random.default_rng(2).normal(size=(7, 3)).astype(np.float32)
    logs = np.log(errors.T).astype(np.float32)
    found = merits(logs, wanted, candidates)
    for one, merit in zip(candidates, found, strict=True):
        products = errors * np.exp(one)
        right = (products.argmin(1) == wanted).sum()
        own = products[np.arange(50), wanted]
        products[np.arange(50), wanted] = np.inf
        sure = 1 / (1 + (own / products.min(1)) ** 10)
        assert merit == pytest.approx(right + sure.mean() / 2, abs=1e-4)
    monkeypatch.setattr(balancing, "HELD", 7 * 3 * 8)  # eight samples at a time
    np.testing.assert_allclose(merits(logs, wanted, candidates), found)


def test_the_seed_decides():
    errors, wanted, _ = unfair()
    first, again, other = (search(errors, wanted, 20, seed) for seed in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist()


def test_classes_without_samples_have_no_say_and_keep_their_errors():
    errors, wanted, _ = unfair()
    known = wanted < 2
    scales = search(errors[known], wanted[known])
    assert scales[2] == 1
    np.testing.assert_array_equal(scales[:2], search(errors[known][:, :2], wanted[known]))
    assert scales[0] * scales[1] == pytest.approx(1)
    assert search(errors[wanted == 1], wanted[wanted == 1]).tolist() == [1, 1, 1]


def test_balancing_helps_and_leaves_the_model_alone(uneven, state):
    model, x, y = uneven
    before, wrong = state(model), model.score(x, y)
    balanced = balance(model, x[:90], y[:90])
    assert state(model) == before
    assert wrong < 0.9 < balanced.score(x[90:], y[90:])
    products = model.errors(x) * balanced.scales_
    np.testing.assert_array_equal(balanced.errors(x), products)
    assert balanced.predict(x).tolist() == model.classes_[products.argmin(1)].tolist()
    np.testing.assert_array_equal(balanced.decision_function(x), -products)
    assert is_classifier(balanced)
    assert balanced.get_params(deep=False)["model"] is model


def test_two_classes_have_one_decision(small, clusters):
    x, y = clusters(labels=("a", "b"))
    balanced = balance(small().fit(x, y), x, y, generations=5)
    balanced.scales_ = np.array([1e-9, 1.0])  # all for the first
    assert (balanced.decision_function(x) < 0).all()
    assert set(balanced.predict(x)) == {"a"}
    balanced.scales_ = np.array([1.0, 2.0])
    decided = np.where(balanced.decision_function(x) > 0, "b", "a")
    assert decided.tolist() == balanced.predict(x).tolist()


def test_unchanged_factors_leave_decisions_as_they_are(small, clusters):
    for labels in (("a", "b"), ("a", "b", "c")):
        x, y = clusters(labels=labels)
        model = small().fit(x, y)
        balanced = balance(model, x, y, generations=1)
        balanced.scales_ = np.ones(len(labels))
        np.testing.assert_array_equal(balanced.decision_function(x), model.decision_function(x))


def test_decisions_of_whitened_pec_follow_its_predictions(clusters):
    x, y = clusters(labels=("a", "b"))
    balanced = balance(WhitenedPEC(dim=20, device="cpu").fit(x, y), x, y, generations=1)
    balanced.scales_ = np.array([1.0, 1e6])
    assert (balanced.decision_function(x) < 0).all()
    assert set(balanced.predict(x)) == {"a"}


def test_whitened_pec_can_be_balanced(clusters):
    x, y = clusters()
    model = WhitenedPEC(dim=20, device="cpu").fit(x, y)
    assert balance(model, x, y, generations=5).score(x, y) == 1


def test_labels_of_any_kind(small, clusters):
    x, y = clusters(labels=(1, "two", (3, "three")))
    balanced = balance(small().fit(x, y), x, y, generations=5)
    assert balanced.score(x, y) > 0.9


def test_wrong_input_is_explained(small, clusters):
    x, y = clusters()
    model = small().fit(x, y)
    with pytest.raises(ValueError, match="classes that the model knows, 'a', 'b', 'c'.*holds 'd'"):
        balance(model, x, ["d", *y[1:]])
    with pytest.raises(ValueError, match="generations must be a whole number"):
        balance(model, x, y, generations=0)
    with pytest.raises(NotFittedError):
        balance(PEC(), x, y)
    with pytest.raises(NotFittedError):
        Balanced(model).predict(x)


def test_a_model_with_new_classes_must_be_balanced_again(small, clusters):
    x, y = clusters()
    model = small().fit(x, y)
    balanced = balance(model, x, y, generations=5)
    model.partial_fit(x[:5], ["new"] * 5)
    with pytest.raises(ValueError, match="changed since fit.*balance it again"):
        balanced.predict(x)
    assert "new" in balanced.fit(x, y).classes_


def test_without_cmaes_the_extra_is_named(small, clusters, monkeypatch):
    x, y = clusters()
    model = small().fit(x, y)
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(ImportError, match=r"pecil\[balance\]"):
        balance(model, x, y)
