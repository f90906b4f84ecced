"""Models as files: nothing lost, nothing misread, nothing half written."""

import json
import pickle
import shutil
import struct
import sys
from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from pecil import PEC, ModelFileError, WhitenedPEC
from pecil.pec import saving, teacher
from pecil.teachers import RandomFeatures

SETTINGS = {
    "mlp": {},
    "conv": {"architecture": "conv", "pool": 2},
    "linear": {"architecture": "linear"},
    "deep": {"hidden_layers": 2, "activation": "relu", "init": "xavier"},
    "ensemble": {"ensemble": 3},
    "batches": {"batch_size": 3, "schedule": "constant", "epochs": 2},
    "budget": {"budget": 1000, "output_dim": None},
    "normalised": {"mean": np.array([0.5, 1, 2]), "std": (1, 2, 3.5)},
    "numpy numbers": {"lr": np.float32(0.01), "student_width": np.int64(4), "mean": np.float32(2)},
    "list of numpy numbers": {"mean": [np.float32(0.5)] * 3},
    "tensors": {"mean": torch.tensor([0.5, 1.0, 2.0]), "std": torch.tensor(2.0)},
    "seed from a generator": {"random_state": np.random.RandomState(5)},
    "expected": {"expected_samples": {"a": 30, "b": 10}},
    "equal budgets": {"equal_budgets": 12},
}
every_setting = pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
SHAPE = (3, 5, 6)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.pecil"


@pytest.fixture
def saved(small, clusters, file):
    """Return a small model and the content of its file."""
    model = small().fit(*clusters(n=5)).calibrate()
    model.save(file)
    return model, file.read_bytes()


def flatten(x):
    return x.flatten(1)


# --------------------------------------------------------------------------- round trips


@every_setting
@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_learning_goes_on_as_if_it_had_not_stopped(how, options, small, clusters, state, file):
    x, y = clusters(shape=SHAPE)
    model = getattr(small(channels="first", **options), how)(x[:30], y[:30])
    model.save(file)
    loaded = PEC.load(file, device="cpu")
    assert type(loaded) is PEC
    assert state(loaded) == state(model)
    np.testing.assert_array_equal(loaded.errors(x), model.errors(x))
    for each in (model, loaded):
        each.partial_fit(x[30:], y[30:]).partial_fit(x[:1], ["new"])
    assert state(loaded) == state(model)
    np.testing.assert_array_equal(loaded.errors(x), model.errors(x))
    np.testing.assert_array_equal(loaded.predict(x), model.predict(x))


@every_setting
def test_parameters_come_back(options, small, clusters, file):
    model = small(channels="first", **options).fit(*clusters(shape=SHAPE))
    model.save(file)
    mine, theirs = model.get_params(), PEC.load(file, device="cpu").get_params()
    if "random_state" in options:
        mine["random_state"] = model.seed_
    for name, value in mine.items():
        np.testing.assert_array_equal(theirs[name], value, err_msg=name)


def test_all_that_is_known_comes_back(small, clusters, file):
    frame = pd.DataFrame(clusters()[0], columns=list("vwxyz"))
    model = small().fit(frame, clusters()[1]).calibrate(quantile=0.5)
    model.save(file)
    loaded = PEC.load(file, device="cpu")
    for name in ("threshold_", "samples_seen_", "input_shape_", "n_features_in_", "seed_"):
        assert getattr(loaded, name) == getattr(model, name), name
    assert loaded.feature_names_in_.tolist() == list("vwxyz")
    assert loaded.classes_.tolist() == ["a", "b", "c"]
    assert loaded.n_parameters_ == model.n_parameters_
    assert loaded.calibrate(quantile=0.3).threshold_ == model.calibrate(quantile=0.3).threshold_


