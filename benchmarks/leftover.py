"""An experiment: network students that predict what the class's mean output leaves over.

    python benchmarks/leftover.py cifar10 [--seeds 3] [--lr 0.0003 0.001]   (a GPU makes it minutes)
    python benchmarks/leftover.py --table              the table, in docs/whitened-pec.md

The student of class c learns h(x) − m_c instead of the teacher's output h(x), with m_c the mean
of the outputs so far. In the end m_c is added to the student's output bias, so that scoring
stays what it is. A single pass, the benchmark's settings but for the learning rate; accuracy on
a tenth of the training data that was held out.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

import pecil
from common import ROOT, keep, kept, put
from pecil.bench.experiment import settings_for
from pecil.data import DATASETS
from pecil.pec.students import Lesson
from teachers import held_out

RESULTS = ROOT / "results" / "validation" / "leftover.jsonl"
PAGE = ROOT / "docs" / "whitened-pec.md"


class Leftover(pecil.PEC):
    """PEC, for ``fit`` only, whose students predict what the mean leaves over."""

    def _lessons(self, *given: Any) -> Iterator[Lesson]:
        for lesson in super()._lessons(*given):
            target = lesson.target[lesson.order]
            steps = torch.arange(1.0, len(target) + 1, device=target.device).unsqueeze(1)
            means = (target.double().cumsum(0) / steps).float()
            self._means[lesson.slot] = means[-1]
            order = torch.arange(len(target))
            x = lesson.x[lesson.order]
            yield replace(lesson, x=x, target=target - means, order=order)

    def _learn(self, *given: Any) -> Self:
        self._means: dict[int, Tensor] = {}
        super()._learn(*given)
        (pair,) = self._pairs
        biases = pair.students.architecture.views(pair.students.rows)["out.bias"]
        for slot, mean in self._means.items():
            biases[slot] += mean
        return self


def compare(name: str, seeds: int, rates: list[float]) -> None:
    """Measure students of either kind in either metric and append the results."""
    x, y, held_x, held_y, statistics = held_out(name)
    settings = settings_for("pec", name)
    for lr in rates or [settings["lr"]]:
        for kind in (pecil.PEC, Leftover):
            for metric in ("plain", "whitened"):
                for seed in range(seeds):
                    options = settings | statistics | {"lr": lr, "metric": metric}
                    model = kind(**options, random_state=seed).fit(x, y)
                    row = {"dataset": name, "students": kind.__name__, "metric": metric}
                    row |= {"lr": lr, "seed": seed, "accuracy": 100 * model.score(held_x, held_y)}
                    row |= {"device": str(model.device_), "torch": torch.__version__}
                    print(json.dumps(row), flush=True)
                    keep(RESULTS, [row])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown, each kind with its best learning rate."""
    lines = [
        "| dataset | students predict | metric | learning rate | seeds | accuracy |",
        "|---|---|---|---|---|---|",
    ]
    asked = ("dataset", "students", "metric")
    for group in dict.fromkeys(tuple(row[key] for key in asked) for row in rows):
        mine = [row for row in rows if tuple(row[key] for key in asked) == group]
        runs = {
            lr: [row["accuracy"] for row in mine if row["lr"] == lr]
            for lr in {row["lr"] for row in mine}
        }
        lr = max(runs, key=lambda lr: float(np.mean(runs[lr])))
        what = "what the mean leaves over" if group[1] == "Leftover" else "the output"
        error = np.std(runs[lr], ddof=1) / len(runs[lr]) ** 0.5
        lines.append(
            f"| {DATASETS[group[0]].title} | {what} | {group[2]} | {lr:g} | {len(runs[lr])} | "
            f"{np.mean(runs[lr]):.2f} ± {error:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, or put the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, nargs="*", default=[])
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.names:
        compare(name, arguments.seeds, arguments.lr)
    if arguments.table:
        put(table(kept(RESULTS)), PAGE, "leftover")


if __name__ == "__main__":
    main()
