"""What the tests of methods with a buffer share: easy data, and lists of what a learner does."""

import numpy as np
import torch

from pecil.data import load, stream
from pecil.methods import Method


def described(learner_class, revisits=False):
    """Return an entry of the registry for a method with a buffer."""
    name = learner_class.__name__
    return Method(
        name,
        name,
        "A work",
        "An idea.",
        learner_class,
        options=("buffer", "lr"),
        buffer=True,
        by_task=True,
        revisits=revisits,
    )


def accuracy_on_digits(learner, split, passes=1):
    """Learn the digits and return the share of test samples named right."""
    digits = load("digits")
    for task in stream(digits, split, seed=1, epochs=passes, batch_size=2000):
        labels, counts = np.unique(task.y, return_counts=True)
        given = dict(zip(labels.tolist(), counts.tolist(), strict=True))
        learner.begin_task(given, passes=[len(rows) for rows in task.passes])
        for x, y in task.batches():  # whole passes
            learner.learn(x, y)
        learner.end_task()
    return float((learner.scores(digits.test_x).argmax(axis=1) == digits.test_y).mean())


def batches(*sizes, labels=(0, 1, 2), shape=(4,), seed=0):
    """Return batches of random samples; the first number of each is its own."""
    n = sum(sizes)
    random = np.random.default_rng(seed)
    x = torch.from_numpy(random.normal(size=(n, *shape)).astype(np.float32))
    y = torch.tensor(labels)[torch.arange(n) % len(labels)]
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def taught(learner, *tasks, n=12, shape=(6,), seed=0):
    """Teach random samples of tasks, each a list of classes, as whole passes."""
    random = np.random.default_rng(seed)
    for classes in tasks:
        x = random.random((n * len(classes), *shape), np.float32)
        y = np.arange(len(x)) % len(classes) + classes[0]
        learner.begin_task({label: n for label in classes})
        learner.learn(x, y)
        learner.end_task()
    return learner


def watched_draws(learner):
    """Return a list to which every draw from the buffer is added."""
    drawn, draw = [], learner.buffer.draw
    learner.buffer.draw = lambda n: drawn.append(draw(n)) or drawn[-1]
    return drawn


def watched_passes(learner):
    """Return a list to which the inputs of every forward pass are added."""
    passes = []
    learner.network.register_forward_hook(lambda _, given, logits: passes.append(given[0]))
    return passes


def watched_steps(learner):
    """Return a list to which the labels of every batch that is stepped on are added."""
    batches, step = [], learner.step
    learner.step = lambda raw, labels: (batches.append(labels.tolist()), step(raw, labels))
    return batches
