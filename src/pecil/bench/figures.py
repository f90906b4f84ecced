"""Figures, as pure functions of the results; drawn by matplotlib, without a display.

Every figure of the paper that shows results is defined here, and one of our own: accuracy against
memory. ``figures.toml`` says which runs they need.
"""

import functools
import hashlib
import os
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from pecil.bench.experiment import Experiment, Result, planned
from pecil.bench.tables import definitions, standard_error
from pecil.data import DATASETS
from pecil.files import written_whole
from pecil.methods import METHODS

LOOKS: dict[str, dict[str, Any]] = {  # told apart by line and marker as well as by colour
    "whitened_pec": {"color": "#0b6e4f", "linestyle": "-", "marker": "D"},
    "whitened_synthetic": {"color": "#5aa02c", "linestyle": "-.", "marker": "*"},
    "pec": {"color": "#0b4f8a", "linestyle": "-", "marker": "o"},
    "randumb": {"color": "#c2571a", "linestyle": "--", "marker": "s"},
    "slda": {"color": "#7a4a9e", "linestyle": "", "marker": "^"},
    "nearest_mean": {"color": "#555555", "linestyle": "", "marker": "v"},
    "vae_gc": {"color": "#8a6d00", "linestyle": "-", "marker": "P"},
    "er": {"color": "#b03060", "linestyle": "-", "marker": "X"},
    "derpp": {"color": "#1f8a8a", "linestyle": "-", "marker": "h"},
}
SIZES = (  # settings that set a size
    *("memory", "dim"),
    *("student_width", "teacher_width", "output_dim", "pool", "budget"),
)
COLUMNS = 3  # panels side by side
PLACES, LETTERS = 7, 6  # of a horizontal axis, up to which each place has its number
HANDLE, LETTER = 0.8, 0.08  # inches in a legend: of a line with the space around, of a letter
DECADE, LEAST = 10, 5  # what axes reach at the least: a factor, and percents of accuracy


@dataclass(frozen=True)
class Point:
    """What was reached on a dataset, at one place of the horizontal axis."""

    curve: str
    """A method, or one with settings of its own."""
    dataset: str
    x: float
    held: float
    """The numbers that the model holds: the mean over the seeds."""
    accuracy: float
    """In percent, the mean over the seeds."""
    error: float
    """The standard error of that mean; 0 for a single seed."""
    seeds: int
    split: str
    """Tasks / classes per task."""
    usual: bool = False
    """Is it the setting of the tables?"""


