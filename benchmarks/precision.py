"""May convolutions round their factors to TF32? Accuracies with and without, seed by seed.

    python benchmarks/precision.py                  prints the table of benchmarks/gpu.md
    python benchmarks/precision.py --samples 50000 --width 64     on a GPU: as in the tables

Of all that the benchmark's networks compute on a GPU, PyTorch lets convolutions alone round their
factors to TF32, 10 bits behind the point; sums stay in float32. A GPU computes both ways itself.
On a CPU the factors of every convolution are rounded so, forward and backward. Each line of
results/validation/precision.jsonl is one seed, trained both ways on the same samples in the same
order.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn import grad

from common import ROOT, Row, describe, keep, kept
from pecil.bench.tables import with_error
from pecil.data import load, stream
from pecil.methods.joint import Joint

RESULTS = ROOT / "results" / "validation" / "precision.jsonl"
DATASET, SCORED = "cifar10", 2_000
SETTINGS: dict[str, Any] = {
    "lr": 1e-4,
    "schedule": "linear",
    "batch_size": 10,
}  # of joint training in the tables
LOST = 13  # bits of float32 that TF32 has not
convolve = F.conv2d


def rounded(x: Tensor) -> Tensor:
    """Return numbers rounded to TF32.

    >>> rounded(torch.tensor([1 + 2**-10, 1 + 2**-12])).tolist() == [1 + 2**-10, 1]
    True
    """
    bits = x.view(torch.int32)
    return ((bits + 2 ** (LOST - 1)) & -(2**LOST)).view(torch.float32)


class Rounded(torch.autograd.Function):
    """A convolution whose factors are rounded, in its gradients, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, stride: Any, padding: Any) -> Tensor:
        """Convolve what is left of the factors."""
        x, w = rounded(x), rounded(w)
        ctx.save_for_backward(x, w)
        ctx.how = stride, padding
        return convolve(x, w, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of both factors, made of rounded ones, too."""
        (x, w), g = ctx.saved_tensors, rounded(grads[0])
        to_x = grad.conv2d_input(x.shape, w, g, *ctx.how) if ctx.needs_input_grad[0] else None
        return to_x, grad.conv2d_weight(x, w.shape, g, *ctx.how), None, None


def rounding(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, *rest: Any
) -> Tensor:
    """Convolve with rounded factors; the networks here have neither biases nor groups."""
    if bias is not None or rest != ((1, 1), 1):
        raise ValueError("only convolutions without bias, dilation and groups can be rounded")
    made: Tensor = Rounded.apply(x, w, stride, padding)  # type: ignore[no-untyped-call]
    return made


def accuracy(seed: int, samples: int, width: int, device: str) -> float:
    """Train ResNet18 on so many samples, all classes together, and return its test accuracy."""
    data = load(DATASET)
    assert data.test_x is not None and data.test_y is not None
    some = np.sort(np.random.default_rng(0).permutation(len(data.train_y))[:samples])
    part = replace(data, train_x=data.train_x[some], train_y=data.train_y[some])
    (task,) = stream(part, "joint", seed=seed)
    learner = Joint(
        10,
        task.x.shape[1:],
        **SETTINGS,
        width=width,
        mean=data.mean,
        std=data.std,
        seed=seed,
        device=device,
    )
    learner.begin_task(Counter(task.y.tolist()))
    learner.learn(task.x, task.y)
    found = learner.scores(data.test_x[:SCORED]).argmax(1)
    return 100 * float((found == data.test_y[:SCORED]).mean())


def both(seed: int, samples: int, width: int, device: str) -> Row:
    """Train without rounding and with it."""
    on_gpu, flag = device == "cuda", torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    exact = accuracy(seed, samples, width, device)
    torch.backends.cudnn.allow_tf32 = True
    with patch("torch.nn.functional.conv2d", convolve if on_gpu else rounding):
        coarse = accuracy(seed, samples, width, device)
    torch.backends.cudnn.allow_tf32 = flag
    return {"seed": seed, "float32": exact, "tf32": coarse}


def table() -> str:
    """Return the mean accuracies both ways, and of the difference."""
    text = [
        "| samples | channels | machine | seeds | float32 | TF32 | difference |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    rows = kept(RESULTS)
    for kind in dict.fromkeys(map(kind_of, rows)):
        mine = [row for row in rows if kind_of(row) == kind]
        ways = [[row[way] for row in mine] for way in ("float32", "tf32")]
        change = [coarse - exact for exact, coarse in zip(*ways, strict=True)]
        samples, width, machine = kind
        text.append(
            f"| {samples:,} | {width} | {machine} | {len(mine)} | "
            f"{' | '.join(map(with_error, (*ways, change)))} |"
        )
    return "\n".join(text)


def kind_of(row: Row) -> tuple[Any, ...]:
    """Return what rows that are to be averaged share."""
    return tuple(row[k] for k in ("samples", "width", "machine"))


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """Measure what is not kept yet."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    common = {"samples": options.samples, "width": options.width, "machine": describe(device)}
    known = {(*kind_of(row), row["seed"]) for row in kept(RESULTS)}
    for seed in range(1, options.seeds + 1):
        if (*kind_of(common), seed) not in known:
            yield common | both(seed, options.samples, options.width, device)


def main() -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=5_000)
    parser.add_argument("--width", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    for row in measured(parser.parse_args()):
        print(row, flush=True)
        keep(RESULTS, [row])
    print(table())


if __name__ == "__main__":
    main()
