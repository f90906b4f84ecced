"""Which models may become one."""

from typing import TYPE_CHECKING, Any

from sklearn.utils.validation import check_is_fitted

from pecil.pec.inputs import differ
from pecil.pec.saving import alike

if TYPE_CHECKING:
    from pecil.pec.base import ErrorClassifier

FREE = {"expected_samples", "random_state", "device", "channels", "epochs", "shuffle"}


def check_mergeable(
    model: "ErrorClassifier", other: "ErrorClassifier", what: str = "merge"
) -> None:
    """Raise ValueError, with the reason, unless two models had the same teacher and settings."""
    if type(other) is not type(model):
        raise ValueError(f"can only {what} a {type(model).__name__}, not {other!r}")
    check_is_fitted(model, "classes_")
    check_is_fitted(other, "classes_")
    _same(what, "input shape", model.input_shape_, other.input_shape_)
    if hasattr(model, "feature_names_in_") and hasattr(other, "feature_names_in_"):
        names = (list(one.feature_names_in_) for one in (model, other))
        _same(what, "feature_names_in_", *names)
    if differ(model._range, other._range):
        raise ValueError(
            f"cannot {what}: one learned from uint8, which is divided by 255, the other from "
            "numbers that are not"
        )
    mine, theirs = (one.get_params(deep=False) | one._settings for one in (model, other))
    both = callable(model.teacher) and callable(other.teacher)  # compared by what they answer
    for name in sorted(mine.keys() - FREE - ({"teacher"} if both else set())):
        _same(what, name, _plain(mine[name]), _plain(theirs[name]))
    if not callable(model.teacher):
        _same(what, "seed", model.seed_, other.seed_)
    for one, two in zip(model._teachers, other._teachers, strict=True):
        if not alike(one.checksum, two.checksum):
            _same(what, "teacher checksum", one.checksum, two.checksum)


def check_apart(model: "ErrorClassifier", other: "ErrorClassifier") -> None:
    """Raise ValueError if two models know the same class."""
    shared = [label for label in other._labels if label in model._slots]
    if shared:
        raise ValueError(
            f"cannot merge: both models know {', '.join(map(repr, shared[:10]))}; networks "
            "trained apart on the same class do not add up; forget it in one of them first"
        )


def _same(what: str, name: str, mine: Any, theirs: Any) -> None:
    if mine != theirs:
        raise ValueError(f"cannot {what}: {name} is {mine!r} here, but {theirs!r} in the other")


def _plain(value: Any) -> Any:
    """Make arrays, tensors and sequences comparable."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
