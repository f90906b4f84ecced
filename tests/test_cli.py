import csv
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from pecil import PEC, WhitenedPEC, cli, load
from pecil.cli import main
from pecil.data import Features
from pecil.data import load as load_data
from pecil.methods import METHODS

SMALL = [
    *("--method", "pec", "--teacher-width", "60", "--student-width", "4"),
    *("--set", "output_dim=10"),
]
WHITENED = ["--memory", "2000"]


@pytest.fixture
def pecil(capsys, monkeypatch, tmp_path_factory):
    """Call the command line in this process: arguments in, (exit code, output, errors) out."""
    monkeypatch.setenv("PECIL_STORE", str(tmp_path_factory.mktemp("store") / "store.sqlite"))

    def call(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def ok(pecil):
    """Call a command that must succeed with --json; return what it printed."""

    def call(*arguments):
        code, out, err = pecil(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


def samples(labels, n=30, seed=0):
    """Draw vectors around a different corner for each label."""
    random = np.random.default_rng(seed)
    y = np.array(labels).repeat(n)
    corners = {label: 6 * np.eye(8)[k] for k, label in enumerate("abcdefgh")}
    x = np.stack([corners[label] for label in y]) + random.normal(size=(len(y), 8))
    return x.astype(np.float32), y


@pytest.fixture
def data(tmp_path):
    """Write samples of the given labels as an .npz or a .csv and return its path."""

    def write(labels, kind="npz", test=False, **options):
        path = tmp_path / f"{labels}-{len(list(tmp_path.iterdir()))}.{kind}"
        x, y = samples(list(labels), **options)
        if kind == "csv":
            with path.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow([*(f"x{i}" for i in range(8)), "kind"])
                writer.writerows([*map(str, row), label] for row, label in zip(x, y, strict=True))
        elif test:
            test_x, test_y = samples(list(labels), seed=1)
            np.savez(path, train_x=x, train_y=y, test_x=test_x, test_y=test_y)
        else:
            np.savez(path, x=x, y=y)
        return path

    return write


@pytest.fixture
def model(tmp_path, data, ok):
    path = tmp_path / "model.pecil"
    ok("fit", data("ab"), "-o", path, *SMALL)
    return path


def test_fit_learn_predict_on_own_data(tmp_path, data, ok):
    path = tmp_path / "model.pecil"
    fitted = ok("fit", data("ab", test=True), "-o", path, *SMALL, "--lr", 0.01)
    assert [c["label"] for c in fitted["classes"]] == ["a", "b"]
    assert fitted["accuracy"] > 0.9
    assert fitted["settings"]["lr"] == 0.01
    assert fitted["settings"]["output_dim"] == 10
    assert fitted["model"] == str(path)

    learned = ok("learn", path, data("bc", test=True))
    assert learned["classes"] == [
        {"label": "a", "samples": 30},
        {"label": "b", "samples": 60},
        {"label": "c", "samples": 30},
    ]
    assert learned["accuracy"] > 0.9

    predicted = ok("predict", path, data("abc", seed=2), "--novelty")
    assert predicted["accuracy"] > 0.8
    assert [row["index"] for row in predicted["predictions"]] == list(range(90))
    x, _ = samples(list("abc"), seed=2)
    loaded = PEC.load(path)
    assert [row["label"] for row in predicted["predictions"]] == loaded.predict(x).tolist()
    np.testing.assert_allclose(
        [row["novelty"] for row in predicted["predictions"]], loaded.novelty(x), rtol=1e-5
    )


def test_whitened_pec_is_what_is_fitted_unless_asked_otherwise(tmp_path, data, ok, pecil):
    path = tmp_path / "model.pecil"
    fitted = ok("fit", data("ab", test=True), "-o", path, *WHITENED)
    assert (fitted["kind"], fitted["settings"]["memory"]) == ("WhitenedPEC", 2000)
    assert fitted["accuracy"] > 0.9
    n_features = fitted["n_features"]
    assert fitted["n_parameters"] == n_features * (n_features + 1) // 2 + 2 * n_features
    assert "n_parameters_per_class" not in fitted
    assert ok("fit", data("ab"), "-o", tmp_path / "pec.pecil", *SMALL)["kind"] == "PEC"

    learned = ok("learn", path, data("bc", test=True))
    assert [c["samples"] for c in learned["classes"]] == [30, 60, 30]
    assert learned["accuracy"] > 0.8
    predicted = ok("predict", path, data("abc", seed=2), "--novelty")
    x, y = samples(list("abc"), seed=2)
    loaded = load(path)
    assert isinstance(loaded, WhitenedPEC)
    assert [row["label"] for row in predicted["predictions"]] == loaded.predict(x).tolist()
    assert predicted["accuracy"] == loaded.score(x, y) > 0.8
    np.testing.assert_allclose(
        [row["novelty"] for row in predicted["predictions"]], loaded.novelty(x), rtol=1e-5
    )
    assert ok("info", path)["classes"] == learned["classes"]
    code, out, _ = pecil("info", path)
    assert code == 0
    assert re.search(r"kind +WhitenedPEC\n", out)
    assert re.search(r"features +\d+\n", out)


def test_merging_whitened_models_equals_learning_all_samples_at_once(tmp_path, data, ok, pecil):
    paths = [tmp_path / f"{k}.pecil" for k in range(4)]
    parts = data("ab", seed=1), data("bc", seed=2)
    for path, part in zip(paths, parts, strict=False):
        ok("fit", part, "-o", path, *WHITENED)
    x, y = (
        np.concatenate(both) for both in zip(*(np.load(p).values() for p in parts), strict=True)
    )
    np.savez(tmp_path / "all.npz", x=x, y=y)
    ok("fit", tmp_path / "all.npz", "-o", paths[2], *WHITENED)
    merged = ok("merge", *paths[:2], "-o", paths[3])
    assert [c["samples"] for c in merged["classes"]] == [30, 60, 30]
    at_once, apart = (load(path).discriminants(x) for path in paths[2:])
    np.testing.assert_allclose(apart, at_once, rtol=1e-3, atol=1e-3)

    ok("fit", parts[0], "-o", paths[2], *SMALL)
    code, _, err = pecil("merge", paths[0], paths[2], "-o", paths[3])
    assert code == 1
    assert "can only merge a WhitenedPEC, not PEC" in err


def test_a_recipe_can_be_changed_and_is_saved(tmp_path, ok, pecil):
    path = tmp_path / "model.pecil"
    recipe = ("--set", "ridge=1.0", "--set", "sizes=[3]", "--set", "grids=[2]", "--set", "spread=1")
    fitted = ok("fit", "digits", "-o", path, *recipe, "--set", "dim=80")
    settings = fitted["settings"]
    assert (settings["dim"], settings["memory"], settings["expected_classes"]) == (80, None, 10)
    teacher = settings["teacher"]
    assert (teacher["recipe"], teacher["prior"], teacher["ridge"]) == ("Filters", "strokes", 1.0)
    assert (teacher["sizes"], teacher["grids"]) == ([3], [2])
    assert ok("info", path)["settings"]["teacher"] == teacher
    assert load(path).teacher.sizes == (3,)


def test_a_dataset_decides_teacher_memory_and_classes_to_expect_unless_told_otherwise():
    def chosen(data, **given):
        model = cli._new(cli.Estimator.WHITENED_PEC, data, given)
        return model.teacher, model.memory, model.dim, model.expected_classes

    assert chosen("cifar100") == ("natural", 11_200_000, None, 100)
    assert chosen("svhn", dim=50, expected_classes=3) == ("signs", None, 50, 3)
    assert chosen("own.npz") == ("auto", None, None, 10)


def test_learning_into_another_file_leaves_the_model_alone(tmp_path, data, model, ok):
    before = model.read_bytes()
    ok("learn", model, data("c"), "-o", tmp_path / "more.pecil")
    assert model.read_bytes() == before
    assert list(PEC.load(tmp_path / "more.pecil").classes_) == ["a", "b", "c"]


def test_learning_new_classes_equals_learning_them_at_once(tmp_path, data, model, ok):
    unshuffled = ("--set", "shuffle=false")
    ok("learn", model, data("cd", seed=3))
    ok("fit", data("cd", seed=3), "-o", tmp_path / "alone.pecil", *SMALL, *unshuffled)
    x, _ = samples(list("abcd"), seed=4)
    np.testing.assert_allclose(
        PEC.load(model).errors(x)[:, 2:], PEC.load(tmp_path / "alone.pecil").errors(x), rtol=1e-5
    )


def test_predictions_as_a_csv_file_and_on_standard_output(tmp_path, data, model, pecil):
    out_csv = tmp_path / "out.csv"
    code, out, _ = pecil("predict", model, data("ab"), "--novelty", "-o", out_csv)
    assert code == 0
    assert re.search(r"accuracy +\d", out)
    with out_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["index", "label", "novelty"]
    assert [row["index"] for row in rows] == [str(i) for i in range(60)]
    assert {row["label"] for row in rows} == {"a", "b"}
    assert all(float(row["novelty"]) > 0 for row in rows)

    code, printed, _ = pecil("predict", model, data("ab"), "--novelty")
    assert code == 0
    assert printed == out_csv.read_text()


def test_samples_without_labels_get_the_same_predictions(tmp_path, data, model, ok, pecil):
    x, _ = samples(list("ab"))
    np.savez(tmp_path / "x.npz", x=x)
    labelled = data("ab", kind="csv")
    rows = [line.rpartition(",")[0] for line in labelled.read_text().splitlines()]
    (tmp_path / "x.csv").write_text("\n".join(rows))
    expected = ok("predict", model, labelled, "--label", "kind")
    assert expected.pop("accuracy") > 0.5
    for path in ("x.npz", "x.csv"):
        assert ok("predict", model, tmp_path / path) == expected
    assert ok("predict", model, tmp_path / "x.csv", "--label", "kind") == expected
    code, out, _ = pecil("predict", model, tmp_path / "x.npz", "-o", tmp_path / "out.csv")
    assert code == 0
    assert re.fullmatch(r"samples +60\noutput +.*out.csv\n", out)
    code, _, err = pecil("learn", model, tmp_path / "x.npz")
    assert code == 1
    assert "expected train_x and train_y" in err


def test_predictions_for_images_name_their_files(tmp_path, ok, pecil):
    photos, path = tmp_path / "photos", tmp_path / "model.pecil"
    for label, value in (("day", 250), ("night", 5)):
        (photos / label).mkdir(parents=True)
        for i in range(20):
            image = Image.fromarray(np.full((4, 4), value + i % 5, np.uint8))
            image.save(photos / label / f"{i:02}.png")
    ok("fit", photos, "-o", path, "--architecture", "mlp", *SMALL, "--lr", 0.01)

    known = ok("predict", path, photos)
    assert known["accuracy"] == 1
    assert known["predictions"][0] == {"index": 0, "file": "day/00.png", "label": "day"}
    assert known["predictions"][-1] == {"index": 39, "file": "night/19.png", "label": "night"}

    code, out, _ = pecil("predict", path, photos / "night", "--novelty")
    rows = list(csv.DictReader(out.splitlines()))
    assert code == 0
    assert list(rows[0]) == ["index", "file", "label", "novelty"]
    assert [row["file"] for row in rows] == [f"{i:02}.png" for i in range(20)]
    assert {row["label"] for row in rows} == {"night"}
    assert "accuracy" not in ok("predict", path, photos / "night")


def test_a_test_part_without_labels_is_the_part_to_predict(tmp_path, model, ok):
    x, y = samples(list("ab"))
    np.savez(tmp_path / "own.npz", train_x=x, train_y=y, test_x=x[:7])
    predicted = ok("predict", model, tmp_path / "own.npz")
    assert predicted["samples"] == len(predicted["predictions"]) == 7
    assert "accuracy" not in predicted


def test_samples_like_no_known_class_get_the_label_of_the_rejected(tmp_path, data, ok):
    path = tmp_path / "thorough.pecil"
    ok("fit", data("ab", n=600), "-o", path, *SMALL, "--lr", 0.01)
    shares = {}
    for labels in ("h", "ab"):
        rows = ok("predict", path, data(labels, seed=5), "--reject-as", "none")["predictions"]
        shares[labels] = np.mean([row["label"] == "none" for row in rows])
    assert shares["h"] > 0.5 > 0.1 > shares["ab"]
    rows = ok("predict", path, data("h"), "--reject-as", "-1")["predictions"]
    assert -1 in {row["label"] for row in rows}


def test_a_table_with_a_chosen_column_of_labels(tmp_path, data, ok, pecil):
    table = data("ab", kind="csv")
    fitted = ok("fit", table, "-o", tmp_path / "m.pecil", "--label", "kind", *SMALL)
    assert [c["label"] for c in fitted["classes"]] == ["a", "b"]
    code, _, err = pecil("fit", table, "-o", tmp_path / "m.pecil", "--label", "colour")
    assert code == 1
    assert "colour" in err


def test_merged_models_know_the_classes_of_all(tmp_path, data, model, ok, pecil):
    paths = [model]
    for labels in ("c", "de"):
        paths.append(tmp_path / f"{labels}.pecil")
        ok("fit", data(labels), "-o", paths[-1], *SMALL)
    merged = tmp_path / "merged.pecil"
    assert [c["label"] for c in ok("merge", *paths, "-o", merged)["classes"]] == list("abcde")
    x, _ = samples(list("abcde"))
    np.testing.assert_allclose(
        PEC.load(merged).errors(x)[:, 3:], PEC.load(paths[2]).errors(x), rtol=1e-5
    )

    ok("fit", data("f"), "-o", tmp_path / "other.pecil", *SMALL, "--seed", 1)
    before = merged.read_bytes()
    code, _, err = pecil("merge", merged, tmp_path / "other.pecil", "-o", merged)
    assert (code, merged.read_bytes()) == (1, before)
    assert err.startswith("pecil: ")
    assert pecil("merge", model, "-o", merged)[0] == 2


def test_info_tells_what_a_model_knows(model, ok, pecil):
    facts = ok("info", model)
    assert facts["bytes"] == model.stat().st_size
    assert facts["input_shape"] == [8]
    assert facts["n_parameters"] == 2 * facts["n_parameters_per_class"] == 2 * 94
    code, out, _ = pecil("info", model)
    assert code == 0
    assert "parameters" in out
    assert re.search(r"\ba\b.*30", out)


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


def test_results_of_whitened_pec_become_a_figure(tmp_path, ok, pecil, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("run", "whitened_pec", "digits", "--save-results", "all.jsonl", "--set", "memory=1000")
    (usual,) = ok(*small)
    assert usual["settings"] == {"teacher": "strokes", "memory": 1000}
    ok(*small, "--set", "teacher=relu")
    ok("run", "nearest_mean", "digits", "--seeds", 2, "--save-results", "all.jsonl")
    drawn = ok("figure", "memory", "--results", "all.jsonl")
    assert drawn["figure"] == "pecil-memory.png"
    assert [(p["method"], p["held"], p["seeds"]) for p in drawn["points"]] == [
        ("whitened_pec", usual["n_parameters"], 1),  # another teacher is another curve
        ("nearest_mean", 640, 2),
    ]
    assert (tmp_path / "pecil-memory.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = pecil("figure", "memory", "--results", "all.jsonl", "-o", "m.png")
    assert (code, out) == (0, "figure  m.png\npoints  2\n")


def test_tables_are_made_from_stored_results(tmp_path, ok, pecil):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "broken.jsonl").write_text("{\n")
    code, out, err = pecil("table", "--results", folder, "-o", tmp_path / "results.md")
    assert (code, out) == (0, "")
    assert re.search(r"set aside: .*broken.jsonl, line 1: ", err)
    text = (tmp_path / "results.md").read_text()
    assert "* table1: " in text
    assert "* default_lr: " in text
    code, out, _ = pecil("table", "table1", "--results", folder)
    assert code == 0
    assert out.startswith("## table1: ")
    (folder / "broken.jsonl").unlink()
    cells = ok("table", "table1", "--results", folder)["table1"]
    assert cells[0]["paper"] == 10.09


def test_docs_are_made_from_published_results(tmp_path, ok):
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("<!-- method er: begin -->\n<!-- method er: end -->\n")
    made = ok("docs", tmp_path)
    assert made == {"results": 0, "changed": "README.md, docs/tables.md"}
    assert "Not run yet." in readme.read_text()
    assert ok("docs", tmp_path)["changed"] == "nothing"


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
    for _ in range(2):
        ok("run", "nearest_mean", own)
    assert run_again() == 3  # what a path leads to may change
    assert len(ok("results")) == 4


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
    monkeypatch.setattr(figures, "_places", lambda: places)
    monkeypatch.setattr(search, "_grids", lambda: {"common": {"lr": [0.03, -1.0, 1e-6]}})
    common = ("sweep", "members", "--seeds", 2, "--workers", 1)
    assert ok(*common, "--plan")["to_run"] == 6
    both = ("sweep", "members", "table1", "--seeds", 2, "--plan")
    planned = ok(*both, "--only", "digits/pec,mnist/slda,mnist/er")
    assert planned["to_run"] + planned["finished"] == 6 + 4
    assert pecil(*both, "--only", "digits/pec,mars/er")[2].startswith("pecil: figure members has")
    code, out, err = pecil(*common, "--json")
    report = json.loads(out)
    assert (code, len(report["done"]), len(report["failed"])) == (1, 8, 2)
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


def test_a_search_by_optuna_goes_on_where_it_stopped(ok):
    common = ("search", "slda", "digits", "--sampler", "tpe", "--trials")
    three, five = ok(*common, 3), ok(*common, 5)
    assert five["tried"][:3] == three["tried"]
    assert len({row["shrinkage"] for row in five["tried"]}) == 5
    assert (
        five["winner"]["shrinkage"] == max(five["tried"], key=lambda r: r["accuracy"])["shrinkage"]
    )
    assert len([row for row in ok("results") if row["validation"]]) == 5


def test_the_report_is_one_page(tmp_path, ok):
    page = tmp_path / "report.html"
    assert ok("report", "-o", page, "--results", tmp_path)["results"] == 0
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("kind", ["methods", "datasets", "tables", "figures"])
def test_lists(kind, ok, pecil):
    names = [row["name"] for row in ok("list", kind)]
    known = {"methods": "pec", "datasets": "digits", "tables": "table1", "figures": "memory"}
    assert known[kind] in names
    code, out, _ = pecil("list", kind)
    assert code == 0
    assert all(name in out for name in names)


def test_demo_prints_a_table_and_saves_a_plot(tmp_path, ok, pecil):
    plot = tmp_path / "plot.png"
    code, out, err = pecil("demo", "-o", plot, "--seeds", 1)
    assert (code, err) == (0, "")
    assert "Fine-tuning" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    accuracy = ok("demo", "-o", plot, "--seeds", 1)["accuracy"]
    assert accuracy["pec"][-1] > 0.8 > 0.2 > accuracy["finetuning"][-1]


def test_the_list_of_methods_names_what_they_are_from(pecil):
    code, out, _ = pecil("list", "methods")
    assert code == 0
    for method in METHODS.values():
        assert method.reference.split(" (")[0].split(",")[0].split()[0] in out, method.name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fit nothing.csv -o m.pecil", "'nothing.csv' is neither a dataset nor a path"),
        ("fit digits -o no/such/m.pecil", "there is no folder no/such"),
        ("fit digits -o results", "cannot write results: it is a folder"),
        (
            "fit digits -o m.pecil --method pec --set lrr=1",
            "PEC has no setting lrr; it has activation, ",
        ),
        (
            "fit digits -o m.pecil --method pec --lr -1",
            "lr must be a positive number, but it is -1",
        ),
        (
            "fit digits -o m.pecil --method pec --set lr=fast",
            "lr must be a positive number, but it is 'fast'",
        ),
        (
            "fit digits -o m.pecil --method pec --architecture tree",
            "one of auto, mlp, conv, linear, but",
        ),
        ("fit digits -o m.pecil --device abacus", "expected auto, cpu, cuda, ..., got 'abacus'"),
        ("fit digits -o m.pecil --label kind", "label='kind' is for CSV"),
        (
            "fit digits -o m.pecil --lr 0.1",
            "Whitened PEC, unlike --method pec, has no setting lr; it has channels, device, dim, ",
        ),
        (
            "fit digits -o m.pecil --method pec --memory 9",
            "PEC, unlike --method whitened_pec, has no setting memory; it has activation, ",
        ),
        ("fit digits -o m.pecil --set lrr=1", "Whitened PEC has no setting lrr; it has channels,"),
        ("fit digits -o m.pecil --memory -1", "memory must be a positive number, but it is -1"),
        ("fit digits -o m.pecil --teacher tree", "teacher must be one of auto, natural, strokes,"),
        ("fit digits -o m.pecil --set gamma=1", "the teacher 'strokes' has no setting gamma"),
        ("learn nothing.pecil digits", "no model file nothing.pecil"),
        ("predict foreign.pecil digits", "foreign.pecil is not a pecil model"),
        ("info foreign.pecil", "foreign.pecil is not a pecil model"),
        ("run ere digits", "expected a method out of whitened_pec, pec, randumb,"),
        ("run pec digits --split 3/3", "possible are 10/1"),
        ("run pec digits --set shuffle=true", "pec has no setting shuffle; it has"),
        ("run pec digits --save-results no/such/r.jsonl", "there is no folder no/such"),
        ("run finetuning digits --set batch_size=0", "batch_size must be a whole number from 1"),
        ("table table9", "expected a table out of table1, table2, "),
        ("table --results nothing.jsonl", "nothing.jsonl"),
        ("figure speed", "expected a figure out of epochs, "),
        ("sweep table9", "expected a table out of table1, table2, "),
        ("sweep whitened --only mnist/best", "none of these can be run: mnist/best"),
        ("sweep table1 --only mars/pec", "table table1 has no cell mars/pec: expected DATASET/ROW"),
        ("search whitened_pec digits", "there is no grid for whitened_pec: say which values"),
        ("search pec digits --grid lr=3", "lr: expected a list of values to try, got 3"),
        ("search pec digits --grid lrr=[3]", "pec has no setting lrr; it has"),
        ("results --import nothing.jsonl", "there is no file of results nothing.jsonl"),
        ("results --store foreign.pecil", "expected a store of results at foreign.pecil"),
        ("run pec digits --store no/such.sqlite", "there is no folder no"),
        ("figure memory", "no results to draw: expected runs of whitened_pec, pec, "),
        ("figure memory -o no/such.png", "there is no folder no"),
    ],
)
def test_a_users_mistake_is_one_paragraph_and_exit_code_1(
    line, message, tmp_path, monkeypatch, pecil
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign.pecil").write_text("not a model")
    (tmp_path / "results").mkdir()
    code, out, err = pecil(*line.split())
    assert (code, out) == (1, "")
    assert err.startswith("pecil: ")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(os.listdir()) == ["foreign.pecil", "results"]


@pytest.mark.parametrize(
    "line",
    [
        "fly",
        "fit digits",
        "fit digits -o m.pecil --lr fast",
        "fit digits -o m.pecil --method er",
        "run pec digits --seed 1 --seeds 2",
        "run pec digits --set lr",
        "list stars",
    ],
)
def test_a_command_that_is_not_understood_is_exit_code_2(line, pecil):
    code, out, err = pecil(*line.split())
    assert (code, out) == (2, "")
    assert "Usage" in err


def test_data_of_another_shape_leaves_the_model_as_it_was(tmp_path, model, pecil):
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, 9), dtype=np.float32), y=list("abab"))
    before = model.read_bytes()
    for command in ("learn", "predict"):
        code, _, err = pecil(command, model, tmp_path / "wide.npz")
        assert code == 1
        assert "9" in err
    assert model.read_bytes() == before


