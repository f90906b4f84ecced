import csv
import os
import re
import sys
import tempfile
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from arguments import SMALL, WHITENED, samples
from PIL import Image

from pecil import PEC, WhitenedPEC, load
from pecil.cli import models
from pecil.data import Features
from pecil.data import load as load_data
from pecil.pec.base import ErrorClassifier


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
        model = models._new(models.Estimator.WHITENED_PEC, data, given)
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

    code, printed, err = pecil("predict", model, data("ab"), "--novelty")
    assert code == 0
    assert printed == out_csv.read_text()
    assert re.search(r"accuracy +[\d.]+ %\n", out)[0] == err


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


@pytest.mark.parametrize(
    ("labels", "written", "label"),
    [
        (["a", "b"], "-1", "-1"),
        ([0, 1], "-1", -1),
        ([0, 1], "01", "01"),
        ([0, 1], "none", "none"),
        ([0, 1], "1.5", "1.5"),
        ([0.0, 1.0], "-1", -1.0),
        ([0.0, 1.0], "1.5", 1.5),
        ([0.0, 1.0], "1e3", "1e3"),
        ([0.0, 1.0], "nan", "nan"),
        ([0.0, 1.0], "-inf", "-inf"),
        ([0, 1], "[1]", "[1]"),
    ],
)
def test_the_label_of_the_rejected_is_a_text_or_of_the_models_kind(
    tmp_path, ok, labels, written, label
):
    (x, y), path = samples(list("ab"), n=99), tmp_path / "model.pecil"
    WhitenedPEC(memory=2000).fit(x, np.array(labels)[(y == "b").astype(int)]).save(path)
    np.savez(tmp_path / "far.npz", x=99 * x)
    for options in ((), ("--novelty",)):
        told = ok("predict", path, tmp_path / "far.npz", "--reject-as", written, *options)
        answers = {row["label"] for row in told["predictions"]} - set(labels)
        assert answers == {label} and {type(answer) for answer in answers} == {type(label)}


@pytest.mark.parametrize("options", [SMALL, WHITENED])
def test_novelty_is_asked_for_without_further_errors(tmp_path, data, ok, monkeypatch, options):
    path, asked, counted = tmp_path / "model.pecil", data("abch", seed=5), []
    ok("fit", data("ab", n=300), "-o", path, *options)
    novelty, usual = load(path).novelty(np.load(asked)["x"]).tolist(), ErrorClassifier.errors

    def errors(self, x):
        counted.append(len(x))
        return usual(self, x)

    for more in ((), ("--reject-as", "none")):
        plain = ok("predict", path, asked, *more)["predictions"]
        with monkeypatch.context() as then:
            then.setattr(ErrorClassifier, "errors", errors)
            then.setattr(WhitenedPEC, "discriminants", None)
            told = ok("predict", path, asked, *more, "--novelty")["predictions"]
        assert [row.pop("novelty") for row in told] == novelty
        assert told == plain
    assert counted == [120, 120]
    assert {row["label"] for row in told} == {"a", "b", "none"}


def test_what_is_read_is_not_overwritten(tmp_path, data, model, pecil):
    own, other = data("ab"), tmp_path / "other.pecil"
    table = data("ab", kind="csv")
    hard, soft = tmp_path / "hard", tmp_path / "soft"
    hard.hardlink_to(table)
    soft.symlink_to(table)
    other.write_bytes(model.read_bytes())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for line in (
        ("fit", table, "-o", table),
        ("fit", table, "-o", hard),
        ("fit", soft, "-o", table),
        ("fit", tmp_path / "." / own.name, "-o", own),
        ("learn", model, table, "-o", table),
        ("predict", model, table, "-o", table),
        ("predict", model, own, "-o", model),
        ("features", own, "--network", "net.pt", "-o", own),
        ("features", "digits", "--network", own, "-o", own),
    ):
        code, out, err = pecil(*line)
        assert (code, out) == (1, "")
        assert f"cannot write {line[-1]}: it is what is to be read; choose another name" in err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_model_takes_the_place_of_nothing_but_a_model(tmp_path, data, model, ok, pecil):
    table, other = data("ab", kind="csv"), tmp_path / "other.pecil"
    before = table.read_bytes()
    for line in (
        ("fit", data("ab"), "-o", table),
        ("learn", model, data("ab"), "-o", table),
        ("merge", model, model, "-o", table),
    ):
        code, out, err = pecil(*line)
        assert (code, out, table.read_bytes()) == (1, "", before)
        assert f"cannot write {table}: it is there and is no pecil model; choose another" in err
    whole = model.read_bytes()
    for content in (b"", whole[:-9], whole.replace(b'\\"format\\": 2', b'\\"format\\": 1')):
        assert content != whole
        other.write_bytes(content)
        ok("fit", data("ab"), "-o", other, *SMALL)
        assert load(other).samples_seen_ == {"a": 30, "b": 30}


