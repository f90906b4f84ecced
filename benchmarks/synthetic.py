"""What the synthetic teachers rest on: trainings that differ in one thing.

    python benchmarks/synthetic.py objectives families ...     (a GPU)
    python benchmarks/synthetic.py --table                     prints the results

Each line of results/validation/synthetic.jsonl is one training: what differs from the usual
settings, the seed, and the accuracies of whitened PEC with the teacher, on a tenth of real
training sets that was held out: by its features alone, and with filters beside them within the
paper's memory. No test image is used, and no real image for training.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import ROOT, Row, describe, keep, kept
from pecil.teachers import Synthetic
from pecil.teachers.network import load_weights
from pecil.teachers.scenes import FAMILIES
from pecil.teachers.synthetic import OBJECTIVES, Settings, train, validate

RESULTS = ROOT / "results" / "validation" / "synthetic.jsonl"
DATASETS = ("cifar10", "cifar100", "svhn", "mnist")
SAMPLES = 20_000
MEMORY = 11_200_000  # numbers, with filters beside the network
USUAL = Settings(channels=(32, 64, 128, 128, 256, 256), steps=2_000, batch=512, pictures=65_536)
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


def measured(change: dict[str, Any], seed: int, steps: int | None, device: str) -> Row:
    """Train a teacher and judge it."""
    settings = usual(seed, steps, **change)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        weights = train(settings, folder, device=device, every=settings.steps)
        row: Row = {"seconds": time.perf_counter() - start}
        row["weights"] = load_weights(str(weights)).count
        row["loss"] = json.loads((Path(folder) / "log.jsonl").read_text().splitlines()[-1])["loss"]
        row |= judged(weights, device)
    return row


def judged(weights: Path, device: str, grids: Sequence[int] = Synthetic.grids) -> Row:
    """Judge a teacher on all datasets, alone and beside filters."""
    row: Row = {}
    for name in DATASETS:
        for key, memory in ((name, None), (f"{name}, beside", MEMORY)):
            row[key] = 100 * validate(weights, name, SAMPLES, device, grids, memory)
    return row


def maps(seed: int, steps: int | None, device: str) -> list[Row]:
    """Train one teacher and judge its maps over several grids."""
    settings = usual(seed, steps)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        weights = train(settings, folder, device=device, every=settings.steps)
        for grids in GRIDS:
            rows.append({"change": {"grids": grids}, **judged(weights, device, grids)})
    return rows


def table(rows: list[Row]) -> str:
    """Return the newest results as a table in Markdown, question by question."""
    newest = {(r["question"], json.dumps(r["change"]), r["seed"]): r for r in rows}
    columns = [f"{name}{how}" for name in DATASETS for how in ("", ", beside")]
    text = ["| question | differs in | seeds | " + " | ".join(columns) + " |"]
    text += ["|---|---|---:|" + "---:|" * len(columns)]
    for (question, change), group in groupby(newest.items(), key=lambda item: item[0][:2]):
        runs = [row for _, row in group]
        cells = []
        for name in columns:
            values = [run[name] for run in runs]
            error = (
                f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
            )
            cells.append(f"{np.mean(values):.2f}{error}")
        text.append(f"| {question} | {change} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    """Train, judge, keep the results; or print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", choices=[*QUESTIONS, "maps", []])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of those of a question")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    for seed in range(options.seeds if not options.table else 0):
        common = {"seed": seed, "machine": describe(options.device), "samples": SAMPLES}
        for question in options.questions:
            if question == "maps":
                rows = maps(seed, options.steps, options.device)
            else:
                rows = [
                    {"change": change, **measured(change, seed, options.steps, options.device)}
                    for change in QUESTIONS[question]
                ]
            keep(RESULTS, [{"question": question, **common, **row} for row in rows])
    print(table(kept(RESULTS)))


if __name__ == "__main__":
    main()
