"""What the synthetic teachers rest on: trainings that differ in one thing.

    python benchmarks/synthetic.py usual objectives families ...
    python benchmarks/synthetic.py shipped --datasets cifar10  the weights of the package, by grids
    python benchmarks/synthetic.py --speed                     how fast they answer on this machine
    python benchmarks/synthetic.py --table                     docs/synthetic-teacher.md

Each line of results/validation/synthetic.jsonl is a teacher: what differs from the usual settings,
the seed, and the accuracies of whitened PEC with it, on a quarter of some samples of real training
sets that was held out: by the network's features alone, and with 4,000 filters of the seed beside
them. No test image is used, and no real image for training. What is there already is left out.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import ROOT, Row, describe, keep, kept, put
from pecil import WhitenedPEC
from pecil.bench.tables import with_error
from pecil.data import DATASETS, load
from pecil.pec.inputs import to_tensor
from pecil.teachers import FILTERS, FeatureTeacher, Recipe, Synthetic
from pecil.teachers.network import SHIPPED, load_weights
from pecil.teachers.scenes import FAMILIES
from pecil.teachers.synthetic import OBJECTIVES, Settings, train

RESULTS = ROOT / "results" / "validation" / "synthetic.jsonl"
SPEED = ROOT / "results" / "speed" / "teachers.jsonl"
PAGE = ROOT / "docs" / "synthetic-teacher.md"
USUALLY = ("cifar10", "svhn")
SAMPLES, HELD = 20_000, 5_000  # of a training set: in all, held out
BESIDE = 4_000  # filters
CHUNK = 2_000  # samples whose features are made at a time
ROUNDS = 5  # of a measurement of speed, of which the median counts
USUAL = Settings(channels=(8, 16, 32, 32, 96, 96), steps=1_000, batch=256, pictures=16_384)
Names = Sequence[str]
EVEN = dict.fromkeys(FAMILIES, 1.0)
QUESTIONS: dict[str, list[dict[str, Any]]] = {
    "usual": [{}],
    "objectives": [{"objective": name} for name in OBJECTIVES if name != USUAL.objective],
    "families": [{"families": {k: v for k, v in EVEN.items() if k != name}} for name in EVEN]
    + [{"families": {"leaves": 1.0}}],
    "steps": [{"steps": n} for n in (250, 500, 2_000, 4_000)],
    "pictures": [{"pictures": n} for n in (2_048, 65_536)],
    "sizes": [
        {"channels": channels}
        for channels in (
            (16, 32, 64, 64, 192, 192),
            (32, 64, 128, 128, 256, 256),
            Settings.channels,
        )
    ],
    "views": [
        *({"crop": share} for share in (0.2, 0.6)),
        *({"colour": much} for much in (0.5, 1.5)),
        *({"temperature": degree} for degree in (0.1, 0.5)),
    ],
    "elsewhere": [{"elsewhere": share} for share in (0.0, 0.5)],
    "deep": [{"deep": blocks} for blocks in (2, 3)],
}
GRIDS = [
    *((4, 3, 2), (4, 4, 2), (3, 3, 3), (4, 3, 1), (2, 2, 2), (1, 1, 1)),
    *((0, 2, 2), (0, 0, 2), (0, 0, 1)),
]


def measured(change: Row, seed: int, names: Names, device: str) -> Row:
    """Train a teacher and judge it."""
    settings = replace(USUAL, seed=seed, **change)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        weights = train(settings, folder, device=device, every=settings.steps)
        row: Row = {"change": change, "seconds": time.perf_counter() - start}
        row["weights"] = load_weights(str(weights)).count
        row["loss"] = json.loads((Path(folder) / "log.jsonl").read_text().splitlines()[-1])["loss"]
        return row | judged(str(weights), names, device)


@cache
def samples_of(name: str, device: str) -> tuple[Tensor, Any]:
    """Return samples of a training set, as teachers are given them, and their labels."""
    data = load(name)
    some = np.random.default_rng(0).permutation(len(data.train_y))[:SAMPLES]
    x = data.train_x[some].transpose(0, 3, 1, 2)
    mean, std = np.asarray(data.mean), np.asarray(data.std)
    return to_tensor(x, torch.device(device), mean, std), data.train_y[some]


def features(recipe: Recipe, name: str, device: str, dim: int = 10**9) -> Tensor:
    """Return a teacher's features of samples of a training set."""
    x, _ = samples_of(name, device)
    teacher = recipe.teacher(tuple(x.shape[1:]), dim, 0, x.device)
    return torch.cat([teacher(part) for part in x.split(CHUNK)])


@cache
def filters(name: str, device: str, dim: int = BESIDE) -> Tensor:
    """Return what filters of the seed tell of samples of a training set."""
    return features(FILTERS[DATASETS[name].pictures], name, device, dim)