@pytest.mark.parametrize("options", [{}, {"ensemble": 2}, {"architecture": "conv", "pool": 2}])
def test_without_the_optimiser_scores_are_the_same(options, small, clusters, file, tmp_path):
    x, y = clusters(shape=SHAPE)
    model = small(channels="first", **options).fit(x, y)
    model.save(file, optimizer=False)
    model.save(tmp_path / "all.pecil")
    loaded = PEC.load(file, device="cpu")
    np.testing.assert_array_equal(loaded.errors(x), model.errors(x))
    assert loaded.samples_seen_ == model.samples_seen_
    assert file.stat().st_size < 0.6 * (tmp_path / "all.pecil").stat().st_size
    for pair in loaded._pairs:
        assert pair.students.steps == [0, 0, 0]
        assert all((moment == 0).all() for moment in pair.students.moments)
    assert np.isfinite(loaded.partial_fit(x, y).errors(x)).all()


def test_a_loaded_model_can_be_merged_and_forget(small, clusters, state, file):
    x, y = clusters()
    together, parts = small().partial_fit(x, y), []
    for label in "abc":
        small().partial_fit(x[np.array(y) == label], [label] * 20).save(file)
        parts.append(PEC.load(file, device="cpu"))
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert state(merged) == state(together)
    merged.save(file)
    loaded = PEC.load(file, device="cpu").forget("b")
    assert state(loaded) == state(together.forget("b"))


def test_a_saved_model_that_was_changed_is_saved_again(small, clusters, state, file):
    model = small().fit(*clusters())
    model.save(file)
    model.partial_fit(*clusters(seed=1))
    model.save(file)
    assert state(PEC.load(file, device="cpu")) == state(model)
    assert [path.name for path in file.parent.iterdir()] == ["model.pecil"]


STORABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just(10**30) | st.just(2**63),
    lambda parts: st.lists(parts, max_size=3).map(tuple),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STORABLE, min_size=1, max_size=6, unique=True))
def test_labels_come_back_with_their_types(small, file, labels):
    model = small().partial_fit(np.ones((len(labels), 5)), labels)
    model.save(file)
    loaded = PEC.load(file, device="cpu")
    assert repr(loaded.samples_seen_) == repr(model.samples_seen_)
    assert repr(loaded.classes_) == repr(model.classes_)
    assert loaded.classes_.dtype == model.classes_.dtype
    assert repr(saving.describe(file)["labels"]) == repr(list(model.samples_seen_))


@pytest.mark.parametrize(
    "labels",
    [[1, 2], [-(10**30), 10**30], [1.0, 2.0], [True, False], ["ä", "\ud800"], [None, (1, ("x",))]],
    ids=ascii,
)
def test_expected_samples_keep_their_labels(labels, small, file):
    model = small(expected_samples=dict.fromkeys(labels, 5)).fit(np.ones((2, 5)), labels)
    model.save(file)
    loaded = PEC.load(file, device="cpu")
    assert repr(loaded.expected_samples) == repr(dict.fromkeys(labels, 5))
    assert repr(loaded._expected) == repr(model._expected) == repr(dict.fromkeys(labels, 1))


def test_expected_samples_and_statistics_may_be_of_any_kind(small, clusters, file):
    x, y = clusters(labels=(1, 2))
    expected = {label: 5 for label in np.unique(y)}  # NumPy's own numbers
    mean = pd.Series([0.5, 1, 2, 3, 4])
    model = small(expected_samples=expected, mean=mean, std=(np.float32(2),)).fit(x, y)
    model.save(file)
    loaded = PEC.load(file, device="cpu")
    assert repr(loaded.expected_samples) == repr({1: 5, 2: 5})
    assert (loaded.mean, loaded.std) == ([0.5, 1, 2, 3, 4], [2])
    np.testing.assert_array_equal(loaded.errors(x), model.errors(x))


@pytest.mark.parametrize("label", [b"bytes", frozenset([1]), (1, b"x"), 1j], ids=repr)
def test_a_label_that_cannot_be_stored_is_refused(label, small, file):
    labels = np.empty(2, dtype=object)
    labels[:] = [label, "a"]
    model = small().fit(np.ones((2, 5)), labels)
    with pytest.raises(ValueError, match="cannot be saved: labels in a file may be numbers, texts"):
        model.save(file)
    assert list(file.parent.iterdir()) == []


