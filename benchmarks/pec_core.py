"""Speed and memory of :class:`pecil.PEC` next to the plain reference, measured in one run.

    python benchmarks/pec_core.py                 the CPU, and the GPU where there is one
    python benchmarks/pec_core.py --device cuda   one of them
    python benchmarks/pec_core.py --full          CIFAR-10 whole on the CPU, too (many minutes)
    python benchmarks/pec_core.py --smoke         a few samples, to see that it works; nothing kept
    python benchmarks/pec_core.py --table-only    write docs/speed.md anew from the results kept

Every model is measured in a fresh process. Figures are appended to results/speed/pec_core.jsonl;
docs/speed.md shows the newest ones of each device.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pecil
from common import (
    Array,
    Benchmark,
    Data,
    Figures,
    Measure,
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
from pecil.pec.machine import linear
from pecil.pec.networks import Architecture
from pecil.pec.teacher import Teacher
from reference import ReferencePEC, conv, mlp

SIDE = 2048  # of the large product that others are compared with


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

MEASURES = {
    "fit": Measure("`fit`", "samples/s", ratio={("cpu", "mnist"): 30, ("cpu", "cifar10"): 8}),
    "share": Measure("share of the rate of large products that `fit` reaches", "%"),
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
        limit={("cuda", "mnist"): 1.5, ("cuda", "cifar10"): 10, ("cpu", "cifar10"): 360},
    ),
}


# --- measuring ------------------------------------------------------------------------------


def as_tensor(x: Array, data: Data, device: str) -> Tensor:
    """Return images as the networks take them: (n, c, h, w), scaled and normalised."""
    images = torch.from_numpy(x).float().div_(255)
    if data.mean is not None:
        images = (images - torch.tensor(data.mean)) / torch.tensor(data.std)
    if images.ndim == 3:
        images = images.unsqueeze(-1)
    return images.movedim(-1, 1).contiguous().to(device)


def measure_reference(setting: Setting, name: str, device: str) -> Figures:
    """Time the reference; what brings its data into shape is not counted."""
    data = read_data(name)
    index = by_class(data.train_y, setting.reference_fit)
    x, y = as_tensor(data.train_x[index], data, device), data.train_y[index].tolist()
    test = as_tensor(data.test_x[: setting.reference_score], data, device)
    counts = {label: setting.reference_fit for label in y}
    first = by_class(data.train_y[index], len(counts))  # one sample of each class
    memory = PeakMemory(device)
    model = ReferencePEC(*networks(setting, x), lr=setting.lr, counts=counts)
    model.fit(x[first], [y[i] for i in first])
    fit = rate(model.fit, x, y)
    peak = memory.mebibytes()
    model.predict(test[:1])
    predict = rate(model.predict, test)
    figures = {"fit": (fit, len(x)), "partial_fit": (fit, len(x)), "predict": (predict, len(test))}
    if peak is not None:
        figures["memory"] = (peak, len(x))
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
    """Time the estimator on the images as they are: bringing them into shape is counted."""
    data = read_data(name)
    part = part_of(data, setting.fit, setting.score)
    stream = by_class(data.train_y, setting.stream)
    singles, labels = data.train_x[stream], data.train_y[stream]
    options = {**setting.widths, "lr": setting.lr, "mean": data.mean, "std": data.std}
    del data
    figures, model = whole_run(lambda: pecil.PEC(**options, device=device), part, device)
    if device == "cpu":
        rate_of_fit, n = figures["fit"]
        figures["share"] = (100 * rate_of_fit * flops(model) / matrix_rate(), n)

    model = pecil.PEC(**options, expected_samples=len(stream), device=device)

    def learn(samples: Iterable[int]) -> None:
        for i in samples:
            model.partial_fit(singles[i : i + 1], labels[i : i + 1])

    learn(by_class(labels, len(np.unique(labels))))  # one sample of each class
    figures["partial_fit"] = (rate(learn, range(len(stream))), len(stream))
    return figures


def flops(model: pecil.PEC) -> int:
    """Return the operations of products to learn a sample: the teacher's, and thrice a student's.

    Inputs that are always zero count, though the teacher of vectors leaves them out.
    """
    (pair,) = model._pairs
    assert isinstance(pair.teacher, Teacher)
    return 2 * (products(pair.teacher.architecture) + 3 * products(pair.students.architecture))


def products(architecture: Architecture) -> int:
    """Return the multiplications of one pass that are part of products of matrices."""
    positions = math.prod(architecture.input_shape[1:]) if architecture.kind == "conv" else 1
    hidden, out = (math.prod(architecture.shapes[f"{name}.weight"]) for name in ("hidden0", "out"))
    return positions * hidden + out


def matrix_rate() -> float:
    """Return the operations a second of a large product, the best of five by either library."""
    a, b = torch.rand(2, SIDE, SIDE).unbind()
    ways = torch.nn.functional.linear, linear
    return max(2 * SIDE**3 / timed(way, a, b)[1] for way in ways for _ in range(5))


# --- the table ------------------------------------------------------------------------------

HEAD = """# Speed

Written by `python benchmarks/pec_core.py`; the figures are kept in `results/speed/pec_core.jsonl`.

`pecil.PEC` next to a plain PEC (`benchmarks/reference.py`: one module, one Adam and one schedule
per class, samples one by one from a `DataLoader`, the teacher run for every sample in training
and for every image and class in scoring), both measured in the same run, each in a process of its
own, in float32. The two give the same students (`tests/pec/test_reference.py`).

- The reference is slow, so it is timed on fewer samples, after one step of each class. Its data
  are brought into shape beforehand; for `pecil`, whatever is done to the raw images counts.
- On the CPU both sides are measured two or three times in turn (`--rounds 3`) and the best of each
  counts: the machine is shared with others, and the same run can take twice as long a minute later.
  How much faster `pecil` is depends on the processor: what calls cost, and what arithmetic.
- Samples come class after class. `partial_fit` gets them one by one, one call each.
- Memory: on a CPU the growth of resident memory during `fit`, beside the data; on a GPU all that
  is allocated there, the data included.
- Whole run: the complete training set, single pass, then the complete test set. The
  reference's is extrapolated from its rates. On a GPU rates are those of a second run in the same
  process; the first one also starts CUDA and compiles.
"""
COLUMNS = ("", "reference", "pecil", "ratio", "target", "measured on (reference / pecil)")


def line(row: Row) -> tuple[str, ...]:
    """Return the cells of one row of the table."""
    measure, where = MEASURES[row["measure"]], (row["device"], row["setting"])
    theirs, ours = row["reference"], row["pecil"]
    ratio = theirs and measure.times_better(ours, theirs)
    counts = [f"{row[k]:,}" for k in ("reference_samples", "pecil_samples") if row[k]]
    return (
        f"{SETTINGS[row['setting']].title}, {measure.title}, {measure.unit}",
        number(theirs),
        number(ours),
        f"{number(ratio)}×" if ratio and measure.unit != "MiB" else "",
        measure.target(where, ours, ratio),
        f"{row['data']}, {' / '.join(counts)}",
    )


BENCHMARK = Benchmark(
    name="pec_core",
    page="speed.md",
    head=HEAD,
    columns=COLUMNS,
    line=line,
    measures=MEASURES,
    settings=SETTINGS,
    sides={"reference": measure_reference, "pecil": measure_pecil},
    ours="pecil",
)

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
