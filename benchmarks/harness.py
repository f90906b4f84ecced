"""What the harness costs: a run of it next to calling the method, and a store of 10,000 results.

python benchmarks/harness.py measures and keeps the figures in results/speed/harness.jsonl;
--smoke takes the digits and 100 results and keeps nothing, --table only writes the table in
docs/extending.md anew.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common import ROOT, Row, describe, keep, kept, number, put, timed
from pecil import PEC
from pecil.bench import tables
from pecil.bench.experiment import Result, planned, run, settings_for
from pecil.bench.store import Store
from pecil.data import load, stream

RESULTS = ROOT / "results" / "speed" / "harness.jsonl"
PAGE = ROOT / "docs" / "extending.md"
SEED = 1


def by_hand(dataset: str) -> float:
    """Train PEC on a dataset's stream and test it, without the harness; return the accuracy."""
    data: Any = load(dataset)
    classes = len(np.unique(data.train_y))
    statistics = {"mean": data.mean, "std": data.std}
    model = PEC(**settings_for("pec", dataset), **statistics, shuffle=False, random_state=SEED)
    (task,) = stream(data, f"1/{classes}", seed=SEED)
    model.fit(task.x, task.y)
    return model.score(data.test_x, data.test_y)


def by_harness(dataset: str) -> float:
    """Do the same by an experiment."""
    return run(planned("pec", dataset, seed=SEED), device="auto").accuracy


def overhead(dataset: str, rounds: int) -> Row:
    """Time both in turn, after a first round that does not count; the best of each counts."""
    seconds: dict[str, list[float]] = {"by_hand": [], "by_harness": []}
    for _ in range(rounds + 1):
        for name, function in (("by_hand", by_hand), ("by_harness", by_harness)):
            _, spent = timed(function, dataset)
            seconds[name].append(spent)
            print(f"{name}: {spent:.3f} s", file=sys.stderr, flush=True)
    return {name: min(spent[1:]) for name, spent in seconds.items()}


def stored(n: int) -> Row:
    """Time listing and tabulating n results: the functions, and whole commands."""
    one = run(planned("nearest_mean", "digits", seed=SEED), device="cpu", per_task=True)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder, "store.sqlite"))
        _, adding = timed(store.add, *(copied(one, k) for k in range(n)))
        kept, listing = timed(lambda: list(store.results()))
        _, tabulating = timed(tables.cells, "table1", kept)
        commands = {
            name: timed(command, Path(folder), words)[1]
            for name, words in (("list", ["results"]), ("table", ["table", "table1"]))
        }
    row = {"results": len(kept), "adding": adding, "listing": listing, "tabulating": tabulating}
    return row | {f"command_{name}": spent for name, spent in commands.items()}


def copied(one: Result, k: int) -> Result:
    """Make of a result the k-th of many, of other methods and datasets."""
    names = ("nearest_mean", "slda", "pec", "finetuning")
    dataset = ("mnist", "cifar10", "cifar100")[k // len(names) % 3]
    return replace(one, experiment=planned(names[k % len(names)], dataset, seed=k))


def command(folder: Path, words: list[str]) -> None:
    """Run the command line, what it prints thrown away."""
    program = Path(sys.executable).with_name("pecil")
    words = [str(program), *words, "--store", str(folder / "store.sqlite")]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=folder)


def table(row: Row) -> str:
    """Return the figures as Markdown."""
    extra = 100 * (row["by_harness"] / row["by_hand"] - 1)
    lines = [
        "| | seconds |",
        "|---|---:|",
        f"| PEC on {row['dataset']}, by hand | {number(row['by_hand'])} |",
        f"| the same by `pecil.bench.run` | {number(row['by_harness'])} ({extra:+.1f} %) |",
        f"| read {row['results']:,} results from the store | {number(row['listing'])} |",
        f"| make table 1 of them | {number(row['tabulating'])} |",
        f"| the command `pecil results`, Python's start included | {number(row['command_list'])} |",
        f"| the command `pecil table table1`, likewise | {number(row['command_table'])} |",
    ]
    return "\n".join(lines) + f"\n\nMeasured on {row['machine']}; load {row['load']:.1f}."


def main() -> None:
    """Measure, keep the figures, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="little data; print, keep nothing")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.table:
        row: Row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "load": os.getloadavg()[0]}
        row |= {"machine": describe("cpu"), "dataset": "digits" if options.smoke else "mnist"}
        row |= overhead(row["dataset"], 1 if options.smoke else 4)
        row |= stored(100 if options.smoke else 10_000)
        print(table(row))
        if options.smoke:
            return
        keep(RESULTS, [row])
    put(table(kept(RESULTS)[-1]), PAGE, "harness")


if __name__ == "__main__":
    main()
