"""What PEC accepts as samples, labels and parameters, and how it refuses the rest."""

import decimal
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import DataConversionWarning, NotFittedError

from pecil import PEC, WhitenedPEC
from pecil.pec.teacher import CustomTeacher

FLOATS = ["float16", "float32", "float64"]
DTYPES = ["bool", "uint8", "int8", "int32", "int64", "uint16", *FLOATS]


# ------------------------------------------------------------------------------- samples


def whole_numbers(data, shape):
    """Draw an array that every dtype holds exactly."""
    seed = data.draw(st.integers(0, 1000), label="seed")
    return np.random.default_rng(seed).integers(0, 2, shape)


@given(st.data())
def test_dtype_and_container_make_no_difference(small, data):
    shape = data.draw(st.sampled_from([(6, 5), (4, 3, 6), (4, 5, 6, 3)]), label="shape")
    x = whole_numbers(data, shape)
    x[0].flat[0] = 1
    expected = small().fit(x.astype(np.float32), np.arange(len(x)) % 2).errors(x)
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    given_ = x.astype(dtype) * (255 if dtype == "uint8" else 1)
    if data.draw(st.booleans(), label="tensor") and dtype != "uint16":
        given_ = torch.from_numpy(given_)
    model = small().fit(given_, np.arange(len(x)) % 2)
    np.testing.assert_array_equal(model.errors(given_), expected)
    np.testing.assert_array_equal(model.errors(x), expected)


@given(st.data())
def test_vectors_and_images_of_every_layout(small, data):
    n, height, width = (data.draw(st.integers(1, 6)) for _ in range(3))
    channels = data.draw(st.sampled_from([1, 3, 4]))
    last = whole_numbers(data, (n, height, width, channels)).astype(np.float32)
    first = np.ascontiguousarray(last.transpose(0, 3, 1, 2))
    y = ["a", "b", "c"] * 2
    model = small(channels="last").fit(last, y[:n])
    assert model.input_shape_ == (channels, height, width)
    layouts = {"last": [last, torch.from_numpy(last)], "first": [first, torch.from_numpy(first)]}
    if channels == 1:
        layouts["auto"] = [last[..., 0], torch.from_numpy(last[..., 0])]
    if height not in (1, 3, 4) and width not in (1, 3, 4):
        layouts.setdefault("auto", []).extend(layouts["last"] + layouts["first"])
    expected = model.errors(last)
    for channel_axis, arrays in layouts.items():
        for x in arrays:
            other = small(channels=channel_axis).fit(x, y[:n])
            model.set_params(channels=channel_axis)
            np.testing.assert_array_equal(other.errors(x), expected)
            np.testing.assert_array_equal(model.errors(x), expected)


@pytest.mark.parametrize(
    ("container", "shape", "expected"),
    [
        (np.ones, (2, 3, 8, 8), (3, 8, 8)),
        (np.ones, (2, 8, 8, 3), (3, 8, 8)),
        (torch.ones, (2, 3, 8, 8), (3, 8, 8)),
        (torch.ones, (2, 8, 8, 3), (3, 8, 8)),
        (np.ones, (2, 3, 8, 4), (4, 3, 8)),  # could be either: arrays have channels last,
        (torch.ones, (2, 3, 8, 4), (3, 8, 4)),  # tensors have them first
        (np.ones, (2, 1, 8, 8), (1, 8, 8)),
        (np.ones, (2, 8, 7), (1, 8, 7)),
    ],
)
def test_auto_finds_the_channel_axis(container, shape, expected, small):
    assert small().fit(container(shape), [0, 1]).input_shape_ == expected


@pytest.mark.parametrize("n_features", [1, 2, 50])
def test_any_number_of_features(n_features, small):
    x = np.random.default_rng(0).normal(size=(4, n_features))
    assert small().fit(x, [0, 1, 0, 1]).errors(x).shape == (4, 2)


def test_a_batch_of_one(small):
    model = small().partial_fit(np.ones((1, 5)), ["only"])
    assert model.predict(np.zeros((1, 5))).tolist() == ["only"]
    assert model.predict_proba(np.zeros((1, 5))).tolist() == [[1.0]]
    assert model.samples_seen_ == {"only": 1}


