import json
import math
import os
import re
import sqlite3
from contextlib import closing
from dataclasses import replace


def test_run_prints_accuracies_time_and_parameters(pecil):
    code, out, err = pecil("run", "pec", "digits", "--split", "10/1", "--seed", "0", "--per-task")
    assert (code, err) == (0, "")
    accuracy = float(re.search(r"accuracy +([\d.]+) %", out)[1])
    assert accuracy > 85
    assert re.search(r"seconds +load .*fit .*test", out)
    assert re.search(r"parameters +[\d,]+\n", out)
    assert len(re.findall(r"^│ \d ", out, flags=re.MULTILINE)) == 19  # classes 0-9, tasks 1-9
    assert "after task" in out


def test_run_takes_seeds_and_settings_and_stores_results(tmp_path, ok, pecil):
    file = tmp_path / "runs.jsonl"
    common = ("run", "pec", "digits", "--set", "teacher_width=50", "--save-results", file)
    rows = ok(*common, "--seeds", 2, "--set", "architecture=mlp")
    assert [row["seed"] for row in rows] == [0, 1]
    assert rows[0]["settings"]["teacher_width"] == 50
    assert rows[0]["settings"]["architecture"] == "mlp"
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    assert [row["seed"] for row in ok(*common, "--seed", 5, "--seed", 3)] == [5, 3]
    assert len(file.read_text().splitlines()) == 4
    code, out, _ = pecil(*common, "--seeds", 2)
    assert code == 0
    assert re.search(r"accuracy +[\d.]+ ± [\d.]+ %\nseeds +0, 1\n", out)


def test_run_counts_steps_instead_of_passes(tmp_path, ok, pecil):
    file = tmp_path / "runs.jsonl"
    common = ("run", "finetuning", "digits", "--split", "5/2", "--set", "hidden=[5]")
    ok(*common, "--steps", 3, "--set", "batch_size=7", "--random-classes", "--save-results", file)
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (row["steps"], row["random_classes"], row["epochs"]) == (3, True, 1)
    code, _, err = pecil(*common, "--setup", "none_such")
    assert code == 1 and "digits has no settings of a setup 'none_such'" in err


def test_run_skips_what_is_finished_unless_told_otherwise(ok, pecil, data):
    def run_again():
        with closing(sqlite3.connect(os.environ["PECIL_STORE"])) as database:
            return database.execute("SELECT COUNT(*) FROM replaced").fetchone()[0]

    common = ("run", "nearest_mean", "digits")
    first = ok(*common, "--seed", 1)
    assert ok(*common, "--seeds", 2)[1] == first[0]
    assert run_again() == 0
    ok(*common, "--seed", 1, "--again")
    assert run_again() == 1
    code, out, _ = pecil(*common, "--seeds", 3)
    assert code == 0
    assert re.search(r"seeds +0, 1, 2\nfound +0, 1 in the store\n", out)
    (timed,) = ok(*common, "--seed", 0, "--per-task")  # the stored one has no such accuracies
    assert (len(timed["accuracy_per_class_after_task"]), run_again()) == (10, 2)
    own = data("ab", test=True)
    before, same = (ok("run", "nearest_mean", own)[0] for _ in range(2))
    assert (same, run_again()) == (before, 2)
    data("abb", test=True).replace(own)
    (changed,) = ok("run", "nearest_mean", own)
    assert (changed["dataset"], changed["key"] != before["key"]) == (str(own), True)


def test_data_without_a_test_part_says_how_to_give_one(data, pecil):
    code, out, err = pecil("run", "nearest_mean", data("ab"))
    assert (code, out) == (1, "")
    assert "no test part to measure an accuracy on: expected folders train/ and test/" in err
    assert "train_x, train_y, test_x and test_y in an .npz" in err


def test_passes_and_buffer_are_part_of_the_experiment(ok, pecil):
    common = ("run", "finetuning", "digits", "--set", "hidden=[5]")
    (once,), (twice,) = ok(*common), ok(*common, "--epochs", 2)
    assert (once["epochs"], twice["epochs"]) == (1, 2)
    assert once["key"] != twice["key"] == ok(*common, "--set", "epochs=2")[0]["key"]
    code, _, err = pecil(*common, "--buffer", 5)
    assert (code, "finetuning keeps no samples: expected a buffer of 0, got 5" in err) == (1, True)


