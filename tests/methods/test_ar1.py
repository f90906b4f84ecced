"""AR1: its penalty and its limits by hand, CWR+ above."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers import accuracy_on_digits, taught
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from pecil.checks import check_learner
from pecil.methods import AR1, METHODS

learner_of = partial(AR1, hidden=(3,), lr=0.02, batch_size=10, device="cpu")


def values(module):
    return parameters_to_vector(module.parameters()).detach()


def test_it_conforms():
    check_learner(METHODS["ar1"], lr=0.01, active="seen")


def test_two_tasks_written_out():
    """Slopes times moves of the layers below are summed up, divided and clamped; tw starts at 0."""
    limit, c, xi = 0.004, 40.0, 0.1
    learner = learner_of(4, (5,), c=c, xi=xi, omega_max=limit)
    same = learner_of(4, (5,)).network  # the same initial values
    anchor, omega, stored = values(same.body), torch.zeros(18), torch.zeros(4, 3)
    for classes in ([0, 1], [2, 3]):
        random = np.random.default_rng(classes[0])
        x, y = random.normal(size=(40, 5)).astype(np.float32), random.choice(classes, 40)
        learner.begin_task({label: int((y == label).sum()) for label in classes})
        learner.learn(x, y)
        learner.end_task()

        adam, shares = torch.optim.Adam(same.parameters(), 0.02), torch.zeros(18)
        for p in same.head.parameters():
            p.data.zero_()
        for rows in torch.arange(40).split(10):
            adam.zero_grad()
            before = parameters_to_vector(same.body.parameters())
            loss = F.cross_entropy(same(torch.from_numpy(x[rows])), torch.from_numpy(y[rows]))
            (loss + c * (omega * (before - anchor) ** 2).sum()).backward()
            slopes = parameters_to_vector(p.grad for p in same.body.parameters())
            adam.step()
            shares -= slopes * (values(same.body) - before.detach())
        now = values(same.body)
        matters = omega + shares / ((now - anchor) ** 2 + xi)
        omega, anchor = matters.clamp(0, limit), now
        stored[classes] = same.head.weight.detach()[classes]
        stored[classes] -= stored[: classes[-1] + 1].mean()

        assert 0.1 < (matters > limit).float().mean() < 0.9
        torch.testing.assert_close(values(learner.network.body), now)
        torch.testing.assert_close(learner.importance[:18], omega)
        torch.testing.assert_close(learner.stored[0], stored)


def test_output_weights_are_not_held():
    learner = taught(learner_of(6, (6,)), [0, 1], [2, 3])
    above = sum(p.numel() for p in learner.network.head.parameters())
    assert not learner.importance[-above:].any()
    assert learner.importance[:-above].any()


@pytest.mark.parametrize("limit", [0.0, 1e-3])
def test_no_parameter_matters_more_than_the_limit(limit):
    learner = taught(learner_of(6, (6,), omega_max=limit), [0, 1], [2, 3])
    assert learner.importance.max() == np.float32(limit)
    assert learner.importance.min() == 0


def test_the_layers_below_go_on_learning_unless_they_are_held():
    moved = []
    for c in (0.0, 1e5):
        learner = taught(learner_of(6, (6,), c=c), [0, 1])
        before, omega = values(learner.network.body), learner.importance[:21]
        matters = omega > omega.median()
        taught(learner, [2, 3], n=100)
        moved.append((values(learner.network.body) - before)[matters].abs().mean())
    assert moved[0] > 0.05 and moved[1] < 0.3 * moved[0]


def test_digits():
    settings = {"lr": 0.003, "hidden": (100,), "active": "seen", "keep_adam": True}
    learner = AR1(10, (8, 8), c=10.0, omega_max=0.01, device="cpu", **settings)
    assert accuracy_on_digits(learner, "5/2", passes=5) > 0.3  # 0.2 is the last task alone


def test_what_made_the_loss_grow_does_not_matter():
    learner = taught(learner_of(6, (6,), omega_max=1e-3), [0, 1])
    learner.importance.zero_()
    learner.shares[:21] = torch.tensor([-1.0, 0.0, 1.0]).repeat(7)  # of the layers below
    learner.end_task()
    torch.testing.assert_close(learner.importance[:21], torch.tensor([0, 0, 1e-3]).repeat(7))
