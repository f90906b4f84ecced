import copy

import pytest
import torch
from helpers import accuracy_on_digits, batches, described, watched_draws, watched_passes
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods.der import DER, DERpp

BOTH = pytest.mark.parametrize("learner_class", [DER, DERpp])


@BOTH
def test_der_keeps_to_what_all_methods_keep_to(learner_class):
    check_learner(described(learner_class), lr=0.01)


@BOTH
def test_the_loss_is_its_equation(learner_class):
    weights = {"alpha": 0.3} | ({"beta": 0.7} if learner_class is DERpp else {})
    learner = learner_class(4, (4,), buffer=8, device="cpu", **weights)
    drawn = watched_draws(learner)
    for x, y in batches(2, 5, 5, 5):
        loss = learner.loss(x, y)
        expected = F.cross_entropy(learner.network(x), y)
        if old := drawn[-1]:
            again = learner.network(old["x"])
            expected += 0.3 * ((again - old["z"]) ** 2).sum() / (len(again) * 4)
            if learner_class is DERpp:
                expected += 0.7 * F.cross_entropy(again, old["y"])
        torch.testing.assert_close(loss, expected)
        for values in learner.network.parameters():
            values.data += 0.1  # so that it is not what it said before
    assert [len(old.get("y", ())) for old in drawn] == [0, 2, 5, 5]  # a single draw a step


@pytest.mark.parametrize("shape", [(4,), (6, 5, 3)])
def test_logits_are_kept_as_they_were_before_the_step(shape):
    learner = DER(3, shape, width=2, buffer=20, batch_size=5, lr=0.1, device="cpu")
    expected = []
    for x, y in batches(5, 5, shape=shape):
        network = copy.deepcopy(learner.network)  # in training mode
        expected.append(network(learner.view(x)))
        learner.step(x, y)
        after = learner.network(learner.view(x))
        assert (after - expected[-1]).abs().max() > 1e-3
    torch.testing.assert_close(learner.buffer.fields["z"], torch.cat(expected).detach())


def test_replayed_pictures_are_a_batch_of_their_own():
    learner = DERpp(3, (6, 5, 3), width=2, buffer=20, device="cpu")
    passes = watched_passes(learner)
    for x, y in batches(5, 5, shape=(6, 5, 3)):
        learner.loss(x, y)
    assert [len(inputs) for inputs in passes] == [5, 5, 5]
    torch.testing.assert_close(passes[1], learner.view(x))


def test_a_large_alpha_leaves_what_was_said_in_place():
    kept = []
    for alpha in (0.0, 100.0):
        learner = DER(2, (4,), buffer=10, alpha=alpha, lr=0.01, device="cpu")
        ((x, y),) = batches(10, labels=(0,))
        learner.step(x, y)
        said = learner.buffer.fields["z"].clone()
        learner.buffer.add = lambda **rows: None
        ((new, of_new),) = batches(10, labels=(1,), seed=1)
        for _ in range(100):
            learner.step(new, of_new)
        kept.append((learner.network(x) - said).norm().detach() / said.norm())
    assert kept[0] > 1 and kept[1] < 0.3


@pytest.mark.parametrize(
    ("learner_class", "split"),
    [(DER, "5/2"), (DERpp, "5/2"), (DERpp, "10/1")],  # DER's logits need more than 143 samples
)
def test_der_learns_digits(learner_class, split):
    learner = learner_class(10, (8, 8), buffer=100, lr=0.01, device="cpu")
    assert accuracy_on_digits(learner, split) > 0.55  # fine-tuning: 0.2 and 0.1
