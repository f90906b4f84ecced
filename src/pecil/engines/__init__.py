"""Engines: where experiments are carried out.

Each is a module with one function of one signature::

    run_all(experiments, store, *, workers=None, retries=1, within=None, progress=None) -> Report

It runs experiments that are not in the store yet and adds their results to it. A worker that
dies is replaced and its experiment tried again, ``retries`` times; an experiment that raises is
reported and does not stop the others. After ``within`` seconds nothing begins any more, and what
is still under way is dropped. ``progress`` is called with the number of experiments that are over
and the number in all.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from pecil.bench.experiment import Experiment

ENGINES = ("local", "ray")


@dataclass(frozen=True)
class Failure:
    """An experiment without a result, and why."""

    experiment: Experiment
    reason: str
    """A traceback, or what became of the worker."""


@dataclass(frozen=True)
class Report:
    """What became of the experiments of a sweep."""

    done: tuple[str, ...]
    """The keys of those whose results are in the store now."""
    failed: tuple[Failure, ...] = ()


def engine(name: str) -> Callable[..., Report]:
    """Return the `run_all` of an engine.

    >>> engine("local").__module__
    'pecil.engines.local'
    """
    if name not in ENGINES:
        raise ValueError(f"expected an engine out of {', '.join(ENGINES)}, got {name!r}")
    run_all: Callable[..., Report] = importlib.import_module(f"pecil.engines.{name}").run_all
    return run_all
