"""The pages of the documentation whose numbers come from runs.

``docs/tables.md`` is made whole. Other pages have places for what is made: a table between
``<!-- table NAME: begin -->`` and ``<!-- table NAME: end -->``, all results of a method between
``<!-- method NAME: begin -->`` and ``<!-- method NAME: end -->``, the points of a figure between
``<!-- figure NAME: begin -->`` and ``<!-- figure NAME: end -->``. A picture ``docs/NAME.png`` of a
figure is drawn anew when its points change.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from pecil.bench.experiment import Result
from pecil.bench.figures import FIGURES, Point, shows, title_of
from pecil.bench.sweeps import SEEDS, steps_a_sample
from pecil.bench.tables import (
    HEADER,
    Cell,
    Runs,
    as_markdown,
    by_kind,
    cells,
    dataset_title,
    definitions,
    grid,
    markdown,
    notes,
    with_own_runs,
)
from pecil.files import written_whole
from pecil.methods import METHODS

PLACE = re.compile(
    r"(<!-- (?P<kind>table|method|figure) (?P<name>\w+): begin -->\n)"
    r"(?P<old>.*?)"
    r"(<!-- (?P=kind) (?P=name): end -->)",
    re.DOTALL,
)
COMPARED = {"table1", "table2"}
BORDER = re.compile(r"<!-- (?:table|method|figure) \w+: (?:begin|end) -->")


def update(folder: str | os.PathLike[str], results: Iterable[Result]) -> list[Path]:
    """Bring the numbers of a checkout's README.md and docs/, and its figures, up to date.

    Parameters
    ----------
    folder : path-like
        The checkout.
    results : iterable of Result
        What was run.

    Returns
    -------
    list of Path
        The pages and pictures that changed.
    """
    results = list(results)
    runs, docs = by_kind(results), Path(folder) / "docs"
    tables = docs / "tables.md"
    pages = {
        path: filled(path.read_text(encoding="utf-8"), runs)
        for path in (Path(folder) / "README.md", *sorted(docs.rglob("*.md")))
        if path != tables
    }
    pages[tables] = page(runs)
    changed = [path for path, text in pages.items() if _read(path) != text]
    for path in changed:
        with written_whole(path) as temporary:
            temporary.write_text(pages[path], encoding="utf-8")
    for path, name in stale(docs, results):
        FIGURES[name].draw(FIGURES[name].points(results), path)
        changed.append(path)
    return changed


def stale(docs: Path, results: Iterable[Result]) -> list[tuple[Path, str]]:
    """Return the pictures that do not show these results, with the names of their figures."""
    results = list(results)
    pictures = {docs / f"{name}.png": name for name in FIGURES}
    return [
        (path, name)
        for path, name in pictures.items()
        if path.exists() and not shows(path, FIGURES[name].points(results))
    ]


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def filled(text: str, runs: Runs) -> str:
    r"""Fill the places of a page.

    >>> print(filled("<!-- method er: begin -->\n<!-- method er: end -->", {}))
    <!-- method er: begin -->
    Not run yet.
    <!-- method er: end -->
    """
    made: dict[str, Callable[[str, Runs], str]] = {
        "table": lambda name, runs: grid(name, cells(name, runs)),
        "method": method_results,
        "figure": figure_points,
    }

    def new(place: re.Match[str]) -> str:
        return f"{place[1]}{made[place['kind']](place['name'], runs)}\n{place[5]}"

    text, places = PLACE.subn(new, text)
    borders = BORDER.findall(text)
    if len(borders) != 2 * places:
        raise ValueError(
            "expected a line <!-- KIND NAME: end --> after each <!-- KIND NAME: begin -->, "
            f"got {', '.join(borders)}"
        )
    return text


def page(runs: Runs) -> str:
    """Write all tables as one page; one without runs of its own gets a line."""
    tables = definitions()
    found = {name: cells(name, runs) for name in tables}
    shown = with_own_runs(found)
    parts = [INTRODUCTION, *(markdown(name, runs, brief=True) for name in shown)]
    if set(shown) >= COMPARED:
        parts.insert(1, cost({name: found[name] for name in COMPARED}))
    if waiting := [f"* {name}: {tables[name]['title']}" for name in tables if name not in shown]:
        parts.append("\n".join([NOT_RUN, *waiting, ""]))
    return "\n".join(parts)


def cost(tables: Mapping[str, Sequence[Cell]]) -> str:
    """Say how long ten seeds of every cell of some tables take.

    A cell that was not run is expected to take as long, per step, as another one of the same method
    on the same dataset.
    """
    asked = [cell for own in tables.values() for cell in own]
    every = {c.experiment.kind: (c.experiment, c) for c in asked if c.experiment}
    known: dict[tuple[str, str], tuple[str, float]] = {}  # device, seconds of a step
    for experiment, cell in every.values():
        if cell.seconds:
            step = float(np.mean(cell.seconds)) / steps_a_sample(experiment)
            known[experiment.method, cell.dataset] = cell.devices[0], step
    hours, estimated, unknown = {"cuda": 0.0, "cpu": 0.0}, list[str](), 0
    for experiment, cell in every.values():
        device, step = known.get((experiment.method, cell.dataset), ("cuda", 0.0))
        seconds = step * steps_a_sample(experiment)
        if cell.seconds:
            device, seconds = cell.devices[0], float(np.mean(cell.seconds))
        elif step:
            estimated.append(
                f"{cell.method} on {dataset_title(cell.dataset)} {seconds:.0f} s ({device})"
            )
        hours[device] += SEEDS * seconds / 3600
        unknown += seconds == 0
    counts = {"cells": len(every), "estimated": len(estimated), "unknown": unknown}
    text = COST.format(seeds=SEEDS, **counts, **hours)
    return text + (f"\nA run that was estimated: {', '.join(estimated)}.\n" if estimated else "")


def method_results(name: str, runs: Runs) -> str:
    """Write all results of a method that a table has a place for, and what gives them again."""
    if name not in METHODS:
        raise ValueError(f"expected a method out of {', '.join(METHODS)}, got {name!r}")
    found = _own_cells(name, runs)
    if not found:
        return "Not run yet."
    lines = [_line(cell) for own in found.values() for cell in own]
    commands = [
        f"    pecil sweep {table} --only {','.join(f'{c.dataset}/{c.name}' for c in own)}"
        for table, own in found.items()
    ]
    return "\n".join(
        [
            as_markdown(_with_split(HEADER, "split"), lines),
            *(f"\n{note}." for note in notes(found)),
            "\nMade by\n",
            *commands,
        ]
    )


def figure_points(name: str, runs: Runs) -> str:
    """Write what a figure shows, curve by curve, and what gives it again."""
    if name not in FIGURES:
        raise ValueError(f"expected a figure out of {', '.join(FIGURES)}, got {name!r}")
    figure = FIGURES[name]
    points = figure.points(run for own in runs.values() for run in own)
    curves: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        curves.setdefault((point.dataset, point.curve, point.split), []).append(point)
    shown = {curve: own for curve, own in curves.items() if len(own) > 1}
    if not shown:
        return "Not run yet."
    lines = [
        (
            *(title_of(curve), dataset_title(dataset), split, f"{point.x:,.9g}"),
            *(f"{point.accuracy:.2f} ± {point.error:.2f}", str(point.seeds)),
            "tables" if point.usual else "",
        )
        for (dataset, curve, split), own in shown.items()
        for point in own
    ]
    header = ("method", "dataset", "split", figure.x_label, "accuracy", "seeds", "setting of")
    only = ",".join(dict.fromkeys(f"{dataset}/{curve}" for dataset, curve, _ in shown))
    return "\n".join(
        [
            as_markdown(header, lines),
            "\nMade by\n",
            f"    pecil sweep {name} --only {only}",
            f"    pecil figure {name}",
        ]
    )


def _own_cells(method: str, runs: Runs) -> dict[str, list[Cell]]:
    """Return the accuracies of a method by table, each in the first table that shows it."""
    found: dict[str, list[Cell]] = {}
    seen = set[str]()
    for table in definitions():
        for cell in cells(table, runs):
            experiment, counted = cell.experiment, cell.measure != "accuracy"
            if experiment is None or experiment.method != method or not cell.ours or counted:
                continue
            if experiment.kind not in seen:
                found.setdefault(table, []).append(cell)
                seen.add(experiment.kind)
    return found


def _line(cell: Cell) -> tuple[str, ...]:
    return _with_split(cell.columns(), cell.experiment.split if cell.experiment else "")


def _with_split(columns: Sequence[str], split: str) -> tuple[str, ...]:
    """Put a column after those of the method and the dataset."""
    return (*columns[:2], split, *columns[2:])


INTRODUCTION = """# Tables

Test accuracy in percent after one pass, classes one at a time unless a table says
otherwise: mean ± standard error over the seeds, next to the paper's (10 seeds). Ours
agrees with the paper's if it is within max(1 point, 2 combined standard errors), a single
run of ours being taken to vary as the paper's do. Seconds are those of one run, from loading
to testing; of runs that shared a GPU, each one's share.
Made from `results/*.jsonl` by `pecil docs`; each line there holds the settings, versions,
device and time of its run. Every method has a page of its own in [methods/](methods/).
"""
COST = """## What Tables 1 and 2 take

{seeds} seeds of each of their {cells} cells: {cuda:.1f} hours of one GPU and {cpu:.1f} hours of a
CPU, {estimated} of the cells estimated from others of the same method and dataset, {unknown}
not counted since nothing is known of them yet. The paper's authors say that theirs took 466 hours
of an A100.
"""
NOT_RUN = """## Not run yet

No runs but those that a table above shows, too; `pecil table NAME` has the paper's numbers.
"""