def test_describe_tells_without_loading(saved, file):
    model, _ = saved
    about = saving.describe(file)
    assert about["model"] == "PEC" and about["format"] == saving.FORMAT
    assert set(about["labels"]) == {"a", "b", "c"}
    assert about["threshold"] == model.threshold_
    assert about["parameters"]["student_width"] == 4
    assert about["sizes"]["n_parameters"] == model.n_parameters_
    assert about["sizes"]["n_parameters_per_class"] == model.n_parameters_per_class_
    assert set(about["sizes"]) == {"n_parameters", "n_parameters_per_class"}


def test_parameters_are_described_as_they_were(clusters, file):
    teacher = RandomFeatures("relu")
    model = WhitenedPEC(teacher=teacher, dim=30).fit(*clusters())
    model.save(file)
    about = saving.describe(file)
    assert about["parameters"]["teacher"] == teacher
    assert about["sizes"] == {"n_parameters": model.n_parameters_, "n_features": 30}
    PEC(student_width=4, teacher_width=9, expected_samples={("a", 1): 5}).fit(*clusters()).save(
        file
    )
    assert saving.describe(file)["parameters"]["expected_samples"] == {("a", 1): 5}


def test_a_teacher_of_the_users_is_described_by_its_name(small, clusters, file):
    x, y = clusters(shape=SHAPE)
    small(teacher=torch.nn.Flatten(), output_dim=None, channels="first").fit(x, y).save(file)
    assert saving.describe(file)["parameters"]["teacher"] == "<Flatten>"


# ------------------------------------------------------------------------------- pickles


@pytest.mark.parametrize("options", [{}, {"ensemble": 2}, {"architecture": "conv", "pool": 2}])
@pytest.mark.parametrize(
    "copied", [lambda m: pickle.loads(pickle.dumps(m)), deepcopy], ids=["pickle", "deepcopy"]
)
def test_a_copy_is_a_model_of_its_own(copied, options, small, clusters, state):
    x, y = clusters(shape=SHAPE)
    model = small(channels="first", **options).fit(x, y).calibrate()
    copy = copied(model)
    assert state(copy) == state(model)
    assert copy.get_params() == model.get_params()
    assert copy.threshold_ == model.threshold_
    np.testing.assert_array_equal(copy.errors(x), model.errors(x))
    for each in (model, copy):
        each.partial_fit(x[:9], [*y[:8], "new"])
    assert state(copy) == state(model)


def test_a_pickle_does_not_hold_the_teacher(small):
    sizes = [
        len(pickle.dumps(small(teacher_width=width).fit(np.ones((2, 5)), [0, 1])))
        for width in (10, 5000)
    ]
    assert abs(sizes[1] - sizes[0]) < 100


def test_a_pickle_holds_the_users_teacher(small, clusters):
    x, y = clusters(shape=SHAPE)
    model = small(teacher=torch.nn.Flatten(), output_dim=None, channels="first").fit(x, y)
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.errors(x), model.errors(x))


def test_unfitted_models_are_pickled_and_cloned(small):
    model = small(ensemble=2)
    for copy in (pickle.loads(pickle.dumps(model)), clone(model)):
        assert copy.get_params() == model.get_params()
        assert not hasattr(copy, "classes_")


@pytest.mark.parametrize(
    "changed", [{"teacher_width": 60}, {"init": "xavier"}, {"random_state": 8}], ids=str
)
def test_parameters_set_after_learning_do_not_change_what_was_learned(
    changed, small, clusters, file
):
    """They are for the next fit; the model in hand stays, also as a pickle and as a file."""
    x, y = clusters()
    model = small().fit(x, y)
    expected = model.errors(x)
    model.set_params(**changed)
    np.testing.assert_array_equal(model.errors(x), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).errors(x), expected)
    model.save(file)
    np.testing.assert_array_equal(PEC.load(file, device="cpu").errors(x), expected)


# --------------------------------------------------------------------- teachers in files


def test_a_teacher_of_the_users_is_given_again(small, clusters, state, file):
    x, y = clusters(shape=SHAPE)
    options = {"teacher": torch.nn.Flatten(), "output_dim": None, "channels": "first"}
    model = small(**options).fit(x, y)
    model.save(file)
    with pytest.raises(ModelFileError, match=r"trained with the teacher <Flatten>.*teacher=…"):
        PEC.load(file)
    with pytest.raises(ModelFileError, match="the teacher here is not the one"):
        PEC.load(file, device="cpu", teacher=lambda x: 2 * x.flatten(1))
    loaded = PEC.load(file, device="cpu", teacher=flatten)
    assert loaded.teacher is flatten
    assert state(loaded) == state(model)
    np.testing.assert_array_equal(loaded.errors(x), model.errors(x))