def test_normalisation(small):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 3, 5, 5)).astype(np.float32), [0, 1] * 3
    mean, std = [1.0, 2.0, 3.0], [0.5, 1.0, 2.0]
    by_hand = (x - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    expected = small().fit(by_hand, y).errors(by_hand)
    for wrap in (list, tuple, np.array, torch.tensor):
        model = small(mean=wrap(mean), std=wrap(std)).fit(x, y)
        np.testing.assert_allclose(model.errors(x), expected, rtol=1e-3)
    scalar = small(mean=2, std=4).fit(x, y).errors(x)
    np.testing.assert_allclose(scalar, small().fit((x - 2) / 4, y).errors((x - 2) / 4), rtol=1e-3)


def test_normalisation_of_single_features(small):
    x, y = np.random.default_rng(0).normal(size=(6, 2)), [0, 1] * 3
    by_hand = (x - [1, 2]) / [3, 4]
    model = small(mean=[1, 2], std=[3, 4]).fit(x, y)
    np.testing.assert_allclose(model.errors(x), small().fit(by_hand, y).errors(by_hand), rtol=1e-3)


def test_uint8_is_scaled_before_it_is_normalised(small):
    x, y = np.random.default_rng(0).integers(0, 256, (6, 5, 5), dtype=np.uint8), [0, 1] * 3
    by_hand = (x / 255 - 0.1) / 0.3
    model = small(mean=0.1, std=0.3).fit(x, y)
    np.testing.assert_allclose(model.errors(x), small().fit(by_hand, y).errors(by_hand), rtol=1e-3)


LAYOUTS = {
    "backwards": np.arange(20.0).reshape(5, 4)[::-1],
    "by columns": np.asfortranarray(np.arange(20.0).reshape(5, 4)),
    "other byte order": np.arange(20.0).reshape(5, 4).astype(">f4"),
    "mirrored": np.arange(20, dtype=np.uint8).reshape(5, 4)[:, ::-1],
    "read only": np.broadcast_to(np.arange(4, dtype=np.float32), (5, 4)),
    "images with gaps": np.arange(60.0).reshape(5, 2, 6)[:, :, ::-2],
    "transposed tensor": torch.arange(20.0).reshape(4, 5).T,
    "tensor with gradient": torch.arange(20.0).reshape(5, 4).requires_grad_(),
    "nothing masked": np.ma.masked_equal(np.arange(20.0).reshape(5, 4), -1),
    "frame": pd.DataFrame(np.arange(20.0).reshape(5, 4)),
    "lists": np.arange(20).reshape(5, 4).tolist(),
    "lists of images": np.arange(60).reshape(5, 3, 4).tolist(),
}


@pytest.mark.parametrize("x", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.filterwarnings("ignore:inputs have a root mean square")
def test_any_memory_layout(x, small):
    plain = np.array(x.detach().numpy() if isinstance(x, torch.Tensor) else x, order="C")
    y = [0, 1, 0, 1, 0]
    expected = small().fit(plain, y).errors(plain)
    np.testing.assert_array_equal(small().fit(x, y).errors(x), expected)


@pytest.mark.parametrize("method", ["fit", "partial_fit"])
@pytest.mark.parametrize("kind", [PEC, WhitenedPEC])
def test_inputs_of_a_scale_that_no_teacher_is_made_for_are_told(kind, method):
    x, y = np.random.default_rng(0).normal(scale=100, size=(20, 5)), [0, 1] * 10
    size = {"teacher_width": 20} if kind is PEC else {"dim": 9}
    with pytest.warns(UserWarning, match=r"root mean square of [\d.]+, where about 1 is expected"):
        getattr(kind(**size), method)(x, y)
    getattr(kind(**size, std=100), method)(x, y)
    WhitenedPEC(teacher="identity").fit(x, y)  # which measures them itself


@pytest.mark.parametrize("kind", ["uint8", "float64"])
def test_bytes_and_the_same_numbers_of_another_kind_are_not_mixed(kind, small, tmp_path):
    """The one are divided by 255, the others are not."""
    x = np.random.default_rng(0).integers(0, 256, (20, 5)).astype(kind)
    other = x.astype({"uint8": "float64", "float64": "uint8"}[kind])
    model = small(**({} if kind == "uint8" else {"std": 255})).fit(x, [0, 1] * 10)
    model.save(tmp_path / "model.pecil")
    for one in (model, pickle.loads(pickle.dumps(model)), PEC.load(tmp_path / "model.pecil")):
        for wrong in (other, torch.from_numpy(other)):
            with pytest.raises(ValueError, match=r"X is.* uint8, which is divided by 255"):
                one.predict(wrong)
            with pytest.raises(ValueError, match="what PEC learned from was.* uint8"):
                one.partial_fit(wrong, [0, 1] * 10)
    if kind == "uint8":
        np.testing.assert_allclose(model.errors(other / 255), model.errors(x), rtol=1e-5)


def test_names_of_columns_are_remembered(small):
    frame = pd.DataFrame({"length": [1.0, 2.0], "width": [3.0, 4.0]})
    model = small().fit(frame, ["a", "b"])
    assert model.feature_names_in_.tolist() == ["length", "width"]
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame.rename(columns={"width": "height"}))
    model.fit(torch.ones(2, 2), ["a", "b"])
    assert not hasattr(model, "feature_names_in_")


# -------------------------------------------------------------------------------- labels


NUMBERS = st.integers() | st.sampled_from([2**63, 2**63 - 1, 2**64, 10**30, 10**30 + 1, -(10**30)])
KINDS = {
    "int": NUMBERS,
    "negative": st.integers(max_value=-1),
    "str": st.text(),
    "bool": st.booleans(),
    "tuple": st.tuples(st.integers(), st.text()) | st.tuples(),
    "bytes": st.binary(),
    "whole float": st.integers(-1000, 1000).map(float),
    "frozenset": st.frozensets(st.integers()),
}
PLAIN = NUMBERS | st.text() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
LABELS = st.sampled_from(list(KINDS)).flatmap(lambda k: st.lists(KINDS[k], min_size=1, max_size=8))
MIXED = st.lists(PLAIN | st.binary(), min_size=1, max_size=8)


def kept(labels):
    """Return labels as text that tells 1 from True and 1.0."""
    return [repr(label) for label in labels]


@settings(max_examples=100)
@given(LABELS | MIXED)
def test_any_hashable_labels(small, y):
    x = np.random.default_rng(0).normal(size=(len(y), 5))
    model = small().partial_fit(x, y)
    first = {label: label for label in reversed(y)}  # of equal labels, the first gives its name
    known, arrived = model.classes_.tolist(), list(dict.fromkeys(y))
    assert model.samples_seen_ == {label: y.count(label) for label in first}
    assert sorted(kept(known)) == sorted(kept(first[label] for label in first))
    assert set(kept(model.predict(x).tolist())) <= set(kept(known))
    try:
        assert known == (arrived if isinstance(y[0], frozenset) else sorted(arrived))
    except TypeError:  # they have no order
        assert known == arrived


@pytest.mark.parametrize(
    "y",
    [
        ["a", "a\0"],
        [b"a", 1],
        [2**63, -1],
        [True, 5],
        [2**53 + 1, 1.0],
    ],
    ids=repr,
)
def test_labels_are_not_changed_on_the_way_in(y, small):
    model = small().partial_fit(np.ones((2, 5)), y)
    assert kept(model.samples_seen_) == kept(y)


def test_numpy_numbers_become_plain_ones(small):
    y = [np.int64(1), "a", np.float32(2.0), (np.int64(3), "b"), np.bool_(False)]
    model = small().partial_fit(np.ones((5, 5)), y)
    assert kept(model.samples_seen_) == kept([1, "a", 2.0, (3, "b"), False])


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=8), st.data())
def test_any_container_of_labels(small, state, y, data):
    x = np.random.default_rng(0).normal(size=(len(y), 5))
    contain = data.draw(
        st.sampled_from(
            [
                tuple,
                np.array,
                torch.tensor,
                pd.Series,
                lambda y: pd.Series(y, index=range(10, 10 + len(y))),
                lambda y: np.array(y, dtype=object),
                lambda y: np.array(y, dtype=np.int8),
                lambda y: pd.Series(y, dtype="category"),
                lambda y: pd.Series(y, dtype="Int64"),
            ]
        )
    )
    model = small().fit(x, contain(y))
    assert state(model) == state(small().fit(x, y))
    assert kept(model.samples_seen_) == kept(dict.fromkeys(y))