def test_results_are_listed_filtered_exported_and_imported(tmp_path, ok, pecil):
    assert ok("results") == []
    ok("run", "nearest_mean", "digits", "--seeds", 3)
    ok("run", "slda", "digits", "--split", "5/2", "--set", "shrinkage=0.5")
    rows = ok("results")
    assert [row["method"] for row in rows] == ["nearest_mean"] * 3 + ["slda"]
    assert rows[0]["confusion"] is None
    for options, expected in (
        (("--method", "slda"), [3]),
        (("--seed", 1, "--seed", 2), [1, 2]),
        (("--split", "5/2"), [3]),
        (("--dataset", "mnist"), []),
        (("--set", "shrinkage=0.5"), [3]),
        (("--set", "shrinkage=0.1"), []),
    ):
        assert ok("results", *options) == [rows[k] for k in expected]
    code, out, err = pecil("results", "--method", "slda")
    assert (code, err) == (0, "")
    assert re.fullmatch(
        r"key +method .*\n[0-9a-f]{16}  slda  +digits +5/2 +0 +[\d.]+ %.* shrinkage=0.5\n", out
    )

    file = tmp_path / "all.jsonl"
    told = ok("results", "--export", file, "--seed", 0)
    assert (told["exported"], len(file.read_text().splitlines())) == (2, 2)
    other = ("results", "--store", tmp_path / "other.sqlite")
    assert ok(*other, "--import", file)["imported"] == 2
    assert ok(*other) == [rows[0], rows[3]]
    code, _, err = pecil("results", "--export", tmp_path / "all.txt")
    assert (code, "ends in .jsonl, .csv, .parquet" in err) == (1, True)


TINY = {  # a table whose data is at hand everywhere
    "title": "Tiny",
    "datasets": ["digits"],
    "rows": [
        {"title": "Nearest mean", "method": "nearest_mean"},
        {"title": "SLDA", "name": "strong", "method": "slda", "settings": {"shrinkage": 0.5}},
        {"title": "PEC", "name": "wrong", "method": "pec", "settings": {"lr": -1.0}},
        {"title": "In an article", "name": "elsewhere", "paper": [[50.0, 1.0]]},
    ],
}


def test_a_sweep_fills_a_table_and_is_planned_resumed_and_reported(ok, pecil, monkeypatch):
    from pecil.bench import figures, tables

    assert figures.definitions is tables.definitions  # taken before it is replaced
    monkeypatch.setattr(tables, "definitions", lambda: {"tiny": TINY})
    common = ("sweep", "tiny", "--seeds", 2, "--only", "digits/nearest_mean,digits/strong")
    planned = ok(*common, "--plan")
    assert (planned["to_run"], planned["finished"], planned["runs_of_unknown_time"]) == (4, 0, 4)
    ok("run", "nearest_mean", "digits", "--seed", 2)
    planned = ok(*common, "--plan", "--workers", 1)
    assert (planned["to_run"], planned["finished"], planned["runs_of_unknown_time"]) == (3, 1, 2)
    planned = ok(*common, "--plan", "--on", "cuda")  # where nothing was run yet
    assert (planned["device"], planned["to_run"], planned["runs_of_unknown_time"]) == ("cuda", 3, 3)
    code, out, _ = pecil(*common, "--plan")
    assert code == 0
    assert re.search(r"time +about [\d.]+ s, and 2 runs of which nothing is known\n", out)

    code, out, err = pecil("sweep", "tiny", "--seeds", 2, "--workers", 1, "--json")
    report = json.loads(out)
    assert (code, report["found"], len(report["done"])) == (1, 1, 3)
    assert [(row["method"], row["seed"]) for row in report["failed"]] == [("pec", 1), ("pec", 2)]
    assert err.count("pecil: failed: pec on digits, 10/1, seed ") == 2
    assert err.count("Traceback") == 2
    assert ok(*common)["found"] == 4
    left = ok("sweep", "tiny", "--seeds", 3, "--only", "digits/nearest_mean", "--within", 0)
    assert (left["found"], left["done"], left["left"]) == (2, [], 1)
    assert [len(cell["ours"]) for cell in ok("table", "tiny")["tiny"]] == [2, 2, 0, 0]


