"""The command line.

Exit codes: 0 done, 1 the request cannot be met (a message says why), 2 the
command was not understood, 130 stopped by Ctrl-C. Models and tables are written
whole or not at all. ``--json`` makes standard output pure JSON; progress goes to
standard error, and only to a terminal.
"""

try:
    import csv
    import json
    import os
    import signal
    import sys
    import threading
    import time
    import tomllib
    from collections import Counter
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import contextmanager
    from dataclasses import asdict, is_dataclass
    from datetime import timedelta
    from enum import StrEnum
    from pathlib import Path
    from types import FrameType, SimpleNamespace
    from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

    import typer
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table

    import pecil
    from pecil.files import written_whole
except ImportError:
    raise SystemExit('pecil: the command line needs more: pip install "pecil[cli]"') from None
except KeyboardInterrupt:
    raise SystemExit(130) from None

if TYPE_CHECKING:
    from pecil import PEC, WhitenedPEC
    from pecil.bench import Experiment, Result
    from pecil.bench.store import Store
    from pecil.bench.sweeps import Part
    from pecil.data import Dataset
    from pecil.engines import Report
    from pecil.methods.learner import Array

    Classifier = PEC | WhitenedPEC

CHUNK = 1000  # samples between two updates of a progress bar

app = typer.Typer(
    name="pecil",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _usable(device: str) -> str:
    """Refuse a device that is not there before any work begins."""
    if device != "auto":
        import torch

        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as error:
            raise ValueError(f"expected auto, cpu, cuda, ..., got {device!r}: {error}") from error
    return device


Json = Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")]
Device = Annotated[str, typer.Option(callback=_usable, help="auto, cpu, cuda, ...")]
Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A dataset's name; or a folder of images per class, an .npz, .csv or .parquet.",
    ),
]
Label = Annotated[str | None, typer.Option(help="The column of labels in a table.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where to save the model.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting.")
]
PUBLISHED = Path("results")
Results = Annotated[
    Path, typer.Option(help="A file of published results (.jsonl), or a folder of them.")
]
StorePath = Annotated[
    Path | None,
    typer.Option("--store", help="Where results are; else $PECIL_STORE or results/store.sqlite."),
]
Method = Annotated[str, typer.Argument(metavar="METHOD", help="See: pecil list methods.")]
Split = Annotated[
    str | None,
    typer.Option(metavar="T/C", help="Tasks / classes per task; by default one class a task."),
]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the samples of a task.")]
Buffer = Annotated[
    int,
    typer.Option(min=0, help="Samples that the method may keep; by default 500 if it keeps any."),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Processes; by default one a core, at most twelve a GPU.")
]
OF_WHITENED, OF_PEC = "Options of whitened_pec", "Options of pec"  # headings in the help


class Estimator(StrEnum):
    """What can be fitted and saved."""

    WHITENED_PEC = "whitened_pec"
    PEC = "pec"


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


