"""From what users hold (arrays, tensors, frames; vectors, images) to float tensors."""

import math
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import DataConversionWarning
from sklearn.utils.validation import validate_data
from torch import Tensor

CHANNELS = (1, 3, 4)  # what "auto" takes for a channel axis
LARGEST = 1e8  # squares of squares of inputs must stay within float32
BEYOND = 2.0  # magnitudes above it are no bytes over 255
BYTES = ("bytes", "bits")
REFUSED = ({"bytes", "beyond"}, {"bits", "beyond"}, {"bits", ""})  # kinds of inputs
SMALL, USUAL = 0.05, 5.0  # root mean square of inputs, at least and at most
FEW = 8  # samples that may all be dark

Raw = NDArray[Any] | Tensor


def check_samples(estimator: Any, X: Any, *, reset: bool, layout: str) -> Raw:
    """Validate samples and bring images into the order (n, channels, height, width).

    Parameters
    ----------
    estimator : object
        Its ``input_shape_`` is set if ``reset``, else compared with.
    X : array-like or Tensor
        (n, features), (n, h, w), (n, h, w, c) or (n, c, h, w); numbers of any kind.
    reset : bool
    layout : {"auto", "first", "last"}
        Where the channel axis of four-dimensional input is.

    Returns
    -------
    ndarray or Tensor
        The samples as they came, uint8 or float32: no copy where none is needed.
    """
    _check_whole("X", X)
    table = not isinstance(X, Tensor) and _dimensions(X) < 3
    if table:
        raw = validate_data(estimator, X, reset=reset, dtype=[np.float32, np.uint8])
    else:
        raw = _channels_first(_numbers(X), layout)
    largest = max(float(raw.max()), -float(raw.min()))
    if largest > LARGEST:
        raise ValueError(
            f"X contains numbers too large to learn from: expected magnitudes up to {LARGEST:.0e}, "
            f"found {largest:.3g}; scale the data first"
        )
    shape = tuple(raw.shape[1:])
    if reset:
        estimator.input_shape_ = shape
        estimator.n_features_in_ = int(np.prod(shape))
        estimator._range = _range(raw, largest)
        if estimator._range == "bits":
            warnings.warn(
                "X is uint8, which is divided by 255, but its largest value is 1: if these are not "
                "images, give bool or float",
                UserWarning,
                stacklevel=4,
            )
        if not table and hasattr(estimator, "feature_names_in_"):
            del estimator.feature_names_in_
    elif shape != estimator.input_shape_:
        raise ValueError(
            f"X has samples of shape {shape}, but {type(estimator).__name__} is expecting "
            f"{estimator.input_shape_} (images as channels, height, width)"
        )
    elif differ(getattr(estimator, "_range", ""), _range(raw, largest)):
        learned, came = ("", " not") if estimator._range in BYTES else (" not", "")
        raise ValueError(
            f"X is{came} uint8, which is divided by 255, and has numbers up to {largest:.3g}, but "
            f"what {type(estimator).__name__} learned from was{learned} uint8: give it numbers of "
            "the same kind"
        )
    return raw


def _range(raw: Raw, largest: float) -> str:
    """Tell inputs apart of which some are divided by 255 and others are not."""
    if raw.dtype in (torch.uint8, np.uint8):
        return "bits" if largest == 1 and raw.ndim == 2 else "bytes"
    if largest > BEYOND:
        return "beyond"
    return "" if largest > 1 / 255 else "small"


def differ(one: str, other: str) -> bool:
    """Say whether what `_range` tells of two inputs is not of one kind."""
    return {one, other} in REFUSED


def warn_of_scale(x: Tensor) -> None:
    """Warn if inputs, as the model sees them, are far from the scale that it is made for."""
    size = float(x.square().mean().sqrt())
    if size > USUAL or (0 < size < SMALL and len(x) >= FEW):
        warnings.warn(
            f"inputs have a root mean square of {size:.3g}, where about 1 is expected: scale them, "
            "or give mean and std",
            UserWarning,
            stacklevel=4,
        )


