"""A dataset as a stream of tasks.

A split T/C presents the classes in T tasks of C classes each. Within a task the
samples come in random order, once per pass:

    seed, class, pass  ->  a random key for every sample of the class,

and a task's samples are sorted by their keys. So the samples of a task are uniformly
shuffled, while **the order of a class's own samples depends on the seed and the pass
alone**: not on the split, the class order, or the other classes. A method whose
classes are learned apart sees the same data in every split.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pecil.data.registry import Dataset

Label = Any


@dataclass(frozen=True, eq=False)
class Task:
    """The samples of some classes, in stream order.

    Nothing is copied before it is asked for: `x` and `y` hold the whole task at once,
    `batches` takes one batch after the other.

    Examples
    --------
    >>> from pecil.data import load, stream
    >>> first, *_ = stream(load("digits"), "10/1", batch_size=64)
    >>> first.index, first.classes, first.x.shape
    (0, (0,), (143, 8, 8))
    >>> [x.shape for x, y in first.batches()]
    [(64, 8, 8), (64, 8, 8), (15, 8, 8)]
    """

    index: int
    classes: tuple[Label, ...]
    passes: tuple[NDArray[np.intp], ...]
    """Per pass, the positions of the samples in the training set."""
    batch_size: int
    _dataset: Dataset = field(repr=False)

    @cached_property
    def x(self) -> NDArray[Any]:
        """All samples, one pass after the other."""
        return self._dataset.train_x[np.concatenate(self.passes)]

    @cached_property
    def y(self) -> NDArray[Any]:
        """All labels, one pass after the other."""
        return self._dataset.train_y[np.concatenate(self.passes)]

    def once(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.intp]]:
        """Return each sample once, the labels, and the order in which they come in all passes.

        >>> from pecil.data import load, stream
        >>> (task,) = stream(load("digits"), "joint", epochs=2)
        >>> x, y, order = task.once()
        >>> len(x), len(order), bool((x[order] == task.x).all())
        (1442, 2884, True)
        """
        rows, order = np.unique(np.concatenate(self.passes), return_inverse=True)
        return self._dataset.train_x[rows], self._dataset.train_y[rows], order

    def batches(self) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield (x, y), batch by batch; the last one of a pass may be smaller."""
        for rows in self.passes:
            for start in range(0, len(rows), self.batch_size):
                batch = rows[start : start + self.batch_size]
                yield self._dataset.train_x[batch], self._dataset.train_y[batch]


@dataclass(frozen=True, eq=False)
class Stream:
    """Tasks, one after the other; made by `stream`, can be iterated again and again.

    Examples
    --------
    >>> from pecil.data import load, stream
    >>> tasks = stream(load("digits"), "joint", epochs=2)
    >>> len(tasks), tasks.counts[0]
    (1, 286)
    """

    dataset: Dataset = field(repr=False)
    class_order: tuple[Label, ...]
    """The labels in the order in which they are presented."""
    classes_per_task: int
    seed: int
    batch_size: int
    epochs: int
    shuffle: bool
    _rows: dict[Label, NDArray[np.intp]] = field(repr=False)  # by sorted label, in file order

    @property
    def counts(self) -> dict[Label, int]:
        """Label -> samples of that class in the whole stream, all passes together."""
        return {label: len(self._rows[label]) * self.epochs for label in self.class_order}

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self.class_order) // self.classes_per_task

    def __iter__(self) -> Iterator[Task]:
        """Yield the tasks in order."""
        for index in range(len(self)):
            start = index * self.classes_per_task
            classes = self.class_order[start : start + self.classes_per_task]
            passes = tuple(self._pass(classes, epoch) for epoch in range(self.epochs))
            yield Task(index, classes, passes, self.batch_size, self.dataset)

    def _pass(self, classes: tuple[Label, ...], epoch: int) -> NDArray[np.intp]:
        """Return the positions of a task's samples in the order of one pass."""
        rows = np.concatenate([self._rows[label] for label in classes])
        if not self.shuffle:
            return np.sort(rows)
        keys = np.concatenate([self._keys(label, epoch) for label in classes])
        return rows[np.argsort(keys, kind="stable")]

    def _keys(self, label: Label, epoch: int) -> NDArray[np.float64]:
        """Return a random key for every sample of a class."""
        position = list(self._rows).index(label)
        seeds = np.random.SeedSequence(self.seed, spawn_key=(position, epoch))
        return np.random.default_rng(seeds).random(len(self._rows[label]))


