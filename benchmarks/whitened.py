"""Speed, memory and accuracy of :class:`pecil.WhitenedPEC`, measured in one run with its peers.

    python benchmarks/whitened.py                    the CPU, and the GPU where there is one
    python benchmarks/whitened.py --device cuda      one of them
    python benchmarks/whitened.py --settings mnist   one of the datasets
    python benchmarks/whitened.py --rounds 3         each side three times in turn; the best counts
    python benchmarks/whitened.py --full             all data and solvers on the CPU, too
    python benchmarks/whitened.py --smoke            a few samples; nothing kept
    python benchmarks/whitened.py --table-only       write docs/speed-whitened.md anew

The peers: :class:`pecil.PEC` with the paper's settings, and scikit-learn's linear discriminant
analysis of the features that the same teacher gives. Every side is measured in a fresh process.
Figures are appended to results/speed/whitened.jsonl; docs/speed-whitened.md shows the newest.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pec_core
import pecil
from common import (
    Array,
    Benchmark,
    Figures,
    Measure,
    Part,
    PeakMemory,
    Row,
    by_class,
    number,
    part_of,
    rate,
    read_data,
    timed,
    whole_run,
)
from pecil.data import DATASETS

DIM = 1000  # features of the model that learns a stream sample by sample
CHUNK = 1000  # images whose features are taken at a time


@dataclass(frozen=True)
class Setting:
    """A dataset, the memory of the paper's model, and how much data each measurement takes."""

    title: str
    memory: float
    """Numbers that the model may hold: as many as the paper's PEC."""
    pec: pec_core.Setting
    svd: bool = True
    """Whether to run the "svd" solver, which holds several copies of all features."""
    stream: int = 1000
    """Samples given to ``partial_fit`` one by one."""
    fit: int | None = None
    """Samples given to ``fit``; None: all. PEC has its own."""
    score: int | None = None

    def whole(self) -> "Setting":
        """Return the same with PEC on all the data, and every solver."""
        return replace(self, pec=self.pec.whole(), svd=True)

    def smoke(self) -> "Setting":
        """Return the same on very little data, with a small model."""
        pec = self.pec.smoke()
        return replace(self, memory=20_000, pec=pec, svd=True, stream=40, fit=500, score=100)


SETTINGS = {
    "mnist": Setting("MNIST", memory=89_600, pec=pec_core.SETTINGS["mnist"]),
    "cifar10": Setting("CIFAR-10", memory=11.2e6, pec=pec_core.SETTINGS["cifar10"], svd=False),
}

SINGLE = {(device, name): 2.0 for device in ("cpu", "cuda") for name in SETTINGS}
MEASURES = {
    "draw": Measure("drawing the teacher", "s"),
    "features": Measure("teacher's features", "images/s", over=("test",)),
    "fit": Measure("`fit`", "samples/s", over=("train",)),
    "fit_ready": Measure("`fit`, features ready", "samples/s", over=("train",)),
    "predict": Measure("`predict`", "images/s", over=("test",)),
    "whole_first": Measure("whole run, first in the process", "s", over=("train", "test")),
    "whole": Measure(
        "whole run: `fit` and `predict`",
        "s",
        limit={("cpu", "cifar10"): 240, ("cuda", "cifar10"): 3},
        over=("train", "test"),
    ),
    "accuracy": Measure("test accuracy", "%", over=("train",)),
    "memory_whole": Measure(
        "peak memory", "MiB", limit={("cpu", "cifar10"): 4 * 1024}, over=("train",)
    ),
    "single": Measure("`partial_fit` of a single sample", "ms", limit=SINGLE),
    "single_worst": Measure("the same, worst", "ms"),
    "single_images": Measure("`partial_fit` of a single image", "ms"),
    "pair": Measure("`partial_fit`, `predict` in turn, a pair", "ms"),
    "pair_worst": Measure("the same, worst", "ms"),
}


# --- measuring ------------------------------------------------------------------------------


