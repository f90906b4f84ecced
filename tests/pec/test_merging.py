"""Models trained apart become one, and classes are forgotten, to the last bit."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression

from pecil import PEC, WhitenedPEC

SETTINGS = {
    "mlp": {},
    "conv": {"architecture": "conv", "pool": 2, "channels": "first"},
    "deep": {"hidden_layers": 2},
    "linear": {"architecture": "linear"},
    "ensemble": {"ensemble": 3},
    "batches": {"batch_size": 3, "epochs": 2},
    "equal budgets": {"equal_budgets": 7},
    "normalised": {"mean": np.array(0.5), "std": [2.0]},
    "module": {"teacher": torch.nn.Flatten(), "output_dim": None},
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
ways = pytest.mark.parametrize("how", ["fit", "partial_fit"])
SHAPE = (3, 5, 6)


@pytest.fixture
def learn(small, clusters):
    """Return a function that learns the samples of the given classes."""
    x, y = clusters(labels=("a", "b", "c", "d"), n=12, shape=SHAPE)
    x = x[3:]  # so that not all classes are of one size

    def learn(labels, settings=None, how="fit", **changes):
        model = small(**{"expected_samples": 40, "channels": "first"} | (settings or {}) | changes)
        mine = [k for k, label in enumerate(y[3:]) if label in labels]
        if how == "fit":
            return model.fit(x[mine], [y[3 + k] for k in mine])
        for label in labels:
            for part in np.array_split([k for k in mine if y[3 + k] == label], 3):
                model.partial_fit(x[part], [label] * len(part))
        return model

    learn.x, learn.y = x, y[3:]
    return learn


# ------------------------------------------------------------------------------- merging


@every_setting
@ways
def test_merged_equals_trained_together(how, settings, learn, state):
    together = learn("abcd", settings, how)
    merged = learn("ab", settings, how).merge(learn("cd", settings, how))
    assert state(merged) == state(together)
    assert merged.classes_.tolist() == ["a", "b", "c", "d"]
    assert merged.samples_seen_ == together.samples_seen_
    np.testing.assert_allclose(merged.errors(learn.x), together.errors(learn.x), rtol=1e-5)
    assert merged.n_parameters_ == together.n_parameters_


def test_merged_in_the_order_of_learning_scores_bit_identically(learn):
    together = learn("abcd", how="partial_fit")
    merged = learn("ab", how="partial_fit").merge(learn("cd", how="partial_fit"))
    np.testing.assert_array_equal(merged.errors(learn.x), together.errors(learn.x))
    np.testing.assert_array_equal(merged.predict(learn.x), together.predict(learn.x))
    assert merged.calibrate().threshold_ == together.calibrate().threshold_


@every_setting
def test_the_order_of_merging_makes_no_difference(settings, learn, state):
    def parts():
        return [learn(labels, settings) for labels in ("c", "a", "bd")]

    one, two, three = parts()
    first = one.merge(two).merge(three)
    one, two, three = parts()
    second = three.merge(two).merge(one)
    one, two, three = parts()
    third = two.merge(three.merge(one))
    assert state(first) == state(second) == state(third)
    for other in (second, third):
        np.testing.assert_allclose(other.errors(learn.x), first.errors(learn.x), rtol=1e-5)


@pytest.mark.parametrize("settings", [SETTINGS["mlp"], SETTINGS["conv"], SETTINGS["ensemble"]])
@ways
def test_learning_goes_on_after_merging(how, settings, learn, state):
    together = learn("abcd", settings, how)
    merged = learn("cd", settings, how).merge(learn("ab", settings, how))
    for model in (together, merged):
        model.partial_fit(learn.x[:9], learn.y[:9]).partial_fit(learn.x[:2], ["e", "c"])
    assert state(merged) == state(together)
    assert merged.classes_.tolist() == ["a", "b", "c", "d", "e"]


def test_the_other_model_stays_as_it_was(learn, state):
    one, two = learn("ab"), learn("cd")
    before = state(two)
    one.merge(two).partial_fit(learn.x, learn.y)
    assert state(two) == before
    assert two.classes_.tolist() == ["c", "d"]


def test_a_merged_model_is_calibrated_anew(learn):
    assert not hasattr(learn("ab").calibrate().merge(learn("cd").calibrate()), "threshold_")


@pytest.mark.parametrize(
    "free",
    [
        {"expected_samples": {"c": 30, "d": 30}},
        {"random_state": np.random.RandomState(0)},
        {"device": torch.device("cpu")},
        {"channels": "auto"},
    ],
    ids=str,
)
def test_what_does_not_matter_may_differ(free, learn):
    one = learn("ab", random_state=np.random.RandomState(0).randint(2**31))
    two = learn("cd", **{"random_state": one.seed_} | free)
    assert one.merge(two).classes_.tolist() == ["a", "b", "c", "d"]


def doubled(x):
    return 2 * x.flatten(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"random_state": 1}, "seed is 0 here, but 1 in the other"),
        ({"lr": 0.02}, "lr is 0.01 here, but 0.02 in the other"),
        ({"student_width": 5}, "student_width is 4 here, but 5 in the other"),
        ({"teacher_width": 51}, "teacher_width is 50 here, but 51 in the other"),
        ({"output_dim": 7}, "output_dim is 6 here, but 7 in the other"),
        ({"pool": 3}, "pool is None here, but 3 in the other"),
        ({"hidden_layers": 2}, "hidden_layers is 1 here, but 2 in the other"),
        ({"activation": "identity"}, "activation is 'auto' here, but 'identity' in the other"),
        ({"init": "xavier"}, "init is 'kaiming' here, but 'xavier' in the other"),
        ({"ensemble": 2}, "ensemble is 1 here, but 2 in the other"),
        ({"schedule": "constant"}, "schedule is 'linear' here, but 'constant' in the other"),
        ({"batch_size": 2}, "batch_size is 1 here, but 2 in the other"),
        ({"equal_budgets": True}, "equal_budgets is False here, but True in the other"),
        ({"architecture": "mlp"}, "architecture is 'auto' here, but 'mlp' in the other"),
        ({"mean": [1, 2, 3]}, r"mean is None here, but \[1, 2, 3\] in the other"),
        ({"std": 2}, "std is None here, but 2 in the other"),
        ({"teacher": doubled, "output_dim": None}, "cannot merge: (output_dim|teacher)"),
    ],
    ids=str,
)
def test_other_settings_are_refused(changes, message, learn, state):
    one, two = learn("ab"), learn("cd", **changes)
    for mine, theirs in ((one, two), (two, one)):
        before = state(mine), state(theirs)
        with pytest.raises(ValueError, match=message if mine is one else "cannot merge"):
            mine.merge(theirs)
        assert (state(mine), state(theirs)) == before


def test_another_teacher_is_refused(learn):
    one = learn("ab", teacher=doubled, output_dim=None)
    two = learn("cd", teacher=torch.nn.Flatten(), output_dim=None)
    with pytest.raises(ValueError, match="cannot merge: teacher checksum is"):
        one.merge(two)


def test_a_known_class_is_refused(learn, state):
    one, two = learn("abc", how="partial_fit"), learn("bcd", how="partial_fit")
    before = state(one)
    with pytest.raises(ValueError, match="both models know 'b', 'c'; .*forget it in one of them"):
        one.merge(two)
    with pytest.raises(ValueError, match="both models know 'a', 'b', 'c'"):
        one.merge(one)
    assert state(one) == before


def test_another_shape_is_refused(learn, small, state):
    one = learn("ab")
    other = small(channels="first", expected_samples=40).fit(np.ones((2, 3, 5, 7)), ["c", "d"])
    before = state(one)
    with pytest.raises(ValueError, match=r"input shape is \(3, 5, 6\) here, but \(3, 5, 7\)"):
        one.merge(other)
    assert state(one) == before


def test_what_has_not_learned_is_refused(learn, small, state):
    one, settings = learn("ab"), {"channels": "first", "expected_samples": 40}
    before = state(one)
    with pytest.raises(NotFittedError):
        one.merge(small(**settings))
    with pytest.raises(NotFittedError):
        small(**settings).merge(one)
    assert state(one) == before


@pytest.mark.parametrize("other", [LogisticRegression(), "model.pecil", None], ids=repr)
def test_another_type_is_refused(other, learn):
    with pytest.raises(ValueError, match="can only merge a PEC, not"):
        learn("ab").merge(other)


# ---------------------------------------------------------------------------- forgetting


@every_setting
@ways
@pytest.mark.parametrize("label", ["a", "c", "d"])
def test_forgetting_equals_never_having_seen(label, how, settings, learn, state):
    rest = "abcd".replace(label, "")
    model, without = learn("abcd", settings, how), learn(rest, settings, how)
    model.forget(label)
    assert state(model) == state(without)
    assert model.classes_.tolist() == list(rest) == sorted(model.samples_seen_)
    np.testing.assert_allclose(model.errors(learn.x), without.errors(learn.x), rtol=1e-5)
    assert label not in model.predict(learn.x)
    assert model.n_parameters_ == 3 * model.n_parameters_per_class_


@ways
def test_learning_goes_on_after_forgetting(how, learn, state):
    model, without = learn("abcd", how=how).forget("b"), learn("acd", how=how)
    for each in (model, without):
        each.partial_fit(learn.x, learn.y).partial_fit(learn.x[:3], ["e", "d", "b"])
    assert state(model) == state(without)


def test_what_was_forgotten_can_be_learned_anew(learn, state):
    together = learn("abcd", how="partial_fit")
    again = learn("abcd", how="partial_fit").forget("b").merge(learn("b", how="partial_fit"))
    assert state(again) == state(together)


def test_the_threshold_is_forgotten_too(learn):
    model = learn("abc").calibrate()
    assert model.threshold_ > 0
    assert not hasattr(model.forget("c"), "threshold_")


def test_numpy_labels_can_be_forgotten(small):
    model = small().fit(np.ones((3, 5)), np.array([1, 2, 3]))
    for label in (np.int64(2), 3):
        model.forget(label)
    assert model.classes_.tolist() == [1]


def test_an_unknown_class_cannot_be_forgotten(learn, state):
    model = learn("abc", how="partial_fit")
    before = state(model)
    with pytest.raises(ValueError, match="'x' is not a known class; known are 'a', 'b', 'c'"):
        model.forget("x")
    with pytest.raises(ValueError, match=r"\['a'\] is not a known class"):
        model.forget(["a"])
    assert state(model) == before


def test_many_known_classes_are_not_all_listed(small):
    model = small().fit(np.ones((30, 5)), list(range(30)))
    with pytest.raises(ValueError, match=r"known are 0, 1, .*, 19 and 10 more$"):
        model.forget("x")


def test_the_last_class_cannot_be_forgotten(learn, state):
    model = learn("a")
    before = state(model)
    with pytest.raises(ValueError, match="cannot forget 'a': it is the only class of this model"):
        model.forget("a")
    assert state(model) == before


@pytest.mark.parametrize("kind", [PEC, WhitenedPEC])
def test_models_of_other_columns_or_other_kinds_of_numbers_stay_apart(kind):
    random = np.random.default_rng(0)
    x, y = random.random((40, 3)), np.arange(40) % 2
    table = pd.DataFrame(x, columns=["a", "b", "c"])
    one = kind(random_state=0).fit(table, y)
    with pytest.raises(ValueError, match="cannot merge: feature_names_in_ is .'a', 'b', 'c'. here"):
        one.merge(kind(random_state=0).fit(table[["c", "b", "a"]], y + 2))
    pixels = random.integers(0, 256, (40, 3))
    bytes_ = kind(random_state=0).fit(pixels.astype(np.uint8), y)
    with pytest.warns(UserWarning, match="root mean square"):
        numbers = kind(random_state=0).fit(pixels.astype(float), y + 2)
    with pytest.raises(ValueError, match="cannot merge: one learned from uint8"):
        bytes_.merge(numbers)
