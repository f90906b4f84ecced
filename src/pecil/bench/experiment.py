"""An experiment (a method, a stream, a seed) and the result of running it."""

import functools
import hashlib
import json
import platform
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from typing import Any

import numpy as np
import torch

import pecil
from pecil.data import DATASETS, Dataset, Task, load, stream
from pecil.methods import METHODS, Learner, check_settings
from pecil.methods.learner import Array

Progress = Callable[[int, int], object]
INSTEAD = {  # settings of which one does the work of the other
    "memory": "dim",
    "dim": "memory",
    "budget": "output_dim",
    "output_dim": "budget",
}


@dataclass(frozen=True)
class Experiment:
    """All that decides the outcome of a run.

    Examples
    --------
    >>> experiment = planned("pec", "mnist", lr=0.001)
    >>> experiment.split, experiment.settings["teacher_width"]
    ('10/1', 5000)
    >>> experiment.key == planned("pec", "mnist", lr=0.001).key
    True
    """

    method: str
    """A name in `pecil.methods.METHODS`."""
    dataset: str
    """A name in `pecil.data.DATASETS`, or a path."""
    split: str = "10/1"
    """Tasks / classes per task."""
    seed: int = 0
    """Decides the order of the stream and the method's own random numbers."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The method's parameters; those not named keep their defaults."""

    @property
    def key(self) -> str:
        """A hash that stays the same between machines and versions of Python."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Result:
    """What came out of an experiment. Accuracies are fractions of the test set."""

    experiment: Experiment
    accuracy: float
    """After the whole stream."""
    accuracy_per_class: dict[str, float]
    accuracy_after_task: list[float]
    """Over the classes seen so far; empty unless asked for."""
    seconds: dict[str, float]
    """To load, fit and test."""
    n_parameters: int
    """The numbers that the learner holds, all classes together."""
    device: str
    versions: dict[str, str]
    data_note: str = ""
    """What the copy of the data says of itself."""

    def row(self) -> dict[str, Any]:
        """Return the result as one flat record, ready for JSON."""
        row = asdict(self)
        return {"key": self.experiment.key, **row.pop("experiment"), **row}

    @classmethod
    def from_row(cls, row: Any) -> "Result":
        """Read a record that `row` wrote; ValueError says what is wrong with it."""
        if not isinstance(row, dict):
            raise ValueError(f"expected a JSON object, got {type(row).__name__}")
        described = [f.name for f in fields(Experiment)]
        found = [f.name for f in fields(cls) if f.name != "experiment"]
        missing = [name for name in ("key", *described, *found) if name not in row]
        if missing:
            raise ValueError(f"the record lacks {', '.join(missing)}")
        experiment = Experiment(**{name: row[name] for name in described})
        if experiment.key != row["key"]:
            raise ValueError(
                f"the key {row['key']} is not that of the experiment, {experiment.key}"
            )
        if not isinstance(row["accuracy"], float) or not 0 <= row["accuracy"] <= 1:
            raise ValueError(f"expected an accuracy from 0 to 1, got {row['accuracy']!r}")
        return cls(experiment, **{name: row[name] for name in found})


def settings_for(method: str, dataset: str, **changes: Any) -> dict[str, Any]:
    """Return the settings chosen for a method on a dataset, some of them changed.

    They are what the dataset itself decides and what ``settings/DATASET.toml`` says; data of
    the user's own has none but the changes.
    """
    chosen: dict[str, Any] = {}
    if dataset in DATASETS:
        decided = METHODS[method].of_dataset.items()
        values = {name: getattr(DATASETS[dataset], of) for name, of in decided}
        chosen = {name: value for name, value in values.items() if value}
        file = resources.files("pecil.bench") / "settings" / f"{dataset}.toml"
        if file.is_file():
            chosen |= tomllib.loads(file.read_text(encoding="utf-8")).get(method, {})
    for name in changes:
        chosen.pop(INSTEAD.get(name, ""), None)
    return chosen | changes


def planned(
    method: str, dataset: str, split: str | None = None, seed: int = 0, **changes: Any
) -> Experiment:
    """Describe an experiment with the dataset's own settings, some of them changed.

    Parameters
    ----------
    method : str
        A name in `pecil.methods.METHODS`.
    dataset : str
        A name in `pecil.data.DATASETS`, or a path.
    split : str, optional
        Tasks / classes per task; one class at a time if not given.
    seed : int
        Decides the order of the stream and the method's own random numbers.
    **changes
        Settings other than those of `settings_for`.
    """
    if method not in METHODS:
        raise ValueError(f"expected a method out of {', '.join(METHODS)}, got {method!r}")
    check_settings(method, changes, METHODS[method].settings)
    if split is None:
        split = f"{_n_classes(dataset)}/1"
    return Experiment(method, dataset, split, seed, settings_for(method, dataset, **changes))


def run(
    experiment: Experiment,
    *,
    device: str = "auto",
    per_task: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Carry out an experiment.

    A method to which portions do not matter gets the whole stream at once: the model
    is the same, and it can take its fastest path.

    Parameters
    ----------
    experiment : Experiment
        What to run.
    device : str
        "auto", "cpu", "cuda", ...
    per_task : bool
        Test after every task as well, over the classes seen so far.
    progress : callable, optional
        Called with the steps done and the steps in all.

    Returns
    -------
    Result
    """
    method = METHODS[experiment.method]
    seconds: dict[str, float] = {}
    with _timed(seconds, "load"):
        data = _load(experiment.dataset)
    if data.test_x is None or data.test_y is None:
        raise ValueError(f"{experiment.dataset} has no test part to measure an accuracy on")
    classes, codes = np.unique(data.train_y, return_inverse=True)
    settings = dict(experiment.settings)
    of_stream = ("epochs",) if method.independent else ("epochs", "batch_size")
    tasks = stream(
        replace(data, train_y=codes),
        experiment.split,
        seed=experiment.seed,
        **{name: settings.pop(name) for name in of_stream if name in settings},
    )
    if method.independent and not per_task:
        tasks = replace(tasks, classes_per_task=len(classes))
    learner = method.learner(
        len(classes),
        data.train_x.shape[1:],
        mean=data.mean,
        std=data.std,
        seed=experiment.seed,
        device=device,
        **settings,
    )
    after_task = []
    for task in tasks:
        with _timed(seconds, "fit"):
            _teach(learner, task, whole=method.independent)
        if per_task:
            known = np.isin(data.test_y, classes[: (task.index + 1) * tasks.classes_per_task])
            with _timed(seconds, "test"):
                right = _right(learner, classes, data.test_x[known], data.test_y[known])
            after_task.append(float(right.mean()))
        if progress is not None:
            progress(task.index + 1, len(tasks))
    with _timed(seconds, "test"):
        right = _right(learner, classes, data.test_x, data.test_y)
    return Result(
        experiment,
        accuracy=float(right.mean()),
        accuracy_per_class={
            str(label): float(right[data.test_y == label].mean())
            for label in np.unique(data.test_y)
        },
        accuracy_after_task=after_task,
        seconds={phase: round(spent, 4) for phase, spent in seconds.items()},
        n_parameters=learner.n_parameters,
        device=_described(learner.device),
        versions=_versions(),
        data_note=data.note,
    )


def _teach(learner: Learner, task: Task, *, whole: bool) -> None:
    """Present a task, batch by batch or as a whole."""
    labels, counts = np.unique(task.y, return_counts=True)
    learner.begin_task(dict(zip(labels.tolist(), counts.tolist(), strict=True)))
    for x, y in [(task.x, task.y)] if whole else task.batches():
        learner.learn(x, y)
    learner.end_task()


def _right(learner: Learner, classes: Array, x: Array, y: Array) -> Array:
    """Say of every sample whether the best score is that of its label."""
    return np.asarray(classes[learner.scores(x).argmax(axis=1)] == y)


@functools.lru_cache(maxsize=1)
def _load(dataset: str) -> Dataset:
    """Load a dataset once for many seeds."""
    return load(dataset)


def _n_classes(dataset: str) -> int:
    if dataset in DATASETS:
        return DATASETS[dataset].n_classes
    return len(np.unique(_load(dataset).train_y))


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the time a block takes, until the device is done with it, to a phase."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


def _described(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device.type}: {torch.cuda.get_device_name(device)}"
    return f"{device.type}: {platform.machine()}, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    return {
        "pecil": pecil.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