class Kind(StrEnum):
    """What can be listed."""

    METHODS = "methods"
    DATASETS = "datasets"
    TABLES = "tables"
    FIGURES = "figures"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; mistakes become a message and exit code 1."""
    with _ctrl_c():
        try:
            app(args=arguments, prog_name="pecil")
        except (ValueError, OSError, ImportError) as error:
            print("pecil:", " ".join(str(error).split()), file=sys.stderr)
            raise SystemExit(1) from None


@contextmanager
def _ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end a command, even amid its imports, where it is at times mistaken or lost."""
    usual = signal.getsignal(signal.SIGINT)
    if (
        usual is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _stop(_: int, frame: FrameType | None) -> None:
    """Exit at once if a module is being imported, else raise KeyboardInterrupt."""
    while frame is not None and frame.f_code is not main.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _version(wanted: bool) -> None:
    if wanted:
        print("pecil", pecil.__version__)
        raise typer.Exit


@app.callback()
def _pecil(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Learn new classes one at a time, from a single pass, without forgetting."""


@app.command()
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

    What is there already is not run again, except on data of your own, which may have changed.
    """
    from pecil.bench import planned
    from pecil.bench.store import Store, append_line

    if seed and seeds:
        raise typer.BadParameter("give --seed or --seeds, not both")
    if save_results is not None:
        _check_output(save_results)
    settings: dict[str, Any] = {"epochs": epochs, "steps": steps, "buffer": buffer}
    settings |= {"random_classes": random_classes, "setup": setup} | _parsed(changes)
    asked = [
        planned(method, dataset, split, number, **settings)
        for number in (range(seeds) if seeds else seed or [0])
    ]
    kept = Store(store)
    kept.prepare()
    found = {} if again else _finished(kept, asked, per_task)
    results = []
    with _progress(f"{method} on {dataset}") as show:
        for result in _carried_out(asked, kept, found, show, device=device, per_task=per_task):
            results.append(result)
            if save_results is not None:
                append_line(save_results, result)
    if as_json:
        _print_json([result.row() for result in results])
    else:
        _print_results(results, found=[result.experiment.seed for result in found.values()])


def _finished(
    store: "Store", asked: "Sequence[Experiment]", per_task: bool = False
) -> dict[str, "Result"]:
    """Return the results there are, by key; a path does not tell whether its data changed."""
    from pecil.data import DATASETS

    known = [store.get(experiment.key) for experiment in asked if experiment.dataset in DATASETS]
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


@app.command()
def sweep(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="See: pecil list tables, pecil list figures."),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATASET/ROW,...",
            help="These cells, or curves DATASET/METHOD, only; * stands for anything. Repeatable.",
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
        known = list(_stored(results, store))
        asked = _needed(names, patterns, seeds, known, report)
        to_run, parts = plan(asked, known, device)
        if plan_only:
            _print_plan(facts | {"device": str(device)}, parts, workers, as_json)
            return
        kept.prepare()
        found = found or len(asked) - len(to_run)
        left = None if within is None else 60 * within - (time.monotonic() - start)
        with _progress(f"{facts['of']}, {len(to_run)} runs") as show:
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
        _print_json(facts | {"seconds": total, "runs_of_unknown_time": unknown, "parts": rows})
        return
    _print_table(
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
    _print_facts(facts | {"time": f"about {_duration(total)}{more}"})


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
        _print_json({**facts, "done": report.done, "failed": failed})
    else:
        _print_facts(facts)
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


@app.command()
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
        Sampler, typer.Option(help="All combinations, or what Optuna suggests (pecil[search]).")
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

    fixed, kept = _parsed(changes), Store(store)
    asked_for = grid_for(method, _parsed(grid), dataset)
    values = {name: choices for name, choices in asked_for.items() if name not in fixed}
    options = {"split": split, "seed": seed, "epochs": epochs, "buffer": buffer} | fixed
    report = Report(())
    kept.prepare()
    with _progress(f"{method} on {dataset}, search") as show:
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
    with _progress(f"{method} on {dataset}, the winner") as show:
        results = list(_carried_out(finals, kept, _finished(kept, finals), show))
    shown = [
        {**{k: r.experiment.settings[k] for k in values}, "accuracy": r.accuracy} for r in tried
    ]
    if as_json:
        rows = [result.row() for result in results]
        _print_json({"tried": shown, "winner": found.experiment.settings, "results": rows})
        return
    _print_table(
        (*values, "accuracy on held-out samples"),
        [
            (*(str(row[k]) for k in values), f"{100 * row['accuracy']:.2f} %")
            for row in sorted(shown, key=lambda row: -row["accuracy"])
        ],
    )
    print(f"winner: {json.dumps(found.experiment.settings)}")
    _print_results(results)


@app.command(name="results")
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
        _print_damaged(damaged)
    wanted = {"method": method, "dataset": dataset, "split": split, "seed": seed}
    details = export is not None and not brief
    found = [
        result
        for result in kept.results(details=details)
        if _is_wanted(result.experiment, wanted, _parsed(settings))
    ]
    _print_damaged(kept.damaged())
    if export is not None:
        facts |= {"exported": export_results(found, export), "file": export}
    if export is not None or import_:
        (_print_json if as_json else _print_facts)(facts)
    elif as_json:
        _print_json([result.row() for result in found])
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


@app.command()
def fit(
    data: Data,
    output: Output,
    method: Annotated[
        Estimator, typer.Option(help="whitened_pec: exact and accurate; pec: the paper's own.")
    ] = Estimator.WHITENED_PEC,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="auto, natural, strokes, signs, relu, rbf or identity.",
            rich_help_panel=OF_WHITENED,
        ),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Numbers to hold.", rich_help_panel=OF_WHITENED)
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(
            help="auto, mlp, conv or linear: of students and teacher.", rich_help_panel=OF_PEC
        ),
    ] = None,
    student_width: Annotated[
        int | None, typer.Option(help="Hidden units of a student.", rich_help_panel=OF_PEC)
    ] = None,
    teacher_width: Annotated[
        int | None, typer.Option(help="Hidden units of the teacher.", rich_help_panel=OF_PEC)
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Parameters per class.", rich_help_panel=OF_PEC)
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of Adam.", rich_help_panel=OF_PEC)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data.", rich_help_panel=OF_PEC)
    ] = None,
    changes: Changes = None,
    seed: Annotated[int, typer.Option(help="Decides the teacher; equal in models to merge.")] = 0,
    label: Label = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Learn DATA from nothing and save the model; test it if there is a test part.

    A dataset of the benchmark starts from the benchmark's settings.
    """
    _check_output(output)
    options = {
        "teacher": teacher,
        "memory": memory,
        "architecture": architecture,
        "student_width": student_width,
        "teacher_width": teacher_width,
        "budget": budget,
        "lr": lr,
        "epochs": epochs,
        "random_state": seed,
        "device": device,
    }
    given = {name: value for name, value in options.items() if value is not None}
    model = _new(method, data, given | _parsed(changes))
    samples = _load(data, label)
    if model.mean is None and model.std is None:
        model.set_params(mean=samples.mean, std=samples.std)
    with _progress(f"learning {len(samples.train_x):,} samples"):
        model.fit(samples.train_x, samples.train_y)
    model.save(output)
    _print_saved(model, output, samples, as_json)


@app.command()
def features(
    data: Data,
    network: Annotated[
        str,
        typer.Option(help="timm:NAME, pre-trained (needs pecil[timm]); or a TorchScript file."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to save them, an .npz.")],
    size: Annotated[
        int | None, typer.Option(min=1, help="Height and width that images are brought to.")
    ] = None,
    changes: Changes = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Where finished parts are kept; else features/ beside the datasets."),
    ] = None,
    label: Label = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compute the features of images by a frozen network; the file is a dataset to learn from.

    Stop it as you like: it goes on where it stopped.
    """
    import numpy as np

    from pecil.data import Features
    from pecil.data.registry import data_folder
    from pecil.methods import check_settings

    _check_output(output)
    if output.suffix.lower() != ".npz":
        raise ValueError(f"expected a name that ends in .npz for the features, got {output}")
    extractor = Features(network, size=size, device=device)
    given, own = _parsed(changes), {"network", "size", "device", "cache"}
    check_settings("Features", given, sorted(set(extractor.get_params()) - own))
    extractor.set_params(cache=cache or data_folder() / "features", **given).fit()
    samples = _load(data, label, labelled=False, on_disk=True)
    parts = {"train": (samples.train_x, samples.train_y)}
    if samples.test_x is not None:
        parts["test"] = (samples.test_x, samples.test_y)
    arrays: dict[str, Any] = {"note": f"features of {samples.name} by {network}"}
    for part, (x, y) in parts.items():
        arrays[f"{part}_x"] = extractor.transform(x)
        if y is not None:
            arrays[f"{part}_y"] = y
    with written_whole(output) as temporary:
        np.savez(temporary, **arrays)
    facts = {
        "output": output,
        "samples": sum(len(x) for x, _ in parts.values()),
        "n_features": arrays["train_x"].shape[1],
    }
    (_print_json if as_json else _print_facts)(facts)


@app.command()
def learn(
    model: Model,
    data: Data,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to save; by default the model's own file."),
    ] = None,
    label: Label = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Go on learning: more samples of known classes, and new classes."""
    target = output or model
    _check_output(target)
    learner = _model(model, device)
    samples = _load(data, label)
    if isinstance(learner, pecil.PEC):
        learner.set_params(expected_samples=_expected(learner, samples.train_y))
    with _progress(f"learning {len(samples.train_x):,} samples"):
        learner.partial_fit(samples.train_x, samples.train_y)
    learner.save(target)
    _print_saved(learner, target, samples, as_json)


@app.command()
def predict(
    model: Model,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A dataset's name; or a folder of images, an .npz, .csv or .parquet, with labels "
            "or without.",
        ),
    ],
    novelty: Annotated[bool, typer.Option("--novelty", help="Add the smallest error.")] = False,
    reject_as: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="The label of samples that resemble no known class."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A CSV file; by default print it.")
    ] = None,
    label: Label = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Name the class of every sample, as CSV; of the test part where there is one.

    The samples need no labels; those that have labels tell the accuracy.
    """
    if output is not None:
        _check_output(output)
    learner = _model(model, device)
    samples = _load(data, label, labelled=False)
    x, y, files = samples.test_x, samples.test_y, samples.test_files
    if x is None:
        x, y, files = samples.train_x, samples.train_y, samples.train_files
    rows = _predictions(learner, x, novelty, reject_as, files)
    facts: dict[str, Any] = {"samples": len(rows)}
    if y is not None:
        facts["accuracy"] = _accuracy(rows, y)
    if output is not None:
        with (
            written_whole(output) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as file,
        ):
            _write_csv(file, rows)
        facts["output"] = output
    if as_json:
        _print_json(facts if output else facts | {"predictions": rows})
    elif output is None:
        _write_csv(sys.stdout, rows)
    else:
        _print_facts(facts)


@app.command()
def info(model: Model, as_json: Json = False) -> None:
    """Show what a saved model is and knows."""
    facts = _facts(_model(model, "cpu"), model)
    if as_json:
        _print_json(facts)
    else:
        classes = [(str(c["label"]), f"{c['samples']:,}") for c in facts.pop("classes")]
        _print_facts(facts | facts.pop("settings"))
        _print_table(("class", "samples seen"), classes)


@app.command()
def merge(
    models: Annotated[list[Path], typer.Argument(help="Two models or more.")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Put models that learned apart together; nothing is trained again.

    Models of whitened_pec may know the same classes, those of pec may not.
    """
    if len(models) < 2:
        raise typer.BadParameter("expected two models or more")
    _check_output(output)
    merged: Any = _model(models[0], "cpu")
    for path in models[1:]:
        merged.merge(_model(path, "cpu"))
    merged.save(output)
    _print_saved(merged, output, None, as_json)


@app.command(name="list")
def list_(kind: Kind, as_json: Json = False) -> None:
    """List the methods, the datasets, or the tables and figures of the paper."""
    from pecil.bench.figures import FIGURES
    from pecil.bench.tables import definitions
    from pecil.data import DATASETS
    from pecil.methods import METHODS

    records: dict[Kind, tuple[Sequence[Any], Sequence[str], Sequence[str]]] = {
        # what there is, the columns for everyone, and those for machines alone
        Kind.METHODS: (
            list(METHODS.values()),
            ("name", "title", "buffer", "description"),
            ("reference",),
        ),
        Kind.DATASETS: (
            list(DATASETS.values()),
            ("name", "shape", "n_classes", "n_train", "n_test", "licence"),
            ("title", "source", "note"),
        ),
        Kind.TABLES: (
            [SimpleNamespace(name=name, **t) for name, t in definitions().items()],
            ("name", "title"),
            (),
        ),
        Kind.FIGURES: (list(FIGURES.values()), ("name", "title"), ()),
    }
    found, columns, more = records[kind]
    if as_json:
        _print_json([{name: getattr(r, name) for name in (*columns, *more)} for r in found])
    else:
        rows = [[_shown(getattr(record, name)) for name in columns] for record in found]
        if kind is Kind.METHODS:
            for row, method in zip(rows, found, strict=True):
                row[-1] += f"\n{method.reference}"
        _print_table([name.removeprefix("n_") for name in columns], rows)


@app.command()
def table(
    name: Annotated[
        str | None, typer.Argument(help="See: pecil list tables; by default all.")
    ] = None,
    results: Results = PUBLISHED,
    store: StorePath = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A Markdown file; by default print it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show our results next to the paper's, as Markdown."""
    from pecil.bench import pages, tables

    found = _stored(results, store)
    if as_json:
        names = [name] if name else list(tables.definitions())
        _print_json({n: [asdict(cell) for cell in tables.cells(n, found)] for n in names})
        return
    text = tables.markdown(name, found) if name else pages.page(tables.by_kind(found))
    if output is None:
        print(text, end="")
    else:
        with written_whole(output) as temporary:
            temporary.write_text(text, encoding="utf-8")


@app.command()
def docs(
    folder: Annotated[Path, typer.Argument(help="A checkout of pecil.")] = Path(),
    as_json: Json = False,
) -> None:
    """Bring the numbers in README.md and docs/ up to date with the published results."""
    from pecil.bench.pages import update
    from pecil.bench.store import read_lines

    found, damaged = read_lines(sorted((folder / PUBLISHED).glob("*.jsonl")))
    _print_damaged(damaged)
    changed = ", ".join(str(path.relative_to(folder)) for path in update(folder, found))
    facts = {"results": len(found), "changed": changed or "nothing"}
    (_print_json if as_json else _print_facts)(facts)


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="See: pecil list figures.")],
    results: Results = PUBLISHED,
    store: StorePath = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to save it; by default pecil-NAME.png."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw our results."""
    from pecil.bench.figures import FIGURES

    if name not in FIGURES:
        raise ValueError(f"expected a figure out of {', '.join(FIGURES)}, got {name!r}")
    target = output or Path(f"pecil-{name}.png")
    _check_output(target)
    points = FIGURES[name].points(_stored(results, store))
    FIGURES[name].draw(points, target)
    if as_json:
        _print_json({"figure": target, "points": [asdict(point) for point in points]})
    else:
        _print_facts({"figure": target, "points": len(points)})


@app.command()
def report(
    results: Results = PUBLISHED,
    store: StorePath = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to save it, an HTML file.")
    ] = Path("pecil-report.html"),
    as_json: Json = False,
) -> None:
    """Put all tables and figures on one page, ours next to the paper's, each with its runs."""
    from pecil.bench.report import write

    _check_output(output)
    found = _stored(results, store)
    write(found, output)
    facts = {"report": output, "results": len(found)}
    (_print_json if as_json else _print_facts)(facts)


