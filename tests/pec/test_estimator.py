"""The estimator: scikit-learn's manners, learning, predictions, novelty."""

import pickle
import signal
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from pecil import PEC
from pecil.pec import base, students
from pecil.pec.networks import Stack, forward

ROUNDING = (
    "float32 products round differently with the size of a batch and a sample's place in it; "
    "the check asks for 1e-7, below the resolution of float32"
)


@pytest.fixture
def rates(monkeypatch):
    """Return the list of learning rates, step by step, that Adam is called with."""
    seen, adam = [], students._adam

    def noting(*args):
        seen.append(args[-1])
        adam(*args)

    monkeypatch.setattr(students, "_adam", noting)
    return seen


def rows(model):
    """Return each label's parameters."""
    (pair,) = model._pairs
    return {label: pair.students.rows[slot].numpy() for label, slot in model._slots.items()}


def assert_same_up_to_rounding(one, two):
    assert one.samples_seen_ == two.samples_seen_
    mine, theirs = rows(one), rows(two)
    for label in mine:
        np.testing.assert_allclose(mine[label], theirs[label], rtol=0, atol=2e-5)


# ------------------------------------------------------------------ scikit-learn manners


@pytest.mark.filterwarnings("ignore:inputs have a root mean square")
def test_check_estimator():
    expected = {
        "check_methods_subset_invariance": ROUNDING,
        "check_methods_sample_order_invariance": ROUNDING,
    }
    results = check_estimator(
        PEC(device="cpu"), expected_failed_checks=expected, on_fail=None, on_skip=None
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


@pytest.mark.parametrize("shape", [(5,), (3, 6, 6)], ids=str)
def test_scores_do_not_depend_on_batch_or_order(shape, small, clusters):
    model = small().fit(*clusters(shape=shape))
    x, _ = clusters(shape=shape, seed=1)
    order = np.random.default_rng(0).permutation(len(x))
    for method, tolerance in (
        (model.errors, {"rtol": 1e-5}),
        (model.decision_function, {"rtol": 1e-5}),
        (model.novelty, {"rtol": 1e-5}),
        (model.predict_proba, {"atol": 1e-5}),
    ):
        whole = method(x)
        one_by_one = np.concatenate([method(sample[None]) for sample in x])
        np.testing.assert_allclose(one_by_one, whole, **tolerance)
        np.testing.assert_allclose(method(x[order]), whole[order], **tolerance)


def test_works_in_a_pipeline(small, clusters):
    x, y = clusters()
    pipeline = make_pipeline(StandardScaler(), small()).fit(1000 * x, y)
    assert pipeline.score(1000 * x, y) > 0.9


def test_works_in_a_grid_search(small, clusters, state):
    grid = {"lr": [0.001, 0.01], "student_width": [2, 3, 4]}
    search = GridSearchCV(small(), grid, cv=2, error_score="raise").fit(*clusters())
    assert len(search.cv_results_["params"]) == 6
    assert search.best_score_ > 0.9
    again = small(**search.best_params_).fit(*clusters())
    assert state(search.best_estimator_) == state(again)


def test_parameters_are_stored_as_given_and_cloned(small):
    model = small(mean=[1, 2], expected_samples={"a": 3}, schedule="constant")
    parameters = model.get_params()
    assert parameters["mean"] == [1, 2] and parameters["expected_samples"] == {"a": 3}
    assert clone(model).get_params() == parameters
    assert model.set_params(lr=0.5).lr == 0.5
    assert not hasattr(clone(model), "classes_")


def test_a_clone_of_a_fitted_model_is_not_fitted(small, clusters):
    copy = clone(small().fit(*clusters()))
    assert not hasattr(copy, "classes_") and not hasattr(copy, "samples_seen_")


def test_what_a_fitted_model_tells(small, clusters):
    model = small().fit(*clusters(labels=("b", "c", "a"), n=4))
    assert model.classes_.tolist() == ["a", "b", "c"]
    assert model.samples_seen_ == {"a": 4, "b": 4, "c": 4}
    assert (model.input_shape_, model.n_features_in_, model.seed_) == ((5,), 5, 0)
    assert model.n_parameters_per_class_ == 5 * 4 + 4 + 4 + 4 + 4 * 6 + 6
    assert model.n_parameters_ == 3 * model.n_parameters_per_class_
    assert model.device_ == torch.device("cpu")


def test_fit_starts_from_scratch(small, clusters, state):
    model = small().fit(*clusters(labels=("x", "y"), shape=(3,))).calibrate()
    model.fit(*clusters())
    assert state(model) == state(small().fit(*clusters()))
    assert model.classes_.tolist() == ["a", "b", "c"] and not hasattr(model, "threshold_")


@pytest.mark.parametrize("random_state", [0, 7, np.random.RandomState(3), None], ids=str)
def test_the_seed_is_kept(random_state, small, clusters, state):
    model = small(random_state=random_state).fit(*clusters())
    assert state(model) == state(small(random_state=model.seed_).fit(*clusters()))
    assert state(model) != state(small(random_state=model.seed_ + 1).fit(*clusters()))


# -------------------------------------------------------------------------- architecture


@pytest.mark.parametrize(
    ("parameters", "shape", "outputs", "count"),
    [
        ({"output_dim": 99}, (784,), 99, 8_959),
        ({"budget": 89_610 // 10, "student_width": 10}, (784,), 99, 8_959),
        ({"budget": 89_610 // 10, "student_width": 10}, (28, 28), 99, 8_959),
        (
            {"output_dim": 743, "student_width": 60, "pool": 5},
            (3, 32, 32),
            743,
            1_117_043,
        ),
        (
            {"budget": 11_173_962 // 10, "student_width": 60, "pool": 5},
            (3, 32, 32),
            743,
            1_117_043,
        ),
        ({"budget": 11_173_962 // 100, "student_width": 40, "pool": 4}, (3, 32, 32), 172, 111_452),
        ({}, (28, 28), 99, 8_959),
        ({}, (32, 32, 3), 172, 111_452),
    ],
    ids=str,
)
def test_the_papers_parameter_counts(parameters, shape, outputs, count):
    model = PEC(teacher_width=16, device="cpu", **parameters).fit(np.ones((2, *shape)), [0, 1])
    assert model._pairs[0].students.architecture.output_dim == outputs
    assert model.n_parameters_per_class_ == count
    assert model.n_parameters_ == 2 * count


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((5,), "mlp"),
        ((32, 32), "mlp"),
        ((33, 32), "conv"),
        ((8, 8, 1), "mlp"),
        ((8, 8, 3), "conv"),
        ((3, 8, 8), "conv"),
    ],
    ids=str,
)
def test_auto_chooses_by_shape(shape, kind, small):
    model = small().fit(np.ones((1, *shape)), [0])
    architecture = model._pairs[0].students.architecture
    assert architecture.kind == model._pairs[0].teacher.architecture.kind == kind
    assert architecture.activation == {"mlp": "gelu", "conv": "relu"}[kind]


def test_default_widths_follow_the_paper():
    vectors = PEC(device="cpu").fit(np.ones((1, 5)), [0])._pairs[0]
    images = PEC(device="cpu", pool=2).fit(np.ones((1, 3, 6, 6)), [0])._pairs[0]
    wider = PEC(device="cpu", student_width=3).fit(np.ones((1, 5)), [0])._pairs[0]
    for pair, widths in ((vectors, (10, 5000)), (images, (40, 4000)), (wider, (3, 1500))):
        assert (pair.students.architecture.width, pair.teacher.architecture.width) == widths


@pytest.mark.parametrize(
    ("shape", "like"), [((784,), 8_959), ((3, 32, 32), 111_452), ((5,), 1_169)], ids=str
)
def test_single_linear_has_as_many_parameters_as_the_default(shape, like):
    x = np.ones((1, *shape))
    default = PEC(teacher_width=16, device="cpu").fit(x, [0])
    linear = PEC(architecture="linear", device="cpu").fit(x, [0])
    assert default.n_parameters_per_class_ == like
    one_output = np.prod(shape) + 1
    assert like - one_output < linear.n_parameters_per_class_ <= like


@pytest.mark.parametrize("architecture", ["mlp", "conv", "linear"])
@pytest.mark.parametrize("changes", [{}, {"activation": "identity"}, {"hidden_layers": 2}], ids=str)
def test_every_variant_learns(architecture, changes, small, clusters):
    shape = (3, 6, 6)
    model = small(architecture=architecture, pool=2, channels="first", **changes)
    x, y = clusters(shape=shape, n=40)
    model.fit(x, y)
    assert model.score(*clusters(shape=shape, seed=1)) > 0.8


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 2), (1, 5)], ids=str)
def test_conv_on_tiny_images(shape, small):
    x = np.random.default_rng(0).normal(size=(6, *shape))
    model = small(architecture="conv").fit(x, [0, 1] * 3)
    assert np.isfinite(model.errors(x)).all()


@pytest.mark.parametrize("init", ["kaiming", "xavier", "uniform0.001", "uniform0.01", "uniform0.1"])
def test_init_reaches_teacher_and_students(init, small):
    (pair,) = small(init=init).fit(np.ones((1, 5)), [0])._pairs
    other = "kaiming" if init != "kaiming" else "xavier"
    (changed,) = small(init=other).fit(np.ones((1, 5)), [0])._pairs
    assert pair.teacher.checksum != changed.teacher.checksum
    assert not torch.equal(pair.students.start, changed.students.start)
    if init.startswith("uniform"):
        weight = pair.students.architecture.views(pair.students.start)["out.weight"]
        assert weight.abs().max() <= float(init[len("uniform") :])


# ------------------------------------------------------------------------------ learning


def test_learns_classes_one_after_another(small, clusters):
    x, y = clusters(n=40)
    model = small()
    for label in "cab":
        mine = np.array(y) == label
        model.partial_fit(x[mine], [label] * 40)
        known = set(model.predict(x).tolist())
        assert known == set(model.classes_.tolist())  # never one that is yet to come
    assert model.score(*clusters(seed=1)) > 0.95


@pytest.mark.parametrize("ensemble", [1, 2])
@pytest.mark.parametrize("shape", [(5,), (3, 6, 6)], ids=str)
def test_learning_one_class_leaves_the_others_alone(shape, ensemble, small, clusters, state):
    x, y = clusters(shape=shape)
    model = small(ensemble=ensemble).partial_fit(x, y)
    before = state(model)
    mine = np.array(y) == "b"
    after = state(model.partial_fit(x[mine], ["b"] * 20))
    assert after.pop("b") != before.pop("b")
    assert after == before
    model.partial_fit(x[:1], ["new"])
    assert {label: state(model)[label] for label in "ac"} == before


def test_partial_fit_ignores_classes(small, clusters, state):
    x, y = clusters()
    told = small().partial_fit(x, y, classes=["a", "b", "c", "d"])
    assert state(told) == state(small().partial_fit(x, y))
    assert "d" not in told.classes_


@given(st.data())
def test_streams_may_be_cut_and_interleaved_at_will(small, clusters, data):
    """What a student learns depends on its class's own samples in their order, nothing else."""
    x, y = clusters(n=8)
    settings = {"expected_samples": {"a": 8, "b": 5}}
    steady = small(**settings)
    turns = {label: np.flatnonzero(np.array(y) == label).tolist() for label in "abc"}
    for label, at in turns.items():
        steady.partial_fit(x[at], [label] * len(at))
    mixed = data.draw(st.permutations(y), label="interleaving")
    order = [turns[label].pop(0) for label in mixed]
    cuts = data.draw(st.sets(st.integers(1, len(y) - 1)), label="cuts")
    stream = small(**settings)
    for part in np.split(np.array(order), sorted(cuts)):
        stream.partial_fit(x[part], [y[k] for k in part])
    assert_same_up_to_rounding(stream, steady)
    probe, _ = clusters(seed=1)
    np.testing.assert_allclose(stream.errors(probe), steady.errors(probe), rtol=1e-3)


def test_inputs_stay_as_they_were(small):
    x, y = np.full((4, 5), 9, np.float32), ["a", "b"] * 2
    tensor = torch.full((4, 3, 6, 6), 9.0)
    small(mean=1, std=2).fit(x, y).predict(x)
    small(mean=1, std=2).fit(tensor, y).predict(tensor)
    assert (x == 9).all() and (tensor == 9).all() and y == ["a", "b"] * 2


def test_learning_leaves_the_world_as_it_was(small, clusters):
    """Neither random numbers nor threads of others are touched."""
    torch.set_num_threads(2)
    try:
        numbers = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        x, y = clusters(n=520)  # enough for a student to be given a thread of its own
        small(ensemble=2).fit(x, y).partial_fit(x[:9], y[:9]).predict(x)
        assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == numbers
        assert torch.get_num_threads() == 2
        assert torch.backends.mkldnn.enabled
    finally:
        torch.set_num_threads(1)


def test_fit_lowers_the_rate_over_each_class(small, rates):
    small(lr=0.1).fit(np.ones((6, 5)), ["a"] * 4 + ["b"] * 2)
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.1, 0.05])


def test_constant_schedule(small, rates):
    small(lr=0.1, schedule="constant", expected_samples=2).fit(np.ones((3, 5)), ["a"] * 3)
    small(lr=0.1, schedule="constant", expected_samples=2).partial_fit(np.ones((3, 5)), ["a"] * 3)
    assert rates == pytest.approx([0.1] * 6)


@pytest.mark.parametrize(
    ("expected", "rate"),
    [
        (None, {"a": [1, 1, 1, 1], "b": [1, 1, 1, 1]}),
        (4, {"a": [1, 0.75, 0.5, 0.25], "b": [1, 0.75, 0.5, 0.25]}),
        (2, {"a": [1, 0.5, 0.01, 0.01], "b": [1, 0.5, 0.01, 0.01]}),
        ({"a": 2}, {"a": [1, 0.5, 0.01, 0.01], "b": [1, 1, 1, 1]}),
        ({"a": 5, "b": 1}, {"a": [1, 0.8, 0.6, 0.4], "b": [1, 0.01, 0.01, 0.01]}),
    ],
    ids=str,
)
def test_partial_fit_follows_the_expected_samples(expected, rate, small, rates):
    model = small(lr=0.1, expected_samples=expected)
    steps = {"a": [], "b": []}
    for n, label in ((1, "a"), (3, "b"), (1, "a"), (2, "a"), (1, "b")):
        rates.clear()
        model.partial_fit(np.ones((n, 5)), [label] * n)
        steps[label] += [r / 0.1 for r in rates]
    assert steps == {label: pytest.approx(wanted) for label, wanted in rate.items()}


def test_partial_fit_after_fit_is_past_the_schedule(small, rates):
    model = small(lr=0.1).fit(np.ones((2, 5)), ["a"] * 2)
    rates.clear()
    model.partial_fit(np.ones((2, 5)), ["a", "new"])
    assert rates == pytest.approx([0.001, 0.1])


def test_epochs_go_through_the_samples_again(small, clusters, rates):
    x, y = clusters(n=6)
    twice = small(epochs=2, shuffle=False).fit(x, y)
    assert rates[:12] == pytest.approx([0.01 * (1 - t / 12) for t in range(12)])
    assert_same_up_to_rounding(twice, small(shuffle=False).fit(np.tile(x, (2, 1)), y * 2))


def test_shuffled_epochs_differ_but_hold_every_sample(small):
    order, _ = small(epochs=3).fit(np.ones((1, 5)), [0])._plan(10, None)
    passes = order.view(3, 10)
    assert (passes.sort(1).values == torch.arange(10)).all()
    assert len({tuple(p.tolist()) for p in passes}) == 3


def test_batches_take_one_step_each(small, clusters, rates):
    model = small(batch_size=4).fit(*clusters(labels=("a",), n=10))
    assert model._pairs[0].students.steps == [3]
    assert rates == pytest.approx([0.01, 0.006, 0.002])
    assert model.samples_seen_ == {"a": 10}


def test_shuffling_depends_on_the_seed_alone(small, clusters, state):
    x, _ = clusters(labels=("a",), n=10)
    alone = state(small().fit(x, ["a"] * 10))["a"]
    twins = state(small().fit(np.repeat(x, 2, 0), ["b", "c"] * 10))
    assert twins == {"b": alone, "c": alone}
    assert state(small(shuffle=False).fit(x, ["a"] * 10))["a"] != alone
    one, two = (small(random_state=seed).fit(x, ["a"] * 10)._plan(10, None)[0] for seed in (0, 1))
    assert one.tolist() != two.tolist()
    assert sorted(one.tolist()) == list(range(10))


@pytest.mark.parametrize("epochs", [1, 2])
def test_equal_budgets_cut_to_the_smallest_class(epochs, small, clusters):
    x, _ = clusters(labels=("a",), n=10)
    y = ["a"] * 7 + ["b"] * 3
    options = {"shuffle": False, "epochs": epochs}
    model = small(equal_budgets=True, **options).fit(x, y)
    assert model.samples_seen_ == {"a": 3 * epochs, "b": 3 * epochs}
    cut = [0, 1, 2, 7, 8, 9]
    assert_same_up_to_rounding(model, small(**options).fit(x[cut], [y[k] for k in cut]))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_equal_budgets_as_a_number_of_updates(batch_size, small, clusters):
    x, _ = clusters(labels=("a",), n=10)
    y = ["a"] * 7 + ["b"] * 3
    options = {"shuffle": False, "batch_size": batch_size}
    model = small(equal_budgets=5, **options).fit(x, y)
    n = 5 * batch_size
    assert model.samples_seen_ == {"a": n, "b": n}
    assert model._pairs[0].students.steps == [5, 5]
    again = [*(k % 7 for k in range(n)), *(7 + k % 3 for k in range(n))]
    assert_same_up_to_rounding(model, small(**options).fit(x[again], [y[k] for k in again]))


def test_equal_budgets_in_a_stream(small, clusters, state):
    x, _ = clusters(labels=("a",), n=10)
    model = small(equal_budgets=3, batch_size=2).partial_fit(x[:4], ["a"] * 4)
    assert model.samples_seen_ == {"a": 4}
    before = state(model.partial_fit(x[4:], ["a"] * 6))
    assert model.samples_seen_ == {"a": 6}
    after = state(model.partial_fit(x[:2], ["a", "b"]))
    assert model.samples_seen_ == {"a": 6, "b": 1}
    assert after["a"] == before["a"]


def test_equal_budgets_need_fit_or_a_number(small, clusters):
    with pytest.raises(ValueError, match="equal_budgets=True needs the sizes of all classes"):
        small(equal_budgets=True).partial_fit(*clusters())


# ------------------------------------------------------------------- ensembles, teachers


def test_an_ensemble_averages_independent_pairs(small, clusters, state):
    model = small(ensemble=3).fit(*clusters())
    x, _ = clusters(seed=1)
    expected = model.errors(x)
    assert len({pair.teacher.checksum for pair in model._pairs}) == 3
    alone = []
    for pair in list(model._pairs):
        model._pairs = [pair]
        alone.append(model.errors(x))
    np.testing.assert_allclose(expected, np.mean(alone, 0))
    assert np.abs(alone[0] - alone[1]).max() > 0.01
    model._pairs = model._pairs[:1]
    np.testing.assert_array_equal(small().fit(*clusters()).errors(x), alone[0])


def test_an_ensemble_shares_the_budget(small, clusters):
    one = small(output_dim=None, budget=1000).fit(*clusters())
    four = small(output_dim=None, budget=1000, ensemble=4).fit(*clusters())
    assert 995 < one.n_parameters_per_class_ <= 1000
    assert 980 < four.n_parameters_per_class_ <= 1000
    assert len(four._pairs) == 4


def test_a_function_as_teacher(small, clusters):
    x, y = clusters()
    asked = []

    def powers(samples):
        asked.append(samples.shape)
        return np.stack([samples.numpy().sum(1) ** k for k in (0, 1, 2)], 1)

    model = small(teacher=powers, output_dim=None, mean=1).fit(x, y)
    assert model.n_parameters_per_class_ == 5 * 4 + 12 + 4 * 3 + 3
    assert set(asked) == {(2, 5), (20, 5)}
    start = model._pairs[0].students.start
    assert all((row != start[0].numpy()).any() for row in rows(model).values())
    targets = model._pairs[0].teacher(torch.from_numpy(x[:3]))
    np.testing.assert_allclose(targets[:, 1], x[:3].sum(1), rtol=1e-4)
    assert targets.dtype == torch.float32


@pytest.mark.parametrize("training", [True, False])
def test_a_module_as_teacher(training, small, clusters):
    module = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(7)
    ).train(training)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = small(teacher=module, output_dim=None).fit(*clusters())
    x, y = clusters(seed=1)
    assert model.score(x, y) > 0.9
    assert np.array_equal(model.errors(x), model.errors(x))  # no dropout
    assert module.training is training and module[1].training is training
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_modules_parts_keep_their_modes(small, clusters):
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7)).train()
    module[1].eval()  # a frozen normalisation in a network that is otherwise being trained
    small(teacher=module, output_dim=None).fit(*clusters())
    assert [module.training, module[0].training, module[1].training] == [True, True, False]


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (lambda x: x.sum(1), r"shape \(2, d\), but it returned shape \(2,\)"),
        (lambda x: x[:1], r"shape \(2, d\), but it returned shape \(1, 5\)"),
        (lambda x: x / 0, "teacher returned NaN or infinite outputs"),
    ],
    ids=["flat", "too few", "infinite"],
)
def test_a_teacher_that_does_not_fit_is_refused(teacher, message, small, clusters):
    with pytest.raises(ValueError, match=message):
        small(teacher=teacher, output_dim=None).fit(*clusters())


