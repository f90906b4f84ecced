"""Whitened PEC: exact in any order, merged and unlearned, saved, refused, calibrated."""

import pickle
import signal
import threading
from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import pecil
from pecil import PEC, ModelFileError, WhitenedPEC
from pecil.pec import base, saving, whitened
from pecil.pec.scatter import Scatter
from pecil.teachers import RECIPES, Filters, Identity, RandomFeatures, filters

ROUNDING = (
    "float32 products round differently with a sample's place in a batch; the check asks for "
    "1e-7, below the resolution of float32"
)
SETTINGS = {
    "rbf": {"teacher": "rbf"},
    "relu": {"teacher": "relu"},
    "identity": {"teacher": "identity", "dim": None},
    "filters": {"teacher": Filters(sizes=(3,), grids=(1, 2)), "dim": 60},
    "strokes": {"teacher": "strokes"},
    "module": {"teacher": torch.nn.Flatten(), "dim": None},
    "fixed shrinkage": {"teacher": "rbf", "shrinkage": 0.2},
    "normalised": {"teacher": "rbf", "mean": [0.5, 1, 2], "std": (1, 2, 3.5)},
    "memory": {"teacher": "rbf", "dim": None, "memory": 900},
    "views": {"teacher": "rbf", "views": 5},
}
every_setting = pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
SHAPE = (3, 5, 6)


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    """Draw filters from a handful of pictures: the drawing of hundreds takes a second."""
    monkeypatch.setattr(filters, "PICTURES", 4)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.pecil"


def make(**changes):
    return WhitenedPEC(**{"dim": 30, "device": "cpu"} | changes)


def everything(model):
    """Return all that a model has learned, to the last bit."""
    scatter = model._scatter
    seen = scatter.seen
    tensors = (scatter._matrix, scatter.waiting, scatter.means, seen.own, seen.shared)
    return (
        [tensor.numpy().tobytes() for tensor in tensors],
        (scatter.counts[:], scatter.total, model.samples_seen_, model.classes_.tolist()),
        ([errors.tolist() for errors in model._recent], model._excess.tolist()),
        (model.input_shape_, model._teacher.checksum, getattr(model, "threshold_", None)),
    )


def assert_same(one, two, x, rtol=1e-4):
    """Compare two models up to rounding: counts, means, scatter, errors."""
    assert one.samples_seen_ == two.samples_seen_
    assert one._scatter.total == two._scatter.total
    mine, theirs = one._scatter, two._scatter
    order = [two._slots[label] for label in one._labels]
    size = float(theirs.matrix.abs().max())
    np.testing.assert_allclose(mine.matrix, theirs.matrix, rtol=1e-4, atol=3e-6 * size)
    np.testing.assert_allclose(mine.means, theirs.means[order], rtol=1e-4, atol=2e-5)
    columns = [two.classes_.tolist().index(label) for label in one.classes_.tolist()]
    np.testing.assert_allclose(one.errors(x), two.errors(x)[:, columns], rtol=rtol, atol=rtol)
    assert one.shrinkage_ == pytest.approx(two.shrinkage_, rel=1e-3)


def separate(y, *labels):
    """Return the positions of some labels."""
    return [k for k, label in enumerate(y) if label in labels]


# ------------------------------------------------------------------ scikit-learn manners


@pytest.mark.parametrize("teacher", ["auto", "relu"])
@pytest.mark.filterwarnings("ignore:inputs have a root mean square")
def test_check_estimator(teacher):
    expected = {
        "check_methods_sample_order_invariance": ROUNDING,
        "check_methods_subset_invariance": ROUNDING,
    }
    results = check_estimator(
        make(teacher=teacher), expected_failed_checks=expected, on_fail=None, on_skip=None
    )
    outcome = {result["check_name"]: result for result in results}
    reasons = {
        status: {k: str(r["exception"]) for k, r in outcome.items() if r["status"] == status}
        for status in ("failed", "xfail", "skipped")
    }
    assert len(outcome) > 50
    assert not reasons["failed"]
    for reason in reasons["xfail"].values():
        assert "is not invariant" in reason
    for reason in reasons["skipped"].values():
        assert "SCIPY_ARRAY_API is not set" in reason


def test_works_in_a_pipeline(clusters):
    x, y = clusters()
    pipeline = make_pipeline(StandardScaler(), make()).fit(1000 * x, y)
    assert pipeline.score(1000 * x, y) > 0.9


def test_works_in_a_grid_search(clusters):
    x, y = clusters(n=40)
    grid = {"shrinkage": ["oas", 0.5], "teacher": ["rbf", RandomFeatures("rbf", 0.01), "identity"]}
    search = GridSearchCV(make(), grid, cv=2, error_score="raise").fit(x, y)
    assert len(search.cv_results_["params"]) == 6 and search.best_score_ > 0.9
    assert_same(search.best_estimator_, make(**search.best_params_).fit(x, y), x)


def test_parameters_are_stored_as_given_and_cloned(clusters):
    model = make(mean=[1, 2], teacher=Filters(sizes=(3,)), shrinkage=0.5)
    assert clone(model).get_params() == model.get_params()
    assert model.set_params(dim=7).dim == 7
    copy = clone(make().fit(*clusters()))
    assert not hasattr(copy, "classes_") and not hasattr(copy, "samples_seen_")


def test_what_a_fitted_model_tells(clusters):
    model = make().fit(*clusters(labels=("b", "c", "a"), n=4))
    assert model.classes_.tolist() == ["a", "b", "c"]
    assert model.samples_seen_ == {"a": 4, "b": 4, "c": 4}
    assert (model.input_shape_, model.n_features_in_, model.seed_, model.dim_) == ((5,), 5, 0, 30)
    assert model.n_parameters_ == 30 * 31 / 2 + 3 * 30
    assert 0 < model.shrinkage_ < 1 and 0.05 <= model.temper_ <= 2
    assert model.device_ == torch.device("cpu")


def test_fit_starts_from_scratch(clusters):
    model = make().fit(*clusters(labels=("x", "y"), shape=(3,)))
    model.calibrate(clusters(shape=(3,))[0])
    assert everything(model.fit(*clusters())) == everything(make().fit(*clusters()))


@pytest.mark.parametrize("random_state", [0, 7, np.random.RandomState(3), None], ids=str)
def test_the_seed_is_kept(random_state, clusters):
    model = make(random_state=random_state).fit(*clusters())
    same, other = (make(random_state=model.seed_ + k).fit(*clusters()) for k in (0, 1))
    assert everything(model) == everything(same) != everything(other)


def test_learning_leaves_the_world_as_it_was(clusters):
    x, y = clusters(shape=SHAPE)
    given_, numbers = x.copy(), (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    make(dim=120, mean=1, std=2, channels="first").fit(x, y).partial_fit(x[:1], y[:1]).predict(x)
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == numbers
    np.testing.assert_array_equal(x, given_)


# ------------------------------------------------------------------------------- samples


@pytest.mark.parametrize(
    ("shape", "teacher"),
    [
        ((5,), "rbf"),
        ((9, 8), "strokes"),
        ((9, 8, 3), "natural"),
        ((3, 9, 8), "natural"),
        ((4, 4), "strokes"),
        ((3, 9), "rbf"),  # too small for filters
        ((9, 3, 3), "rbf"),
        ((1, 1), "rbf"),
    ],
    ids=str,
)
def test_auto_chooses_by_shape(shape, teacher):
    x = np.random.default_rng(0).random((8, *shape)).astype(np.float32)
    model, named = (make(dim=120, teacher=name).fit(x, [0, 1] * 4) for name in ("auto", teacher))
    assert everything(model) == everything(named)


@pytest.mark.parametrize("channels", [1, 3])
def test_vectors_and_images_of_every_layout(channels):
    rng = np.random.default_rng(0)
    last = rng.integers(0, 256, (12, 9, 8, channels), dtype=np.uint8)
    first = np.ascontiguousarray(last.transpose(0, 3, 1, 2))
    y = ["a", "b", "c"] * 4
    options = {"teacher": Filters(sizes=(3,), grids=(1, 2)), "dim": 60}
    expected = make(**options, channels="last").fit(last, y).errors(last)
    layouts = [(last, "last"), (last, "auto"), (first, "first"), (first, "auto")]
    layouts += [(last[..., 0], "auto")] if channels == 1 else []
    for x, layout in layouts:
        for same in (x, torch.from_numpy(x), np.float32(x / 255), torch.from_numpy(x / 255)):
            model = make(**options, channels=layout).fit(same, y)
            assert model.input_shape_ == (channels, 9, 8)
            np.testing.assert_allclose(model.errors(same), expected, rtol=1e-3)


@pytest.mark.parametrize("container", [np.asarray, torch.tensor, pd.DataFrame, np.ndarray.tolist])
@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "float64"])
def test_vectors_of_any_kind(container, dtype):
    x = np.random.default_rng(0).integers(0, 2, (12, 5))
    y = ["a", "b", "c"] * 4
    expected = make().fit(x.astype(np.float32), y).errors(x.astype(np.float32))
    scale = 255 if dtype == "uint8" and container is not np.ndarray.tolist else 1
    given_ = container((x * scale).astype(dtype))
    np.testing.assert_allclose(make().fit(given_, y).errors(given_), expected, rtol=1e-5)


