from dataclasses import replace

import numpy as np
import pytest

from pecil.bench import Result, planned
from pecil.bench.figures import FIGURES
from pecil.bench.search import best, candidates, grid_for, winner
from pecil.bench.sweeps import experiments, for_figure, plan
from pecil.data import DATASETS
from pecil.methods import METHODS


def result(experiment, seconds=1.0, device="cpu: x86_64", accuracy=0.5):
    return Result(experiment, accuracy, {}, [], {"fit": seconds}, 1, device, {})


def test_a_table_becomes_the_experiments_that_can_be_run():
    asked = experiments("table1", seeds=2)
    assert {experiment.seed for experiment in asked} == {1, 2}
    assert len({experiment.key for experiment in asked}) == len(asked)
    for experiment in asked:
        assert METHODS[experiment.method].supports(DATASETS[experiment.dataset].shape)
    datasets = [experiment.dataset for experiment in asked]
    assert datasets == sorted(datasets, key=list(dict.fromkeys(datasets)).index)


def test_only_the_cells_that_are_named():
    (joint,) = experiments("table1", ["mnist/joint_50ep"], seeds=1)
    assert (joint.method, joint.split, joint.epochs, joint.seed) == ("joint", "joint", 50, 1)
    pair = experiments("table1", ["mnist/pec", "cifar10/slda"], seeds=1)
    assert [(e.dataset, e.method) for e in pair] == [("mnist", "pec"), ("cifar10", "slda")]
    both = experiments("table1", ["mnist/joint"], seeds=1)  # by the method: all of its rows
    assert {experiment.epochs for experiment in both} == {1, 50}
    assert {e.dataset for e in experiments("table1", ["*/pec"], seeds=1)} >= {"mnist", "cifar100"}
    assert experiments("table2", ["mnist/finetuning"], seeds=1)[0].split == "5/2"
    with pytest.raises(ValueError, match="has no cell pec: expected DATASET/ROW with a dataset"):
        experiments("table1", ["pec"])
    with pytest.raises(ValueError, match="one seed or more, got 0"):
        experiments("table1", seeds=0)


def test_a_dataset_that_is_absent_is_run_only_by_its_name():
    assert "core50" not in {e.dataset for e in experiments("other_setup", seeds=1)}
    assert "core50" not in {e.dataset for e in experiments("other_setup", ["*/pec"], seeds=1)}
    (own,) = experiments("other_setup", ["core50/pec"], seeds=1)
    assert (own.dataset, own.epochs, own.steps) == ("core50", 1, 0)


def test_estimates_of_steps_come_from_runs_of_as_many():
    (asked,) = experiments("other_setup", ["mnist/pec"], seeds=1)
    past = [result(planned("pec", "mnist"), seconds=2)]
    assert plan([asked], past)[1][0].seconds is None
    assert plan([asked], [*past, result(replace(asked, seed=5), 70)])[1][0].seconds == 70


def test_a_plan_leaves_out_what_is_finished_and_learns_from_the_past():
    asked = experiments("table1", ["mnist/pec", "mnist/joint_50ep", "mnist/slda"], seeds=3)
    pec, joint = (next(e for e in asked if e.method == method) for method in ("pec", "joint"))
    past = [
        result(pec, seconds=4),
        result(replace(pec, seed=9), seconds=6),
        result(replace(pec, seed=8), seconds=900, device="cuda: fast"),
        result(planned("joint", "mnist"), seconds=2),
    ]
    to_run, parts = plan(asked, past)
    assert len(to_run) == 8
    found = {part.experiment.method: part for part in parts}
    assert (found["pec"].to_run, found["pec"].finished, found["pec"].seconds) == (2, 1, 5)
    assert found["joint"].seconds == 100 * 10 / 32  # 50 passes, batches of 32 instead of 10
    assert found["slda"].seconds is None
    assert joint in to_run


@pytest.mark.parametrize("method", ["pec", "slda", "finetuning", "joint"])
def test_grids_have_settings_that_exist(method):
    assert set(grid_for(method)) <= set(METHODS[method].settings)