def test_a_teacher_that_changes_its_mind_is_refused(small, clusters):
    def fickle(x):
        return x if len(x) == 2 else x[:, :1]

    with pytest.raises(ValueError, match="teacher"):
        small(teacher=fickle, output_dim=None).fit(*clusters())


def test_a_failing_teacher_leaves_no_untrained_class(small, clusters):
    """A class whose first samples could not be learned is not known, and never predicted."""

    def fussy(x):
        if x.max() > 100:
            raise ValueError("too bright")
        return x

    x, y = clusters()
    model = small(teacher=fussy, output_dim=None).partial_fit(x, y)
    with pytest.raises(ValueError, match="too bright"):
        model.partial_fit(x[:2] + 1000, ["new", "new"])
    model.partial_fit(x, y)
    assert model.classes_.tolist() == ["a", "b", "c"]


@pytest.mark.parametrize("metric", ["plain", "whitened"])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
@pytest.mark.filterwarnings("ignore:inputs have a root mean square")
def test_a_failing_teacher_changes_nothing(method, batch_size, metric, small, clusters, state):
    """Not even a class that was being learned when a later one failed."""

    def fussy(x):
        if x.max() > 100:
            raise ValueError("too bright")
        return x

    x, y = clusters()
    options = {"teacher": fussy, "output_dim": None}
    model = small(**options, metric=metric, batch_size=batch_size).fit(x, y)
    before, errors = state(model), model.errors(x)
    more, labels = clusters(labels=("a", "b", "c", "new"), seed=1)
    more[labels.index([*dict.fromkeys(labels)][-1])] = 1000  # of the class that comes last
    with pytest.raises(ValueError, match="too bright"):
        getattr(model, method)(more, labels)
    assert state(model) == before
    np.testing.assert_array_equal(model.errors(x), errors)


