"""CWR and CWR+: what stays, what starts afresh, and the mean that is taken away."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers import accuracy_on_digits, taught
from torch import nn
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods import CWR, METHODS
from pecil.methods.ewc import flat

learner_of = partial(CWR, hidden=(7,), lr=0.01, device="cpu")
TASKS = [0, 1], [2, 3], [4, 5]


def body(learner):
    return flat(learner.network.body.parameters()).detach().clone()


@pytest.mark.parametrize("settings", [{}, {"plus": True}, {"active": "seen", "keep_adam": True}])
def test_it_conforms(settings):
    check_learner(METHODS["cwr"], lr=0.01, **settings)


@pytest.mark.parametrize("plus", [False, True])
def test_the_layers_below_move_in_the_first_task_alone(plus):
    learner = learner_of(6, (6,), plus=plus)
    at_first = body(learner)
    after_one = body(taught(learner, TASKS[0]))
    assert (after_one != at_first).float().mean() > 0.5
    assert torch.equal(body(taught(learner, *TASKS[1:])), after_one)
    free = learner_of(6, (6,), plus=plus, freeze=False)
    assert not torch.equal(body(taught(free, *TASKS)), after_one)


@pytest.mark.parametrize("plus", [False, True])
def test_the_weights_of_earlier_classes_stay_in_the_store(plus):
    learner = taught(learner_of(6, (6,), plus=plus), TASKS[0])
    for task in TASKS[1:]:
        before = [values.clone() for values in learner.stored]
        taught(learner, task)
        for old, new in zip(before, learner.stored, strict=True):
            assert torch.equal(old[: task[0]], new[: task[0]])
            assert new[task].abs().min() > 0
            assert not new[task[-1] + 1 :].any()  # classes to come


def test_cwr_copies_the_weights_that_were_trained_from_a_fresh_start():
    learner = taught(learner_of(6, (6,), init="kaiming"), TASKS[0])
    head = learner.network.head
    former = head.weight.detach().clone()
    learner.begin_task({2: 12, 3: 12})
    fresh = head.weight.detach().clone()
    assert not torch.isclose(fresh, former).any()
    assert fresh.abs().max() <= 1 / np.sqrt(7)
    learner.learn(np.random.default_rng(1).random((24, 6), np.float32), np.arange(24) % 2 + 2)
    learner.end_task()
    for cw, tw in zip(learner.stored, (head.weight, head.bias), strict=True):
        assert torch.equal(cw[2:4], tw[2:4])
    assert not torch.equal(head.weight, fresh)


def test_cwr_plus_starts_from_zero_and_takes_the_mean_of_all_classes_so_far_away():
    learner = taught(learner_of(6, (6,), plus=True), TASKS[0])
    kept = [values.clone() for values in learner.stored]
    head = learner.network.head
    learner.begin_task({2: 12, 3: 12})
    assert not head.weight.any() and not head.bias.any()
    learner.learn(np.random.default_rng(1).random((24, 6), np.float32), np.arange(24) % 2 + 2)
    learner.end_task()
    for cw, old, tw in zip(learner.stored, kept, (head.weight, head.bias), strict=True):
        mean = torch.cat([old[:2].flatten(), tw[2:4].detach().flatten()]).mean()
        torch.testing.assert_close(cw[2:4], tw[2:4].detach() - mean)
        assert mean != 0


def test_scores_are_those_of_the_store_in_the_middle_of_a_task_too():
    learner = taught(learner_of(6, (6,)), TASKS[0])
    learner.begin_task({2: 12, 3: 12})
    x = np.random.default_rng(1).random((24, 6), np.float32)
    learner.learn(x, np.arange(24) % 2 + 2)
    head = learner.network.head
    weight, bias = (
        torch.cat([old[:2], new[2:4]])
        for old, new in zip(learner.stored, (head.weight, head.bias), strict=True)
    )
    expected = F.linear(learner.network.body(torch.from_numpy(x)), weight, bias).detach()
    np.testing.assert_allclose(learner.scores(x)[:, :4], expected, rtol=1e-5, atol=1e-6)
    learner.end_task()
    np.testing.assert_allclose(learner.scores(x)[:, :4], expected, rtol=1e-5, atol=1e-6)


def test_batch_norm_of_frozen_layers_stays_as_it_is():
    learner = CWR(4, (8, 8, 3), width=2, lr=0.01, device="cpu")
    taught(learner, [0, 1], shape=(8, 8, 3))
    before = copy.deepcopy(learner.network.body.state_dict())
    learner.scores(np.zeros((1, 8, 8, 3), np.float32))  # leaves the network in training mode
    taught(learner, [2, 3], shape=(8, 8, 3))
    after = learner.network.body.state_dict()
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in learner.network.body.modules())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_digits():
    settings = {"lr": 0.003, "hidden": (100,), "active": "seen", "keep_adam": True}
    learner = CWR(10, (8, 8), plus=True, device="cpu", **settings)
    assert accuracy_on_digits(learner, "5/2", passes=5) > 0.3  # 0.2 is the last task alone
