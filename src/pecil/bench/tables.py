"""Tables: our results beside the paper's, as pure functions of the results.

Every table is defined in ``tables.toml``. A result belongs to a cell if its method, dataset,
split, epochs, steps, buffer and all its settings are the cell's.
"""

import functools
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

from pecil.bench.experiment import Experiment, Result, planned
from pecil.data import DATASETS

PAPER_SEEDS = 10
HEADER = ("method", "dataset", "ours", "seeds", "paper", "difference", "agrees", "seconds")

Runs = Mapping[str, Sequence[Result]]
"""Results by what the seeds of one cell have in common."""


@dataclass(frozen=True)
class Measure:
    """What a table shows of a result, and how."""

    of: Callable[[Result], float | None]
    text: Callable[[float], str]
    difference: Callable[[float, float], str]
    """Of our mean and the paper's number."""
    tolerance: Callable[[float, float], float]
    """How far apart the two may be: of the paper's number and the combined standard error."""


def count_text(value: float) -> str:
    """Write a large number with three digits.

    >>> count_text(11_170_430), count_text(89_590), count_text(640)
    ('11.2M', '89.6K', '640')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:#.3g}".rstrip(".") + letter
    return f"{value:.0f}"


def _count(of: Callable[[Result], float | None]) -> Measure:
    return Measure(
        of,
        count_text,
        difference=lambda ours, paper: f"{round(100 * (ours / paper - 1), 1) + 0.0:+.1f} %",
        tolerance=lambda paper, error: 0.03 * paper,
    )


MEASURES = {
    "accuracy": Measure(
        lambda result: 100 * result.accuracy,
        "{:.2f}".format,
        difference=lambda ours, paper: f"{ours - paper:+.2f}",
        tolerance=lambda paper, error: max(1.0, 2 * error),
    ),
    "parameters": _count(lambda result: result.n_parameters),
    "macs": _count(lambda result: result.macs),
}


@dataclass(frozen=True)
class Cell:
    """One row of a table on one dataset: our numbers and the paper's."""

    method: str
    """The row's title."""
    dataset: str
    ours: tuple[float, ...]
    """By run; empty where nothing was run."""
    paper: float | None
    """None where the paper has no number."""
    paper_error: float | None = None
    """None where the paper does not tell."""
    notes: tuple[str, ...] = ()
    """What has to be known about the data of our runs."""
    to_run: bool = True
    """False for what the paper alone has."""
    name: str = ""
    """The row's name: that of its method, or a longer one where a method has several rows."""
    experiment: Experiment | None = None
    """What fills the cell, with the seed 0; None for what the paper alone has."""
    seeds: tuple[int, ...] = ()
    """Of the runs behind `ours`."""
    measure: str = "accuracy"
    """A name in `MEASURES`; accuracies are in percent."""
    seconds: tuple[float, ...] = ()
    """To load, fit and test, by run; of a GPU that was shared, the run's share."""
    devices: tuple[str, ...] = ()
    """Where the runs were carried out: "cpu", "cuda"."""
    remark: str = ""
    """What has to be known about the row."""
    absent: str = ""
    """Why nobody can have run it: there are no data."""

    @property
    def mean(self) -> float:
        """The mean over our seeds."""
        return float(np.mean(self.ours))

    @property
    def error(self) -> float:
        """The standard error of our mean; 0 for a single seed."""
        return standard_error(self.ours)

    @property
    def agrees(self) -> bool | None:
        """Whether ours is within max(1 point, 2 combined standard errors) of the paper's.

        A single run of ours has no standard error: it is taken to vary as the paper's runs do.
        Counts, which the paper rounds, must be within 3 %. None where there is nothing to
        compare.
        """
        if not self.ours or self.paper is None:
            return None
        papers = self.paper_error or 0.0
        error = self.error if len(self.ours) > 1 else papers * PAPER_SEEDS**0.5
        combined = float(np.hypot(error, papers))
        allowed = MEASURES[self.measure].tolerance(self.paper, combined)
        return abs(self.mean - self.paper) <= allowed

    @property
    def our_text(self) -> str:
        """Our mean with its error, or why there is none."""
        if not self.ours:
            return (self.absent or "not run") if self.to_run else ""
        if self.measure == "accuracy":
            return with_error(self.ours)
        return MEASURES[self.measure].text(self.mean)

    @property
    def paper_text(self) -> str:
        """The paper's number with its error, if there is one."""
        if self.paper is None:
            return ""
        text = MEASURES[self.measure].text(self.paper)
        known = self.measure == "accuracy" and self.paper_error is not None
        return f"{text} ± {self.paper_error:.2f}" if known else text

    @property
    def difference_text(self) -> str:
        """By how much ours is above the paper's, if there are both."""
        if not self.ours or self.paper is None:
            return ""
        return MEASURES[self.measure].difference(self.mean, self.paper)

    @property
    def seconds_text(self) -> str:
        """How long a run takes, and where; of accuracies only."""
        if not self.seconds or self.measure != "accuracy":
            return ""
        mean = np.mean(self.seconds)
        return f"{mean:.{0 if mean >= 100 else 1}f} ({', '.join(self.devices)})"

    def columns(self) -> tuple[str, ...]:
        """Return the texts under `HEADER`."""
        return (
            self.method,
            dataset_title(self.dataset),
            self.our_text,
            str(len(self.ours)) if self.ours else "",
            self.paper_text,
            self.difference_text,
            {True: "yes", False: "no", None: ""}[self.agrees],
            self.seconds_text,
        )


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean, 0 where it cannot be estimated.

    >>> round(standard_error([1.0, 2.0, 3.0]), 3)
    0.577
    """
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def with_error(values: Sequence[float]) -> str:
    """Write a mean with its standard error where there is one.

    >>> with_error([92.0, 93.0]), with_error([92.0])
    ('92.50 ± 0.50', '92.00')
    """
    mean = f"{np.mean(values):.2f}"
    return f"{mean} ± {standard_error(values):.2f}" if len(values) > 1 else mean


def dataset_title(name: str) -> str:
    """Return a dataset's name as it is written in text."""
    return DATASETS[name].title