def test_a_link_to_a_model_stays_and_the_model_learns(tmp_path, data, model, ok):
    link = tmp_path / "link.pecil"
    link.symlink_to(model)
    ok("learn", link, data("c"))
    assert link.is_symlink() and not model.is_symlink()
    assert list(load(model).classes_) == ["a", "b", "c"]


def test_a_pipe_is_not_replaced(tmp_path, data, model, pecil):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for line in (("fit", data("ab")), ("learn", model, data("ab")), ("predict", model, data("a"))):
        code, out, err = pecil(*line, "-o", pipe)
        assert (code, out, pipe.is_fifo()) == (1, "", True)
        assert f"cannot write {pipe}: it is a device or a pipe, not a file" in err


def test_a_place_that_takes_no_file_is_found_before_anything_is_learned(
    tmp_path, data, model, pecil, monkeypatch
):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    for kind in (PEC, WhitenedPEC):
        for name in ("fit", "partial_fit"):
            monkeypatch.setattr(kind, name, lambda *_: pytest.fail("nothing may be learned"))
    for line in (("fit", data("ab")), ("learn", model, data("ab"))):
        code, out, err = pecil(*line, "-o", tmp_path / "m.pecil")
        assert (code, out) == (1, "")
        assert f"m.pecil: no file can be made in {tmp_path}: Permission denied" in err


def test_a_table_with_a_chosen_column_of_labels(tmp_path, data, ok, pecil):
    table = data("ab", kind="csv")
    fitted = ok("fit", table, "-o", tmp_path / "m.pecil", "--label", "kind", *SMALL)
    assert [c["label"] for c in fitted["classes"]] == ["a", "b"]
    code, _, err = pecil("fit", table, "-o", tmp_path / "m.pecil", "--label", "colour")
    assert code == 1
    assert "colour" in err


def write_table(path, x, y=None, names=tuple("stuvwxyz")):
    columns = dict(zip(names, x.T, strict=False)) | ({} if y is None else {"label": y})
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


@pytest.fixture
def tables(tmp_path):
    """Write a table, the same with its columns the other way round, and as plain arrays."""
    x, y = samples(list("ab"))
    forth = write_table(tmp_path / "forth.csv", x, y)
    back = write_table(tmp_path / "back.csv", x[:, ::-1], y, names=tuple("zyxwvuts"))
    np.savez(tmp_path / "plain.npz", x=x, y=y)
    return forth, back, tmp_path / "plain.npz"


def errors(model, x):
    """Give a model samples without names, as tensors are."""
    return load(model).errors(torch.from_numpy(x))


@pytest.mark.parametrize("options", [SMALL, WHITENED])
def test_columns_are_known_by_their_names(tmp_path, tables, ok, options):
    models = [tmp_path / f"{k}.pecil" for k in range(3)]
    ok("fit", tables[0], "-o", models[0], *options)
    assert load(models[0]).feature_names_in_.tolist() == list("stuvwxyz")
    predicted = [ok("predict", models[0], table, "--novelty") for table in tables]
    assert predicted[0] == predicted[1] == predicted[2]
    for model, table in zip(models[::-1], tables[::-1], strict=True):
        ok("learn", models[0], table, "-o", model)
    x, _ = samples(list("ab"), seed=1)
    for model in models:
        assert load(model).samples_seen_ == {"a": 60, "b": 60}
        assert np.array_equal(errors(model, x), errors(models[0], x))
    assert load(models[0]).feature_names_in_.tolist() == list("stuvwxyz")


def test_columns_that_are_not_those_of_the_model_are_named(tmp_path, tables, pecil, ok):
    model, other = tmp_path / "model.pecil", tmp_path / "other.csv"
    ok("fit", tables[0], "-o", model, *SMALL)
    before, (x, y) = model.read_bytes(), samples(list("ab"))
    for names, message in (
        ("stuvwxy", "found them without 'z' ("),
        ("stuvwxyzq", "found them with 'q' (--label names"),
        ("stuvwpyq", "found them without 'x', 'z', with 'p', 'q' ("),
    ):
        write_table(other, np.hstack([x, x])[:, : len(names)], y, names)
        for command in ("learn", "predict"):
            code, out, err = pecil(command, model, other)
            assert (code, out) == (1, "")
            assert f"{other}: expected the columns that the model learned from, {message}" in err
    assert model.read_bytes() == before