@pytest.mark.parametrize("dtype", ["str", "category", object])
def test_series_of_text(dtype, small):
    y = pd.Series(["cat", "dog", "cat"], dtype=dtype)
    assert small().fit(np.ones((3, 5)), y).samples_seen_ == {"cat": 2, "dog": 1}


def test_a_column_of_labels_is_flattened_with_a_warning(small):
    with pytest.warns(DataConversionWarning, match="column-vector y"):
        model = small().fit(np.ones((3, 5)), [[1], [2], [1]])
    assert model.samples_seen_ == {1: 2, 2: 1}


@pytest.mark.parametrize(
    "labels",
    [(1, 2), ("a", "b"), (True, False), ((1, 2), (3, 4)), (None, 1), ("a", 1), (10**30, 1)],
    ids=str,
)
def test_labels_of_any_kind_can_be_scored(labels, small, clusters):
    x, y = clusters(labels=labels)
    model = small().fit(x, y)
    right = [p == label for p, label in zip(model.predict(x).tolist(), y, strict=True)]
    assert model.score(x, y) == np.mean(right) > 0.9
    assert model.score(x, y[1:] + y[:1]) < 0.9
    weight = np.arange(len(y))
    assert model.score(x, y, weight) == pytest.approx(np.average(right, weights=weight))


