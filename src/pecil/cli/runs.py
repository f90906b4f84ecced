"""Commands that run the benchmark: run, sweep, search, results."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pecil.cli.common import (
    PUBLISHED,
    Buffer,
    Changes,
    Data,
    Device,
    Epochs,
    Json,
    Method,
    Results,
    Split,
    StorePath,
    Workers,
    check_output,
    of_benchmark,
    print_damaged,
    print_facts,
    print_json,
    print_table,
    progress,
    settings_of,
    stored,
)

if TYPE_CHECKING:
    from pecil.bench import Experiment, Result
    from pecil.bench.store import Store
    from pecil.bench.sweeps import Part
    from pecil.engines import Report


class Engine(StrEnum):
    """Where a sweep is carried out."""

    LOCAL = "local"
    RAY = "ray"


class Processor(StrEnum):
    """What a sweep computes on."""

    CPU = "cpu"
    CUDA = "cuda"


class Sampler(StrEnum):
    """How a search chooses what to try."""

    GRID = "grid"
    TPE = "tpe"


@of_benchmark()
def run(
    method: Method,
    dataset: Data,
    split: Split = None,
    seed: Annotated[list[int] | None, typer.Option(help="May be repeated; by default 0.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds 0 to N - 1.", metavar="N")] = None,
    epochs: Epochs = 1,
    steps: Annotated[
        int, typer.Option(min=0, help="Steps a task, each on a whole batch, instead of passes.")
    ] = 0,
    buffer: Buffer = 0,
    random_classes: Annotated[
        bool, typer.Option("--random-classes", help="Order the classes by the seed, too.")
    ] = False,
    setup: Annotated[
        str, typer.Option(metavar="NAME", help="Whose settings, if not the main ones.")
    ] = "",
    changes: Changes = None,
    per_task: Annotated[
        bool, typer.Option("--per-task", help="Test after every task, too.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Run also what has a result in the store.")
    ] = False,
    store: StorePath = None,
    save_results: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Append the results to a file, as well."),
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train a method through a stream of tasks and test it; keep the results in the store.

    What is there already is not run again, unless data of your own has changed.
    """
    from pecil.bench import planned
    from pecil.bench.store import Store, append_line

    if seed and seeds:
        raise typer.BadParameter("give --seed or --seeds, not both")
    if save_results is not None:
        check_output(save_results, dataset)
    settings: dict[str, Any] = {"epochs": epochs, "steps": steps, "buffer": buffer}
    settings |= {"random_classes": random_classes, "setup": setup} | settings_of(changes)
    asked = [
        planned(method, dataset, split, number, **settings)
        for number in (range(seeds) if seeds else seed or [0])
    ]
    kept = Store(store)
    kept.prepare()
    found = {} if again else _finished(kept, asked, per_task)
    results = []
    with progress(f"{method} on {dataset}") as show:
        for result in _carried_out(asked, kept, found, show, device=device, per_task=per_task):
            results.append(result)
            if save_results is not None:
                append_line(save_results, result)
    if as_json:
        print_json([result.row() for result in results])
    else:
        _print_results(results, found=[result.experiment.seed for result in found.values()])


def _finished(
    store: "Store", asked: "Sequence[Experiment]", per_task: bool = False
) -> dict[str, "Result"]:
    """Return the results there are, by key."""
    known = [store.get(experiment.key) for experiment in asked]
    return {
        result.experiment.key: result
        for result in known
        if result and not (per_task and result.accuracy_per_class_after_task is None)
    }


def _carried_out(
    asked: "Sequence[Experiment]",
    store: "Store",
    found: "Mapping[str, Result]",
    show: Callable[[float, float], None],
    **options: Any,
) -> Iterator["Result"]:
    """Yield results, those found as they are, the others once they are run and stored."""
    from pecil.bench import run as carry_out

    for position, experiment in enumerate(asked):

        def steps(done: int, total: int, before: int = position) -> None:
            show(before + done / total, len(asked))

        result = found.get(experiment.key)
        if result is None:
            result = carry_out(experiment, progress=steps, **options)
            store.add(result)
        show(position + 1, len(asked))
        yield result


