import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pecil.data import DATASETS, load


def small(name, train=3, test=2, seed=0):
    """Return arrays that pass for a dataset, with so many samples a class."""
    info = DATASETS[name]
    rng = np.random.default_rng(seed)
    arrays = {}
    for part, n in (("train", train), ("test", test)):
        y = rng.permutation(np.repeat(np.arange(info.n_classes), n))
        x = rng.integers(0, 256, (len(y), *info.shape)).astype(np.uint8)
        arrays |= {f"{part}_x": x, f"{part}_y": y}
    return arrays


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PECIL_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("info", DATASETS.values(), ids=DATASETS)
def test_the_registry_is_whole(info):
    assert DATASETS[info.name] is info
    assert info.title and info.source and info.licence
    assert len(info.shape) in (1, 2, 3)
    assert info.class_names is None or len(set(info.class_names)) == info.n_classes
    channels = info.shape[2] if len(info.shape) == 3 else 1
    for values in (info.mean, info.std):
        assert values is None or (len(values) == channels and all(0 < v < 1 for v in values))
    assert (info.mean is None) == (info.std is None)
    assert info.pictures in (("",) if len(info.shape) == 1 else ("natural", "strokes", "signs"))
    gettable = info.tables or info.how or info.source in {*DATASETS, "scikit-learn"}
    assert gettable, "a dataset must say how to get it"


def test_digits_come_without_files():
    digits, info = load("digits"), DATASETS["digits"]
    assert digits.train_x.shape == (info.n_train, 8, 8) and digits.test_x.shape == (355, 8, 8)
    assert digits.train_x.dtype == np.uint8 and digits.train_x.min() == 0
    assert digits.train_x.max() == 255
    shares = np.bincount(digits.test_y) / np.bincount(digits.train_y)
    assert np.all(np.abs(shares - 0.25) < 0.01)
    again = load("digits")
    assert np.array_equal(digits.train_x, again.train_x)
    every = {x.tobytes() for x in digits.train_x} & {x.tobytes() for x in digits.test_x}
    assert not every


@pytest.mark.parametrize("name", ["mnist", "cifar100", "svhn", "miniimagenet"])
def test_a_file_in_the_folder_is_found(folder, name):
    arrays = small(name)
    np.savez(folder / f"{name}.npz", **arrays)
    dataset, info = load(name, download=False), DATASETS[name]
    assert dataset.name == name and dataset.note == ""
    for field, array in arrays.items():
        assert np.array_equal(getattr(dataset, field), array)
    assert dataset.train_y.dtype == np.int64
    assert (dataset.mean, dataset.std) == (info.mean, info.std)
    assert dataset.class_names == info.class_names


def test_core50_is_the_users_own_features(folder):
    labels = np.repeat(np.arange(10), 2)
    x = np.random.default_rng(0).normal(size=(20, 512)).astype(np.float32)
    np.savez(folder / "core50.npz", train_x=x, train_y=labels, test_x=x, test_y=labels)
    assert np.array_equal(load("core50").train_x, x)


def test_root_wins_over_the_environment_and_that_over_the_home_folder(tmp_path, monkeypatch):
    folders = {name: tmp_path / name for name in ("root", "environment", "home")}
    monkeypatch.setenv("HOME", str(folders["home"]))
    monkeypatch.delenv("PECIL_DATA", raising=False)
    expected = {}
    for seed, (name, place) in enumerate(folders.items()):
        place = place / ".cache/pecil" if name == "home" else place
        place.mkdir(parents=True)
        expected[name] = small("mnist", seed=seed)["train_x"]
        np.savez(place / "mnist.npz", **small("mnist", seed=seed))
    assert np.array_equal(load("mnist").train_x, expected["home"])
    monkeypatch.setenv("PECIL_DATA", str(folders["environment"]))
    assert np.array_equal(load("mnist").train_x, expected["environment"])
    assert np.array_equal(load("mnist", root=folders["root"]).train_x, expected["root"])


def test_a_note_in_the_file_is_kept_and_passed_on(folder):
    np.savez(folder / "svhn.npz", **small("svhn"), note="rebuilt from SVHN format 1")
    assert load("svhn").note == "rebuilt from SVHN format 1"
    assert load("balanced_svhn").note == "rebuilt from SVHN format 1"


def test_balanced_svhn_keeps_the_first_of_each_class_in_file_order(folder):
    arrays = small("svhn", train=6, test=4)
    arrays["train_y"][np.flatnonzero(arrays["train_y"] == 7)[4:]] = 1  # class 7 keeps 4, 1 has 8
    arrays["test_y"][np.flatnonzero(arrays["test_y"] == 2)[1:]] = 5  # class 2 keeps 1
    np.savez(folder / "svhn.npz", **arrays)
    balanced = load("balanced_svhn")
    for part, m in (("train", 4), ("test", 1)):
        x, y = getattr(balanced, f"{part}_x"), getattr(balanced, f"{part}_y")
        assert np.bincount(y).tolist() == [m] * 10
        for c in range(10):
            assert np.array_equal(x[y == c], arrays[f"{part}_x"][arrays[f"{part}_y"] == c][:m])
    assert (balanced.name, balanced.mean) == ("balanced_svhn", DATASETS["svhn"].mean)


