"""LwF: its loss by hand, and old outputs that stay in place."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods import FineTuning, Method
from pecil.methods.lwf import LwF

METHOD = Method("lwf", "LwF", "Li and Hoiem (2018)", "Held.", LwF, (), by_task=True)
learner_of = partial(LwF, device="cpu")


def data(n=30, shape=(5,), classes=(0, 1), seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(n, *shape)).astype(np.float32), random.choice(classes, n)


def begun(learner, y):
    learner.begin_task({label: int((y == label).sum()) for label in np.unique(y).tolist()})
    return learner


def taught(learner, x, y):
    begun(learner, y).learn(x, y)
    learner.end_task()
    return learner


@pytest.mark.parametrize("labels_trick", [False, True])
def test_it_conforms(labels_trick):
    check_learner(METHOD, lr=0.01, alpha=1.0, labels_trick=labels_trick)


@pytest.mark.parametrize("labels_trick", [False, True])
def test_the_loss_is_what_it_is_by_hand(labels_trick):
    learner = learner_of(6, (5,), alpha=3.0, temperature=4.0, labels_trick=labels_trick, lr=0.02)
    taught(learner, *data(classes=(0, 2)))
    former = learner.scores(data(classes=(1, 3), seed=1)[0])[:, [0, 2]]
    begun(learner, np.array([1, 3])).learn(*data(classes=(1, 3), seed=1))
    x, y = map(torch.from_numpy, data(classes=(1, 3), seed=1))
    logits = learner.network(x)
    if labels_trick:
        plain = F.cross_entropy(logits[:, [1, 3]], (y == 3).long())
    else:
        plain = F.cross_entropy(logits, y)
    wanted = (torch.from_numpy(former) / 4).softmax(1)
    distance = -(wanted * (logits[:, [0, 2]] / 4).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(learner.loss(x, y), plain + 3 * distance)


def test_the_copy_is_in_evaluation_mode_and_stays():
    x, y = data(8, (16, 16, 3))
    learner = learner_of(4, (16, 16, 3), width=2, batch_size=4)
    taught(learner, x, y)
    state = {name: value.clone() for name, value in learner.former.state_dict().items()}
    begun(learner, np.array([2, 3])).learn(*data(8, (16, 16, 3), classes=(2, 3)))
    assert not learner.former.training and learner.network.training
    for name, value in learner.former.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_it_begins_as_fine_tuning():
    """In the first task, and in the second if the first had one class."""
    plain, lwf = FineTuning(4, (5,), device="cpu"), learner_of(4, (5,), alpha=100.0)
    for classes in ((0,), (1, 2), (3,)):
        for learner in (plain, lwf):
            taught(learner, *data(classes=classes))
        x = data(100)[0]
        alike = np.allclose(plain.scores(x), lwf.scores(x), atol=1e-4)
        assert alike is (classes != (3,))


@pytest.mark.parametrize("labels_trick", [False, True])
def test_old_outputs_stay_in_place_if_alpha_is_large(labels_trick):
    first, second = data(1000), data(1000, classes=(2, 3), seed=1)
    settings = {"hidden": (20,), "lr": 0.01, "schedule": "linear", "labels_trick": labels_trick}
    moved = []
    for alpha in (0.0, 1000.0):
        learner = taught(learner_of(4, (5,), alpha=alpha, **settings), *first)
        before = torch.from_numpy(learner.scores(second[0])[:, :2]).softmax(1)
        taught(learner, *second)
        after = torch.from_numpy(learner.scores(second[0])[:, :2]).softmax(1)
        moved.append((before - after).abs().mean())
    assert moved[1] < 0.25 * moved[0]


def test_a_class_that_comes_again_is_not_old():
    learner = taught(learner_of(4, (5,)), *data(classes=(0, 1, 2)))
    assert begun(learner, np.array([1, 3])).old.tolist() == [0, 2]
    assert begun(learner, np.array([0, 1, 2])).old.tolist() == []
    learner.learn(*data(classes=(0, 1, 2)))
    assert np.isfinite(learner.scores(data()[0])[:, :3]).all()


def test_digits():
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    learner = learner_of(10, (64,), alpha=5.0, labels_trick=True, lr=0.003)
    for task in range(5):
        rows = np.random.default_rng(0).permutation(np.flatnonzero(y // 2 == task))
        taught(learner, x[rows], y[rows])
    assert (learner.scores(x).argmax(1) == y).mean() > 0.35  # 0.2 is the last task alone