@of_benchmark()
def sweep(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="See: pecil list tables, pecil list figures."),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATASET/ROW,...",
            help="These cells, or curves DATASET/CURVE, only; * stands for anything. Repeatable.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Seeds 1 to N.")] = 10,
    engine: Annotated[Engine, typer.Option(help="This machine, or Ray.")] = Engine.LOCAL,
    workers: Workers = None,
    within: Annotated[
        float | None,
        typer.Option(min=0, metavar="MINUTES", help="End then, dropping runs under way."),
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Say what would run and how long; run nothing.")
    ] = False,
    plan_for: Annotated[
        Processor | None, typer.Option("--on", help="Plan for this device, not the one at hand.")
    ] = None,
    results: Results = PUBLISHED,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Run what is missing in tables or figures; stop it and start it again as you like."""
    from pecil import engines
    from pecil.bench.figures import FIGURES
    from pecil.bench.store import Store
    from pecil.bench.sweeps import plan
    from pecil.engines import Report

    patterns = [pattern for text in only or () for pattern in text.split(",")]
    device, facts = plan_for or _device(), {"of": ", ".join(names)}
    kept, carry_out = Store(store), engines.engine(engine)
    start, found, report = time.monotonic(), 0, Report(())
    while True:
        known = list(stored(results, store))
        asked = _needed(names, patterns, seeds, known, report)
        to_run, parts = plan(asked, known, device)
        if plan_only:
            _print_plan(facts | {"device": str(device)}, parts, workers, as_json)
            return
        kept.prepare()
        found = found or len(asked) - len(to_run)
        left = None if within is None else 60 * within - (time.monotonic() - start)
        with progress(f"{facts['of']}, {len(to_run)} runs") as show:
            new = carry_out(to_run, kept, workers=workers, within=left, progress=show)
        report = Report(report.done + new.done, report.failed + new.failed)
        unfinished = len(to_run) - len(new.done) - len(new.failed)
        if unfinished or not new.done or not set(names) & set(FIGURES):
            break
    spent = round(time.monotonic() - start, 1)
    counts = {"found": found, "done": len(report.done), "failed": len(report.failed)}
    counts |= {"left": unfinished} if unfinished else {}
    _print_report(facts | counts | {"seconds": spent}, report, as_json)


def _needed(
    names: Sequence[str],
    only: Sequence[str],
    seeds: int,
    known: Sequence["Result"],
    report: "Report",
) -> list["Experiment"]:
    """Return what fills tables, or what figures need next but for what failed.

    A pattern has to fit one of them.
    """
    from pecil.bench.figures import FIGURES
    from pecil.bench.sweeps import experiments, for_figure
    from pecil.bench.tables import cells

    failed = {failure.experiment.key for failure in report.failed}
    for name in names:
        if name not in FIGURES:
            cells(name, [])  # there has to be one
    found: dict[str, Experiment] = {}
    for patterns in [[pattern] for pattern in only] or [[]]:
        misfits = []
        for name in names:
            try:
                if name in FIGURES:
                    own = for_figure(name, patterns, seeds, known, failed)
                else:
                    own = experiments(name, patterns, seeds)
            except ValueError as error:
                misfits.append(error)
            else:
                found |= {experiment.key: experiment for experiment in own}
        if len(misfits) == len(names):
            raise misfits[0]
    return list(found.values())


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _print_plan(
    facts: dict[str, Any], parts: Sequence["Part"], workers: int | None, as_json: bool
) -> None:
    """Print what a sweep would run, and the time it is likely to take: of one GPU, or of cores."""
    from pecil.engines.local import default_workers

    workers = workers or default_workers()
    at_once = workers if facts["device"] == "cpu" else 1
    total = sum(part.to_run * (part.seconds or 0) for part in parts) / at_once
    unknown = sum(part.to_run for part in parts if part.seconds is None)
    facts |= {
        "to_run": sum(part.to_run for part in parts),
        "finished": sum(part.finished for part in parts),
    }
    facts |= {"workers": workers} if facts["device"] == "cpu" else {}
    if as_json:
        rows = [asdict(part) for part in parts]
        print_json(facts | {"seconds": total, "runs_of_unknown_time": unknown, "parts": rows})
        return
    print_table(
        ("dataset", "split", "method", "done", "left", "each"),
        [
            (
                *(part.experiment.dataset, part.experiment.split, _named(part.experiment)),
                *(str(part.finished), str(part.to_run)),
                "?" if part.seconds is None else _duration(part.seconds),
            )
            for part in parts
        ],
    )
    more = f", and {unknown} runs of which nothing is known" if unknown else ""
    print_facts(facts | {"time": f"about {_duration(total)}{more}"})


def _named(experiment: "Experiment") -> str:
    """Name a method with what its rows in a table differ in."""
    marks = {
        str(experiment.buffer): experiment.buffer,
        "labels trick": experiment.settings.get("labels_trick"),
        f"{experiment.epochs} passes": experiment.epochs > 1,
        f"{experiment.steps} steps": experiment.steps,
        f"held out, lr {experiment.settings.get('lr')}": experiment.validation,
    }
    more = ", ".join(mark for mark, there in marks.items() if there)
    return f"{experiment.method} ({more})" if more else experiment.method


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _print_report(facts: Mapping[str, Any], report: "Report", as_json: bool) -> None:
    """Print what became of many experiments; what failed makes it exit code 1."""
    if as_json:
        failed = [{**asdict(f.experiment), "reason": f.reason} for f in report.failed]
        print_json({**facts, "done": report.done, "failed": failed})
    else:
        print_facts(facts)
    _print_failures(report)
    if report.failed:
        raise typer.Exit(1)


def _print_failures(report: "Report") -> None:
    for failure in report.failed:
        about = failure.experiment
        print(
            f"pecil: failed: {about.method} on {about.dataset}, {about.split}, seed {about.seed}, "
            f"{dict(about.settings)}:\n{failure.reason.rstrip()}",
            file=sys.stderr,
        )


@of_benchmark()
def search(
    method: Method,
    dataset: Data,
    split: Split = None,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Run the winner with seeds 0 to N - 1.")
    ] = None,
    epochs: Epochs = 1,
    buffer: Buffer = 0,
    changes: Changes = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=[VALUE,...]", help="Values to try; by default the paper's."),
    ] = None,
    sampler: Annotated[
        Sampler, typer.Option(help=r"All combinations, or what Optuna suggests (pecil\[search]).")
    ] = Sampler.GRID,
    trials: Annotated[int, typer.Option(min=1, help="How many, for tpe.")] = 30,
    workers: Workers = None,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Search for settings on a tenth of the training samples, then run the best on all.

    What is set by --set is not searched.
    """
    from pecil.bench.search import best, candidates, grid_for, tpe, winner
    from pecil.bench.store import Store
    from pecil.engines import Report
    from pecil.engines.local import run_all

    fixed, kept = settings_of(changes), Store(store)
    asked_for = grid_for(method, settings_of(grid), dataset)
    values = {name: choices for name, choices in asked_for.items() if name not in fixed}
    options = {"split": split, "seed": seed, "epochs": epochs, "buffer": buffer} | fixed
    report = Report(())
    kept.prepare()
    with progress(f"{method} on {dataset}, search") as show:
        if sampler is Sampler.TPE:

            def carry_out(experiment: "Experiment") -> "Result":
                found = _finished(kept, [experiment])
                return next(_carried_out([experiment], kept, found, lambda done, total: None))

            tried = tpe(values, trials, carry_out, method, dataset, progress=show, **options)
        else:
            asked = candidates(values, method, dataset, **options)
            report = run_all(asked, kept, workers=workers, progress=show)
            known = [kept.get(experiment.key) for experiment in asked]
            tried = [result for result in known if result]
    _print_failures(report)
    if not tried:
        raise ValueError("no combination could be run")
    found = best(tried)
    finals = [winner(found, number) for number in (range(seeds) if seeds else [seed])]
    with progress(f"{method} on {dataset}, the winner") as show:
        results = list(_carried_out(finals, kept, _finished(kept, finals), show))
    shown = [
        {**{k: r.experiment.settings[k] for k in values}, "accuracy": r.accuracy} for r in tried
    ]
    if as_json:
        rows = [result.row() for result in results]
        print_json({"tried": shown, "winner": found.experiment.settings, "results": rows})
        return
    print_table(
        (*values, "accuracy on held-out samples"),
        [
            (*(str(row[k]) for k in values), f"{100 * row['accuracy']:.2f} %")
            for row in sorted(shown, key=lambda row: -row["accuracy"])
        ],
    )
    print(f"winner: {json.dumps(found.experiment.settings)}")
    _print_results(results)