@pytest.mark.parametrize("n", [5, 60])
def test_an_interrupted_lesson_is_learned_whole_or_not_at_all(
    n, small, clusters, state, monkeypatch
):
    x, y = clusters(n=40)
    model = small().fit(x, y)
    before, labels = state(model), (["a", "new"] * n)[:n]
    whole = deepcopy(model).partial_fit(x[:n], labels)
    learn = students.Students.learn

    def interrupted(self, *options):
        learned = learn(self, *options)
        signal.raise_signal(signal.SIGINT)
        return learned

    monkeypatch.setattr(students.Students, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.partial_fit(x[:n], labels)
    assert state(model) == (state(whole) if n == 5 else before)
    assert model.predict(x).shape == (120,)
    assert model.classes_.tolist() == sorted(model.samples_seen_)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_samples_may_come_in_an_order_again_and_again(batch_size, small, clusters, state):
    """As if they were given so, but that the teacher is asked once for each."""
    x, y = clusters(n=10)
    order = np.random.default_rng(0).integers(0, len(x), 100)
    asked = []
    again, plain = (small(batch_size=batch_size).fit(x, y) for _ in range(2))
    answer = type(again._pairs[0].teacher).__call__

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(again._pairs[0].teacher),
            "__call__",
            lambda self, x: asked.append(len(x)) or answer(self, x),
        )
        again.partial_fit(x, y, order=order)
    plain.partial_fit(x[order], np.asarray(y)[order])
    assert sum(asked) <= len(x)
    assert again.samples_seen_ == plain.samples_seen_
    np.testing.assert_allclose(again.errors(x), plain.errors(x), rtol=1e-4)
    before = state(again)
    again.partial_fit(x, y, order=[])
    assert state(again) == before


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([0.5], "order must be a row of whole numbers, but it is float64 of shape .1,."),
        ([[0]], "whole numbers, but it is int64 of shape .1, 1."),
        ([0, 30], "positions from 0 to 29, but it has some from 0 to 30"),
        ([-1, 2], "positions from 0 to 29, but it has some from -1 to 2"),
    ],
)
def test_an_order_of_other_than_positions_is_refused(order, words, small, clusters):
    x, y = clusters(n=10)
    with pytest.raises(ValueError, match=words):
        small().partial_fit(x, y, order=order)


