import pytest
import torch
from helpers import accuracy_on_digits, batches, described, watched_draws, watched_passes
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods import METHODS
from pecil.methods.er import ER


def test_er_keeps_to_what_all_methods_keep_to():
    check_learner(described(ER), lr=0.01)


def test_the_loss_is_one_mean_over_new_samples_and_old_ones():
    learner = ER(4, (4,), buffer=8, device="cpu")
    drawn, passes = watched_draws(learner), watched_passes(learner)
    for x, y in batches(2, 5, 5, 5):
        loss = learner.loss(x, y)
        if drawn[-1]:
            x, y = torch.cat((x, drawn[-1]["x"])), torch.cat((y, drawn[-1]["y"]))
        assert torch.equal(passes[-1], x)
        log_softmax = F.log_softmax(learner.network(x), dim=1)
        torch.testing.assert_close(loss, -log_softmax[torch.arange(len(y)), y].mean())
    assert len(passes) == 2 * 4  # one of the learner's to each of ours
    assert [len(old.get("y", ())) for old in drawn] == [0, 2, 5, 5]  # at most what there is
    assert learner.n_buffered == 8


def test_old_samples_are_drawn_before_the_new_ones_are_added():
    learner = ER(3, (4,), buffer=100, batch_size=5, device="cpu")
    drawn = watched_draws(learner)
    (x, y), *_ = batches(30)
    learner.learn(x.numpy(), y.numpy())
    for step, old in enumerate(drawn[1:], start=1):
        place = (old["x"][:, None] == x).all(2).nonzero()[:, 1]
        assert len(place.unique()) == 5 and (place < 5 * step).all()
        assert torch.equal(y[place], old["y"])
    assert len(drawn) == 6


@pytest.mark.parametrize("augment", [True, False])
def test_replayed_pictures_are_augmented_even_if_the_stream_is_not(augment):
    learner = ER(3, (6, 5, 3), width=2, buffer=10, augment=augment, mean=0.5, device="cpu")
    drawn, passes = watched_draws(learner), watched_passes(learner)
    for x, y in batches(5, 5, shape=(6, 5, 3)):
        learner.loss(x, y)
    plain = torch.cat((x, drawn[1]["x"])).movedim(-1, 1) - 0.5
    assert passes[1].shape == plain.shape
    assert torch.allclose(passes[1][:5], plain[:5]) is not augment
    assert not torch.allclose(passes[1][5:], plain[5:])


def test_the_labels_trick_is_for_new_samples():
    learner = ER(4, (4,), buffer=10, labels_trick=True, device="cpu")
    drawn = watched_draws(learner)
    ((old, of_old),) = batches(5, labels=(0,))
    learner.begin_task({0: 5})
    assert learner.loss(old, of_old).detach() == 0.0  # a softmax of one class
    ((x, y),) = batches(5, labels=(1, 2), seed=1)
    learner.begin_task({1: 3, 2: 2})
    loss = learner.loss(x, y)
    new = F.cross_entropy(learner.network(x)[:, 1:3], y - 1)
    replayed = F.cross_entropy(learner.network(drawn[1]["x"]), drawn[1]["y"])
    torch.testing.assert_close(loss, (new + replayed) / 2)


@pytest.mark.parametrize("split", ["10/1", "5/2"])
def test_er_learns_digits(split):
    learner = ER(10, (8, 8), buffer=100, lr=0.003, device="cpu")
    assert accuracy_on_digits(learner, split) > 0.5  # fine-tuning: 0.1 and 0.2


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("name", ["der", "derpp", "er_ace"])
def test_replayed_pictures_are_augmented_as_a_batch_of_their_own_too(name, augment):

    learner = METHODS[name].learner(3, (6, 5, 3), width=2, buffer=10, augment=augment, device="cpu")
    ((x, y),) = batches(5, shape=(6, 5, 3))
    learner.loss(x, y)
    learner.end_task()  # from now on ER-ACE replays
    drawn, passes = watched_draws(learner), watched_passes(learner)
    learner.loss(x, y)
    for samples, inputs, changed in ((x, passes[0], augment), (drawn[0]["x"], passes[1], True)):
        plain = samples.movedim(-1, 1)
        assert inputs.shape == plain.shape
        assert torch.allclose(inputs, plain) is not changed
