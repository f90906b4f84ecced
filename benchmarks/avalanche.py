"""Our methods next to those of an independent implementation, avalanche-lib, on MNIST.

    python benchmarks/avalanche.py --peer-python ENV/bin/python   measure; keep; write the page
    python benchmarks/avalanche.py --peer-python … --names er lwf --seeds 3 4
    python benchmarks/avalanche.py --peer-python … --smoke        few samples; nothing kept
    python benchmarks/avalanche.py --table                        write docs/avalanche.md anew

avalanche-lib lives in an environment of its own:

    python -m venv ENV
    ENV/bin/pip install torch==2.13.0
    ENV/bin/pip install --no-deps avalanche-lib==0.6.0 torchvision==0.28.0
    ENV/bin/pip install dill gdown gputil matplotlib packaging psutil pytorchcv
    ENV/bin/pip install qpsolvers scikit-learn tensorboard torchmetrics tqdm wandb

with the same torch as here. It imports torchvision, of which no build for the CPU need be had:
--no-deps keeps pip from replacing torch, and avalanche_peer.py, which does the runs there, makes
up for the part of torchvision that does not load then.

Both sides get the same samples in the same order, the same initial weights, and run in turn on
one thread. Runs are appended to results/speed/avalanche.jsonl.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import ROOT, Array, Row, describe, keep, kept, number
from pecil.bench.tables import standard_error
from pecil.data import load, stream
from pecil.methods import METHODS
from pecil.methods.agem import AGEM
from pecil.methods.er_ace import ERACE
from pecil.methods.finetuning import FineTuning
from pecil.methods.icarl import ICaRL
from pecil.methods.learner import Learner

RESULTS = ROOT / "results" / "speed" / "avalanche.jsonl"
PAGE = ROOT / "docs" / "avalanche.md"
PEER = Path(__file__).with_name("avalanche_peer.py")
SHAPE, CLASSES, TASKS, PER_TASK = (28, 28), 10, 5, 2
BATCH, BUFFER = 32, 500
TRAINED = {"lr": 0.001, "batch_size": BATCH}
REPLAYING = TRAINED | {"buffer": BUFFER}
FASTER = 2  # times, at least


# --- what is compared -----------------------------------------------------------------------


class Shares:
    """A buffer like that of avalanche's A-GEM: a share for each task that has ended.

    Rows are taken from all shares alike, and of each share in turn.
    """

    def __init__(self, share: int, generator: torch.Generator) -> None:
        self.share, self.generator, self.turn = share, generator, 0
        self.task: list[dict[str, Tensor]] = []
        self.shares: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        """Rows in it now."""
        return sum(len(rows["y"]) for rows in self.shares)

    def add(self, **rows: Tensor) -> None:
        """Take note of rows of the task."""
        self.task.append(rows)

    def end_task(self) -> None:
        """Keep some of the task's rows, whichever."""
        rows = {name: torch.cat([part[name] for part in self.task]) for name in self.task[0]}
        some = torch.randperm(len(rows["y"]), generator=self.generator)[: self.share]
        self.shares.append({name: values[some] for name, values in rows.items()})
        self.task = []

    def draw(self, n: int) -> dict[str, Tensor]:
        """Return n rows, or a few less, so that all shares give as many."""
        if not self.shares:
            return {}
        each = max(1, n // len(self.shares))
        self.turn += each
        parts = [
            {name: values[(self.turn + torch.arange(each)) % len(values)] for name, values in of}
            for of in (rows.items() for rows in self.shares)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class SharingAGEM(AGEM):
    """Our A-GEM with their buffer."""

    def __init__(self, *shape: Any, buffer: int, **given: Any) -> None:
        super().__init__(*shape, buffer=buffer, **given)
        generator = torch.Generator().manual_seed(self.seed)
        self.buffer = Shares(buffer // TASKS, generator)  # type: ignore[assignment]

    def end_task(self) -> None:
        """Fill the buffer."""
        self.buffer.end_task()  # type: ignore[attr-defined]


class Balanced:
    """A buffer like that of avalanche's ER-ACE: a reservoir for each class, all of one size."""

    def __init__(self, capacity: int, generator: torch.Generator) -> None:
        self.capacity, self.generator = capacity, generator
        self.x: dict[int, Tensor] = {}
        self.rank: dict[int, Tensor] = {}
        """Random numbers; who has the highest stays."""

    def __len__(self) -> int:
        """Rows in it now."""
        return sum(map(len, self.x.values()))

    def add(self, x: Tensor, y: Tensor) -> None:
        """Offer rows; shorten all reservoirs if there is a new class."""
        for label in y.unique().tolist():
            new = x[y == label]
            rank = torch.rand(len(new), generator=self.generator)
            self.x[label] = torch.cat((new, self.x.get(label, new[:0])))
            self.rank[label] = torch.cat((rank, self.rank.get(label, rank[:0])))
        for label, rank in self.rank.items():
            best = rank.argsort(descending=True)[: self.capacity // len(self.x)]
            self.x[label], self.rank[label] = self.x[label][best], rank[best]

    def draw(self, n: int) -> dict[str, Tensor]:
        """Return n rows, drawn without replacement."""
        y = torch.cat([torch.full((len(x),), label) for label, x in self.x.items()])
        some = torch.randperm(len(y), generator=self.generator)[:n]
        return {"x": torch.cat(list(self.x.values()))[some], "y": y[some]}


class BalancedERACE(ERACE):
    """Our ER-ACE with their buffer."""

    def __init__(self, *shape: Any, buffer: int, **given: Any) -> None:
        super().__init__(*shape, buffer=buffer, **given)
        generator = torch.Generator().manual_seed(self.seed)
        self.buffer = Balanced(buffer, generator)  # type: ignore[assignment]


class DenyingICaRL(ICaRL):
    """Our iCaRL that learns, as theirs does, that samples are not of the classes to come."""

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Start anew; all outputs are trained."""
        super().begin_task(counts, passes)
        self.outputs = torch.arange(self.n_classes)


@dataclass(frozen=True)
class Pair:
    """A method on both sides."""

    title: str
    differs: str
    """What the two still do not have in common, beside chance."""
    both: dict[str, Any] = field(default_factory=dict)
    """Settings that have the same name."""
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    learner: Callable[..., Learner] | None = None
    """Ours, if it is not the method of that name."""
    peer: str | None = None
    """Theirs, likewise."""

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """All settings of each side."""
        return {"ours": self.both | self.ours, "theirs": self.both | self.theirs}


PAIRS = {
    "finetuning": Pair("fine-tuning", "nothing", TRAINED),
    "er": Pair("ER", "nothing", REPLAYING),
    "agem": Pair(
        "A-GEM",
        f"their buffer gets {BUFFER // TASKS} samples of a task when it ends, ours (a reservoir) "
        "has some of the task that is being learned; they take as many samples of each earlier "
        f"task in turn, {BATCH} or a few less together, we draw {BATCH} of all. Our steps with "
        "their buffer are in the next line of the table",
        TRAINED,
        ours={"buffer": BUFFER},
        theirs={"patterns_per_exp": BUFFER // TASKS},
    ),
    "agem_shares": Pair(
        "A-GEM with their buffer",
        "nothing",
        TRAINED,
        ours={"buffer": BUFFER},
        theirs={"patterns_per_exp": BUFFER // TASKS},
        learner=SharingAGEM,
        peer="agem",
    ),
    "ewc": Pair(
        "EWC",
        f"they square the mean slope of a batch of {BATCH} at the labels it has, about 1/{BATCH} "
        f'of the mean square, so that their λ is {BATCH} times ours; `fisher="exact"` squares '
        "the slopes of every sample and takes their mean over all ten labels, which is more work",
        TRAINED,
        ours={"lam": 100.0, "fisher": "exact"},
        theirs={"ewc_lambda": 100.0 * BATCH, "mode": "online", "decay_factor": 1.0},
    ),
    "si": Pair(
        "SI",
        "their slopes along the path are those of the loss with its penalty, those of "
        '`path="exact"` of the cross-entropy alone; they cut Ω at 0.001; their penalty has a '
        "factor ½, so that their λ is twice our c",
        TRAINED,
        ours={"c": 100.0, "xi": 1.0, "path": "exact"},
        theirs={"si_lambda": 200.0, "eps": 1.0},
    ),
    "lwf": Pair("LwF", "nothing", TRAINED | {"alpha": 1.0, "temperature": 2.0}),
    "icarl": Pair(
        "iCaRL",
        "they train the outputs of classes to come, too (so do we in the next line of the table); "
        "they round the exemplars of a class up, we (`released=False`) down; their herding may "
        "come upon a sample again, and passes over it then",
        REPLAYING,
        ours={"released": False},
    ),
    "icarl_denying": Pair(
        "iCaRL with their outputs",
        "as iCaRL, but for the outputs of classes to come, which are trained here, too",
        REPLAYING,
        ours={"released": False},
        learner=DenyingICaRL,
        peer="icarl",
    ),
    "der": Pair(
        "DER",
        "they share the buffer equally among classes and keep what the network says after the "
        "step on a sample, we before it",
        REPLAYING | {"alpha": 1.0},
        theirs={"beta": 0.0},
    ),
    "derpp": Pair("DER++", "as DER", REPLAYING | {"alpha": 0.5, "beta": 1.0}),
    "er_ace": Pair(
        "ER-ACE",
        "new samples compete with the classes of their batch alone, ours (as in the released "
        "code) with those not yet seen as well; they share the buffer equally among classes (so "
        "do we in the next line of the table), and replay in the first task, too",
        REPLAYING,
    ),
    "er_ace_balanced": Pair(
        "ER-ACE with their buffer",
        "as ER-ACE, but for the buffer",
        REPLAYING,
        learner=BalancedERACE,
        peer="er_ace",
    ),
    "slda": Pair(
        "SLDA",
        "they weight a sample's part of the covariance by n / (n + 1) with n the samples of all "
        "classes, we with those of its own",
        ours={"shrinkage": 0.1},
        theirs=TRAINED | {"shrinkage_param": 0.1},
    ),
}


# --- measuring ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What both sides are given."""

    seed: int
    tasks: list[tuple[Array, Array]]
    test_x: Array
    test_y: Array


def prepared(seed: int, n: int | None) -> Run:
    """Return MNIST as a stream of tasks, of each the first n samples, and n for the test."""
    data = load("mnist")
    tasks = [(task.x[:n], task.y[:n]) for task in stream(data, f"{TASKS}/{PER_TASK}", seed=seed)]
    assert data.test_x is not None and data.test_y is not None
    return Run(seed, tasks, data.test_x[:n], data.test_y[:n])


def ours(name: str, run: Run) -> tuple[Array, float]:
    """Return our scores of the test set, and the seconds of learning and scoring."""
    settings = PAIRS[name].settings["ours"]
    make = PAIRS[name].learner or METHODS[name].learner
    learner = make(CLASSES, SHAPE, seed=run.seed, device="cpu", **settings)
    start = time.perf_counter()
    for x, y in run.tasks:
        labels, counts = np.unique(y, return_counts=True)
        learner.begin_task(dict(zip(labels.tolist(), counts.tolist(), strict=True)))
        learner.learn(x, y)
        learner.end_task()
    scores = learner.scores(run.test_x)
    return scores, time.perf_counter() - start


def theirs(name: str, run: Run, python: str) -> tuple[Array, float, str]:
    """Return the same of avalanche, and its version."""
    settings = json.dumps(PAIRS[name].settings["theirs"])
    network = FineTuning(CLASSES, SHAPE, seed=run.seed, device="cpu").network  # as all of ours
    x, y = (np.concatenate(parts) for parts in zip(*run.tasks, strict=True))
    arrays = {key: value.numpy() for key, value in network.state_dict().items()}
    arrays |= {"x": x, "y": y.astype(np.int64), "test_x": run.test_x}
    arrays |= {"sizes": np.array([len(y) for _, y in run.tasks]), "seed": np.array(run.seed)}
    with TemporaryDirectory() as folder:
        np.savez(Path(folder) / "run.npz", **arrays)
        method = PAIRS[name].peer or name
        command = [python, "-P", str(PEER), folder, method, settings]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        told = json.loads(done.stdout.splitlines()[-1])
        return np.load(Path(folder) / "scores.npy"), told["seconds"], told["version"]


def accuracy(scores: Array, y: Array, *, task_known: bool = False) -> float:
    """Return how many percent are right, of all classes or of those of the sample's task."""
    if task_known:
        other = np.arange(CLASSES) // PER_TASK != y[:, None] // PER_TASK
        scores = np.where(other, -np.inf, scores)
    return 100 * float(np.mean(scores.argmax(axis=1) == y))


def compare(name: str, seed: int, n: int | None, python: str) -> Row:
    """Run a method on both sides in turn."""
    run, load_before = prepared(seed, n), os.getloadavg()[0]
    our_scores, our_seconds = ours(name, run)
    their_scores, their_seconds, version = theirs(name, run, python)
    row: Row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "machine": describe("cpu")}
    row |= {"load": load_before, "avalanche": version, "method": name, "seed": seed}
    row |= {"settings": PAIRS[name].settings}
    for side, scores in (("ours", our_scores), ("theirs", their_scores)):
        row[side] = accuracy(scores, run.test_y)
        row[f"{side}_task_known"] = accuracy(scores, run.test_y, task_known=True)
    return row | {"ours_s": our_seconds, "theirs_s": their_seconds}


# --- the page -------------------------------------------------------------------------------

HEAD = f"""# Side by side with avalanche-lib

Written by `python benchmarks/avalanche.py`, which also says how to make the environment that
avalanche-lib needs; the runs are kept in `results/speed/avalanche.jsonl`.

MNIST, {TASKS}/{PER_TASK}, a single pass, the perceptron 784-100-100-10, batches of {BATCH}, a
buffer of {BUFFER}, Adam (fused) with a learning rate of {TRAINED["lr"]} that stays as it is; it
starts anew with every task. Both sides have the same samples in the same order and the same initial
weights; our switches are set so that both compute the same thing as far as they can.

- Accuracy in percent, mean ± standard error (seeds): once among all ten classes and once, since
  there EWC, SI and LwF do no better than fine-tuning, between the two classes of a sample's task.
- Two accuracies agree if they are no further apart than max(1 point, 2 combined standard errors).
- Seconds are those of learning and scoring, the runs of both sides in turn on one thread, the best
  run of each; data and packages are loaded before. To reach: {FASTER} times as fast.
"""

NOTES = """
Buffers of ER, DER, DER++ and ER-ACE change with every batch. avalanche has this where each batch
is an experience of its own (`split_online_stream`): the same mathematics, but most of the time
goes into the making of datasets and loaders. Its SLDA learns sample by sample, but inverts the
covariance for every batch; it is given each task as one batch.

avalanche's SI, as released, does nothing on a CPU: what it keeps of the weights before a step
are the weights themselves, not a copy, so that nothing ever seems to move, and the result is that
of fine-tuning to the last digit (seed 0). Here it is given the copy.
"""

COLUMNS = (
    *("method", "ours", "avalanche", "", "ours, task known", "avalanche, task known", ""),
    *("ours, s", "avalanche, s", "times as fast", "target"),
)


def page(rows: list[Row]) -> str:
    """Return the newest runs of each method, with the settings it has now, as a page."""
    newest = {(row["method"], row["seed"]): row for row in rows}
    found = {
        name: mine
        for name, pair in PAIRS.items()
        if (mine := [r for (of, _), r in newest.items() if of == name and same(r, pair)])
    }
    if not found:
        return HEAD
    shown = [row for mine in found.values() for row in mine]
    last, most = max(shown, key=lambda row: row["time"]), max(row["load"] for row in shown)
    text = [HEAD, f"{last['machine']}; avalanche-lib {last['avalanche']}. Load of the machine"]
    text += [f"before the runs: up to {most:.1f}, so that seconds are to be taken with care.\n"]
    text += [f"| {' | '.join(COLUMNS)} |", f"|---{'|---:' * (len(COLUMNS) - 2)}|---|"]
    text += [f"| {' | '.join(line(name, mine))} |" for name, mine in found.items()]
    text += ["\n## What still differs\n"]
    text += [f"- {PAIRS[name].title}: {PAIRS[name].differs}." for name in found]
    return "\n".join(text) + "\n" + NOTES


def same(row: Row, pair: Pair) -> bool:
    """Say whether a run has the settings of a pair."""
    return bool(row["settings"] == pair.settings)


def line(name: str, rows: list[Row]) -> list[str]:
    """Return the cells of a method."""
    cells = [PAIRS[name].title]
    for kind in ("", "_task_known"):
        sides = [[row[side + kind] for row in rows] for side in ("ours", "theirs")]
        cells += [*map(spread, sides), "agree" if agree(*sides) else "differ"]
    seconds = [min(row[side] for row in rows) for side in ("ours_s", "theirs_s")]
    ratio = seconds[1] / seconds[0]
    cells += [*map(number, seconds), f"{ratio:.1f}"]
    return [*cells, f"≥ {FASTER} {'met' if ratio >= FASTER else 'missed'}"]


def spread(values: list[float]) -> str:
    """Return mean, standard error and count."""
    return f"{np.mean(values):.2f} ± {standard_error(values):.2f} ({len(values)})"


def agree(one: list[float], other: list[float]) -> bool:
    """Say whether two means are as near as chance and a point allow."""
    apart = abs(float(np.mean(one)) - float(np.mean(other)))
    return apart <= max(1.0, 2 * math.hypot(standard_error(one), standard_error(other)))


def main() -> None:
    """Measure, keep the runs, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="the Python of the environment with avalanche-lib")
    parser.add_argument("--names", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--smoke", action="store_true", help="few samples; print, keep nothing")
    mode.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not (options.table or options.peer_python):
        parser.error("--peer-python is needed to measure; see the top of this file")
    torch.set_num_threads(1)
    rows = []
    for seed in () if options.table else options.seeds:
        for name in options.names:
            row = compare(name, seed, 200 if options.smoke else None, options.peer_python)
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
            if not options.smoke:
                keep(RESULTS, [row])
    if options.smoke:
        print(page(rows))
    else:
        PAGE.write_text(page(kept(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    main()