@pytest.mark.parametrize("metric", ["plain", "whitened"])
@pytest.mark.parametrize("change", ["merge", "forget"])
def test_an_interrupted_change_is_made_whole_or_not_at_all(
    change, metric, small, clusters, state, monkeypatch
):
    x, y = clusters(n=40)
    model = small(ensemble=2, metric=metric).fit(x, y)
    other = small(ensemble=2, metric=metric).fit(x, ["new"] * len(x))
    before, errors, calls = state(model), model.errors(x), []

    def interrupted(self, *options):
        usual(self, *options)
        calls.append(self)
        if len(calls) == 1:  # of two
            signal.raise_signal(signal.SIGINT)

    name = "remove" if change == "forget" else "add"
    usual = getattr(students.Students, name)
    with monkeypatch.context() as now, pytest.raises(KeyboardInterrupt):
        now.setattr(students.Students, name, interrupted)
        getattr(model, change)("a" if change == "forget" else other)
    assert state(model) == before
    np.testing.assert_array_equal(model.errors(x), errors)
    getattr(model, change)("a" if change == "forget" else other)
    assert "new" in model.classes_ if change == "merge" else "a" not in model.classes_


@pytest.mark.parametrize("n", [2, 40])
def test_a_lesson_that_fails_leaves_no_untrained_class(n, small, clusters, monkeypatch):
    x, y = clusters()
    model = small().fit(x, y)

    def failing(self, *options):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as now, pytest.raises(RuntimeError, match="out of memory"):
        now.setattr(students.Students, "learn", failing)
        model.partial_fit(x[:n], ["new"] * n)
    assert model.classes_.tolist() == sorted(model.samples_seen_) == ["a", "b", "c"]
    assert model.errors(x).shape == (60, 3)
    assert model.partial_fit(x[:n], ["new"] * n).samples_seen_["new"] == n