def _stored(results: Path, store: Path | None) -> list["Result"]:
    """Read what is published and what is in the store, which counts where there are both.

    What is no result is named and passed over; confusion matrices and the like are left out.
    """
    from pecil.bench.store import Store, read_lines

    files = [results] if results.is_file() or results != PUBLISHED else []
    if results.is_dir():
        files = sorted(results.glob("*.jsonl"))
    published, damaged = read_lines(files)
    kept = Store(store)
    every = {result.experiment.key: result for result in published}
    every |= {result.experiment.key: result for result in kept.results(details=False)}
    _print_damaged([*damaged, *kept.damaged()])
    return list(every.values())


def _print_damaged(damaged: Iterable[Any]) -> None:
    for part in damaged:
        print(f"pecil: set aside: {part}", file=sys.stderr)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to save the plot.")] = Path(
        "pecil-demo.png"
    ),
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Runs to average.")] = 5,
    as_json: Json = False,
) -> None:
    """Teach digits one class at a time: whitened PEC, PEC, and a network that forgets."""
    from pecil.bench.demo import curves, plot
    from pecil.methods import METHODS

    _check_output(output)
    with _progress("digits, one class at a time") as show:
        measured = curves(range(seeds), show)
    plot(measured, output)
    means = {method: accuracies.mean(axis=0).tolist() for method, accuracies in measured.items()}
    if as_json:
        _print_json({"accuracy": means, "seeds": seeds, "plot": output})
        return
    _print_table(
        ["classes learned", *(METHODS[method].title for method in means)],
        [
            [str(n), *(f"{100 * accuracy:.1f} %" for accuracy in row)]
            for n, row in enumerate(zip(*means.values(), strict=True), start=1)
        ],
        title="Accuracy on the classes learned so far",
    )
    print(f"mean of {seeds} runs; plot: {output}")


