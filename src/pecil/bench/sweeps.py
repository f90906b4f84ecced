"""Sweeps: the experiments that fill a table or make a figure, and how long they will take."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import numpy as np

from pecil.bench.experiment import Experiment, Result, planned
from pecil.bench.figures import FIGURES, Figure
from pecil.bench.search import grid_for
from pecil.bench.tables import Cell, cells
from pecil.data import DATASETS
from pecil.methods import METHODS

SEEDS = 10  # of the paper: 1 to 10


def experiments(table: str, only: Sequence[str] = (), seeds: int = SEEDS) -> list[Experiment]:
    """Return what fills a table, dataset by dataset.

    Parameters
    ----------
    table : str
        See `pecil.bench.tables.definitions`.
    only : sequence of str
        Cells as DATASET/ROW, a row by its own name or, if none has it, by that of its method;
        ``*`` stands for anything. By default all that can be run; datasets that are said to be
        absent are left out unless their own name is given.
    seeds : int
        The seeds are 1 to this number, as in the paper.

    Examples
    --------
    >>> [e.seed for e in experiments("table1", ["mnist/pec"], seeds=2)]
    [1, 2]
    """
    if seeds < 1:
        raise ValueError(f"expected one seed or more, got {seeds}")
    asked = cells(table, [])
    meant = {pattern: _matching(asked, pattern) for pattern in only}
    for pattern, matching in meant.items():
        if not matching:
            raise ValueError(
                f"table {table} has no cell {pattern}: expected DATASET/ROW with a dataset out of "
                f"{_listed(cell.dataset for cell in asked)} and a row out of "
                f"{_listed(cell.name for cell in asked if cell.to_run)}"
            )
    chosen = [c for c in asked if not only or any(c in matching for matching in meant.values())]
    there = [c for c in chosen if not c.absent or any(p.startswith(c.dataset) for p in only)]
    found = [cell.experiment for cell in there if cell.experiment and _possible(cell.experiment)]
    if not found:
        raise ValueError(
            f"none of these can be run: {_listed(f'{c.dataset}/{c.name}' for c in chosen)}"
        )
    places = list(dict.fromkeys(cell.dataset for cell in asked))
    found.sort(key=lambda experiment: places.index(experiment.dataset))
    every = [replace(experiment, seed=seed) for experiment in found for seed in range(1, seeds + 1)]
    return list({experiment.key: experiment for experiment in every}.values())


def for_figure(
    name: str,
    only: Sequence[str] = (),
    seeds: int = SEEDS,
    results: Iterable[Result] = (),
    failed: Collection[str] = (),
) -> list[Experiment]:
    """Return what a figure needs next.

    At a place where settings differ from the usual ones the learning rate is chosen first, as the
    paper does it: one seed, held-out samples; not every rate of the grid is tried, but the usual
    one and those beside the best. Ask again with these results.

    Parameters
    ----------
    name : str
        See `pecil.bench.figures.FIGURES`.
    only : sequence of str
        Curves as DATASET/CURVE; ``*`` stands for anything.
    seeds : int
        The seeds are 1 to this number.
    results : iterable of Result
        What was run already.
    failed : collection of str
        Keys of experiments to do without.

    Examples
    --------
    >>> tried = for_figure("members", ["mnist/pec"], seeds=2)
    >>> [e.settings["lr"] for e in tried if e.validation][:3], sum(not e.validation for e in tried)
    ([0.003, 0.01, 0.03], 2)
    """
    figure = FIGURES[name]
    curves = list(product(figure.datasets, figure.curves))
    chosen = [
        (dataset, curve)
        for dataset, curve in curves
        if figure.places(curve, dataset)
        and (not only or any(fnmatchcase(f"{dataset}/{curve}", pattern) for pattern in only))
    ]
    if not chosen:
        known = _listed(f"{d}/{c}" for d, c in curves if figure.places(c, d))
        raise ValueError(
            f"figure {name} has no curve {_listed(only)}: expected DATASET/CURVE out of {known}"
        )
    there = {result.experiment.key: result for result in results}
    asked = [
        experiment
        for dataset, curve in chosen
        for usual in figure.usual(curve, dataset)
        for changes in figure.places(curve, dataset)
        for experiment in _next(figure, usual, changes, seeds, there, failed)
    ]
    return list({experiment.key: experiment for experiment in asked}.values())


def _next(
    figure: Figure,
    usual: Experiment,
    changes: Mapping[str, Any],
    seeds: int,
    there: Mapping[str, Result],
    failed: Collection[str],
) -> list[Experiment]:
    """Return the runs that choose a learning rate or, once they are there, all seeds with it.

    The search begins at the usual rate, and goes on until the best one's neighbours in the grid
    are known to be no better.
    """

    def made(**more: Any) -> Experiment:
        return planned(usual.method, usual.dataset, usual.split, **{**changes, **more})

    if "lr" not in figure.tuned or "lr" not in usual.settings or not changes:
        return [made(seed=seed) for seed in range(1, seeds + 1)]
    rates = grid_for(usual.method)["lr"]
    tried = [made(seed=1, lr=rate, validation=True) for rate in rates]
    found = {k: there[e.key].accuracy for k, e in enumerate(tried) if e.key in there}
    start = min(range(len(rates)), key=lambda k: abs(math.log(rates[k] / usual.settings["lr"])))
    best = max(found, key=found.__getitem__, default=start)
    near = tried[max(0, best - 1) : best + 2]
    if waiting := [e for e in near if e.key not in there and e.key not in failed]:
        return waiting
    if not found:
        return []
    return [made(seed=seed, lr=rates[best]) for seed in range(1, seeds + 1)]


def _matching(asked: Sequence[Cell], pattern: str) -> list[Cell]:
    """Return the cells whose row has the name or, if there is none, whose method has it."""
    own = [cell for cell in asked if fnmatchcase(f"{cell.dataset}/{cell.name}", pattern)]
    return own or [
        cell
        for cell in asked
        if cell.experiment and fnmatchcase(f"{cell.dataset}/{cell.experiment.method}", pattern)
    ]


def _possible(experiment: Experiment) -> bool:
    """Say whether the method can learn samples of the dataset's shape."""
    return METHODS[experiment.method].supports(DATASETS[experiment.dataset].shape)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