def test_statistics_are_those_that_were_given(small, clusters):
    """What a program does to its array later is no concern of the model."""
    x, y = clusters()
    mean = np.full(5, 0.5)
    model = small(mean=mean).fit(x, y)
    errors = model.errors(x)
    mean += 100
    np.testing.assert_array_equal(model.errors(x), errors)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).errors(x), errors)


# --------------------------------------------------------------------------- predictions


def test_columns_follow_classes(small, clusters):
    x, y = clusters(labels=("c", "a", "b"))
    model = small().fit(x, y)
    for column, label in enumerate(["a", "b", "c"]):
        mine = np.array(y) == label
        alone = small().fit(x[mine], [label] * 20)
        np.testing.assert_allclose(model.errors(x)[:, [column]], alone.errors(x), rtol=1e-5)


def test_errors_are_mean_squares(small, clusters):
    x, y = clusters()
    model = small(student_width=1).fit(x, y)
    (pair,) = model._pairs
    nets = Stack.over(pair.students.architecture, pair.students.rows)
    answer, _ = forward(nets, torch.from_numpy(x)[None])
    gap = (answer - pair.teacher(torch.from_numpy(x))).numpy()  # (classes, n, d)
    by_slot = (gap.astype(float) ** 2).mean(2).T
    expected = by_slot[:, [model._slots[label] for label in model.classes_]]
    np.testing.assert_allclose(model.errors(x), expected, rtol=1e-5)