def _parsed(changes: Sequence[str] | None) -> dict[str, Any]:
    """Read KEY=VALUE."""
    settings = {}
    for change in changes or ():
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"expected --set KEY=VALUE, got {change!r}")
        settings[key.strip()] = _value(text)
    return settings


def _value(text: str) -> Any:
    """Read a TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _check_output(path: Path) -> None:
    """Refuse to begin what could not be saved in the end."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder")


def _new(method: Estimator, data: str, given: Mapping[str, Any]) -> Any:
    """Make a model with the settings given, and else with those chosen for the dataset."""
    from pecil.bench.experiment import settings_for
    from pecil.data import DATASETS
    from pecil.methods import METHODS, check_settings, whitened_pec

    make: Callable[..., Any] = whitened_pec if method is Estimator.WHITENED_PEC else pecil.PEC
    owner, options = METHODS[method].title, METHODS[method].options
    if unknown := set(given).difference(options):
        for other in Estimator:
            if unknown.issubset(METHODS[other].options):
                owner += f", unlike --method {other},"
        check_settings(owner, unknown, sorted(options))
    settings = settings_for(method, data, **given)
    if data in DATASETS and "expected_classes" in options:
        settings.setdefault("expected_classes", DATASETS[data].n_classes)
    return make(**settings)