def stream(
    dataset: Dataset,
    split: str = "10/1",
    *,
    seed: int = 0,
    batch_size: int = 1,
    epochs: int = 1,
    shuffle: bool = True,
    class_order: Sequence[Label] | str | None = None,
) -> Stream:
    """Turn the training part of a dataset into a stream of tasks.

    Parameters
    ----------
    dataset : Dataset
        What `load` returns.
    split : str, default "10/1"
        "T/C": T tasks of C classes, T x C being the number of classes; or "joint": all
        classes in one task.
    seed : int, default 0
        Decides the order of the samples, and of the classes if `class_order` is "random".
    batch_size : int, default 1
        Samples in a batch; the last batch of a pass keeps what is left.
    epochs : int, default 1
        Passes over a task's samples before the next task begins, each in its own order.
    shuffle : bool, default True
        False: the samples of a task come in file order.
    class_order : sequence of labels or "random", optional
        The order of the classes; sorted by default.

    Returns
    -------
    Stream
        Has a length, can be iterated, and knows its `counts` and `class_order`.

    Examples
    --------
    >>> from pecil.data import load, stream
    >>> tasks = stream(load("digits"), "2/5", seed=1, class_order=[9, 7, 5, 3, 1, 0, 2, 4, 6, 8])
    >>> len(tasks), [task.classes for task in tasks]
    (2, [(9, 7, 5, 3, 1), (0, 2, 4, 6, 8)])
    >>> tasks.counts[9]
    144
    """
    if dataset.train_y is None:
        raise ValueError(f"{dataset.name}: a stream of tasks needs labels, found none")
    labels, codes, counts = np.unique(dataset.train_y, return_inverse=True, return_counts=True)
    rows = np.split(np.argsort(codes, kind="stable"), np.cumsum(counts)[:-1])
    seed = _whole(seed, "seed", least=0)
    return Stream(
        dataset,
        class_order=_class_order(class_order, labels.tolist(), seed),
        classes_per_task=_classes_per_task(split, len(labels)),
        seed=seed,
        batch_size=_whole(batch_size, "batch_size"),
        epochs=_whole(epochs, "epochs"),
        shuffle=shuffle,
        _rows=dict(zip(labels.tolist(), rows, strict=True)),
    )


def _class_order(
    given: Sequence[Label] | str | None, labels: list[Label], seed: int
) -> tuple[Label, ...]:
    """Return the labels as given, at random, or as they are: sorted."""
    if given is None:
        return tuple(labels)
    if isinstance(given, str):
        if given != "random":
            raise ValueError(
                f"class_order: expected None, 'random' or all labels in an order, got {given!r}"
            )
        return tuple(labels[c] for c in np.random.default_rng(seed).permutation(len(labels)))
    order = tuple(np.asarray(given).tolist())
    if len(order) != len(labels) or set(order) != set(labels):
        raise ValueError(
            f"class_order: expected each of the {len(labels)} labels once, {_shown(labels)}; got "
            f"{_shown(order)}"
        )
    return order


def _classes_per_task(split: str, n_classes: int) -> int:
    """Read "T/C"; C is 1 ... n_classes and divides it."""
    if split == "joint":
        return n_classes
    found = re.fullmatch(r"(\d+)/(\d+)", split)
    if not found or int(found[1]) * int(found[2]) != n_classes:
        possible = [f"{n_classes // c}/{c}" for c in range(1, n_classes + 1) if n_classes % c == 0]
        raise ValueError(
            f"split: expected T/C with T tasks of C classes that make up the {n_classes} classes "
            f"of this dataset, got {split!r}; possible are {', '.join(possible)} and joint"
        )
    return int(found[2])


def _whole(value: int, name: str, least: int = 1) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    return int(value)


def _shown(labels: Sequence[Label], most: int = 20) -> str:
    return ", ".join(map(repr, labels[:most])) + (", ..." if len(labels) > most else "")