@pytest.mark.parametrize("n_classes", [1, 2, 3, 5])
def test_all_predictions_agree(n_classes, small, clusters):
    labels = list(range(n_classes))
    x, y = clusters(labels=labels)
    model = small().fit(x, y)
    errors, predicted = model.errors(x), model.predict(x)
    decision, probability = model.decision_function(x), model.predict_proba(x)
    assert errors.shape == probability.shape == (len(x), n_classes)
    np.testing.assert_array_equal(predicted, model.classes_[errors.argmin(1)])
    np.testing.assert_array_equal(predicted, model.classes_[probability.argmax(1)])
    np.testing.assert_allclose(probability.sum(1), 1)
    np.testing.assert_array_equal(np.argsort(probability[0]), np.argsort(-errors[0]))
    assert ((probability >= 0) & (probability <= 1)).all()
    if n_classes == 2:
        assert decision.shape == (len(x),)
        np.testing.assert_array_equal(decision > 0, predicted == 1)
        np.testing.assert_allclose(decision, np.log(errors[:, 0] / errors[:, 1]), rtol=1e-6)
    else:
        np.testing.assert_array_equal(decision, -errors)
    np.testing.assert_array_equal(model.novelty(x), errors.min(1))
    np.testing.assert_array_equal(model.score_samples(x), -errors.min(1))
    assert model.score(x, y) == np.mean(predicted == np.array(y))