def test_imbalanced_cifar10_doubles_class_0_and_cuts_class_1(folder):
    y = np.concatenate([np.repeat(np.arange(10), 3), np.repeat(1, 2600)])
    x = np.zeros((len(y), 32, 32, 3), np.uint8)
    x[:, 0, 0, :2] = np.stack(np.divmod(np.arange(len(y)), 256), axis=1)  # numbered
    test = {"test_x": x[:30], "test_y": y[:30]}
    np.savez(folder / "cifar10.npz", train_x=x, train_y=y, **test)
    data = load("imbalanced_cifar10")
    assert np.bincount(data.train_y).tolist() == [6, 2500, *[3] * 8]
    number = data.train_x[:, 0, 0, 0].astype(int) * 256 + data.train_x[:, 0, 0, 1]
    assert sorted(number[data.train_y == 0]) == [0, 0, 1, 1, 2, 2]
    assert sorted(number[data.train_y == 1]) == np.flatnonzero(y == 1)[:2500].tolist()
    assert np.array_equal(y[number], data.train_y)
    assert np.array_equal(data.test_x, test["test_x"])


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "digits"])
def test_missing_data_says_how_to_get_it(folder, name):
    source = DATASETS[name].source
    parent = DATASETS.get(source, DATASETS[name])
    with pytest.raises(FileNotFoundError) as error:
        load(name, download=False)
    message = str(error.value)
    assert str(folder / f"{parent.name}.npz") in message and "PECIL_DATA" in message
    expected = "pecil[hub]" if parent.tables else parent.how
    assert ("unless download=false" in message.lower()) == (expected == "pecil[hub]")
    assert expected in message and f"labels 0 to {parent.n_classes - 1}" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_x": None}, "expected train_x and train_y.*found test_x, test_y, train_y"),
        ({"test_x": None, "test_y": None}, "expected test_x and test_y"),
        ({"test_y": None}, "expected train_x"),
        ({"train_x": np.zeros((30, 28, 27), np.uint8)}, r"samples differ in shape, \(28, 27\)"),
        (
            {"train_x": np.zeros((30, 9), np.uint8), "test_x": np.zeros((20, 9), np.uint8)},
            r"train_x as uint8 of shape \(n, 28, 28\), found uint8 of shape \(30, 9\)",
        ),
        ({"test_x": np.zeros((20, 28, 28))}, "test_x as uint8 of shape .*found float64"),
        ({"train_x": np.zeros((29, 28, 28), np.uint8)}, "expected 29 labels"),
        (
            {"train_y": np.repeat(np.arange(1, 11), 3)},
            "every label from 0 to 9 in train_y.*1 to 10",
        ),
        ({"test_y": np.repeat(np.arange(5), 4)}, "every label from 0 to 9 in test_y, found 5"),
        ({"train_y": np.repeat(np.arange(10.0), 3)}, "float64"),
        ({"train_y": np.repeat(list("0123456789"), 3)}, "every label from 0 to 9 in train_y"),
    ],
)
def test_a_file_that_is_not_the_dataset_is_refused(folder, change, message):
    arrays = {k: v for k, v in (small("mnist") | change).items() if v is not None}
    np.savez(folder / "mnist.npz", **arrays)
    with pytest.raises(ValueError, match=message) as error:
        load("mnist")
    assert str(folder / "mnist.npz") in str(error.value)


def test_labels_of_another_integer_type_become_int64(folder):
    arrays = small("mnist")
    arrays |= {"train_y": arrays["train_y"].astype(np.uint8)}
    np.savez(folder / "mnist.npz", **arrays)
    assert load("mnist").train_y.dtype == np.int64


@pytest.mark.parametrize("name", ["mnits", "no/such/folder", Path("data.npz")])
def test_what_is_not_there_lists_what_is(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="digits, mnist, .*sub-folder.*parquet"):
        load(name)


def test_a_path_of_a_datasets_name_can_be_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("own.npz", x=np.ones((2, 3)), y=[0, 1])
    Path("own.npz").rename("digits")
    assert load("digits").train_x.shape == (1442, 8, 8)
    with pytest.raises(ValueError, match="cannot tell what"):
        load("./digits")


def test_label_is_for_tables():
    with pytest.raises(ValueError, match="label='kind' is for CSV and Parquet"):
        load("digits", label="kind")


def test_a_dataset_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("digits").name = "other"
