"""What the tests share: one thread, repeatable examples, small models, easy data."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import settings

from pecil import PEC

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=25, database=None
)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Networks this small gain nothing from threads, and lose on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def small():
    """Return a function that makes a small model, with the changes asked for."""
    usual = {"student_width": 4, "teacher_width": 50, "output_dim": 6, "lr": 0.01, "device": "cpu"}
    return lambda **changes: PEC(**usual | changes)


@pytest.fixture(scope="session")
def clusters():
    """Return a function that makes samples around one centre for each label, in mixed order.

    The centres depend on shape and label count alone, so that another seed gives other
    samples of the same classes.
    """

    def make(labels=("a", "b", "c"), n=20, shape=(5,), seed=0):
        centres = np.random.default_rng(1).normal(scale=3, size=(len(labels), *shape))
        rng = np.random.default_rng(seed)
        which = rng.permutation(np.arange(n * len(labels)) % len(labels))
        x = centres[which] + rng.normal(scale=0.3, size=(len(which), *shape))
        return x.astype(np.float32), [labels[k] for k in which]

    return make


@pytest.fixture(scope="session")
def state():
    """Return a function that gives, for each label, a digest of all that was learned of it."""

    def digest(model, label):
        slot, seen = model._slots[label], model.samples_seen_[label]
        text = hashlib.sha256(repr((seen, model._recent[slot].tolist())).encode())
        for pair in model._pairs:
            text.update(str(pair.students.steps[slot]).encode())
            for part in pair.students.parts:
                text.update(part[slot].numpy().tobytes())
        return text.hexdigest()[:16]

    return lambda model: {label: digest(model, label) for label in model.samples_seen_}
