"""What the settings of whitened PEC rest on: comparisons on a tenth of the training data.

    python benchmarks/teachers.py mnist cifar10 ...       (a GPU makes it minutes)
    python benchmarks/teachers.py --table                 docs/teachers.md from the results

Each line of results/validation/teachers.jsonl is one choice on one dataset and seed: the
recipe's fields that differ from the dataset's settings, the accuracy on the samples held out
with the shrinkage that needs no validation (oas) and with fixed ones. No test image is used.
"""

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import pecil
from common import ROOT, keep, kept
from pecil.data import load
from pecil.teachers import RECIPES, RandomFeatures

RESULTS = ROOT / "results" / "validation" / "teachers.jsonl"
PAGE = ROOT / "docs" / "teachers.md"
FIXED = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
SIZES: list[dict[str, Any]] = [
    {"sizes": (3,)},
    {"sizes": (5,)},
    {"sizes": (4, 6)},
    {"sizes": (3, 4, 6)},
    {"sizes": (3, 5)},
    {"sizes": (3, 5, 8)},
    {"sizes": (4, 8)},
]
PHOTOGRAPHS: list[dict[str, Any]] = [
    {},
    *SIZES,
    {"grids": (3,)},
    {"grids": (2,)},
    {"grids": (2, 3)},
    {"grids": (1, 2, 3, 4)},
    {"grey": 0.0},
    {"grey": 0.25},
    {"grey": 0.75},
    {"threshold": 0.15},
    {"threshold": 0.5},
    {"ridge": 0.1},
    {"ridge": 1.0},
    {"signed": False},
    {"spread": 2},
    {"draw": "normal", "ridge": 1.0},
    {"prior": "spectrum", "draw": "normal", "ridge": 1.0},
    {"prior": "spectrum", "draw": "normal", "ridge": 0.1},
    {"prior": "strokes"},
]
DRAWINGS: list[dict[str, Any]] = [
    {},
    {"spread": 1},
    {"spread": 4},
    {"spread": 16},
    {"sizes": (5,)},
    {"sizes": (9,)},
    {"sizes": (5, 9)},
    {"grids": (2,)},
    {"grids": (4,)},
    {"grids": (1, 2, 3)},
    {"threshold": 0.2},
    {"threshold": 0.6},
    {"ridge": 1.0},
    {"ridge": 10.0},
    {"prior": "leaves"},
    {"draw": "normal"},
    {"prior": "spectrum", "draw": "normal", "ridge": 1.0},
]
SIGNS: list[dict[str, Any]] = [
    {},
    {"sizes": (3, 5, 8)},
    {"sizes": (5, 8, 12)},
    {"grids": (3,)},
    {"grids": (2, 3, 4)},
    {"grids": (4,)},
    {"grids": (3, 4, 5)},
    {"grey": 0.5},
    {"signed": True},
    {"ridge": 1.0},
    {"ridge": 3.0},
    {"threshold": 0.2},
    {"spread": 2},
    {"prior": "strokes"},
    {"draw": "normal"},
]
LARGE: list[dict[str, Any]] = [
    {},
    {"sizes": (3, 5, 8)},
    {"sizes": (4, 7)},
    {"reduce": 1},
    {"reduce": 1, "sizes": (5, 9)},
]
VECTORS = [RandomFeatures("relu"), RandomFeatures("rbf"), RandomFeatures("rbf", 0.0005)]
SETS: dict[str, tuple[str, float, list[dict[str, Any]]]] = {
    "mnist": ("strokes", 89_600, DRAWINGS),
    "fashion_mnist": ("strokes", 89_600, DRAWINGS),
    "balanced_svhn": ("signs", 11.2e6, SIGNS),
    "cifar10": ("natural", 11.2e6, PHOTOGRAPHS),
    "cifar100": ("natural", 11.2e6, [{}, *SIZES, {"grids": (2, 3)}]),
    "miniimagenet": ("natural", 11.2e6, LARGE),
}


def held_out(name: str) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Return nine tenths of the training data, the last tenth, and the inputs' statistics."""
    data = load(name)
    order = np.random.default_rng(0).permutation(len(data.train_x))
    held, rest = order[: len(order) // 10], order[len(order) // 10 :]
    x, y = np.asarray(data.train_x), np.asarray(data.train_y)
    return x[rest], y[rest], x[held], y[held], {"mean": data.mean, "std": data.std}


def compare(name: str, seeds: int, vectors: bool) -> None:
    """Measure every choice for a dataset and append the results."""
    kind, memory, choices = SETS[name]
    x, y, held_x, held_y, statistics = held_out(name)
    kept: Any = RECIPES[kind]
    recipes: list[tuple[dict[str, Any], Any]] = [
        (change, replace(kept, **change)) for change in choices
    ]
    if vectors:
        recipes = [({"vectors": r.kind, "gamma": r.gamma}, r) for r in VECTORS]
    for change, recipe in recipes:
        for seed in range(seeds):
            start = time.perf_counter()
            model = pecil.WhitenedPEC(
                teacher=recipe,
                memory=memory,
                expected_classes=len(np.unique(y)),
                random_state=seed,
                **statistics,
            ).fit(x, y)
            row = {"dataset": name, "teacher": kind, "change": change, "seed": seed}
            row |= {"dim": model.dim_, "oas": 100 * model.score(held_x, held_y)}
            row["shrinkage"] = model.shrinkage_
            for a in FIXED:
                row[f"{a:g}"] = 100 * model.set_params(shrinkage=a).score(held_x, held_y)
            row["seconds"] = round(time.perf_counter() - start, 2)
            row |= {"device": str(model.device_), "torch": torch.__version__}
            print(json.dumps(row), flush=True)
            keep(RESULTS, [row])


def main() -> None:
    """Run comparisons, or write the page about them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *SETS])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--vectors", action="store_true", help="random features of flat pixels")
    parser.add_argument("--table", action="store_true", help="only write docs/teachers.md")
    arguments = parser.parse_args()
    for name in arguments.names:
        compare(name, arguments.seeds, arguments.vectors)
    if arguments.table:
        PAGE.write_text(page(kept(RESULTS)), encoding="utf-8")


def page(rows: list[dict[str, Any]]) -> str:
    """Return the comparisons as Markdown, one table a dataset."""
    text = [
        "# What the teachers' settings rest on\n",
        "Accuracy in percent on a tenth of the *training* data that was held out, at the",
        "paper's memory, mean over teacher seeds; *best fixed* is the best of the fixed",
        f"shrinkages {', '.join(f'{a:g}' for a in FIXED)}, chosen with hindsight. The first line",
        "of each table is the setting that was kept; the others change what they name.",
        "Written by `python benchmarks/teachers.py --table`.",
    ]
    for name in dict.fromkeys(row["dataset"] for row in rows):
        mine = [row for row in rows if row["dataset"] == name]
        text += [
            f"\n## {name}\n",
            "| change | D | seeds | oas | best fixed |",
            "|---|---|---|---|---|",
        ]
        for change in dict.fromkeys(json.dumps(row["change"]) for row in mine):
            runs = [row for row in mine if json.dumps(row["change"]) == change]
            oas = np.mean([row["oas"] for row in runs])
            tried = [f"{a:g}" for a in FIXED if f"{a:g}" in runs[0]]
            best = max(np.mean([row[a] for row in runs]) for a in tried)
            words = ", ".join(f"{k} {v}" for k, v in json.loads(change).items()) or "as kept"
            text.append(f"| {words} | {runs[0]['dim']} | {len(runs)} | {oas:.2f} | {best:.2f} |")
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    main()
