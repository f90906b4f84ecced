"""Are the errors of classes comparable? PEC, balanced and not, next to the paper's table.

    python benchmarks/balancing.py --device cuda --seeds 10      the table (minutes on a GPU)
    python benchmarks/balancing.py --device cuda --seeds 10 --errors-only FOLDER
    python benchmarks/balancing.py --errors FOLDER               the same in two steps: only the
                                                                 second needs cmaes, no GPU
    python benchmarks/balancing.py digits --seeds 2 --smoke      print, keep nothing
    python benchmarks/balancing.py --table                       docs/balancing.md from the results

A model is trained once for each dataset and seed. Its errors on the test set and on a buffer of
500 samples of the stream, a reservoir, are all that balancing needs: Oracle balancing looks for
the factors on the test set itself, Buffer balancing on the buffer. The runs are kept in
results/balancing.jsonl, in the form of all published runs.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pecil
from common import ROOT, Array, describe, keep, now, put
from pecil.bench.experiment import Experiment, Result, planned
from pecil.bench.store import read_lines
from pecil.bench.tables import Cell, by_kind, definitions, grid
from pecil.data import load, stream
from pecil.methods import METHODS
from pecil.methods.buffer import Reservoir
from pecil.methods.recording import Chance
from pecil.pec.balance import search

RESULTS = ROOT / "results" / "balancing.jsonl"
PAGE = ROOT / "docs" / "balancing.md"
TABLE = definitions()["balancing"]
BUFFER = 500
TIES = {"ties": "chance"}  # what CMA-ES is told is the number of right predictions, no more
BALANCINGS: tuple[dict[str, str], ...] = (
    {"balancing": "oracle"},
    {"balancing": "buffer"},
    {"balancing": "oracle", **TIES},
    {"balancing": "buffer", **TIES},
)
ERRORS = {  # of a learner's model
    "pec": lambda learner: learner.pec.errors,
    "whitened_pec": lambda learner: learner.model.errors,
}
TRAINED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pec", {}),
    ("pec", {"equal_budgets": True}),
    ("whitened_pec", {}),
)


@dataclass(frozen=True)
class Trained:
    """What a trained model says of the test set and of a buffer; classes are columns."""

    result: Result
    """Of the model as it is."""
    test: Array
    test_y: Array
    buffer: Array
    buffer_y: Array

    def save(self, folder: Path) -> None:
        """Write it into one file, named after the experiment."""
        folder.mkdir(parents=True, exist_ok=True)
        row = json.dumps(self.result.row())
        parts = {name: getattr(self, name) for name in ("test", "test_y", "buffer", "buffer_y")}
        np.savez_compressed(folder / f"{self.result.experiment.key}.npz", row=row, **parts)

    @classmethod
    def read(cls, path: Path) -> "Trained":
        """Read what `save` wrote."""
        with np.load(path) as parts:
            result = Result.from_row(json.loads(str(parts["row"])))
            return cls(result, *(parts[name] for name in ("test", "test_y", "buffer", "buffer_y")))


def train(experiment: Experiment, device: str) -> Trained:
    """Train a model as the benchmark does and ask for its errors."""
    data, seed = load(experiment.dataset), experiment.seed
    if data.test_x is None or data.test_y is None:
        raise ValueError(f"{experiment.dataset} has no test part to measure an accuracy on")
    classes, codes = np.unique(data.train_y, return_inverse=True)
    (task,) = stream(replace(data, train_y=codes), "joint", seed=seed)
    learner: Any = METHODS[experiment.method].learner(
        len(classes),
        data.train_x.shape[1:],
        mean=data.mean,
        std=data.std,
        seed=seed,
        device=device,
        **experiment.settings,
    )
    start = now()
    learner.learn(task.x, task.y)
    fitted = now()
    reservoir = Reservoir(BUFFER, seed, Chance(torch.device("cpu")))
    reservoir.add(place=torch.arange(len(task.y)))
    places = reservoir.fields["place"].numpy()
    errors = ERRORS[experiment.method](learner)
    test, buffer = (errors(x).astype(np.float32) for x in (data.test_x, task.x[places]))
    wanted = np.searchsorted(classes, data.test_y)
    result = Result(
        experiment,
        **marks(test, wanted),
        accuracy_after_task=[],
        seconds={"fit": round(fitted - start, 4), "test": round(now() - fitted, 4)},
        n_parameters=learner.n_parameters,
        device=f"{learner.device.type}: {describe(learner.device.type)}",
        versions={"pecil": pecil.__version__, "torch": torch.__version__, "numpy": np.__version__},
        data_note=data.note,
    )
    return Trained(result, test, wanted, buffer, task.y[places])


def marks(errors: Array, wanted: Array) -> dict[str, Any]:
    """Return the accuracies of errors as a result has them."""
    right = errors.argmin(1) == wanted
    per_class = {str(c): float(right[wanted == c].mean()) for c in np.unique(wanted)}
    return {"accuracy": float(right.mean()), "accuracy_per_class": per_class}


def balanced(trained: Trained) -> Iterator[dict[str, Any]]:
    """Yield the rows of a trained model: as it is, and balanced in each way."""
    plain = trained.result
    yield plain.row()
    if plain.experiment.settings.get("equal_budgets"):
        return
    for how in BALANCINGS:
        own = how["balancing"] == "buffer"
        seen = (trained.buffer, trained.buffer_y) if own else (trained.test, trained.test_y)
        start, seed = time.perf_counter(), plain.experiment.seed
        scales = search(*seen, seed=seed, ties="ties" not in how)
        seconds = {"balance": round(time.perf_counter() - start, 4)}
        result = replace(
            plain,
            experiment=described(plain.experiment, how),
            **marks(trained.test * scales, trained.test_y),
            seconds=plain.seconds | seconds,
            versions=plain.versions | {"cmaes": version("cmaes")},
            buffer_size=len(trained.buffer) if own else None,
        )
        yield result.row() | {"scales": scales.tolist()}


def described(experiment: Experiment, how: dict[str, str]) -> Experiment:
    """Describe an experiment whose classes are balanced, as the table does."""
    buffer = BUFFER if how.get("balancing") == "buffer" else 0
    return replace(experiment, settings={**experiment.settings, **how}, buffer=buffer)


def to_train(names: Sequence[str], seeds: int) -> Iterator[Experiment]:
    """Yield what is to be trained."""
    for name in names:
        for seed in range(1, seeds + 1):
            for method, changes in TRAINED:
                yield planned(method, name, seed=seed, **changes)


# --- the page -------------------------------------------------------------------------------


def cells(results: Sequence[Result]) -> list[Cell]:
    """Fill the table: the paper's rows, those with ties left to chance, whitened PEC's."""
    rows = [{**row, "settings": row.get("settings", {})} for row in TABLE["rows"]]
    for row in rows[2:]:
        title = f"{row['title']}, ties left to chance"
        rows.append({**row, "title": title, "settings": {**row["settings"], **TIES}})
    for row in (rows[0], *rows[2:4]):
        title = f"Whitened {row['title']}"
        rows.append({"title": title, "method": "whitened_pec", "settings": row["settings"]})
    runs = by_kind(results)
    return [
        _cell(row, name, row["paper"][k] if "paper" in row else (None, None), runs)
        for row in rows
        for k, name in enumerate(TABLE["datasets"])
    ]


def _cell(row: dict[str, Any], dataset: str, paper: Sequence[float | None], runs: Any) -> Cell:
    how = {name: row["settings"][name] for name in ("balancing", "ties") if name in row["settings"]}
    changes = {name: value for name, value in row["settings"].items() if name not in how}
    experiment = planned(row["method"], dataset, **changes)
    found = runs.get(described(experiment, how).kind, ())
    ours = tuple(100 * run.accuracy for run in found)
    return Cell(row["title"], dataset, ours, paper[0], paper[1])


def published() -> list[Result]:
    """Return all published results."""
    return read_lines(sorted(RESULTS.parent.glob("*.jsonl")))[0]


def main() -> None:
    """Train, balance, keep the results, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="datasets; by default the table's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=10)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--errors-only", type=Path, metavar="FOLDER", help="train; keep errors there")
    mode.add_argument("--errors", type=Path, metavar="FOLDER", help="balance what is kept there")
    mode.add_argument("--smoke", action="store_true", help="print; keep nothing")
    mode.add_argument("--table", action="store_true", help="only write the page")
    options = parser.parse_args()
    experiments = to_train(options.names or TABLE["datasets"], options.seeds)
    if options.errors_only:
        for experiment in experiments:
            trained = train(experiment, options.device)
            trained.save(options.errors_only)
            print(line(trained.result.row()), flush=True)
        return
    for trained in () if options.table else models(options, experiments):
        rows = list(balanced(trained))
        print("\n".join(map(line, rows)), flush=True)
        if not options.smoke:
            known = {result.experiment.key for result in published()}
            keep(RESULTS, [row for row in rows if row["key"] not in known])
    if not options.smoke:
        put(grid("balancing", cells(published())), PAGE, "balancing")


def models(options: argparse.Namespace, experiments: Iterator[Experiment]) -> Iterator[Trained]:
    """Yield models: those trained before, or each as soon as it is trained."""
    if options.errors:
        yield from map(Trained.read, sorted(options.errors.glob("*.npz")))
    else:
        yield from (train(experiment, options.device) for experiment in experiments)


def line(row: dict[str, Any]) -> str:
    """Return a row in short."""
    told = ("equal_budgets", "balancing", "ties")
    how = {name: row["settings"][name] for name in told if name in row["settings"]}
    return f"{row['dataset']} {row['method']} {row['seed']} {how}: {100 * row['accuracy']:.2f}"


if __name__ == "__main__":
    main()