@functools.cache
def definitions() -> Mapping[str, Any]:
    """Return every table's definition by name."""
    text = (resources.files("pecil.bench") / "tables.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def by_kind(results: Iterable[Result]) -> Runs:
    """Sort results out, once for many tables: those that differ in the seed alone together."""
    runs, kinds = dict[str, list[Result]](), dict[str, str]()
    for result in results:
        seen = repr(replace(result.experiment, seed=0))  # much faster than a hash
        kind = kinds.get(seen) or kinds.setdefault(seen, result.experiment.kind)
        runs.setdefault(kind, []).append(result)
    return runs


def cells(name: str, results: Iterable[Result] | Runs) -> list[Cell]:
    """Fill a table.

    Parameters
    ----------
    name : str
        A name in `definitions`.
    results : iterable of Result
        All results at hand, or what `by_kind` made of them; those of other tables are passed
        over.

    Returns
    -------
    list of Cell
        In the table's order; a cell without runs has ``ours == ()``.

    Examples
    --------
    >>> empty = cells("table1", [])
    >>> empty[-1].method, empty[-1].dataset, empty[-1].our_text, empty[-1].paper_text
    ('PEC', 'miniimagenet', 'not run', '14.90 ± 0.08')
    >>> empty[-1].experiment.split
    '100/1'
    """
    tables = definitions()
    if name not in tables:
        raise ValueError(f"expected a table out of {', '.join(tables)}, got {name!r}")
    runs = results if isinstance(results, Mapping) else by_kind(results)
    table = tables[name]
    return [
        _cell(table, row, place, runs)
        for row in table["rows"]
        for place, dataset in enumerate(table["datasets"])
        if dataset in row.get("only", [dataset])
        if "method" in row or row["paper"][place]
    ]


def _cell(table: Mapping[str, Any], row: Mapping[str, Any], place: int, runs: Runs) -> Cell:
    dataset, measure = table["datasets"][place], table.get("measure", "accuracy")
    number, error = [*(row["paper"][place] if "paper" in row else ()), None, None][:2]
    experiment = _experiment(table, row, place)
    found = runs.get(experiment.kind, ()) if experiment else ()
    measured = [(run, value) for run in found if (value := MEASURES[measure].of(run)) is not None]
    notes = [DATASETS[dataset].note, *(run.data_note for run, _ in measured)] if measured else []
    return Cell(
        row["title"],
        dataset,
        ours=tuple(value for _, value in measured),
        paper=number,
        paper_error=error,
        notes=tuple(dict.fromkeys(note for note in notes if note)),
        to_run="method" in row,
        name=row.get("name") or row["method"],
        experiment=experiment,
        seeds=tuple(run.experiment.seed for run, _ in measured),
        measure=measure,
        seconds=tuple(run.device_seconds for run, _ in measured if run.seconds),
        devices=tuple(dict.fromkeys(run.device.split(":")[0] for run, _ in measured)),
        remark=row.get("note", ""),
        absent=table.get("absent", {}).get(dataset, ""),
    )


def _experiment(table: Mapping[str, Any], row: Mapping[str, Any], place: int) -> Experiment | None:
    """Describe what fills a cell; None where it is the paper's alone."""
    method, dataset = row.get("method"), table["datasets"][place]
    if method is None:
        return None
    settings = row.get("settings", {}) | row.get("own", {}).get(dataset, {})
    splits, steps = (row.get(name, table.get(name)) for name in ("splits", "steps"))
    more = {name: row[name] for name in ("epochs", "buffer") if name in row}
    return planned(
        method,
        dataset,
        splits[place] if splits else None,
        steps=steps[place] if steps else 0,
        random_classes=table.get("random_classes", False),
        setup=table.get("setup", ""),
        **more,
        **settings,
    )


def markdown(name: str, results: Iterable[Result] | Runs, brief: bool = False) -> str:
    """Write a table, with what has to be known about it and its datasets below.

    Parameters
    ----------
    name : str
        A name in `definitions`.
    results : iterable of Result
        As for `cells`.
    brief : bool
        Show what was run, and name the rest below.
    """
    filled, definition = cells(name, results), definitions()[name]
    ran = {cell.method for cell in filled if cell.ours}
    wide = definition.get("wide", False)
    waiting = [
        cell
        for cell in filled
        if brief and cell.to_run and not cell.ours and not (wide and cell.method in ran)
    ]
    shown = [cell for cell in filled if cell not in waiting]
    absent = {cell.dataset: cell.absent for cell in waiting if cell.absent}
    below = [
        *_not_run([cell for cell in waiting if not cell.absent]),
        *(f"{dataset_title(dataset)}: {why}" for dataset, why in absent.items()),
        *notes({name: shown}),
    ]
    if wide:
        below.append("In brackets the number of seeds")
    return "\n".join(
        [
            f"## {name}: {definition['title']}",
            "",
            grid(name, shown),
            *(f"\n{note}." for note in below),
            "",
        ]
    )


def notes(shown: Mapping[str, Iterable[Cell]]) -> list[str]:
    """Return what has to be known about cells, by table: of the table, the row and the data."""
    found = [definitions()[name].get("note", "") for name in shown]
    every = [cell for own in shown.values() for cell in own]
    found += [f"{cell.method}: {cell.remark}" for cell in every if cell.remark]
    found += [f"{dataset_title(cell.dataset)}: {note}" for cell in every for note in cell.notes]
    return [note for note in dict.fromkeys(found) if note]


def _not_run(waiting: Sequence[Cell]) -> list[str]:
    """Name the rows of cells, datasets that lack the same ones together."""
    rows: dict[str, list[str]] = {}
    for cell in waiting:
        rows.setdefault(cell.dataset, []).append(cell.method)
    datasets: dict[str, list[str]] = {}
    for dataset, methods in rows.items():
        datasets.setdefault(" · ".join(methods), []).append(dataset_title(dataset))
    return [f"Not run on {', '.join(places)}: {names}" for names, places in datasets.items()]


def grid(name: str, filled: Sequence[Cell]) -> str:
    """Write the cells of a table alone."""
    header, *lines = _wide(filled) if definitions()[name].get("wide") else _long(filled)
    return as_markdown(header, lines)


def as_markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Write texts as the rows and columns of a table.

    >>> print(as_markdown(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    rows = (header, ["---"] * len(header), *lines)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _long(filled: Sequence[Cell]) -> list[Sequence[str]]:
    """Lay cells out one a line."""
    return [HEADER, *(cell.columns() for cell in filled)]


def _wide(filled: Sequence[Cell]) -> list[Sequence[str]]:
    """Lay cells out with a column for each dataset, the paper's numbers on lines of their own.

    Ours have the number of seeds in brackets.
    """
    datasets = list(dict.fromkeys(cell.dataset for cell in filled))
    lines: list[Sequence[str]] = [["method", *map(dataset_title, datasets)]]
    for method in dict.fromkeys(cell.method for cell in filled):
        row = {cell.dataset: cell for cell in filled if cell.method == method}
        ours = {
            dataset: f"{cell.our_text} ({len(cell.ours)})" if cell.ours else cell.our_text
            for dataset, cell in row.items()
        }
        paper = {dataset: cell.paper_text for dataset, cell in row.items()}
        for title, texts in ((method, ours), (f"{method} (paper)", paper)):
            if any(texts.values()):
                lines.append([title, *(texts.get(dataset, "") for dataset in datasets)])
    return lines


def with_own_runs(filled: Mapping[str, Iterable[Cell]]) -> list[str]:
    """Return the names of the tables that show runs which none of the tables before them shows."""
    names, seen = [], set[tuple[str, str]]()
    for name, own in filled.items():
        numbers = {(c.measure, c.experiment.kind) for c in own if c.ours and c.experiment}
        if numbers - seen:
            names.append(name)
        seen |= numbers
    return names
