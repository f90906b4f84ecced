import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import torch

from pecil.bench import Experiment, planned, run
from pecil.bench.experiment import held_out, settings_for
from pecil.data import DATASETS, load
from pecil.data.registry import digest
from pecil.methods import METHODS, FineTuning, pec
from pecil.teachers import Filters

SMALL = {"teacher_width": 100, "student_width": 4, "output_dim": 10}


def test_the_key_depends_on_everything_that_decides_the_outcome():
    first = planned("pec", "mnist")
    others = [
        planned("finetuning", "mnist"),
        planned("pec", "cifar10"),
        planned("pec", "mnist", "5/2"),
        planned("pec", "mnist", seed=1),
        planned("pec", "mnist", lr=0.001),
    ]
    assert len({first.key, *(other.key for other in others)}) == 6
    assert planned("pec", "mnist", lr=first.settings["lr"]).key == first.key


def test_the_key_is_pinned_and_ignores_the_order_of_settings():
    one = Experiment("pec", "digits", "10/1", 3, {"lr": 0.01, "output_dim": 5})
    two = Experiment("pec", "digits", "10/1", 3, {"output_dim": 5, "lr": 0.01})
    assert one.key == two.key == "843550afb6608845"
    assert len({one, two}) == 1


@pytest.mark.parametrize("dataset", DATASETS)
def test_settings_name_parameters_that_exist(dataset):
    for name, method in METHODS.items():
        assert set(settings_for(name, dataset)) <= set(method.settings)


OTHER, FEATURES = "van_de_ven_2021", "cifar100_features"
ELSEWHERE = ["mnist", "fashion_mnist", "cifar10", FEATURES, "core50"]


@pytest.mark.parametrize("dataset", ELSEWHERE)
def test_another_setup_has_settings_of_its_own(dataset):
    found = {}
    for name, method in METHODS.items():
        found[name] = settings_for(name, dataset, "5/2", 1, OTHER)
        assert set(found[name]) <= set(method.settings)
    assert found["slda"] == {"shrinkage": 0.0001}
    assert found["ewc"].items() >= found["joint"].items() == found["finetuning"].items()
    assert found["ewc"]["lam"] != settings_for("ewc", dataset).get("lam", 100)
    assert "like" not in found["dgr"]
    with pytest.raises(ValueError, match="mnist has no settings of a setup 'mars'"):
        settings_for("pec", "mnist", "", 1, "mars")


@pytest.mark.parametrize(
    ("dataset", "parameters"),
    [
        ("mnist", 150_000),
        ("fashion_mnist", 150_000),
        ("cifar10", 350_000),
        (FEATURES, 180_000),
        ("core50", 170_000),
    ],
)
def test_the_other_setups_sizes_of_a_class(dataset, parameters):
    for name in ("pec", "vae_gc"):
        settings = settings_for(name, dataset, "", 1, OTHER)
        settings |= {"teacher_width": 1} if name == "pec" else {}
        shape = DATASETS[dataset].shape
        learner = METHODS[name].learner(1, shape, device="cpu", **settings)
        if name == "pec":
            learner.begin_task({0: 1})
            learner.learn(np.zeros((1, *shape), dtype=np.uint8), np.zeros(1, dtype=int))
        assert learner.n_parameters == pytest.approx(parameters, rel=0.015)


def test_settings_belong_to_a_dataset():
    files = (resources.files("pecil.bench") / "settings").iterdir()
    assert {file.name.removesuffix(".toml") for file in files} <= set(DATASETS)


@pytest.mark.parametrize(
    ("dataset", "lr", "parameters"),
    [
        ("mnist", 0.01, 8_959),
        ("svhn", 0.0001, 1_117_043),
        ("balanced_svhn", 0.0001, 1_117_043),
        ("cifar10", 0.0003, 1_117_043),
        ("imbalanced_cifar10", 0.0003, 1_117_043),
        ("cifar100", 0.001, 111_452),
        ("miniimagenet", 0.001, 111_452),
    ],
)
def test_the_papers_settings_have_the_papers_size(dataset, lr, parameters):
    settings = planned("pec", dataset).settings
    assert settings["lr"] == lr
    shape = DATASETS[dataset].shape
    learner = METHODS["pec"].learner(10, shape, device="cpu", **{**settings, "teacher_width": 1})
    learner.begin_task({0: 1})
    learner.learn(np.zeros((1, *shape), dtype=np.uint8), np.zeros(1, dtype=int))
    assert learner.n_parameters == parameters


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_dataset_has_its_teacher_and_memory(dataset):
    settings, info = planned("whitened_pec", dataset).settings, DATASETS[dataset]
    assert settings.get("teacher", "") == info.pictures
    small = {"digits": 17_600, "mnist": 89_600, "fashion_mnist": 89_600}
    assert settings["memory"] == small.get(dataset, 11_200_000)
    assert planned("randumb", dataset).settings.get("flip", False) == info.mirror