@dataclass(frozen=True)
class Part:
    """The runs of a sweep that differ in the seed alone."""

    experiment: Experiment
    """With the first seed."""
    to_run: int
    finished: int
    seconds: float | None
    """That one run is likely to take a device; None if nothing like it was ever run."""


def plan(
    asked: Iterable[Experiment], results: Iterable[Result], device: str = "cpu"
) -> tuple[list[Experiment], list[Part]]:
    """Find out what is to be run, and estimate how long it takes.

    Parameters
    ----------
    asked : iterable of Experiment
        What results are wanted of.
    results : iterable of Result
        All results at hand.
    device : str
        "cpu" or "cuda": runs elsewhere say nothing about the time.

    Returns
    -------
    to_run : list of Experiment
        Those without a result.
    parts : list of Part
        An estimate is the mean time, per step, of runs of the same method on the same dataset.
    """
    finished, past = set(), dict[tuple[str, str, int], list[float]]()
    for result in results:
        experiment = result.experiment
        finished.add(experiment.key)
        if result.device.startswith(device):
            spent = result.device_seconds / steps_a_sample(experiment)
            past.setdefault(_alike(experiment), []).append(spent)
    groups: dict[str, list[Experiment]] = {}
    for experiment in asked:
        groups.setdefault(experiment.kind, []).append(experiment)
    to_run, parts = [], []
    for same in groups.values():
        left = [experiment for experiment in same if experiment.key not in finished]
        to_run += left
        times = past.get(_alike(same[0]))
        seconds = float(np.mean(times)) * steps_a_sample(same[0]) if times else None
        parts.append(Part(same[0], len(left), len(same) - len(left), seconds))
    return to_run, parts


def steps_a_sample(experiment: Experiment) -> float:
    """Return the steps of an experiment for each sample of its stream, or in proportion to them."""
    return experiment.epochs / float(experiment.settings.get("batch_size", 1))


def _alike(experiment: Experiment) -> tuple[str, str, int]:
    """Return what runs have in common that take, per step, about as long."""
    return experiment.method, experiment.dataset, experiment.steps
