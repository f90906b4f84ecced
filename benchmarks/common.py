"""What the benchmarks share: data, clocks, memory, results kept as JSON lines, pages of tables."""

import argparse
import itertools
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pecil.data import DATASETS, load

ROOT = Path(__file__).resolve().parents[1]

Array = NDArray[Any]
Row = dict[str, Any]
Figures = dict[str, tuple[float, int]]
"""Measure -> its value, and the number of samples it was measured on."""


@dataclass(frozen=True)
class Measure:
    """A line of the table; targets by (device, setting)."""

    title: str
    unit: str
    ratio: dict[tuple[str, str], float] = field(default_factory=dict)
    """Least times the other side."""
    limit: dict[tuple[str, str], float] = field(default_factory=dict)
    """Greatest value."""
    over: tuple[str, ...] = ()
    """What a complete measurement runs over: "train", "test" or both; none: a sample of them."""

    @property
    def more_is_better(self) -> bool:
        """Whether it is a rate or an accuracy, not a time or a size."""
        return self.unit.endswith("/s") or self.unit == "%"

    def times_better(self, value: float, other: float) -> float:
        """Return how many times as good a value is as another."""
        return value / other if self.more_is_better else other / value

    def target(self, where: tuple[str, str], value: float, ratio: float | None = None) -> str:
        """Say what is aimed at there, and whether it is met."""
        if ratio is not None and (least := self.ratio.get(where)):
            return f"≥ {least}× {'met' if ratio >= least else 'missed'}"
        if most := self.limit.get(where):
            return f"≤ {number(most)} {self.unit} {'met' if value <= most else 'missed'}"
        return ""


# --- data -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Images as a user has them (uint8, channels last), labels, and where they come from."""

    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    source: str


def read_data(name: str) -> Data:
    """Return the dataset if it is on this machine, else a stand-in of the same size."""
    try:
        data = load(name, download=False)
    except FileNotFoundError:
        return stand_in(name)
    if data.test_x is None or data.test_y is None:
        raise ValueError(f"{name} needs test images and labels to be timed on, and has none")
    return Data(
        data.train_x, data.train_y, data.test_x, data.test_y, data.mean, data.std, "real images"
    )


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
    x_parts = np.split(x, [info.n_train])
    y_parts = np.split(np.arange(n) % info.n_classes, [info.n_train])
    return Data(x_parts[0], y_parts[0], x_parts[1], y_parts[1], info.mean, info.std, source)


