"""What the synthetic teachers rest on: trainings that differ in one thing.

    python benchmarks/synthetic.py objectives families ...     (a GPU)
    python benchmarks/synthetic.py shipped --datasets cifar10  the weights of the package, by grids
    python benchmarks/synthetic.py --table                     docs/synthetic-teacher.md

Each line of results/validation/synthetic.jsonl is a teacher: what differs from the usual settings,
the seed, and the accuracies of whitened PEC with it, on a tenth of real training sets that was held
out: by the network's features alone, and with filters beside them within the paper's memory. No
test image is used, and no real image for training.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from common import ROOT, Row, describe, keep, kept, put
from pecil.bench.tables import with_error
from pecil.data import DATASETS
from pecil.teachers import FILTERS, Synthetic
from pecil.teachers.network import load_weights
from pecil.teachers.scenes import FAMILIES
from pecil.teachers.synthetic import OBJECTIVES, Settings, train, validate

RESULTS = ROOT / "results" / "validation" / "synthetic.jsonl"
PAGE = ROOT / "docs" / "synthetic-teacher.md"
USUALLY = ("cifar10", "cifar100", "svhn", "mnist")
SAMPLES = 20_000
MEMORY = 11_200_000  # numbers, with filters beside the network
USUAL = Settings(channels=(32, 64, 128, 128, 256, 256), steps=2_000, batch=512, pictures=65_536)
Names = Sequence[str]
EVEN = dict.fromkeys(FAMILIES, 1.0)
QUESTIONS: dict[str, list[dict[str, Any]]] = {
    "objectives": [{"objective": name} for name in OBJECTIVES],
    "families": [{"families": {name: 1.0}} for name in FAMILIES]
    + [{"families": EVEN}]
    + [{"families": {k: v for k, v in EVEN.items() if k != name}} for name in FAMILIES],
    "steps": [{"steps": n} for n in (500, 1_000, 2_000, 4_000, 8_000)],
    "pictures": [{"pictures": n} for n in (4_096, 16_384, 65_536, 262_144)],
    "sizes": [
        {"channels": channels}
        for channels in (
            (8, 16, 32, 32, 80, 80),
            (16, 32, 64, 64, 192, 192),
            (32, 64, 128, 128, 256, 256),
            (64, 128, 256, 256, 512, 512),
        )
    ],
    "views": [
        {},
        {"crop": 0.2},
        {"crop": 0.6},
        {"colour": 0.5},
        {"colour": 1.5},
        {"temperature": 0.1},
        {"temperature": 0.5},
    ],
}
GRIDS = [
    *((4, 3, 2), (4, 4, 2), (3, 3, 3), (4, 3, 1), (2, 2, 2), (1, 1, 1)),
    *((0, 2, 2), (0, 0, 2), (0, 0, 1)),
]


def usual(seed: int, steps: int | None, **change: Any) -> Settings:
    """Return the usual settings but for a change, and for the steps if they are given."""
    settings = replace(USUAL, seed=seed, **change)
    return settings if steps is None else replace(settings, steps=steps)


def measured(change: Row, seed: int, steps: int | None, names: Names, device: str) -> Row:
    """Train a teacher and judge it."""
    settings = usual(seed, steps, **change)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        weights = train(settings, folder, device=device, every=settings.steps)
        row: Row = {"change": change, "seconds": time.perf_counter() - start}
        row["weights"] = load_weights(str(weights)).count
        row["loss"] = json.loads((Path(folder) / "log.jsonl").read_text().splitlines()[-1])["loss"]
        return row | judged(str(weights), names, device)


def judged(weights: str, names: Names, device: str, grids: Sequence[int] = Synthetic.grids) -> Row:
    """Judge a teacher on datasets, alone and with filters beside it."""
    row: Row = {}
    for name in names:
        alone = Synthetic(weights, tuple(grids), mirror=DATASETS[name].mirror, beside=None)
        both = replace(alone, beside=FILTERS[DATASETS[name].pictures])
        row[name] = 100 * validate(alone, name, SAMPLES, device)
        row[f"{name}, beside"] = 100 * validate(both, name, SAMPLES, device, MEMORY)
    return row


def by_grids(weights: str, names: Names, device: str) -> Iterator[Row]:
    """Judge a teacher's maps over several grids."""
    for grids in GRIDS:
        yield {"change": {"grids": grids}, **judged(weights, names, device, grids)}


def filters_alone(names: Names, device: str) -> Row:
    """Judge filters of the seed that have the whole memory."""
    pictures = {name: FILTERS[DATASETS[name].pictures] for name in names}
    found = {
        f"{k}, beside": 100 * validate(v, k, SAMPLES, device, MEMORY) for k, v in pictures.items()
    }
    return {"change": {"network": None}, **found}


def answers(
    question: str, seed: int, steps: int | None, names: Names, device: str
) -> Iterator[Row]:
    """Yield what is found for a question, one row after the other."""
    if question == "shipped":
        if seed == 0:  # the weights are what they are
            yield filters_alone(names, device)
            yield from by_grids("small", names, device)
    elif question == "maps":
        with tempfile.TemporaryDirectory() as folder:
            settings = usual(seed, steps)
            weights = train(settings, folder, device=device, every=settings.steps)
            yield from by_grids(str(weights), names, device)
    else:
        for change in QUESTIONS[question]:
            yield measured(change, seed, steps, names, device)


def table(rows: list[Row]) -> str:
    """Return the newest results as a table in Markdown, question by question."""
    newest = {(r["question"], json.dumps(r["change"]), r["seed"]): r for r in rows}
    columns = [f"{name}{how}" for name in USUALLY for how in ("", ", beside")]
    columns = [name for name in columns if any(name in row for row in rows)]
    text = ["| question | differs in | seeds | " + " | ".join(columns) + " |"]
    text += ["|---|---|---:|" + "---:|" * len(columns)]
    for (question, change), group in groupby(newest.items(), key=lambda item: item[0][:2]):
        runs = [row for _, row in group]
        found = [[run[name] for run in runs if name in run] for name in columns]
        cells = [with_error(values) if values else "" for values in found]
        text.append(f"| {question} | {change} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    """Train, judge, keep the results; or only write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", nargs="*", choices=[*QUESTIONS, "maps", "shipped", []])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of those of a question")
    parser.add_argument("--datasets", nargs="*", default=USUALLY, choices=USUALLY)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    for seed in range(options.seeds if not options.table else 0):
        common = {"seed": seed, "machine": describe(options.device), "samples": SAMPLES}
        for question in options.questions:
            asked = (question, seed, options.steps, options.datasets, options.device)
            for row in answers(*asked):
                keep(RESULTS, [{"question": question, **common, **row}])
                print(json.dumps(row), flush=True)
    put(table(kept(RESULTS)), PAGE, "teachers")


if __name__ == "__main__":
    main()