def test_normalisation():
    x = np.random.default_rng(0).normal(size=(12, 3, 5, 5)).astype(np.float32)
    y, mean, std = [0, 1] * 6, [1.0, 2.0, 3.0], [0.5, 1.0, 2.0]
    by_hand = (x - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    expected = make(teacher="rbf").fit(by_hand, y).errors(by_hand)
    for wrap in (list, tuple, np.array, torch.tensor):
        model = make(teacher="rbf", mean=wrap(mean), std=wrap(std)).fit(x, y)
        np.testing.assert_allclose(model.errors(x), expected, rtol=1e-3)


def test_names_of_columns_are_remembered():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(6, 2)), columns=["wide", "long"])
    model = make().fit(frame, ["a", "b"] * 3)
    assert model.feature_names_in_.tolist() == ["wide", "long"]
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame.rename(columns={"wide": "high"}))


LABELS = [(1, 2), ("a", "b"), (True, False), ((1, 2), (3, 4)), (None, 1), ("a", 1), (10**30, 1)]


@pytest.mark.parametrize("labels", LABELS, ids=str)
def test_any_hashable_labels(labels, clusters):
    x, y = clusters(labels=labels)
    model = make().fit(x, y)
    right = [p == label for p, label in zip(model.predict(x).tolist(), y, strict=True)]
    assert model.score(x, y) == np.mean(right) > 0.9
    assert set(map(repr, model.samples_seen_)) == set(map(repr, labels))


# ------------------------------------------------------------------------------ learning


@pytest.mark.parametrize("name", ["natural", "signs", "strokes", "relu", "rbf", "identity"])
def test_every_teacher_learns(name, clusters):
    shape = (1 if name == "strokes" else 3, 8, 8)
    model = make(teacher=name, dim=120, channels="first").fit(*clusters(shape=shape))
    assert model.score(*clusters(shape=shape, seed=1)) > 0.95


def test_identity_is_linear_discriminant_analysis(clusters):
    """With the same shrinkage, and classes of one size, scikit-learn's says the same."""
    x, y = clusters(n=50, labels=("a", "b", "c", "d"))
    x += np.random.default_rng(0).normal(scale=4, size=x.shape).astype(np.float32)
    model = make(teacher="identity", dim=None, shrinkage=0.3).fit(x, y)
    other = LinearDiscriminantAnalysis("lsqr", shrinkage=model.shrinkage_).fit(x, y)
    gaps = other.decision_function(x) - model.discriminants(x)
    np.testing.assert_allclose(gaps - gaps[:, :1], np.zeros_like(gaps), atol=1e-3)
    assert (model.predict(x) == other.predict(x)).all()


def test_learns_classes_one_after_another(clusters):
    x, y = clusters(n=40)
    model = make()
    for label in "cab":
        mine = separate(y, label)
        model.partial_fit(x[mine], [label] * len(mine))
        assert set(model.predict(x).tolist()) == set(model.classes_.tolist())  # none to come
    assert model.score(*clusters(seed=1)) > 0.95


def test_partial_fit_ignores_classes(clusters):
    x, y = clusters()
    told = make().partial_fit(x, y, classes=["a", "b", "c", "d"])
    assert everything(told) == everything(make().partial_fit(x, y))
    assert "d" not in told.classes_ and "d" not in told.predict(10 * x)


@given(st.data())
def test_neither_order_nor_batches_matter(clusters, data):
    x, y = clusters(n=10)
    order = np.array(data.draw(st.permutations(range(30)), label="order"))
    cuts = data.draw(st.sets(st.integers(1, 29)), label="cuts")
    stream = make()
    for part in np.split(order, sorted(cuts)):
        stream.partial_fit(x[part], [y[k] for k in part])
    assert_same(stream, make().fit(x, y), x)


@every_setting
def test_single_samples_give_the_same_model(options, clusters):
    x, y = clusters(shape=SHAPE)
    steady = make(channels="first", **options).fit(x, y)
    stream = make(channels="first", **options)
    for k in np.random.default_rng(0).permutation(len(y)):
        stream.partial_fit(x[[k]], [y[k]])
        if stream._scatter.total > 10:
            stream.predict(x[:2])
    assert_same(stream, steady, x, rtol=2e-3)


@pytest.mark.parametrize("held", [1, 16])
@every_setting
def test_more_samples_than_are_held_at_a_time(options, held, clusters, monkeypatch):
    x, y = clusters(shape=SHAPE)
    once = make(channels="first", **options).fit(x, y)
    twice = make(channels="first", **options).fit(np.tile(x, (2, 1, 1, 1)), y * 2)
    monkeypatch.setattr(whitened, "HELD", held)
    model = make(channels="first", **options).fit(x, y)
    assert_same(model, once, x, rtol=1e-3)
    assert_same(model.partial_fit(x, y), twice, x, rtol=1e-3)


def test_a_large_lesson_keeps_the_threshold_as_a_small_one_does(clusters, monkeypatch):
    x, y = clusters()
    model = make().fit(x, y).calibrate(x)
    threshold = model.threshold_
    assert model.partial_fit(x, y).threshold_ == threshold
    monkeypatch.setattr(whitened, "HELD", 7)
    assert model.partial_fit(x, y).threshold_ == threshold


@pytest.mark.parametrize("held", [4096, 7])
def test_parameters_set_after_learning_are_for_the_next_fit(held, clusters, file, monkeypatch):
    monkeypatch.setattr(whitened, "HELD", held)
    x, y = clusters()
    steady, model = (make().fit(x, y) for _ in range(2))
    model.set_params(mean=7, dim=9, teacher="relu", random_state=8)
    assert_same(model.partial_fit(x, y), steady.partial_fit(x, y), x)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).errors(x), model.errors(x))
    model.save(file)
    np.testing.assert_allclose(WhitenedPEC.load(file, device="cpu").errors(x), steady.errors(x))


@pytest.mark.parametrize("shape", [(5,), (3, 8, 8)], ids=str)
@pytest.mark.parametrize("labels", [["a"], ["a", "b"], ["a", "b", "c"]], ids=len)
def test_one_sample_of_each_class_is_enough(labels, shape, clusters):
    x, y = clusters(labels=labels, n=1, shape=shape)
    model = make(dim=120).partial_fit(x, y)
    assert model.predict(x).tolist() == y
    np.testing.assert_allclose(model.predict_proba(x).sum(1), 1)


@pytest.mark.parametrize("samples", [np.zeros((4, 5)), np.ones((4, 3, 8, 8))], ids=["0", "flat"])
def test_samples_without_any_spread(samples):
    model = make(dim=120).fit(samples, ["a", "b"] * 2)
    assert np.isfinite(model.errors(samples)).all()
    assert np.isfinite(model.predict_proba(samples)).all()


# ------------------------------------------------------------------------------- memory


@given(st.integers(1, 300), st.integers(1, 200), st.integers(0, 10**9), st.integers(0, 3))
def test_memory_gives_the_largest_dimension_that_fits(dim, classes, more, views):
    views = min(views, dim)

    def numbers(dim, classes=classes):
        return dim * (dim + 1) // 2 + classes * dim * (1 + views)

    memory = numbers(dim) + more % (numbers(dim + 1) - numbers(dim))
    model = make(dim=None, memory=memory, views=views, expected_classes=classes)
    model.fit(np.eye(2, 3), [0, 1])
    assert model.dim_ == dim
    assert model.set_params(views=7).n_parameters_ == numbers(dim, classes=2)


