"""What linear students are worth in whitened PEC: views and trust, on a tenth of the training data.

    python benchmarks/views.py mnist cifar10 ...          (minutes each; a GPU makes it seconds)
    python benchmarks/views.py --table                    docs/whitened-pec.md from the results

Each line of results/validation/views.jsonl is one model, with the accuracy on the samples held
out for each trust. No test image is used.
"""

import argparse
import json
from typing import Any

import numpy as np
import torch

import pecil
from common import ROOT, keep, kept, put
from pecil.bench.experiment import settings_for
from pecil.data import DATASETS
from teachers import held_out

RESULTS = ROOT / "results" / "validation" / "views.jsonl"
PAGE = ROOT / "docs" / "whitened-pec.md"
TRUSTS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.45)
FEW = 1500  # features, where numbers of views are compared at the same number of features
CHOICES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # views, of few features; of many
    "mnist": ((), (5, 10, 20)),
    "fashion_mnist": ((), (5, 10, 20)),
    "balanced_svhn": ((20, 50, 100), (20, 50, 100)),
    "cifar10": ((20, 50), (20, 50)),
    "cifar100": ((5, 20), (3, 8)),
}


def compare(name: str, seeds: int) -> None:
    """Measure every choice for a dataset and append the results."""
    few, many = CHOICES[name]
    memory = settings_for("whitened_pec", name)
    small = {key: value for key, value in memory.items() if key != "memory"} | {"dim": FEW}
    x, y, held_x, held_y, statistics = held_out(name)
    sizes = [(memory, views) for views in (0, *many)]
    if few:
        sizes += [(small, views) for views in (0, *few)]
    for size, views in sizes:
        for seed in range(seeds):
            model = pecil.WhitenedPEC(
                **size,
                **statistics,
                views=views,
                expected_classes=len(np.unique(y)),
                random_state=seed,
            ).fit(x, y)
            row = {"dataset": name, "views": views, "seed": seed, "dim": model.dim_}
            row |= {"numbers": model.n_parameters_, "held": "memory" if size is memory else "dim"}
            row["accuracy"] = accuracies(model, held_x, held_y)
            row |= {"device": str(model.device_), "torch": torch.__version__}
            print(json.dumps(row), flush=True)
            keep(RESULTS, [row])


def accuracies(model: pecil.WhitenedPEC, x: Any, y: Any) -> dict[str, float]:
    """Return the accuracy in percent for each trust w, of which scores are quadratic functions."""
    none, half, full = (model.set_params(trust=w).discriminants(x) for w in (0.0, 0.5, 1.0))
    bend = 2 * (full - 2 * half + none)
    slope = full - none - bend
    told = {f"{w:g}": none + w * slope + w**2 * bend for w in TRUSTS}
    right = {w: model.classes_[scores.argmax(1)] == y for w, scores in told.items()}
    return {w: round(100 * float(is_right.mean()), 4) for w, is_right in right.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    trusts = [f"{w:g}" for w in TRUSTS]
    lines = [
        f"| dataset | numbers | D | views | seeds | trust {' | '.join(trusts)} |",
        f"|---|---:|---:|---:|---:|{'---:|' * len(trusts)}",
    ]
    asked = ("dataset", "held", "views")
    for group in dict.fromkeys(tuple(row[key] for key in asked) for row in rows):
        mine = [row for row in rows if tuple(row[key] for key in asked) == group]
        means = [np.mean([row["accuracy"][w] for row in mine]) for w in trusts]
        told = " | ".join(f"{mean:.2f}" for mean in (means if group[2] else means[:1]))
        blank = "" if group[2] else " |" * (len(trusts) - 1)
        lines.append(
            f"| {DATASETS[group[0]].title} | {mine[0]['numbers']:,} | {mine[0]['dim']:,} | "
            f"{group[2]} | {len(mine)} | {told} |{blank}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, or put the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *CHOICES])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    for name in arguments.names:
        compare(name, arguments.seeds)
    if arguments.table:
        put(table(kept(RESULTS)), PAGE, "trust")


if __name__ == "__main__":
    main()
