import re
from pathlib import Path

import pytest

from pecil.bench import Result, pages, planned, store, tables
from pecil.bench.sweeps import experiments
from pecil.methods import METHODS

ROOT = Path(__file__).parents[2]


def result(accuracy, dataset="mnist", seed=1, split=None, method="pec", **changes):
    seconds = {"load": 0.5, "fit": 8.0, "test": 0.5}
    experiment = planned(method, dataset, split, seed, **changes)
    return Result(experiment, accuracy, {}, [], seconds, 1, "cpu", {})


RUNS = tables.by_kind(
    [
        *(result(accuracy, seed=seed) for seed, accuracy in ((1, 0.92), (2, 0.93))),
        result(0.98, method="whitened_pec"),
        result(0.15, method="si"),
        result(0.50, method="si", split="5/2", labels_trick=True),
        result(0.11, method="si", c=0.123),  # in no table
    ]
)


def test_the_page_names_every_table_and_shows_those_with_runs_of_their_own():
    page = pages.page(RUNS)
    shown = re.findall(r"^## (\w+):", page, flags=re.MULTILINE)
    waiting = re.findall(r"^\* (\w+): ", page, flags=re.MULTILINE)
    assert shown == ["table1", "table2", "labels_trick", "parameters", "whitened"]
    assert sorted(shown + waiting) == sorted(tables.definitions())
    assert "default_lr" in waiting  # its PEC is that of table1
    assert "| PEC | MNIST | 92.50 ± 0.50 | 2 | 92.31 ± 0.13 | +0.19 | yes | 9.0 (cpu) |" in page


def test_the_cost_is_that_of_what_was_run_and_of_what_can_be_told_from_it():
    text = pages.cost({"table2": tables.cells("table2", RUNS)})
    assert "10 seeds of each of their 70 cells: 0.0 hours of one GPU and 0.1 hours" in text
    joint = {
        "table1": tables.cells(
            "table1", tables.by_kind([result(0.9, method="joint", split="joint")])
        )
    }
    assert "and 0.4 hours of a\nCPU, 1 of the cells estimated" in pages.cost(joint)
    assert "A run that was estimated: Joint, 50 epochs on MNIST 141 s (cpu)." in pages.cost(joint)
    assert "A run that was estimated" not in text


def test_without_results_the_page_is_short():
    page = pages.page({})
    assert "|" not in page
    assert len(page.splitlines()) < 40


def test_a_method_has_all_its_results_each_once_and_the_commands_that_give_them():
    text = pages.method_results("si", RUNS)
    assert re.findall(r"^\| (SI.*?) \|$", text, flags=re.MULTILINE) == [
        "SI + LT | MNIST | 5/2 | 50.00 | 1 | 52.45 ± 1.84 | -2.45 | yes | 9.0 (cpu)",
        "SI | MNIST | 10/1 | 15.00 | 1 | 12.73 ± 0.99 | +2.27 | yes | 9.0 (cpu)",
    ]
    assert "SI: the paper does not give its settings without the trick; ours are" in text
    commands = re.findall(r"^    pecil sweep (\w+) --only (\S+)$", text, flags=re.MULTILINE)
    assert commands == [("table2", "mnist/si_lt"), ("labels_trick", "mnist/si")]
    again = [experiments(table, only.split(","), seeds=1)[0] for table, only in commands]
    assert [RUNS[experiment.kind][0].accuracy for experiment in again] == [0.50, 0.15]
    assert pages.method_results("pec", RUNS).count("92.50 ± 0.50") == 1


def test_a_method_that_was_not_run_or_is_not_known():
    assert pages.method_results("er", RUNS) == "Not run yet."
    with pytest.raises(ValueError, match=r"expected a method out of whitened_pec, .*got 'mars'"):
        pages.method_results("mars", RUNS)


PAGE = """Before

<!-- table metric: begin -->
old
<!-- table metric: end -->
between <!-- harness: begin -->
<!-- method si: begin -->
<!-- method si: end -->
after
"""


def test_a_figure_has_its_points_and_the_commands_that_give_them():
    more = [result(0.80 + seed / 100, seed=seed, teacher_width=50) for seed in (1, 3)]
    runs = tables.by_kind([*(run for own in RUNS.values() for run in own), *more])
    text = pages.figure_points("teacher_width", runs)
    assert "| PEC | MNIST | 10/1 | 50 | 82.00 ± 1.00 | 2 |  |" in text
    assert "| PEC | MNIST | 10/1 | 5,000 | 92.50 ± 0.50 | 2 | tables |" in text
    assert "    pecil sweep teacher_width --only mnist/pec\n    pecil figure teacher_width" in text
    assert pages.figure_points("teacher_width", RUNS) == "Not run yet."
    with pytest.raises(ValueError, match="expected a figure out of epochs"):
        pages.figure_points("table1", RUNS)


def test_places_are_filled_and_the_rest_of_a_page_is_left_alone():
    new = pages.filled(PAGE, RUNS)
    assert new == PAGE.replace("old", tables.grid("metric", tables.cells("metric", RUNS))).replace(
        "<!-- method si: end", f"{pages.method_results('si', RUNS)}\n<!-- method si: end"
    )
    assert pages.filled(new, RUNS) == new


@pytest.mark.parametrize("gone", ["<!-- table metric: end -->", "<!-- method si: begin -->\n"])
def test_a_place_without_an_end_or_a_beginning_is_refused(gone):
    with pytest.raises(ValueError, match=r"expected a line <!-- KIND NAME: end --> after each"):
        pages.filled(PAGE.replace(gone, ""), RUNS)


def test_a_checkout_is_brought_up_to_date(tmp_path):
    (tmp_path / "docs" / "methods").mkdir(parents=True)
    readme, method = tmp_path / "README.md", tmp_path / "docs" / "methods" / "si.md"
    readme.write_text("No places.\n")
    method.write_text(PAGE)
    results = [run for same in RUNS.values() for run in same]
    assert pages.update(tmp_path, results) == [method, tmp_path / "docs" / "tables.md"]
    assert method.read_text() == pages.filled(PAGE, RUNS)
    assert (tmp_path / "docs" / "tables.md").read_text() == pages.page(RUNS)
    assert pages.update(tmp_path, results) == []


def test_a_figure_is_drawn_anew_when_its_points_change(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("No places.\n")
    picture = tmp_path / "docs" / "memory.png"
    picture.write_bytes(b"of other points")
    results, damaged = store.read_lines([ROOT / "results" / "slda.jsonl"])
    assert not damaged
    assert picture in pages.update(tmp_path, results)
    first = picture.read_bytes()
    assert first[:4] == b"\x89PNG"
    assert pages.update(tmp_path, results) == [] and picture.read_bytes() == first
    fewer = [result for result in results if result.experiment.dataset != "mnist"]
    assert pages.update(tmp_path, fewer)[-1] == picture


def test_every_method_has_a_page_with_a_place_for_its_results():
    text = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "methods").glob("*.md"))
    assert sorted(re.findall(r"<!-- method (\w+): begin -->", text)) == sorted(METHODS)


def test_the_pages_in_the_repository_are_up_to_date():
    """If not: pecil docs."""
    results, damaged = store.read_lines(sorted((ROOT / "results").glob("*.jsonl")))
    assert not damaged
    runs = tables.by_kind(results)
    assert (ROOT / "docs" / "tables.md").read_text("utf-8") == pages.page(runs)
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = path.read_text("utf-8")
        assert pages.filled(text, runs) == text, path
    assert pages.stale(ROOT / "docs", results) == []