def test_labels_that_cannot_be_sorted_keep_their_order(small):
    y = ["b", 3, None, "a", (1, 2)]
    model = small().fit(np.ones((5, 5)), y)
    assert model.classes_.tolist() == y
    assert model.classes_.dtype == object


@pytest.mark.parametrize(
    ("y", "kind"), [([2, 1], "i"), (["b", "a"], "U"), ([True, False], "b"), ([10**30, 1], "O")]
)
def test_classes_have_their_natural_dtype(y, kind, small):
    model = small().fit(np.ones((2, 5)), y)
    assert model.classes_.dtype.kind == kind
    assert model.classes_.tolist() == sorted(y)
    assert model.predict(np.ones((2, 5))).dtype == model.classes_.dtype


# ---------------------------------------------------------------------------- refusals


def spoiled(value, *shape):
    x = np.ones(shape)
    x.flat[-1] = value
    return x


BAD_SAMPLES = {
    "NaN": (spoiled(np.nan, 2, 5), "NaN"),
    "infinity": (spoiled(np.inf, 2, 5), "infinity"),
    "NaN in an image": (spoiled(np.nan, 2, 4, 4), "NaN"),
    "infinity in an image": (spoiled(-np.inf, 2, 3, 4, 4), "infinity"),
    "NaN in a tensor": (torch.tensor(spoiled(np.nan, 2, 5)), "NaN"),
    "too large": (spoiled(1e300, 2, 4, 4), "too large for dtype"),
    "too large in a tensor": (torch.tensor(spoiled(1e300, 2, 5)), "too large for dtype"),
    "no samples": (np.ones((0, 5)), "0 sample"),
    "no features": (np.ones((2, 0)), "0 feature"),
    "no images": (np.ones((0, 4, 4)), r"empty: it has shape \(0, 4, 4\)"),
    "no pixels": (np.ones((2, 0, 4)), r"empty: it has shape \(2, 0, 4\)"),
    "empty tensor": (torch.ones(0, 5), r"empty: it has shape \(0, 5\)"),
    "1-D": (np.ones(2), "Expected 2D array, got 1D array"),
    "1-D tensor": (torch.ones(2), r"shape \(n, features\).* but it has shape \(2,\)"),
    "5-D": (np.ones((2, 1, 1, 1, 1)), r"but it has shape \(2, 1, 1, 1, 1\)"),
    "5-D tensor": (torch.ones(2, 1, 1, 1, 1), r"but it has shape \(2, 1, 1, 1, 1\)"),
    "nothing": (None, "Expected 2D array"),
    "a number": (7, "Expected 2D array"),
    "text": (np.array([["a", "b"], ["c", "d"]]), "could not convert string to float"),
    "text images": (np.full((2, 3, 3), "a"), "X must hold numbers, but its dtype is <U1"),
    "dates": (np.zeros((2, 3, 3), "datetime64[s]"), "X must hold numbers"),
    "complex": (np.ones((2, 5), complex), "Complex data not supported"),
    "complex images": (np.ones((2, 3, 3), complex), "Complex data not supported"),
    "complex tensor": (torch.ones(2, 5, dtype=torch.complex64), "Complex data not supported"),
    "masked": (np.ma.masked_equal(np.arange(10.0).reshape(2, 5), 3), "X has masked entries"),
    "masked images": (np.ma.masked_less(np.ones((2, 4, 4)), 2), "X has masked entries"),
    "sparse tensor": (torch.eye(2).to_sparse(), "Sparse data was passed for X, but dense data"),
    "sparse images": (torch.ones(2, 3, 3).to_sparse(), "Sparse data was passed for X"),
    "ragged": ([[1, 2], [3]], "inhomogeneous shape"),
    "which axis": (np.ones((2, 5, 6, 7)), "cannot tell the channel axis .* channels='first'"),
}


