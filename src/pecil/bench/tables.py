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
    """By seed; empty where nothing was run."""
    paper: float | None
    """None where the paper has no number."""
    paper_error: float = 0.0
    notes: tuple[str, ...] = ()
    """What has to be known about the data of our runs."""
    to_run: bool = True
    """False for what the paper alone has."""

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

        None where there is nothing to compare.
        """
        if not self.ours or self.paper is None:
            return None
        combined = float(np.hypot(self.error, self.paper_error))
        return abs(self.mean - self.paper) <= max(1.0, 2 * combined)

    @property
    def our_text(self) -> str:
        """Our mean with its error, or why there is none."""
        return with_error(self.ours) if self.ours else "not run" if self.to_run else ""

    @property
    def paper_text(self) -> str:
        """The paper's number with its error, if there is one."""
        return "" if self.paper is None else f"{self.paper:.2f} ± {self.paper_error:.2f}"

    def columns(self) -> tuple[str, ...]:
        """Return the texts under `HEADER`."""
        title = DATASETS[self.dataset].title
        seeds = str(len(self.ours)) if self.ours else ""
        compared = ("", "")
        if self.ours and self.paper is not None:
            compared = (f"{self.mean - self.paper:+.2f}", "yes" if self.agrees else "no")
        return (self.method, title, self.our_text, seeds, self.paper_text, *compared)


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
        _cell(row, dataset, runs)
        for row in tables[name]["rows"]
        for dataset in row.get("datasets", row.get("paper", {}))
    ]


def _cell(row: Mapping[str, Any], dataset: str, by_kind: Mapping[str, Sequence[Result]]) -> Cell:
    accuracy, error = row.get("paper", {}).get(dataset, (None, 0.0))
    runs: Sequence[Result] = []
    if "method" in row:
        asked = planned(row["method"], dataset, **row.get("settings", {}))
        runs = by_kind.get(_kind(asked), [])
    notes = [DATASETS[dataset].note, *(run.data_note for run in runs)] if runs else []
    return Cell(
        row["title"],
        dataset,
        ours=tuple(100 * run.accuracy for run in runs),
        paper=accuracy,
        paper_error=error,
        notes=tuple(dict.fromkeys(note for note in notes if note)),
        to_run="method" in row,
    )


def markdown(name: str, results: Iterable[Result]) -> str:
    """Write a table, with what has to be known about it and its datasets below."""
    filled, definition = cells(name, results), definitions()[name]
    notes = [f"{DATASETS[cell.dataset].title}: {note}." for cell in filled for note in cell.notes]
    if "note" in definition:
        notes.insert(0, f"{definition['note']}.")
    return "\n".join(
        [
            f"## {name}: {definition['title']}",
            "",
            grid(name, filled),
            *(f"\n{note}" for note in dict.fromkeys(notes)),
            "",
        ]
    )


def grid(name: str, filled: Sequence[Cell]) -> str:
    """Write the cells of a table alone."""
    header, *lines = _wide(filled) if definitions()[name].get("wide") else _long(filled)
    rows = (header, ["---"] * len(header), *lines)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def inserted(page: str, name: str, results: Iterable[Result]) -> str:
    """Put a table into a page, between the comments that mark its place."""
    begin, end = (f"<!-- table {name}: {border} -->" for border in ("begin", "end"))
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"expected a place for the table, a line {begin} and a line {end}")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{grid(name, cells(name, results))}\n{end}{rest.split(end)[1]}"


def _long(filled: Sequence[Cell]) -> list[Sequence[str]]:
    """Lay cells out one a line."""
    return [HEADER, *(cell.columns() for cell in filled)]


def _wide(filled: Sequence[Cell]) -> list[Sequence[str]]:
    """Lay cells out with a column for each dataset, the paper's numbers on lines of their own.

    Ours have the number of seeds in brackets.
    """
    datasets = list(dict.fromkeys(cell.dataset for cell in filled))
    lines: list[Sequence[str]] = [["method", *(DATASETS[dataset].title for dataset in datasets)]]
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
