"""Conformance: what every method of the benchmark must keep to, as checks that can be run.

A check is a function of a method, `pecil.methods.Method`, and of settings that make it small
enough for a few hundred samples. It returns nothing if all is well and raises `CheckFailed`,
which says what was expected and what came, if not. `yield_checks` chooses the checks by what the
method says it can do; `check_learner` runs them.
"""

import doctest
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

from pecil.methods import Learner, Method, Rehearser
from pecil.methods.learner import Array

CLASSES, FEATURES = 4, 64  # of the data; one class more is announced and never comes
BATCH = 10
CLOSE = 1e-3  # rounding, as a share of the largest score
GROWTH = 0.1  # of the bytes of the samples, that a model without a buffer may grow by

Check = Callable[..., None]


class CheckFailed(AssertionError):
    """A method does not keep to what all methods keep to."""


def check_learner(method: Method, **settings: Any) -> None:
    """Run all checks that apply to a method; raise at the first one that fails.

    Parameters
    ----------
    method : Method
        It need not be registered.
    **settings
        Settings of the method, to make it small.

    Raises
    ------
    CheckFailed
        Says what was expected and what came.

    Examples
    --------
    >>> from pecil.checks import check_learner
    >>> from pecil.methods import METHODS
    >>> check_learner(METHODS["nearest_mean"])
    >>> check_learner(METHODS["randumb"], dim=40)
    """
    for check in yield_checks(method):
        check(method, **settings)


def yield_checks(method: Method) -> Iterator[Check]:
    """Yield the checks that apply to a method, chosen by what it says of itself.

    Examples
    --------
    >>> from pecil.methods import METHODS
    >>> [check.__name__ for check in yield_checks(METHODS["finetuning"])][:2]
    ['inputs_stay_unchanged', 'scores_have_their_shape']
    """
    yield inputs_stay_unchanged
    yield scores_have_their_shape
    yield scoring_changes_nothing
    yield scores_do_not_depend_on_the_batch
    yield a_batch_of_one_works
    yield the_same_seed_gives_the_same_scores
    yield pickling_keeps_everything
    yield a_class_never_seen_is_never_predicted
    yield easy_data_is_learned
    yield the_docstring_has_a_reference_and_an_example
    if not method.joint:
        yield tasks_may_follow_one_another
    if method.independent:
        yield portions_do_not_matter
    yield the_buffer_stays_within_its_capacity if method.buffer else samples_are_not_kept


# ------------------------------------------------------------------------------ the checks


def inputs_stay_unchanged(method: Method, **settings: Any) -> None:
    """Check that `learn` and `scores` leave the caller's arrays as they were."""
    x, y = _easy()
    x_before, y_before = x.copy(), y.copy()
    _taught(method, settings, x, y).scores(x)
    for name, now, before in (("x", x, x_before), ("y", y, y_before)):
        _require(np.array_equal(now, before), method, f"{name} to be left as it was", "a change")


def scores_have_their_shape(method: Method, **settings: Any) -> None:
    """Check that scores have a row a sample and a column a class, and are finite where seen."""
    x, y = _easy()
    scores = _taught(method, settings, x, y).scores(x[:7])
    wanted = (7, CLASSES + 1)
    found = getattr(scores, "shape", type(scores).__name__)
    _require(found == wanted, method, f"scores of shape {wanted}", f"{found}")
    finite = bool(np.isfinite(scores[:, :CLASSES]).all())
    _require(finite, method, "finite scores of the classes seen", f"{scores[0].tolist()}")


def scoring_changes_nothing(method: Method, **settings: Any) -> None:
    """Check that a learner asked for scores goes on as one that was not."""
    x, y = _easy()
    asked, left_alone = (_begun(method, settings, x, y) for _ in range(2))
    for learner in (asked, left_alone):
        _teach(learner, x, y)
    first = asked.scores(x)
    _same(method, asked.scores(x), first, "the same scores when asked twice")
    for learner in (asked, left_alone):
        _teach(learner, x, y)
    wanted = "the same learning, whether scores were asked for or not"
    _same(method, asked.scores(x), left_alone.scores(x), wanted)


def scores_do_not_depend_on_the_batch(method: Method, **settings: Any) -> None:
    """Check that a sample's scores are the same alone, in a small batch and in a large one."""
    x, y = _easy()
    learner = _taught(method, settings, x, y)
    x = x[:30]
    whole = learner.scores(x)
    for size in (1, 7):
        parts = [learner.scores(part) for part in _portions(x, size)]
        wanted = f"the same scores in batches of {size} as in one of {len(x)}"
        _same(method, np.concatenate(parts), whole, wanted)


