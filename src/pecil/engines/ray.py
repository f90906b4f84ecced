"""Ray: many experiments, or the training of one model, on many machines.

On a laptop Ray starts by itself; a cluster is named by its address. Results come back to this
process, which alone writes to the store. docs/cluster.md tells how to set a cluster up.
"""

import math
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.utils import check_random_state
from torch import Tensor

from pecil import PEC, WhitenedPEC
from pecil.bench.experiment import Experiment, Progress, run
from pecil.bench.store import Store
from pecil.engines import Failure, Report
from pecil.pec.base import count, grouped
from pecil.pec.inputs import check_labels, check_samples

AHEAD = 2  # experiments handed to Ray for each that can run: no worker waits for the next
SHARE = 0.25  # of a GPU, for one experiment
LOST_MACHINES = 5  # that may die under one experiment before it is given up
BLOCK = 4096  # samples of an array that travel together

Batch = dict[str, NDArray[Any]]
Model = TypeVar("Model", PEC, WhitenedPEC)
Teachers = dict[tuple[int, ...], Any]  # by the shape of their inputs


# --- many experiments -----------------------------------------------------------------------


def run_all(
    experiments: Iterable[Experiment],
    store: Store,
    *,
    workers: int | None = None,
    retries: int = 1,
    within: float | None = None,
    progress: Progress | None = None,
    address: str | None = None,
    gpus: float | None = None,
) -> Report:
    """Carry out the experiments that are not in the store yet, wherever Ray has room.

    This process writes each result to the store as soon as it arrives. An experiment whose
    worker dies is tried again, ``retries`` times, and one whose machine dies up to five times;
    one that raises is reported at once. The others go on.

    Parameters
    ----------
    experiments : iterable of Experiment
    store : Store
    workers : int, optional
        Experiments at the same time; by default as many as the cluster has cores (or shares
        of GPUs), also those that join later.
    retries : int
        How often an experiment is tried again after its worker has died.
    within : float, optional
        Seconds after which to end, dropping what is still under way.
    progress : callable, optional
        Called with the number of experiments that are over and the number in all.
    address : str, optional
        Of a cluster, say "10.0.0.1:6379"; by default ``$RAY_ADDRESS``, a cluster started on this
        machine, or else a new one. Where Ray is connected already, it stays so.
    gpus : float, optional
        Of each experiment; by default a quarter where the cluster has some, else none.

    Returns
    -------
    Report
    """
    ray = _ray()
    if workers is not None:
        count("workers", workers)
    sweep = _Sweep(experiments, store, retries)
    with _connected(ray, address):
        share = _gpus(ray, gpus, SHARE)
        task = ray.remote(num_cpus=1, num_gpus=share, max_retries=0, max_calls=0)(run)
        run_one = partial(task.remote, sharing=round(1 / share) if 0 < share < 1 else None)
        end = math.inf if within is None else time.monotonic() + within
        try:
            while (sweep.todo or sweep.running) and time.monotonic() < end:
                sweep.hand_out(run_one, workers or AHEAD * _places(ray, 1, share))
                if progress is not None:
                    progress(sweep.over, len(sweep.keys))
                left = None if math.isinf(end) else max(0.0, end - time.monotonic())
                running = list(sweep.running)
                for ref in ray.wait(running, timeout=left)[0] if running else ():
                    sweep.collect(ray, ref)
        finally:
            for ref in sweep.running:
                ray.cancel(ref, force=True)
    if progress is not None:
        progress(sweep.over, len(sweep.keys))
    return sweep.report()


