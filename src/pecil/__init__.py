"""Learn new classes one at a time from a single pass over a stream, forgetting nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pecil.pec.estimator import PEC
    from pecil.pec.saving import ModelFileError, load
    from pecil.pec.whitened import WhitenedPEC

__all__ = ["PEC", "ModelFileError", "WhitenedPEC", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import torch and scikit-learn only when a model is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'pecil' has no attribute {name!r}")
    from pecil.pec import estimator, saving, whitened

    homes: dict[str, Any] = {"PEC": estimator, "WhitenedPEC": whitened}
    return getattr(homes.get(name, saving), name)
