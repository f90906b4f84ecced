"""PEC itself, readable next to the paper."""

from pecil.pec.estimator import PEC

__all__ = ["PEC"]