def test_a_teacher_of_another_shape_is_refused(small, clusters, file):
    small(teacher=flatten, output_dim=None, channels="first").fit(*clusters(shape=SHAPE)).save(file)
    with pytest.raises(ModelFileError, match="the teacher here is not the one"):
        PEC.load(file, device="cpu", teacher=lambda x: x.flatten(1)[:, :7])


def test_a_random_teacher_is_not_given(saved, file):
    with pytest.raises(ModelFileError, match="trained with teacher .random.: do not give another"):
        PEC.load(file, teacher=flatten)


def test_another_drawing_of_the_teacher_is_noticed(saved, file, monkeypatch):
    monkeypatch.setattr(teacher, "fingerprint", lambda row: "0" * 64)
    with pytest.raises(ModelFileError, match="the teacher here is not the one .*checksum 000"):
        PEC.load(file, device="cpu")


# -------------------------------------------------------------------------- damaged files


def is_refused_or_equal(file, content, model, state):
    """Write the content; tell whether it is refused, and check that otherwise nothing changed."""
    file.write_bytes(content)
    try:
        loaded = PEC.load(file, device="cpu")
    except ModelFileError:
        return True
    assert state(loaded) == state(model)
    assert loaded.get_params() == model.get_params()
    assert loaded.threshold_ == model.threshold_
    assert loaded.seed_ == model.seed_ and loaded.input_shape_ == model.input_shape_
    return False


@pytest.mark.parametrize("mask", [0xFF, 0x01, 0x20, 0x05])
def test_a_flipped_byte_anywhere_is_noticed(mask, saved, state, file):
    model, content = saved
    (head,) = struct.unpack("<Q", content[:8])
    places = [*range(8 + head), *range(8 + head, len(content), 3), len(content) - 1]
    harmless = []
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= mask
        if not is_refused_or_equal(file, bytes(damaged), model, state):
            harmless.append(bytes(content[place : place + 1]))
    assert set(harmless) <= {b" "}  # white space of the head
    assert head > 1000 and len(places) > 2000


def test_a_truncated_file_is_noticed(saved, state, file):
    model, content = saved
    for length in [*range(0, 200), *range(200, len(content), 23), len(content) - 1]:
        assert is_refused_or_equal(file, content[:length], model, state), length


@pytest.mark.parametrize("tail", [b"\0", b" ", b"\0" * 4096, b"more"])
def test_a_file_with_more_at_its_end_is_noticed(tail, saved, state, file):
    model, content = saved
    assert is_refused_or_equal(file, content + tail, model, state)


def test_a_block_of_zeros_is_noticed(saved, state, file):
    """As a crash of the machine may leave it."""
    model, content = saved
    for start in range(0, len(content) - 512, 512):
        damaged = content[:start] + bytes(512) + content[start + 512 :]
        if damaged != content:
            assert is_refused_or_equal(file, damaged, model, state), start


def test_swapped_tensors_are_noticed(saved, file):
    _, content = saved
    damaged = content.replace(b'"0.first"', b'"0.xxxxx"').replace(b'"0.second"', b'"0.first"')
    assert damaged != content
    file.write_bytes(damaged.replace(b'"0.xxxxx"', b'"0.second"'))
    with pytest.raises(ModelFileError):
        PEC.load(file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        b"\0" * 100,
        b"hello, this is a text file\n" * 50,
        b"{}",
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4,
        b"PK\x03\x04" + bytes(200),
        b"\x80\x04\x95" + pickle.dumps({"a": 1}),
        safetensors.torch.save({"weight": torch.ones(3)}),
        safetensors.torch.save({"weight": torch.ones(3)}, {"format": "pt"}),
        safetensors.torch.save({"weight": torch.ones(3)}, {"pecil": "{}", "sha256": "00"}),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        struct.pack("<Q", 29) + b'{"__metadata__":{"pecil":[]}}',
    ],
    ids=lambda content: ascii(content[:12]),
)
@pytest.mark.parametrize("read", [PEC.load, saving.describe], ids=["load", "describe"])
def test_a_foreign_file_is_refused(read, content, file):
    file.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.pecil is (not a pecil model|damaged)"):
        read(file)