def a_batch_of_one_works(method: Method, **settings: Any) -> None:
    """Check that samples can be learned one at a time, from the very first."""
    x, y = _easy(5)
    known = _known(_taught(method, settings, x, y, batch=1), x)
    wanted = f"the classes 0 to {CLASSES - 1} to be known from single samples"
    _require(known == [*range(CLASSES)], method, wanted, f"{known}")


def the_same_seed_gives_the_same_scores(method: Method, **settings: Any) -> None:
    """Check that the seed decides all that is left to chance, and global generators nothing."""
    x, y = _easy()
    with _global_seeds(1):
        first = _taught(method, settings, x, y, seed=5).scores(x)
    with _global_seeds(2):
        again = _taught(method, settings, x, y, seed=5).scores(x)
    wanted = "the same scores from the same seed, whatever the global generators hold"
    _require(np.array_equal(first, again), method, wanted, _difference(first, again))


def pickling_keeps_everything(method: Method, **settings: Any) -> None:
    """Check that a pickled learner scores as before and goes on learning as it would have."""
    x, y = _easy()
    learner = _begun(method, settings, x, y)
    _teach(learner, x, y)
    copy = pickle.loads(pickle.dumps(learner))
    _same(method, copy.scores(x), learner.scores(x), "the same scores after pickling")
    for each in (learner, copy):
        _teach(each, x, y)
        each.end_task()
    wanted = "the same learning after pickling"
    _same(method, copy.scores(x), learner.scores(x), wanted)


def a_class_never_seen_is_never_predicted(method: Method, **settings: Any) -> None:
    """Check that the scores of classes that have not come are -inf."""
    x, y = _easy()
    known = y < (CLASSES if method.joint else 2)
    scores = _taught(method, settings, x[known], y[known]).scores(x)
    unseen = scores[:, y[known].max() + 1 :]
    _require(
        bool(np.isneginf(unseen).all()),
        method,
        "scores of -inf for classes never seen",
        f"{unseen.max()}",
    )


def easy_data_is_learned(method: Method, **settings: Any) -> None:
    """Check that classes far apart, in one task, are told apart much better than by chance."""
    x, y = _easy()
    scores = _taught(method, settings, x, y, passes=1 if method.independent else 5).scores(x)
    accuracy = float((scores.argmax(axis=1) == y).mean())
    least = 2 / CLASSES
    _require(accuracy > least, method, f"an accuracy above {least} on easy data", f"{accuracy}")


def the_docstring_has_a_reference_and_an_example(method: Method, **settings: Any) -> None:
    """Check that the docstring, or its module's, names a work, and that its example runs."""
    learner: Any = method.learner
    module = sys.modules.get(learner.__module__)
    own = learner.__doc__ or ""
    year = re.search(r"\b(19|20)\d\d\b", own + (getattr(module, "__doc__", None) or ""))
    _require(year is not None, method, "a docstring with a reference and its year", "none")
    names = {**vars(module)} if module else {}
    names[learner.__name__] = learner
    test = doctest.DocTestParser().get_doctest(own, names, learner.__name__, None, None)
    _require(bool(test.examples), method, "a docstring with an example", "none")
    report: list[str] = []
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    _require(not report, method, "an example that runs", "".join(report))


def tasks_may_follow_one_another(method: Method, **settings: Any) -> None:
    """Check that classes may come in tasks, and that each is known once its task is over."""
    x, y = _easy()
    learner = _made(method, settings)
    for label in range(CLASSES):
        own = y == label
        learner.begin_task({label: int(own.sum())})
        _teach(learner, x[own], y[own])
        learner.end_task()
        known = _known(learner, x)
        wanted = f"the classes 0 to {label} to be known after task {label}"
        _require(known == [*range(label + 1)], method, wanted, f"{known}")


def portions_do_not_matter(method: Method, **settings: Any) -> None:
    """Check that one batch, many, and one class after the other give the same model."""
    x, y = _easy()
    whole = _taught(method, settings, x, y, batch=len(x)).scores(x)
    parts = _taught(method, settings, x, y, batch=7).scores(x)
    _same(method, parts, whole, "the same scores from batches of 7 as from one batch")
    by_class = _made(method, settings)
    for label in range(CLASSES):
        own = y == label
        by_class.begin_task({label: int(own.sum())})
        by_class.learn(x[own], y[own])
        by_class.end_task()
    _same(method, by_class.scores(x), whole, "the same scores from one class at a time")


