"""Ensembles: a network for each task, their sizes, and how their outputs are put together."""

import copy

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods import Method
from pecil.methods.ensemble import Ensemble, fitting, pec_network, small_network

METHOD = Method("ensemble", "Ensemble", "2024", "", Ensemble, ("lr",), by_task=True)
KINDS = ("full", "small", "pec")


def parameters(network):
    return sum(p.numel() for p in network.parameters())


def two_tasks(kind, x, y, **given):
    """Return a learner of the classes 0 and 2, then 1 and 3."""
    learner = Ensemble(4, x.shape[1:], network=kind, device="cpu", **given)
    for task in ((2, 0), (1, 3)):
        rows = np.isin(y, task)
        learner.begin_task({label: 20 for label in task})
        learner.learn(x[rows], y[rows])
        learner.end_task()
    return learner


@pytest.fixture
def pictures():
    random = np.random.default_rng(0)
    y = random.permutation(np.arange(40) % 4)
    x = random.random((40, 8, 8, 3), np.float32)
    x[..., 0] += y[:, None, None]
    return x, y


@pytest.mark.parametrize("kind", KINDS)
def test_conformance(kind):
    check_learner(METHOD, network=kind, lr=0.01, hidden=(20, 20))


# ------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("kind", "width", "each"), [("full", 100, 88_802), ("small", 22, 17_822), ("pec", 23, 18_149)]
)
def test_sizes_on_mnist(kind, width, each):
    """Five tasks of two classes: 5 × 89 K for the full ones, as many as PEC for the others."""
    learner = Ensemble(10, (28, 28), network=kind, device="cpu")
    for task in range(5):
        learner.begin_task({2 * task: 10, 2 * task + 1: 10})
    assert {len(network.body[0].weight) for _, network in learner.members} == {width}
    assert learner.n_parameters == 5 * each
    if kind != "full":
        assert learner.n_parameters == pytest.approx(89_600, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "n_classes", "tasks", "pool"),
    [((32, 32, 3), 10, 5, 5), ((32, 32, 3), 100, 10, 4), ((84, 84, 3), 100, 20, 4)],
)
@pytest.mark.parametrize("kind", ["small", "pec"])
def test_sizes_on_colour_pictures(kind, shape, n_classes, tasks, pool):
    """Widths are whole numbers: ResNet18 cannot come nearer than a few percent."""
    learner = Ensemble(n_classes, shape, network=kind, pool=pool, device="cpu")
    learner.begin_task(dict.fromkeys(range(n_classes // tasks), 1))
    near = 0.05 if kind == "small" else 0.005
    assert tasks * learner.n_parameters == pytest.approx(11_200_000, rel=near)


@pytest.mark.parametrize(
    "make",
    [
        lambda width: small_network((5,), 3, 2, "xavier", width),
        lambda width: small_network((5,), 3, 1, "xavier", width),
        lambda width: small_network((8, 8, 3), 3, 2, "xavier", width),
        lambda width: pec_network((5,), 3, 2, width),
        lambda width: pec_network((8, 8, 3), 3, 2, width),
    ],
)
def test_the_width_that_fits_is_the_nearest(make):
    for width in (1, 4, 9):
        exactly = parameters(make(width))
        next_up = parameters(make(width + 1))
        assert fitting(exactly, lambda w: parameters(make(w))) == width
        near = exactly + 0.3 * (next_up - exactly)
        assert fitting(near, lambda w: parameters(make(w))) == width
    assert fitting(0, lambda w: parameters(make(w))) == 1


def test_pec_s_network_is_pec_s():
    mlp, conv = pec_network((28, 28), 2, 5, 10), pec_network((32, 32, 3), 2, 5, 6)
    assert [type(layer).__name__ for layer in mlp.body] == ["Linear", "LayerNorm", "GELU"]
    assert [type(layer).__name__ for layer in conv.body] == [
        *("Conv2d", "InstanceNorm2d", "ReLU", "AdaptiveAvgPool2d", "Flatten")
    ]
    assert conv(torch.zeros(3, 3, 32, 32)).shape == (3, 2)
    assert (conv.body[1].weight == 1).all() and not conv.body[1].track_running_stats


# ---------------------------------------------------------------------------- learning


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softmax", [False, True])
def test_scores_are_the_outputs_of_all_networks(kind, softmax, pictures):
    learner = two_tasks(kind, *pictures, width=4, pool=2, softmax=softmax)
    scores = learner.scores(pictures[0])
    sums = np.stack([np.exp(scores[:, classes]).sum(1) for classes in ([0, 2], [1, 3])])
    assert np.allclose(sums, 1) == softmax
    inputs = learner.view(torch.from_numpy(pictures[0]))
    for classes, network in learner.members:
        own = network.eval()(inputs).detach()
        own = own.log_softmax(1) if softmax else own
        np.testing.assert_allclose(scores[:, classes], own, rtol=1e-4, atol=1e-5)


def test_maps_as_large_as_the_room_are_made_a_few_at_a_time(pictures, monkeypatch):
    learner, asked = two_tasks("pec", *pictures, width=4, pool=2), []
    whole = learner.scores(pictures[0])
    (_, network), height = learner.members[0], pictures[0].shape[1]
    network.body[0].register_forward_hook(lambda *_: asked.append(len(_[2])))
    room = 3 * network.body[0].out_channels * height**2
    monkeypatch.setattr("pecil.methods.ensemble.ROOM", room)
    np.testing.assert_allclose(learner.scores(pictures[0]), whole, rtol=1e-5, atol=1e-6)
    assert max(asked) == 3 and sum(asked) == len(pictures[0])


def test_a_step_has_the_classes_of_the_task_alone(pictures):
    """By hand, on a copy of the network: cross-entropy over two outputs."""
    x, y = pictures
    rows = np.flatnonzero(y % 2)  # of the classes 1 and 3
    x = x.reshape(40, -1)
    learner = Ensemble(4, x.shape[1:], hidden=(5,), lr=0.01, device="cpu")
    learner.begin_task({3: 10, 1: 10})
    network = copy.deepcopy(learner.network)
    adam = torch.optim.Adam(network.parameters(), lr=0.01)
    for some in np.split(rows, 2):
        adam.zero_grad()
        outputs = network(torch.from_numpy(x[some]))
        F.cross_entropy(outputs, torch.from_numpy(y[some] // 2)).backward()
        adam.step()
    learner.learn(x[rows], y[rows])
    for ours, theirs in zip(learner.network.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_leaves_the_networks_of_others_alone(kind, pictures):
    learner = Ensemble(4, (8, 8, 3), network=kind, width=4, pool=2, device="cpu")
    x, y = pictures
    learner.begin_task({0: 10, 2: 10})
    learner.learn(x[y % 2 == 0], y[y % 2 == 0])
    kept = learner.network
    before, scores = [v.clone() for v in kept.state_dict().values()], learner.scores(x)
    learner.begin_task({1: 10, 3: 10})
    learner.learn(x[y % 2 == 1], y[y % 2 == 1])
    assert learner.network is not kept
    np.testing.assert_allclose(learner.scores(x)[:, ::2], scores[:, ::2], rtol=1e-6)
    assert all(map(torch.equal, before, kept.state_dict().values()))


def test_networks_start_differently(pictures):
    learner = two_tasks("full", *pictures, width=4, lr=0.0)
    (_, one), (_, other) = learner.members
    assert not torch.equal(one.head.weight, other.head.weight)


def test_a_class_of_two_tasks_has_the_higher_of_its_outputs(pictures):
    x, y = pictures
    learner = two_tasks("full", x, y, width=4)
    before = learner.scores(x)
    learner.begin_task({0: 10, 1: 10})
    rows = y < 2
    learner.learn(x[rows], y[rows])
    network = learner.network.eval()
    again = network(learner.view(torch.from_numpy(x))).detach().numpy()
    expected = np.maximum(before[:, :2], again)
    np.testing.assert_allclose(learner.scores(x)[:, :2], expected, rtol=1e-4, atol=1e-5)


def test_a_single_class_teaches_nothing(pictures):
    x, y = pictures
    learner = Ensemble(4, (8, 8, 3), width=4, softmax=True, device="cpu")
    learner.begin_task({1: 10})
    before = [values.clone() for values in learner.network.parameters()]
    learner.learn(x[y == 1], y[y == 1])
    assert all(map(torch.equal, before, learner.network.parameters()))
    assert (learner.scores(x)[:, 1] == 0).all()  # log 1


def test_what_cannot_be(pictures):
    with pytest.raises(ValueError, match="one of full, small, pec, not 'large'"):
        Ensemble(4, (8,), network="large")
    learner = Ensemble(4, (8, 8, 3), width=4, device="cpu")
    with pytest.raises(ValueError, match=r"classes of the task, \[\], got some of \[0, 1, 2, 3\]"):
        learner.learn(*pictures)
    learner.begin_task({0: 10, 1: 10})
    with pytest.raises(ValueError, match=r"the task, \[0, 1\], got some of \[2, 3\]"):
        learner.learn(*pictures)


@pytest.mark.parametrize("kind", KINDS)
def test_digits(kind):
    """Two classes a task: above chance (10 %), and far from what one network reaches."""
    x, y = load_digits(return_X_y=True)
    x, test = (x / 16).astype(np.float32), np.arange(len(x)) % 5 == 4
    learner = Ensemble(10, (64,), network=kind, lr=0.003, device="cpu", seed=1)
    for first in range(0, 10, 2):
        rows = np.flatnonzero(~test & (y // 2 == first // 2))
        learner.begin_task({first: 3 * len(rows) // 2, first + 1: 3 * len(rows) // 2})
        for _ in range(3):
            learner.learn(x[rows], y[rows])
        learner.end_task()
    assert (learner.scores(x[test]).argmax(axis=1) == y[test]).mean() > 0.3


@pytest.mark.parametrize("network", ["full", "small"])
def test_initial_values_are_those_asked_for(network):
    biases = []
    for init in ("xavier", "kaiming"):
        learner = Ensemble(4, (6,), network=network, init=init, device="cpu")
        learner.begin_task({0: 1, 1: 1})
        biases.append(bool(learner.network.head.bias.any()))
    assert biases == [False, True]