def test_default_memory():
    sizes = {}
    for name in ("natural", "signs", "strokes", "relu", "rbf"):
        model = make(dim=None, teacher=name)
        model.input_shape_ = (3, 8, 8)
        sizes[name] = model._dim(RECIPES[name])
    assert sizes == {"natural": 4722, "signs": 4722, "strokes": 1403, "relu": 1403, "rbf": 1403}


def test_filters_take_what_they_can_of_the_dimension():
    model = make(dim=100, teacher="natural").fit(np.random.rand(4, 8, 8, 3), [0, 1] * 2)
    assert 60 < model.dim_ <= 100
    assert model.n_parameters_ == model.dim_ * (model.dim_ + 1) // 2 + 2 * model.dim_


# ------------------------------------------------------------------------------- mirrors


def test_mirrored_images_are_the_same_if_asked_for(clusters):
    x, y = clusters(shape=(3, 8, 8))
    models = {m: make(dim=120, teacher="natural", mirror=m).fit(x, y) for m in (None, True, False)}
    for mirror in (None, True):
        errors = models[mirror].errors(x)
        np.testing.assert_allclose(models[mirror].errors(x[..., ::-1]), errors, rtol=1e-3)
        assert models[mirror].score(x[..., ::-1], y) > 0.95
    assert np.abs(models[False].errors(x[..., ::-1]) - models[False].errors(x)).max() > 0.5
    assert everything(models[None]) == everything(models[True]) != everything(models[False])


@pytest.mark.parametrize("name", ["strokes", "signs"])
def test_by_default_the_teacher_decides_about_mirrors(name, clusters):
    x, y = clusters(shape=(3, 8, 8))
    models = {m: make(dim=120, teacher=name, mirror=m).fit(x, y) for m in (None, True, False)}
    assert everything(models[None]) == everything(models[False]) != everything(models[True])
    own = make(dim=120, teacher=Filters(mirror=False), mirror=True).fit(x, y)
    assert everything(own) == everything(make(dim=120, teacher=Filters()).fit(x, y))


# ------------------------------------------------------------------------------ teachers


def test_a_recipe_is_what_its_name_stands_for(clusters):
    x, y = clusters(shape=(3, 8, 8))
    for name, recipe in RECIPES.items():
        named, own = (make(dim=120, teacher=teacher).fit(x, y) for teacher in (name, recipe))
        assert everything(named) == everything(own)


def test_a_function_as_teacher(clusters):
    x, y = clusters()
    asked = []

    def powers(samples):
        asked.append(samples.shape)
        return np.concatenate([samples.numpy() ** k for k in (1, 2)], 1)

    model = make(teacher=powers, dim=None, mean=1).fit(x, y)
    assert model.dim_ == 10 and set(asked) == {(2, 5), (10, 5)}
    squares = np.concatenate([x - 1, (x - 1) ** 2], 1)
    same = make(teacher="identity", dim=None).fit(squares, y)
    np.testing.assert_allclose(model.errors(x), same.errors(squares), rtol=1e-3)


def test_a_module_as_teacher_is_asked_in_evaluation_mode(clusters):
    module = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(7)
    ).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = make(teacher=module, dim=None).fit(*clusters())
    x, y = clusters(seed=1)
    assert model.score(x, y) > 0.9 and np.array_equal(model.errors(x), model.errors(x))
    assert module.training and module[1].training
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (lambda x: x.sum(1), r"shape \(2, d\), but it returned shape \(2,\)"),
        (lambda x: x[:1], r"shape \(2, d\), but it returned shape \(1, 5\)"),
        (lambda x: x / 0, "teacher returned NaN or infinite outputs"),
        (lambda x: x if len(x) == 2 else x[:, :1], r"shape \(10, 5\), but it returned shape"),
    ],
    ids=["flat", "too few", "infinite", "fickle"],
)
def test_a_teacher_that_does_not_fit_is_refused(teacher, message, clusters):
    model = make(teacher=teacher, dim=None)
    with pytest.raises(ValueError, match=message):
        model.fit(*clusters())
    assert not hasattr(model, "classes_")


class Fussy:
    """A teacher that fails on bright samples."""

    def __call__(self, x):
        if x.max() > 100:
            raise ValueError("too bright")
        return x


@pytest.mark.parametrize("held", [4096, 16, 1])
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
@pytest.mark.parametrize("bright", [0, 79])
def test_a_failing_teacher_changes_nothing(bright, method, held, clusters, monkeypatch):
    """Not even one that fails in the middle of a long lesson with a new class."""
    x, y = clusters()
    model = make(teacher=Fussy(), dim=None).fit(x, y).calibrate(x)
    before, errors = everything(model), model.errors(x)
    more, labels = clusters(labels=("a", "b", "c", "new"), seed=1)
    more[bright] = 1000
    with monkeypatch.context() as few, pytest.raises(ValueError, match="too bright"):
        few.setattr(whitened, "HELD", held)
        getattr(model, method)(more, labels)
    assert everything(model) == before
    np.testing.assert_array_equal(model.errors(x), errors)
    model.partial_fit(x, y)
    assert model.classes_.tolist() == ["a", "b", "c"]


@pytest.mark.parametrize("held", [4096, 16])
def test_an_interrupted_lesson_is_learned_whole_or_not_at_all(held, clusters, monkeypatch):
    x, y = clusters()
    model, twin = make().fit(x, y), make().fit(x, y)
    before = everything(model)
    assert everything(twin) == before
    more, labels = clusters(labels=("a", "b", "c", "new"), seed=1)
    whole = everything(twin.partial_fit(more, labels))
    add = Scatter.add

    def interrupted(self, slot, features):
        add(self, slot, features)
        if slot == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as now, pytest.raises(KeyboardInterrupt):
        now.setattr(whitened, "HELD", held)
        now.setattr(Scatter, "add", interrupted)
        model.partial_fit(more, labels)
    assert everything(model) == (whole if held > len(more) else before)
    assert model.classes_.tolist() == sorted(model.samples_seen_)
    assert model.predict(more).shape == (len(more),)


@pytest.mark.parametrize("change", ["merge", "unlearn", "forget"])
def test_an_interrupted_change_is_made_whole_or_not_at_all(change, clusters, monkeypatch):
    x, y = clusters()
    other = make().fit(*clusters(labels=("c", "new"), seed=1))
    model = make().fit(x, y)
    if change == "unlearn":
        model.merge(other)
    before, errors = everything(model), model.errors(x)

    def interrupted(self, *options, **more):
        usual(self, *options, **more)
        signal.raise_signal(signal.SIGINT)

    name = "remove" if change == "forget" else "merge"
    usual = getattr(Scatter, name)
    with monkeypatch.context() as now, pytest.raises(KeyboardInterrupt):
        now.setattr(Scatter, name, interrupted)
        getattr(model, change)("c" if change == "forget" else other)
    assert everything(model) == before
    np.testing.assert_allclose(model.errors(x), errors, rtol=1e-12)
    getattr(model, change)("c" if change == "forget" else other)
    assert ("new" in model.classes_) == (change == "merge")


def test_a_teacher_need_not_be_copied(clusters, monkeypatch):
    class Locked:
        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, x):
            with self.lock:
                return x

    model = make(teacher=Locked(), dim=None).fit(*clusters())
    monkeypatch.setattr(whitened, "HELD", 16)
    assert model.partial_fit(*clusters()).samples_seen_ == {"a": 40, "b": 40, "c": 40}


# --------------------------------------------------------------------------- predictions


