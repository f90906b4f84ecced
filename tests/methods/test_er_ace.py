import numpy as np
import pytest
import torch
from helpers import accuracy_on_digits, batches, described, watched_draws, watched_passes
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods.er_ace import ERACE


def after_a_task(labels=(0, 1), shape=(4,), **settings):
    """Return a learner of five classes at the end of its first task."""
    learner = ERACE(5, shape, buffer=20, batch_size=6, device="cpu", **settings)
    ((x, y),) = batches(6, labels=labels, shape=shape)
    learner.learn(x.numpy(), y.numpy())
    learner.end_task()
    return learner


def test_er_ace_keeps_to_what_all_methods_keep_to():
    check_learner(described(ERACE), lr=0.01)


def test_the_first_task_is_learned_without_replay():
    learner = ERACE(5, (4,), buffer=20, device="cpu")
    drawn = watched_draws(learner)
    for x, y in batches(6, 6, labels=(0, 1)):
        loss = learner.loss(x, y)
        torch.testing.assert_close(loss, F.cross_entropy(learner.network(x), y))
    assert not drawn and learner.n_buffered == 12
    learner.end_task()
    learner.loss(x, y)
    assert len(drawn) == 1


def test_the_scores_of_old_classes_get_no_gradient_from_new_samples():
    learner = after_a_task()
    seen = []
    learner.network.register_forward_hook(lambda _, given, logits: seen.append(logits))
    ((x, y),) = batches(6, labels=(2,), seed=1)
    loss = learner.loss(x, y)
    (grad,) = torch.autograd.grad(loss, seen)
    new, old = grad[:6], grad[6:]
    assert (new[:, :2] == 0).all()
    assert (new[:, 2] < 0).all() and (new[:, 3:] > 0).all()  # to come: still in the softmax
    assert len(old) == 6 and (old != 0).all()


def test_the_loss_is_the_sum_of_two_means():
    learner = after_a_task()
    drawn = watched_draws(learner)
    for n, labels, kept in (
        (6, (2,), [2, 3, 4]),
        (4, (3,), [3, 4]),  # 2 has come and is absent: left alone
        (5, (2, 3), [2, 3, 4]),
        (3, (0,), [0, 4]),
    ):
        ((x, y),) = batches(n, labels=labels, seed=n)
        loss = learner.loss(x, y)
        old = drawn[-1]
        places = torch.searchsorted(torch.tensor(kept), y)
        new = F.cross_entropy(learner.network(x)[:, kept], places)
        replayed = F.cross_entropy(learner.network(old["x"]), old["y"])
        torch.testing.assert_close(loss, new + replayed)
        assert len(old["y"]) == len(y)


def test_what_is_handed_over_at_once_is_met_batch_by_batch():
    scores = []
    for portion in (12, 6):
        learner = after_a_task(lr=0.01)
        x, y = (torch.cat(part).numpy() for part in zip(*batches(6, 6, labels=(2,)), strict=True))
        y[6:] = 3  # not seen yet when the first batch is learned
        for start in range(0, 12, portion):
            learner.learn(x[start : start + portion], y[start : start + portion])
        scores.append(learner.scores(x))
    np.testing.assert_array_equal(*scores)


def test_replayed_pictures_are_a_batch_of_their_own():
    learner = after_a_task(shape=(6, 5, 3), width=2)
    passes = watched_passes(learner)
    ((x, y),) = batches(6, labels=(2,), shape=(6, 5, 3), seed=1)
    learner.loss(x, y)
    assert [len(inputs) for inputs in passes] == [6, 6]
    torch.testing.assert_close(passes[0], learner.view(x))


@pytest.mark.parametrize("split", ["10/1", "5/2"])
def test_er_ace_learns_digits(split):
    learner = ERACE(10, (8, 8), buffer=100, lr=0.003, device="cpu")
    assert accuracy_on_digits(learner, split) > 0.55


def test_as_its_authors_have_it_only_classes_of_the_batch_and_classes_seen_compete():
    learner = ERACE(5, (4,), buffer=20, batch_size=6, released=False, device="cpu")
    drawn = watched_draws(learner)
    for labels, seen in (((0, 1), ()), ((1,), (0, 1)), ((2,), (0, 1))):
        ((x, y),) = batches(6, labels=labels, seed=len(drawn))
        logits, own = learner.network(x), sorted(labels)
        expected = F.cross_entropy(logits[:, own], y - own[0])
        loss = learner.loss(x, y)
        if seen:  # there is something to replay, in the first task too
            old = drawn[-1]
            expected = expected + F.cross_entropy(learner.network(old["x"])[:, seen], old["y"])
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("augment_replayed", [True, False])
def test_replayed_pictures_are_augmented_or_not(augment_replayed):
    learner = ERACE(3, (16, 16, 3), width=2, augment_replayed=augment_replayed, device="cpu")
    chance = torch.Generator().manual_seed(0)
    raw = torch.randint(256, (4, 16, 16, 3), dtype=torch.uint8, generator=chance)
    assert torch.equal(learner.replayed(raw), learner.view(raw)) != augment_replayed