@of_benchmark(name="results")
def results_(
    method: Annotated[list[str] | None, typer.Option(help="Of this method. Repeatable.")] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="On this dataset.")] = None,
    split: Annotated[list[str] | None, typer.Option(metavar="T/C", help="Of this split.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="With this seed.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="With this setting.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write them to a .jsonl, .csv or .parquet file.")
    ] = None,
    brief: Annotated[
        bool,
        typer.Option("--brief", help="Export no confusion matrices and accuracies over time."),
    ] = False,
    import_: Annotated[
        list[Path] | None,
        typer.Option("--import", help="Add the results of a .jsonl file or another store."),
    ] = None,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """List the results in the store, or some of them; export and import."""
    from pecil.bench.store import Store, export_results

    kept = Store(store)
    facts: dict[str, Any] = {"store": kept.path}
    if import_:
        facts["imported"], damaged = kept.import_(import_)
        print_damaged(damaged)
    wanted = {"method": method, "dataset": dataset, "split": split, "seed": seed}
    details = export is not None and not brief
    found = [
        result
        for result in kept.results(details=details)
        if _is_wanted(result.experiment, wanted, settings_of(settings))
    ]
    print_damaged(kept.damaged())
    if export is not None:
        facts |= {"exported": export_results(found, export), "file": export}
    if export is not None or import_:
        (print_json if as_json else print_facts)(facts)
    elif as_json:
        print_json([result.row() for result in found])
    else:
        _print_lines(found)


