"""Tables: our results beside the paper's, as pure functions of the results.

Every table is defined in ``tables.toml``. A result belongs to a cell if its
method, dataset, split and all its settings are the cell's.
"""

import functools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from pecil.bench.experiment import Experiment, Result, planned
from pecil.data import DATASETS

HEADER = ("method", "dataset", "ours", "seeds", "paper", "difference", "agrees")


@dataclass(frozen=True)
class Cell:
    """One method on one dataset: our accuracies and the paper's, in percent."""

    method: str
    dataset: str
    ours: tuple[float, ...]
    paper: float
    paper_error: float
    notes: tuple[str, ...] = ()
    """What has to be known about the data of our runs."""

    @property
    def mean(self) -> float:
        """The mean over our seeds."""
        return float(np.mean(self.ours))

    @property
    def error(self) -> float:
        """The standard error of our mean; 0 for a single seed."""
        return standard_error(self.ours)

    @property
    def agrees(self) -> bool:
        """Whether ours is within max(1 point, 2 combined standard errors) of the paper's."""
        combined = float(np.hypot(self.error, self.paper_error))
        return abs(self.mean - self.paper) <= max(1.0, 2 * combined)

    def columns(self) -> tuple[str, ...]:
        """Return the texts under `HEADER`."""
        paper = f"{self.paper:.2f} ± {self.paper_error:.2f}"
        title = DATASETS[self.dataset].title
        if not self.ours:
            return (self.method, title, "not run", "", paper, "", "")
        return (
            self.method,
            title,
            with_error(self.ours),
            str(len(self.ours)),
            paper,
            f"{self.mean - self.paper:+.2f}",
            "yes" if self.agrees else "no",
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


@functools.cache
def definitions() -> Mapping[str, Any]:
    """Return every table's definition by name."""
    text = (resources.files("pecil.bench") / "tables.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def cells(name: str, results: Iterable[Result]) -> list[Cell]:
    """Fill a table.

    Parameters
    ----------
    name : str
        A name in `definitions`.
    results : iterable of Result
        All results at hand; those of other tables are passed over.

    Returns
    -------
    list of Cell
        In the table's order; a cell without runs has ``ours == ()``.
    """
    tables = definitions()
    if name not in tables:
        raise ValueError(f"expected a table out of {', '.join(tables)}, got {name!r}")
    runs: dict[str, list[Result]] = {}
    for result in results:
        runs.setdefault(_kind(result.experiment), []).append(result)
    return [
        _cell(row, dataset, runs.get(_kind(_experiment(row, dataset)), []))
        for row in tables[name]["rows"]
        for dataset in row["paper"]
    ]


def _experiment(row: Mapping[str, Any], dataset: str) -> Experiment:
    return planned(row["method"], dataset, **row.get("settings", {}))


def _cell(row: Mapping[str, Any], dataset: str, runs: Sequence[Result]) -> Cell:
    accuracy, error = row["paper"][dataset]
    notes = [DATASETS[dataset].note, *(run.data_note for run in runs)] if runs else []
    return Cell(
        row["title"],
        dataset,
        ours=tuple(100 * run.accuracy for run in runs),
        paper=accuracy,
        paper_error=error,
        notes=tuple(dict.fromkeys(note for note in notes if note)),
    )


def markdown(name: str, results: Iterable[Result]) -> str:
    """Write a table, with what has to be known about its datasets below it."""
    filled = cells(name, results)
    lines = [HEADER, ("---",) * len(HEADER), *(cell.columns() for cell in filled)]
    notes = [f"{DATASETS[cell.dataset].title}: {note}." for cell in filled for note in cell.notes]
    return "\n".join(
        [
            f"## {name}: {definitions()[name]['title']}",
            "",
            *("| " + " | ".join(line) + " |" for line in lines),
            *(f"\n{note}" for note in dict.fromkeys(notes)),
            "",
        ]
    )


def page(results: Sequence[Result]) -> str:
    """Write all tables as one Markdown page."""
    return "\n".join([INTRODUCTION, *(markdown(name, results) for name in definitions())])


INTRODUCTION = """# Results

Test accuracy in percent after one pass, classes one at a time: mean ± standard
error over the seeds, next to the paper's (10 seeds). Ours agrees with the paper's
if it is within max(1 point, 2 combined standard errors). Made from
`results/*.jsonl` by `pecil table -o docs/results.md`; each line there holds the
settings, versions, device and time of its run.
"""


def _kind(experiment: Experiment) -> str:
    """Return what the seeds of one cell have in common."""
    return Experiment(
        experiment.method, experiment.dataset, experiment.split, settings=experiment.settings
    ).key