def test_version(pecil):
    code, out, _ = pecil("--version")
    assert code == 0
    assert re.fullmatch(r"pecil \d+\.\d+\.\d+\n", out)


def test_without_typer_the_extra_is_named():
    code = "import sys; sys.modules['typer'] = None; import pecil.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == 'pecil: the command line needs more: pip install "pecil[cli]"\n'


def test_help_and_version_come_without_the_heavy_libraries():
    program = """
import sys
from pecil.cli import main
for line in ("--help", "--version", "predict --help", "fit digits", "fly"):
    try:
        main(line.split())
    except SystemExit:
        pass
print({"torch", "sklearn"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.endswith("\nset()\n")


@pytest.mark.parametrize(
    ("module", "lost"), [("typer", "()"), ("torch", "()"), ("torch", "KeyboardInterrupt")]
)
def test_ctrl_c_amid_imports(module, lost, tmp_path):
    """Stand in for a module that interrupts itself, and may turn that into another error."""
    (tmp_path / f"{module}.py").write_text(f"""
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except {lost}:
    raise RuntimeError("a module is only half there") from None
""")
    done = subprocess.run(
        [sys.executable, "-c", "from pecil.cli import main; main()", "run", "pec", "digits"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_ignored_ctrl_c_stays_ignored_and_a_thread_may_run_commands(monkeypatch, pecil):
    during = []

    def command(**_):
        during.append(signal.getsignal(signal.SIGINT))
        sys.exit()

    monkeypatch.setattr(cli, "app", command)
    usual = signal.getsignal(signal.SIGINT)
    try:
        for before in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(signal.SIGINT, before)
            pecil()
            assert signal.getsignal(signal.SIGINT) is before
        with ThreadPoolExecutor(1) as pool:
            pool.submit(pecil).result()
    finally:
        signal.signal(signal.SIGINT, usual)
    ignored, ours, threads = during
    assert ignored is signal.SIG_IGN
    assert ours is not signal.default_int_handler
    assert threads is signal.default_int_handler


STOPPED_WHILE = {
    "learning": """
