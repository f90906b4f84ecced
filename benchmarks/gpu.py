"""The kernels for GPUs, each next to its floor, and runs that share a GPU.

python benchmarks/gpu.py measures on a GPU, keeps the figures in results/speed/gpu.jsonl and writes
benchmarks/gpu.md; --table only writes the page anew. --runs takes METHOD/DATASET, to be run alone
and with ten seeds at once, --no-kernels these runs alone; --save-results keeps the results of the
latter.

A floor by arithmetic is what the kernel's multiplications and additions take at the rate that
the library reaches with large matrices on the same GPU; a floor by bytes is what it must read and
write at the rate of a large copy.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

import precision
from common import ROOT, Row, describe, keep, kept, number
from pecil.bench import experiment, planned, run
from pecil.bench.store import append_line
from pecil.engines.local import shared_gpus
from pecil.methods.networks import network_for
from pecil.methods.recording import Chance, Recorder
from pecil.pec import lockstep, networks
from pecil.pec.networks import Architecture
from pecil.pec.teacher import Teacher

RESULTS = ROOT / "results" / "speed" / "gpu.jsonl"
PAGE = ROOT / "benchmarks" / "gpu.md"
TEACHERS = {
    "CIFAR-10": Architecture("conv", (3, 32, 32), 6000, 743, pool=5, activation="relu"),
    "CIFAR-100": Architecture("conv", (3, 32, 32), 4000, 172, pool=4, activation="relu"),
    "miniImageNet": Architecture("conv", (3, 84, 84), 4000, 172, pool=4, activation="relu"),
}
IMAGES, STUDENTS, SIDE, TOGETHER = 256, 10, 8192, 10
PEC = [f"pec/{name}" for name in ("mnist", "balanced_svhn", "cifar10", "cifar100", "miniimagenet")]
TRAINED = ["finetuning/cifar10", "er_ace/cifar10", "der/balanced_svhn"]
PASSES = 10  # over the weights: two to use them, one to write gradients, seven of Adam
WEIGHTS, MACS = 11_173_962, 555_422_720  # of ResNet18, the latter for a picture of 32×32
WAYS: dict[str, dict[str, Any]] = {  # of a step of ten pictures
    "as it is: convolutions in TF32": {},
    "algorithms chosen by trying them": {"tried": True},
    "bfloat16": {"bfloat16": True},
    "compiled": {"compiled": True},
    "compiled, bfloat16": {"compiled": True, "bfloat16": True},
}
COLUMN = 240  # seconds of ten seeds of PEC on all five
LIMITS = {"pec/mnist": 0.4, "pec/cifar10": 2.5, "pec/cifar100": 2.0}  # seconds a run, ten at once


def timed(call: Callable[[], Any], times: int = 10) -> float:
    """Return the milliseconds of a call, after one to warm up."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times * 1e3


def rates() -> dict[str, float]:
    """Return what the GPU does at most: TFLOPS in float32 and TF32, GB/s of a copy."""
    a = torch.randn(SIDE, SIDE, device="cuda")
    found, before = {}, torch.backends.cuda.matmul.allow_tf32
    for name, coarse in (("float32", False), ("tf32", True)):
        torch.backends.cuda.matmul.allow_tf32 = coarse
        found[name] = 2 * SIDE**3 / timed(lambda: a @ a) / 1e9
    torch.backends.cuda.matmul.allow_tf32 = before
    big = torch.empty(2**28, device="cuda")
    found["bytes"] = 2 * big.nbytes / timed(lambda: big.clone()) / 1e6
    return found