@pytest.mark.parametrize("n_classes", [1, 2, 3, 5])
def test_all_predictions_agree(n_classes, clusters):
    x, y = clusters(labels=list(range(n_classes)))
    x += np.random.default_rng(0).normal(scale=3, size=x.shape).astype(np.float32)
    model = make().fit(x, y)
    errors, predicted, scores = model.errors(x), model.predict(x), model.discriminants(x)
    decision, probability = model.decision_function(x), model.predict_proba(x)
    assert errors.shape == probability.shape == scores.shape == (len(x), n_classes)
    np.testing.assert_array_equal(predicted, model.classes_[errors.argmin(1)])
    np.testing.assert_array_equal(predicted, model.classes_[scores.argmax(1)])
    np.testing.assert_array_equal(predicted, model.classes_[probability.argmax(1)])
    np.testing.assert_allclose(probability.sum(1), 1)
    assert ((probability >= 0) & (probability <= 1)).all()
    gaps = -0.5 * model.dim_ * errors - scores  # a term that the sample alone sets
    np.testing.assert_allclose(gaps - gaps[:, :1], np.zeros_like(gaps), atol=1e-3)
    if n_classes == 2:
        np.testing.assert_allclose(decision, scores[:, 1] - scores[:, 0])
    else:
        np.testing.assert_array_equal(decision, scores)
    np.testing.assert_array_equal(model.novelty(x), errors.min(1))
    np.testing.assert_array_equal(model.score_samples(x), -errors.min(1))
    assert model.score(x, y) == np.mean(predicted == np.array(y))


def test_more_features_than_there_is_room_for_are_refused(clusters):
    with pytest.raises(MemoryError, match=r"10,000,000 features.* GiB.*give less memory or a smal"):
        make(dim=10**7).fit(*clusters())


def test_decisions_can_be_calibrated():
    """They leave out what a sample is for all classes alike, which would drown one against rest."""
    x, y = load_digits(return_X_y=True)
    model = make(dim=300, mean=8, std=8).fit(x[:400], y[:400])
    calibrated = CalibratedClassifierCV(FrozenEstimator(model)).fit(x[400:1000], y[400:1000])
    assert calibrated.score(x[1000:], y[1000:]) > model.score(x[1000:], y[1000:]) - 0.02


def test_linear_students_tell_classes_of_one_mean_apart():
    """Half of the features are the other half, or its opposite: only that tells the class."""
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=2000)
    half = rng.normal(size=(2000, 5))
    x = np.concatenate([half, half * (2 * y - 1)[:, None]], 1) + 0.3 * rng.normal(size=(2000, 10))
    model = make(teacher="identity", dim=None, views=5, trust=0).fit(x[:1000], y[:1000])
    blind = model.score(x[1000:], y[1000:])
    constant = make(teacher="identity", dim=None).fit(x[:1000], y[:1000])
    np.testing.assert_allclose(model.errors(x), constant.errors(x), rtol=1e-5)
    model.set_params(trust=0.2)
    assert blind < 0.6 and model.score(x[1000:], y[1000:]) > 0.8
    scores = -0.5 * model.dim_ * model.errors(x)
    np.testing.assert_allclose(
        np.diff(model.discriminants(x)), np.diff(scores), rtol=1e-3, atol=1e-3
    )


def test_errors_are_whitened_distances(clusters):
    x, y = clusters(n=40)
    model = make(teacher="identity", dim=None, shrinkage=0.1).fit(x, y)
    wide, labels = x.astype(float), np.array(y)
    means = np.stack([wide[labels == label].mean(0) for label in "abc"])
    gap = wide - means[np.searchsorted(["a", "b", "c"], labels)]
    covariance, a = gap.T @ gap / len(x), model.shrinkage_
    shrunk = (1 - a) * covariance + a * np.trace(covariance) / 5 * np.eye(5)
    apart = wide[:, None] - means
    expected = np.einsum("ncd,de,nce->nc", apart, np.linalg.inv(shrunk), apart) / 5
    np.testing.assert_allclose(model.errors(x), expected, rtol=1e-3, atol=1e-2)
    own = model.errors(x).min(1)
    assert own.mean() == pytest.approx(1, abs=0.2)  # about 1 for a sample of the class


@pytest.mark.parametrize("shape", [(5,), (3, 6, 6)], ids=str)
def test_scores_do_not_depend_on_batch_or_order(shape, clusters, monkeypatch):
    model = make(dim=120).fit(*clusters(shape=shape))
    x, _ = clusters(shape=shape, seed=1)
    order = np.random.default_rng(0).permutation(len(x))
    for name in ("errors", "predict_proba"):
        method = getattr(model, name)
        whole = method(x)
        one_by_one = np.concatenate([method(sample[None]) for sample in x])
        np.testing.assert_allclose(one_by_one, whole, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(method(x[order]), whole[order], rtol=1e-4, atol=1e-4)
        with monkeypatch.context() as few:
            few.setattr(whitened, "HELD", 7)
            np.testing.assert_allclose(method(x), whole, rtol=1e-4, atol=1e-4)


def test_asking_changes_nothing(clusters):
    x, y = clusters()
    model = make().fit(x, y).partial_fit(x[:1], y[:1])
    before = everything(model)
    for name in ("errors", "predict", "predict_proba", "decision_function", "novelty"):
        getattr(model, name)(x)
    assert (model.temper_, model.shrinkage_) is not None and everything(model) == before


def calibration_error(probability, right):
    """Return the gap between confidence and accuracy, averaged over ten bins."""
    confidence = probability.max(1)
    bins = np.minimum((confidence * 10).astype(int), 9)
    return sum(
        (bins == k).mean() * abs(confidence[bins == k].mean() - right[bins == k].mean())
        for k in np.unique(bins)
    )


def noisy(n, seed, classes=10, dim=150):
    """Return classes that overlap, in many directions of very different spread."""
    spread = np.arange(1, dim + 1) ** -0.7
    centres = np.random.default_rng(0).normal(scale=0.2, size=(classes, dim))
    y = np.repeat(np.arange(classes), n)
    x = (centres[y] + np.random.default_rng(seed).normal(size=(len(y), dim))) * spread
    return x.astype(np.float32), y


@pytest.mark.parametrize(
    "batches",
    [
        200,
        20,
        5,
        1,
    ],
)
def test_probabilities_are_calibrated_where_plain_ones_are_not(batches):
    x, y = noisy(20, seed=1)
    model, order = make(teacher="identity", dim=None), np.random.default_rng(0).permutation(200)
    for part in np.array_split(order, batches):
        model.partial_fit(x[part], y[part])
    x, y = noisy(200, seed=2)
    scores, right = model.discriminants(x), model.predict(x) == y
    plain = np.exp(scores - scores.max(1, keepdims=True))
    plain /= plain.sum(1, keepdims=True)
    assert 0.3 < right.mean() < 0.6
    assert calibration_error(plain, right) > 0.35
    assert calibration_error(model.predict_proba(x), right) < 0.15


def test_with_many_samples_bayes_rule_holds():
    """Normal classes with one covariance, well known: nothing is to be tempered."""
    model = make(teacher="identity", dim=None)
    x, y = noisy(3000, seed=1, classes=4, dim=20)
    for part in np.array_split(np.random.default_rng(0).permutation(len(y)), 30):
        model.partial_fit(x[part], y[part])
    assert 0.8 < model.temper_ < 1.25
    x, y = noisy(500, seed=2, classes=4, dim=20)
    assert calibration_error(model.predict_proba(x), model.predict(x) == y) < 0.05


# ------------------------------------------------------------------------------- novelty


def test_strangers_are_more_novel_than_acquaintances(clusters):
    x, y = clusters(labels=range(6), n=100)
    known = np.array(y) < 3
    model = make().fit(x[known], np.array(y)[known])
    fresh, labels = clusters(labels=range(6), n=40, seed=1)
    new = np.array(labels) >= 3
    novelty = model.novelty(fresh)
    assert novelty[new].min() > 2 * novelty[~new].max()
    answers = [model.predict(fresh, reject_as=-1)]
    for samples in (None, clusters(labels=range(6), n=40, seed=2)[0][~new]):
        answers.append(model.calibrate(samples).predict(fresh, reject_as=-1))
    for answer in answers[:2]:
        assert (answer[new] == -1).all() and (answer[~new] == -1).mean() < 0.15
    np.testing.assert_array_equal(answers[0], answers[1])  # by default, the stream decides


@pytest.mark.parametrize("quantile", [0, 0.5, 0.9, 1])
def test_the_quantile_is_respected(quantile, clusters):
    x, y = clusters(n=40)
    model = make().fit(x, y).calibrate(x, quantile=quantile)
    accepted = model.predict(x, reject_as="?") != "?"
    np.testing.assert_array_equal(accepted, model.novelty(x) <= model.threshold_)
    assert model.threshold_ == np.quantile(model.novelty(x), quantile)
    np.testing.assert_array_equal(model.predict(x)[accepted], np.array(y)[accepted])
    for bad in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="quantile must be between 0 and 1, but it is"):
            model.calibrate(quantile=bad)


