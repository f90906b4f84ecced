"""What the methods with a network share: networks, pictures, batches, the buffer."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pecil.methods.buffer import Reservoir
from pecil.methods.networks import network_for
from pecil.methods.recording import Chance
from pecil.methods.trained import USES, Replaying, Trained
from pecil.methods.vae_gc import VAEGC

CPU = torch.device("cpu")


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("shape", "outputs", "options", "parameters"),
    [
        ((28, 28), 10, {}, 89_610),
        ((5,), 3, {"hidden": (4,)}, 5 * 4 + 4 + 4 * 3 + 3),
        ((32, 32, 3), 10, {}, 11_173_962),
        ((32, 32, 3), 100, {}, 11_220_132),
        ((84, 84, 3), 100, {"width": 20}, 1_109_240),
    ],
)
def test_the_paper_s_networks_have_their_sizes(shape, outputs, options, parameters):
    network = network_for(shape, outputs, generator=chance(), **options)
    assert sum(p.numel() for p in network.parameters()) == parameters


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3)])
def test_networks_come_from_their_generator_alone(shape):
    torch.manual_seed(3)
    one, same, other = (network_for(shape, 4, width=4, generator=chance(k)) for k in (1, 1, 2))
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == (a.ndim == 1 and len(a.unique()) == 1)  # zeros and ones


def test_initial_values_are_pytorch_s():
    network = network_for((8, 8, 3), 4, width=16, generator=chance())
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            bound = layer.weight[0].numel() ** -0.5
            assert 0.9 * bound < layer.weight.abs().max() <= bound
            assert abs(float(layer.weight.detach().mean())) < 0.2 * bound
        if isinstance(layer, nn.BatchNorm2d):
            assert (layer.weight == 1).all() and (layer.bias == 0).all()
            assert (layer.running_var == 1).all() and (layer.running_mean == 0).all()


def test_resnet_halves_the_picture_three_times():
    network = network_for((32, 32, 3), 4, width=4, generator=chance())
    sizes = []
    for layer in network.body:
        layer.register_forward_hook(lambda _, x, y: sizes.append(tuple(y.shape[1:])))
    network(torch.zeros(2, 3, 32, 32))
    assert (
        sizes[2:11] == [(4, 32, 32)] * 3 + [(8, 16, 16)] * 2 + [(16, 8, 8)] * 2 + [(32, 4, 4)] * 2
    )
    assert sizes[-1] == (32,)


# -------------------------------------------------------------------------------- buffer


def test_a_reservoir_is_uniform():
    """Each of 40 rows is kept by a third of the reservoirs: 13 places for 39 rows."""
    times, counts = 3000, np.zeros(39)
    for seed in range(times):
        kept = Reservoir(13, seed, Chance(CPU))
        for rows in torch.arange(39).split(10):  # in batches
            kept.add(y=rows)
        assert len(kept) == 13 == len(kept.fields["y"].unique())
        counts[kept.fields["y"].numpy()] += 1
    expected = times / 3
    chi2 = ((counts - expected) ** 2 / (expected * (1 - 1 / 3))).sum() * 38 / 39
    assert 14 < chi2 < 75  # of 38 degrees of freedom: outside by chance once in a thousand
    assert counts[:13].mean() == pytest.approx(expected, rel=0.05)


def test_a_reservoir_keeps_fields_together_and_draws_without_replacement():
    kept = Reservoir(5, 0, Chance(CPU))
    assert len(kept) == 0 and kept.draw(3) == {}
    for k in range(20):
        rows = torch.tensor([2 * k, 2 * k + 1])
        kept.add(x=rows.float().view(2, 1) * 10, y=rows)
        drawn = kept.draw(3)
        assert len(drawn["y"]) == min(3, len(kept)) == len(drawn["y"].unique())
        assert torch.equal(drawn["x"][:, 0], 10.0 * drawn["y"])
    assert len(kept.draw(99)["y"]) == 5
    assert kept.seen == 40


@pytest.mark.parametrize("capacity", [0, -1, 2.5, True, None])
def test_a_reservoir_has_a_capacity(capacity):
    with pytest.raises(ValueError, match=f"buffer: expected a whole number.* got {capacity}"):
        Reservoir(capacity, 0, Chance(CPU))


def test_what_is_in_a_reservoir_has_no_gradient():
    kept = Reservoir(2, 0, Chance(CPU))
    kept.add(z=torch.ones(3, 2, requires_grad=True) * 2)
    assert not kept.fields["z"].requires_grad and (kept.fields["z"] == 2).all()


# ------------------------------------------------------------------------------ pictures


def pictures(n=200):
    return torch.from_numpy(np.random.default_rng(0).random((n, 6, 5, 3), np.float32))


def test_crops_are_windows_of_the_padded_picture():
    learner = Trained(2, (6, 5, 3), width=2, device="cpu")
    x = pictures().movedim(-1, 1)
    places = set()
    for picture, crop in zip(x, learner.cropped(x), strict=True):
        padded = F.pad(picture, (4,) * 4)
        found = [
            (i, j)
            for i in range(9)
            for j in range(9)
            if torch.equal(padded[:, i : i + 6, j : j + 5], crop)
        ]
        assert len(found) == 1
        places.update(found)
    assert len(places) > 60  # of 81


def test_some_pictures_are_mirrored_if_asked_for():
    learner = Trained(2, (6, 5, 3), width=2, flip=True, device="cpu")
    x = torch.zeros(400, 1, 6, 5) + torch.arange(1.0, 6)
    for flip in (True, False):
        learner.flip = flip
        row = learner.cropped(x)[:, 0].amax(1)  # black at one end or the other
        steps = row.diff(dim=1)[(row[:, 1:] > 0) & (row[:, :-1] > 0)]
        assert set(steps.tolist()) == ({1.0, -1.0} if flip else {1.0})
        assert not flip or 0.4 < (steps > 0).float().mean() < 0.6


def test_the_stream_is_augmented_if_asked_for_and_replay_always():
    x = (255 * pictures(20)).to(torch.uint8)
    plain = x.float().movedim(-1, 1) / 255
    for augment in (False, True):
        learner = Replaying(2, (6, 5, 3), width=2, augment=augment, device="cpu")
        assert torch.allclose(learner.view(x), plain) is not augment
        assert not torch.allclose(learner.replayed(x), plain)
        assert torch.allclose(learner.view(x, augment=False), plain)
    grey = Replaying(2, (6, 5), augment=True, device="cpu")
    assert torch.allclose(grey.replayed(x[..., 0]), (x[..., 0] / 255).flatten(1))


def test_black_is_black_after_normalising():
    learner = Trained(2, (6, 5, 3), width=2, mean=(0.1, 0.2, 0.3), std=(0.5, 1, 2), device="cpu")
    black = learner.view(torch.zeros(50, 6, 5, 3, dtype=torch.uint8), augment=True)
    assert torch.allclose(black.mean((0, 2, 3)), torch.tensor([-0.2, -0.2, -0.15]))
    assert float(black.std((0, 2, 3)).max()) < 1e-6


# ------------------------------------------------------------------------------ training


def test_what_is_learned_at_once_is_learned_in_batches():
    x, y = pictures(25).numpy(), np.arange(25) % 3
    scores = []
    for portion in (25, 5, 10):
        learner = Trained(3, (6, 5, 3), width=2, batch_size=5, schedule="linear", device="cpu")
        learner.begin_task({0: 9, 1: 8, 2: 8})
        for start in range(0, 25, portion):
            learner.learn(x[start : start + portion], y[start : start + portion])
        assert (learner.steps, learner.expected) == (5, 5)
        scores.append(learner.scores(x))
    np.testing.assert_array_equal(scores[0], scores[1])
    np.testing.assert_array_equal(scores[0], scores[2])


def test_the_labels_trick_moves_the_task_s_outputs_alone():
    x, y = np.random.default_rng(0).random((20, 4), np.float32), np.arange(20) % 2 + 1
    learner = Trained(4, (4,), hidden=(), labels_trick=True, batch_size=20, device="cpu")
    learner.begin_task({1: 10, 2: 10})
    before = learner.network.head.weight.clone()
    learner.learn(x, y)
    moved = (learner.network.head.weight != before).any(1)
    assert moved.tolist() == [False, True, True, False]
    learner.begin_task({3: 10})
    before = learner.network.head.weight.clone()
    learner.learn(x, np.full(20, 3))
    assert torch.equal(learner.network.head.weight, before)  # nothing to learn from one class


def test_outputs_of_classes_to_come_stay_if_only_those_seen_compete():
    x, y = np.random.default_rng(0).random((20, 4), np.float32), np.arange(20) % 2 + 1
    learner = Trained(4, (4,), hidden=(), active="seen", batch_size=20, device="cpu")
    for classes, expected in (
        ([1, 2], [False, True, True, False]),
        ([0], [True, True, True, False]),
    ):
        learner.begin_task(dict.fromkeys(classes, 10))
        before = learner.network.head.weight.clone()
        learner.learn(x, y if len(classes) == 2 else np.zeros(20, int))
        assert (learner.network.head.weight != before).any(1).tolist() == expected


@pytest.mark.parametrize("keep", [False, True])
def test_adam_is_kept_from_task_to_task_or_starts_anew(keep):
    x, y = torch.rand(40, 4, generator=chance()), torch.arange(40) % 2
    learner = Trained(2, (4,), hidden=(3,), batch_size=5, lr=0.02, keep_adam=keep, device="cpu")
    same = Trained(2, (4,), hidden=(3,), device="cpu").network
    adam = torch.optim.Adam(same.parameters(), 0.02)
    for task in range(2):
        learner.begin_task({0: 20, 1: 20})
        learner.learn(x.numpy(), y.numpy())
        for rows in torch.arange(40).split(5):
            adam.zero_grad()
            F.cross_entropy(same(x[rows]), y[rows]).backward()
            adam.step()
        found, alone = learner.network.head.weight, same.head.weight
        assert torch.allclose(found, alone, atol=1e-5) is (task == 0 or keep)


@pytest.mark.parametrize(("rule", "momentum"), [("sgd", 0), ("momentum", 0.9)])
def test_gradient_descent_takes_steps_of_the_rate_and_starts_anew_with_a_task(rule, momentum):
    x, y = torch.rand(4, 3, generator=chance()), torch.tensor([0, 1, 1, 0])
    given = {"hidden": (5,), "batch_size": 2, "lr": 0.5, "device": "cpu"}
    learner = Trained(2, (3,), optimizer=rule, schedule="linear", **given)
    same = Trained(2, (3,), **given).network
    for _ in range(2):
        learner.begin_task({0: 2, 1: 2})
        learner.learn(x.numpy(), y.numpy())
        pace = [torch.zeros_like(value) for value in same.parameters()]
        for rows, rate in (([0, 1], 0.5), ([2, 3], 0.25)):
            slopes = torch.autograd.grad(F.cross_entropy(same(x[rows]), y[rows]), same.parameters())
            pace = [momentum * old + slope for old, slope in zip(pace, slopes, strict=True)]
            with torch.no_grad():
                for value, change in zip(same.parameters(), pace, strict=True):
                    value -= rate * change
    for found, expected in zip(learner.network.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_initial_values():
    one, other = (
        Trained(5, (20,), hidden=(30,), init=init, device="cpu").network
        for init in ("xavier", "kaiming")
    )
    assert not one.head.bias.any() and one.head.weight.abs().max() > np.sqrt(1 / 30)
    assert other.head.bias.all() and other.head.weight.abs().max() <= np.sqrt(1 / 30)
    assert other.body[0].weight.abs().max() <= np.sqrt(1 / 20)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (Trained, {"optimizer": "lion"}, "one of adam, sgd, momentum, not 'lion'"),
        (Trained, {"init": "zeros"}, "init must be one of xavier, kaiming, not 'zeros'"),
        (Trained, {"active": "none"}, "active must be one of all, seen, not 'none'"),
        (Replaying, {"active": "seen"}, "active: in replay all .* expected all, got seen"),
        (VAEGC, {"active": "seen"}, "active: VAEGC itself says .* expected all, got seen"),
    ],
)
def test_settings_that_make_no_sense_are_refused(method, settings, message):
    with pytest.raises(ValueError, match=message):
        method(3, (6,), device="cpu", **settings)


def test_each_use_of_the_seed_has_its_own_numbers():
    numbers = set()
    for seed in range(5):
        learner = Trained(2, (4,), seed=seed, device="cpu")
        for use in range(USES):
            numbers.add(float(torch.rand((), generator=learner.generator(use))))
    assert len(numbers) == 5 * USES


def test_no_samples_change_nothing():
    learner = Trained(2, (4,), device="cpu")
    x, y = np.random.default_rng(0).random((20, 4), np.float32), np.arange(20) % 2
    learner.begin_task({0: 10, 1: 10})
    learner.learn(x, y)
    before = learner.scores(x)
    learner.learn(x[:0], y[:0])
    np.testing.assert_array_equal(learner.scores(x), before)


def test_the_schedule_counts_the_partial_batch_of_every_pass():
    learner = Trained(2, (4,), lr=0.1, schedule="linear", batch_size=10, device="cpu")
    x, y = np.random.default_rng(0).random((11, 4), np.float32), np.arange(11) % 2
    learner.begin_task({0: 18, 1: 15}, passes=[11] * 3)
    for _ in range(3):
        learner.learn(x, y)
    assert learner.steps == learner.expected == 6
    assert float(learner.rate) == pytest.approx(0.1 / 6)
