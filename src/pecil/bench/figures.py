"""Figures, as pure functions of the results; drawn by matplotlib, without a display."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pecil.bench.experiment import Experiment, Result, planned
from pecil.bench.tables import standard_error
from pecil.data import DATASETS
from pecil.files import written_whole
from pecil.methods import METHODS

LOOKS: dict[str, dict[str, Any]] = {  # told apart by line and marker as well as by colour
    "whitened_pec": {"color": "#0b6e4f", "linestyle": "-", "marker": "D"},
    "pec": {"color": "#0b4f8a", "linestyle": "-", "marker": "o"},
    "randumb": {"color": "#c2571a", "linestyle": "--", "marker": "s"},
    "slda": {"color": "#7a4a9e", "linestyle": "", "marker": "^"},
    "nearest_mean": {"color": "#555555", "linestyle": "", "marker": "v"},
}
SIZES = ("memory", "dim", "student_width", "output_dim", "budget")  # settings that set a size
COLUMNS = 3  # panels side by side


@dataclass(frozen=True)
class Point:
    """What a method of one size reached on a dataset."""

    method: str
    dataset: str
    held: float
    """The numbers that the model holds: the mean over the seeds."""
    accuracy: float
    """In percent, the mean over the seeds."""
    error: float
    """The standard error of that mean; 0 for a single seed."""
    seeds: int


def memory_points(results: Iterable[Result]) -> list[Point]:
    """Gather accuracy against memory: runs whose settings are the usual ones but for the size.

    Parameters
    ----------
    results : iterable of Result
        All results at hand; those of other methods, settings and data are passed over.

    Returns
    -------
    list of Point
        By dataset, method and memory.
    """
    runs: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        experiment = result.experiment
        method, dataset = experiment.method, experiment.dataset
        if method not in LOOKS or dataset not in DATASETS:
            continue
        usual = planned(method, dataset)
        if experiment.split == usual.split and _unsized(experiment) == _unsized(usual):
            size = {name: experiment.settings.get(name) for name in SIZES}
            runs.setdefault((dataset, method, repr(size)), []).append(result)
    points = [_point(method, dataset, same) for (dataset, method, _), same in runs.items()]
    orders = list(DATASETS), list(LOOKS)
    return sorted(
        points, key=lambda p: (orders[0].index(p.dataset), orders[1].index(p.method), p.held)
    )


def _unsized(experiment: Experiment) -> dict[str, Any]:
    return {name: v for name, v in experiment.settings.items() if name not in SIZES}


def _point(method: str, dataset: str, runs: Sequence[Result]) -> Point:
    accuracies = [100 * run.accuracy for run in runs]
    return Point(
        method,
        dataset,
        held=float(np.mean([run.n_parameters for run in runs])),
        accuracy=float(np.mean(accuracies)),
        error=standard_error(accuracies),
        seeds=len(runs),
    )


def memory(points: Sequence[Point], path: str | os.PathLike[str]) -> None:
    """Draw what `memory_points` gathered: a panel for each dataset, a curve for each method."""
    if not points:
        raise ValueError(
            f"no results to draw: expected runs of {', '.join(LOOKS)} with the usual settings"
        )
    datasets = list(dict.fromkeys(point.dataset for point in points))
    columns = min(COLUMNS, len(datasets))
    rows = -(-len(datasets) // columns)
    figure = blank(4 * columns, 3.4 * rows + 0.6)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    handles: dict[str, Any] = {}
    for axes, dataset in zip(panels, datasets, strict=False):
        for method, look in LOOKS.items():
            if own := [p for p in points if (p.dataset, p.method) == (dataset, method)]:
                handles[METHODS[method].title] = axes.errorbar(
                    [p.held for p in own],
                    [p.accuracy for p in own],
                    yerr=[p.error for p in own],
                    linewidth=2,
                    markersize=6,
                    capsize=3,
                    **look,
                )
        axes.set_xscale("log")
        axes.set_title(DATASETS[dataset].title, loc="left")
        axes.set_xlabel("numbers held")
        axes.set_ylabel("test accuracy (%)")
    for axes in panels[len(datasets) :]:
        axes.set_visible(False)
    figure.legend(
        handles.values(), handles, loc="outside upper center", ncols=len(handles), frameon=False
    )
    save(figure, path)


FIGURES: Mapping[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "memory": (memory_points, memory),
}
"""By name: what gathers a figure's points from results, and what draws them."""


def blank(width: float, height: float) -> Any:
    """Return an empty figure, its sides in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('drawing needs matplotlib: pip install "pecil[plot]"') from error
    return Figure(figsize=(width, height), dpi=160, layout="constrained")


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Give all panels their common looks and write the figure, whole or not at all."""
    for axes in figure.axes:
        axes.grid(axis="y", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    with written_whole(path) as temporary:
        figure.savefig(temporary)
