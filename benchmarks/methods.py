"""Steps per second of the methods that train a network, next to a plain loop: the floor.

python benchmarks/methods.py [--device cuda] [--names er lwf] measures, keeps the figures in
results/speed/methods.jsonl and writes docs/speed-methods.md; --smoke takes few steps and keeps
nothing, --table only writes the page anew.

The floor does only what must be done: forward, backward and a fused Adam step of the same network
on batches of the same size that lie ready, on as many samples as the method's own forward passes
have. On a GPU, where our steps are recorded and played, there is a second floor: the same loop,
recorded, too. A method is timed in its second task, when there is something to replay and to
preserve.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common import ROOT, Array, Row, describe, keep, kept, number
from pecil.methods import METHODS
from pecil.methods.networks import network_for
from pecil.methods.recording import Chance, Recorder

RESULTS = ROOT / "results" / "speed" / "methods.jsonl"
PAGE = ROOT / "docs" / "speed-methods.md"
SHAPES = {"cpu": (28, 28), "cuda": (32, 32, 3)}  # the perceptron here, ResNet18 there
BATCH, BUFFER, CLASSES = 10, 500, 10
CHEAP = ("finetuning", "labels_trick", "er", "derpp", "er_ace")  # at most 1.3 times the floor
STEPS = {"cpu": 400, "cuda": 200}
ROUNDS = {"cpu": 9, "cuda": 3}
PASSES = {"finetuning": (1,), "labels_trick": (1,), "er": (2,), "er_ace": (1, 1), "derpp": (1, 1)}
"""Samples of each forward pass of a step, as multiples of the batch; (1,) if not named."""


def samples(n: int, shape: tuple[int, ...], labels: tuple[int, int]) -> tuple[Array, Array]:
    """Return random pictures of two classes."""
    rng = np.random.default_rng(labels[0])
    return rng.integers(0, 256, (n, *shape), np.uint8), rng.choice(labels, n)


def floor(steps: int, device: str, passes: tuple[int, ...], recorded: bool = False) -> float:
    """Return the seconds of a step of a plain loop, or of one that is recorded and played."""
    shape = SHAPES[device]
    net = network_for(shape, CLASSES, generator=torch.Generator().manual_seed(0)).to(device)
    adam = torch.optim.Adam(net.parameters(), lr=1e-4, fused=True, capturable=recorded)
    batches = []
    for times in passes:
        x, y = samples(BATCH * times, shape, (0, 1))
        raw = torch.from_numpy(x).to(device).float() / 255
        inputs = raw.movedim(-1, 1).contiguous() if len(shape) == 3 else raw.flatten(1)
        batches.append((inputs, torch.from_numpy(y).to(device)))

    def step() -> None:
        adam.zero_grad()
        losses: list[Tensor] = [F.cross_entropy(net(x), y) for x, y in batches]
        torch.autograd.backward(losses)
        adam.step()

    def run() -> None:
        for _ in range(steps):
            if recorded:
                recorder("floor", step)
            else:
                step()

    recorder = Recorder(Chance(torch.device(device)))
    if recorded:
        recorder("floor", step)
    return timed(run, device) / steps


def measured(name: str, steps: int, device: str) -> float:
    """Return the seconds of a step of a method in its second task."""
    method = METHODS["finetuning" if name == "labels_trick" else name]
    settings: dict[str, Any] = {"lr": 1e-4, "batch_size": BATCH, "device": device}
    settings |= {"buffer": BUFFER} if method.buffer else {}
    settings |= {"labels_trick": True} if name == "labels_trick" else {}
    learner = method.learner(CLASSES, SHAPES[device], **settings)
    first = BATCH * (steps // 4)  # in these a GPU's steps are recorded
    for labels in ((0, 1), (2, 3)):
        x, y = samples(first + BATCH * steps, SHAPES[device], labels)
        learner.begin_task({label: int((y == label).sum()) for label in labels})
        learner.learn(x[:first], y[:first])
        if labels == (0, 1):
            learner.end_task()
    return timed(lambda: learner.learn(x[first:], y[first:]), device) / steps


def timed(run: Callable[[], None], device: str) -> float:
    """Return the seconds that a call takes, all that it started included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(name: str, steps: int, device: str) -> Row:
    """Measure a method and its floors in turn, several times; the best of each counts."""
    passes = PASSES.get(name, (1,))
    floor(steps // 10, device, passes)  # warm up
    times = [
        (
            floor(steps, device, passes),
            floor(steps, device, passes, recorded=True) if device == "cuda" else 0.0,
            measured(name, steps, device),
        )
        for _ in range(ROUNDS[device])
    ]
    least, played, ours = (min(values) for values in zip(*times, strict=True))
    row: Row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "machine": describe(device)}
    row |= {"device": device, "method": name, "load": os.getloadavg()[0], "steps": steps}
    row |= {"floor_recorded": 1 / played} if played else {}
    return row | {"floor": 1 / least, "rate": 1 / ours}


def page(rows: list[Row]) -> str:
    """Return the newest figures of each method and device as a page."""
    newest = {(row["device"], row["method"]): row for row in rows}
    text = [
        "# Speed of the methods that train a network\n",
        "Written by `python benchmarks/methods.py`: steps per second with batches of "
        f"{BATCH}, in a second task, next to a plain loop of forward, backward and Adam on as many "
        "samples (the floor), each the best of several in turn. On a GPU our steps are recorded "
        "once and played again, and so is, for comparison, the second floor. To reach where a step "
        "does no more than the floor: within 1.3 times its time.",
    ]
    for device, net in (("cpu", "the perceptron of MNIST"), ("cuda", "ResNet18")):
        mine = [row for (of, _), row in newest.items() if of == device]
        if not mine:
            continue
        text += [f"\n## {device.upper()}, {net}: {mine[-1]['machine']}\n"]
        text += ["| method | steps/s | floor | floor, recorded | times the floor's time | target |"]
        text += ["|---|---:|---:|---:|---:|---|"]
        for row in mine:
            times = row["floor"] / row["rate"]
            met = "met" if times <= 1.3 else "missed"
            target = f"≤ 1.3 {met}" if row["method"] in CHEAP else ""
            text += [
                f"| {row['method']} | {number(row['rate'])} | {number(row['floor'])} | "
                f"{number(row['floor_recorded']) if 'floor_recorded' in row else ''} | "
                f"{times:.2f} | {target} |"
            ]
    return "\n".join(text) + "\n"


def main() -> None:
    """Measure, keep the figures, write the page."""
    known = ["labels_trick", *(name for name, m in METHODS.items() if m.by_task and not m.joint)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", nargs="+", choices=known, default=known)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--smoke", action="store_true", help="few steps; print, keep nothing")
    mode.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    rows = []
    for name in () if options.table else options.names:
        rows.append(compare(name, 20 if options.smoke else STEPS[options.device], options.device))
        print(json.dumps(rows[-1]), flush=True)
        if not options.smoke:
            keep(RESULTS, rows[-1:])
    if options.smoke:
        print(page(rows))
        return
    PAGE.write_text(page(kept(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    main()