class _Sweep:
    """Where each experiment of a sweep is: to be done, running, failed, or in the store."""

    def __init__(self, experiments: Iterable[Experiment], store: Store, retries: int) -> None:
        self.store, self.retries = store, retries
        self.todo = deque({experiment.key: experiment for experiment in experiments}.values())
        self.keys = [experiment.key for experiment in self.todo]
        self.running: dict[Any, Experiment] = {}
        self.failed: dict[str, Failure] = {}
        self._deaths: Counter[tuple[str, type[Exception]]] = Counter()

    @property
    def over(self) -> int:
        return len(self.keys) - len(self.todo) - len(self.running)

    def hand_out(self, run_one: Callable[[Experiment], Any], room: int) -> None:
        """Give Ray experiments until it has as many as there is room for."""
        while self.todo and len(self.running) < room:
            experiment = self.todo.popleft()
            if self.store.get(experiment.key) is None:  # another sweep may have been faster
                self.running[run_one(experiment)] = experiment

    def collect(self, ray: Any, ref: Any) -> None:
        """Put what became of an experiment in its place."""
        experiment = self.running.pop(ref)
        try:
            result = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._deaths[experiment.key, type(error)] += 1
            times = self._deaths[experiment.key, type(error)]
            if isinstance(error, ray.exceptions.RayTaskError):  # it raised, and would again
                again = False
            elif isinstance(error, ray.exceptions.NodeDiedError):
                again = times <= LOST_MACHINES
            else:
                again = times <= self.retries
            if again:
                self.todo.append(experiment)
            else:
                self.failed[experiment.key] = Failure(experiment, str(error))
        else:
            self.store.add(result)

    def report(self) -> Report:
        left = {experiment.key for experiment in (*self.todo, *self.running.values())}
        done = tuple(key for key in self.keys if key not in self.failed and key not in left)
        return Report(done, tuple(self.failed.values()))


# --- one model ------------------------------------------------------------------------------


def fit(
    estimator: Model,
    X: Any,
    y: Any = None,
    *,
    columns: tuple[str, str] = ("x", "y"),
    workers: int | None = None,
    batch_size: int = 32_768,
    cpus: float = 1,
    gpus: float | None = None,
    address: str | None = None,
) -> Model:
    """Train one model on many machines: as ``estimator.fit(X, y)`` would in one process.

    Of a :class:`~pecil.WhitenedPEC` every batch of the stream becomes a small model, and these
    are merged as they come, in the order of the stream: counts, means and scatter, and so
    predictions, are equal up to rounding. (Probabilities and the novelty threshold rest on errors
    met on the way, and differ as they do with the order of a stream.) Of a :class:`~pecil.PEC`
    the classes are shared out, and each worker trains whole classes: bit for bit the same.
    Workers and machines that die are replaced, and what they had begun is done again.

    Parameters
    ----------
    estimator : PEC or WhitenedPEC
        Its parameters count; it stays as it is.
    X : ray.data.Dataset or array-like
        A dataset with a column of samples and one of labels, streamed for WhitenedPEC, gathered
        in the memory of the cluster for PEC; or the samples themselves.
    y : array-like, optional
        The labels, unless ``X`` is a dataset.
    columns : (str, str)
        The dataset's columns: samples, labels.
    workers : int, optional
        At most so many; by default as many as the cluster has room for.
    batch_size : int
        Samples of which WhitenedPEC makes a small model of D(D + 1)/2 numbers: best a few times D.
    cpus, gpus : float
        Of each worker; by default one core, and one GPU where the cluster has some.
    address : str, optional
        As in `run_all`.

    Returns
    -------
    PEC or WhitenedPEC
        A new, fitted model.
    """
    if not isinstance(estimator, PEC | WhitenedPEC):
        raise ValueError(f"expected a PEC or a WhitenedPEC to train, got {estimator!r}")
    estimator._check_parameters()
    if getattr(estimator, "equal_budgets", None) is True:
        raise ValueError(
            "equal_budgets=True needs the sizes of all classes, which a worker does not know; "
            "give the number of updates per class"
        )
    count("batch_size", batch_size)
    if workers is not None:
        count("workers", workers)
    seeded = clone(estimator).set_params(random_state=_seed(estimator.random_state))
    ray = _ray()
    with _connected(ray, address):
        share = _gpus(ray, gpus, 1)
        crew = _Crew(ray, workers or _places(ray, cpus, share), cpus, share)
        if isinstance(X, ray.data.Dataset):
            data = _checked(seeded, X, y, columns, batch_size)
        else:
            data = _gathered(seeded, X, y, crew.size, batch_size)
        parts = _of_batches if isinstance(estimator, WhitenedPEC) else _of_classes
        with closing(parts(crew, data)) as coming:
            model = _merged(seeded, coming)
    return model.set_params(random_state=estimator.random_state)


@dataclass(frozen=True)
class _Crew:
    """The workers, and what each of them gets."""

    ray: Any
    size: int
    cpus: float
    gpus: float

    def remote(self, function: Callable[..., Any]) -> Any:
        return self.ray.remote(function).options(num_cpus=self.cpus, num_gpus=self.gpus)


