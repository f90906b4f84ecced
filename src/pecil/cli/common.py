"""What the commands share: options, the reading of settings, and what is shown."""

import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

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

from pecil.files import check_writable

if TYPE_CHECKING:
    from pecil.bench import Result

app = typer.Typer(
    name="pecil",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
of_models = partial(app.command, rich_help_panel="Models of your own")
of_benchmark = partial(app.command, rich_help_panel="The benchmark")


def _usable(device: str) -> str:
    """Refuse a device that is not there before any work begins."""
    if device != "auto":
        import torch

        try:
            torch.zeros(1, device=device).item()
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


def stored(results: Path, store: Path | None) -> list["Result"]:
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
    print_damaged([*damaged, *kept.damaged()])
    return list(every.values())


def print_damaged(damaged: Iterable[Any]) -> None:
    """Name what is no result, on standard error."""
    for part in damaged:
        print(f"pecil: set aside: {part}", file=sys.stderr)


def settings_of(changes: Sequence[str] | None) -> dict[str, Any]:
    """Read KEY=VALUE."""
    settings = {}
    for change in changes or ():
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"expected --set KEY=VALUE, got {change!r}")
        settings[key.strip()] = value_of(text)
    return settings


def value_of(text: str) -> Any:
    """Read a TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def check_output(path: Path, *inputs: str | Path | None) -> None:
    """Refuse to begin what could not be saved in the end, or only over what is to be read."""
    check_writable(path)
    read = [Path(given) for given in inputs if given is not None]
    if path.exists() and any(given.exists() and path.samefile(given) for given in read):
        raise ValueError(f"cannot write {path}: it is what is to be read; choose another name")


@contextmanager
def progress(description: str) -> Iterator[Callable[[float, float], None]]:
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


def print_json(value: Any) -> None:
    """Print a value as JSON, which has no NaN and no infinity: they become null."""
    plain = json.loads(json.dumps(value, default=_plain), parse_constant=lambda _: None)
    print(json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=2))


def _plain(value: Any) -> Any:
    """Turn a recipe into its fields, a numpy scalar into a number, anything else into a text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"recipe": type(value).__name__, **asdict(value)}
    return value.item() if hasattr(value, "item") else str(value)


def shown(value: Any) -> str:
    """Write a value for people."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case tuple() | list() if all(isinstance(part, float) for part in value):
            first = ", ".join(f"{part:.4g}" for part in value[:4])
            return first + (f" and {len(value) - 4} more" if value[4:] else "")
        case tuple() | list():
            return " × ".join(map(str, value))
        case _:
            return str(value)


def print_facts(facts: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print names and values, one a line; None is left out, accuracies are in percent."""
    known = {name: value for name, value in facts.items() if value is not None}
    if isinstance(known.get("accuracy"), float):
        known["accuracy"] = f"{100 * known['accuracy']:.2f} %"
    width = max(map(len, known))
    for name, value in known.items():
        print(f"{name.removeprefix('n_').replace('_', ' '):<{width}}  {shown(value)}", file=file)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print rows of texts as a table; all columns but the last stay whole."""
    grid = Table(title=title or None, title_justify="left")
    for position, name in enumerate(header):
        grid.add_column(name, no_wrap=position < len(header) - 1)
    for row in rows:
        grid.add_row(*row)
    Console(markup=False, highlight=False).print(grid)
