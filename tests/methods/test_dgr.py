"""DGR: weights, labels and samples of what is replayed, and a step written out."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers import accuracy_on_digits, taught
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods import DGR, METHODS

learner_of = partial(DGR, hidden=(7,), latent=2, lr=0.01, batch_size=8, device="cpu")


def inputs(n=8, shape=(6,), seed=0):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


def test_it_conforms():
    check_learner(METHODS["dgr"], lr=0.01, latent=3)


def test_the_loss_of_the_third_task_is_a_third_new_and_two_thirds_replayed(monkeypatch):
    learner = taught(learner_of(6, (6,), active="seen"), [0, 1], [2, 3])
    learner.begin_task({4: 4, 5: 4})
    x, y = inputs(), torch.tensor([4, 5] * 4)
    noise = inputs(24, (2,), seed=1)
    monkeypatch.setattr(learner, "normal", lambda n: noise[:n])
    found = learner.loss(x, y)

    of_new, z, of_old = noise.split(8)
    network, vae = learner.former
    made = vae.decoder(z)
    named = network(made)[:, :4].argmax(1)
    expected = [
        F.cross_entropy(learner.network(samples), labels) + learner.vae.bound(samples, eps)
        for samples, labels, eps in ((x, y, of_new), (made, named, of_old))
    ]
    torch.testing.assert_close(found, expected[0] / 3 + expected[1] * 2 / 3)


def test_the_first_task_is_learned_from_its_samples_alone(monkeypatch):
    learner = learner_of(6, (6,))
    learner.begin_task({0: 4, 1: 4})
    monkeypatch.setattr(learner, "normal", lambda n: torch.ones(n, 2))
    x, y = inputs(), torch.tensor([0, 1] * 4)
    expected = F.cross_entropy(learner.network(x), y) + learner.vae.bound(x, torch.ones(8, 2))
    torch.testing.assert_close(learner.loss(x, y), expected)


def test_samples_and_labels_come_from_the_generator_and_the_classifier_of_the_last_task():
    learner = taught(learner_of(6, (6,)), [0, 1], [2, 3])
    network, vae = learner.former
    for mine, former in ((learner.network, network), (learner.vae, vae)):
        assert mine is not former and not former.training
        assert all(
            torch.equal(p, q) for p, q in zip(mine.parameters(), former.parameters(), strict=True)
        )
    kept = copy.deepcopy(network.state_dict()), copy.deepcopy(vae.state_dict())
    learner.begin_task({4: 8, 5: 8})
    learner.learn(inputs(16).numpy(), np.array([4, 5] * 8))
    for former, before in zip(learner.former, kept, strict=True):
        assert all(torch.equal(former.state_dict()[name], value) for name, value in before.items())
    assert not torch.equal(learner.network.head.weight, network.head.weight)
    z = inputs(8, (2,))
    samples, labels = learner.replayed(z, (6,))
    torch.testing.assert_close(samples, vae.decoder(z))
    assert torch.equal(labels, network(samples)[:, :4].argmax(1))


def test_replayed_labels_are_of_earlier_classes():
    learner = taught(learner_of(6, (6,)), [0, 1])
    network, _ = learner.former
    network.head.bias[2:] = 100.0  # classes that have not come
    assert set(learner.replayed(inputs(8, (2,)), (6,))[1].tolist()) <= {0, 1}


def test_both_networks_follow_their_own_loss_alone():
    learner = learner_of(6, (6,))
    x, y = inputs(), torch.tensor([0, 1] * 4)
    before = copy.deepcopy(learner.network)
    learner.learn(x.numpy(), y.numpy())
    adam = torch.optim.Adam(before.parameters(), 0.01)
    F.cross_entropy(before(x), y).backward()
    adam.step()
    for mine, alone in zip(learner.network.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(mine, alone)


def test_its_parameters_are_those_of_both():
    learner = DGR(10, (28, 28), hidden=(400, 400), device="cpu")
    assert sum(p.numel() for p in learner.network.parameters()) == 478_410
    assert (
        learner.n_parameters
        == 478_410 + 2 * (784 * 400 + 160_000) + 300 * 400 + 784 + 4 * 400 + 100
    )
    assert learner.vae.binary
    assert not DGR(10, (784,), hidden=(4,), device="cpu").vae.binary


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3)])
def test_pictures(shape):
    learner = taught(learner_of(4, shape, width=2), [0, 1], [2, 3], n=4, shape=shape)
    as_seen = learner.view(inputs(3, shape)).shape[1:]
    samples, _ = learner.replayed(inputs(8, (2,)), as_seen)
    assert samples.shape == (8, *((64,) if len(shape) == 2 else (3, 8, 8)))
    assert len(shape) == 3 or (samples.min() >= 0 and samples.max() <= 1)


def test_digits():
    settings = {"lr": 0.003, "hidden": (100,), "active": "seen", "keep_adam": True, "latent": 10}
    learner = DGR(10, (8, 8), device="cpu", **settings)
    assert accuracy_on_digits(learner, "5/2", passes=10) > 0.4  # 0.2 is the last task alone


def test_the_labels_trick_is_refused():
    with pytest.raises(ValueError, match="labels_trick: .* expected False"):
        DGR(4, (4,), labels_trick=True)


def test_classes_that_came_since_are_no_labels_of_what_is_replayed():
    learner = taught(learner_of(6, (6,)), [0, 1])
    learner.begin_task({2: 8, 3: 8})
    learner.learn(inputs(16).numpy(), np.array([2, 3] * 8))
    network, _ = learner.former
    network.head.bias[2:] = 100.0
    assert set(learner.replayed(inputs(8, (2,)), (6,))[1].tolist()) <= {0, 1}
