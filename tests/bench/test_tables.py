import math
import re
from dataclasses import replace

import pytest

from pecil.bench import Result, planned, tables
from pecil.data import DATASETS
from pecil.methods import METHODS


def result(accuracy, dataset="mnist", seed=0, split=None, data_note="", method="pec", **changes):
    return Result(
        planned(method, dataset, split, seed, **changes),
        accuracy,
        {},
        [],
        {"load": 0.5, "fit": 8.0 + seed, "test": 0.5},
        1,
        "cpu: 1 thread",
        {},
        data_note,
    )


def cell(name, dataset, method="PEC", results=()):
    (found,) = (
        c for c in tables.cells(name, results) if (c.dataset, c.method) == (dataset, method)
    )
    return found


def test_only_runs_with_the_cells_own_settings_fill_it():
    results = [
        result(0.92, seed=0),
        result(0.93, seed=1),
        result(0.10, lr=0.5),
        result(0.20, split="5/2"),
        result(0.90, lr=0.001),
        result(0.30, dataset="cifar10"),
    ]
    assert cell("table1", "mnist", results=results).ours == pytest.approx((92.0, 93.0))
    assert cell("table1", "cifar10", results=results).ours == pytest.approx((30.0,))
    assert cell("table1", "cifar100", results=results).ours == ()
    tuned = cell("default_lr", "mnist", "PEC", results)
    default = cell("default_lr", "mnist", "PEC, lr = 0.001", results)
    assert (tuned.ours, default.ours) == (pytest.approx((92.0, 93.0)), pytest.approx((90.0,)))


@pytest.mark.parametrize(
    ("accuracies", "agrees"),
    [
        ([0.9231], True),
        ([0.9330], True),  # within a point
        ([0.9335], False),
        ([0.9130], False),
        ([0.92, 0.97], True),  # 2.2 points off, but its standard error is 2.5
    ],
)
def test_agreement_is_within_a_point_or_two_combined_errors(accuracies, agrees):
    results = [result(accuracy, seed=seed) for seed, accuracy in enumerate(accuracies)]
    assert cell("table1", "mnist", results=results).agrees is agrees


def test_a_single_run_is_taken_to_vary_as_the_papers():
    agem = cell("table1", "mnist", "A-GEM (500)")  # 59.84 ± 0.82 by 10 seeds: 2.59 for one
    allowed = 2 * math.hypot(0.82, 0.82 * math.sqrt(10))
    assert replace(agem, ours=(59.84 + allowed - 0.01,)).agrees
    assert not replace(agem, ours=(59.84 + allowed + 0.01,)).agrees
    assert not replace(agem, ours=(59.84 + allowed - 0.01,) * 2).agrees


def test_markdown_shows_ours_beside_the_papers():
    text = tables.markdown("table1", [result(0.92), result(0.93, seed=1)])
    assert "| PEC | MNIST | 92.50 ± 0.50 | 2 | 92.31 ± 0.13 | +0.19 | yes | 9.5 (cpu) |" in text
    assert "| PEC | CIFAR-10 | not run |  | 58.94 ± 0.09 |  |  |  |" in text
    rows = re.findall(r"^\|.*\|$", text, flags=re.MULTILINE)
    assert len({row.count("|") for row in rows}) == 1


def test_a_wide_table_has_a_column_for_each_dataset_and_lines_of_the_paper_alone():
    results = [
        *(result(accuracy, seed=k) for k, accuracy in enumerate((0.92, 0.93))),
        result(0.98, method="whitened_pec"),
        result(0.88, "fashion_mnist", method="whitened_pec"),
        result(0.50, method="whitened_pec", memory=100),
    ]
    lines = tables.markdown("whitened", results).splitlines()
    rows = [[text.strip() for text in line.split("|")[1:4]] for line in lines if line[:1] == "|"]
    assert rows == [
        ["method", "MNIST", "Fashion-MNIST"],
        ["---", "---", "---"],
        ["PEC", "92.50 ± 0.50 (2)", "not run"],
        ["PEC (paper)", "92.31 ± 0.13", ""],
        ["best of Tables 1 and 2 (paper)", "92.31 ± 0.13", ""],
        ["joint training, 1 epoch (paper)", "97.16 ± 0.04", ""],
        ["Whitened PEC", "98.00 (1)", "88.00 (1)"],
        ["Whitened PEC, synthetic teacher", "", ""],
    ]
    assert any(line.startswith("best of Tables 1 and 2: ") for line in lines)
    assert lines[-1] == "In brackets the number of seeds."


