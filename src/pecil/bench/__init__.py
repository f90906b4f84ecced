"""The benchmark: an experiment becomes a result, results become tables."""

from pecil.bench.experiment import Experiment, Result, planned, run

__all__ = ["Experiment", "Result", "planned", "run"]