@pytest.mark.parametrize(("x", "message"), BAD_SAMPLES.values(), ids=BAD_SAMPLES)
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_bad_samples_are_refused(method, x, message, small):
    with pytest.raises(ValueError, match=message):
        getattr(small(), method)(x, ["a", "b"])


@pytest.mark.parametrize(("x", "message"), BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_bad_samples_change_nothing(x, message, small, clusters, state):
    model = small().fit(*clusters())
    before, known = state(model), model.errors(clusters()[0])
    with pytest.raises(ValueError):
        model.partial_fit(x, ["a", "new"])
    for method in ("errors", "predict", "predict_proba", "decision_function", "novelty"):
        with pytest.raises(ValueError):
            getattr(model, method)(x)
    assert state(model) == before
    np.testing.assert_array_equal(model.errors(clusters()[0]), known)


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [("mlp", (5,)), ("linear", (5,)), ("mlp", (3, 6, 6)), ("conv", (3, 6, 6))],
    ids=str,
)
@pytest.mark.parametrize("value", [1e18, 1e30, 3e38])
def test_a_huge_sample_does_not_poison_the_model(value, architecture, shape, small, clusters):
    """It is finite, so it comes in; or it is refused. But it breaks no student for good."""
    x, y = clusters(shape=shape, n=40)
    model = small(architecture=architecture, pool=2).partial_fit(x, y)
    huge = x[:1].copy()
    huge.flat[::2] = value
    try:
        model.partial_fit(huge, y[:1])
    except ValueError as refusal:
        assert "large" in str(refusal)
    broken = [label for label, e in zip("abc", model.errors(x).T, strict=True) if np.isnan(e).any()]
    assert not broken
    assert set(model.predict(x)) == set("abc")