def pooled(name: str, arch: Architecture, most: dict[str, float]) -> Row:
    """Measure the pooled convolution of a teacher, by the kernel and by the library."""
    teacher = Teacher(arch, "kaiming", 0, torch.device("cuda"))
    x = torch.randn(IMAGES, *arch.input_shape, device="cuda")
    patches = networks.centred(arch, x)
    out = torch.empty(IMAGES, arch.pool**2, arch.width, device="cuda")
    ours = timed(lambda: teacher._pool(patches, out))
    whole = timed(lambda: teacher(x))
    with patch("pecil.pec.teacher.has_kernels", lambda device: False):
        other, expected = timed(lambda: teacher._pool(patches, out)), teacher(x)
    error = float((teacher(x) - expected).abs().max() / expected.abs().max())
    positions, numbers = patches.shape[1:]
    flops = 2 * IMAGES * positions * arch.width * (numbers + arch.pool**2)
    return {
        "kernel": f"pooled convolution, {name}, {IMAGES} pictures",
        "ms": ours,
        "library": other,
        "by_arithmetic": flops / most["float32"] / 1e9,
        "by_tf32": 3 * flops / most["tf32"] / 1e9,
        "by_bytes": (patches.nbytes + out.nbytes) / most["bytes"] / 1e6,
        "error": error,
        "whole": whole,
    }


def adam(most: dict[str, float]) -> Row:
    """Measure Adam over ten students of CIFAR-10, by the kernel and by the library."""
    from pecil.pec import kernels

    arch = Architecture("conv", (3, 32, 32), 60, 743, pool=5, activation="relu")
    parts = [torch.rand(STUDENTS, arch.row, device="cuda") for _ in range(4)]
    table = torch.rand(4, STUDENTS, device="cuda")
    results = []
    ways: tuple[Callable[..., None], ...] = kernels.adam, lockstep._adam
    for step in ways:
        copies = [part.clone() for part in parts]
        step(*copies, table, 1e-8)
        once = copies[0].clone()
        results.append((once, timed(lambda: step(*copies, table, 1e-8), 50)))  # noqa: B023
    (mine, ours), (expected, other) = results
    return {
        "kernel": "Adam, ten students of CIFAR-10",
        "ms": ours,
        "library": other,
        "by_arithmetic": 12 * parts[0].numel() / most["float32"] / 1e9,
        "by_bytes": 7 * parts[0].nbytes / most["bytes"] / 1e6,
        "error": float((mine - expected).abs().max() / expected.abs().max()),
    }


def steps() -> list[Row]:
    """Measure a step of ResNet18 with small batches, launched one by one and recorded."""
    rows: list[Row] = []
    for size in (1, 10, 32):
        net = network_for((32, 32, 3), 10, generator=torch.Generator().manual_seed(0)).to("cuda")
        optimizer = torch.optim.Adam(net.parameters(), 1e-4, fused=True, capturable=True)
        x = torch.randn(size, 32, 32, 3, device="cuda").movedim(-1, 1)
        y = torch.zeros(size, dtype=torch.int64, device="cuda")

        def step(x: Tensor, y: Tensor, net: Any = net, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(net(x), y))
            optimizer.step()

        recorder = Recorder(Chance(torch.device("cuda")))
        recorder("step", step, x, y)
        launched = timed(lambda: step(x, y), 50)  # noqa: B023
        played = timed(lambda: recorder("step", step, x, y), 50)  # noqa: B023
        rows.append({"step": f"ResNet18, batch of {size}", "launched": launched, "played": played})
    return rows


def ways() -> Iterator[Row]:
    """Measure a recorded step of ten pictures in other ways, alone and three networks at once."""
    for name, options in WAYS.items():
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=options.get("tried", False), allow_tf32=True
        ):
            how = {name: value for name, value in options.items() if name != "tried"}
            graphs = [_recorded(seed, **how) for seed in range(3)]
        row: Row = {"way": name}
        for n, key in ((1, "alone"), (3, "three")):
            streams = [torch.cuda.Stream() for _ in range(n)]
            row[key] = timed(partial(_play, graphs, streams), 60) / n
        yield row


def _play(graphs: Iterable[tuple[torch.cuda.CUDAGraph, Any]], streams: Iterable[Any]) -> None:
    for stream, (graph, _) in zip(streams, graphs, strict=False):
        with torch.cuda.stream(stream):
            graph.replay()