@dataclass(frozen=True)
class _Data:
    """A dataset and how to read it."""

    dataset: Any
    columns: tuple[str, str]
    names: Sequence[Any] | None
    """Labels by number, where the dataset holds numbers for them."""
    estimator: Any
    """What learns it."""
    batch_size: int

    def read(self, batch: Batch) -> tuple[NDArray[Any], list[Any]]:
        """Return samples and labels of a batch."""
        x, y = (batch[name] for name in self.columns)
        labels = check_labels(y, len(x))
        return x, labels if self.names is None else [self.names[k] for k in labels]

    def reader(self) -> "_Data":
        """Return the same without the dataset, for workers."""
        return replace(self, dataset=None)


def _checked(
    estimator: Any, dataset: Any, y: Any, columns: tuple[str, str], batch_size: int
) -> _Data:
    """Check that a dataset has what is needed."""
    if y is not None:
        raise ValueError("a dataset holds its labels in a column: do not give y as well")
    known = dataset.columns() or []
    if missing := [name for name in columns if name not in known]:
        raise ValueError(
            f"the dataset has no column {missing[0]!r}; it has {', '.join(known) or 'none'}: "
            "say columns=(samples, labels)"
        )
    return _Data(dataset.select_columns(list(columns)), columns, None, estimator, batch_size)


def _gathered(estimator: Any, X: Any, y: Any, workers: int, batch_size: int) -> _Data:
    """Make a dataset of arrays, in which labels are numbers."""
    import ray.data
    from ray.data.block import BlockAccessor

    raw = check_samples(clone(estimator), X, reset=True, layout=estimator.channels)
    labels = check_labels(y, len(raw))
    number = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    codes = np.asarray([number[label] for label in labels])
    x = raw.cpu().numpy() if isinstance(raw, Tensor) else raw
    batch_size = min(batch_size, math.ceil(len(x) / workers))
    block = min(BLOCK, batch_size)
    parts = (slice(start, start + block) for start in range(0, len(x), block))
    blocks = [BlockAccessor.batch_to_block({"x": x[at], "y": codes[at]}) for at in parts]
    first = clone(estimator).set_params(channels="first")  # as the samples are now
    return _Data(ray.data.from_arrow(blocks), ("x", "y"), list(number), first, batch_size)


# --- parts of a model -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """What a model has learned, without its teacher and on no device."""

    input_shape: tuple[int, ...]
    range: str
    labels: list[Any]
    seen: list[int]
    recent: list[NDArray[np.float64]]
    values: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, model: Any) -> "_Part":
        values, tensors = model._state(optimizer=True)
        alone = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        of_inputs = model.input_shape_, model._range
        return cls(*of_inputs, model._labels, model._seen, model._recent, values, alone)

    def put_into(self, model: Any) -> Any:
        """Give it to a model without classes."""
        for label, seen, recent in zip(self.labels, self.seen, self.recent, strict=True):
            slot = model._add_class(label)
            model._seen[slot], model._recent[slot] = seen, recent
        model._set_state(self.values, self.tensors)
        model._name_classes()
        return model


Parts = Generator[_Part | str, None, None]
"""A text instead of a part says what was wrong."""


def _merged(estimator: Any, parts: Iterable[_Part | str]) -> Any:
    """Merge parts, as they come, into one model."""
    model: Any = None
    teachers: Teachers = {}
    for part in parts:
        if isinstance(part, str):
            raise ValueError(part)
        empty = clone(estimator)
        empty.input_shape_, empty.n_features_in_ = part.input_shape, math.prod(part.input_shape)
        empty._range = part.range
        _begin(empty, teachers)
        filled = part.put_into(empty)
        model = filled if model is None else model.merge(filled)
    if model is None:
        raise ValueError("expected at least one sample, but the dataset is empty")
    return model


def _begin(model: Any, teachers: Teachers) -> None:
    """Let a model start, with a teacher drawn before if there is one for its inputs."""
    if model.input_shape_ in teachers:
        model._set_up()
        model._begin(teachers[model.input_shape_])
    else:
        model._start()
        if isinstance(model, WhitenedPEC):
            teachers[model.input_shape_] = model._teacher


def _of_batches(crew: _Crew, data: _Data) -> Parts:
    """Make a part of every batch, in the order of the stream."""
    with _in_order(data.dataset):
        parts = data.dataset.map_batches(
            _Learner,
            fn_constructor_args=(data.reader(),),
            batch_size=data.batch_size,
            batch_format="numpy",
            compute=crew.ray.data.ActorPoolStrategy(min_size=1, max_size=crew.size),
            num_cpus=crew.cpus,
            num_gpus=crew.gpus,
        )
        for batch in parts.iter_batches(batch_size=None):
            yield from map(pickle.loads, batch["part"])