def _model(path: Path, device: str) -> "Classifier":
    return cast("Classifier", pecil.load(path, device=device))


def _load(data: str, label: str | None, labelled: bool = True, on_disk: bool = False) -> "Dataset":
    from pecil.data import load

    return load(data, label=label, labelled=labelled, on_disk=on_disk)


def _expected(model: "PEC", labels: "Array") -> Any:
    """Let the learning rate of new classes fall over the samples that are there."""
    given, known = model.expected_samples, model.samples_seen_
    if isinstance(given, int):
        return given
    return {**(given or {}), **Counter(c for c in labels.tolist() if c not in known)}


def _predictions(
    model: "Classifier",
    x: "Array",
    novelty: bool = False,
    reject_as: str | None = None,
    files: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Predict chunk by chunk: one row (index, file if known, label, novelty if asked) a sample."""
    options = {} if reject_as is None else {"reject_as": _value(reject_as)}
    rows: list[dict[str, Any]] = []
    with _progress(f"predicting {len(x):,} samples") as show:
        for start in range(0, len(x), CHUNK):
            chunk = x[start : start + CHUNK]
            for label in model.predict(chunk, **options).tolist():
                file = {"file": files[len(rows)]} if files else {}
                rows.append({"index": len(rows), **file, "label": label})
            if novelty:
                for row, value in zip(rows[start:], model.novelty(chunk).tolist(), strict=True):
                    row["novelty"] = value
            show(len(rows), len(x))
    return rows


def _accuracy(rows: Sequence[Mapping[str, Any]], y: "Array") -> float:
    """Return the share of right labels."""
    return sum(row["label"] == label for row, label in zip(rows, y.tolist(), strict=True)) / len(y)


def _write_csv(file: TextIO, rows: Sequence[Mapping[str, Any]]) -> None:
    writer = csv.DictWriter(file, fieldnames=rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _facts(model: "Classifier", path: Path) -> dict[str, Any]:
    """Return what there is to say about a saved model."""
    seen = model.samples_seen_
    if isinstance(model, pecil.PEC):
        size = {"n_parameters_per_class": model.n_parameters_per_class_}
    else:
        size = {"n_features": model.dim_}
    return {
        "model": path,
        "kind": type(model).__name__,
        "bytes": path.stat().st_size,
        "input_shape": model.input_shape_,
        "n_parameters": model.n_parameters_,
        **size,
        "classes": [{"label": c, "samples": seen[c]} for c in model.classes_.tolist()],
        "settings": model.get_params(),
    }


def _print_saved(model: "Classifier", path: Path, samples: "Dataset | None", as_json: bool) -> None:
    """Report on a model just saved, with its accuracy where there are samples to test it."""
    facts = _facts(model, path)
    if samples is not None and samples.test_x is not None and samples.test_y is not None:
        rows = _predictions(model, samples.test_x)
        facts["accuracy"] = _accuracy(rows, samples.test_y)
    if as_json:
        _print_json(facts)
    else:
        _print_facts(facts | {"classes": len(facts["classes"]), "settings": None})


@contextmanager
def _progress(description: str) -> Iterator[Callable[[float, float], None]]:
    """Show a spinner and the time, a bar once the steps are known; only on a terminal."""
    console = Console(stderr=True)
    columns = (
        *(SpinnerColumn(), TextColumn("{task.description}"), BarColumn()),
        *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_json(value: Any) -> None:
    print(json.dumps(value, default=_plain, ensure_ascii=False, indent=2))


def _plain(value: Any) -> Any:
    """Turn a recipe into its fields, a numpy scalar into a number, anything else into a text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"recipe": type(value).__name__, **asdict(value)}
    return value.item() if hasattr(value, "item") else str(value)