def test_where_there_is_nothing_to_compare_nothing_agrees():
    results = [result(0.98, method="whitened_pec")]
    ours = cell("whitened", "mnist", "Whitened PEC", results)
    papers = cell("whitened", "mnist", "joint training, 1 epoch", results)
    assert (ours.paper, ours.agrees, ours.to_run) == (None, None, True)
    assert ours.columns() == ("Whitened PEC", "MNIST", "98.00", "1", "", "", "", "9.0 (cpu)")
    assert (papers.ours, papers.agrees, papers.to_run) == ((), None, False)
    assert papers.columns()[2:] == ("", "", "97.16 ± 0.04", "", "", "")


def test_notes_stand_once_below_the_table_that_shows_the_numbers():
    results = [result(0.6, "balanced_svhn", seed, data_note="rebuilt") for seed in (0, 1)]
    text = tables.markdown("table1", [*results, result(0.9)])
    assert text.count("Balanced SVHN: rebuilt.") == 1
    assert text.count(f"Balanced SVHN: {DATASETS['balanced_svhn'].note}.") == 1
    assert "rebuilt" not in tables.markdown("table1", [result(0.9)])


def test_a_brief_table_shows_what_was_run_and_names_the_rest():
    results = [result(0.92), result(0.6, "cifar10"), result(0.1, method="finetuning")]
    text = tables.markdown("table1", results, brief=True)
    assert re.findall(r"^\| (.+?) \| (.+?) \| \d", text, flags=re.MULTILINE) == [
        ("Fine-tuning", "MNIST"),
        ("PEC", "MNIST"),
        ("PEC", "CIFAR-10"),
    ]
    lines = [line for line in text.splitlines() if line.startswith("Not run")]
    assert [line.split(" · ")[0] for line in lines] == [
        "Not run on Balanced SVHN, CIFAR-100, miniImageNet: Fine-tuning",
        "Not run on CIFAR-10: Fine-tuning",
        "Not run on MNIST: Joint, 1 epoch",
    ]
    assert [line.split(" · ")[-1] for line in lines] == ["PEC.", "VAE-GC.", "VAE-GC."]


def test_a_row_has_a_note_of_its_own():
    text = tables.markdown("table2", [result(0.92)], brief=True)
    assert text.count("PEC: it does not depend on the split; ") == 1
    assert "the trick; ours" not in tables.markdown("labels_trick", [], brief=True)


def test_long_runs_are_timed_in_whole_seconds_and_devices_named_once():
    long, short = result(0.92, seed=300), result(0.93, seed=1)
    found = cell("table1", "mnist", results=[long, replace(short, device="cuda: A GPU")])
    assert found.seconds_text == "160 (cpu, cuda)"
    assert cell("table1", "mnist", results=[replace(short, seconds={})]).seconds_text == ""


def test_several_classes_a_task_are_other_runs_but_for_pec():
    results = [result(0.92), result(0.5, split="5/2")]
    assert cell("table2", "mnist", results=results).ours == pytest.approx((92.0,))
    asked = {c.name: c.experiment for c in tables.cells("table2", []) if c.dataset == "cifar100"}
    assert asked["finetuning"].split == "10/10"
    assert asked["pec"].split == "100/1"


def test_settings_of_one_dataset_alone():
    single = cell("linear", "cifar100", "PEC, Single linear").experiment.settings
    assert (single["architecture"], single["budget"]) == ("linear", 111_452)
    assert "output_dim" not in single


def test_a_row_may_be_of_some_datasets_only():
    own = [c.dataset for c in tables.cells("whitened", []) if c.name == "whitened_synthetic"]
    assert own == ["balanced_svhn", "cifar10", "cifar100", "miniimagenet"]
    header, _, *lines = tables.markdown("whitened", []).split("\n\n")[1].splitlines()
    assert header.count("|") == lines[-1].count("|")
    assert "synthetic teacher |  |  | not run | not run | not run | not run |" in lines[-1]


def test_counts_agree_within_three_percent():
    def held(n):
        return [replace(result(0.9), n_parameters=n)]

    cells = [cell("parameters", "mnist", results=held(n)) for n in (89_590, 92_200, 92_400)]
    assert [c.agrees for c in cells] == [True, True, False]
    assert cells[0].columns()[2:] == ("89.6K", "1", "89.6K", "+0.0 %", "yes", "")
    assert cell("macs", "mnist", results=held(1)).our_text == "not run"  # never counted


def test_a_cell_knows_its_runs():
    results = [result(0.92, seed=3), result(0.93, seed=1)]
    found = cell("table1", "mnist", results=results)
    assert found.seeds == (3, 1)
    assert replace(found.experiment, seed=3) == results[0].experiment


