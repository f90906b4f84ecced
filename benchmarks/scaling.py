"""How `pecil.engines.ray.fit` scales: one model trained by one process, by one worker, by two.

    python benchmarks/scaling.py                        all settings, on the CPU
    python benchmarks/scaling.py --settings images      one of them
    python benchmarks/scaling.py --workers 1 2 4 8      other numbers of workers
    python benchmarks/scaling.py --device cuda          workers share the GPU
    python benchmarks/scaling.py --smoke                a few samples; nothing kept
    python benchmarks/scaling.py --table-only           write the tables of docs/cluster.md anew

Every worker, and the one process, has one core (or a share of the GPU), and is measured in a fresh
process after Ray has started. Figures are appended to results/speed/scaling.jsonl; the newest of
each setting stand in docs/cluster.md.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from common import ROOT, Array, Figures, Row, alone, describe, keep, kept, number, put, timed
from pecil import PEC, WhitenedPEC
from pecil.engines.ray import _merged, _Part, fit

RESULTS = ROOT / "results" / "speed" / "scaling.jsonl"
PAGE = ROOT / "docs" / "cluster.md"
STREAM = 10**8  # samples of the stream that is asked about
PARTS = STREAM / 32_768  # small models that are merged on the way, by one process
MANY = (1, 16, 64, 256)  # workers that might learn it


@dataclass(frozen=True)
class Setting:
    """A model and a synthetic stream of classes that take turns."""

    title: str
    model: str
    options: dict[str, Any]
    shape: tuple[int, ...]
    samples: int
    batch_size: int
    classes: int = 10

    def smoke(self) -> "Setting":
        """Return the same, very small."""
        shape = self.shape if len(self.shape) > 1 else (50,)
        small = {"dim": 100} if "dim" in self.options else {}
        return replace(self, options=self.options | small, shape=shape, samples=400, batch_size=100)

    def estimator(self, device: str) -> Any:
        """Return the model, untrained."""
        kinds: dict[str, Any] = {"WhitenedPEC": WhitenedPEC, "PEC": PEC}
        return kinds[self.model](**self.options, device=device)

    def maker(self) -> Callable[[dict[str, Array]], dict[str, Array]]:
        """Return what makes samples of the stream; they depend on their numbers alone.

        It is a function of its own, without this class, so that Ray can send it to workers.
        """
        shape, classes = self.shape, self.classes

        def made(ids: dict[str, Array]) -> dict[str, Array]:
            rng = np.random.default_rng(int(ids["id"][0]))
            size = (len(ids["id"]), *shape)
            images = len(shape) > 1
            x = rng.integers(0, 256, size, np.uint8) if images else rng.standard_normal(size, "f4")
            return {"x": x, "y": ids["id"] % classes}

        return made

    def batches(self) -> Iterator[dict[str, Array]]:
        """Make the stream."""
        for start in range(0, self.samples, self.batch_size):
            stop = min(start + self.batch_size, self.samples)
            yield self.maker()({"id": np.arange(start, stop)})


def ready(dim: int, samples: int) -> Setting:
    """Return a stream of embeddings."""
    title, options = f"embeddings, D = {dim:,}", {"teacher": "identity"}
    return Setting(title, "WhitenedPEC", options, (dim,), samples, samples // 4)


SETTINGS = {
    "embeddings": ready(4700, 65_536),
    "embeddings10k": ready(10_000, 65_536),
    "images": Setting(
        "images 32×32, D = 4,700", "WhitenedPEC", {"dim": 4700}, (32, 32, 3), 8192, 2048
    ),
    "pec": Setting("PEC, digits 28×28", "PEC", {}, (28, 28), 20_000, 5000),
}


# --- measuring ------------------------------------------------------------------------------


def measure(setting: Setting, workers: int, device: str) -> Figures:
    """Time the training: by Ray, or with 0 workers by this process."""
    torch.set_num_threads(1)
    estimator = setting.estimator(device)
    if not workers:
        model, seconds = timed(by_one, setting, estimator)
        figures = {"seconds": (seconds, setting.samples)}
        if setting.model == "WhitenedPEC":
            parts = [_Part.of(model)] * 3  # the first also draws the teacher
            spent = timed(_merged, estimator, parts)[1] - timed(_merged, estimator, parts[:1])[1]
            figures["merge"] = (spent / 2, 2)
        return figures
    import ray

    _, start = timed(partial(ray.init, num_cpus=workers + 1, log_to_driver=False))
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        numbers = ray.data.range(setting.samples, override_num_blocks=-(-setting.samples // 1024))
        stream = numbers.map_batches(setting.maker(), batch_size=None, num_cpus=0.1)
        options: dict[str, Any] = {"workers": workers, "batch_size": setting.batch_size}
        options["gpus"] = 1 / workers if device == "cuda" else 0
        _, seconds = timed(lambda: fit(estimator, stream, **options))
    finally:
        ray.shutdown()
    return {"seconds": (seconds, setting.samples), "start": (start, 1)}


def by_one(setting: Setting, estimator: Any) -> Any:
    """Train in this process: WhitenedPEC batch by batch, PEC on everything."""
    if setting.model == "WhitenedPEC":
        for batch in setting.batches():
            estimator.partial_fit(batch["x"], batch["y"])
        return estimator
    whole = setting.maker()({"id": np.arange(setting.samples)})
    return estimator.fit(whole["x"], whole["y"])


def compare(name: str, setting: Setting, device: str, crews: list[int]) -> list[Row]:
    """Measure one process and all numbers of workers."""
    load, rows = os.getloadavg()[0], []
    finished = time.strftime("%Y-%m-%dT%H:%M:%S")
    for workers in (0, *crews):
        print(f"{setting.title}, {workers} workers …", file=sys.stderr, flush=True)
        figures = alone(measure, setting, workers, device)
        row: Row = {"time": finished, "machine": describe(device), "load": load}
        row |= {"setting": name, "device": device, "workers": workers, "samples": setting.samples}
        rows.append(row | {key: value for key, (value, _) in figures.items()})
    return rows


# --- the tables -----------------------------------------------------------------------------


def tables(rows: list[Row]) -> str:
    """Return the newest run of each setting and device: rates, then the long stream."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        where = row["device"], row["setting"]
        if where in runs and runs[where][0]["time"] == row["time"]:
            runs[where].append(row)
        else:
            runs[where] = [row]
    if not runs:
        return "Not measured yet: `python benchmarks/scaling.py`."
    crews = sorted({row["workers"] for run in runs.values() for row in run} - {0})
    heads = ["training", "one process", *(f"Ray, workers: {k}" for k in crews)]
    parts = [lines(heads, [rate_cells(run, crews) for run in runs.values()])]
    heads = ["100 million samples", "merging a part", *(f"workers: {k}" for k in MANY)]
    if whitened := [run for run in runs.values() if "merge" in run[0]]:
        parts += [lines(heads, [stream_cells(run) for run in whitened])]
    machines = dict.fromkeys(run[0]["machine"] for run in runs.values())
    load = max(run[0]["load"] for run in runs.values())
    parts += [f"Measured on {'; '.join(machines)}; load before the runs up to {load:.1f}."]
    return "\n\n".join(parts)