def test_a_model_of_plain_arrays_takes_the_columns_of_a_table_as_they_come(tmp_path, tables, ok):
    model = tmp_path / "model.pecil"
    ok("fit", tables[2], "-o", model, *SMALL)
    assert ok("predict", model, tables[0]) == ok("predict", model, tables[2])
    ok("learn", model, tables[0])
    assert not hasattr(load(model), "feature_names_in_")


def test_models_of_other_columns_are_not_merged(tmp_path, tables, ok, pecil):
    paths = [tmp_path / f"{k}.pecil" for k in range(3)]
    for table, path in zip(tables, paths, strict=True):
        ok("fit", table, "-o", path, *WHITENED)
    code, _, err = pecil("merge", *paths[:2], "-o", tmp_path / "merged.pecil")
    assert code == 1
    assert "1.pecil: it learned from the columns 'z', 'y', 'x', 'w', 'v', 'u', 't', 's', not" in err
    assert len(ok("merge", paths[0], paths[2], "-o", tmp_path / "merged.pecil")["classes"]) == 2


@pytest.mark.parametrize("known", [np.array([0, 1]), np.array([0.0, 1.0]), np.array(["0", "1"])])
@pytest.mark.parametrize("come", [np.array([0, 1, 2]), np.array(["0", "1", "2"])])
def test_a_label_is_known_however_it_is_written(tmp_path, ok, pecil, known, come):
    model, other, more = (tmp_path / name for name in ("a.pecil", "b.pecil", "more.npz"))
    x, y = samples(list("abc"))
    codes = np.searchsorted(list("abc"), y)
    np.savez(tmp_path / "first.npz", x=x[y < "c"], y=known[codes[y < "c"]])
    np.savez(more, x=x, y=come[codes])
    ok("fit", tmp_path / "first.npz", "-o", model, *WHITENED)
    told = ok("predict", model, more)["accuracy"]
    assert told == np.mean(load(model).predict(x).astype(float) == codes) > 0.5
    learned = ok("learn", model, more)
    assert [c["samples"] for c in learned["classes"]] == [60, 60, 30]
    assert [c["label"] for c in learned["classes"]] == [*known.tolist(), come.tolist()[2]]
    assert ok("predict", model, more)["accuracy"] > 0.8

    ok("fit", more, "-o", other, *WHITENED)
    code, _, err = pecil("merge", model, other, "-o", other)
    alike = (known.dtype.kind == "U") == (come.dtype.kind == "U")
    assert code == (0 if alike else 1)
    assert alike or "give both labels of one kind" in err


def test_labels_that_are_known_both_ways_stay_what_they_are(tmp_path, ok):
    x, _ = samples(list("ab"))
    WhitenedPEC(memory=2000).fit(x, [1, "1"] * 30).save(tmp_path / "model.pecil")
    for y, counts in ((np.ones(60, int), [90, 30]), (np.array(["1"] * 60), [90, 90])):
        np.savez(tmp_path / "more.npz", x=x, y=y)
        learned = ok("learn", tmp_path / "model.pecil", tmp_path / "more.npz")
        assert [(c["label"], c["samples"]) for c in learned["classes"]] == [
            *zip([1, "1"], counts, strict=True)
        ]


def standardised(x, axes):
    return x.mean(axes), np.where(np.ptp(x, axes) == 0, 1, x.std(axes))


