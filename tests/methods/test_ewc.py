"""EWC: Fisher information against one sample at a time and a closed form; the penalty by hand."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods import Method
from pecil.methods.ewc import EWC, flat

METHOD = Method(
    "ewc", "EWC", "Kirkpatrick et al. (2017)", "Held.", EWC, (), by_task=True, revisits=True
)
learner_of = partial(EWC, device="cpu")


def data(n=30, shape=(5,), classes=(0, 1), seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(n, *shape)).astype(np.float32), random.choice(classes, n)


def taught(learner, x, y, portion=1000):
    learner.begin_task({label: int((y == label).sum()) for label in np.unique(y).tolist()})
    for start in range(0, len(x), portion):
        learner.learn(x[start : start + portion], y[start : start + portion])
    learner.end_task()
    return learner


def one_by_one(network, inputs, labels, mask=None):
    """Return the sum of p(y|x) (∂ log p(y|x) / ∂θ)², as it is written."""
    total = 0
    for x, label in zip(inputs, labels, strict=True):
        network.zero_grad()
        logits = network(x.unsqueeze(0))[0]
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        value = logits.log_softmax(0)[label]
        value.backward()
        slopes = flat(p.grad for p in network.parameters())
        total = total + value.detach().exp() * slopes**2
    return total


@pytest.mark.parametrize("settings", [{}, {"labels_trick": True}, {"fisher": "exact"}])
def test_it_conforms(settings):
    check_learner(METHOD, lr=0.01, lam=10.0, **settings)


@pytest.mark.parametrize("labels_trick", [False, True])
def test_the_fisher_information_is_that_of_single_samples_and_the_full_softmax(labels_trick):
    x, y = data(33)
    learner = learner_of(4, (5,), hidden=(7, 6), batch_size=10, labels_trick=labels_trick)
    taught(learner, x, y, portion=7)
    expected = one_by_one(learner.network, torch.from_numpy(x), torch.from_numpy(y))
    torch.testing.assert_close(learner.importance, expected / 40)  # four batches, as if full


def test_it_does_not_depend_on_how_many_samples_pass_at_a_time(monkeypatch):
    x, y = data(33)
    whole = taught(learner_of(4, (5,)), x, y).importance
    monkeypatch.setattr("pecil.methods.ewc.SAMPLES", 4)
    torch.testing.assert_close(taught(learner_of(4, (5,)), x, y).importance, whole)


@pytest.mark.parametrize("slopes", [2**28, 120_000])  # all at a time, few at a time
def test_with_batch_norm_samples_are_one_by_one_in_training_mode(slopes, monkeypatch):
    monkeypatch.setattr("pecil.methods.ewc.SLOPES", slopes)
    x, y = data(6, (16, 16, 3))
    learner = learner_of(3, (16, 16, 3), width=4, batch_size=3)
    assert slopes // learner.n_parameters in (2, 2**28 // learner.n_parameters)
    learner.begin_task({0: 3, 1: 3})
    learner.learn(x, y)
    network = copy.deepcopy(learner.network)
    expected = one_by_one(network, learner.view(torch.from_numpy(x)), torch.from_numpy(y)) / 6
    learner.end_task()
    torch.testing.assert_close(learner.importance, expected, rtol=1e-3, atol=1e-5)
    after = dict(learner.network.named_buffers())
    for name, value in network.named_buffers():
        torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-5)
    assert learner.network.training


@pytest.mark.parametrize("labels_trick", [False, True])
def test_the_exact_fisher_information_of_softmax_regression(labels_trick):
    """Without hidden layers it is the mean of p_c (1 - p_c) x_j²."""
    x, y = data(33, classes=(0, 2))
    learner = learner_of(4, (5,), hidden=(), fisher="exact", labels_trick=labels_trick)
    taught(learner, x, y)
    inputs = torch.from_numpy(x)
    logits = learner.network(inputs).detach()
    if labels_trick:
        logits[:, [1, 3]] = -torch.inf
    p = logits.softmax(1)
    expected = (p * (1 - p)).T @ inputs**2 / 33
    torch.testing.assert_close(learner.importance[:20].view(4, 5), expected)
    torch.testing.assert_close(learner.importance[20:], (p * (1 - p)).mean(0))


def test_the_exact_one_leaves_batch_norm_alone():
    x, y = data(4, (16, 16, 3))
    learner = learner_of(3, (16, 16, 3), width=2, fisher="exact", batch_size=4)
    learner.begin_task({0: 2, 1: 2})
    learner.learn(x, y)
    network = copy.deepcopy(learner.network).eval()
    inputs = learner.view(torch.from_numpy(x))
    expected = sum(one_by_one(network, inputs, torch.full((4,), c)) for c in range(3)) / 4
    learner.end_task()
    torch.testing.assert_close(learner.importance, expected, rtol=1e-3, atol=1e-6)
    for (name, value), kept in zip(network.named_buffers(), learner.network.buffers(), strict=True):
        assert torch.equal(value, kept), name
    assert learner.network.training


@pytest.mark.parametrize("labels_trick", [False, True])
def test_the_penalty_is_what_it_is_by_hand(labels_trick):
    learner = learner_of(4, (5,), hidden=(3,), lam=7.0, lr=0.05, labels_trick=labels_trick)
    first, second = data(), data(classes=(2, 3), seed=1)
    taught(learner, *first)
    start = [p.detach().clone() for p in learner.network.parameters()]
    importance = learner.importance.split([p.numel() for p in start])
    learner.begin_task({2: 15, 3: 15})
    learner.learn(*second)
    x, y = map(torch.from_numpy, second)
    logits = learner.network(x)
    plain = F.cross_entropy(logits[:, 2:], y - 2) if labels_trick else F.cross_entropy(logits, y)
    penalty = sum(
        (f.view_as(old) * (new - old) ** 2).sum()
        for f, old, new in zip(importance, start, learner.network.parameters(), strict=True)
    )
    assert penalty > 1e-4
    torch.testing.assert_close(learner.loss(x, y), plain + 7 * penalty)


def test_nothing_is_held_in_the_first_task():
    x, y = map(torch.from_numpy, data())
    learner = learner_of(4, (5,), lam=1e9)
    learner.begin_task({0: 15, 1: 15})
    learner.learn(x.numpy(), y.numpy())
    torch.testing.assert_close(learner.loss(x, y), F.cross_entropy(learner.network(x), y))


@pytest.mark.parametrize("gamma", [1.0, 0.25])
def test_tasks_add_up_with_gamma(gamma):
    learner = learner_of(4, (5,), gamma=gamma, lr=0.0)
    first = taught(learner, *data()).importance.clone()
    both = taught(learner, *data(classes=(2, 3))).importance.clone()
    alone = taught(learner_of(4, (5,), lr=0.0), *data(classes=(2, 3))).importance
    torch.testing.assert_close(both, gamma * first + alone)


def test_penalties_of_each_task_add_up_to_one():
    """λ Σ_t F_t (θ - θ_t)² has the slopes that the one around the weighted mean has."""
    learner = learner_of(6, (5,), hidden=(3,), lam=7.0, lr=0.05, anchors="each")
    terms, before = [], torch.zeros_like(learner.importance)
    for label in (0, 2, 4):
        taught(learner, *data(classes=(label, label + 1), seed=label))
        terms.append((learner.importance - before, flat(learner.network.parameters()).detach()))
        before = learner.importance.clone()
    learner.begin_task({0: 15, 1: 15})
    learner.learn(*data(seed=9))
    x, y = map(torch.from_numpy, data(seed=10))
    weights = tuple(learner.network.parameters())
    found = flat(torch.autograd.grad(learner.loss(x, y), weights))
    theta = flat(weights)
    penalty = sum((importance * (theta - then) ** 2).sum() for importance, then in terms)
    loss = F.cross_entropy(learner.network(x), y) + 7 * penalty
    expected = flat(torch.autograd.grad(loss, weights))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    last = learner_of(6, (5,)).anchors
    assert last == "last" and not torch.allclose(learner.anchor, terms[-1][1])


def test_the_first_samples_of_a_task_are_enough():
    x, y = data(33)
    settings = {"hidden": (), "fisher": "exact", "lr": 0.0}
    few = taught(learner_of(4, (5,), fisher_samples=10, **settings), x, y, portion=7)
    alone = taught(learner_of(4, (5,), **settings), x[:10], y[:10])
    torch.testing.assert_close(few.importance, alone.importance)


def test_exact_information_is_that_of_the_classes_seen():
    x, y = data(33, classes=(0, 2))
    learner = learner_of(4, (5,), hidden=(), fisher="exact", active="seen")
    taught(learner, x, y)
    p = learner.network(torch.from_numpy(x)).detach()[:, [0, 2]].softmax(1)
    torch.testing.assert_close(learner.importance[20:][[0, 2]], (p * (1 - p)).mean(0))
    assert not learner.importance[20:][[1, 3]].any()


def test_samples_are_held_until_the_task_ends():
    x, y = data()
    learner = learner_of(4, (5,))
    learner.begin_task({0: 15, 1: 15})
    learner.learn(x, y)
    kept, x[:] = x.copy(), 0.0  # the caller's to use again
    assert np.array_equal(learner.held[0][0], kept)
    learner.end_task()
    assert learner.held == []
    before = learner.importance.clone()
    learner.begin_task({2: 15})
    learner.end_task()  # of a task without samples
    assert torch.equal(learner.importance, before)


def test_a_large_weight_holds_what_matters():
    moved = []
    for lam in (0.0, 1e5):
        learner = taught(learner_of(4, (5,), hidden=(), lam=lam, lr=0.01), *data(300))
        matters = learner.importance > learner.importance.median()
        before = flat(learner.network.parameters()).detach()
        taught(learner, *data(300, classes=(2, 3), seed=1))
        after = flat(learner.network.parameters()).detach()
        moved.append((after - before)[matters].abs().mean())
    assert moved[1] < 0.3 * moved[0]


def test_it_says_what_it_cannot_be():
    with pytest.raises(ValueError, match="fisher must be one of released, exact, not 'diagonal'"):
        learner_of(2, (3,), fisher="diagonal")
    with pytest.raises(ValueError, match="anchors must be one of last, each, not 'all'"):
        learner_of(2, (3,), anchors="all")


def test_digits():
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    learner = learner_of(10, (64,), lam=10.0, labels_trick=True, lr=0.003)
    for task in range(5):
        rows = np.random.default_rng(0).permutation(np.flatnonzero(y // 2 == task))
        taught(learner, x[rows], y[rows])
    assert (learner.scores(x).argmax(1) == y).mean() > 0.35  # 0.2 is the last task alone


def test_the_information_is_that_of_the_first_pass():
    x = np.random.default_rng(0).random((9, 4), np.float32)
    found = []
    for passes in ([9], [9, 9]):
        learner = EWC(2, (4,), lr=0.0, device="cpu")
        learner.begin_task({0: 5 * len(passes), 1: 4 * len(passes)}, passes=passes)
        for _ in passes:
            for part in (slice(6), slice(6, 9)):
                learner.learn(x[part], np.arange(9)[part] % 2)
        assert sum(len(labels) for _, labels in learner.held) == 9
        learner.end_task()
        found.append(learner.importance)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("augment", [True, False])
def test_information_is_that_of_the_views_of_the_stream(augment):
    raw, labels = map(torch.from_numpy, data(3, (16, 16, 3)))
    learner = learner_of(3, (16, 16, 3), width=2, batch_size=3, augment=augment, flip=True)
    network, chance = copy.deepcopy(learner.network), learner.pictures.get_state()
    found = learner.information(raw, labels)
    learner.pictures.set_state(chance)
    inputs = learner.view(raw)
    assert torch.equal(inputs, raw.movedim(-1, 1)) is not augment
    expected = one_by_one(network, inputs, labels) / 3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
