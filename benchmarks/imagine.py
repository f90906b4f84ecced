"""Is PEC secretly a generative model? Its samples beside VAE-GC's and the originals, on MNIST.

    python benchmarks/imagine.py --device cuda --seeds 3      (minutes on a GPU)
    python benchmarks/imagine.py --table                      docs/imagine.md from the results

PEC's samples start at random and descend the error of their class (`pecil.imagine`), once as the
paper has it and once from a black image by plain gradient descent; VAE-GC's are decoded from its
prior. How much of a class there is in them is measured by a judge that knows
neither: the share that whitened PEC, trained on the originals, gives to the class that they were
made for. docs/imagine.png shows the first seed's. Seeds that are in the results are left out.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pecil
from common import ROOT, Array, Row, describe, keep, kept, number, put
from pecil.bench.experiment import settings_for
from pecil.bench.tables import with_error
from pecil.data import Dataset, load, stream
from pecil.files import written_whole
from pecil.methods import METHODS
from pecil.methods.vae_gc import VAEGC
from pecil.pec.imagine import imagine

RESULTS = ROOT / "results" / "validation" / "imagine.jsonl"
PAGE, PICTURE = ROOT / "docs" / "imagine.md", ROOT / "docs" / "imagine.png"
JUDGE = "whitened_pec"
HOW = ("samples", "updates", "lr")
PLAIN: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 1.0, "updates": 400}
TITLES = {
    "originals": "originals",
    "vae_gc": "VAE-GC",
    "pec": "PEC",
    "pec_plain": "PEC, plain",
}


def trained(method: str, data: Dataset, seed: int, device: str) -> Any:
    """Return a learner of the benchmark that has seen one class after the other."""
    learner: Any = METHODS[method].learner(
        10,
        data.train_x.shape[1:],
        mean=data.mean,
        std=data.std,
        seed=seed,
        device=device,
        **settings_for(method, "mnist"),
    )
    for task in stream(data, "10/1", seed=seed):
        learner.begin_task({task.classes[0]: len(task.y)})
        learner.learn(task.x, task.y)
        learner.end_task()
    return learner


def decoded(learner: VAEGC, labels: list[int], seed: int) -> Array:
    """Return samples of VAE-GC, one for each label."""
    chance = torch.Generator().manual_seed(seed)
    z = torch.randn(len(labels), 1, learner.latent, generator=chance).to(learner.device)
    with torch.no_grad():
        made = [learner.vaes[label].decoder(one) for label, one in zip(labels, z, strict=True)]
    return torch.cat(made).sigmoid().view(-1, 28, 28).cpu().numpy()


def measure(seed: int, options: argparse.Namespace) -> tuple[Row, dict[str, Array]]:
    """Make samples of all kinds and have them judged."""
    data, device = load("mnist"), options.device
    if data.test_x is None or data.test_y is None:
        raise ValueError("MNIST has no test part to take originals from")
    labels = list(range(10)) * options.rows
    nth = [np.flatnonzero(data.test_y == label) for label in range(10)]
    originals = [nth[label][k // 10 + options.rows * seed] for k, label in enumerate(labels)]
    pec, vae, judge = (trained(name, data, seed, device) for name in ("pec", "vae_gc", JUDGE))
    how = {"updates": options.updates, "lr": options.lr, "random_state": seed}
    samples = {
        "originals": data.test_x[originals].astype(np.float32) / 255,
        "vae_gc": decoded(vae, labels, seed),
        "pec": imagine(pec.pec, labels, **how, progress=counted)[:, 0],
        "pec_plain": stretched(imagine(pec.pec, range(10), start=np.zeros((10, 28, 28)), **PLAIN)),
    }
    shares = {
        kind: float(np.mean(judge.scores(images.clip(0, 1)).argmax(1) == labels[: len(images)]))
        for kind, images in samples.items()
    }
    own = pec.pec.errors(samples["pec"])[np.arange(len(labels)), labels]
    usual = pec.pec.errors(samples["originals"])[np.arange(len(labels)), labels]
    versions = {"pecil": pecil.__version__, "torch": torch.__version__, "numpy": np.__version__}
    row = {"seed": seed, "samples": len(labels), **how, "shares": shares}
    row |= {"error": float(own.mean()), "error_of_originals": float(usual.mean())}
    row |= {"device": f"{pec.device.type}: {describe(pec.device.type)}", "versions": versions}
    return row, samples


def stretched(images: Array) -> Array:
    """Return images (n, 1, h, w), (n, h, w), each from its darkest to its brightest."""
    low, high = images.min((1, 2, 3), keepdims=True), images.max((1, 2, 3), keepdims=True)
    return ((images - low) / (high - low))[:, 0]


def counted(done: int, of: int) -> None:
    """Tell a terminal how far the descent is."""
    if sys.stderr.isatty() and done % 100 == 0:
        print(f"\r{done:,} of {of:,} updates", end="\n" if done == of else "", file=sys.stderr)


def draw(samples: dict[str, Array], path: Path) -> None:
    """Draw the samples, a column for each class."""
    from matplotlib.figure import Figure

    rows = sum(map(len, samples.values())) // 10
    figure = Figure(figsize=(7, 0.66 * rows), layout="constrained")
    heights = [len(images) for images in samples.values()]
    axes = np.atleast_1d(figure.subplots(len(samples), height_ratios=heights))
    for place, (kind, images) in zip(axes, samples.items(), strict=True):
        grid = images.clip(0, 1).reshape(-1, 10, 28, 28)
        grid = np.pad(grid, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=0.5)
        place.imshow(np.block([list(row) for row in grid]), cmap="gray_r", vmin=0, vmax=1)
        place.set(xticks=[], yticks=[])
        place.set_ylabel(TITLES[kind].replace(", ", ",\n"), rotation=0, ha="right", va="center")
        place.spines[:].set_visible(False)
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png", bbox_inches="tight", pad_inches=0.05)


def alike(rows: list[Row], how: Row) -> list[Row]:
    """Return the rows of samples as many, and made in the same way, one for each seed."""
    same = [row for row in rows if all(row[name] == how[name] for name in HOW)]
    return list({row["seed"]: row for row in same}.values())


def table(rows: list[Row]) -> str:
    """Return the judge's verdicts on the newest kind of samples as Markdown."""
    rows = alike(rows, rows[-1])
    lines = ["| samples | given to their class, % | seeds | PEC's error |", "|---|---:|---:|---:|"]
    errors = {"originals": "error_of_originals", "pec": "error"}
    for kind, title in TITLES.items():
        shares = with_error([100 * row["shares"][kind] for row in rows])
        error = number(np.mean([row[errors[kind]] for row in rows])) if kind in errors else ""
        lines.append(f"| {title} | {shares} | {len(rows)} | {error} |")
    return "\n".join(lines)


def main() -> None:
    """Make samples, keep what the judge says, draw the first seed's, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=3, help="samples of each class")
    parser.add_argument("--updates", type=int, default=30_000)
    parser.add_argument("--lr", type=float, default=0.00003)
    parser.add_argument("--table", action="store_true", help="only write the page")
    options = parser.parse_args()
    how = {"samples": 10 * options.rows, "updates": options.updates, "lr": options.lr}
    known = {row["seed"] for row in alike(kept(RESULTS), how)}
    asked = range(1, 1 + (0 if options.table else options.seeds))
    for seed in sorted(set(asked) - known):
        row, samples = measure(seed, options)
        print(row, flush=True)
        keep(RESULTS, [row])
        if seed == 1:
            draw(samples, PICTURE)
    put(table(kept(RESULTS)), PAGE, "imagine")


if __name__ == "__main__":
    main()