@pytest.mark.parametrize("options", [SMALL, WHITENED])
def test_features_are_standardised(tmp_path, ok, pecil, options):
    x, y = samples(list("ab"))
    x = x * 10.0 ** np.arange(8) + 7
    x[:, 3] = 0.1
    np.savez(tmp_path / "x.npz", x=x, y=y)
    mean, std = standardised(x, 0)
    fitted = ok("fit", tmp_path / "x.npz", "-o", tmp_path / "m.pecil", "--standardise", *options)
    for name, expected in (("mean", mean), ("std", std)):
        np.testing.assert_allclose(fitted["settings"][name], expected, rtol=1e-5)
    assert fitted["settings"]["std"][3] == 1
    learned = ok("learn", tmp_path / "m.pecil", tmp_path / "x.npz")
    assert all(learned["settings"][name] == fitted["settings"][name] for name in ("mean", "std"))
    code, out, _ = pecil("info", tmp_path / "m.pecil")
    assert code == 0
    assert re.search(r"\nmean +\S+, \S+, \S+, 0.1 and 4 more\n", out)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_channels_are_standardised(tmp_path, ok, kind, first):
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (1200, 4, 5, 3)) // [1, 2, 300]
    np.savez(
        tmp_path / "x.npz", x=np.moveaxis(x, 3, 1 if first else 3).astype(kind), y=x[:, 0, 0, 0]
    )
    mean, std = standardised(x / (255 if kind is np.uint8 else 1), (0, 1, 2))
    options = ["--method", "pec", "--standardise", "--set", "output_dim=3", "--teacher-width", "9"]
    fitted = ok("fit", tmp_path / "x.npz", "-o", tmp_path / "m.pecil", *options)
    np.testing.assert_allclose(fitted["settings"]["mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(fitted["settings"]["std"], std, rtol=1e-6)
    assert fitted["settings"]["std"][2] == 1


def test_grey_images_are_standardised_as_a_whole_and_before_the_datasets_own(tmp_path, ok):
    settings = ok("fit", "digits", "-o", tmp_path / "m.pecil", "--standardise")["settings"]
    pixels = load_data("digits").train_x / 255
    np.testing.assert_allclose(settings["mean"], [pixels.mean()])
    np.testing.assert_allclose(settings["std"], [pixels.std()])


def test_help_says_what_inputs_should_be(pecil):
    code, out, _ = pecil("fit", "--help")
    assert code == 0
    assert "order one" in " ".join(out.split())


@pytest.mark.parametrize("channels", ["auto", "first", "last"])
def test_grey_images_are_made_colour_for_a_model_of_colour_images(tmp_path, ok, channels):
    random, model = np.random.default_rng(0), tmp_path / "model.pecil"
    grey, y = random.integers(0, 256, (40, 6, 7), dtype=np.uint8), np.arange(40) % 2
    axis = 1 if channels == "first" else 3
    colour = np.stack([grey] * 3, axis=axis)
    for name, x in (("grey", grey), ("colour", colour)):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    options = [*SMALL[:-2], "--set", "output_dim=5", "--set", f"channels={channels}"]
    ok("fit", tmp_path / "colour.npz", "-o", model, *options)
    predicted = [
        ok("predict", model, tmp_path / f"{n}.npz", "--novelty") for n in ("grey", "colour")
    ]
    assert predicted[0] == predicted[1]
    for name in ("grey", "colour"):
        ok("learn", model, tmp_path / f"{name}.npz", "-o", tmp_path / f"{name}.pecil")
    learned = [load(tmp_path / f"{name}.pecil").errors(colour) for name in ("grey", "colour")]
    assert np.array_equal(*learned)


def test_images_of_another_size_than_the_models_say_what_to_do(tmp_path, pictures, ok, pecil):
    model, other = tmp_path / "model.pecil", tmp_path / "other"
    ok("fit", pictures, "-o", model, "--method", "pec", "--teacher-width", "9")
    before = model.read_bytes()
    (other / "red").mkdir(parents=True)
    for mode, text in (("RGB", "9x8x3"), ("L", "9x8")):
        Image.new(mode, (8, 9)).save(other / "red" / "0.png")
        for command in ("learn", "predict"):
            code, _, err = pecil(command, model, other)
            assert code == 1
            assert f"images are {text}, but the model learned from 12x10 (height x width)" in err
            assert "resize them" in err and "pecil features --size" in err
    assert model.read_bytes() == before


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


def test_info_tells_of_a_model_with_a_callable_teacher(tmp_path, ok, pecil):
    (x, y), path = samples(list("ab")), tmp_path / "model.pecil"
    fitted = PEC(teacher=torch.nn.Flatten(), student_width=4, architecture="mlp").fit(x, y)
    fitted.save(path)
    facts = ok("info", path)
    assert facts["settings"]["teacher"] == "<Flatten>"
    assert facts["classes"] == [{"label": c, "samples": 30} for c in "ab"]
    assert facts["n_parameters"] == fitted.n_parameters_ == 2 * facts["n_parameters_per_class"]
    code, out, _ = pecil("info", path)
    assert code == 0 and re.search(r"\nteacher +<Flatten>\n", out)


def test_data_of_another_shape_leaves_the_model_as_it_was(tmp_path, model, pecil):
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, 9), dtype=np.float32), y=list("abab"))
    before = model.read_bytes()
    for command in ("learn", "predict"):
        code, _, err = pecil(command, model, tmp_path / "wide.npz")
        assert code == 1
        assert "9" in err
    assert model.read_bytes() == before


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
