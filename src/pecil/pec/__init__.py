"""PEC itself, readable next to the paper."""

from pecil.pec.estimator import PEC
from pecil.pec.whitened import WhitenedPEC

__all__ = ["PEC", "WhitenedPEC"]
