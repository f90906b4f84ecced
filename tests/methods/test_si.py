"""SI: the path integral on a quadratic, and the released sum beside one written out."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.nn.utils import clip_grad_value_, parameters_to_vector

from pecil.checks import check_learner
from pecil.methods import Method
from pecil.methods.si import SI

METHOD = Method("si", "SI", "Zenke et al. (2017)", "Held.", SI, (), by_task=True)
learner_of = partial(SI, device="cpu")


def data(n=30, shape=(5,), classes=(0, 1), seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(n, *shape)).astype(np.float32), random.choice(classes, n)


def taught(learner, x, y):
    learner.begin_task({label: int((y == label).sum()) for label in np.unique(y).tolist()})
    learner.learn(x, y)
    learner.end_task()
    return learner


def values(network):
    return parameters_to_vector(network.parameters()).detach()


class Quadratic(SI):
    """Has the loss ½ Σ_j a_j (θ_j - b_j)² instead of the cross-entropy."""

    def cross_entropy(self, logits, labels):
        theta = parameters_to_vector(self.network.parameters())
        self.a, self.b = torch.arange(len(theta)) % 3 + 0.5, torch.arange(len(theta)) % 5 - 2.0
        return 0.5 * (self.a * (theta - self.b) ** 2).sum()


@pytest.mark.parametrize("settings", [{}, {"labels_trick": True}, {"path": "exact"}])
def test_it_conforms(settings):
    check_learner(METHOD, lr=0.01, c=0.5, xi=0.9, **settings)


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_the_exact_path_integral_is_the_fall_of_a_quadratic(schedule):
    learner = Quadratic(
        2, (2,), hidden=(), path="exact", lr=0.002, batch_size=1, schedule=schedule, device="cpu"
    )
    start = learner.values()
    x, y = data(400, (2,))
    for task in range(2):  # in the second one a penalty is followed, but not counted
        learner.begin_task({0: 200, 1: 200})
        learner.learn(x, y)
        now = learner.values()
        before, after = (0.5 * learner.a * (at - learner.b) ** 2 for at in (start, now))
        assert (before - after).abs().max() > 0.1
        torch.testing.assert_close(learner.shares, before - after, rtol=0.01, atol=0.01)
        if task == 0:
            shares = learner.shares.clone()
            learner.end_task()
            expected = shares / ((now - start) ** 2 + learner.xi)
            torch.testing.assert_close(learner.importance, expected)
            assert torch.equal(learner.anchor, now) and not learner.shares.any()
            start = now


def test_the_penalised_path_counts_what_the_penalty_does():
    ways = []
    for path in ("exact", "penalised"):
        learner = learner_of(4, (5,), hidden=(3,), path=path, c=50.0, lr=0.02)
        taught(learner, *data(60))
        first = learner.importance.clone()
        learner.begin_task({2: 30, 3: 30})
        x, y = map(torch.from_numpy, data(20, classes=(2, 3), seed=1))
        learner.take(x[:10], y[:10])
        before = learner.values()
        slopes = 2 * 50 * first * (before - learner.anchor)
        counted = learner.shares.clone()
        learner.take(x[10:], y[10:])
        ways.append((first, slopes * (learner.values() - before), learner.shares - counted))
    (first, more, exact), (same, _, penalised) = ways
    assert torch.equal(first, same) and more.abs().max() > 1e-3
    torch.testing.assert_close(penalised, exact - more)


@pytest.mark.parametrize("labels_trick", [False, True])
def test_the_released_sum_is_what_it_is_written_out(labels_trick):
    settings = {"hidden": (3,), "lr": 0.02, "schedule": "linear", "batch_size": 10}
    learner = learner_of(4, (5,), c=3.0, xi=0.9, labels_trick=labels_trick, **settings)
    same = learner_of(4, (5,), **settings).network  # the same initial values
    anchor, importance = values(same), torch.zeros(learner.n_parameters)
    for classes in ((0, 1), (2, 3), (0, 1)):
        x, y = data(35, classes=classes, seed=classes[0])
        x = 5 * x  # steep
        taught(learner, x, y)
        adam, shares, cut = torch.optim.Adam(same.parameters()), 0, 0
        inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
        for step, rows in enumerate(torch.arange(35).split(10)):
            adam.param_groups[0]["lr"] = 0.02 * (1 - step / 4)
            adam.zero_grad()
            logits, target = same(inputs[rows]), labels[rows]
            if labels_trick:
                logits, target = logits[:, list(classes)], target - classes[0]
            moved = parameters_to_vector(same.parameters()) - anchor
            (F.cross_entropy(logits, target) + 3 * (importance * moved**2).sum()).backward()
            cut += sum(int((p.grad.abs() > 1).sum()) for p in same.parameters())
            clip_grad_value_(same.parameters(), 1)
            shares += 0.02 * parameters_to_vector(p.grad for p in same.parameters()) ** 2
            adam.step()
        assert cut > 5
        importance = importance + shares / ((values(same) - anchor) ** 2 + 0.9)
        anchor = values(same)
        torch.testing.assert_close(learner.values(), anchor)
        torch.testing.assert_close(learner.importance, importance)


def test_a_large_weight_holds_what_matters():
    moved = []
    for c in (0.0, 1e4):
        learner = taught(learner_of(4, (5,), hidden=(), c=c, lr=0.01), *data(300))
        matters, before = learner.importance > learner.importance.median(), learner.values()
        taught(learner, *data(300, classes=(2, 3), seed=1))
        moved.append((learner.values() - before)[matters].abs().mean())
    assert moved[1] < 0.3 * moved[0]


def test_with_batch_norm():
    x, y = data(6, (16, 16, 3))
    learner = learner_of(3, (16, 16, 3), width=2, batch_size=3)
    taught(learner, x, y)
    assert (learner.importance > 0).float().mean() > 0.9


def test_it_says_what_it_cannot_be():
    with pytest.raises(ValueError, match="path must be one of released, exact, penalised, not"):
        learner_of(2, (3,), path="straight")


def test_digits():
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    learner = learner_of(10, (64,), c=10.0, labels_trick=True, lr=0.003)
    for task in range(5):
        rows = np.random.default_rng(0).permutation(np.flatnonzero(y // 2 == task))
        taught(learner, x[rows], y[rows])
    assert (learner.scores(x).argmax(1) == y).mean() > 0.35  # 0.2 is the last task alone
