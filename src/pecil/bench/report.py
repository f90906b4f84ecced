"""One HTML page with all tables and figures: ours next to the paper's, each number with its runs.

The page needs nothing but itself: no network, no other file. Without scripts it loses the
sorting of columns, and a number leads to its runs at the end of the page instead of a dialog.
"""

import base64
import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pecil.bench.experiment import Result
from pecil.bench.figures import FIGURES, Figure
from pecil.bench.tables import (
    Cell,
    Runs,
    by_kind,
    cells,
    dataset_title,
    definitions,
    notes,
    with_own_runs,
)
from pecil.files import written_whole

BY_RUN = ("seed", "accuracy", "seconds to load", "seconds to fit", "seconds to test", "key")
VERDICTS = {True: ("yes", "✓ agrees"), False: ("no", "✗ differs"), None: ("new", "ours alone")}


def write(results: Iterable[Result], path: str | os.PathLike[str]) -> None:
    """Write the report on all results at hand, whole or not at all.

    Parameters
    ----------
    results : iterable of Result
        What was run.
    path : path-like
        The HTML file.
    """
    text = page(list(results))
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def page(results: Sequence[Result]) -> str:
    """Return the report as text; the same results give the same text.

    Examples
    --------
    >>> empty = page([])
    >>> "One class at a time" in empty, "92.31" in empty, "not run" in empty
    (True, True, True)
    """
    runs = by_kind(results)
    filled = {name: cells(name, runs) for name in definitions()}
    shown = with_own_runs(filled)
    figures = {name: _figure(figure, results) for name, figure in FIGURES.items()}
    parts = [
        _header(results, filled),
        _contents(filled, figures),
        *(_table(name, own, name in shown) for name, own in filled.items()),
        *(_drawn(name, *found) for name, found in figures.items() if found[1]),
        _missing({name: state for name, (state, drawing) in figures.items() if not drawing}),
        _runs(runs, [cell for own in filled.values() for cell in own]),
    ]
    return "\n".join([_head(), "<body>", *parts, _dialog(), "</body>", "</html>", ""])


