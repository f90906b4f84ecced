"""Commands that show what there is: list, table, docs, figure, report, demo."""

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from pecil.cli.common import (
    PUBLISHED,
    Json,
    Results,
    StorePath,
    check_output,
    of_benchmark,
    print_damaged,
    print_facts,
    print_json,
    print_table,
    progress,
    shown,
    stored,
)
from pecil.files import written_whole


class Kind(StrEnum):
    """What can be listed."""

    METHODS = "methods"
    DATASETS = "datasets"
    TABLES = "tables"
    FIGURES = "figures"


@of_benchmark(name="list")
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
        print_json([{name: getattr(r, name) for name in (*columns, *more)} for r in found])
    else:
        rows = [[shown(getattr(record, name)) for name in columns] for record in found]
        if kind is Kind.METHODS:
            for row, method in zip(rows, found, strict=True):
                row[-1] += f"\n{method.reference}"
        print_table([name.removeprefix("n_") for name in columns], rows)


@of_benchmark()
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

    if output is not None:
        check_output(output, results, store)
    found = stored(results, store)
    if as_json:
        names = [name] if name else list(tables.definitions())
        print_json({n: [asdict(cell) for cell in tables.cells(n, found)] for n in names})
        return
    text = tables.markdown(name, found) if name else pages.page(tables.by_kind(found))
    if output is None:
        print(text, end="")
    else:
        with written_whole(output) as temporary:
            temporary.write_text(text, encoding="utf-8")


@of_benchmark()
def docs(
    folder: Annotated[Path, typer.Argument(help="A checkout of pecil.")] = Path(),
    as_json: Json = False,
) -> None:
    """Bring README.md and docs/, their figures too, up to date with the published results."""
    from pecil.bench.pages import update
    from pecil.bench.store import read_lines

    found, damaged = read_lines(sorted((folder / PUBLISHED).glob("*.jsonl")))
    print_damaged(damaged)
    changed = ", ".join(str(path.relative_to(folder)) for path in update(folder, found))
    facts = {"results": len(found), "changed": changed or "nothing"}
    (print_json if as_json else print_facts)(facts)


@of_benchmark()
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
    check_output(target, results, store)
    points = FIGURES[name].points(stored(results, store))
    FIGURES[name].draw(points, target)
    if as_json:
        print_json({"figure": target, "points": [asdict(point) for point in points]})
    else:
        print_facts({"figure": target, "points": len(points)})


@of_benchmark()
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

    check_output(output, results, store)
    found = stored(results, store)
    write(found, output)
    facts = {"report": output, "results": len(found)}
    (print_json if as_json else print_facts)(facts)


@of_benchmark()
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

    check_output(output)
    with progress("digits, one class at a time") as show:
        measured = curves(range(seeds), show)
    plot(measured, output)
    means = {method: accuracies.mean(axis=0).tolist() for method, accuracies in measured.items()}
    if as_json:
        print_json({"accuracy": means, "seeds": seeds, "plot": output})
        return
    print_table(
        ["classes learned", *(METHODS[method].title for method in means)],
        [
            [str(n), *(f"{100 * accuracy:.1f} %" for accuracy in row)]
            for n, row in enumerate(zip(*means.values(), strict=True), start=1)
        ],
        title="Accuracy on the classes learned so far",
    )
    print(f"mean of {seeds} runs; plot: {output}")