@dataclass(frozen=True)
class Figure:
    """Accuracy against one thing that varies: a panel for each dataset, a curve for each method.

    A method with some settings changed for good may be a curve of its own.
    """

    name: str
    title: str
    x_label: str
    x: Callable[[Result], float]
    """Where a result stands."""
    varied: tuple[str, ...]
    """Settings, or "epochs", in which its runs may differ from the usual ones."""
    curves: tuple[str, ...] = ("er", "derpp", "vae_gc", "pec")
    """Methods, and what ``figures.toml`` says are curves of their own."""
    datasets: tuple[str, ...] = ("mnist", "cifar10")
    tuned: tuple[str, ...] = ("lr",)
    """Settings chosen anew at every point: of several choices the usual one is shown, else that
    with the most seeds."""
    several: bool = True
    """Does it show several classes a task, too?"""
    log: bool = True
    """Is the horizontal axis logarithmic?"""

    def points(self, results: Iterable[Result]) -> list[Point]:
        """Gather runs whose settings are the usual ones but for what varies.

        Where the places of a curve are given, others are not shown: they are another figure's.

        Parameters
        ----------
        results : iterable of Result
            All results at hand; those of other methods, settings and data are passed over.

        Returns
        -------
        list of Point
            By dataset, curve, split and place.
        """
        found: dict[tuple[Any, ...], dict[str, list[Result]]] = {}
        for result in results:
            experiment = result.experiment
            if (curve := self._curve(experiment)) is not None:
                same = (curve, experiment.dataset, experiment.split)
                choices = found.setdefault((*same, self._values(experiment, self.varied)), {})
                choices.setdefault(self._values(experiment, self.tuned), []).append(result)
        points = [
            self._point(curve, max(choices.values(), key=self._rank(curve)))
            for (curve, *_), choices in found.items()
        ]
        orders = list(self.datasets), list(self.curves)
        return sorted(
            points,
            key=lambda p: (orders[0].index(p.dataset), orders[1].index(p.curve), p.split, p.x),
        )

    def usual(self, curve: str, dataset: str) -> list[Experiment]:
        """Return the experiments of the tables from which those of the figure differ."""
        return _usual(curve, dataset)[: 1 + self.several]

    def places(self, curve: str, dataset: str) -> list[dict[str, Any]]:
        """Return the settings of a curve's runs that are not the usual ones, place by place."""
        _, own = _made_by(curve, dataset)
        for pattern, changes in _definitions().get(self.name, {}).items():
            if fnmatchcase(f"{dataset}/{curve}", pattern):
                return [{**own, **change} for change in changes]
        return []

    def _curve(self, experiment: Experiment) -> str | None:
        """Return the curve on which an experiment stands, if there is one."""
        dataset = experiment.dataset
        if dataset not in self.datasets:
            return None
        for curve in self.curves:
            usual = self.usual(curve, dataset)
            if any(self._rest(experiment) == self._rest(one) for one in usual):
                return curve if self._stands(experiment, curve) else None
        return None

    def _stands(self, experiment: Experiment, curve: str) -> bool:
        """Say whether an experiment is at one of a curve's places, if these are given."""
        method, dataset, split = experiment.method, experiment.dataset, experiment.split
        places = self.places(curve, dataset)
        return not places or self._values(experiment, self.varied) in {
            self._values(planned(method, dataset, split, **changes), self.varied)
            for changes in places
        }

    def _values(self, experiment: Experiment, names: Sequence[str]) -> str:
        known = {"epochs": experiment.epochs, **experiment.settings}
        return repr([known.get(name) for name in names])

    def _rest(self, experiment: Experiment) -> Experiment:
        """Return what an experiment has in common with the others of its curve."""
        free = {*self.varied, *self.tuned}
        settings = {name: v for name, v in experiment.settings.items() if name not in free}
        epochs = 1 if "epochs" in free else experiment.epochs
        return replace(experiment, seed=0, settings=settings, epochs=epochs)

    def _rank(self, curve: str) -> Callable[[Sequence[Result]], tuple[bool, int]]:
        return lambda runs: (self._is_usual(curve, runs[0].experiment), len(runs))

    def _is_usual(self, curve: str, experiment: Experiment) -> bool:
        return replace(experiment, seed=0) in self.usual(curve, experiment.dataset)

    def _point(self, curve: str, runs: Sequence[Result]) -> Point:
        accuracies = [100 * run.accuracy for run in runs]
        experiment = runs[0].experiment
        return Point(
            curve,
            experiment.dataset,
            x=fmean(self.x(run) for run in runs),
            held=float(np.mean([run.n_parameters for run in runs])),
            accuracy=float(np.mean(accuracies)),
            error=standard_error(accuracies),
            seeds=len(runs),
            split=experiment.split,
            usual=self._is_usual(curve, experiment),
        )

    def draw(self, points: Sequence[Point], path: str | os.PathLike[str]) -> None:
        """Draw what `points` gathered; datasets without a curve are left out if others have one."""
        if not points:
            raise ValueError(
                f"no results to draw: expected runs of {', '.join(self.curves)} with the usual "
                f"settings but for {', '.join(self.varied)}"
            )
        about, points = digest(points), self._begun(points)
        curves = Counter((point.dataset, point.curve, point.split) for point in points)
        shown = {dataset for (dataset, _, _), n in curves.items() if n > 1}
        datasets = list(dict.fromkeys(p.dataset for p in points if not shown or p.dataset in shown))
        columns = min(COLUMNS, len(datasets))
        rows = -(-len(datasets) // columns)
        figure = blank(max(6, 4 * columns), 3.4 * rows + 0.3)
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        handles: dict[str, Any] = {}
        for axes, dataset in zip(panels, datasets, strict=False):
            handles |= self._curves(axes, [p for p in points if p.dataset == dataset])
            axes.set_title(DATASETS[dataset].title, loc="left")
            axes.set_xlabel(self.x_label)
            axes.set_ylabel("test accuracy (%)")
            axes.set_xscale("log" if self.log else "linear")
            roomy(axes)
            places = sorted({point.x for point in points if point.dataset == dataset})
            labels = [f"{place:,g}" for place in places]
            if len(places) <= PLACES and max(map(len, labels)) <= LETTERS:
                axes.set_xticks(places, labels)
        for axes in panels[len(datasets) :]:
            axes.set_visible(False)
        beside = columns_of(list(handles), figure.get_figwidth())
        figure.set_figheight(figure.get_figheight() + 0.3 * -(-len(handles) // beside))
        figure.legend(
            handles.values(),
            handles,
            loc="outside upper center",
            ncols=beside,
            handlelength=3,
            frameon=False,
        )
        save(figure, path, about)

    def _begun(self, points: Sequence[Point]) -> list[Point]:
        """Leave out curves of which one place of several was run, unless all are like that."""
        found = Counter((p.curve, p.dataset, p.split) for p in points)
        begun = [
            p
            for p in points
            if found[p.curve, p.dataset, p.split] > 1 or len(self.places(p.curve, p.dataset)) < 2
        ]
        return begun or list(points)

    def _curves(self, axes: Any, points: Sequence[Point]) -> dict[str, Any]:
        """Draw a panel's curves, dashed where there are several classes a task."""
        handles = {}
        for curve, split in dict.fromkeys((p.curve, p.split) for p in points):
            own = [p for p in points if (p.curve, p.split) == (curve, split)]
            look, title = LOOKS[curve], title_of(curve)
            if split != _usual(curve, own[0].dataset)[0].split:
                look, title = look | {"linestyle": "--"}, f"{title}, several classes a task"
            handles[title] = axes.errorbar(
                [p.x for p in own],
                [p.accuracy for p in own],
                yerr=[p.error for p in own],
                linewidth=2,
                elinewidth=1,
                markersize=6,
                capsize=3,
                **look,
            )
            places, low, high = zip(
                *((p.x, p.accuracy - p.error, p.accuracy + p.error) for p in own), strict=True
            )
            axes.fill_between(places, low, high, color=look["color"], alpha=0.15, linewidth=0)
            for point in own if len(own) > 1 else ():
                if point.usual:
                    axes.axvline(point.x, color=look["color"], linestyle=":", linewidth=1)
        return handles


def title_of(curve: str) -> str:
    """Return a curve's name as it is written in text."""
    return METHODS[curve].title if curve in METHODS else str(_own_curves()[curve]["title"])


def _made_by(curve: str, dataset: str) -> tuple[str | None, dict[str, Any]]:
    """Return the method of a curve, or None where it has none, and its lasting settings."""
    if curve in METHODS:
        return curve, {}
    own = _own_curves().get(curve, {})
    settings = own.get("settings", {}).get(dataset)
    return (None, {}) if settings is None else (own["method"], settings)


@functools.cache
def _usual(curve: str, dataset: str) -> list[Experiment]:
    """Describe the usual experiments: one class at a time, and several as in Table 2."""
    method, own = _made_by(curve, dataset)
    if method is None:
        return []
    table = definitions()["table2"]
    several = dict(zip(table["datasets"], table["splits"], strict=True))
    rows = {row["method"] for row in table["rows"]}
    splits = [None]
    if method in rows and not METHODS[method].independent and dataset in several:
        splits.append(several[dataset])
    return [planned(method, dataset, split, **own) for split in splits]


@functools.cache
def _definitions() -> dict[str, Any]:
    file = resources.files("pecil.bench") / "figures.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _own_curves() -> dict[str, Any]:
    return dict(_definitions()["curves"])


def _setting(name: str, usual: int = 1) -> Callable[[Result], float]:
    return lambda result: float(result.experiment.settings.get(name, usual))


def _of_pec(
    setting: str, title: str, label: str = "", *more: str, name: str = "", log: bool = True
) -> Figure:
    """Return a figure over one setting of PEC; ``more`` may differ from the usual ones, too."""
    return Figure(
        name or setting,
        title,
        label or setting.replace("_", " "),
        _setting(setting),
        (setting, *more),
        curves=("pec",),
        several=False,
        log=log,
    )


FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure(
            "epochs",
            "Passes over the data (the paper's Figure 2, left)",
            "epochs",
            lambda result: result.experiment.epochs,
            ("epochs",),
        ),
        Figure(
            "parameters",
            "Numbers that a model holds (the paper's Figure 2, right)",
            "parameters",
            lambda result: result.n_parameters,
            (*SIZES, "width", "hidden", "latent"),
            curves=("er", "derpp", "vae_gc", "pec", "whitened_pec"),
        ),
        _of_pec(
            "hidden_layers", "Depth of PEC's networks (Figure 3)", "", "teacher_width", log=False
        ),
        _of_pec("student_width", "Width of PEC's students (Figure 3)"),
        _of_pec("teacher_width", "Width of PEC's teacher (Figure 3)"),
        _of_pec("output_dim", "Outputs of PEC's networks (Figure 3)", "outputs"),
        Figure(
            "learning_rate",
            "Learning rate (Figure 4, in the appendix)",
            "learning rate",
            _setting("lr"),
            ("lr",),
            tuned=(),
        ),
        _of_pec(
            "ensemble",
            "Student-teacher pairs of PEC (Figure 5)",
            "student-teacher pairs",
            name="members",
            log=False,
        ),
        Figure(
            "memory",
            "Accuracy against memory",
            "numbers held",
            lambda result: result.n_parameters,
            SIZES,
            curves=(
                *("whitened_synthetic", "whitened_pec", "pec"),
                *("randumb", "slda", "nearest_mean"),
            ),
            datasets=tuple(DATASETS),
            tuned=(),
            several=False,
        ),
    )
}
"""By name. The paper's Figures 1 and 6 show no results: an explanation, and pictures that models
generate."""


def blank(width: float, height: float) -> Any:
    """Return an empty figure, its sides in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('drawing needs matplotlib: pip install "pecil[plot]"') from error
    return Figure(figsize=(width, height), dpi=160, layout="constrained")


def columns_of(titles: Sequence[str], width: float) -> int:
    """Return how many columns of a legend a figure has room for, its width in inches.

    >>> columns_of(["PEC", "Whitened PEC"], 6), columns_of(["Whitened PEC" * 4, "PEC"], 4)
    (2, 1)
    """
    for n in range(len(titles), 1, -1):
        columns = np.array_split(np.array(titles, dtype=object), n)
        if sum(HANDLE + LETTER * max(map(len, column)) for column in columns) <= width:
            return n
    return 1


def roomy(axes: Any) -> None:
    """Let the axes of a panel reach far enough that small differences look small."""
    if axes.get_xscale() == "log":
        low, high = axes.dataLim.intervalx
        axes.xaxis.minorticks_off()  # their labels run into each other
        if high / low < DECADE:
            middle = (low * high) ** 0.5
            axes.set_xlim(middle / DECADE, middle * DECADE)
    low, high = axes.get_ylim()
    if high - low < LEAST:
        axes.set_ylim((low + high - LEAST) / 2, (low + high + LEAST) / 2)


def digest(points: Sequence[Point]) -> str:
    """Return what tells a picture of these points from one of others."""
    rows = [
        [f"{v:.6g}" if isinstance(v, float) else str(v) for v in asdict(point).values()]
        for point in points
    ]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def shows(path: str | os.PathLike[str], points: Sequence[Point]) -> bool:
    """Say whether a picture is of these points, by what `save` wrote into it."""
    return digest(points).encode() in Path(path).read_bytes()


def save(figure: Any, path: str | os.PathLike[str], about: str = "") -> None:
    """Give all panels their common looks and write the figure, whole or not at all.

    ``about`` becomes its description, which nobody sees. An SVG keeps its letters as text and is
    the same, byte for byte, whenever it is drawn.
    """
    from matplotlib import rc_context

    for axes in figure.axes:
        axes.grid(axis="y", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    metadata = {"Description": about} | ({"Date": None} if Path(path).suffix == ".svg" else {})
    with (
        written_whole(path) as temporary,
        rc_context({"svg.fonttype": "none", "svg.hashsalt": "pecil"}),
    ):
        figure.savefig(temporary, metadata=metadata)