def test_scoring_in_pieces(small, clusters, monkeypatch):
    model = small().fit(*clusters())
    x, _ = clusters(seed=1)
    whole = model.errors(x)
    monkeypatch.setattr("pecil.pec.estimator.SCORED", 7)
    monkeypatch.setattr("pecil.pec.machine.CPU_CACHED", 60)
    np.testing.assert_allclose(model.errors(x), whole, rtol=1e-5)


# ------------------------------------------------------------------------------- novelty


def test_strangers_are_more_novel_than_acquaintances(small, clusters):
    x, y = clusters(labels=range(6), n=400)
    known = np.array(y) < 3
    model = small().fit(x[known], np.array(y)[known])
    fresh, labels = clusters(labels=range(6), n=40, seed=1)
    new = np.array(labels) >= 3
    novelty = model.novelty(fresh)
    assert novelty[new].min() > 2 * novelty[~new].max()
    answers = [model.predict(fresh, reject_as=-1)]
    for samples in (None, x[known]):
        answers.append(model.calibrate(samples).predict(fresh, reject_as=-1))
    for answer in answers:
        assert (answer[new] == -1).all()
        assert (answer[~new] == -1).mean() < 0.1
    np.testing.assert_array_equal(answers[0], answers[1])  # by default, the stream decides