@pytest.mark.parametrize(
    ("learned", "given_", "message"),
    [
        ((5,), (6,), "X has 6 features, but PEC is expecting 5 features"),
        ((64,), (8, 8), r"shape \(1, 8, 8\), but PEC is expecting \(64,\)"),
        ((8, 8), (64,), r"shape \(64,\), but PEC is expecting \(1, 8, 8\)"),
        ((8, 8), (8, 8, 3), r"shape \(3, 8, 8\), but PEC is expecting \(1, 8, 8\)"),
        ((8, 8, 3), (7, 8, 3), r"shape \(3, 7, 8\), but PEC is expecting \(3, 8, 8\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("container", [np.ones, torch.ones], ids=["array", "tensor"])
def test_another_shape_is_refused(container, learned, given_, message, small, state):
    model = small().fit(container((2, *learned)), [0, 1])
    before = state(model)
    if container is torch.ones:
        message = message.replace("6 features", r"samples of shape \(6,\)")
        message = message.replace("5 features", r"\(5,\)")
    for learn_or_score in (model.predict, lambda x: model.partial_fit(x, [0, 1])):
        with pytest.raises(ValueError, match=message):
            learn_or_score(container((2, *given_)))
    assert state(model) == before
    assert model.fit(container((2, *given_)), [0, 1]).predict(container((2, *given_))).shape == (2,)


BAD_LABELS = {
    "too few": ([1], "inconsistent numbers of samples: X has 2, y has 1"),
    "too many": ([1, 2, 3], "inconsistent numbers of samples: X has 2, y has 3"),
    "none": (None, "requires y to be passed, but the target y is None"),
    "one": (3, r"y should be a 1d array, got an array of shape \(\)"),
    "text": ("ab", "y must hold one label for each sample, but it is 'ab'"),
    "continuous": ([0.5, 1.5], "Unknown label type: continuous"),
    "NaN": ([1.0, np.nan], "NaN"),
    "infinite": ([1.0, np.inf], "NaN or infinity"),
    "NaN among others": (["a", np.nan], "NaN"),
    "missing in a series": (pd.Series(["a", None], dtype="str"), "NaN"),
    "missing number in a series": (pd.Series([1, None], dtype="Int64"), "NaN"),
    "missing text": (pd.Series(["a", pd.NA], dtype="string"), "one label for.* contains <NA>"),
    "NA": (["a", pd.NA], "one label for each sample, but it contains <NA>"),
    "NaT": (["a", pd.NaT], "one label for each sample, but it contains NaT"),
    "NaN of another kind": ([1, decimal.Decimal("NaN")], "but it contains Decimal"),
    "several": ([torch.zeros(2), torch.ones(2)], r"but it contains tensor\("),
    "masked": (np.ma.array([1, 2], mask=[False, True]), "y has masked entries"),
    "masked one by one": ([1, np.ma.masked], "y has masked entries"),
    "sparse": (torch.tensor([0, 1]).to_sparse(), "Sparse data was passed for y"),
    "dates": (np.array(["2020", "2021"], "M8[ns]"), r"numbers or text, but y holds datetime64\[ns"),
    "days": (np.array(["2020", "2021"], "M8[D]"), r"y holds datetime64\[D"),
    "NaT array": (np.array(["NaT", "NaT"], "M8[s]"), "numbers or text, but y holds datetime64"),
    "dates one by one": ([np.datetime64(1, "ns"), np.datetime64(2, "ns")], "y holds datetime64"),
    "NaT one by one": ([1, np.datetime64("NaT")], "y holds datetime64"),
    "dates in tuples": ([(1, np.datetime64(1, "ns")), 2], "y holds datetime64"),
    "durations": (np.array([1, 2], "m8[s]"), r"y holds timedelta64\[s\]: convert them"),
    "dates in a series": (pd.Series(pd.to_datetime(["2020", "2021"])), "y holds datetime64"),
    "zoned dates": (pd.to_datetime(["2020", "2021"], utc=True), "y holds datetime64.*UTC"),
    "categories of dates": (pd.Categorical(pd.to_datetime(["2020", "2021"])), "y holds datetime64"),
    "two columns": ([[1, 2], [3, 4]], r"y should be a 1d array, got an array of shape \(2, 2\)"),
    "lists": (np.array([[1], [1, 2]], dtype=object), r"must be hashable, but y contains \[1\]"),
    "sets": ([{1}, {2}], "must be hashable, but y contains {1}"),
    "tuple of lists": ([(1, []), (2, [])], r"must be hashable, but y contains \(1, \[\]\)"),
}


@pytest.mark.parametrize(("y", "message"), BAD_LABELS.values(), ids=BAD_LABELS)
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_bad_labels_are_refused(method, y, message, small):
    with pytest.raises(ValueError, match=message):
        getattr(small(), method)(np.ones((2, 5)), y)


@pytest.mark.parametrize(
    ("x", "y", "parameters"),
    [
        (np.ones((2, 7)), ["a"], {}),
        (np.ones((2, 7)), ["a", "b"], {"architecture": "conv"}),
        (np.ones((2, 7)), ["a", "b"], {"mean": [1, 2]}),
        (np.ones((2, 7)), ["a", "b"], {"budget": 9, "output_dim": None}),
    ],
    ids=["labels", "architecture", "mean", "budget"],
)
def test_a_refused_fit_leaves_the_model_as_it_was(x, y, parameters, small, clusters, state):
    model = small().fit(*clusters())
    before, known = state(model), model.errors(clusters()[0])
    with pytest.raises(ValueError):
        model.set_params(**parameters).fit(x, y)
    model.set_params(**small().get_params())
    assert state(model) == before
    np.testing.assert_array_equal(model.errors(clusters()[0]), known)


def test_after_a_refused_start_another_shape_may_come(small):
    model = small()
    with pytest.raises(ValueError, match="inconsistent"):
        model.partial_fit(np.ones((2, 7)), ["a"])
    assert model.partial_fit(np.ones((2, 3, 4)), ["a", "b"]).input_shape_ == (1, 3, 4)


@pytest.mark.parametrize("y", [y for y, _ in BAD_LABELS.values()], ids=BAD_LABELS)
def test_bad_labels_change_nothing(y, small, clusters, state):
    model = small().fit(*clusters())
    before = state(model)
    with pytest.raises(ValueError):
        model.partial_fit(np.ones((2, 5)), y)
    assert state(model) == before


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"architecture": "rnn"}, "architecture must be one of auto, mlp, conv, linear.*'rnn'"),
        ({"architecture": None}, "architecture must be one of auto, mlp, conv, linear.*None"),
        ({"architecture": "conv"}, "'conv' needs images.*vectors of 5 features; choose 'mlp'"),
        ({"activation": "tanh"}, "activation must be one of auto, gelu, relu, identity.*'tanh'"),
        ({"init": "ones"}, "init must be one of kaiming, xavier, uniform0.001.*'ones'"),
        ({"schedule": "cosine"}, "schedule must be one of linear, constant, but it is 'cosine'"),
        ({"channels": "middle"}, "channels must be one of auto, first, last.*'middle'"),
        ({"teacher": "big"}, "teacher must be .*random.*'big'"),
        ({"hidden_layers": 0}, "hidden_layers must be a whole number of at least 1.*is 0"),
        ({"ensemble": 0}, "ensemble must be a whole number of at least 1, but it is 0"),
        ({"batch_size": 1.5}, "batch_size must be a whole number of at least 1, but it is 1.5"),
        ({"batch_size": True}, "batch_size must be a whole number of at least 1.*True"),
        ({"epochs": -1}, "epochs must be a whole number of at least 1, but it is -1"),
        ({"student_width": 0}, "student_width must be a whole number of at least 1.*is 0"),
        ({"teacher_width": "big"}, "teacher_width must be a whole number of at least 1.*'big'"),
        ({"output_dim": -3}, "output_dim must be a whole number of at least 1, but it is -3"),
        ({"pool": 0}, "pool must be a whole number of at least 1, but it is 0"),
        ({"budget": 0, "output_dim": None}, "budget must be a whole number of at least 1.*is 0"),
        ({"budget": 9, "output_dim": None}, "budget=9 .* too small: .* needs at least 37"),
        ({"budget": 100}, "give either budget or output_dim"),
        ({"teacher": abs}, "a callable teacher sets output_dim"),
        ({"equal_budgets": 0}, "equal_budgets must be a whole number of at least 1.*is 0"),
        ({"equal_budgets": "yes"}, "equal_budgets must be a whole number of at least 1.*'yes'"),
        ({"lr": 0}, "lr must be a positive number, but it is 0"),
        ({"lr": float("nan")}, "lr must be a positive number, but it is nan"),
        ({"lr": float("inf")}, "lr must be a positive number, but it is inf"),
        ({"lr": "fast"}, "lr must be a positive number, but it is 'fast'"),
        ({"lr": decimal.Decimal(1)}, "lr must be a positive number, but it is"),
        ({"expected_samples": 0}, "expected_samples must be a whole number of at least 1.*is 0"),
        ({"expected_samples": {"a": 0.5}}, "expected_samples must be a whole number.*is 0.5"),
        ({"mean": [1, 2]}, r"mean must be None, one finite number or 5 of them.*\[1, 2\]"),
        ({"mean": float("nan")}, "mean must be None, one finite number or 5 of them.*nan"),
        ({"mean": "grey"}, "mean must be None, one finite number or 5 of them.*'grey'"),
        ({"std": [[1] * 5]}, "std must be None, one finite number or 5 of them"),
        ({"std": 0}, "std must be positive, at least 1e-08, but it is 0"),
        ({"std": [1, 1, 1, 1, -1]}, "std must be positive, at least 1e-08, but it is"),
        ({"random_state": -1}, "random_state .*-1"),
        ({"random_state": "dice"}, "'dice' cannot be used to seed"),
        ({"device": "gpu"}, "device .*'gpu'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_bad_parameters_are_refused(method, parameters, message, small):
    with pytest.raises(ValueError, match=message):
        getattr(small(**parameters), method)(np.ones((2, 5)), ["a", "b"])


@pytest.mark.parametrize(
    "name",
    ["student_width", "teacher_width", "output_dim", "pool", "hidden_layers", "ensemble"]
    + ["batch_size", "epochs", "equal_budgets", "expected_samples", "random_state", "budget"],
)
@pytest.mark.parametrize("architecture", ["mlp", "conv"])
def test_numpy_numbers_are_parameters_too(architecture, name, small, clusters, state, tmp_path):
    """A grid of parameters is often an array."""
    x, y = clusters(shape=(3, 5, 6))
    usual = {"architecture": architecture, "channels": "first"}
    value = 500 if name == "budget" else 2
    if name == "budget":
        usual["output_dim"] = None
    plain = small(**usual | {name: value}).fit(x, y)
    model = small(**usual | {name: np.int64(value)}).fit(x, y)
    assert state(model) == state(plain)
    np.testing.assert_array_equal(model.errors(x), plain.errors(x))
    model.save(tmp_path / "model.pecil")
    assert state(PEC.load(tmp_path / "model.pecil", device="cpu")) == state(plain)
    assert state(plain.partial_fit(x, y)) == state(model.partial_fit(x, y))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said_to_be_missing(small):
    with pytest.raises(ValueError, match="device .*'cuda'"):
        small(device="cuda").fit(np.ones((2, 5)), ["a", "b"])


@pytest.mark.parametrize("device", ["meta", "tpu", 1.5])
@pytest.mark.parametrize("kind", [PEC, WhitenedPEC])
def test_other_devices_are_refused(kind, device):
    with pytest.raises(
        ValueError, match=f"device must be 'auto', 'cpu' or 'cuda', but it is .*{device}"
    ):
        kind(device=device).fit(np.ones((2, 5)), ["a", "b"])


@pytest.mark.parametrize(
    "method",
    ["predict", "predict_proba", "decision_function", "errors", "novelty", "score_samples"],
)
def test_nothing_is_predicted_before_learning(method):
    with pytest.raises(NotFittedError, match="not fitted yet"):
        getattr(PEC(), method)(np.ones((2, 5)))


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m.calibrate(),
        lambda m: m.forget("a"),
        lambda m: m.samples_seen_,
        lambda m: m.n_parameters_,
        lambda m: m.n_parameters_per_class_,
        lambda m: m.score(np.ones((2, 5)), ["a", "b"]),
    ],
    ids=["calibrate", "forget", "samples_seen_", "n_parameters_", "per class", "score"],
)
def test_nothing_is_told_before_learning(ask):
    with pytest.raises(NotFittedError, match="not fitted yet"):
        ask(PEC())