@pytest.mark.parametrize("batches", [1, 4, 40, 400])
def test_calibration_from_the_stream(batches, clusters):
    """About as many unseen samples are accepted as asked for."""
    x, y = clusters(labels=("a", "b"), n=200)
    model = make()
    for part in np.array_split(np.arange(400), batches):
        model.partial_fit(x[part], [y[k] for k in part])
    novelty = model.novelty(clusters(labels=("a", "b"), n=300, seed=1)[0])
    for quantile in (0.5, 0.9):
        accepted = (novelty <= model.calibrate(quantile=quantile).threshold_).mean()
        assert accepted == pytest.approx(quantile, abs=0.13)


@pytest.mark.parametrize(("n", "batches"), [(1, 1), (1, 2), (4, 8)])
def test_a_young_model_says_that_it_cannot_be_calibrated(n, batches, clusters):
    x, y = clusters(labels=("a", "b"), n=n)
    model = make()
    for part in np.array_split(np.arange(2 * n), batches):
        model.partial_fit(x[part], [y[k] for k in part])
    for ask in (model.calibrate, lambda: model.predict(x, reject_as="?")):
        with pytest.raises(ValueError, match=r"too few samples were learned.*calibrate\(X\)"):
            ask()
    assert not hasattr(model, "threshold_")
    assert model.calibrate(x).predict(x, reject_as="?").shape == (2 * n,)


@pytest.mark.parametrize("n", [20, 30])
@pytest.mark.parametrize("labels", ["ab", "abc"])
def test_one_lesson_is_enough_to_calibrate(labels, n, clusters):
    x, y = clusters(labels=labels, n=n)
    threshold = make().fit(x, y).calibrate().threshold_
    assert 0 < threshold < 10