def _check_whole(name: str, values: Any) -> None:
    """Refuse sparse tensors and arrays with masked entries: both hold less than they seem to."""
    if isinstance(values, Tensor) and values.layout != torch.strided:
        raise ValueError(
            f"Sparse data was passed for {name}, but dense data is required. Use '.to_dense()' to "
            "convert to a dense tensor."
        )
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise ValueError(
            f"{name} has masked entries, but every one is needed: fill them in (numpy.ma.filled), "
            "or leave out the samples that have them"
        )


def _dimensions(X: Any) -> int:
    return X.ndim if hasattr(X, "ndim") else np.asarray(X, dtype=object).ndim


def _numbers(X: Any) -> Raw:
    """Check that an array or tensor holds finite numbers; uint8 stays, all else is float32."""
    if isinstance(X, Tensor):
        complex_, real = X.is_complex(), True
        tensor = X.detach() if X.dtype == torch.uint8 else X.detach().real.to(torch.float32)
        raw: Raw = tensor
        finite = bool(torch.isfinite(tensor).all())
    else:
        array = np.asarray(X)
        complex_, real = array.dtype.kind == "c", array.dtype.kind in "buifO"
        if real and array.dtype != np.uint8:
            with np.errstate(over="ignore"):
                array = array.astype(np.float32, copy=False)
        raw = array
        finite = array.dtype.kind != "f" or bool(np.isfinite(array).all())
    if complex_:
        raise ValueError("Complex data not supported: X must hold real numbers")
    if not real:
        raise ValueError(f"X must hold numbers, but its dtype is {raw.dtype}")
    if raw.ndim not in (2, 3, 4):
        raise ValueError(
            "X must have shape (n, features), (n, h, w), (n, h, w, c) or (n, c, h, w), "
            f"but it has shape {tuple(raw.shape)}. Reshape your data"
        )
    if 0 in raw.shape:
        raise ValueError(
            f"X is empty: it has shape {tuple(raw.shape)}, a minimum of 1 sample and 1 feature "
            "is required"
        )
    if not finite:
        raise ValueError("X contains NaN, infinity or a value too large for dtype('float32')")
    return raw


def _channels_first(raw: Raw, layout: str) -> Raw:
    if raw.ndim == 2:
        return raw
    if raw.ndim == 3:
        return raw[:, None]
    first, last = raw.shape[1] in CHANNELS, raw.shape[3] in CHANNELS
    if layout == "auto":
        if not (first or last):
            raise ValueError(
                f"cannot tell the channel axis of images of shape {tuple(raw.shape)}: expected "
                f"{CHANNELS} channels first or last; say channels='first' or channels='last'"
            )
        layout = "first" if first and (isinstance(raw, Tensor) or not last) else "last"
    if layout == "first":
        return raw
    return raw.permute(0, 3, 1, 2) if isinstance(raw, Tensor) else raw.transpose(0, 3, 1, 2)


def to_tensor(
    raw: Raw, device: torch.device, mean: NDArray[Any] | None, std: NDArray[Any] | None
) -> Tensor:
    """Return float32 samples on the device: uint8 over 255, then (x − mean) / std."""
    if not isinstance(raw, Tensor):
        raw = torch.from_numpy(np.ascontiguousarray(raw) if raw.flags.writeable else raw.copy())
    x = raw.to(device).to(torch.float32)
    x = x / 255 if raw.dtype == torch.uint8 else x.clone() if x is raw else x
    axes = (-1,) + (1,) * (x.ndim - 2)
    if mean is not None:
        x -= torch.as_tensor(mean, dtype=torch.float32, device=device).view(axes)
    if std is not None:
        x /= torch.as_tensor(std, dtype=torch.float32, device=device).view(axes)
    return x.contiguous()