def test_a_model_is_told_from_other_files_even_if_it_cannot_be_read(saved, file):
    _, content = saved
    assert saving.is_model(file)
    file.write_bytes(content[:-9])
    assert saving.is_model(file)
    for other in (b"", b"x,label\n1,a\n" * 99, safetensors.torch.save({"w": torch.ones(3)})):
        file.write_bytes(other)
        assert not saving.is_model(file)


@pytest.mark.parametrize(("other", "whose"), [(1, "an older"), (3, "a newer")])
def test_another_format_is_refused(other, whose, small, clusters, file, monkeypatch):
    with monkeypatch.context() as then:
        then.setattr(saving, "FORMAT", other)
        small().fit(*clusters()).save(file)
    message = f"has format {other}, written by {whose} pecil.*reads format 2"
    with pytest.raises(ModelFileError, match=message):
        PEC.load(file)


def test_another_kind_of_model_is_refused(small, clusters, file):
    class Other(PEC):
        """Not a plain PEC."""

    Other(student_width=2, teacher_width=5).fit(*clusters()).save(file)
    with pytest.raises(ModelFileError, match="holds a Other, not a PEC"):
        PEC.load(file)


def test_a_model_file_error_is_a_value_error():
    assert issubclass(ModelFileError, ValueError)


# ----------------------------------------------------------------------------- in the way


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no model file .*nothing.pecil"):
        PEC.load(tmp_path / "nothing.pecil")
    with pytest.raises(FileNotFoundError, match="there is no model file"):
        PEC.load(tmp_path)


def test_a_missing_folder_is_named(small, clusters, tmp_path):
    model = small().fit(*clusters())
    with pytest.raises(FileNotFoundError, match="there is no folder .*missing"):
        model.save(tmp_path / "missing" / "model.pecil")
    assert list(tmp_path.iterdir()) == []


def test_only_a_fitted_model_is_saved(file):
    with pytest.raises(NotFittedError):
        PEC().save(file)
    assert list(file.parent.iterdir()) == []


@pytest.mark.parametrize("failure", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_failing_save_leaves_the_old_file(failure, saved, clusters, state, file, monkeypatch):
    model, content = saved
    before = state(model)

    def fail_half_way(tensors, path, metadata):
        shutil.copy(file, path)
        with open(path, "r+b") as half:
            half.truncate(100)
        raise failure

    model.partial_fit(*clusters(seed=1))
    monkeypatch.setattr(safetensors.torch, "save_file", fail_half_way)
    with pytest.raises(type(failure)):
        model.save(file)
    assert [path.name for path in file.parent.iterdir()] == ["model.pecil"]
    assert file.read_bytes() == content
    assert state(PEC.load(file, device="cpu")) == before


def test_files_are_plain_safetensors(saved, file):
    """Other tools can look inside: tensors by name, and metadata in JSON."""
    with safetensors.safe_open(file, "np") as content:
        assert sorted(content.keys()) == ["0.first", "0.second", "0.students", "recent"]
        assert json.loads(content.metadata()["pecil"])["model"] == "PEC"
        assert content.get_tensor("0.students").dtype == np.float32


def test_without_safetensors_the_extra_is_named(saved, file, monkeypatch):
    model, _ = saved
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for step in (lambda: PEC.load(file), lambda: model.save(file)):
        with pytest.raises(ImportError, match=r'pip install "pecil\[save\]"'):
            step()


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path, monkeypatch):

    def full(*_):
        raise safetensors.SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    model = PEC(random_state=0).fit(np.eye(4), [0, 1, 0, 1])
    with pytest.raises(OSError, match="cannot write .*m.pecil: .*No space left"):
        model.save(tmp_path / "m.pecil")
    assert list(tmp_path.iterdir()) == []
