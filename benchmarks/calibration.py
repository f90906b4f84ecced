"""How far `predict_proba` of whitened PEC can be trusted: expected calibration error.

    python benchmarks/calibration.py mnist cifar10 ... [--seeds 3]
    python benchmarks/calibration.py --table          the table, in docs/whitened-pec.md

One class after another, a single pass, the benchmark's settings; then the probabilities of the
test samples are compared with how often they come true, in 15 bins. "Bayes' rule" is what the
discriminants alone would give (temper 1).
"""

import argparse
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import ROOT, keep, kept, put
from pecil.bench.experiment import settings_for
from pecil.data import load
from pecil.methods.whitened import whitened_pec

RESULTS = ROOT / "results" / "validation" / "calibration.jsonl"
PAGE = ROOT / "docs" / "whitened-pec.md"
BINS = 15


def calibration_error(proba: NDArray[Any], right: NDArray[Any]) -> float:
    """Return the expected calibration error in percent: |accuracy − confidence| over the bins."""
    confidence = proba.max(1)
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [
        np.abs(right[place == k].mean() - confidence[place == k].mean()) * (place == k).mean()
        for k in np.unique(place)
    ]
    return 100 * float(np.sum(gaps))


def measure(name: str, seed: int) -> dict[str, Any]:
    """Learn one class after another; return both calibration errors on the test samples."""
    data: Any = load(name)
    model = whitened_pec(
        **settings_for("whitened_pec", name),
        expected_classes=len(np.unique(data.train_y)),
        mean=data.mean,
        std=data.std,
        random_state=seed,
    )
    for label in np.random.default_rng(seed).permutation(np.unique(data.train_y)):
        at = np.flatnonzero(data.train_y == label)
        model.partial_fit(data.train_x[at], data.train_y[at])
    scores = model.discriminants(data.test_x)
    right = model.classes_[scores.argmax(1)] == data.test_y
    odds = np.exp(scores - scores.max(1, keepdims=True))
    row = {"dataset": name, "seed": seed, "accuracy": 100 * float(right.mean())}
    row |= {"temper": model.temper_, "device": str(model.device_)}
    row["ece"] = calibration_error(model.predict_proba(data.test_x), right)
    row["ece_bayes"] = calibration_error(odds / odds.sum(1, keepdims=True), right)
    accepted = model.novelty(data.test_x[:2000]) <= model._threshold()
    return row | {"accepted": 100 * float(accepted.mean())}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| dataset | seeds | temper | ECE, percent | by Bayes' rule | known samples accepted |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["dataset"] for row in rows):
        runs = [row for row in rows if row["dataset"] == name]
        mean = {
            key: float(np.mean([r[key] for r in runs]))
            for key in ("temper", "ece", "ece_bayes", "accepted")
        }
        lines.append(
            f"| {name} | {len(runs)} | {mean['temper']:.2f} | {mean['ece']:.1f} | "
            f"{mean['ece_bayes']:.1f} | {mean['accepted']:.0f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, or put the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.names:
        for seed in range(arguments.seeds):
            row = measure(name, seed)
            print(json.dumps(row), flush=True)
            keep(RESULTS, [row])
    if arguments.table:
        put(table(kept(RESULTS)), PAGE, "calibration")


if __name__ == "__main__":
    main()
