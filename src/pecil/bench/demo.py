"""The demonstration: digits one class at a time, whitened PEC, PEC, a network that forgets."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pecil.bench import figures
from pecil.bench.experiment import Progress, planned, run
from pecil.methods import METHODS
from pecil.methods.learner import Array

LOOKS: dict[str, dict[str, Any]] = {  # told apart by line and marker as well as by colour
    "whitened_pec": figures.LOOKS["whitened_pec"],
    "pec": figures.LOOKS["pec"],
    "finetuning": {"color": "#c2571a", "linestyle": "--", "marker": "s", "markerfacecolor": "w"},
}
LINE = 7  # percent of accuracy that a line of text is high


def curves(seeds: Sequence[int], progress: Progress | None = None) -> dict[str, Array]:
    """Measure the accuracy over the classes seen so far, after each new class.

    Returns
    -------
    dict
        By method, an array (seeds, classes).
    """
    runs = [(method, seed) for method in LOOKS for seed in seeds]
    rows: dict[str, list[list[float]]] = {method: [] for method in LOOKS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small only lose time on more
    try:
        for done, (method, seed) in enumerate(runs, start=1):
            result = run(planned(method, "digits", seed=seed), device="cpu", per_task=True)
            rows[method].append(result.accuracy_after_task)
            if progress is not None:
                progress(done, len(runs))
    finally:
        torch.set_num_threads(threads)
    return {method: np.array(accuracies) for method, accuracies in rows.items()}


def plot(measured: Mapping[str, Array], path: str | os.PathLike[str]) -> None:
    """Draw what `curves` measured into a picture file; needs no display."""
    figure = figures.blank(7, 4)
    axes = figure.subplots()
    above = np.inf
    for method, accuracies in sorted(measured.items(), key=lambda item: -item[1][:, -1].mean()):
        mean, spread = 100 * accuracies.mean(axis=0), 100 * accuracies.std(axis=0)
        n_classes = np.arange(1, len(mean) + 1)
        look = LOOKS[method]
        axes.fill_between(n_classes, mean - spread, mean + spread, color=look["color"], alpha=0.15)
        axes.plot(n_classes, mean, linewidth=2, markersize=7, markeredgewidth=1.5, **look)
        above = min(mean[-1], above - LINE)  # a line of text below the last one, at least
        axes.annotate(
            f"{METHODS[method].title} {mean[-1]:.0f} %",
            (n_classes[-1], above),
            xytext=(12, 0),
            textcoords="offset points",
            va="center",
            color=look["color"],
            weight="bold",
            annotation_clip=False,
        )
    axes.set_title("Digits, one class at a time, each sample seen once", loc="left", pad=12)
    axes.set_xlabel("classes learned so far")
    axes.set_ylabel("test accuracy on them (%)")
    axes.set_xticks(n_classes)
    axes.set_xlim(0.7, n_classes[-1] + 0.3)
    axes.set_ylim(0, 104)
    figures.save(figure, path)