@pytest.mark.parametrize("quantile", [0, 0.5, 0.9, 1])
def test_the_quantile_is_respected(quantile, small, clusters):
    x, y = clusters(n=40)
    model = small().fit(x, y).calibrate(x, quantile=quantile)
    accepted = model.predict(x, reject_as="?") != "?"
    assert accepted.mean() == pytest.approx(quantile, abs=1 / len(x))
    np.testing.assert_array_equal(accepted, model.novelty(x) <= model.threshold_)
    assert model.threshold_ == np.quantile(model.novelty(x), quantile)
    np.testing.assert_array_equal(model.predict(x)[accepted], np.array(y)[accepted])


@pytest.mark.parametrize(
    ("recent", "latest", "ensemble"), [(256, 75, 1), (20, 20, 1), (256, 75, 2)]
)
def test_calibration_from_the_stream(recent, latest, ensemble, small, clusters, monkeypatch):
    """Without samples, errors decide: those that the last quarter had before it was learned."""
    monkeypatch.setattr(base, "RECENT", recent)
    x, _ = clusters(labels=("a",), n=300)
    model, seen = small(ensemble=ensemble).partial_fit(x[:1], ["a"]), []
    for sample in x[1:]:
        seen.append(model.novelty(sample[None])[0])
        model.partial_fit(sample[None], ["a"])
    for quantile in (0, 0.5, 0.9):
        expected = np.quantile(seen[-latest:], quantile)
        assert model.calibrate(quantile=quantile).threshold_ == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("reject_as", [-1, "new", None, ("none", "of", "them"), np.nan], ids=str)
@pytest.mark.parametrize("labels", [(1, 2), ("a", "b"), ((1, 2), (3, 4)), (None, 1)], ids=str)
def test_rejected_samples_get_the_label_asked_for(reject_as, labels, small, clusters):
    x, y = clusters(labels=labels)
    model = small().fit(x, y).calibrate(x, quantile=0.5)
    answer = model.predict(x, reject_as=reject_as).tolist()
    novel = model.novelty(x) > model.threshold_
    assert 0 < novel.sum() < len(x)
    for given_, rejected, label in zip(answer, novel, model.predict(x).tolist(), strict=True):
        wanted = reject_as if rejected else label
        assert given_ is wanted or given_ == wanted
        assert type(given_) is type(wanted)


@pytest.mark.parametrize("quantile", [-0.1, 1.5, float("nan"), 99])
def test_a_quantile_is_a_share(quantile, small, clusters):
    with pytest.raises(ValueError, match="quantile must be between 0 and 1, but it is"):
        small().fit(*clusters()).calibrate(quantile=quantile)


# -------------------------------------------------------------------------------- speed


def denormal(tensor):
    return (tensor != 0) & (tensor.abs() < torch.finfo(torch.float32).tiny)


def sparse_lesson(model):
    """Learn from inputs that are mostly zero, of which half the features go silent for good."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1200, 20)) * (rng.random((1200, 20)) < 0.2)
    x[100:, 10:] = 0
    model.fit(x, [0] * len(x))
    return model._pairs[0].students.parts


def test_sparse_inputs_do_not_slow_down_a_step(small):
    """Arithmetic on denormal numbers is many times slower: none may be left behind."""
    parts = sparse_lesson(small(shuffle=False))
    assert all(not denormal(part).any() for part in parts)


def test_denormals_would_pile_up_if_not_flushed(small, monkeypatch):
    monkeypatch.setattr(students, "_flush", lambda moment: None)
    rows, first, second = sparse_lesson(small(shuffle=False))
    assert denormal(first).sum() > 20


def test_flushing_changes_no_prediction(small, clusters, monkeypatch):
    x, y = clusters(n=200)
    x[150:, 2:] = 0
    flushed = small(shuffle=False).fit(x, y)
    monkeypatch.setattr(students, "_flush", lambda moment: None)
    kept = small(shuffle=False).fit(x, y)
    assert_same_up_to_rounding(flushed, kept)


def test_a_score_needs_labels_of_the_kind_that_was_learned():
    x, y = np.random.default_rng(0).random((20, 3)), np.arange(20) % 2
    named = PEC(random_state=0).fit(x, y.astype(str))
    with pytest.raises(ValueError, match="of the kind that was learned, such as '0', .* holds 0"):
        named.score(x, y)
    assert named.score(x, y.astype(str)) > 0
    assert named.score(x, ["unknown"] * 20) == 0