class _Learner:
    """Makes a part of a batch; the teacher is drawn once."""

    def __init__(self, data: _Data) -> None:
        self.data = data
        self.teachers: Teachers = {}

    def __call__(self, batch: Batch) -> dict[str, list[bytes]]:
        try:
            part: _Part | str = _Part.of(self.learned(*self.data.read(batch)))
        except ValueError as error:
            part = str(error)
        return {"part": [pickle.dumps(part)]}

    def learned(self, x: NDArray[Any], labels: list[Any]) -> Any:
        model = clone(self.data.estimator)
        raw = check_samples(model, x, reset=True, layout=model.channels)
        _begin(model, self.teachers)
        return model._take_in(raw, grouped(labels))


def _of_classes(crew: _Crew, data: _Data) -> Parts:
    """Share the classes out, in the order in which they come; make a part of each share."""
    ray, reader = crew.ray, data.reader()
    with _in_order(data.dataset):
        blocks = data.dataset.to_numpy_refs()
    counts: Counter[Any] = Counter()
    for found in ray.get([ray.remote(_counted).remote(reader, block) for block in blocks]):
        counts.update(found)
    shares = _shares(counts, crew.size)
    n = len(set(shares.values()))
    cut = ray.remote(_cut).options(num_returns=n)
    pieces = [cut.remote(reader, block, shares, n) for block in blocks]
    taught = crew.remote(_taught)
    whole = zip(*pieces, strict=True) if n > 1 else [pieces]
    for ref in [taught.remote(reader.estimator, *own) for own in whole] if n else ():
        yield ray.get(ref)


def _counted(data: _Data, block: Batch) -> Counter[Any]:
    return Counter(data.read(block)[1])


def _shares(counts: dict[Any, int], workers: int) -> dict[Any, int]:
    """Give every class the number of its share: neighbours together, shares of about one size."""
    ends, total = accumulate(counts.values()), sum(counts.values())
    middles = (end - n / 2 for n, end in zip(counts.values(), ends, strict=True))
    wanted = [int(workers * middle / total) for middle in middles]
    numbers = {share: k for k, share in enumerate(dict.fromkeys(wanted))}
    return {label: numbers[share] for label, share in zip(counts, wanted, strict=True)}


def _cut(data: _Data, block: Batch, shares: dict[Any, int], n: int) -> Any:
    """Cut a block into the samples and labels of each share."""
    x, labels = data.read(block)
    own = np.asarray([shares[label] for label in labels])
    places = [np.flatnonzero(own == share) for share in range(n)]
    pieces = [(x[at], [labels[k] for k in at]) for at in places]
    return pieces if n > 1 else pieces[0]


def _taught(estimator: Any, *pieces: tuple[NDArray[Any], list[Any]]) -> _Part | str:
    """Train whole classes."""
    x = np.concatenate([x for x, _ in pieces])
    try:
        return _Part.of(estimator.fit(x, [label for _, labels in pieces for label in labels]))
    except ValueError as error:
        return str(error)


# --- Ray ------------------------------------------------------------------------------------


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError('running on a cluster needs Ray: pip install "pecil[ray]"') from error
    return ray


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to a cluster, or start one, for the time of a block; unless that is done."""
    if ray.is_initialized():
        yield
        return
    ray.init(address=address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _in_order(dataset: Any) -> Iterator[None]:
    """Let a dataset keep its order for the time of a block."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before


def _gpus(ray: Any, wanted: float | None, usual: float) -> float:
    """Return the GPUs of a worker: those asked for, or the usual if there are any."""
    if wanted is not None:
        return wanted
    return usual if ray.cluster_resources().get("GPU") else 0


def _places(ray: Any, cpus: float, gpus: float) -> int:
    """Return how many workers the cluster has room for now."""
    there = ray.cluster_resources()
    asked = {"CPU": cpus, "GPU": gpus}
    return max(1, min(int(there.get(kind, 0) / n) for kind, n in asked.items() if n))


def _seed(random_state: Any) -> Any:
    """Return a seed that all workers can share."""
    if isinstance(random_state, Integral):
        return random_state
    return int(check_random_state(random_state).randint(2**31))
