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
    import tomllib
    from collections import Counter
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import contextmanager
    from dataclasses import asdict, is_dataclass
    from enum import StrEnum
    from pathlib import Path
    from types import FrameType, SimpleNamespace
    from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table

    import pecil
    from pecil.files import written_whole
except ImportError:
    raise SystemExit('pecil: the command line needs more: pip install "pecil[cli]"') from None
except KeyboardInterrupt:
    raise SystemExit(130) from None

if TYPE_CHECKING:
    from pecil import PEC, WhitenedPEC
    from pecil.bench import Result
    from pecil.data import Dataset
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
Results = Annotated[Path, typer.Option(help="A file of results, or a folder of them.")]
OF_WHITENED, OF_PEC = "Options of whitened_pec", "Options of pec"  # headings in the help


class Estimator(StrEnum):
    """What can be fitted and saved."""

    WHITENED_PEC = "whitened_pec"
    PEC = "pec"


class Kind(StrEnum):
    """What can be listed."""

    METHODS = "methods"
    DATASETS = "datasets"
    TABLES = "tables"


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
    method: Annotated[str, typer.Argument(metavar="METHOD", help="See: pecil list methods.")],
    dataset: Data,
    split: Annotated[
        str | None,
        typer.Option(metavar="T/C", help="Tasks / classes per task; by default one class a task."),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="May be repeated; by default 0.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds 0 to N - 1.", metavar="N")] = None,
    changes: Changes = None,
    per_task: Annotated[
        bool, typer.Option("--per-task", help="Test after every task, too.")
    ] = False,
    save_results: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Append the results to a file.")
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train a method through a stream of tasks and test it."""
    from pecil.bench import planned, store
    from pecil.bench import run as carry_out

    if seed and seeds:
        raise typer.BadParameter("give --seed or --seeds, not both")
    if save_results is not None:
        _check_output(save_results)
    settings = _parsed(changes)
    results = []
    for number in range(seeds) if seeds else seed or [0]:
        experiment = planned(method, dataset, split, number, **settings)
        with _progress(f"{method} on {dataset}, seed {number}") as show:
            result = carry_out(experiment, device=device, per_task=per_task, progress=show)
        results.append(result)
        if save_results is not None:
            store.append_line(save_results, result)
    if as_json:
        _print_json([result.row() for result in results])
    else:
        _print_results(results)


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
    """List the methods, the datasets or the paper's tables."""
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
    }
    found, columns, more = records[kind]
    if as_json:
        _print_json([{name: getattr(r, name) for name in (*columns, *more)} for r in found])
    else:
        rows = [[_shown(getattr(record, name)) for name in columns] for record in found]
        _print_table([name.removeprefix("n_") for name in columns], rows)


@app.command()
def table(
    name: Annotated[
        str | None, typer.Argument(help="See: pecil list tables; by default all.")
    ] = None,
    results: Results = Path("results"),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A Markdown file; by default print it.")
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(help="A page to put the table into, at <!-- table NAME: begin --> and end."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show our results next to the paper's, as Markdown."""
    from pecil.bench import tables

    found = _stored(results)
    if into is not None:
        if name is None or output is not None or as_json:
            raise ValueError("--into needs the NAME of one table, and neither --output nor --json")
        page = tables.inserted(into.read_text(encoding="utf-8"), name, found)
        with written_whole(into) as temporary:
            temporary.write_text(page, encoding="utf-8")
        return
    if as_json:
        names = [name] if name else list(tables.definitions())
        _print_json({n: [asdict(cell) for cell in tables.cells(n, found)] for n in names})
        return
    text = tables.markdown(name, found) if name else tables.page(found)
    if output is None:
        print(text, end="")
    else:
        with written_whole(output) as temporary:
            temporary.write_text(text, encoding="utf-8")


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="memory: accuracy against numbers held.")],
    results: Results = Path("results"),
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
    gather, draw = FIGURES[name]
    points = gather(_stored(results))
    draw(points, target)
    if as_json:
        _print_json({"figure": target, "points": [asdict(point) for point in points]})
    else:
        _print_facts({"figure": target, "points": len(points)})


def _stored(results: Path) -> list["Result"]:
    """Read the results of a file or a folder; what is no result is named and passed over."""
    from pecil.bench import store

    files = sorted(results.glob("*.jsonl")) if results.is_dir() else [results]
    found, damaged = store.read_lines(files)
    for line in damaged:
        print(f"pecil: set aside: {line}", file=sys.stderr)
    return found


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


def _load(data: str, label: str | None, labelled: bool = True) -> "Dataset":
    from pecil.data import load

    return load(data, label=label, labelled=labelled)


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
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
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


def _print_results(results: Sequence["Result"]) -> None:
    """Print accuracies in percent, the mean and standard error over seeds, and the costs."""
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
            "seconds": ", ".join(f"{phase} {spent:.2f}" for phase, spent in seconds.items()),
            "parameters": first.n_parameters,
            "device": first.device,
        }
    )


if __name__ == "__main__":
    main()