def _recorded(
    seed: int, *, bfloat16: bool = False, compiled: bool = False
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record a step; return it, and what it needs to stay alive."""
    net = network_for((32, 32, 3), 10, generator=torch.Generator().manual_seed(seed)).to("cuda")
    answer = torch.compile(net) if compiled else net
    optimizer = torch.optim.Adam(net.parameters(), 1e-4, fused=True, capturable=True)
    x = torch.randn(10, 32, 32, 3, device="cuda").movedim(-1, 1)
    y = torch.randint(10, (10,), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16):
            loss = F.cross_entropy(answer(x).float(), y)
        torch.autograd.backward(loss)
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, (step, x, y, net, optimizer)


def together(name: str, save_to: Path | None) -> Row:
    """Run METHOD/DATASET, alone and ten seeds at once, in processes that are warm; s a run."""
    row: Row = {"run": name}
    for n in (1, TOGETHER):
        context = get_context("spawn")
        barrier, queue = context.Barrier(n), context.Queue()
        with shared_gpus():
            workers = [
                context.Process(target=_work, args=(name, seed, n, barrier, queue))
                for seed in range(1, n + 1)
            ]
            for worker in workers:
                worker.start()
            found = [queue.get(timeout=600) for _ in workers]
            for worker in workers:
                worker.join()
        starts, stops, results = zip(*found, strict=True)
        row["alone" if n == 1 else "together"] = (max(stops) - min(starts)) / n
    row["accuracy"] = sum(result.accuracy for result in results) / n
    if save_to is not None:
        for result in results:
            append_line(save_to, result)
    return row


def _work(name: str, seed: int, n: int, barrier: Any, queue: Any) -> None:
    """Run one seed when all others do, with the data at hand; tell when, and what came out."""
    torch.set_num_threads(1)
    run(planned("pec", "digits"))  # wakes the GPU
    method, dataset = name.split("/")
    experiment._load(dataset)
    barrier.wait()
    start = time.time()
    result = run(planned(method, dataset, seed=seed), sharing=n if n > 1 else None)
    queue.put((start, time.time(), result))


def page(rows: list[Row]) -> str:
    """Return the newest figures as a page."""
    newest: dict[str, Row] = {}
    for row in (r for r in rows if "tried" not in r):
        newest[title(row)] = row
    most = newest.get("rates", {})
    text = [INTRODUCTION]
    if most:
        text += [
            f"{most['machine']}: {most['float32']:.0f} TFLOPS with large matrices in float32, "
            f"{most['tf32']:.0f} in TF32, {most['bytes']:,.0f} GB/s of a large copy.\n"
        ]
    text += [
        "| kernel | ms | floor: float32 | floor: TF32, three products | floor: bytes | library, ms "
        "| share of the float32 rate | largest relative difference |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in (r for r in newest.values() if "kernel" in r):
        tf32 = f"{row['by_tf32']:.3f}" if "by_tf32" in row else ""
        error = f"{row['error']:.0e}" if "error" in row else ""
        text += [
            f"| {row['kernel']} | {row['ms']:.3f} | {row['by_arithmetic']:.3f} | {tf32} | "
            f"{row['by_bytes']:.3f} | {row['library']:.3f} | "
            f"{row['by_arithmetic'] / row['ms']:.0%} | {error} |"
        ]
    text += [
        "\n| step | floor: TF32, ms | floor: bytes of weights | launched one by one | recorded |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in (r for r in newest.values() if "step" in r and most):
        pictures = int(row["step"].split()[-1])
        by_tf32 = 3 * 2 * MACS * pictures / most["tf32"] / 1e9
        by_bytes = PASSES * 4 * WEIGHTS / most["bytes"] / 1e6
        text += [
            f"| {row['step']} | {by_tf32:.2f} | {by_bytes:.2f} | {row['launched']:.2f} | "
            f"{row['played']:.2f} |"
        ]
    text += ["\n| run | alone, s | ten at once, s a run | target | accuracy |"]
    text += ["|---|---:|---:|---|---:|"]
    for row in (r for r in newest.values() if "run" in r):
        limit = LIMITS.get(row["run"])
        met = "met" if limit and row["together"] <= limit else "missed"
        target = f"≤ {limit} s {met}" if limit else ""
        text += [
            f"| {row['run']} | {row['alone']:.2f} | {row['together']:.2f} | {target} | "
            f"{100 * row['accuracy']:.2f} |"
        ]
    column = [newest[name]["together"] for name in PEC if name in newest]
    if len(column) == len(PEC):
        spent = TOGETHER * sum(column)
        met = "met" if spent <= COLUMN else "missed"
        text += [f"\nPEC on all five, ten seeds of each: {spent:.0f} s (≤ {COLUMN} s {met})."]
    tried = [
        f"| {row['tried']} | {row['positions']} × {row['channels']}, {row['warps']} | "
        f"{row['ms']:.2f} | {row['error']:.0e} |\n"
        for row in sorted((r for r in rows if "tried" in r), key=lambda row: row["ms"])
    ]
    others = [
        f"| {row['way']} | {row['alone']:.2f} | {row['three']:.2f} |\n"
        for row in newest.values()
        if "way" in row
    ]
    return "".join(
        ["\n".join(text), "\n", TRIED, *tried, OTHERS, *others, PRECISION, precision.table(), "\n"]
    )


INTRODUCTION = """# Kernels for GPUs

Written by `python benchmarks/gpu.py`; the figures are kept in `results/speed/gpu.jsonl`.

The pooled convolution (`pecil.pec.kernels.pool`) makes, rectifies and pools a teacher's map without
ever writing it: the library writes 6,000 × 32 × 32 numbers a picture of CIFAR-10 and reads them
again. Instance normalisation needs no pass of its own: the deviation of a channel follows from the
covariance of the patches, and scales the pooled map. Adam (`pecil.pec.kernels.adam`) reads and
writes each number once. The steps of other methods are recorded as CUDA graphs
(`pecil.methods.recording`), and several runs share a GPU through NVIDIA's multi-process service
(`pecil.engines.local`).
"""
TRIED = """
## What was tried

256 pictures of CIFAR-10; milliseconds of the pooled convolution, the best number of stages of each.
One product in TF32 is faster, but a model trained on a GPU would then see its teacher differ by a
thousandth on a CPU.

| products | positions × channels of a block, warps | ms | largest relative difference |
|---|---|---:|---:|
"""
OTHERS = """
A step of ResNet18 with ten pictures is 262 kernels, 1.61 ms one after the other: convolutions
1.06, batch norm 0.26, Adam 0.12, the rest elementwise. Several networks at once fill the gaps.
Milliseconds a step, recorded, of one network and of three in streams of one process:

| way | alone | three at once, each |
|---|---:|---:|
"""
PRECISION = """
## TF32

Convolutions of the methods that train ResNet18 round their factors to TF32, as PyTorch has it by
default; all other products are in float32. Accuracy in percent on 2,000 test images of CIFAR-10
after joint training, both ways with the same seeds, by `python benchmarks/precision.py`:

"""


def main() -> None:
    """Measure, keep the figures, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="*", default=PEC + TRAINED, metavar="METHOD/DATASET")
    parser.add_argument("--no-kernels", action="store_true", help="measure runs alone")
    parser.add_argument("--save-results", type=Path, metavar="FILE")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.table:
        common = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "machine": describe("cuda")}
        kernels = iter(()) if options.no_kernels else measured()
        runs = (together(name, options.save_results) for name in options.runs)
        for row in chain(kernels, runs):
            print(title(row), number_of(row), flush=True)
            keep(RESULTS, [common | row])
    PAGE.write_text(page(kept(RESULTS)), encoding="utf-8")


def measured() -> Iterator[Row]:
    """Measure one kernel and one step after the other."""
    most = rates()
    yield dict(most)
    for name, arch in TEACHERS.items():
        yield pooled(name, arch, most)
    yield adam(most)
    yield from steps()
    yield from ways()
    torch.cuda.empty_cache()


def title(row: Row) -> str:
    """Return what a row is about."""
    return str(next((row[k] for k in ("kernel", "step", "way", "run") if k in row), "rates"))


def number_of(row: Row) -> str:
    """Return a row's figures as text."""
    return ", ".join(f"{k} {number(v)}" for k, v in row.items() if isinstance(v, float))


if __name__ == "__main__":
    main()
