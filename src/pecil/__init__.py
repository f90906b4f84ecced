"""Learn new classes one at a time from a single pass over a stream, forgetting nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pecil.pec.balance import balance
    from pecil.pec.estimator import PEC
    from pecil.pec.imagine import imagine
    from pecil.pec.saving import ModelFileError, load
    from pecil.pec.whitened import WhitenedPEC

__all__ = ["PEC", "ModelFileError", "WhitenedPEC", "balance", "imagine", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import torch and scikit-learn only when a model is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'pecil' has no attribute {name!r}")
    from importlib import import_module

    homes = {"PEC": "estimator", "WhitenedPEC": "whitened"}
    homes |= {"balance": "balance", "imagine": "imagine"}
    return getattr(import_module(f"pecil.pec.{homes.get(name, 'saving')}"), name)