def _is_wanted(
    experiment: "Experiment",
    wanted: Mapping[str, Sequence[Any] | None],
    settings: Mapping[str, Any],
) -> bool:
    return all(
        not values or getattr(experiment, name) in values for name, values in wanted.items()
    ) and all(
        name in experiment.settings and experiment.settings[name] == value
        for name, value in settings.items()
    )


def _print_lines(results: Sequence["Result"]) -> None:
    """Print a line for each result; plainly, for there may be thousands."""
    from pecil.bench.experiment import LATER

    lines = [("key", "method", "dataset", "split", "seed", "accuracy", "seconds", "settings")]
    for result in results:
        about = result.experiment
        more = {name: getattr(about, name) for name in LATER if getattr(about, name) != LATER[name]}
        lines.append(
            (
                *(about.key, about.method, about.dataset, about.split, str(about.seed)),
                *(f"{100 * result.accuracy:.2f} %", f"{sum(result.seconds.values()):.1f}"),
                " ".join(f"{k}={v}" for k, v in {**about.settings, **more}.items()),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip())


def _print_results(results: Sequence["Result"], found: Sequence[int] = ()) -> None:
    """Print accuracies in percent, the mean and standard error over seeds, and the costs.

    `found` are the seeds of those that were not run but found in the store.
    """
    from pecil.bench.tables import with_error

    def percent(accuracies: Iterable[float]) -> str:
        return with_error([100 * accuracy for accuracy in accuracies])

    first = results[0]
    print_table(
        ("class", "accuracy"),
        [(c, percent(r.accuracy_per_class[c] for r in results)) for c in first.accuracy_per_class],
    )
    if first.accuracy_after_task:
        after = zip(*(r.accuracy_after_task for r in results), strict=True)
        print_table(
            ("after task", "accuracy on the classes so far"),
            [(str(task), percent(values)) for task, values in enumerate(after, start=1)],
        )
    seconds = {
        phase: sum(r.seconds[phase] for r in results) / len(results) for phase in first.seconds
    }
    print_facts(
        {
            "accuracy": percent(r.accuracy for r in results) + " %",
            "seeds": ", ".join(str(r.experiment.seed) for r in results),
            "found": f"{', '.join(map(str, found))} in the store" if found else None,
            "seconds": ", ".join(f"{phase} {spent:.2f}" for phase, spent in seconds.items()),
            "parameters": first.n_parameters,
            "device": first.device,
        }
    )
