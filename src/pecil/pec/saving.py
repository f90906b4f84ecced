"""Models as files: safetensors with JSON metadata, checked when read, never a pickle."""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pecil.files import written_whole
from pecil.pec.inputs import label_array, plain
from pecil.teachers import Filters, Identity, RandomFeatures, Synthetic

if TYPE_CHECKING:
    from pecil.pec.base import ErrorClassifier

FORMAT = 2
LONGEST = 2**27  # bytes of a head; safetensors reads none that is longer
SIZES = {  # numbers told without a model being made, and their attributes
    "n_parameters": "n_parameters_",
    "n_parameters_per_class": "n_parameters_per_class_",
    "n_features": "dim_",
}
Model = TypeVar("Model", bound="ErrorClassifier")
RECIPES: dict[str, Any] = {
    recipe.__name__: recipe for recipe in (Filters, Identity, RandomFeatures, Synthetic)
}


class ModelFileError(ValueError):
    """A model file is damaged, foreign, or needs what is not there."""


def save(model: "ErrorClassifier", path: str | os.PathLike[str], *, optimizer: bool = True) -> None:
    """Write ``model`` into one file."""
    save_file = _safetensors().save_file
    from safetensors import SafetensorError

    check_is_fitted(model, "classes_")
    values, tensors = model._state(optimizer)
    recent = [torch.from_numpy(errors) for errors in model._recent]
    tensors["recent"] = torch.cat(recent)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    about = {
        "format": FORMAT,
        "model": type(model).__name__,
        "sizes": {name: getattr(model, of) for name, of in SIZES.items() if hasattr(model, of)},
        "parameters": _parameters(model),
        "input_shape": model.input_shape_,
        "feature_names": getattr(model, "feature_names_in_", np.empty(0)).tolist(),
        "seed": model.seed_,
        "threshold": getattr(model, "threshold_", None),
        "labels": [_encode(label) for label in model._labels],
        "seen": model._seen,
        "recent": [len(errors) for errors in recent],
        "range": getattr(model, "_range", ""),
        "optimizer": optimizer,
        "teachers": [teacher.checksum for teacher in model._teachers],
        **_with_labels(values, _encode),
    }
    text = json.dumps(about)
    with written_whole(path) as temporary:
        try:
            save_file(tensors, temporary, {"pecil": text, "sha256": _digest(text, tensors)})
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from error