def test_a_sweep_chooses_the_learning_rates_of_a_figure_and_runs_its_seeds(ok, pecil, monkeypatch):
    from pecil.bench import figures, search, sweeps

    usual = replace(figures.FIGURES["members"], datasets=("digits",))
    monkeypatch.setattr(figures, "FIGURES", {"members": usual})
    monkeypatch.setattr(sweeps, "FIGURES", {"members": usual})
    places = {"members": {"*": [{"teacher_width": 50}, {"teacher_width": 50, "ensemble": 2}]}}
    monkeypatch.setattr(figures, "_definitions", lambda: {"curves": {}, **places})
    monkeypatch.setattr(search, "_grids", lambda: {"common": {"lr": [0.03, math.inf, 1e-6]}})
    common = ("sweep", "members", "--seeds", 2, "--workers", 1)
    assert ok(*common, "--plan")["to_run"] == 4
    both = ("sweep", "members", "table1", "--seeds", 2, "--plan")
    planned = ok(*both, "--only", "digits/pec,mnist/slda,mnist/er")
    assert planned["to_run"] + planned["finished"] == 4 + 4
    assert pecil(*both, "--only", "digits/pec,mars/er")[2].startswith("pecil: figure members has")
    code, out, err = pecil(*common, "--json")
    report = json.loads(out)
    assert (code, len(report["done"]), len(report["failed"])) == (1, 6, 2)
    final = [row for row in ok("results") if not row["validation"]]
    assert {row["settings"]["lr"] for row in final} == {0.03}
    assert [row["seed"] for row in final] == [1, 2, 1, 2]


def test_a_search_tries_what_the_paper_tried_as_far_as_the_data_allow(ok, monkeypatch):
    from pecil.bench import search

    grids = {"common": {"lr": [0.01, 0.1], "augment": [False, True]}}
    monkeypatch.setattr(search, "_grids", lambda: grids)
    found = ok("search", "finetuning", "digits", "--split", "joint", "--workers", 1)
    assert [sorted(row) for row in found["tried"]] == [["accuracy", "lr"]] * 2


def test_a_search_keeps_the_test_part_for_the_winner(ok, pecil):
    common = ("search", "slda", "digits", "--grid", "shrinkage=[1.0, 0.01]", "--workers", 1)
    found = ok(*common, "--seeds", 2)
    weak, strong = found["tried"]
    assert (weak["shrinkage"], strong["shrinkage"]) == (1.0, 0.01)
    assert weak["accuracy"] < strong["accuracy"]
    assert found["winner"] == {"shrinkage": 0.01}
    assert [(row["seed"], row["validation"]) for row in found["results"]] == [
        (0, False),
        (1, False),
    ]
    assert [row["validation"] for row in ok("results")] == [True, True, False, False]
    again = ok(*common)
    assert again["results"] == found["results"][:1]
    code, out, _ = pecil(*common)
    assert code == 0
    assert 'winner: {"shrinkage": 0.01}' in out


def test_a_search_looks_again_at_data_that_has_changed(ok, data):
    own = data("ab", test=True)
    common = ("search", "slda", own, "--grid", "shrinkage=[0.5, 0.01]", "--workers", 1)
    before = ok(*common)
    assert ok(*common) == before
    assert len(ok("results")) == 3
    data("abc", test=True).replace(own)
    after = ok(*common)
    assert len(after["results"][0]["accuracy_per_class"]) == 3
    assert len(ok("results")) == 6


def test_a_search_by_optuna_goes_on_where_it_stopped(ok):
    common = ("search", "slda", "digits", "--sampler", "tpe", "--trials")
    three, five = ok(*common, 3), ok(*common, 5)
    assert five["tried"][:3] == three["tried"]
    assert len({row["shrinkage"] for row in five["tried"]}) == 5
    assert (
        five["winner"]["shrinkage"] == max(five["tried"], key=lambda r: r["accuracy"])["shrinkage"]
    )
    assert len([row for row in ok("results") if row["validation"]]) == 5