def by_class(y: Array, n: int | None) -> Array:
    """Return indices of n samples, as many of each class, class after class."""
    labels = np.unique(y)
    return np.concatenate([np.flatnonzero(y == c)[: n and n // len(labels)] for c in labels])


@dataclass(frozen=True)
class Part:
    """Some or all of the data, training samples class after class."""

    x: Array
    y: Array
    test_x: Array
    test_y: Array
    complete: bool


def part_of(data: Data, fit: int | None, score: int | None) -> Part:
    """Return so many training samples and so many test images; None: all."""
    index = by_class(data.train_y, fit)
    test_x, test_y = data.test_x[:score], data.test_y[:score]
    complete = len(index) == len(data.train_x) and len(test_x) == len(data.test_x)
    return Part(data.train_x[index], data.train_y[index], test_x, test_y, complete)


# --- measuring ------------------------------------------------------------------------------


def now() -> float:
    """Return the time in seconds, once the GPU, if in use, has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(action: Callable[..., Any], *arguments: object) -> tuple[Any, float]:
    """Return what an action returns, and the seconds it takes."""
    start = now()
    result = action(*arguments)
    return result, now() - start


def rate(action: Callable[..., object], samples: Sized, *more: object) -> float:
    """Return how many samples a second an action takes."""
    return len(samples) / timed(action, samples, *more)[1]


class PeakMemory:
    """The most memory in use since this was made, beyond that in use then.

    On a GPU the memory allocated there; on a CPU the resident memory of the process.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._before = self._read(peak=False)

    def mebibytes(self) -> float | None:
        """Return it; None where the system does not tell it (Linux does)."""
        now = self._read(peak=True)
        return None if self._before is None or now is None else (now - self._before) / 2**20

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


def whole_run(make: Callable[[], Any], part: Part, device: str) -> tuple[Figures, Any]:
    """Time ``fit`` and ``predict`` of an estimator; return the figures and the estimator.

    On a GPU everything is done twice, since the first time also starts CUDA and compiles:
    rates are those of the second time. ``memory`` is that of ``fit``, ``memory_whole`` that of
    both.
    """
    figures: Figures = {}
    n, both = len(part.x), len(part.x) + len(part.test_x)
    for round_ in range(2 if device == "cuda" else 1):
        model = make()
        memory = PeakMemory(device)
        fit = rate(model.fit, part.x, part.y)
        after_fit = memory.mebibytes()
        predict = rate(model.predict, part.test_x)
        after_both = memory.mebibytes()
        if round_ == 0 and after_fit is not None and after_both is not None:
            figures |= {"memory": (after_fit, n), "memory_whole": (after_both, n)}
        if part.complete:
            key = "whole_first" if device == "cuda" and round_ == 0 else "whole"
            figures[key] = (n / fit + len(part.test_x) / predict, both)
    return figures | {"fit": (fit, n), "predict": (predict, len(part.test_x))}, model


def alone(function: Callable[..., Figures], *arguments: object) -> Figures:
    """Call a function in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def describe(device: str) -> str:
    """Name the processor, its vectors, its cores, the threads if there are fewer, and torch."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cpuinfo = Path("/proc/cpuinfo")
    found = cpuinfo.is_file() and re.search(r"model name\s*: (.+)", cpuinfo.read_text())
    model = found[1] if found else platform.processor()
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    used = f"{cores} cores" if threads >= cores else f"{threads} of {cores} cores"
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{model} ({vectors}), {used}, torch {torch.__version__}"


def number(value: float | None) -> str:
    """Return a number with three digits or more."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def keep(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def kept(path: Path) -> list[Row]:
    """Return the rows of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def put(text: str, page: Path, name: str) -> None:
    """Write a text into a page, between the comments that mark its place."""
    begin, end = (f"<!-- {name}: {border} -->" for border in ("begin", "end"))
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


# --- a benchmark ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """Sides measured next to each other, and the page that shows them."""

    name: str
    """Of the file of results."""
    page: str
    """Where the table goes, in docs/."""
    head: str
    """What stands above the table."""
    columns: tuple[str, ...]
    line: Callable[[Row], tuple[str, ...]]
    """Cells of one row."""
    measures: Mapping[str, Measure]
    settings: Mapping[str, Any]
    """Each has a ``title``, and ``whole()`` and ``smoke()`` give it all the data or very little."""
    sides: Mapping[str, Callable[[Any, str, str], Figures]]
    """Each is called with a setting, its name and a device."""
    ours: str
    """The side whose measures make the rows."""

    @property
    def results(self) -> Path:
        """The file of results."""
        return ROOT / "results" / "speed" / f"{self.name}.jsonl"

    def compare(self, name: str, setting: Any, device: str, rounds: int) -> list[Row]:
        """Measure all sides on one setting and one device, in turn; keep the best of each."""
        sides: dict[str, Figures] = {}
        load = os.getloadavg()[0]  # of others: much of it, and times are not to be trusted
        for side, function in list(self.sides.items()) * rounds:
            print(f"{setting.title} on {device}: {side} …", file=sys.stderr, flush=True)
            figures = alone(function, setting, name, device)
            sides[side] = self.better(sides.get(side, {}), figures)
        source, finished = read_data(name).source, time.strftime("%Y-%m-%dT%H:%M:%S")
        return [
            {
                "time": finished,
                "device": device,
                "machine": describe(device),
                "setting": name,
                "measure": measure,
                "unit": self.measures[measure].unit,
                "data": source,
                "load": load,
                **{
                    key: figures[measure][i] if measure in figures else None
                    for side, figures in sides.items()
                    for i, key in enumerate((side, f"{side}_samples"))
                },
            }
            for measure in self.measures
            if measure in sides[self.ours]
        ]

    def better(self, one: Figures, other: Figures) -> Figures:
        """Return the better of two measurements, figure by figure, of those in the table."""
        best = {measure: other[measure] for measure in self.measures if measure in other}
        for measure, (value, samples) in one.items():
            pick = max if self.measures[measure].more_is_better else min
            best[measure] = (pick(value, other.get(measure, (value, 0))[0]), samples)
        return best

    def newest(self) -> list[list[Row]]:
        """Return, machine by machine, the rows of the last run of each setting."""
        by_run: dict[tuple[str, str], dict[str, dict[str, list[Row]]]] = {}
        for row in kept(self.results):
            runs = by_run.setdefault((row["device"], row["machine"]), {})
            runs.setdefault(row["setting"], {}).setdefault(row["time"], []).append(row)
        return [
            [row for name in self.settings if name in runs for row in runs[name][max(runs[name])]]
            for _, runs in sorted(by_run.items())
        ]

    def table(self, rows_by_machine: Iterable[list[Row]]) -> str:
        """Return the tables, one for each machine."""
        parts = []
        for rows in rows_by_machine:
            rule = ("---", *["---:"] * (len(self.columns) - 2), "---")
            parts += [f"\n## {rows[0]['device'].upper()}: {rows[0]['machine']}\n\n"]
            if loads := [row["load"] for row in rows if "load" in row]:
                parts += [f"Load of the machine before the runs: up to {max(loads):.1f}.\n\n"]
            for cells in (self.columns, rule, *map(self.line, rows)):
                parts += [f"| {' | '.join(cells)} |\n"]
        return "".join(parts)

    def main(self, description: str | None) -> None:
        """Measure, keep the figures, write the page."""
        options = self._options(description)
        if options.device == "auto":
            devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        else:
            devices = [options.device]
        todo = [] if options.table_only else itertools.product(devices, options.settings)
        for device, name in todo:
            setting = self.settings[name]
            if options.smoke:
                setting = setting.smoke()
            elif options.full or device == "cuda":
                setting = setting.whole()
            rows = self.compare(name, setting, device, options.rounds)
            print(self.table([rows]))
            if not options.smoke:
                keep(self.results, rows)
        if not options.smoke:
            page = ROOT / "docs" / self.page
            page.write_text(self.head + self.table(self.newest()), encoding="utf-8")

    def _options(self, description: str | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        names = list(self.settings)
        parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
        parser.add_argument("--settings", nargs="+", choices=names, default=names)
        parser.add_argument("--rounds", type=int, default=1, help="measure so often, keep the best")
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument("--full", action="store_true", help="all data on the CPU, too")
        mode.add_argument("--smoke", action="store_true", help="little data; print, keep nothing")
        mode.add_argument("--table-only", action="store_true", help="measure nothing")
        return parser.parse_args()
