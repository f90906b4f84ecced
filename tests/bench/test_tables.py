import re

import pytest

from pecil.bench import Result, planned, tables
from pecil.data import DATASETS


def result(accuracy, dataset="mnist", seed=0, split=None, data_note="", method="pec", **changes):
    return Result(
        planned(method, dataset, split, seed, **changes),
        accuracy,
        {},
        [],
        {},
        1,
        "cpu",
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


def test_markdown_shows_ours_beside_the_papers():
    text = tables.markdown("table1", [result(0.92), result(0.93, seed=1)])
    assert "| PEC | MNIST | 92.50 ± 0.50 | 2 | 92.31 ± 0.13 | +0.19 | yes |" in text
    assert "| PEC | CIFAR-10 | not run |  | 58.94 ± 0.09 |  |  |" in text
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
    ]
    assert any(line.startswith("Best of Tables 1 and 2, ") for line in lines)


def test_where_there_is_nothing_to_compare_nothing_agrees():
    results = [result(0.98, method="whitened_pec")]
    ours = cell("whitened", "mnist", "Whitened PEC", results)
    papers = cell("whitened", "mnist", "joint training, 1 epoch", results)
    assert (ours.paper, ours.agrees, ours.to_run) == (None, None, True)
    assert ours.columns() == ("Whitened PEC", "MNIST", "98.00", "1", "", "", "")
    assert (papers.ours, papers.agrees, papers.to_run) == ((), None, False)
    assert papers.columns()[2:] == ("", "", "97.16 ± 0.04", "", "")


def test_notes_stand_once_below_the_table_that_shows_the_numbers():
    results = [result(0.6, "balanced_svhn", seed, data_note="rebuilt") for seed in (0, 1)]
    text = tables.markdown("table1", [*results, result(0.9)])
    assert text.count("Balanced SVHN: rebuilt.") == 1
    assert text.count(f"Balanced SVHN: {DATASETS['balanced_svhn'].note}.") == 1
    assert "rebuilt" not in tables.markdown("table1", [result(0.9)])


def test_the_page_holds_every_table():
    assert re.findall(r"^## (\w+)", tables.page([]), flags=re.MULTILINE) == list(
        tables.definitions()
    )


def test_an_unknown_table_is_refused_with_the_choice():
    with pytest.raises(ValueError, match=r"table1, default_lr, whitened, got 'table9'"):
        tables.cells("table9", [])