def test_a_grid_is_the_papers_unless_told_otherwise():
    assert len(candidates(grid_for("pec"), "pec", "mnist")) == 7
    assert len(candidates(grid_for("slda"), "slda", "mnist")) == 10
    grid = grid_for("finetuning", {"lr": [0.1]}, "mnist")
    asked = candidates(grid, "finetuning", "mnist", split="5/2")
    assert len(asked) == 3 * 2
    assert all(e.validation and e.split == "5/2" and e.settings["lr"] == 0.1 for e in asked)


def test_the_first_of_the_best_wins_and_is_run_on_all_data():
    asked = candidates({"lr": [0.1, 0.2, 0.3]}, "pec", "mnist", seed=4)
    accuracies = zip(asked, (0.5, 0.9, 0.9), strict=True)
    found = winner(best(result(e, accuracy=a) for e, a in accuracies), seed=7)
    assert found == planned("pec", "mnist", seed=7, lr=0.2)


def test_a_row_s_own_name_comes_before_its_method_s():
    """`finetuning` is a row; the labels trick is another one of the same method."""
    (row,) = experiments("table1", ["mnist/finetuning"], seeds=1)
    assert "labels_trick" not in row.settings
    (trick,) = experiments("table1", ["mnist/labels_trick"], seeds=1)
    assert (trick.method, trick.settings["labels_trick"]) == ("finetuning", True)
    joint = experiments("table1", ["mnist/joint"], seeds=1)
    assert [one.epochs for one in joint] == [1, 50]


def test_a_figure_first_chooses_learning_rates_on_held_out_samples():
    asked = for_figure("members", ["mnist/pec"], seeds=3)
    final, held_out = ([e for e in asked if e.validation is held] for held in (False, True))
    assert [(e.seed, e.settings["lr"]) for e in final] == [(seed, 0.01) for seed in (1, 2, 3)]
    assert {e.settings.get("ensemble") for e in held_out} == {2, 4, 8}
    assert {e.settings["lr"] for e in held_out} == {0.003, 0.01, 0.03}  # the usual one, and beside
    assert len(held_out) == 3 * 3 and {e.seed for e in held_out} == {1}

    two = [e for e in held_out if e.settings["ensemble"] == 2]
    results = [result(e, accuracy=0.5 + (e.settings["lr"] == 0.003)) for e in two[:-1]]
    asked = for_figure("members", ["mnist/pec"], 3, results, failed={two[-1].key})
    more = [e for e in asked if e.settings.get("ensemble") == 2]
    assert [(e.settings["lr"], e.validation) for e in more] == [(0.001, True)]  # it may be better
    for better in (False, True):
        beside = [result(more[0], accuracy=0.5 + 2 * better)]
        asked = for_figure("members", ["mnist/pec"], 3, results + beside, {two[-1].key})
        own = [e for e in asked if e.settings.get("ensemble") == 2]
        if better:
            assert [(e.settings["lr"], e.validation) for e in own] == [(0.0003, True)]
        else:
            assert [(e.seed, e.settings["lr"], e.validation) for e in own] == [
                (seed, 0.003, False) for seed in (1, 2, 3)
            ]
    nothing = for_figure("members", ["mnist/pec"], failed={e.key for e in held_out})
    assert {e.settings.get("ensemble") for e in nothing} == {None}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_what_is_run_for_it(name):
    results = []
    while held_out := [e for e in for_figure(name, seeds=1, results=results) if e.validation]:
        results += [result(e, accuracy=-abs(np.log(e.settings["lr"] / 0.001))) for e in held_out]
    final = for_figure(name, seeds=1, results=results)
    assert final and not any(e.validation for e in final)
    points = FIGURES[name].points(map(result, final))
    assert len(points) == len(final) > 2
    for curve in {(p.dataset, p.curve, p.split) for p in points}:
        usual = [p for p in points if (p.dataset, p.curve, p.split) == curve and p.usual]
        narrow = (name, curve[0]) == ("hidden_layers", "cifar10")  # another teacher throughout
        assert len(usual) == (0 if narrow else 1)


def test_curves_that_a_figure_has_not_are_refused():
    with pytest.raises(ValueError, match="has no curve mars/pec: .* out of mnist/er, mnist/derpp"):
        for_figure("epochs", ["mars/pec"])
    with pytest.raises(ValueError, match="has no curve mnist/slda: .* mnist/pec, fashion"):
        for_figure("memory", ["mnist/slda"])