def _with_labels(values: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Encode or decode the labels of expected numbers of samples, wherever there are some."""
    changed = dict(values)
    for name in ("expected", "expected_samples"):
        if isinstance(values.get(name), list):
            changed[name] = [[change(label), int(n)] for label, n in values[name]]
    return changed


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    teacher: Callable[[Tensor], Tensor] | None = None,
) -> "ErrorClassifier":
    """Read a saved model of any kind; see :meth:`pecil.PEC.load`."""
    from pecil import PEC, WhitenedPEC

    about, tensors = _read(Path(path))
    for cls in (PEC, WhitenedPEC):
        if cls.__name__ == about["model"]:
            return _made(cls, Path(path), about, tensors, device, teacher)
    raise ModelFileError(f"{path} holds a {about['model']}, which this pecil does not know")


def load_as(
    cls: type[Model],
    path: str | os.PathLike[str],
    *,
    device: str | torch.device,
    teacher: Callable[[Tensor], Tensor] | None,
) -> Model:
    """Read a model of a certain kind, drawing its teachers anew."""
    about, tensors = _read(Path(path))
    if about["model"] != cls.__name__:
        raise ModelFileError(f"{path} holds a {about['model']}, not a {cls.__name__}")
    return _made(cls, Path(path), about, tensors, device, teacher)


def _made(
    cls: type[Model],
    path: Path,
    about: dict[str, Any],
    tensors: dict[str, Tensor],
    device: str | torch.device,
    teacher: Any,
) -> Model:
    """Make a model from what a file holds."""
    parameters = _decoded(about["parameters"])
    parameters["teacher"] = _teacher(path, parameters["teacher"], teacher)
    model = cls(**parameters | {"device": device})
    model.input_shape_ = tuple(about["input_shape"])
    model.n_features_in_ = int(np.prod(model.input_shape_))
    if about["feature_names"]:
        model.feature_names_in_ = np.asarray(about["feature_names"], dtype=object)
    model._range = about["range"]
    model.random_state = about["seed"]
    model._check_parameters()
    model._start()
    model.random_state = parameters["random_state"]
    _restore(model, path, about, tensors)
    return model


def _decoded(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that `_parameters` made fit for JSON; a callable stays a text."""
    parameters = _with_labels(saved, _decode)
    parameters["teacher"] = _recipe(parameters["teacher"])
    if isinstance(parameters.get("expected_samples"), list):
        parameters["expected_samples"] = dict(parameters["expected_samples"])
    return parameters


def _teacher(path: Path, saved: Any, given: Any) -> Any:
    """Return the teacher parameter of a saved model: what the file says, or the one given."""
    if isinstance(saved, str) and saved.startswith("<"):
        if given is None:
            raise ModelFileError(
                f"{path} was trained with the teacher {saved}, which the file cannot hold: give "
                "it as load(path, teacher=…)"
            )
        return given
    if given is not None:
        raise ModelFileError(f"{path} was trained with teacher {saved!r}: do not give another")
    return saved


def _restore(
    model: "ErrorClassifier", path: Path, about: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    for teacher, saved in zip(model._teachers, about["teachers"], strict=True):
        if not alike(teacher.checksum, saved):
            raise ModelFileError(
                f"{path}: the teacher here is not the one that the model was trained with "
                f"(checksum {teacher.checksum} instead of {saved})"
            )
    start = 0
    for label, seen, count in zip(about["labels"], about["seen"], about["recent"], strict=True):
        slot = model._add_class(_decode(label))
        model._seen[slot] = seen
        model._recent[slot] = tensors["recent"][start : start + count].numpy().copy()
        start += count
    model._set_state(_with_labels(about, _decode), tensors)
    if about["threshold"] is not None:
        model.threshold_ = about["threshold"]
    model._name_classes()


def alike(one: Any, other: Any) -> bool:
    """Tell whether two teachers' checksums agree: texts exactly, outputs up to rounding."""
    if not isinstance(one, list) or not isinstance(other, list):
        return bool(one == other)
    if len(one) != len(other):
        return False
    if all(isinstance(value, float) for value in (*one, *other)):
        return bool(np.allclose(one, other, rtol=1e-2, atol=2e-3))
    return all(map(alike, one, other))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read metadata and tensors; anything that is not exactly as written is an error."""
    safetensors = _safetensors()
    if not path.is_file():
        raise FileNotFoundError(f"there is no model file {path}")
    content = path.read_bytes()
    text, digest = _head(path, content)
    try:
        tensors = safetensors.load(content)
    except Exception as error:  # the library's own errors are many
        raise ModelFileError(f"{path} is damaged: {error}") from error
    if _digest(text, tensors) != digest:
        raise ModelFileError(f"{path} is damaged: its content does not match its checksum")
    about = json.loads(text)
    if about["format"] != FORMAT:
        whose = "a newer" if about["format"] > FORMAT else "an older"
        raise ModelFileError(
            f"{path} has format {about['format']}, written by {whose} pecil; this one reads "
            f"format {FORMAT}"
        )
    return about, tensors


def _head(path: Path, content: bytes) -> tuple[str, str]:
    """Return the metadata, as JSON, and the checksum that a model begins with."""
    try:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        metadata = header["__metadata__"]
        return metadata["pecil"], metadata["sha256"]
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelFileError(f"{path} is not a pecil model, or its head is damaged") from error


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata of a model file, labels and parameters decoded; no model is made."""
    about, _ = _read(Path(path))
    about["labels"] = label_array([_decode(label) for label in about["labels"]]).tolist()
    about["parameters"] = _decoded(about["parameters"])
    return about


def is_model(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file begins as a model does, of this format or another, whole or not."""
    with open(path, "rb") as file:
        content = file.read(LONGEST)
    try:
        _head(Path(path), content)
    except ModelFileError:
        return False
    return True


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _parameters(model: "ErrorClassifier") -> dict[str, Any]:
    """Return the constructor's parameters as JSON can hold them."""
    values = model.get_params(deep=False) | model._settings
    values["device"] = "auto"
    teacher = values["teacher"]
    if type(teacher) in RECIPES.values():
        values["teacher"] = _fields(teacher)
    elif not isinstance(teacher, str):
        values["teacher"] = f"<{type(teacher).__qualname__}>"
    if not isinstance(values["random_state"], int):
        values["random_state"] = model.seed_
    if isinstance(values.get("expected_samples"), Mapping):
        awaited = values["expected_samples"].items()
        values["expected_samples"] = [(plain(label), n) for label, n in awaited]
    return {name: _jsonable(value) for name, value in _with_labels(values, _encode).items()}


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array, a tensor, a series
        return value.tolist()
    if isinstance(value, dict):
        return {name: _jsonable(part) for name, part in value.items()}
    return [_jsonable(part) for part in value] if isinstance(value, list | tuple) else value


def _fields(value: Any) -> Any:
    """Return the fields of a recipe, and of recipes within it."""
    if type(value) not in RECIPES.values():
        return value
    own = {field.name: _fields(getattr(value, field.name)) for field in fields(value)}
    return {"recipe": type(value).__name__, **own}


def _recipe(value: Any) -> Any:
    """Make the recipe of which `_fields` returned the fields, as JSON holds them."""
    if isinstance(value, dict):
        own = {name: _recipe(part) for name, part in value.items() if name != "recipe"}
        return RECIPES[value["recipe"]](**own)
    return tuple(value) if isinstance(value, list) else value


def _encode(label: Any) -> Any:
    """Write a label so that JSON gives it back: plain values as they are, tuples marked."""
    if label is None or isinstance(label, bool | int | float | str):
        return label
    if isinstance(label, tuple):
        return {"tuple": [_encode(part) for part in label]}
    raise ValueError(
        f"the label {label!r} cannot be saved: labels in a file may be numbers, texts, None and "
        "tuples of these"
    )


def _decode(label: Any) -> Any:
    return tuple(_decode(part) for part in label["tuple"]) if isinstance(label, dict) else label


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            'saving and loading models needs safetensors: pip install "pecil[save]"'
        ) from error
    return safetensors.torch
