"""An experiment (a method, a stream, a seed) and the result of running it."""

import functools
import hashlib
import inspect
import json
import platform
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import pecil
from pecil.data import DATASETS, Dataset, Stream, Task, load, stream
from pecil.data.registry import digest
from pecil.methods import METHODS, Learner, Method, check_settings
from pecil.methods.learner import Array
from pecil.pec.machine import one_thread

Progress = Callable[[int, int], object]
INSTEAD = {  # settings of which one does the work of the other
    "memory": "dim",
    "dim": "memory",
    "budget": "output_dim",
    "output_dim": "budget",
}
BUFFER = 500  # samples that a method which replays may keep, unless told otherwise
CONFUSED = 100  # classes up to which a confusion matrix is kept
MIB = 2**20


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
    epochs: int = 1
    """Passes over the samples of a task."""
    buffer: int = 0
    """Samples that the method may keep to replay them."""
    validation: bool = False
    """Test on a tenth of the training part, held out; the test part stays unseen."""
    steps: int = 0
    """Steps per task, each on a whole batch: as many passes as they take. 0: see `epochs`."""
    random_classes: bool = False
    """Does the seed decide the order of the classes, too? Else they come sorted."""
    data: str = ""
    """What the data at a path was when this was planned: a digest of it."""

    @property
    def key(self) -> str:
        """A hash that stays the same between machines and versions of Python.

        Fields that came later count only where they differ from what was the rule before.
        """
        described = {name: getattr(self, name) for name in FIELDS}
        for name, usual in LATER.items():
            if described[name] == usual:
                del described[name]
        canonical = json.dumps(described, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def kind(self) -> str:
        """The key without the seed: what the runs of one cell have in common."""
        return replace(self, seed=0).key


FIELDS = tuple(field.name for field in fields(Experiment))
LATER = {field.name: field.default for field in fields(Experiment)[5:]}
"""The fields after the settings, and what was the rule before they came."""


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
    accuracy_per_class_after_task: list[dict[str, float]] | None = None
    """Of the classes seen so far, after every task; None, like the next two, unless asked for."""
    average_anytime_accuracy: float | None = None
    """The mean of `accuracy_after_task`."""
    forgetting: float | None = None
    """The best accuracy of a class after an earlier task less the one in the end: the mean over
    the classes that came before the last task. None if there is but one task."""
    confusion: list[list[int]] | None = None
    """Test samples by label (rows) and prediction (columns), both sorted; None for more than
    100 classes."""
    peak_memory: float | None = None
    """In MiB, to fit and test: allocated on the GPU, or by how much the process grew."""
    buffer_size: int | None = None
    """Samples kept in the end."""
    macs: int | None = None
    """Multiply-accumulate operations to score one sample more, in products of matrices and
    convolutions; None if there are none."""
    sharing: int | None = None
    """Runs that shared the GPU meanwhile, this one among them; None if it had its device alone."""

    @property
    def device_seconds(self) -> float:
        """All seconds together; of a GPU that it shared, its share."""
        return sum(self.seconds.values()) / (self.sharing or 1)

    def row(self) -> dict[str, Any]:
        """Return the result as one flat record, ready for JSON."""
        described = {name: getattr(self.experiment, name) for name in FIELDS}
        found = {name: getattr(self, name) for name in FOUND}
        return {"key": self.experiment.key, **described, **found}

    @classmethod
    def from_row(cls, row: Any) -> "Result":
        """Read a record that `row` wrote; ValueError says what is wrong with it."""
        if not isinstance(row, dict):
            raise ValueError(f"expected a JSON object, got {type(row).__name__}")
        row = OLD | row
        missing = [name for name in ("key", *FIELDS, *FOUND) if name not in row]
        if missing:
            raise ValueError(f"the record lacks {', '.join(missing)}")
        experiment = Experiment(**{name: row[name] for name in FIELDS})
        if experiment.key != row["key"]:
            raise ValueError(
                f"the key {row['key']} is not that of the experiment, {experiment.key}"
            )
        if not isinstance(row["accuracy"], float) or not 0 <= row["accuracy"] <= 1:
            raise ValueError(f"expected an accuracy from 0 to 1, got {row['accuracy']!r}")
        return cls(experiment, **{name: row[name] for name in FOUND})


FOUND = tuple(field.name for field in fields(Result) if field.name != "experiment")
OLD = LATER | {field.name: None for field in fields(Result) if field.default is None}
"""What records written before these fields were there stand for."""


def settings_for(
    method: str, dataset: str, split: str = "", passes: int = 1, setup: str = "", /, **changes: Any
) -> dict[str, Any]:
    """Return the settings chosen for a method on a dataset, some of them changed.

    They are what the dataset itself decides and what ``settings/DATASET.toml`` says; data of
    the user's own has none but the changes. A table with a split (``["er 5/2"]``) or a number
    of passes (``["joint 50ep"]``) in its name changes what stands under the method's name alone.
    With the labels trick a method has settings of its own (``[ewc_lt]``, ``[labels_trick]``).
    A setup other than the paper's main one has tables of its own (``[SETUP.ewc]``), in which
    ``like`` names one to begin with.
    """
    chosen: dict[str, Any] = {}
    if dataset in DATASETS:
        decided = METHODS[method].of_dataset.items()
        values = {name: getattr(DATASETS[dataset], of) for name, of in decided}
        chosen = {name: value for name, value in values.items() if value}
        file = resources.files("pecil.bench") / "settings" / f"{dataset}.toml"
        if file.is_file():
            said = _said(file.read_text(encoding="utf-8"))
            if setup and setup not in said:
                raise ValueError(f"{dataset} has no settings of a setup {setup!r}")
            said = said[setup] if setup else said
            own = f"{method}_lt" if method != "finetuning" else "labels_trick"
            called = own if changes.get("labels_trick") and own in said else method
            for name in (called, f"{called} {split}", f"{called} {passes}ep"):
                chosen |= _table(said, name)
    for name in changes:
        chosen.pop(INSTEAD.get(name, ""), None)
    return chosen | changes


_said = functools.lru_cache(maxsize=32)(tomllib.loads)


def _table(said: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table of settings, on top of the one that it is like."""
    own = dict(said.get(name, {}))
    like = own.pop("like", None)
    return own if like is None else _table(said, like) | own


def planned(
    method: str,
    dataset: str,
    split: str | None = None,
    seed: int = 0,
    *,
    epochs: int = 1,
    buffer: int = 0,
    validation: bool = False,
    steps: int = 0,
    random_classes: bool = False,
    setup: str = "",
    **changes: Any,
) -> Experiment:
    """Describe an experiment with the dataset's own settings, some of them changed.

    Parameters
    ----------
    method : str
        A name in `pecil.methods.METHODS`.
    dataset : str
        A name in `pecil.data.DATASETS`, or a path.
    split : str, optional
        Tasks / classes per task; if not given one class at a time, or all for joint training.
    seed : int
        Decides the order of the stream and the method's own random numbers.
    epochs : int
        Passes over the samples of a task.
    buffer : int
        Samples that the method may keep to replay them; 0: 500 if it keeps any.
    validation : bool
        Test on a tenth of the training part, held out, instead of the test part.
    steps : int
        Steps per task, each on a whole batch, instead of passes.
    random_classes : bool
        Whether the seed decides the order of the classes, too; else they come sorted.
    setup : str
        Whose settings, if not the paper's main ones: a name in the dataset's file of settings.
    **changes
        Settings other than those of `settings_for`.
    """
    if method not in METHODS:
        raise ValueError(f"expected a method out of {', '.join(METHODS)}, got {method!r}")
    check_settings(method, changes, METHODS[method].settings)
    _check_kinds(method, changes)
    for name, given, least in (("epochs", epochs, 1), ("buffer", buffer, 0), ("steps", steps, 0)):
        if type(given) is not int or given < least:
            raise ValueError(f"{name}: expected a whole number of at least {least}, got {given!r}")
    keeps = METHODS[method].buffer or changes.get("balancing") == "buffer"
    if keeps and buffer == 0:
        buffer = BUFFER
    if buffer and not keeps:
        raise ValueError(f"{method} keeps no samples: expected a buffer of 0, got {buffer}")
    if split is None:
        split = "joint" if METHODS[method].joint else f"{_n_classes(dataset)}/1"
    settings = settings_for(method, dataset, split, epochs, setup, **changes)
    settings = {name: _plain(value) for name, value in settings.items()}
    if steps and (epochs > 1 or "batch_size" not in settings):
        raise ValueError(
            "steps: expected a batch_size and 1 epoch, got "
            f"{settings.get('batch_size', 'no batch_size')} and {epochs}"
        )
    return Experiment(
        method,
        dataset,
        split,
        seed,
        settings,
        epochs=epochs,
        buffer=buffer,
        validation=validation,
        steps=steps,
        random_classes=random_classes,
        data=digest(dataset),
    )


def _check_kinds(method: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting is not of the type that the method's learner tells."""
    kinds: dict[str, Any] = {}
    for owner in reversed(getattr(METHODS[method].learner, "__mro__", ())):
        parameters = inspect.signature(owner.__init__).parameters
        kinds |= {name: parameter.annotation for name, parameter in parameters.items()}
    for name, value in settings.items():
        if not _is_a(kinds.get(name, Any), value):
            expected = inspect.formatannotation(kinds[name]).removeprefix("collections.abc.")
            raise ValueError(f"{method}: {name} must be of type {expected}, but it is {value!r}")


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it, whole numbers as int: equal settings give one key."""
    if isinstance(value, list | tuple):
        return type(value)(_plain(part) for part in value)
    if isinstance(value, np.generic):
        value = value.item()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_a(kind: Any, value: Any) -> bool:
    """Tell whether a value is of a type, as far as an annotation tells."""
    if isinstance(kind, UnionType):
        return any(_is_a(one, value) for one in get_args(kind))
    if get_origin(kind) is Sequence:
        own = isinstance(value, list | tuple)
        return own and all(_is_a(one, part) for one in get_args(kind) for part in value)
    meant = {int: Integral, float: Real, Any: object, inspect.Parameter.empty: object}
    return not isinstance(kind, type) or isinstance(value, meant.get(kind, kind))


def run(
    experiment: Experiment,
    *,
    device: str = "auto",
    per_task: bool = False,
    progress: Progress | None = None,
    sharing: int | None = None,
) -> Result:
    """Carry out an experiment.

    A method to which portions do not matter gets the whole stream at once, unless steps are
    counted: the model is the same, and it can take its fastest path.

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
    sharing : int, optional
        Runs that share the GPU, this one among them, for the record.

    Returns
    -------
    Result
    """
    method = METHODS[experiment.method]
    seconds: dict[str, float] = {}
    with _timed(seconds, "load"):
        version = digest(experiment.dataset)
        if experiment.data not in ("", version):
            raise ValueError(f"{experiment.dataset} has changed since the experiment was planned")
        data = _loaded(experiment.dataset, version)
        if experiment.validation:
            data = held_out(data, experiment.seed)
    if data.test_x is None or data.test_y is None:
        raise ValueError(
            f"{experiment.dataset} has no test part to measure an accuracy on: expected folders "
            "train/ and test/ of images; or train_x, train_y, test_x and test_y in an .npz"
        )
    classes, codes = np.unique(data.train_y, return_inverse=True)
    tasks = _tasks(experiment, replace(data, train_y=codes), whole=not per_task)
    if per_task:
        _check_first(classes[list(tasks.class_order[: tasks.classes_per_task])], data.test_y)
    with _peak_memory() as peak:
        learner = _learner(experiment, len(classes), data, device)
        exam = _Exam(learner, classes, tasks.class_order, data.test_x, data.test_y)
        for task in _in_steps(tasks, experiment):
            with _timed(seconds, "fit"):
                _teach(learner, task, method, whole=not experiment.steps)
            if per_task and task.index + 1 < len(tasks):
                with _timed(seconds, "test"):
                    exam.take((task.index + 1) * tasks.classes_per_task)
            if progress is not None:
                progress(task.index + 1, len(tasks))
        if experiment.settings.get("balancing") == "oracle":
            learner.balance(data.test_x, np.searchsorted(classes, data.test_y))
        with _timed(seconds, "test"):
            exam.take(len(classes))
    return Result(
        experiment,
        **exam.marks(per_task, len(classes) - tasks.classes_per_task),
        seconds={phase: round(spent, 4) for phase, spent in seconds.items()},
        n_parameters=learner.n_parameters,
        device=_described(learner.device),
        versions=_versions(),
        data_note=data.note,
        peak_memory=peak(learner.device),
        buffer_size=learner.n_buffered if experiment.buffer else 0,
        macs=_macs(learner, data.test_x),
        sharing=sharing,
    )


def _check_first(labels: Array, test_y: Array) -> None:
    """Raise ValueError if there is nothing to test on after the first task."""
    if not np.isin(test_y, labels).any():
        raise ValueError(
            "testing after every task needs test samples of the classes of the first one, "
            f"{', '.join(map(str, labels))}, got none"
        )


def _tasks(experiment: Experiment, data: Dataset, *, whole: bool) -> Stream:
    """Make the stream; in one task if the method does not mind and the results may."""
    method = METHODS[experiment.method]
    batch_size = experiment.settings.get("batch_size", 1)
    if method.independent or method.by_task:
        batch_size = len(data.train_y)
    tasks = stream(
        data,
        experiment.split,
        seed=experiment.seed,
        epochs=experiment.epochs,
        batch_size=batch_size,
        class_order="random" if experiment.random_classes else None,
    )
    if method.independent and whole and not experiment.steps and not experiment.buffer:
        tasks = replace(tasks, classes_per_task=len(tasks.class_order))
    return tasks


def _in_steps(tasks: Stream, experiment: Experiment) -> Iterator[Task]:
    """Yield the tasks; if steps are counted, with as many passes of whole batches as they take."""
    if not experiment.steps:
        yield from tasks
        return
    size = experiment.settings["batch_size"]
    smallest = min(len(task.passes[0]) for task in tasks)
    if smallest < size:
        raise ValueError(f"expected a whole batch of {size} in each task, got {smallest} samples")
    for task in replace(tasks, epochs=-(-experiment.steps // (smallest // size))):
        passes, left = [], experiment.steps
        for rows in task.passes:
            batches = min(left, len(rows) // size)
            passes.append(rows[: batches * size])
            left -= batches
        yield replace(task, passes=tuple(rows for rows in passes if len(rows)))


def _learner(experiment: Experiment, n_classes: int, data: Dataset, device: str) -> Any:
    """Make the learner as the experiment describes it."""
    method, settings = METHODS[experiment.method], dict(experiment.settings)
    if not method.independent and not method.by_task:
        settings.pop("batch_size", None)  # the stream's
    if experiment.buffer:
        settings["buffer"] = experiment.buffer
    try:
        return method.learner(
            n_classes,
            data.train_x.shape[1:],
            mean=data.mean,
            std=data.std,
            seed=experiment.seed,
            device=device,
            **settings,
        )
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"{experiment.method} cannot be made with the settings {settings}: {error}"
        ) from error


def held_out(data: Dataset, seed: int) -> Dataset:
    """Return the training part alone, a random tenth of each class as its test part.

    A sample that is there twice is not trained on if its twin is held out.

    >>> from pecil.data import load
    >>> digits = held_out(load("digits"), seed=0)
    >>> len(digits.train_x), len(digits.test_x)
    (1302, 140)
    """
    random = np.random.default_rng(seed)
    tenth = np.zeros(len(data.train_y), dtype=bool)
    for label in np.unique(data.train_y):
        rows = np.flatnonzero(data.train_y == label)
        tenth[random.permutation(rows)[: len(rows) // 10]] = True
    if not tenth.any():
        raise ValueError(f"{data.name}: expected a class with 10 samples or more to hold some out")
    known = set(_contents(data, tenth))
    train = np.flatnonzero(~tenth)[[one not in known for one in _contents(data, ~tenth)]]
    return replace(
        data,
        train_x=data.train_x[train],
        train_y=data.train_y[train],
        test_x=data.train_x[tenth],
        test_y=data.train_y[tenth],
        train_files=None,
        test_files=None,
    )


def _contents(data: Dataset, rows: Array) -> Iterator[tuple[Any, bytes]]:
    for label, x in zip(data.train_y[rows].tolist(), data.train_x[rows], strict=True):
        yield label, x.tobytes()


class _Exam:
    """Tests a learner, again and again, and keeps its marks."""

    def __init__(
        self, learner: Learner, classes: Array, order: Sequence[int], x: Array, y: Array
    ) -> None:
        self.learner, self.classes, self.x, self.y = learner, classes, x, y
        self.coming = classes[list(order)]
        self.labels = np.unique(y)
        self.per_class: list[dict[str, float]] = []
        self.accuracies: list[float] = []
        self.predicted = y[:0]

    def take(self, n_classes: int) -> None:
        """Test on the samples of the first classes; on all samples if these are all classes."""
        x, y, labels = self.x, self.y, self.labels
        if n_classes < len(self.classes):
            come = self.coming[:n_classes]
            known = np.isin(y, come)
            x, y, labels = x[known], y[known], np.intersect1d(labels, come)
        self.predicted = self.classes[self.learner.scores(x).argmax(axis=1)]
        right = self.predicted == y
        self.accuracies.append(float(right.mean()))
        self.per_class.append({str(c): float(right[y == c].mean()) for c in labels})

    def marks(self, per_task: bool, n_earlier: int) -> dict[str, Any]:
        """Return the fields of a result that tell how good the learner is."""
        marks: dict[str, Any] = {
            "accuracy": self.accuracies[-1],
            "accuracy_per_class": self.per_class[-1],
            "accuracy_after_task": self.accuracies if per_task else [],
            "confusion": self._confusion(),
        }
        if per_task:
            marks["accuracy_per_class_after_task"] = self.per_class
            marks["average_anytime_accuracy"] = float(np.mean(self.accuracies))
            marks["forgetting"] = self._forgetting(n_earlier)
        return marks

    def _confusion(self) -> list[list[int]] | None:
        """Count the last test's samples by label and prediction."""
        every = np.union1d(self.classes, self.labels)
        n = len(every)
        if n > CONFUSED:
            return None
        cells = np.searchsorted(every, self.y) * n + np.searchsorted(every, self.predicted)
        counts: list[list[int]] = np.bincount(cells, minlength=n * n).reshape(n, n).tolist()
        return counts

    def _forgetting(self, n_earlier: int) -> float | None:
        """Compare the best accuracies of the first classes with the last ones."""
        *before, last = self.per_class
        earlier = [c for c in map(str, self.coming[:n_earlier]) if c in last]
        if not before or not earlier:
            return None
        lost = [max(marks[c] for marks in before if c in marks) - last[c] for c in earlier]
        return float(np.mean(lost))


def _teach(learner: Any, task: Task, method: Method, *, whole: bool) -> None:
    """Present a task, batch by batch, or as a whole to a method that does not mind."""
    labels, counts = np.unique(task.y, return_counts=True)
    learner.begin_task(
        dict(zip(labels.tolist(), counts.tolist(), strict=True)),
        passes=[len(rows) for rows in task.passes],
    )
    if method.again and len(task.passes) > 1:
        learner.learn(*task.once())
    else:
        for x, y in [(task.x, task.y)] if method.independent and whole else task.batches():
            learner.learn(x, y)
    learner.end_task()


def _load(dataset: str) -> Dataset:
    return _loaded(dataset, digest(dataset))


@functools.lru_cache(maxsize=1)
def _loaded(dataset: str, version: str) -> Dataset:
    """Load a dataset once for many seeds, as long as it stays as it is."""
    return load(dataset)


def shape_of(dataset: str) -> tuple[int, ...]:
    """Return the shape of one sample: (features,), (height, width) or (height, width, channels)."""
    if dataset in DATASETS:
        return tuple(DATASETS[dataset].shape)
    return tuple(_load(dataset).train_x.shape[1:])


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


@contextmanager
def _peak_memory() -> Iterator[Callable[[torch.device], float | None]]:
    """Yield a function that tells, for a device, the most MiB that a block took."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = _resident("VmRSS", anew=True)
    most: float | None = None

    def peak(device: torch.device) -> float | None:
        if device.type == "cuda":
            return round(torch.cuda.max_memory_allocated(device) / MIB, 1)
        return most

    yield peak
    after = _resident("VmHWM")
    if before is not None and after is not None:
        most = round(max(0.0, after - before), 1)


def _resident(gauge: str, *, anew: bool = False) -> float | None:
    """Read a gauge of this process's memory, in MiB; let the highest mark be taken anew first.

    None on a system other than Linux.
    """
    try:
        if anew:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{gauge}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) / 1024 if found else None


def _macs(learner: Learner, x: Array) -> int | None:
    """Return what the learner says, or count what one sample more costs: products, convolutions.

    The samples are without zeros: a method may pass over inputs that are zero in all of them.
    """
    if hasattr(learner, "macs"):
        return learner.macs
    counts = []
    for n in (1, 1, 2):  # the first one may have more to do
        with one_thread(), _Counter() as counter:  # type: ignore[no-untyped-call]
            learner.scores(np.ones((n, *x.shape[1:]), dtype=x.dtype))
        counts.append(counter.flops)
    return (counts[2] - counts[1]) // 2 or None


class _Counter(TorchDispatchMode):
    """Counts this thread's multiplications and additions, two to a multiply-accumulate operation.

    PyTorch's own FlopCounterMode does the same, but first imports the compiler, which takes
    longer than many a run.
    """

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func.overloadpacket):
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        elif str(func.overloadpacket) == "mkldnn._linear_pointwise":
            self.flops += 2 * args[0].numel() * len(args[1])
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


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