def test_the_other_setup_has_its_own_settings_steps_and_order():
    cells = {(c.name, c.dataset): c for c in tables.cells("other_setup", [])}
    trained, apart = (cells[name, "mnist"].experiment for name in ("cwr_plus", "pec"))
    assert (trained.split, trained.steps, trained.random_classes) == ("5/2", 2000, True)
    assert trained.settings["plus"] and trained.settings["hidden"] == [400, 400]
    assert (apart.split, apart.steps, apart.settings["budget"]) == ("10/1", 1000, 150_000)
    assert cells["joint", "cifar10"].experiment.steps == 25_000
    assert cells["slda", "mnist"].experiment.steps == 0


def test_a_dataset_that_is_absent_says_so():
    assert cell("other_setup", "core50").our_text == "no data here"
    run = replace(result(0.9), experiment=cell("other_setup", "mnist").experiment)
    text = tables.markdown("other_setup", [run], brief=True)
    assert "\nCORe50 features: no data here.\n" in text
    assert "Not run on CORe50" not in text and "Not run on MNIST" in text
    assert "| PEC | CORe50 features | no data here |" in tables.markdown("other_setup", [run])


DEFINED = tables.definitions()
PAPER = {  # rows and datasets
    "table1": (19, 5),
    "table2": (14, 5),
    "balancing": (4, 3),
    "default_lr": (2, 5),
    "other_setup": (12, 5),
    "labels_trick": (3, 5),
    "labels_trick_multi": (3, 5),
    "small_budget": (10, 4),
    "small_budget_multi": (10, 4),
    "buffer_sizes": (22, 5),
    "buffer_sizes_multi": (22, 5),
    "initialisation": (5, 2),
    "linear": (3, 5),
    "ensemble": (4, 5),
    "parameters": (5, 5),
    "macs": (2, 5),
}


OURS = {
    "cifar100_optimizer": (26, 1),
    "whitened": (5, 6),
    "synthetic": (4, 6),
    "views": (2, 5),
    "metric": (2, 1),
    "unequal": (3, 3),
    "randumb": (2, 4),
}


def test_every_table_of_the_paper_is_defined():
    sizes = {name: (len(t["rows"]), len(t["datasets"])) for name, t in DEFINED.items()}
    assert sizes == PAPER | OURS
    numbers = [c.paper for name in PAPER for c in tables.cells(name, [])]
    assert None not in numbers
    assert len(numbers) - 7 * 5 == 622  # accuracies, apart from parameters and operations


@pytest.mark.parametrize("name", DEFINED)
def test_a_definition_is_sound(name):
    table = DEFINED[name]
    assert set(table) <= {
        *("title", "note", "measure", "wide", "datasets", "splits", "steps", "setup", "absent"),
        *("random_classes", "rows"),
    }
    for dataset in table["datasets"]:
        assert dataset in DATASETS
    filled = tables.cells(name, [])
    for unique in ("method", "name"):
        places = [(getattr(c, unique), c.dataset) for c in filled]
        assert len(set(places)) == len(places)
    papers = {}
    for c in filled:  # the same runs cannot have two numbers
        if c.experiment:
            assert papers.setdefault(c.experiment.key, c.paper) == c.paper
    for c in filled:
        if c.measure == "accuracy" and c.paper is not None:
            assert 0 < c.paper < 100
            assert c.paper_error is None or 0 <= c.paper_error < 5
    for row in table["rows"]:
        check_row(table, row)


def check_row(table, row):
    assert set(row) <= {
        *("title", "paper", "method", "name", "epochs", "buffer", "splits", "steps", "settings"),
        *("own", "only", "note"),
    }
    datasets = table["datasets"]
    assert len(row.get("paper", datasets)) == len(datasets)
    assert set(row.get("own", {})) <= set(row.get("only", datasets)) <= set(datasets)
    if "method" in row:
        settings = row.get("settings", {}).keys() | {
            s for o in row.get("own", {}).values() for s in o
        }
        assert settings <= set(METHODS[row["method"]].settings)
    steps = row.get("steps", table.get("steps"))
    assert not steps or len(steps) == len(datasets)
    splits = row.get("splits", table.get("splits"))
    for dataset, split in zip(datasets, splits or (), strict=bool(splits)):
        tasks, classes = map(int, split.split("/"))
        assert tasks * classes == DATASETS[dataset].n_classes


def test_an_unknown_table_is_refused_with_the_choice():
    with pytest.raises(ValueError, match=r"table1, table2, .*, unequal, randumb, got 'table9'"):
        tables.cells("table9", [])