def check_statistics(name: str, value: Any, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """Validate ``mean`` or ``std``: None, one number, or one per channel (or feature)."""
    if value is None:
        return None
    try:
        array = np.array(np.asarray(value, dtype=np.float64), ndmin=1)  # a copy
        fits = array.ndim == 1 and len(array) in (1, shape[0]) and bool(np.isfinite(array).all())
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(
            f"{name} must be None, one finite number or {shape[0]} of them (one per channel or "
            f"feature), but it is {value!r}"
        )
    if name == "std" and (array < 1 / LARGEST).any():
        raise ValueError(f"std must be positive, at least {1 / LARGEST:.0e}, but it is {value!r}")
    if (abs(array) > LARGEST).any():
        raise ValueError(f"{name} must not exceed {LARGEST:.0e}, but it is {value!r}")
    return array


def check_labels(y: Any, n: int) -> list[Any]:
    """Return the labels of n samples as a list of plain hashable Python values."""
    if y is None:
        raise ValueError("requires y to be passed, but the target y is None")
    if isinstance(y, str | bytes):
        raise ValueError(f"y must hold one label for each sample, but it is {y!r}")
    nested = not isinstance(y, list | tuple) or any(isinstance(part, list) for part in y)
    labels = [plain(label) for label in (_array(y) if nested else y)]
    if len(labels) != n:
        raise ValueError(
            f"Found input variables with inconsistent numbers of samples: X has {n}, "
            f"y has {len(labels)}"
        )
    numbers = [label for label in labels if isinstance(label, float)]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("Input y contains NaN or infinity.")
    if missing := [*filter(_missing, set(labels))]:
        raise ValueError(f"y must hold one label for each sample, but it contains {missing[0]!r}")
    if len(numbers) == n and not all(label.is_integer() for label in numbers):
        raise ValueError(
            "Unknown label type: continuous. Expected classes, but y holds fractions such as "
            f"{next(label for label in numbers if not label.is_integer())!r}"
        )
    return labels


def plain(label: Any) -> Any:
    """Return a hashable label as plain Python: numbers of numpy become numbers of Python."""
    label = _unwrapped(label)
    try:
        hash(label)
    except TypeError:
        raise ValueError(f"labels must be hashable, but y contains {label!r}") from None
    return label


def _unwrapped(label: Any) -> Any:
    if isinstance(label, tuple):
        return tuple(_unwrapped(part) for part in label)
    if not isinstance(label, np.generic | np.ndarray | Tensor) or label.ndim:
        return label
    _check_whole("y", label)
    _check_no_times(label.dtype)
    return label.item()


def _missing(label: Any) -> bool:
    """Tell NaN, NaT and NA: alone of all labels, they do not equal themselves."""
    try:
        return bool(label != label)
    except (TypeError, RuntimeError):  # of NA, and of tensors that are no single label
        return True


def _check_no_times(dtype: Any) -> None:
    """Refuse dates and durations, whose unit a plain number would lose."""
    if getattr(dtype, "kind", None) in ("m", "M"):
        raise ValueError(
            f"labels must be numbers or text, but y holds {dtype}: convert them, say to text by "
            "astype(str)"
        )


def _array(y: Any) -> list[Any]:
    """Return the labels of an array, a tensor, a series or the like."""
    _check_whole("y", y)
    array = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    _check_no_times(getattr(y, "dtype", None))  # a time zone makes an array of objects of them
    _check_no_times(array.dtype)
    if array.ndim == 2 and array.shape[1] == 1:
        warnings.warn(
            "A column-vector y was passed when a 1d array was expected",
            DataConversionWarning,
            stacklevel=4,
        )
        array = array.ravel()
    if array.ndim != 1:
        raise ValueError(f"y should be a 1d array, got an array of shape {array.shape} instead")
    return array.tolist()


def label_array(labels: list[Any]) -> NDArray[Any]:
    """Return labels as a numpy array: of their natural type if they share one, else objects."""
    kinds = {type(label) for label in labels}
    if len(kinds) == 1 and kinds <= {int, float, str, bool, bytes}:
        array = np.array(labels)
        if [repr(label) for label in array.tolist()] == [repr(label) for label in labels]:
            return array
    array = np.empty(len(labels), dtype=object)
    array[:] = labels
    return array


def in_order(labels: list[Any]) -> list[int]:
    """Return the positions that sort the labels, or leave them where they have no order."""
    try:
        ordered = all(isinstance(label, int | float | str | bytes | tuple) for label in labels)
        return sorted(range(len(labels)), key=lambda k: labels[k] if ordered else k)
    except TypeError:
        return list(range(len(labels)))
