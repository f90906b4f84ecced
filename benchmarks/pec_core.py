"""Speed and memory of :class:`pecil.PEC` next to the plain reference, measured in one run.

    python benchmarks/pec_core.py                 the CPU, and the GPU where there is one
    python benchmarks/pec_core.py --device cuda   one of them
    python benchmarks/pec_core.py --full          CIFAR-10 whole on the CPU, too (many minutes)
    python benchmarks/pec_core.py --smoke         a few samples, to see that it works; nothing kept
    python benchmarks/pec_core.py --table-only    write docs/speed.md anew from the results kept

Every model is measured in a fresh process. Figures are appended to results/speed/pec_core.jsonl;
docs/speed.md shows the newest ones of each device.
"""

import argparse
import itertools
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Sized
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import pecil
from pecil.data import DATASETS, load
from reference import ReferencePEC, conv, mlp

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "speed" / "pec_core.jsonl"
TABLE = ROOT / "docs" / "speed.md"

Array = NDArray[Any]
Row = dict[str, Any]
Figures = dict[str, tuple[float, int]]
"""Measure -> its value, and the number of samples it was measured on."""


@dataclass(frozen=True)
class Setting:
    """One architecture of the paper, and how much of its data each measurement takes."""

    title: str
    widths: dict[str, Any]
    """Parameters of PEC that make the architecture."""
    lr: float
    reference_fit: int
    reference_score: int
    stream: int
    """Samples given to ``partial_fit`` one by one."""
    fit: int | None = None
    """Samples given to ``fit`` on the CPU; None: all."""
    score: int | None = None

    def whole(self) -> "Setting":
        """Return the same on all the data."""
        return replace(self, fit=None, score=None)

    def smoke(self) -> "Setting":
        """Return the same on very little data."""
        return replace(self, reference_fit=20, reference_score=2, stream=20, fit=50, score=20)


SETTINGS = {
    "mnist": Setting(
        title="MNIST",
        widths={
            "architecture": "mlp",
            "student_width": 10,
            "teacher_width": 5000,
            "output_dim": 99,
        },
        lr=0.01,
        reference_fit=1000,
        reference_score=200,
        stream=2000,
    ),
    "cifar10": Setting(
        title="CIFAR-10",
        widths={
            "architecture": "conv",
            "student_width": 60,
            "teacher_width": 6000,
            "output_dim": 743,
            "pool": 5,
        },
        lr=0.0003,
        reference_fit=100,
        reference_score=20,
        stream=300,
        fit=5000,
        score=1000,
    ),
}


@dataclass(frozen=True)
class Measure:
    """A line of the table; targets by (device, setting)."""

    title: str
    unit: str
    ratio: dict[tuple[str, str], float] = field(default_factory=dict)
    """Least times the reference."""
    limit: dict[tuple[str, str], float] = field(default_factory=dict)
    """Greatest value."""


MEASURES = {
    "fit": Measure("`fit`", "samples/s", ratio={("cpu", "mnist"): 30, ("cpu", "cifar10"): 8}),
    "partial_fit": Measure(
        "`partial_fit` of single samples",
        "samples/s",
        ratio={("cpu", "mnist"): 2, ("cpu", "cifar10"): 2},
    ),
    "predict": Measure(
        "`predict`", "images/s", ratio={("cpu", "mnist"): 100, ("cpu", "cifar10"): 20}
    ),
    "memory": Measure(
        "peak memory of `fit`",
        "MiB",
        limit={("cpu", "cifar10"): 3 * 1024, ("cuda", "cifar10"): 3 * 1024},
    ),
    "whole_first": Measure("whole run, first in the process", "s"),
    "whole": Measure(
        "whole run: `fit` and `predict`",
        "s",
        limit={("cuda", "mnist"): 1.5, ("cuda", "cifar10"): 10},
    ),
}


# --- data -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Images as a user has them (uint8, channels last), labels, and where they come from."""

    train_x: Array
    train_y: Array
    test_x: Array
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    source: str


def read_data(name: str) -> Data:
    """Return the dataset if it is on this machine, else a stand-in of the same size."""
    try:
        data = load(name, download=False)
    except FileNotFoundError:
        return stand_in(name)
    if data.test_x is None:
        raise ValueError(f"{name} needs test images to be timed on, and has none")
    return Data(data.train_x, data.train_y, data.test_x, data.mean, data.std, "real images")