def _shown(value: Any) -> str:
    """Write a value for people."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case tuple() | list():
            return " × ".join(map(str, value))
        case _:
            return str(value)


def _print_facts(facts: Mapping[str, Any]) -> None:
    """Print names and values, one a line; None is left out, accuracies are in percent."""
    known = {name: value for name, value in facts.items() if value is not None}
    if isinstance(known.get("accuracy"), float):
        known["accuracy"] = f"{100 * known['accuracy']:.2f} %"
    width = max(map(len, known))
    for name, value in known.items():
        print(f"{name.removeprefix('n_').replace('_', ' '):<{width}}  {_shown(value)}")


def _print_table(header: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    grid = Table(title=title or None, title_justify="left")
    for position, name in enumerate(header):
        grid.add_column(name, no_wrap=position < len(header) - 1)
    for row in rows:
        grid.add_row(*row)
    Console(markup=False, highlight=False).print(grid)


def _print_results(results: Sequence["Result"], found: Sequence[int] = ()) -> None:
    """Print accuracies in percent, the mean and standard error over seeds, and the costs.

    `found` are the seeds of those that were not run but found in the store.
    """
    from pecil.bench.tables import with_error

    def percent(accuracies: Iterable[float]) -> str:
        return with_error([100 * accuracy for accuracy in accuracies])

    first = results[0]
    _print_table(
        ("class", "accuracy"),
        [(c, percent(r.accuracy_per_class[c] for r in results)) for c in first.accuracy_per_class],
    )
    if first.accuracy_after_task:
        after = zip(*(r.accuracy_after_task for r in results), strict=True)
        _print_table(
            ("after task", "accuracy on the classes so far"),
            [(str(task), percent(values)) for task, values in enumerate(after, start=1)],
        )
    seconds = {
        phase: sum(r.seconds[phase] for r in results) / len(results) for phase in first.seconds
    }
    _print_facts(
        {
            "accuracy": percent(r.accuracy for r in results) + " %",
            "seeds": ", ".join(str(r.experiment.seed) for r in results),
            "found": f"{', '.join(map(str, found))} in the store" if found else None,
            "seconds": ", ".join(f"{phase} {spent:.2f}" for phase, spent in seconds.items()),
            "parameters": first.n_parameters,
            "device": first.device,
        }
    )


if __name__ == "__main__":
    main()