def measure_whitened(setting: Setting, name: str, device: str) -> Figures:
    """Time whitened PEC on the images as they are, then on streams of single samples."""
    data = read_data(name)
    part = part_of(data, setting.fit, setting.score)
    figures, model = whole_run(
        lambda: pecil.WhitenedPEC(memory=setting.memory, device=device), part, device
    )
    figures |= scored(model, part.test_x, part.test_y, len(part.x))  # the factor is made by now
    figures["draw"] = (drawn(setting, part, device)[1], 1)
    figures["features"] = (rate(partial(features, model), part.test_x), len(part.test_x))
    ready = features(model, part.test_x)
    plain = pecil.WhitenedPEC(teacher="identity", device=device)
    figures["fit_ready"] = (rate(plain.fit, ready, part.test_y), len(ready))

    def made(teacher: str) -> Any:
        return pecil.WhitenedPEC(teacher=teacher, dim=DIM, device=device)

    index = by_class(data.train_y, setting.stream)
    x, y = data.train_x[index], data.train_y[index]
    flat, test = x.reshape(len(x), -1), data.test_x.reshape(len(data.test_x), -1)
    figures |= streamed(partial(made, "relu"), flat, y, test)
    images = steps(partial(made, "auto"), x, y)
    figures["single_images"] = (float(images.mean()), len(images))
    return figures


def measure_pec(setting: Setting, name: str, device: str) -> Figures:
    """Time PEC; what it has not time for is extrapolated from its rates."""
    data, pec = read_data(name), setting.pec
    part = part_of(data, pec.fit, pec.score)
    options = {**pec.widths, "lr": pec.lr, "mean": data.mean, "std": data.std, "device": device}
    figures, model = whole_run(lambda: pecil.PEC(**options), part, device)
    figures |= scored(model, part.test_x, part.test_y, len(part.x))
    if not part.complete:
        seconds = len(data.train_x) / figures["fit"][0] + len(data.test_x) / figures["predict"][0]
        figures["whole"] = (seconds, len(part.x) + len(part.test_x))
    index = by_class(data.train_y, pec.stream)
    x, y = data.train_x[index], data.train_y[index]
    return figures | streamed(
        lambda: pecil.PEC(**options, expected_samples=len(x)), x, y, data.test_x
    )


def measure_lda(setting: Setting, name: str, device: str, **options: Any) -> Figures:
    """Time scikit-learn, which knows the CPU only, on the same features."""
    if device != "cpu" or (options["solver"] == "svd" and not setting.svd):
        return {}
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    part = part_of(read_data(name), setting.fit, setting.score)
    n, m = len(part.x), len(part.test_x)
    memory = PeakMemory("cpu")
    model, draw_s = drawn(setting, part, device)
    x, features_s = timed(lambda: features(model, part.x).cpu().numpy())
    lda = LinearDiscriminantAnalysis(**options)
    _, fit_s = timed(lda.fit, x, part.y)
    test_x, test_features_s = timed(lambda: features(model, part.test_x).cpu().numpy())
    predicted, predict_s = timed(lda.predict, test_x)
    figures: Figures = {
        "draw": (draw_s, 1),
        "features": (m / test_features_s, m),
        "fit": (n / (draw_s + features_s + fit_s), n),
        "fit_ready": (n / fit_s, n),
        "predict": (m / (test_features_s + predict_s), m),
        "whole": (draw_s + features_s + fit_s + test_features_s + predict_s, n + m),
        "accuracy": (100 * float(np.mean(predicted == part.test_y)), n),
    }
    if (peak := memory.mebibytes()) is not None:
        figures["memory_whole"] = (peak, n)
    return figures


def drawn(setting: Setting, part: Part, device: str) -> tuple[Any, float]:
    """Return a model that has little more than its teacher, and the seconds that took."""
    model = pecil.WhitenedPEC(memory=setting.memory, device=device)
    return timed(model.fit, part.x[:1], part.y[:1])


def features(model: Any, x: Array) -> Tensor:
    """Return what the teacher of a fitted model makes of images, (n, D)."""
    raw = model._checked(x)
    result = torch.empty(len(raw), model.dim_, device=model.device_)
    for start in range(0, len(raw), CHUNK):
        some = slice(start, start + CHUNK)
        result[some] = model._features(raw, some)
    return result


def scored(model: Any, x: Array, y: Array, learned: int) -> Figures:
    """Return rate and accuracy of a model that has learned so many samples."""
    predicted, seconds = timed(model.predict, x)
    accuracy = 100 * float(np.mean(predicted == y))
    return {"predict": (len(x) / seconds, len(x)), "accuracy": (accuracy, learned)}