@pytest.mark.parametrize(
    ("method", "given", "gone"),
    [
        ("whitened_pec", "dim", "memory"),
        ("randumb", "memory", "dim"),
        ("pec", "budget", "output_dim"),
    ],
)
def test_a_setting_takes_the_place_of_the_one_whose_work_it_does(method, given, gone):
    assert gone in planned(method, "digits").settings
    settings = planned(method, "digits", **{given: 3000}).settings
    assert settings[given] == 3000 and gone not in settings


def test_whitened_pec_learns_the_same_from_any_split_and_holds_what_it_may():
    small = {"teacher": "relu", "memory": 5000}
    together = run(planned("whitened_pec", "digits", **small), device="cpu")
    apart = run(planned("whitened_pec", "digits", "5/2", **small), device="cpu", per_task=True)
    assert together.accuracy == pytest.approx(apart.accuracy, abs=0.006)  # two samples of 355
    assert apart.accuracy_after_task[-1] == apart.accuracy > 0.9
    assert 4800 < together.n_parameters == apart.n_parameters <= 5000
    assert together.experiment.settings == small


def test_a_machine_without_the_extras_can_run_experiments():
    program = """
import sys
extras = "typer rich matplotlib safetensors PIL pyarrow huggingface_hub pandas"
sys.modules.update(dict.fromkeys(extras.split()))
from pecil.bench.experiment import planned, run
from pecil.bench import figures, store, tables
print(run(planned("nearest_mean", "digits"), device="cpu").accuracy > 0.8)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_unknown_names_are_refused_with_the_choice():
    with pytest.raises(ValueError, match="method out of whitened_pec, pec, .*, got 'ere'"):
        planned("ere", "digits")
    with pytest.raises(ValueError, match="pec has no setting lrr; it has .*lr, "):
        planned("pec", "digits", lrr=1)


@pytest.mark.parametrize(
    ("method", "settings", "kind"),
    [
        ("er", {"lr": "abc"}, "float"),
        ("slda", {"shrinkage": "abc"}, "float"),
        ("ewc", {"hidden": "abc"}, "Sequence[int]"),
        ("er", {"hidden": [10, "abc"]}, "Sequence[int]"),
        ("lwf", {"augment": 3}, "bool"),
        ("pec", {"size": 2.5}, "int | None"),
    ],
)
def test_settings_of_the_wrong_type_are_refused(method, settings, kind):
    ((name, value),) = settings.items()
    message = f"{method}: {name} must be of type {kind}, but it is {value!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        planned(method, "digits", **settings)


@pytest.mark.parametrize(
    ("dataset", "setup"),
    [*((name, "") for name in DATASETS), *((name, OTHER) for name in ELSEWHERE)],
)
def test_settings_that_are_chosen_have_the_right_types(dataset, setup):
    for name in METHODS:
        chosen = settings_for(name, dataset, "", 1, setup)
        assert planned(name, dataset, setup=setup, **chosen).settings == chosen


def test_settings_may_be_of_types_that_are_like_those_told():
    like = {"lr": 1, "hidden": (10, np.int64(5)), "width": np.int32(3), "batch_size": 5}
    assert planned("er", "digits", **like).settings.items() >= like.items()
    assert planned("randumb", "digits", shrinkage=1, gamma=None, dim=None, memory=9)


def test_a_learner_that_says_no_types_gets_any_settings(monkeypatch):
    class Plain(FineTuning):
        def __init__(self, *given, width=3, **more):
            super().__init__(*given, **more)

    known = METHODS["finetuning"]
    for learner in (Plain, lambda *given, **more: Plain(*given, **more)):
        monkeypatch.setitem(METHODS, "finetuning", replace(known, learner=learner))
        assert planned("finetuning", "digits", width="wide").settings["width"] == "wide"


@pytest.mark.parametrize("settings", [{"lr": "abc"}, {"hidden": [-1]}, {"sizzle": 1}])
def test_a_learner_that_cannot_be_made_is_named_with_its_settings(settings):
    experiment = Experiment("er", "digits", settings=settings, buffer=9)
    told = re.escape(f"er cannot be made with the settings {settings | {'buffer': 9}}: ")
    with pytest.raises(ValueError, match=told):
        run(experiment, device="cpu")


def test_without_a_split_classes_come_one_at_a_time(tmp_path):
    assert planned("pec", "cifar100").split == "100/1"
    own = tmp_path / "own.npz"
    np.savez(own, x=np.zeros((6, 2)), y=list("aabbcc"))
    assert planned("pec", str(own)).split == "3/1"


def test_a_result_is_complete():
    shown = []
    result = run(
        planned("pec", "digits", "5/2", 1, **SMALL),
        device="cpu",
        progress=lambda *steps: shown.append(steps),
    )
    assert 0.3 < result.accuracy < 1
    assert list(result.accuracy_per_class) == list("0123456789")
    assert np.mean(list(result.accuracy_per_class.values())) == pytest.approx(
        result.accuracy, abs=0.02
    )
    assert result.accuracy_after_task == []
    assert set(result.seconds) == {"load", "fit", "test"}
    assert result.n_parameters == 10 * (64 * 4 + 4 + 2 * 4 + 4 * 10 + 10)
    assert set(result.versions) == {"pecil", "torch", "numpy", "python"}
    assert result.device.startswith("cpu")
    assert shown[-1][0] == shown[-1][1]


def test_later_fields_change_the_key_only_where_they_differ_from_what_was_the_rule():
    first = planned("finetuning", "digits")
    others = [
        planned("finetuning", "digits", epochs=2),
        planned("finetuning", "digits", validation=True),
        replace(first, buffer=5),
        planned("finetuning", "digits", steps=3),
        planned("finetuning", "digits", random_classes=True),
    ]
    assert len({first.key, *(other.key for other in others)}) == 6
    plain = Experiment("pec", "digits", settings={"lr": 0.01}, epochs=1, buffer=0)
    assert plain.key == Experiment("pec", "digits", settings={"lr": 0.01}).key
    assert first.kind == replace(first, seed=3).kind != others[0].kind


def test_epochs_are_passes_over_each_task():
    common = {"hidden": [5], "lr": 0.01}
    few, many = (run(planned("finetuning", "digits", "joint", epochs=n, **common)) for n in (1, 5))
    assert few.accuracy < many.accuracy
    with pytest.raises(ValueError, match="epochs: expected a whole number of at least 1, got 0"):
        planned("pec", "digits", epochs=0)
    with pytest.raises(ValueError, match="pec keeps no samples: expected a buffer of 0, got 5"):
        planned("pec", "digits", buffer=5)


@pytest.fixture
def watched(monkeypatch):
    """Return a list of the learners that are made, with what they are given."""
    made = []

    class Watched(FineTuning):
        def begin_task(self, counts, passes=()):
            if not counts:  # it is being made
                made.append(self)
                self.tasks, self.given = [], []
            else:
                self.tasks.append(counts)
            super().begin_task(counts, passes)

        def learn(self, x, y):
            self.given.append((len(self.tasks), x))
            super().learn(x, y)

    monkeypatch.setitem(METHODS, "finetuning", replace(METHODS["finetuning"], learner=Watched))
    return made


def test_steps_are_whole_batches_of_as_many_passes_as_they_take(watched):
    result = run(planned("finetuning", "digits", "5/2", steps=11, batch_size=32), device="cpu")
    (learner,) = watched
    counts = np.bincount(load("digits").train_y)
    assert [sum(task.values()) for task in learner.tasks] == [11 * 32] * 5
    for task in range(5):
        passes = [x for index, x in learner.given if index == task + 1]
        whole = counts[2 * task : 2 * task + 2].sum() // 32
        assert [len(x) for x in passes] == [32 * whole, 32 * (11 - whole)] and whole in (8, 9)
        assert not np.array_equal(passes[0][:32], passes[1][:32])  # another order
    assert result.experiment.steps == 11


def test_steps_of_a_method_that_learns_classes_apart_are_its_own():
    digits = load("digits")
    result = run(planned("pec", "digits", steps=10, batch_size=16, **SMALL), device="cpu")
    once = run(planned("pec", "digits", batch_size=16, **SMALL), device="cpu")
    assert result.accuracy > 0.3 and result.accuracy != once.accuracy
    assert len(digits.train_y) < 10 * 10 * 16
    same = run(
        planned("pec", "digits", steps=10, batch_size=16, **SMALL), device="cpu", per_task=True
    )
    assert same.accuracy == result.accuracy


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("finetuning", {"steps": -1}, "steps: expected a whole number of at least 0, got -1"),
        ("finetuning", {"steps": 5, "epochs": 2}, "a batch_size and 1 epoch, got 10 and 2"),
        ("slda", {"steps": 5}, "a batch_size and 1 epoch, got no batch_size and 1"),
    ],
)
def test_steps_that_make_no_sense_are_refused(method, settings, message):
    with pytest.raises(ValueError, match=message):
        planned(method, "digits", **settings)


def test_a_task_smaller_than_a_batch_has_no_steps():
    with pytest.raises(ValueError, match="a whole batch of 500 in each task, got 140 samples"):
        run(planned("finetuning", "digits", steps=2, batch_size=500), device="cpu")


def test_the_seed_may_decide_the_order_of_the_classes(watched):
    experiments = [
        planned("finetuning", "digits", "5/2", seed, random_classes=True) for seed in (1, 1, 2)
    ]
    first, _, _ = (run(experiment, device="cpu", per_task=True) for experiment in experiments)
    orders = [[tuple(task) for task in learner.tasks] for learner in watched]
    assert orders[0] == orders[1] != orders[2] != [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    marks = first.accuracy_per_class_after_task
    assert [set(after) for after in marks] == [
        {str(c) for task in orders[0][: n + 1] for c in task} for n in range(5)
    ]
    assert first.accuracy_after_task[0] > 0.9 and first.forgetting > 0.5
    last = {str(c) for c in orders[0][-1]}
    assert {c for c, share in first.accuracy_per_class.items() if share > 0.5} == last


def test_a_result_tells_forgetting_confusion_memory_and_operations():
    result = run(planned("finetuning", "digits", hidden=[20], lr=0.01), device="cpu", per_task=True)
    after = result.accuracy_per_class_after_task
    assert [len(marks) for marks in after] == list(range(1, 11))
    assert after[-1] == result.accuracy_per_class
    assert result.average_anytime_accuracy == pytest.approx(np.mean(result.accuracy_after_task))
    lost = [max(marks.get(str(c), 0) for marks in after[:-1]) - after[-1][str(c)] for c in range(9)]
    assert result.forgetting == pytest.approx(np.mean(lost))
    assert result.forgetting > 0.5
    confusion = np.array(result.confusion)
    assert confusion.sum() == 355
    assert np.trace(confusion) / 355 == pytest.approx(result.accuracy)
    assert confusion[:, 9].sum() > 200  # what came last
    assert result.macs == 64 * 20 + 20 * 10
    assert (result.buffer_size, result.peak_memory >= 0) == (0, True)
    alone = run(planned("finetuning", "digits", hidden=[20], lr=0.01), device="cpu")
    assert (alone.forgetting, alone.accuracy) == (None, result.accuracy)
    together = run(planned("nearest_mean", "digits", "joint"), device="cpu", per_task=True)
    assert together.forgetting is None


@pytest.mark.parametrize("threads", [1, 2])
def test_operations_of_a_teacher_of_pictures_are_counted(threads):
    """A CPU's own products, too, and in whatever threads they usually are."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        recipe = Filters(sizes=(3,), grids=(1,))
        result = run(planned("whitened_pec", "digits", teacher=recipe, dim=20), device="cpu")
    finally:
        torch.set_num_threads(before)
    filters = 20 // 2  # both sides of the threshold
    assert result.macs == 6 * 6 * 3 * 3 * filters + 20 * 10