def test_a_custom_teacher_is_asked_in_batches():
    asked = []
    teacher = CustomTeacher(lambda x: asked.append(len(x)) or x, (5,), torch.device("cpu"))
    x = torch.rand(600, 5)
    assert torch.equal(teacher(x), x)
    assert asked == [2, 256, 256, 88]


@pytest.mark.parametrize("kind", [PEC, WhitenedPEC])
def test_bytes_of_bits_are_told_and_not_mixed_with_numbers(kind):
    bits = np.random.default_rng(0).integers(0, 2, (30, 12), dtype=np.uint8)
    y = np.arange(30) % 2
    with pytest.warns(UserWarning, match="uint8, which is divided by 255, but its largest .* is 1"):
        model = kind(random_state=0).fit(bits, y)
    assert model.predict(bits).shape == (30,)
    with pytest.raises(ValueError, match="not uint8.* but what .* learned from was uint8"):
        model.predict(bits.astype(float))
    other = kind(random_state=0).fit(bits.astype(bool), y)
    assert (other.predict(bits.astype(int)) == other.predict(bits.astype(bool))).all()
    with pytest.raises(ValueError, match="X is uint8.* learned from was not uint8"):
        other.predict(bits)
    assert model.predict(np.zeros((2, 12))).shape == (2,)


def test_inputs_that_are_far_too_small_are_told():
    x, y = np.random.default_rng(0).random((20, 4)), np.arange(20) % 2
    with pytest.warns(UserWarning, match=r"root mean square of 0.00\d+, where about 1 is expected"):
        PEC(random_state=0).fit(x / 100, y)
    PEC(random_state=0).partial_fit(x[:1] / 100, y[:1]).partial_fit(np.zeros((20, 4)), y)