def stand_in(name: str) -> Data:
    """Return random images; those for MNIST are thin strokes on an empty ground.

    Inputs that are zero most of the time matter: their momenta decay into subnormal numbers,
    which slow down a processor.
    """
    info, rng = DATASETS[name], np.random.default_rng(0)
    n = info.n_train + info.n_test
    if len(info.shape) == 3:
        x = rng.integers(0, 256, (n, *info.shape), np.uint8)
        source = "synthetic noise"
    else:
        x = np.zeros((n, *info.shape), np.uint8)
        t = np.linspace(0, 1, 40)
        weights = np.stack([(1 - t) ** 2, 2 * t * (1 - t), t**2])  # of a quadratic Bezier curve
        for _ in range(4):
            ends = rng.integers(4, 23, (n, 3, 2))
            row, column = np.rint(np.einsum("nks,kt->snt", ends, weights)).astype(np.int64)
            for down, right in itertools.product((0, 1), repeat=2):  # two pixels wide
                x[np.arange(n)[:, None], row + down, column + right] = 255
        source = "synthetic strokes"
    y = np.arange(info.n_train) % info.n_classes
    return Data(x[: info.n_train], y, x[info.n_train :], info.mean, info.std, source)


def by_class(y: Array, n: int | None) -> Array:
    """Return indices of n samples, as many of each class, class after class."""
    labels = np.unique(y)
    return np.concatenate([np.flatnonzero(y == c)[: n and n // len(labels)] for c in labels])


def as_tensor(x: Array, data: Data, device: str) -> Tensor:
    """Return images as the networks take them: (n, c, h, w), scaled and normalised."""
    images = torch.from_numpy(x).float().div_(255)
    if data.mean is not None:
        images = (images - torch.tensor(data.mean)) / torch.tensor(data.std)
    if images.ndim == 3:
        images = images.unsqueeze(-1)
    return images.movedim(-1, 1).contiguous().to(device)


# --- measuring ------------------------------------------------------------------------------


def now() -> float:
    """Return the time in seconds, once the GPU, if in use, has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def rate(action: Callable[..., object], samples: Sized, *more: object) -> float:
    """Return how many samples a second an action takes."""
    start = now()
    action(samples, *more)
    return len(samples) / (now() - start)


class PeakMemory:
    """The most memory in use within a ``with`` block, beyond that in use before it.

    On a GPU the memory allocated there; on a CPU the resident memory of the process, None
    where the system does not tell it (Linux does).
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.mebibytes: float | None = None

    def __enter__(self) -> Self:
        self._before = self._read(peak=False)
        return self

    def __exit__(self, *_: object) -> None:
        after = self._read(peak=True)
        if self._before is not None and after is not None:
            self.mebibytes = (after - self._before) / 2**20

    def _read(self, *, peak: bool) -> int | None:
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        try:
            if not peak:
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            status = Path("/proc/self/status").read_text()
        except OSError:
            return None
        found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status)
        return int(found[1]) * 1024 if found else None


def measure_reference(setting: Setting, name: str, device: str) -> Figures:
    """Time the reference; what brings its data into shape is not counted."""
    data = read_data(name)
    index = by_class(data.train_y, setting.reference_fit)
    x, y = as_tensor(data.train_x[index], data, device), data.train_y[index].tolist()
    test = as_tensor(data.test_x[: setting.reference_score], data, device)
    counts = {label: setting.reference_fit for label in y}
    first = by_class(data.train_y[index], len(counts))  # one sample of each class
    with PeakMemory(device) as memory:
        model = ReferencePEC(*networks(setting, x), lr=setting.lr, counts=counts)
        model.fit(x[first], [y[i] for i in first])
        fit = rate(model.fit, x, y)
    model.predict(test[:1])
    predict = rate(model.predict, test)
    figures = {"fit": (fit, len(x)), "partial_fit": (fit, len(x)), "predict": (predict, len(test))}
    if memory.mebibytes is not None:
        figures["memory"] = (memory.mebibytes, len(x))
    n = len(data.train_x), len(data.test_x)
    figures["whole"] = figures["whole_first"] = (n[0] / fit + n[1] / predict, len(x) + len(test))
    return figures


def networks(setting: Setting, x: Tensor) -> tuple[nn.Module, nn.Module]:
    """Return a teacher and a student for such inputs."""
    torch.manual_seed(0)
    widths = setting.widths["teacher_width"], setting.widths["student_width"]
    outputs = setting.widths["output_dim"]

    def network(width: int) -> nn.Module:
        if setting.widths["architecture"] == "mlp":
            return nn.Sequential(nn.Flatten(), mlp(x[0].numel(), width, outputs))
        return conv(x.shape[1], width, outputs, setting.widths["pool"])

    teacher, student = (network(width).to(x.device) for width in widths)
    return teacher, student


def measure_pecil(setting: Setting, name: str, device: str) -> Figures:
    """Time the estimator on the images as they are: bringing them into shape is counted.

    On a GPU everything is done twice, since the first time also starts CUDA and compiles:
    rates are those of the second time.
    """
    data = read_data(name)
    index = by_class(data.train_y, setting.fit)
    x, y, test = data.train_x[index], data.train_y[index], data.test_x[: setting.score]
    stream = by_class(data.train_y, setting.stream)
    singles, labels = data.train_x[stream], data.train_y[stream]
    whole = len(x) == len(data.train_x) and len(test) == len(data.test_x)
    options = {**setting.widths, "lr": setting.lr, "mean": data.mean, "std": data.std}
    del data
    figures: Figures = {}

    for round_ in range(2 if device == "cuda" else 1):
        with PeakMemory(device) as memory:
            model = pecil.PEC(**options, device=device)
            fit = rate(model.fit, x, y)
        predict = rate(model.predict, test)
        if round_ == 0 and memory.mebibytes is not None:
            figures["memory"] = (memory.mebibytes, len(x))
        if whole:
            key = "whole_first" if device == "cuda" and round_ == 0 else "whole"
            figures[key] = (len(x) / fit + len(test) / predict, len(x) + len(test))
    figures |= {"fit": (fit, len(x)), "predict": (predict, len(test))}

    model = pecil.PEC(**options, expected_samples=len(stream), device=device)

    def learn(samples: Iterable[int]) -> None:
        for i in samples:
            model.partial_fit(singles[i : i + 1], labels[i : i + 1])

    learn(by_class(labels, len(np.unique(labels))))  # one sample of each class
    figures["partial_fit"] = (rate(learn, range(len(stream))), len(stream))
    return figures


def alone(function: Callable[..., Figures], *arguments: object) -> Figures:
    """Call a function in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def compare(name: str, setting: Setting, device: str, rounds: int) -> list[Row]:
    """Measure both on one setting and one device, in turn; keep the best of each."""
    sides: dict[str, Figures] = {}
    for side, function in (("reference", measure_reference), ("pecil", measure_pecil)) * rounds:
        print(f"{setting.title} on {device}: {side} …", file=sys.stderr, flush=True)
        sides[side] = better(sides.get(side, {}), alone(function, setting, name, device))
    source, finished = read_data(name).source, time.strftime("%Y-%m-%dT%H:%M:%S")
    return [
        {
            "time": finished,
            "device": device,
            "machine": describe(device),
            "setting": name,
            "measure": measure,
            "unit": MEASURES[measure].unit,
            "data": source,
            **{
                key: figures[measure][i] if measure in figures else None
                for side, figures in sides.items()
                for i, key in enumerate((side, f"{side}_samples"))
            },
        }
        for measure in MEASURES
        if measure in sides["pecil"]
    ]


def better(one: Figures, other: Figures) -> Figures:
    """Return the better of two measurements, figure by figure."""
    best = dict(other)
    for measure, (value, samples) in one.items():
        pick = max if MEASURES[measure].unit.endswith("/s") else min
        best[measure] = (pick(value, other.get(measure, (value, 0))[0]), samples)
    return best


def describe(device: str) -> str:
    """Name the processor, its cores, and torch."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cpuinfo = Path("/proc/cpuinfo")
    found = cpuinfo.is_file() and re.search(r"model name\s*: (.+)", cpuinfo.read_text())
    model = found[1] if found else platform.processor()
    return f"{model}, {os.cpu_count()} cores, torch {torch.__version__}"


# --- the table ------------------------------------------------------------------------------

HEAD = """# Speed

Written by `python benchmarks/pec_core.py`; the figures are kept in `results/speed/pec_core.jsonl`.

`pecil.PEC` next to a plain PEC (`benchmarks/reference.py`: one module and one Adam per class,
one sample per step, the teacher run for every sample in training and for every image and class
in scoring), both measured in the same run, each in a process of its own, in float32. The two
give the same students (`tests/pec/test_reference.py`).

- The reference is slow, so it is timed on fewer samples, after one step of each class. Its data
  are brought into shape beforehand; for `pecil`, whatever is done to the raw images counts.
- On the CPU both sides are measured three times in turn (`--rounds 3`) and the best of each
  counts: the machine is shared with others, and the same run can take twice as long a minute later.
- Samples come class after class. `partial_fit` gets them one by one, one call each.
- Memory: on a CPU the growth of resident memory during `fit`, beside the data; on a GPU all that
  is allocated there, the data included.
- Whole run: the complete training set, single pass, then the complete test set. The
  reference's is extrapolated from its rates. On a GPU rates are those of a second run in the same
  process; the first one also starts CUDA and compiles.
"""
COLUMNS = ("", "reference", "pecil", "ratio", "target", "measured on (reference / pecil)")


def newest(path: Path) -> dict[str, list[Row]]:
    """Return, by device, the rows of the last run of each setting on the machine used last."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    machine = {row["device"]: row["machine"] for row in rows}
    run = {(row["device"], row["setting"]): row["time"] for row in rows}
    return {
        device: [
            row
            for name in SETTINGS
            for row in rows
            if (row["device"], row["machine"], row["setting"]) == (device, last, name)
            and row["time"] == run[device, name]
        ]
        for device, last in machine.items()
    }


def table(rows_by_device: dict[str, list[Row]]) -> str:
    """Return the page."""
    parts = [HEAD]
    for device, rows in sorted(rows_by_device.items()):
        lines = [COLUMNS, ("---", *["---:"] * 4, "---"), *map(line, rows)]
        parts += [f"\n## {device.upper()}: {rows[0]['machine']}\n\n"]
        parts += [f"| {' | '.join(cells)} |\n" for cells in lines]
    return "".join(parts)


def line(row: Row) -> tuple[str, ...]:
    """Return the cells of one row of the table."""
    measure, where = MEASURES[row["measure"]], (row["device"], row["setting"])
    theirs, ours = row["reference"], row["pecil"]
    ratio = theirs and (theirs / ours if measure.unit == "s" else ours / theirs)
    target = ""
    if least := measure.ratio.get(where):
        target = f"≥ {least}× {'met' if ratio >= least else 'missed'}"
    elif most := measure.limit.get(where):
        target = f"≤ {number(most)} {measure.unit} {'met' if ours <= most else 'missed'}"
    counts = [f"{row[k]:,}" for k in ("reference_samples", "pecil_samples") if row[k]]
    return (
        f"{SETTINGS[row['setting']].title}, {measure.title}, {measure.unit}",
        number(theirs),
        number(ours),
        f"{number(ratio)}×" if ratio and measure.unit != "MiB" else "",
        target,
        f"{row['data']}, {' / '.join(counts)}",
    )


def number(value: float | None) -> str:
    """Return a number with three digits or more."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# --- the command ----------------------------------------------------------------------------


def main() -> None:
    """Measure, keep the figures, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=1, help="measure so often, keep the best")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--full", action="store_true", help="all data on the CPU, too")
    mode.add_argument("--smoke", action="store_true", help="little data; print, keep nothing")
    mode.add_argument("--table-only", action="store_true", help="measure nothing")
    options = parser.parse_args()

    if options.device == "auto":
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    else:
        devices = [options.device]
    for device, name in itertools.product([] if options.table_only else devices, options.settings):
        setting = SETTINGS[name]
        if options.smoke:
            setting = setting.smoke()
        elif options.full or device == "cuda":
            setting = setting.whole()
        rows = compare(name, setting, device, options.rounds)
        print(table({device: rows}).removeprefix(HEAD))
        if not options.smoke:
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            with RESULTS.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    if not options.smoke:
        TABLE.write_text(table(newest(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    main()