def streamed(make: Callable[[], Any], x: Array, y: Array, test: Array) -> Figures:
    """Time updates by single samples; then, with a new model, updates and predictions in turn."""
    single, pair = steps(make, x, y), steps(make, x, y, test)
    return {
        "single": (float(single.mean()), len(single)),
        "single_worst": (float(single.max()), len(single)),
        "pair": (float(pair.mean()), len(pair)),
        "pair_worst": (float(pair.max()), len(pair)),
    }


def steps(make: Callable[[], Any], x: Array, y: Array, test: Array | None = None) -> Array:
    """Return the milliseconds of each step of a stream: an update and, given images, a prediction.

    One sample of each class comes before the clock starts.
    """
    model = make()

    def step(i: int, test: Array | None) -> None:
        model.partial_fit(x[i : i + 1], y[i : i + 1])
        if test is not None:
            model.predict(test[i : i + 1])

    first = by_class(y, len(np.unique(y)))
    for i in first:
        step(i, None)
    rest = np.setdiff1d(np.arange(len(x)), first)
    return np.array([1000 * timed(step, i, test)[1] for i in rest])


# --- the table ------------------------------------------------------------------------------

HEAD = f"""# Speed of whitened PEC

Written by `python benchmarks/whitened.py`; the figures are kept in `results/speed/whitened.jsonl`.

`pecil.WhitenedPEC` with as many numbers as the paper's model holds (89,600 on MNIST, 11.2 million
on CIFAR-10), next to `pecil.PEC` with the paper's settings, and to scikit-learn's
`LinearDiscriminantAnalysis` of the same teacher's features, by `solver="lsqr",
shrinkage="auto"` and by `solver="svd"`. All are measured in the same run, each in a process of its
own, in float32; with `--rounds`, in turn, and the best of each counts.

- In brackets: how many times as fast WhitenedPEC is, or how many times as little it takes.
- [n] marks what was measured on n samples instead of all; a whole run so marked is extrapolated
  from the rates. An accuracy so marked comes from n training samples only.
- Everything starts from raw images and counts the drawing of the teacher and its features;
  only "features ready" does not. Drawing alone is timed for WhitenedPEC when the process has
  drawn a teacher before, for the others when it has not.
- Whole run: the complete training set, then the complete test set. WhitenedPEC's first `predict`
  also factorises the covariance; the rate of `predict` is that of a second call.
- Peak memory: on a CPU the growth of resident memory in the whole run, beside the raw images;
  on a GPU all that is allocated there.
- Single samples come class after class, after one of each class, one call each. WhitenedPEC
  has D = {DIM:,} then, and the teacher "relu" of the pixels; a "single image" goes through the
  teacher for images instead. PEC is as in the paper. A pair is one update, one prediction.
- On a GPU rates are those of a second run in the same process; the first also starts CUDA
  and compiles. scikit-learn runs on the CPU alone.
"""
COLUMNS = ("", "WhitenedPEC", "PEC", "LDA, lsqr", "LDA, svd", "target")
SIDES: dict[str, Callable[..., Figures]] = {
    "whitened": measure_whitened,
    "pec": measure_pec,
    "lda_lsqr": partial(measure_lda, solver="lsqr", shrinkage="auto"),
    "lda_svd": partial(measure_lda, solver="svd"),
}


def line(row: Row) -> tuple[str, ...]:
    """Return the cells of one row of the table."""
    measure, where = MEASURES[row["measure"]], (row["device"], row["setting"])
    title = f"{SETTINGS[row['setting']].title}, {measure.title}, {measure.unit}"
    target = measure.target(where, row["whitened"])
    return (title, *(cell(row, measure, side) for side in SIDES), target)


def cell(row: Row, measure: Measure, side: str) -> str:
    """Return one side's value, what it was measured on if not on all, and how it compares."""
    value, ours, samples = row[side], row["whitened"], row[f"{side}_samples"]
    if value is None:
        return ""
    parts = [number(value)]
    info = DATASETS[row["setting"]]
    full = {"train": info.n_train, "test": info.n_test}
    if measure.over and samples < sum(full[part] for part in measure.over):
        parts.append(f"[{samples:,}]")
    if side != "whitened" and row["measure"] not in ("accuracy", "draw", "features"):
        parts.append(f"({number(measure.times_better(ours, value))}×)")
    return " ".join(parts)


BENCHMARK = Benchmark(
    name="whitened",
    page="speed-whitened.md",
    head=HEAD,
    columns=COLUMNS,
    line=line,
    measures=MEASURES,
    settings=SETTINGS,
    sides=SIDES,
    ours="whitened",
)

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