def samples_are_not_kept(method: Method, **settings: Any) -> None:
    """Check that a method without a buffer does not grow with the number of samples."""
    x, y = _easy(100)
    few, many = (_begun(method, settings, x, y) for _ in range(2))
    first = len(x) // 4
    _teach(few, x[:first], y[:first])
    _teach(many, x, y)
    if method.revisits:  # it holds a task until it ends
        few.end_task()
        many.end_task()
    grown = len(pickle.dumps(many)) - len(pickle.dumps(few))
    parameters, now, given = few.n_parameters, many.n_parameters, x[first:].nbytes
    wanted = f"a model without a buffer to grow by at most {GROWTH:.0%} of {given} bytes of samples"
    _require(grown <= GROWTH * given, method, wanted, f"{grown} bytes")
    _require(now == parameters, method, f"{parameters} parameters to stay so many", f"{now}")


def the_buffer_stays_within_its_capacity(method: Method, **settings: Any) -> None:
    """Check that a buffer is used, and never holds more samples than ``buffer`` says."""
    x, y = _easy()
    capacity = 13
    learner = cast(Rehearser, _made(method, settings | {"buffer": capacity}))
    most = 0
    for label in range(CLASSES):
        own = y == label
        learner.begin_task({label: int(own.sum())})
        for rows in _portions(np.flatnonzero(own), BATCH):
            learner.learn(x[rows], y[rows])
            most = max(most, learner.n_buffered)
        learner.end_task()
        most = max(most, learner.n_buffered)
    _require(0 < most <= capacity, method, f"1 to {capacity} samples in the buffer", f"{most}")


# --------------------------------------------------------------------------- what they share


def _easy(n: int = 40) -> tuple[Array, Array]:
    """Return n samples of each class, far apart, in mixed order."""
    random = np.random.default_rng(0)
    centres = 2 * random.normal(size=(CLASSES, FEATURES))
    y = random.permutation(np.arange(n * CLASSES) % CLASSES)
    return (centres[y] + random.normal(size=(len(y), FEATURES))).astype(np.float32), y


def _made(method: Method, settings: Any, seed: int = 0) -> Learner:
    return method.learner(CLASSES + 1, (FEATURES,), seed=seed, device="cpu", **settings)


def _begun(
    method: Method, settings: Any, x: Array, y: Array, *, seed: int = 0, passes: int = 2
) -> Learner:
    """Return a learner at the beginning of a task of some passes."""
    learner = _made(method, settings, seed)
    labels, counts = np.unique(y, return_counts=True)
    together = dict(zip(labels.tolist(), (passes * counts).tolist(), strict=True))
    learner.begin_task(together, passes=[len(y)] * passes)
    return learner


def _taught(
    method: Method,
    settings: Any,
    x: Array,
    y: Array,
    *,
    seed: int = 0,
    batch: int = BATCH,
    passes: int = 1,
) -> Learner:
    """Return a learner at the end of its first task."""
    learner = _begun(method, settings, x, y, seed=seed, passes=passes)
    for _ in range(passes):
        _teach(learner, x, y, batch)
    learner.end_task()
    return learner


def _teach(learner: Learner, x: Array, y: Array, batch: int = BATCH) -> None:
    for some_x, some_y in zip(_portions(x, batch), _portions(y, batch), strict=True):
        learner.learn(some_x, some_y)  # views: what is done to them is seen


def _known(learner: Learner, x: Array) -> list[int]:
    """Return the classes that may be predicted, by the scores of one sample."""
    return np.flatnonzero(~np.isneginf(learner.scores(x[:1])[0])).tolist()


def _portions(x: Array, size: int) -> list[Array]:
    return np.split(x, range(size, len(x), size))


@contextmanager
def _global_seeds(seed: int) -> Iterator[None]:
    """Set the global generators of torch and numpy for a while."""
    state = np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(state)


def _same(method: Method, found: Array, expected: Array, wanted: str) -> None:
    """Require scores to be the same but for rounding."""
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=1e-30)
    alike = found.shape == expected.shape and np.allclose(found, expected, CLOSE, CLOSE * scale)
    _require(alike, method, wanted, _difference(found, expected))


def _difference(found: Array, expected: Array) -> str:
    if found.shape != expected.shape:
        return f"shape {found.shape} instead of {expected.shape}"
    finite = np.isfinite(found) & np.isfinite(expected)
    far = np.abs(found[finite] - expected[finite]).max(initial=0.0)
    return f"a difference of up to {far:.3g}"


def _require(holds: bool, method: Method, wanted: str, came: str) -> None:
    if not holds:
        raise CheckFailed(f"{method.name}: expected {wanted}, got {came}")