def slow(self, *arguments, **options):
    original(self, *arguments, **options)
    wait()
original, PEC.partial_fit = PEC.partial_fit, slow
""",
    "saving": """
import os
def slow(source, target):
    wait()
os.replace = slow
""",
}


@pytest.mark.parametrize("moment", STOPPED_WHILE)
def test_ctrl_c_leaves_the_previous_model_intact(moment, tmp_path, data, model):
    """Send a real SIGINT to a real process, held at the worst moments."""
    program = f"""
import sys, time
from pecil import PEC
from pecil.cli import main
def wait():
    print("now", flush=True)
    time.sleep(60)
{STOPPED_WHILE[moment]}
main()
"""
    more, before = data("cd"), model.read_bytes()
    files = sorted(tmp_path.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-c", program, "learn", model, more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out == ""
    assert model.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == files


@pytest.fixture
def network(tmp_path):
    """Write a small network as TorchScript."""
    path = tmp_path / "network.pt"
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(torch.nn.Conv2d(3, 6, 3), torch.rand(1, 3, 8, 8)).save(path)
    return path


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """Write pictures of two colours, in train/ and test/."""
    monkeypatch.setenv("PECIL_DATA", str(tmp_path / "data"))
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        for channel, label in enumerate(("red", "green")):
            place = tmp_path / "pictures" / part / label
            place.mkdir(parents=True)
            for k in range(8):
                pixels = random.integers(0, 90, (12, 10, 3), dtype=np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(place / f"{k}.png")
    return tmp_path / "pictures"


def test_features_are_a_dataset_to_learn_from(tmp_path, pictures, network, ok):
    output, model = tmp_path / "features.npz", tmp_path / "model.pecil"
    made = ok("features", pictures, "--network", network, "--size", 8, "-o", output)
    assert made == {"output": str(output), "samples": 32, "n_features": 6}
    assert len(list((tmp_path / "data" / "features").rglob("*.npz"))) == 2
    found, images = load_data(output), load_data(pictures)
    assert found.note == f"features of pictures by {network}"
    assert found.train_y.tolist() == images.train_y.tolist()
    expected = Features(str(network), size=8, device="cpu").transform(images.test_x)
    np.testing.assert_allclose(found.test_x, expected, atol=1e-6)
    assert ok("fit", output, "-o", model, "--teacher", "identity")["accuracy"] == 1
    assert ok("predict", model, output)["accuracy"] == 1
    assert ok("run", "nearest_mean", output, "--split", "2/1")[0]["accuracy"] == 1


def test_pictures_of_any_size_have_features(tmp_path, pictures, network, ok, pecil):
    Image.new("RGB", (31, 17), "red").save(pictures / "train" / "red" / "large.png")
    Image.new("L", (5, 9)).save(pictures / "train" / "green" / "grey.png")
    output = tmp_path / "features.npz"
    made = ok("features", pictures, "--network", network, "--size", 8, "-o", output)
    assert (made["samples"], len(load_data(output).train_x)) == (34, 18)
    code, _, err = pecil("features", pictures, "--network", network, "-o", tmp_path / "no.npz")
    assert code == 1 and "size must be given for images of different sizes" in err
    assert not (tmp_path / "no.npz").exists()


def test_features_of_pictures_without_labels(tmp_path, pictures, network, ok):
    output, plain = tmp_path / "features.npz", pictures / "test" / "red"
    options = ["--set", "mean=[0.5, 0.4, 0.3]", "--set", "std=0.2", "--cache", tmp_path / "kept"]
    ok("features", plain, "--network", network, *options, "-o", output)
    found = load_data(output, labelled=False)
    assert found.train_y is None
    network_ = Features(str(network), mean=(0.5, 0.4, 0.3), std=0.2, device="cpu")
    expected = network_.transform(load_data(plain, labelled=False).train_x)
    np.testing.assert_allclose(found.train_x, expected, atol=1e-6)
    assert len(list((tmp_path / "kept").rglob("*.npz"))) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"-o": "features.csv"}, "expected a name that ends in .npz for the features"),
        ({"-o": "no/folder.npz"}, "there is no folder no"),
        ({"--network": "no.pt"}, "there is no network 'no.pt'"),
        ({"--network": "timm:resnet18"}, 'pip install "pecil[timm]"'),
        ({"--set": "sice=8"}, "Features has no setting sice; it has batch_size"),
        ({"--set": "cache=here"}, "Features has no setting cache"),
    ],
)
def test_features_that_cannot_be_made(
    tmp_path, pictures, network, pecil, monkeypatch, changes, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "timm", None)
    options = {"--network": network, "-o": "features.npz"} | changes
    code, out, err = pecil("features", pictures, *(part for o in options.items() for part in o))
    assert (code, out) == (1, "") and message in err
    assert not list(tmp_path.glob("features.*"))


def test_interrupted_features_go_on_where_they_stopped(
    tmp_path, pictures, network, pecil, ok, monkeypatch
):
    output, seen = tmp_path / "features.npz", []
    arguments = ["features", pictures, "--network", network, "--set", "block_size=4", "-o", output]
    usual = Features.blocks

    def interrupted(self, x):
        for block in usual(self, x):
            yield block
            seen.append(len(block))
            if len(seen) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(Features, "blocks", interrupted)
    code, out, _ = pecil(*arguments)
    assert (code, out) == (130, "") and not output.exists()
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "data" / "features").rglob("*.npz")}
    assert len(kept) == 3
    assert ok(*arguments)["samples"] == 32
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "data" / "features").rglob("*.npz")}
    assert len(after) == 8 and kept.items() <= after.items()