def _head() -> str:
    """Write the head; the browser runs no script but ours and loads nothing."""
    allowed = {"style": STYLE, "script": SCRIPT}
    policy = "; ".join(
        [
            "default-src 'none'",
            "img-src data:",
            *(f"{kind}-src 'sha256-{_digest(text)}'" for kind, text in allowed.items()),
        ]
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>pecil: results next to the paper's</title>
<style>{STYLE}</style>
</head>"""


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _dialog() -> str:
    return f"""<dialog aria-label="Runs">
<form method="dialog"><button>Close</button></form>
<div></div>
</dialog>
<script>{SCRIPT}</script>"""


def _header(results: Sequence[Result], filled: Mapping[str, Sequence[Cell]]) -> str:
    unique = {
        (cell.measure, cell.paper, cell.experiment.kind): cell
        for own in filled.values()
        for cell in own
        if cell.experiment
    }
    verdicts = _verdicts(list(unique.values()))
    return f"""<header>
<h1>Results next to the paper’s</h1>
<p>{_number(len(results), "run")}; of {verdicts["compared"]:,} numbers that can be compared,
<strong>{verdicts["agree"]:,} agree</strong> with the paper’s. Test accuracy in percent, mean ±
standard error over the seeds (the paper has 10). Ours agrees if it is within max(1 point,
2 combined standard errors), a single run of ours being taken to vary as the paper’s do.</p>
<ul class="legend"><li class="yes">✓ agrees</li><li class="no">✗ differs</li>
<li class="new">ours alone</li><li class="none">not run</li></ul>
<p class="quiet">In brackets the number of seeds. A number of ours opens its runs. The head of a
column sorts by it: by ours, or by the paper’s where nothing was run.</p>
</header>"""


def _verdicts(own: Sequence[Cell]) -> dict[str, int]:
    return {
        "cells": sum(cell.to_run for cell in own),
        "run": sum(bool(cell.ours) for cell in own),
        "compared": sum(cell.agrees is not None for cell in own),
        "agree": sum(cell.agrees is True for cell in own),
    }


def _contents(filled: Mapping[str, Sequence[Cell]], figures: Mapping[str, tuple[str, str]]) -> str:
    counts = {name: _verdicts(own) for name, own in filled.items()}
    items = [
        f'<a href="#{escape(name)}">{escape(name)} <small>{n["run"]}/{n["cells"]}</small></a>'
        for name, n in counts.items()
    ]
    items += [
        f'<a href="#figure-{escape(name)}">{escape(name)} <small>figure</small></a>'
        for name, (_, drawing) in figures.items()
        if drawing
    ]
    return f'<nav aria-label="Tables and figures">{"".join(items)}</nav>'


def _table(name: str, own: Sequence[Cell], unfolded: bool) -> str:
    definition, counts = definitions()[name], _verdicts(own)
    datasets = definition["datasets"]
    places = {(cell.method, cell.dataset): cell for cell in own}
    heads = [
        _sorter(dataset_title(dataset), definition["splits"][n] if "splits" in definition else "")
        for n, dataset in enumerate(datasets)
    ]
    rows = [
        f'<tr><th scope="row">{escape(method)}</th>'
        + "".join(_cell(places.get((method, dataset))) for dataset in datasets)
        + "</tr>"
        for method in dict.fromkeys(cell.method for cell in own)
    ]
    state = f"{counts['run']} of {counts['cells']} cells run"
    if counts["compared"]:
        state += f", {counts['agree']} of {counts['compared']} agree"
    body = "\n".join(
        [
            '<div class="scroll"><table>',
            f"<thead><tr>{_sorter('method')}{''.join(heads)}</tr></thead>",
            f"<tbody>{chr(10).join(rows)}</tbody>",
            "</table></div>",
            *(f'<p class="quiet">{escape(note)}.</p>' for note in notes({name: own})),
        ]
    )
    return _section(name, name, definition["title"], state, body, unfolded)


def _section(anchor: str, name: str, title: str, state: str, body: str, unfolded: bool) -> str:
    return f"""<details class="part" id="{escape(anchor)}"{" open" if unfolded else ""}>
<summary><h2>{escape(title)}</h2> <span class="quiet"><code>{escape(name)}</code> ·
{escape(state)}</span></summary>
{body}
</details>"""


def _sorter(title: str, split: str = "") -> str:
    small = f" <small>{escape(split)}</small>" if split else ""
    return f'<th scope="col"><button>{escape(title)}{small}</button></th>'


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    paper = f'<span class="paper">paper {escape(cell.paper_text)}</span>' if cell.paper_text else ""
    if not cell.ours:
        state = '<span class="state">not run</span>' if cell.to_run else ""
        return f'<td class="none" data-value="{cell.paper or ""}">{state}{paper}</td>'
    kind, verdict = VERDICTS[cell.agrees]
    anchor = cell.experiment.kind if cell.experiment else ""
    return (
        f'<td class="{kind}" data-value="{cell.mean}"><a href="#runs-{anchor}">'
        f"{escape(cell.our_text)}</a> <small>({len(cell.ours)})</small>"
        f'<span class="state">{verdict} {escape(cell.difference_text)}</span>{paper}</td>'
    )


def _number(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _figure(figure: Figure, results: Sequence[Result]) -> tuple[str, str]:
    """Return what there is to say of a figure, and its drawing if there is something to draw."""
    points = figure.points(results)
    places = {(point.dataset, point.x) for point in points}
    if len(places) == len({dataset for dataset, _ in places}):
        return "nothing to compare yet" if points else "not run", ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.svg"
        try:
            figure.draw(points, path)
        except ImportError as error:
            return str(error), ""
        data = base64.b64encode(path.read_bytes()).decode()
    runs = _number(sum(point.seeds for point in points), "run")
    state = f"{_number(len(points), 'point')}, {runs}"
    text = f"Test accuracy against {figure.x_label}"
    return state, f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(text)}">'


def _drawn(name: str, state: str, drawing: str) -> str:
    body = f'<div class="scroll">{drawing}</div>'
    return _section(f"figure-{name}", name, FIGURES[name].title, f"figure, {state}", body, True)


def _missing(states: Mapping[str, str]) -> str:
    items = [
        f"<li>{escape(FIGURES[name].title)} <code>{escape(name)}</code>: {escape(state)}</li>"
        for name, state in states.items()
    ]
    return f"""<section class="part"><h2>Other figures</h2>
<ul class="quiet">{"".join(items)}</ul></section>"""


def _runs(runs: Runs, own: Sequence[Cell]) -> str:
    """Write the runs behind the tables, folded away; say how many there are of others."""
    shown = {cell.experiment.kind: cell for cell in reversed(own) if cell.experiment}
    parts = [_group(shown[kind], same) for kind, same in runs.items() if kind in shown]
    others = sum(len(same) for kind, same in runs.items() if kind not in shown)
    more = f'<p class="quiet">{others:,} more are in no table.</p>' if others else ""
    return f'<section id="runs"><h2>Runs</h2>\n{chr(10).join(parts)}\n{more}</section>'


def _group(cell: Cell, runs: Sequence[Result]) -> str:
    """Write the runs of one cell: what they share as a list, the rest as a table."""
    facts = [_facts(run) for run in sorted(runs, key=lambda run: run.experiment.seed)]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    columns = [
        name for name in names if name in BY_RUN or len({fact.get(name) for fact in facts}) > 1
    ]
    shared = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(facts[0][name])}</dd>"
        for name in names
        if name not in columns
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(fact.get(name, ''))}</td>" for name in columns) + "</tr>"
        for fact in facts
    )
    experiment = runs[0].experiment
    title = f"{cell.method} on {dataset_title(cell.dataset)}"
    return f"""<details><summary>{escape(title)} <span class="quiet">{escape(experiment.split)} ·
{_number(len(runs), "run")}</span></summary>
<div id="runs-{experiment.kind}"><h3>{escape(title)}</h3>
<dl>{shared}</dl>
<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
</div></details>"""


def _facts(run: Result) -> dict[str, str]:
    """Tell all about a run but its accuracies in parts, as texts."""
    experiment = run.experiment
    percent = {
        "accuracy": run.accuracy,
        "average anytime accuracy": run.average_anytime_accuracy,
        "forgetting": run.forgetting,
    }
    facts: dict[str, Any] = {
        "seed": experiment.seed,
        **{name: f"{100 * v:.2f} %" for name, v in percent.items() if v is not None},
        **{f"seconds to {phase}": f"{spent:.2f}" for phase, spent in run.seconds.items()},
        "split": experiment.split,
        "epochs": None if experiment.steps else experiment.epochs,
        "steps per task": experiment.steps or None,
        "order of classes": "random" if experiment.random_classes else None,
        "buffer": f"{run.buffer_size} of {experiment.buffer}" if experiment.buffer else None,
        "settings": ", ".join(f"{name} = {value}" for name, value in experiment.settings.items()),
        "parameters": f"{run.n_parameters:,}",
        "MACs per sample": None if run.macs is None else f"{run.macs:,}",
        "peak memory": None if run.peak_memory is None else f"{run.peak_memory:,.0f} MiB",
        "device": run.device,
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        "data": run.data_note or None,
        "key": experiment.key,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --ink: #1c2024; --quiet: #62686f;
  --line: #e2e4e6; --accent: #0b4f8a; --yes: #e3f4e8; --yes-ink: #14602f; --no: #fde7dc;
  --no-ink: #94340a; --new: #e5eefb; --new-ink: #1b4b8f; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1c2024; --ink: #e8eaec;
  --quiet: #9aa2aa; --line: #32383e; --accent: #7ab8f0; --yes: #163323; --yes-ink: #86d8a2;
  --no: #43251a; --no-ink: #f4a986; --new: #1b2c44; --new-ink: #9cc3f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 1.5rem 1rem 4rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; line-height: 1.3; margin: 0; display: inline; }
h3 { font-size: 1.05rem; margin: 0 0 .5rem; }
p { max-width: 46rem; margin: .5rem 0; }
a { color: var(--accent); }
small, .quiet { color: var(--quiet); font-size: .85em; font-weight: 400; }
.legend { display: flex; flex-wrap: wrap; gap: .5rem; list-style: none; padding: 0;
  margin: 1rem 0; }
.legend li { padding: .1rem .7rem; border-radius: 1rem; font-size: .85rem; }
nav { display: flex; flex-wrap: wrap; gap: .4rem; margin: 1.5rem 0; }
nav a { padding: .15rem .6rem; border: 1px solid var(--line); border-radius: .4rem;
  background: var(--card); text-decoration: none; font-size: .85rem; white-space: nowrap; }
.part, #runs { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .8rem 1rem; margin: 0 0 .8rem; scroll-margin-top: .5rem; }
summary { cursor: pointer; }
#runs details { margin: .4rem 0; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: separate; border-spacing: 0 3px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-radius: .35rem;
  white-space: nowrap; }
.part table { min-width: min(100%, 46rem); }
.part tbody :is(th, td) { box-shadow: 0 -2px 0 -1px var(--line); }
.part td { border-left: 3px solid var(--card); }
.part th:first-child { position: sticky; left: 0; background: var(--card); white-space: normal;
  min-width: 6.5rem; max-width: 14rem; border-radius: 0; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
th[aria-sort=ascending] button::after { content: " ↑"; }
th[aria-sort=descending] button::after { content: " ↓"; }
td a { font-weight: 600; color: inherit; text-decoration-style: dotted; }
td .state, td .paper { display: block; font-size: .78rem; line-height: 1.35; }
td .paper { color: var(--quiet); }
.yes { background: var(--yes); } .yes .state, li.yes { color: var(--yes-ink); }
.no { background: var(--no); } .no .state, li.no { color: var(--no-ink); }
.new { background: var(--new); } .new .state, li.new { color: var(--new-ink); }
.none { color: var(--quiet); } li.none { border: 1px dashed var(--line); }
img { display: block; width: 100%; max-width: 60rem; height: auto; background: #fff;
  border-radius: .4rem; margin: .8rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .5rem 0;
  font-size: .9rem; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
#runs table, dialog table { font-size: .85rem; }
#runs td, dialog td { padding-block: .1rem; }
#runs th, dialog th { color: var(--quiet); font-weight: 400; }
dialog { width: min(56rem, 94vw); max-height: 86vh; border: 1px solid var(--line);
  border-radius: .7rem; padding: 1.2rem; background: var(--card); color: var(--ink); }
dialog::backdrop { background: #0008; }
dialog form { float: right; }
dialog form button { font: inherit; padding: .1rem .8rem; border: 1px solid var(--line);
  border-radius: .4rem; background: var(--page); color: inherit; cursor: pointer; }
@media (max-width: 40rem) { body { padding: 1rem .6rem 3rem; } .part, #runs { padding: .7rem; }
  nav { flex-wrap: nowrap; overflow-x: auto; } th, td { padding: .3rem .45rem; }
  .part th:first-child { max-width: 7rem; font-size: .85rem; overflow-wrap: anywhere; }
  img { width: 42rem; max-width: none; } }
"""

SCRIPT = """
const dialog = document.querySelector("dialog");
document.addEventListener("click", event => {
  const link = event.target.closest("td a"), head = event.target.closest("th button");
  if (link) {
    event.preventDefault();
    const runs = document.getElementById(link.hash.slice(1)).cloneNode(true);
    runs.removeAttribute("id");
    dialog.querySelector("div").replaceChildren(runs);
    dialog.showModal();
  } else if (head) {
    sort(head.parentElement);
  } else if (event.target === dialog) {
    dialog.close();
  }
});
function sort(head) {
  const place = head.cellIndex, body = head.closest("table").tBodies[0];
  const down = head.ariaSort ? head.ariaSort === "ascending" : place > 0;
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = down ? "descending" : "ascending";
  const value = row => {
    const cell = row.cells[place];
    return place ? parseFloat(cell.dataset.value) : cell.textContent.toLowerCase();
  };
  const order = (a, b) => {
    const x = value(a), y = value(b);
    if (x !== x || y !== y) return (x !== x) - (y !== y);
    return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
  };
  body.append(...[...body.rows].sort(order));
}
addEventListener("hashchange", unfold);
function unfold() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target && target.tagName === "DETAILS") target.open = true;
}
unfold();
"""