def lines(heads: list[str], cells: list[list[str]]) -> str:
    """Return a table."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *cells))


def rate_cells(run: list[Row], crews: list[int]) -> list[str]:
    """Return samples per second, with what they are of one process."""
    alone_, *others = run
    rate = alone_["samples"] / alone_["seconds"]
    cells = [f"{titled(alone_)}, samples/s", number(rate)]
    found = {row["workers"]: row["samples"] / row["seconds"] for row in others}
    return cells + [
        f"{number(found[k])} ({found[k] / rate:.2f}×)" if k in found else "" for k in crews
    ]


def stream_cells(run: list[Row]) -> list[str]:
    """Return the hours of the long stream: at workers times the rate of one, or of merging."""
    rate, merge = run[0]["samples"] / run[0]["seconds"], run[0]["merge"]
    seconds = [max(STREAM / rate / k, PARTS * merge) for k in MANY]
    hours = [f"{number(spent / 3600)} h" for spent in seconds]
    return [titled(run[0]), f"{number(merge)} s", *hours]


def titled(row: Row) -> str:
    """Name a row."""
    return f"{SETTINGS[row['setting']].title}, {row['device'].upper()}"


def main() -> None:
    """Measure, keep the figures, write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--smoke", action="store_true", help="little data; print, keep nothing")
    mode.add_argument("--table-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    for name in () if options.table_only else options.settings:
        setting = SETTINGS[name].smoke() if options.smoke else SETTINGS[name]
        rows = compare(name, setting, options.device, options.workers)
        print(tables(rows))
        if not options.smoke:
            keep(RESULTS, rows)
    if not options.smoke:
        put(tables(kept(RESULTS)), PAGE, "scaling")


if __name__ == "__main__":
    main()
