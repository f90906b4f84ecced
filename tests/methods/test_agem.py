import numpy as np
import pytest
import torch
from helpers import accuracy_on_digits, batches, described, watched_draws
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods import agem
from pecil.methods.agem import AGEM, projected


def gradient(network, x, y):
    parts = torch.autograd.grad(F.cross_entropy(network(x), y), tuple(network.parameters()))
    return torch.cat([part.flatten() for part in parts])


def test_agem_keeps_to_what_all_methods_keep_to():
    check_learner(described(AGEM), lr=0.01)


def test_a_projected_gradient_is_the_nearest_that_does_not_oppose_the_reference():
    chance = torch.Generator().manual_seed(0)
    opposed = 0
    for _ in range(50):
        g, r, *others = torch.randn(100, 6, dtype=torch.float64, generator=chance)
        found = projected(g, r)
        assert found @ r > -1e-12
        if g @ r >= 0:
            assert torch.equal(found, g)
            continue
        opposed += 1
        assert abs(found @ r) < 1e-12
        allowed = [other for other in others if other @ r >= 0]
        assert min((g - other).norm() for other in allowed) > (g - found).norm()
    assert 10 < opposed < 40


def test_a_reference_of_zero_changes_nothing():
    g = torch.tensor([1.0, -2.0])
    assert torch.equal(projected(g, torch.zeros(2)), g)


@pytest.mark.parametrize("opposed", [True, False])
def test_adam_is_given_the_projected_gradient(opposed):
    learner = AGEM(3, (4,), buffer=10, batch_size=5, device="cpu")
    drawn = watched_draws(learner)
    ((x, y),) = batches(5)
    torch.autograd.backward(learner.loss(x, y))  # nothing to replay yet
    found = torch.cat([p.grad.flatten() for p in learner.network.parameters()])
    torch.testing.assert_close(found, gradient(learner.network, x, y))

    labels = (y + 1) % 3 if opposed else y  # the same samples with other labels, or not
    g = gradient(learner.network, x, labels)
    learner.step(x, labels)  # moves the weights, leaves the gradient
    found = torch.cat([p.grad.flatten() for p in learner.network.parameters()])
    learner = AGEM(3, (4,), buffer=10, device="cpu")  # the weights as they were
    r = gradient(learner.network, drawn[-1]["x"], drawn[-1]["y"])
    assert (g @ r < 0) == opposed
    expected = g - g @ r / (r @ r) * r if opposed else g
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert found @ r > -1e-5
    assert torch.allclose(found, g) is not opposed


@pytest.mark.parametrize("transform", [False, True])
def test_replayed_samples_are_left_as_they_are_unless_asked_for(transform):
    settings = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 1.0, 2.0), "transform": transform}
    learner = AGEM(2, (6, 5, 3), width=2, device="cpu", **settings)
    raw = torch.randint(256, (20, 6, 5, 3), generator=torch.Generator().manual_seed(0))
    raw = raw.to(torch.uint8)
    plain = raw.movedim(-1, 1) / 255
    assert torch.equal(learner.replayed(raw), plain) is not transform
    assert not torch.allclose(learner.replayed(raw), learner.view(raw))  # normalised or cropped
    grey = AGEM(2, (6, 5), mean=0.5, device="cpu", transform=transform)
    expected = plain[:, 0].flatten(1) - (0.5 if transform else 0)
    torch.testing.assert_close(grey.replayed(raw[..., 0]), expected)


@pytest.mark.parametrize("split", ["10/1", "5/2"])
def test_agem_learns_digits(split):
    learner = AGEM(10, (8, 8), buffer=100, lr=0.001, schedule="linear", device="cpu")
    accuracy = accuracy_on_digits(learner, split)
    assert accuracy > 0.25  # fine-tuning: 0.1 and 0.2


def test_colour_pictures_are_learned():
    """Gradients of convolutions may lie in memory in another order."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (12, 16, 16, 3), np.uint8), np.arange(12) % 3
    learner = AGEM(3, (16, 16, 3), buffer=5, width=2, batch_size=3, device="cpu")
    learner.begin_task({0: 4, 1: 4, 2: 4})
    learner.learn(x, y)
    assert np.isfinite(learner.scores(x)).all()


def test_the_reference_gradient_is_one_of_training(monkeypatch):

    given = []
    monkeypatch.setattr(agem, "projected", lambda g, r: given.append((g, r)) or projected(g, r))
    learner = AGEM(3, (6, 5, 3), width=2, buffer=10, device="cpu")
    drawn = watched_draws(learner)
    for x, y in batches(5, 5, shape=(6, 5, 3)):
        learner.loss(x, y)
    assert learner.network.training
    ((g, r),) = given
    old = drawn[-1]
    torch.testing.assert_close(g, gradient(learner.network, x.movedim(-1, 1), y))
    torch.testing.assert_close(r, gradient(learner.network, old["x"].movedim(-1, 1), old["y"]))
    norm = learner.network.body[1]
    assert norm.num_batches_tracked == 3 + 2  # two of new samples, one of old ones, and ours