def test_held_out_samples_are_a_tenth_of_the_training_part_and_depend_on_the_seed():
    digits = load("digits")
    one, same, other = (held_out(digits, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.test_x, same.test_x)
    assert not np.array_equal(one.test_x, other.test_x)
    counts = np.bincount(digits.train_y)
    np.testing.assert_array_equal(np.bincount(one.test_y), counts // 10)
    whole = np.concatenate([one.train_x, one.test_x]).reshape(len(digits.train_x), -1)
    np.testing.assert_array_equal(
        np.sort(whole, axis=0), np.sort(digits.train_x.reshape(len(whole), -1), axis=0)
    )
    with pytest.raises(ValueError, match="a class with 10 samples or more"):
        held_out(replace(digits, train_x=digits.train_x[:9], train_y=digits.train_y[:9]), 0)
    result = run(planned("nearest_mean", "digits", validation=True), device="cpu")
    assert np.sum(result.confusion) == len(one.test_y)


def test_pec_learns_the_same_from_any_split_and_in_any_portions():
    together = run(planned("pec", "digits", "10/1", **SMALL), device="cpu")
    for split in ("10/1", "5/2"):
        apart = run(planned("pec", "digits", split, **SMALL), device="cpu", per_task=True)
        assert apart.accuracy_per_class == together.accuracy_per_class
        assert len(apart.accuracy_after_task) == int(split.split("/")[0])
        assert apart.accuracy_after_task[-1] == apart.accuracy == together.accuracy


def test_a_single_class_is_always_right_and_fine_tuning_forgets_the_others():
    result = run(planned("finetuning", "digits"), device="cpu", per_task=True)
    assert result.accuracy_after_task[0] == 1
    assert result.accuracy < 0.2
    assert result.accuracy_per_class["9"] > 0.8


@pytest.mark.parametrize("more", [{"epochs": 3}, {"steps": 20, "batch_size": 10}])
def test_what_comes_in_several_passes_is_handed_over_once_if_the_method_likes(more, monkeypatch):
    """PEC's teacher answers once for each sample, and what comes out is the same."""
    experiment = planned("pec", "digits", **SMALL, **more)
    seen, learn = [], METHODS["pec"].learner.learn

    def noted(self, x, y, order=None):
        seen.append((len(x), None if order is None else len(order)))
        learn(self, x, y, order)

    monkeypatch.setattr(METHODS["pec"].learner, "learn", noted)
    once = run(experiment, device="cpu")
    monkeypatch.setitem(METHODS, "pec", replace(METHODS["pec"], again=False))
    repeated = run(experiment, device="cpu")
    assert once.accuracy == pytest.approx(repeated.accuracy, abs=0.01)
    with_order = [(n, m) for n, m in seen if m is not None]
    assert all(m > n for n, m in with_order)
    assert sum(m for _, m in with_order) == sum(n for n, m in seen if m is None)


def test_the_seed_and_the_settings_reach_the_method():
    accuracies = {
        run(experiment, device="cpu").accuracy
        for experiment in (
            planned("pec", "digits", **SMALL),
            planned("pec", "digits", seed=1, **SMALL),
            planned("pec", "digits", **SMALL, lr=1e-6),
            planned("pec", "digits", **SMALL, epochs=3),
        )
    }
    assert len(accuracies) == 4


def test_own_data_with_labels_of_text(tmp_path):
    random = np.random.default_rng(0)
    y = np.array(["ant", "bee"]).repeat(50)
    x = (random.normal(size=(100, 3)) + 5 * (y == "bee")[:, None]).astype(np.float32)
    np.savez(tmp_path / "own.npz", train_x=x, train_y=y, test_x=x, test_y=y)
    for method in METHODS:
        size = {"dim": 50} if method in ("whitened_pec", "randumb") else {}
        result = run(planned(method, str(tmp_path / "own.npz"), "1/2", **size), device="cpu")
        assert set(result.accuracy_per_class) == {"ant", "bee"}
        assert result.accuracy > 0.6


def test_data_at_a_path_are_part_of_the_experiment(tmp_path):
    path = tmp_path / "own.npz"

    def write(n):
        x, y = np.eye(n), np.arange(n)
        np.savez(path, train_x=x, train_y=y, test_x=x, test_y=y)

    write(2)
    first = planned("nearest_mean", str(path), "1/2")
    assert first.data and first == planned("nearest_mean", str(path), "1/2")
    assert run(first, device="cpu").n_parameters == 2 * 2
    os.utime(path, (1, 1))
    assert first == planned("nearest_mean", str(path), "1/2")
    write(3)
    second = planned("nearest_mean", str(path), "1/3")
    assert second.data != first.data
    assert run(second, device="cpu").n_parameters == 3 * 3
    with pytest.raises(ValueError, match=r"own.npz has changed since the experiment was planned"):
        run(first, device="cpu")
    assert planned("pec", "digits").data == ""


def test_a_folder_changes_with_any_of_its_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_text("1")
    seen = [digest(str(tmp_path))]
    for change in (
        lambda: (tmp_path / "a" / "one").write_text("2"),
        lambda: (tmp_path / "a" / "one").rename(tmp_path / "two"),
        lambda: (tmp_path / "three").write_text(""),
    ):
        change()
        seen.append(digest(str(tmp_path)))
    assert len(set(seen)) == 4
    assert digest(str(tmp_path / "nothing")) == ""


def test_data_without_a_test_part_is_refused(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((4, 2)), y=[0, 0, 1, 1])
    with pytest.raises(ValueError, match="no test part"):
        run(planned("pec", str(tmp_path / "own.npz")))


def test_equal_settings_have_equal_keys_whatever_their_type():
    keys = {
        planned("derpp", "digits", alpha=alpha, hidden=[8]).key
        for alpha in (1, 1.0, np.float64(1.0), np.int64(1))
    }
    assert len(keys) == 1
    assert (
        planned("derpp", "digits", hidden=(np.int64(8),)).key
        == planned("derpp", "digits", hidden=[8]).key
    )
    assert planned("derpp", "digits", alpha=np.float32(0.5)).settings["alpha"] == 0.5
    assert planned("finetuning", "digits", augment=True).settings["augment"] is True


def test_tests_after_every_task_need_samples_of_the_first_one(tmp_path):
    random = np.random.default_rng(0)
    x, y = random.random((40, 4)), np.arange(40) % 2
    path = tmp_path / "two.npz"
    np.savez(path, train_x=x, train_y=y, test_x=x[y == 1], test_y=y[y == 1])
    experiment = planned("nearest_mean", str(path))
    with pytest.raises(ValueError, match="test samples of the classes of the first one, 0, got"):
        run(experiment, device="cpu", per_task=True)
    assert run(experiment, device="cpu").accuracy > 0


def test_a_sample_that_is_there_twice_is_not_learned_if_its_twin_is_held_out():
    digits = load("digits")
    doubled = replace(
        digits,
        train_x=np.concatenate([digits.train_x, digits.train_x]),
        train_y=np.concatenate([digits.train_y, digits.train_y]),
    )
    parts = held_out(doubled, seed=1)
    known = {x.tobytes() for x in parts.test_x}
    assert len(known) > 200
    assert not known & {x.tobytes() for x in parts.train_x}


def test_what_buffer_balancing_keeps_does_not_depend_on_tests_in_between():
    experiment = planned("pec", "digits", balancing="buffer", buffer=50)
    results = [run(experiment, device="cpu", per_task=each) for each in (False, True)]
    assert results[0].confusion == results[1].confusion


def test_the_seed_of_an_experiment_is_its_learners(monkeypatch):
    known, seeds = METHODS["nearest_mean"], []

    def noted(*shape, seed, **given):
        seeds.append(seed)
        return known.learner(*shape, seed=seed, **given)

    monkeypatch.setitem(METHODS, "nearest_mean", replace(known, learner=noted))
    for seed in (0, 7):
        run(planned("nearest_mean", "digits", seed=seed), device="cpu")
    assert seeds == [0, 7]


def test_balancing_has_the_test_set_or_the_buffer(monkeypatch):

    given, balanced = [], pec.balance

    def balance(model, x, y, **more):
        given.append((x, y))
        return balanced(model, x, y, generations=20, **more)

    monkeypatch.setattr(pec, "balance", balance)
    usual = run(planned("pec", "digits", **SMALL), device="cpu")
    assert not given
    digits = load("digits")
    for balancing, kept in (("oracle", 0), ("buffer", 60)):
        given.clear()
        experiment = planned("pec", "digits", balancing=balancing, buffer=kept, **SMALL)
        result = run(experiment, device="cpu")
        ((x, y),) = given
        if balancing == "oracle":
            assert np.array_equal(x, digits.test_x) and np.array_equal(y, digits.test_y)
            assert result.accuracy > usual.accuracy
        known = (x[:, None] == digits.train_x).all((2, 3)).any(1)
        assert known.all() == (balancing == "buffer") and len(x) == (kept or 355)
        assert result.confusion != usual.confusion
        assert result.buffer_size == kept


def test_a_result_tells_how_many_samples_were_kept():
    for buffer, kept in ((30, 30), (5000, len(load("digits").train_x))):
        settings = {"hidden": [3], "batch_size": 500, "buffer": buffer}
        assert run(planned("er", "digits", "5/2", **settings), device="cpu").buffer_size == kept