def test_a_threshold_does_not_hang_on_a_few_errors():
    """Wherever the stream of digits stands: acquaintances are rarely taken for strangers."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    model = make(dim=300, mean=8, std=8)
    for k in range(1450):
        model.partial_fit(x[k : k + 1], y[k : k + 1])
        if k >= 200 and k % 50 == 0 or k in (320, 1440):
            rejected = (model.predict(x[1450:], reject_as=-1) == -1).mean()
            assert rejected < 0.2, k


@pytest.mark.parametrize("dim", [None, 300])
def test_a_threshold_from_few_samples_of_many_classes(dim):
    """The first classes were measured by a covariance that hardly knew anything."""
    x, y = load_digits(return_X_y=True)
    known = y < 8
    few = known & (np.arange(len(y)) < 600)
    model = make(dim=dim, mean=8, std=8).fit(x[few], y[few])
    novel = model.predict(x[1000:], reject_as=-1) == -1
    assert 0.005 < novel[known[1000:]].mean() < 0.15
    assert novel[~known[1000:]].mean() > 2 * novel[known[1000:]].mean()


def test_a_threshold_from_one_lesson_accepts_what_was_asked_for(clusters):
    accepted = []
    for seed in range(8):
        model = make().fit(*clusters(seed=seed)).calibrate()
        accepted.append((model.novelty(clusters(n=100, seed=9)[0]) <= model.threshold_).mean())
    assert np.mean(accepted) > 0.8 and min(accepted) > 0.6


@pytest.mark.parametrize("reject_as", [-1, "new", None, ("none", "of", "them")], ids=str)
@pytest.mark.parametrize("labels", [(1, 2), ("a", "b"), ((1, 2), (3, 4))], ids=str)
def test_rejected_samples_get_the_label_asked_for(reject_as, labels, clusters):
    x, y = clusters(labels=labels)
    model = make().fit(x, y).calibrate(x, quantile=0.5)
    novel = model.novelty(x) > model.threshold_
    assert 0 < novel.sum() < len(x)
    answer, usual = model.predict(x, reject_as=reject_as).tolist(), model.predict(x).tolist()
    for given_, rejected, label in zip(answer, novel, usual, strict=True):
        wanted = reject_as if rejected else label
        assert given_ == wanted and type(given_) is type(wanted)


# --------------------------------------------------------------- merging and unlearning


@every_setting
@pytest.mark.parametrize("shared", [False, True], ids=["disjoint", "shared"])
def test_merged_equals_trained_together(shared, options, clusters):
    x, y = clusters(labels=("a", "b", "c", "d"), n=12, shape=SHAPE)

    def learn(at):
        return make(channels="first", **options).fit(x[at], [y[k] for k in at])

    one = list(range(0, 30)) if shared else separate(y, "a", "b")
    two = [k for k in range(48) if k not in one]
    together, first, second = learn(range(48)), learn(one), learn(two)
    before = everything(second)
    merged = first.merge(second)
    assert merged is first and merged.classes_.tolist() == ["a", "b", "c", "d"]
    assert_same(merged, together, x)
    merged.partial_fit(x[:9], y[:9]).partial_fit(x[:2], ["e", "c"])
    together.partial_fit(x[:9], y[:9]).partial_fit(x[:2], ["e", "c"])
    assert_same(merged, together, x, rtol=1e-3)
    np.testing.assert_array_equal(everything(second)[1][0], before[1][0])
    assert second._scatter.means.numpy().tobytes() == before[0][2]


@every_setting
@pytest.mark.parametrize("shared", [False, True], ids=["disjoint", "shared"])
def test_unlearning_undoes_merging(shared, options, clusters):
    x, y = clusters(labels=("a", "b", "c", "d"), n=12, shape=SHAPE)
    at = np.arange(48)
    one = at[:30] if shared else np.array(separate(y, "a", "b"))

    def learn(at):
        return make(channels="first", **options).fit(x[at], [y[k] for k in at])

    rest, part = learn(one), learn(np.setdiff1d(at, one))
    merged = learn(at).unlearn(part)
    assert merged.classes_.tolist() == rest.classes_.tolist()
    assert_same(merged, rest, x, rtol=5e-3)
    assert_same(merged.merge(part), learn(at), x, rtol=5e-3)
    assert merged.score(x, y) > 0.95


def test_merging_with_itself_counts_twice(clusters):
    x, y = clusters()
    model = make().fit(x, y)
    assert_same(model.merge(model), make().fit(np.tile(x, (2, 1)), y * 2), x)


@given(st.permutations(range(4)))
def test_the_order_of_merging_makes_no_difference(clusters, order):
    x, y = clusters(n=12)
    parts = [make().fit(x[k::4], y[k::4]) for k in order]
    merged = parts[0].merge(parts[1]).merge(parts[2].merge(parts[3]))
    assert_same(merged, make().fit(x, y), x)


def test_the_threshold_goes_with_merging_unlearning_and_forgetting(clusters):
    x, y = clusters()
    one, other = make().fit(x, y), make().fit(x[:10], y[:10])
    for change in (lambda m: m.merge(other), lambda m: m.unlearn(other), lambda m: m.forget("a")):
        assert not hasattr(change(deepcopy(one).calibrate(x)), "threshold_")


def test_unlearning_undoes_merging_for_probabilities_too():
    x, y = noisy(20, seed=1)
    one, two = (make(teacher="identity", dim=None) for _ in range(2))
    order = np.random.default_rng(0).permutation(200)
    for part in np.array_split(order, 8):
        one.partial_fit(x[part], y[part])
        two.partial_fit(x[part], y[part][::-1])
    temper = one.temper_
    assert one.merge(two).temper_ != temper
    assert one.unlearn(two).temper_ == temper


def test_what_was_not_learned_cannot_be_unlearned(clusters):
    x, y = clusters()
    model = make().fit(x, y)
    before = everything(model)
    for labels, message in (
        (["a"] * 60, r"cannot unlearn 60 samples of 'a': this model has seen 20"),
        (["new"] * 60, r"cannot unlearn 60 samples of 'new': this model has seen 0"),
        (y, "cannot unlearn everything: no class would be left"),
    ):
        with pytest.raises(ValueError, match=message):
            model.unlearn(make().fit(x, labels))
    assert everything(model) == before


def test_unlearning_after_forgetting(clusters):
    """Some of the classes that are left may go, not all of them, nor the forgotten one again."""
    x, y = clusters()

    def learned(*labels):
        mine = separate(y, *labels)
        return make().fit(x[mine], [y[k] for k in mine])

    model = learned("a", "b", "c").forget("b")
    for part, message in (("ac", "everything: no class would"), ("b", "20 samples of 'b'.*seen 0")):
        with pytest.raises(ValueError, match="cannot unlearn " + message):
            model.unlearn(learned(*part))
    assert_same(model.unlearn(learned("a")), learned("b", "c").forget("b"), x, rtol=5e-3)
    with pytest.raises(ValueError, match="cannot unlearn everything: no class would be left"):
        model.unlearn(learned("c"))


@pytest.mark.parametrize(
    "free",
    [
        {"random_state": np.random.RandomState(0)},
        {"device": torch.device("cpu")},
        {"channels": "last"},
        {"dim": np.int64(30)},
    ],
    ids=str,
)
def test_what_does_not_matter_may_differ(free, clusters):
    one = make(random_state=np.random.RandomState(0).randint(2**31)).fit(*clusters())
    two = make(**{"random_state": one.seed_} | free).fit(*clusters())
    assert one.merge(two).samples_seen_ == {"a": 40, "b": 40, "c": 40}


def doubled(x):
    return 2 * x.flatten(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"random_state": 1}, "seed is 0 here, but 1 in the other"),
        ({"dim": 31}, "dim is 30 here, but 31 in the other"),
        ({"dim": None, "memory": 800}, "dim is 30 here, but None in the other"),
        ({"expected_classes": 9}, "expected_classes is 10 here, but 9 in the other"),
        ({"shrinkage": 0.5}, "shrinkage is 'oas' here, but 0.5 in the other"),
        ({"mean": [1, 2, 3, 4, 5]}, r"mean is None here, but \[1, 2, 3, 4, 5\] in the other"),
        ({"std": 2}, "std is None here, but 2 in the other"),
        ({"teacher": "relu"}, "teacher is 'auto' here, but 'relu' in the other"),
        ({"teacher": RandomFeatures("rbf")}, "teacher is 'auto' here, but RandomFeatures"),
        ({"teacher": doubled, "dim": None}, "dim is 30 here, but None in the other"),
    ],
    ids=str,
)
def test_other_settings_are_refused(changes, message, clusters):
    one, two = make().fit(*clusters()), make(**changes).fit(*clusters())
    before = everything(one), everything(two)
    for method in ("merge", "unlearn"):
        with pytest.raises(ValueError, match=f"cannot {method}: {message}"):
            getattr(one, method)(two)
        with pytest.raises(ValueError, match=f"cannot {method}: "):
            getattr(two, method)(one)
    assert (everything(one), everything(two)) == before


def test_callables_are_compared_by_what_they_answer(clusters):
    def learned(teacher):
        return make(teacher=teacher, dim=None).fit(*clusters())

    model = learned(doubled)
    with pytest.raises(ValueError, match="cannot merge: teacher checksum is"):
        model.merge(learned(lambda x: 3 * x))
    assert model.merge(learned(lambda x: 2 * x)).samples_seen_ == {"a": 40, "b": 40, "c": 40}


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (Filters(grids=(1, 2)), Filters(grids=(2, 1))),
        (RandomFeatures("rbf", 0.002), RandomFeatures("rbf", 0.0020001)),
        (Filters(threshold=0.3), Filters(threshold=0.301)),
    ],
    ids=["order", "gamma", "threshold"],
)
def test_a_recipe_that_is_nearly_the_same_is_refused(one, two, clusters):
    models = [make(teacher=t, dim=120).fit(*clusters(shape=(3, 8, 8))) for t in (one, two)]
    with pytest.raises(ValueError, match="cannot merge: teacher"):
        models[0].merge(models[1])


def test_other_models_are_refused(clusters, small):
    model = make().fit(*clusters())
    for other in (LogisticRegression(), "model.pecil", None, small().fit(*clusters())):
        with pytest.raises(ValueError, match="can only merge a WhitenedPEC, not"):
            model.merge(other)
        with pytest.raises(ValueError, match="can only unlearn a WhitenedPEC, not"):
            model.unlearn(other)
    with pytest.raises(ValueError, match=r"input shape is \(5,\) here, but \(6,\)"):
        model.merge(make().fit(*clusters(shape=(6,))))
    for one, two in ((model, make()), (make(), model)):
        with pytest.raises(NotFittedError):
            one.merge(two)


def test_a_forgotten_class_is_never_predicted(clusters):
    x, y = clusters()
    model, matrix = make().fit(x, y), make().fit(x, y)._scatter.matrix
    expected = model.errors(x)[:, [0, 2]]
    assert model.forget("b") is model
    assert model.classes_.tolist() == ["a", "c"] and model.samples_seen_ == {"a": 20, "c": 20}
    assert "b" not in model.predict(x)
    np.testing.assert_allclose(model.errors(x), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(model._scatter.matrix, matrix)
    assert model.n_parameters_ == 30 * 31 / 2 + 2 * 30
    model.partial_fit(x, y)
    assert model.samples_seen_ == {"a": 40, "c": 40, "b": 20} and model.score(x, y) > 0.95


def test_what_cannot_be_forgotten(clusters):
    model = make().fit(*clusters(labels=("a", "b")))
    before = everything(model)
    for label, message in (("x", "'x' is not a known class; known are"), (["a"], "not a known")):
        with pytest.raises(ValueError, match=message):
            model.forget(label)
    assert everything(model) == before
    with pytest.raises(ValueError, match="cannot forget 'b': it is the only class"):
        model.forget("a").forget("b")


# --------------------------------------------------------------------------------- files


@every_setting
def test_a_saved_model_goes_on(options, clusters, file):
    x, y = clusters(shape=SHAPE)
    given_ = options["teacher"] if isinstance(options.get("teacher"), torch.nn.Module) else None
    model = make(channels="first", **options).fit(x[:30], y[:30]).calibrate(x)
    model.save(file)
    for read in (WhitenedPEC.load, pecil.load):
        loaded = read(file, device="cpu", teacher=given_)
        assert type(loaded) is WhitenedPEC
        assert everything(loaded)[1:] == everything(model)[1:]
        np.testing.assert_array_equal(loaded._scatter.means, model._scatter.means)
        np.testing.assert_allclose(loaded.errors(x), model.errors(x), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(loaded.predict_proba(x), model.predict_proba(x), atol=1e-6)
        mine, theirs = model.get_params(), loaded.get_params()
        for name in mine.keys() - {"device"}:
            np.testing.assert_array_equal(theirs[name], mine[name], err_msg=name)
    steady = deepcopy(model)
    for each in (steady, loaded):
        each.partial_fit(x[30:], y[30:]).partial_fit(x[:1], ["new"])
    assert_same(loaded, steady, x)


@pytest.mark.parametrize("size", [1, 30])
@pytest.mark.parametrize("copied", ["pickled", "saved"])
def test_after_restarts_the_stream_is_measured_as_if_it_had_not_stopped(copied, size, file):
    """Up to the samples that a new factor knows and an old one does not."""
    x, y = noisy(30, seed=1, dim=40)
    model, other = (make(teacher="identity", dim=None) for _ in range(2))
    order = np.random.default_rng(0).permutation(300)
    for k, part in enumerate(np.array_split(order, 300 // size)):
        for each in (model, other):
            each.partial_fit(x[part], y[part])
        if k * size % 60 < size:
            other.save(file)
            saved = copied == "saved"
            other = WhitenedPEC.load(file) if saved else pickle.loads(pickle.dumps(other))
        kept = [[len(errors) for errors in each._recent] for each in (model, other)]
        assert (np.diff(kept, axis=0) >= 0).all()
    steps = np.abs(np.log(whitened.TEMPERS / model.temper_)).argmin()
    assert other.temper_ in whitened.TEMPERS[steps - 2 : steps + 3]
    assert other.calibrate().threshold_ == pytest.approx(model.calibrate().threshold_, rel=0.05)


@pytest.mark.parametrize(
    "options",
    [
        {"dim": np.int64(30), "expected_classes": np.int32(5), "random_state": np.int64(3)},
        {"dim": None, "memory": np.float32(900), "shrinkage": np.float64(0.25)},
        {"mean": torch.tensor(0.5), "std": np.arange(1, 6)},
        {"random_state": np.random.RandomState(5)},
        {"teacher": Identity(), "dim": None},
    ],
    ids=str,
)
def test_parameters_of_any_kind_are_saved(options, clusters, file):
    x, y = clusters()
    model = make(**options).fit(x, y)
    model.save(file)
    loaded = WhitenedPEC.load(file, device="cpu")
    assert loaded.seed_ == model.seed_
    np.testing.assert_allclose(loaded.errors(x), model.errors(x), rtol=1e-6, atol=1e-6)


def test_a_file_holds_the_triangle_and_the_students(clusters, file):
    make(views=4).fit(*clusters()).save(file)
    with safetensors.safe_open(file, "np") as content:
        assert content.get_tensor("seen").shape == (3, 4, 30)
    make().fit(*clusters()).save(file)
    with safetensors.safe_open(file, "np") as content:
        assert sorted(content.keys()) == ["means", "recent", "scatter"]
        assert content.get_tensor("scatter").shape == (30 * 31 // 2,)
    about = saving.describe(file)
    assert about["model"] == "WhitenedPEC" and set(about["labels"]) == {"a", "b", "c"}
    assert (about["total"], len(about["excess"])) == (60, 60) and 0 < about["gauged"] <= 60


def test_a_copy_is_a_model_of_its_own(clusters):
    x, y = clusters()
    model = make().fit(x, y).calibrate(x)
    before = everything(model)
    for copy in (pickle.loads(pickle.dumps(model)), deepcopy(model)):
        assert everything(copy) == before
        np.testing.assert_allclose(copy.errors(x), model.errors(x), rtol=1e-6)
        copy.partial_fit(x, y).forget("a")
        assert everything(model) == before


def test_a_loaded_model_is_merged_and_unlearned(clusters, file):
    x, y = clusters()
    together = make().fit(x, y)
    make().fit(x[:30], y[:30]).save(file)
    part = WhitenedPEC.load(file, device="cpu")
    assert_same(make().fit(x[30:], y[30:]).merge(part), together, x)
    assert_same(together.unlearn(part), make().fit(x[30:], y[30:]), x, rtol=5e-3)


def test_each_model_is_read_as_what_it_is(clusters, small, file):
    small().fit(*clusters()).save(file)
    assert type(pecil.load(file)) is PEC
    with pytest.raises(ModelFileError, match="holds a PEC, not a WhitenedPEC"):
        WhitenedPEC.load(file)
    make().fit(*clusters()).save(file)
    assert type(pecil.load(file)) is WhitenedPEC
    with pytest.raises(ModelFileError, match="holds a WhitenedPEC, not a PEC"):
        PEC.load(file)


@pytest.mark.parametrize("name", ["rbf", "natural", "strokes"])
def test_another_drawing_of_the_teacher_is_noticed(name, clusters, file, monkeypatch):
    make(teacher=name, dim=120).fit(*clusters(shape=(3, 8, 8))).save(file)
    WhitenedPEC.load(file, device="cpu")
    monkeypatch.setattr(whitened, "TEACHER", 1)
    with pytest.raises(ModelFileError, match="the teacher here is not the one .*checksum"):
        WhitenedPEC.load(file, device="cpu")


def test_another_drawing_of_the_views_is_noticed(clusters, file, monkeypatch):
    make(teacher="identity", dim=None, views=2).fit(*clusters()).save(file)
    WhitenedPEC.load(file, device="cpu")
    monkeypatch.setattr(whitened, "VIEWS", 2)
    with pytest.raises(ModelFileError, match="the teacher here is not the one .*checksum"):
        WhitenedPEC.load(file, device="cpu")


def test_a_teacher_of_the_users_is_given_again(clusters, file):
    x, y = clusters(shape=SHAPE)
    model = make(teacher=torch.nn.Flatten(), dim=None, channels="first").fit(x, y)
    model.save(file)
    with pytest.raises(ModelFileError, match=r"trained with the teacher <Flatten>.*teacher=…"):
        WhitenedPEC.load(file)
    with pytest.raises(ModelFileError, match="the teacher here is not the one"):
        WhitenedPEC.load(file, device="cpu", teacher=doubled)
    loaded = WhitenedPEC.load(file, device="cpu", teacher=torch.nn.Flatten())
    np.testing.assert_allclose(loaded.errors(x), model.errors(x), rtol=1e-6)
    make().fit(*clusters()).save(file)
    with pytest.raises(ModelFileError, match="trained with teacher 'auto': do not give another"):
        WhitenedPEC.load(file, teacher=doubled)


def test_a_damaged_file_is_noticed(clusters, file):
    """Bytes flipped, cut off, blanked or added anywhere."""
    model = make(teacher="identity", dim=None).fit(*clusters(n=5)).calibrate(clusters()[0])
    model.save(file)
    content = file.read_bytes()
    kinds = [content[:end] for end in (*range(0, 64), *range(64, len(content), 197))]
    kinds += [content + b"\0", content + content, b"", b"hello"]
    for place in (*range(0, 64), *range(64, len(content), 61), len(content) - 1):
        flipped = bytearray(content)
        flipped[place] ^= 0x55
        kinds.append(bytes(flipped))
    for start in range(0, len(content) - 256, 256):
        kinds.append(content[:start] + bytes(256) + content[start + 256 :])
    for damaged in kinds:
        file.write_bytes(damaged)
        with pytest.raises(ModelFileError):
            WhitenedPEC.load(file, device="cpu")
    file.write_bytes(content)
    assert everything(WhitenedPEC.load(file, device="cpu"))[1:] == everything(model)[1:]


# ------------------------------------------------------------------------------ refusals


def spoiled(value, *shape):
    x = np.ones(shape)
    x.flat[-1] = value
    return x


BAD_SAMPLES = {
    "NaN": (spoiled(np.nan, 2, 5), "NaN"),
    "infinity": (spoiled(np.inf, 2, 5), "infinity"),
    "NaN in an image": (spoiled(np.nan, 2, 4, 4), "NaN"),
    "infinity in a tensor": (torch.tensor(spoiled(-np.inf, 2, 5)), "infinity"),
    "too large": (spoiled(1e12, 2, 5), "too large to learn from"),
    "no samples": (np.ones((0, 5)), "0 sample"),
    "no features": (np.ones((2, 0)), "0 feature"),
    "no pixels": (np.ones((2, 0, 4)), r"empty: it has shape \(2, 0, 4\)"),
    "1-D": (np.ones(2), "Expected 2D array, got 1D array"),
    "5-D": (np.ones((2, 1, 1, 1, 1)), r"but it has shape \(2, 1, 1, 1, 1\)"),
    "text": (np.array([["a", "b"], ["c", "d"]]), "could not convert string to float"),
    "complex": (torch.ones(2, 5, dtype=torch.complex64), "Complex data not supported"),
    "ragged": ([[1, 2], [3]], "inhomogeneous shape"),
    "which axis": (np.ones((2, 5, 6, 7)), "cannot tell the channel axis .* channels='first'"),
}


@pytest.mark.parametrize(("x", "message"), BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_bad_samples_change_nothing(x, message, clusters):
    model = make().fit(*clusters()).calibrate(clusters()[0])
    before = everything(model)
    for refused in (make().fit, make().partial_fit, model.fit):
        with pytest.raises(ValueError, match=message):
            refused(x, ["a", "b"])
    with pytest.raises(ValueError):
        model.partial_fit(x, ["a", "new"])
    for method in ("errors", "predict", "predict_proba", "decision_function", "novelty"):
        with pytest.raises(ValueError):
            getattr(model, method)(x)
    assert everything(model) == before


@pytest.mark.parametrize(
    ("learned", "given_", "message"),
    [
        ((5,), (6,), "X has 6 features, but WhitenedPEC is expecting 5 features"),
        ((64,), (8, 8), r"shape \(1, 8, 8\), but WhitenedPEC is expecting \(64,\)"),
        ((8, 8), (64,), r"shape \(64,\), but WhitenedPEC is expecting \(1, 8, 8\)"),
        ((8, 8), (8, 8, 3), r"shape \(3, 8, 8\), but WhitenedPEC is expecting \(1, 8, 8\)"),
        ((8, 8, 3), (7, 8, 3), r"shape \(3, 7, 8\), but WhitenedPEC is expecting \(3, 8, 8\)"),
    ],
    ids=str,
)
def test_another_shape_is_refused(learned, given_, message):
    rng = np.random.default_rng(0)
    model = make(dim=120).fit(rng.random((4, *learned)), [0, 1] * 2)
    before, other = everything(model), rng.random((4, *given_))
    for learn_or_score in (model.predict, lambda x: model.partial_fit(x, [0, 1] * 2)):
        with pytest.raises(ValueError, match=message):
            learn_or_score(other)
    assert everything(model) == before
    assert model.fit(other, [0, 1] * 2).predict(other).shape == (4,)


BAD_LABELS = {
    "too few": ([1], "inconsistent numbers of samples: X has 2, y has 1"),
    "none": (None, "requires y to be passed, but the target y is None"),
    "text": ("ab", "y must hold one label for each sample, but it is 'ab'"),
    "continuous": ([0.5, 1.5], "Unknown label type: continuous"),
    "NaN": ([1.0, np.nan], "NaN"),
    "two columns": ([[1, 2], [3, 4]], r"y should be a 1d array, got an array of shape \(2, 2\)"),
    "sets": ([{1}, {2}], "must be hashable, but y contains {1}"),
}


@pytest.mark.parametrize(("y", "message"), BAD_LABELS.values(), ids=BAD_LABELS)
def test_bad_labels_change_nothing(y, message, clusters):
    model = make().fit(*clusters())
    before = everything(model)
    for refused in (make().fit, make().partial_fit, model.fit, model.partial_fit):
        with pytest.raises(ValueError, match=message):
            refused(np.ones((2, 5)), y)
    assert everything(model) == before


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"teacher": "big"}, "teacher must be one of auto, natural, strokes, .*'big'"),
        ({"teacher": None}, "teacher must be one of auto, natural, .*a callable, but it is None"),
        ({"teacher": 5}, "teacher must be one of auto, natural, .*a callable, but it is 5"),
        ({"teacher": "natural"}, "filters needs images.* vectors of 5 features"),
        ({"teacher": Filters()}, "filters needs images.* vectors of 5 features"),
        ({"dim": 0}, "dim must be a whole number of at least 1, but it is 0"),
        ({"dim": 2.5}, "dim must be a whole number of at least 1, but it is 2.5"),
        ({"dim": True}, "dim must be a whole number of at least 1, but it is True"),
        ({"dim": None, "memory": 0}, "memory must be a positive number, but it is 0"),
        ({"dim": None, "memory": float("nan")}, "memory must be a positive number.*nan"),
        ({"dim": None, "memory": float("inf")}, "memory must be a positive number.*inf"),
        ({"dim": None, "memory": "big"}, "memory must be a positive number, but it is 'big'"),
        ({"dim": None, "memory": 10}, "memory=10 is too small: one feature .*10 .*take 11 num"),
        ({"memory": 1000}, "give either memory or dim"),
        ({"views": -1}, "views must be a whole number of at least 0, but it is -1"),
        ({"views": True}, "views must be a whole number of at least 0, but it is True"),
        ({"views": 2.5}, "views must be a whole number of at least 0, but it is 2.5"),
        ({"views": 31}, "views must be at most the number of features, 30, but it is 31"),
        ({"expected_classes": 0}, "expected_classes must be a whole number of at least 1.* is 0"),
        ({"mirror": "yes"}, "mirror must be None, True or False, but it is 'yes'"),
        ({"mirror": True}, "mirror=True is for teachers of images, but teacher is 'auto'"),
        ({"mirror": False, "teacher": "rbf"}, "mirror=False is for teachers of images.*'rbf'"),
        ({"trust": -0.1}, "trust must be a number between 0 and 1, but it is -0.1"),
        ({"trust": "much"}, "trust must be a number between 0 and 1, but it is 'much'"),
        ({"shrinkage": -0.1}, "shrinkage must be 'oas' or a number between 0 and 1.* is -0.1"),
        ({"shrinkage": 1.5}, "shrinkage must be 'oas' or a number between 0 and 1.* is 1.5"),
        ({"shrinkage": True}, "shrinkage must be 'oas' or a number between 0 and 1.* is True"),
        ({"shrinkage": float("nan")}, "shrinkage must be 'oas' or a number between .* is nan"),
        ({"shrinkage": "ledoit"}, "shrinkage must be 'oas' or a number .* it is 'ledoit'"),
        ({"shrinkage": None}, "shrinkage must be 'oas' or a number .* it is None"),
        ({"channels": "middle"}, "channels must be one of auto, first, last.*'middle'"),
        ({"mean": [1, 2]}, r"mean must be None, one finite number or 5 of them.*\[1, 2\]"),
        ({"mean": float("nan")}, "mean must be None, one finite number or 5 of them.*nan"),
        ({"std": 0}, "std must be positive, at least 1e-08, but it is 0"),
        ({"std": 1e-40}, "std must be positive, at least 1e-08, but it is 1e-40"),
        ({"mean": 1e30}, r"mean must not exceed 1e\+08, but it is 1e\+30"),
        ({"teacher": PEC()}, r"a recipe or a callable, but it is PEC\(\)"),
        ({"teacher": doubled}, "a callable teacher sets the dimension: give neither memory nor"),
        ({"teacher": doubled, "dim": None, "memory": 900}, "give neither memory nor dim"),
        ({"random_state": -1}, "random_state .*-1"),
        ({"random_state": "dice"}, "'dice' cannot be used to seed"),
        ({"device": "gpu"}, "device .*'gpu'"),
    ],
    ids=str,
)
def test_bad_parameters_are_refused(parameters, message, clusters):
    x, y = clusters()
    for method in ("fit", "partial_fit"):
        with pytest.raises(ValueError, match=message):
            getattr(make(**parameters), method)(x, y)
    model = make().fit(x, y)
    before = everything(model)
    with pytest.raises(ValueError, match=message):
        model.set_params(**parameters).fit(x, y)
    model.set_params(**make().get_params())
    assert everything(model) == before
    np.testing.assert_array_equal(model.predict(x), y)


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m.predict(np.ones((2, 5))),
        lambda m: m.discriminants(np.ones((2, 5))),
        lambda m: m.predict_proba(np.ones((2, 5))),
        lambda m: m.decision_function(np.ones((2, 5))),
        lambda m: m.errors(np.ones((2, 5))),
        lambda m: m.score(np.ones((2, 5)), ["a", "b"]),
        lambda m: m.calibrate(),
        lambda m: m.forget("a"),
        lambda m: m.save("model.pecil"),
        lambda m: m.samples_seen_,
        lambda m: m.n_parameters_,
        lambda m: m.shrinkage_,
        lambda m: m.temper_,
    ],
)
def test_nothing_is_told_before_learning(ask):
    with pytest.raises(NotFittedError, match="not fitted yet"):
        ask(WhitenedPEC())


def test_recent_errors_are_bounded(clusters, monkeypatch):
    monkeypatch.setattr(base, "RECENT", 9)
    x, y = clusters(n=100)
    model = make().fit(x, y)
    for k in range(0, 300, 50):
        model.partial_fit(x[k : k + 50], y[k : k + 50])
    assert {len(errors) for errors in model._recent} == {9}


@pytest.mark.parametrize("way", ["at once", "class by class", "in chunks"])
def test_the_errors_of_every_class_are_measured(way, monkeypatch):
    if way == "in chunks":
        monkeypatch.setattr(whitened, "HELD", 64)
    x, y = noisy(30, seed=1, dim=40)
    model = make(teacher="identity", dim=None)
    parts = [y == label for label in np.unique(y)] if way == "class by class" else [slice(None)]
    for part in parts:
        model.partial_fit(x[part], y[part])
    assert all(len(errors) >= 15 for errors in model._recent)
    assert (model.predict(x + 100, reject_as=-1) == -1).all()
    assert (model.predict(x, reject_as=-1) == -1).mean() < 0.2