def accuracy(told: Tensor, name: str, device: str) -> float:
    """Return the accuracy of whitened PEC on samples held out, given the features of all."""
    _, labels = samples_of(name, device)
    model = WhitenedPEC(teacher="identity", device=device).fit(told[HELD:], labels[HELD:])
    return 100 * model.score(told[:HELD], labels[:HELD])


def judged(weights: str, names: Names, device: str, grids: Sequence[int] = Synthetic.grids) -> Row:
    """Judge a teacher on datasets, alone and with filters beside it."""
    row: Row = {}
    for name in names:
        recipe = Synthetic(weights, tuple(grids), mirror=DATASETS[name].mirror, beside=None)
        told = features(recipe, name, device)
        row[name] = accuracy(told, name, device)
        row[f"{name}, beside"] = accuracy(torch.cat([told, filters(name, device)], 1), name, device)
    return row


def by_grids(weights: str, names: Names, device: str) -> Iterator[Row]:
    """Judge a teacher's maps over several grids."""
    named = {"network": weights} if weights in SHIPPED else {}
    for grids in GRIDS:
        yield {"change": {**named, "grids": grids}, **judged(weights, names, device, grids)}


def filters_alone(names: Names, device: str) -> Iterator[Row]:
    """Judge filters of the seed: as many as stand beside a network, and some more."""
    for dim in (BESIDE, BESIDE + 600):
        row: Row = {"change": {"network": None, "filters": dim}}
        for name in names:
            row[f"{name}, beside"] = accuracy(filters(name, device, dim), name, device)
        yield row


def speed(device: str) -> Iterator[Row]:
    """Measure how many pictures a second the weights of the package answer for."""
    for weights in SHIPPED:
        for mirror in (False, True):
            recipe = Synthetic(weights, mirror=mirror, beside=None)
            for side, n in ((32, CHUNK), (84, CHUNK // 4)):
                teacher = recipe.teacher((3, side, side), 10**9, 0, torch.device(device))
                x = torch.rand(n, 3, side, side, device=device)
                seconds = [_seconds(teacher, x) for _ in range(1 + ROUNDS)][1:]
                rate = n / float(np.median(seconds))
                yield {"weights": weights, "mirror": mirror, "side": side, "rate": rate}


def _seconds(teacher: FeatureTeacher, x: Tensor) -> float:
    start = time.perf_counter()
    float(teacher(x).sum())  # waits for a GPU, too
    return time.perf_counter() - start


def speeds(rows: list[Row]) -> str:
    """Return the newest speeds on each machine as a table in Markdown."""
    places = [(mirror, side) for mirror in (False, True) for side in (32, 84)]
    found = {(r["machine"], r["weights"], r["mirror"], r["side"]): r["rate"] for r in rows}
    titles = [f"{side}×{side}{', and mirrored' * mirror}" for mirror, side in places]
    text = ["| machine | weights | " + " | ".join(titles) + " |", "|---|---|" + "---:|" * 4]
    for machine, weights in dict.fromkeys(key[:2] for key in found):
        rates = [f"{found[machine, weights, *place]:,.0f}" for place in places]
        text.append(f"| {machine} | {weights} | {' | '.join(rates)} |")
    return "\n".join(text)


def answers(
    question: str, seed: int, names: Names, device: str, known: Sequence[str]
) -> Iterator[Row]:
    """Yield what is found for a question, one row after the other, but for changes known."""
    if question == "shipped":
        if seed == 0:  # the weights are what they are
            yield from filters_alone(names, device)
            for shipped in SHIPPED:
                yield from by_grids(shipped, names, device)
    elif question == "maps":
        with tempfile.TemporaryDirectory() as folder:
            settings = replace(USUAL, seed=seed)
            weights = train(settings, folder, device=device, every=settings.steps)
            yield from by_grids(str(weights), names, device)
    else:
        for change in QUESTIONS[question]:
            if json.dumps(change) not in known:
                yield measured(change, seed, names, device)


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
    parser.add_argument("--datasets", nargs="*", default=USUALLY, choices=USUALLY)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--speed", action="store_true", help="measure the weights' speed")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    if options.speed:
        where = {"machine": describe(options.device)}
        keep(SPEED, [where | row for row in speed(options.device)])
    for seed in range(options.seeds if not options.table else 0):
        common = {"seed": seed, "machine": describe(options.device), "samples": SAMPLES}
        for question in options.questions:
            rows = [r for r in kept(RESULTS) if (r["question"], r["seed"]) == (question, seed)]
            known = [json.dumps(row["change"]) for row in rows]
            asked = (question, seed, options.datasets, options.device, known)
            for row in answers(*asked):
                keep(RESULTS, [{"question": question, **common, **row}])
                print(json.dumps(row), flush=True)
    put(table(kept(RESULTS)), PAGE, "teachers")
    put(speeds(kept(SPEED)), PAGE, "speed")


if __name__ == "__main__":
    main()
