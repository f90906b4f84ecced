import csv
import re
import sys
import warnings

import numpy as np
import pytest
import torch
from arguments import SMALL, WHITENED, samples
from PIL import Image

from pecil import PEC, WhitenedPEC, load
from pecil.cli import models
from pecil.data import Features
from pecil.data import load as load_data


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
