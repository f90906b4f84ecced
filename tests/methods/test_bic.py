import numpy as np
import pytest
import torch
from helpers import accuracy_on_digits, described, taught, watched_passes, watched_steps
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods.bic import Bias, BiC


@pytest.mark.parametrize("released", [True, False])
def test_bic_keeps_to_what_all_methods_keep_to(released):
    method = described(BiC, revisits=True)
    check_learner(method, lr=0.01, buffer=20, bias_epochs=20, released=released)


@pytest.mark.parametrize(("split", "released"), [("10/1", True), ("5/2", True), ("5/2", False)])
def test_digits_are_learned(split, released):
    learner = BiC(10, (8, 8), lr=0.003, buffer=200, bias_epochs=50, released=released, device="cpu")
    assert accuracy_on_digits(learner, split, passes=2) > 0.65
    assert 180 < learner.n_buffered <= 200


@pytest.mark.parametrize("aside", [-0.1, 1.0])
def test_a_share_is_set_aside(aside):
    with pytest.raises(ValueError, match=f"aside: expected a share .* got {aside}"):
        BiC(3, (4,), aside=aside)


def test_two_numbers_move_the_new_classes_only():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    bias = Bias(torch.tensor([False, False, True, True]), torch.tensor([0.5, -1.0]))
    assert bias(logits).tolist() == [[1.0, 2.0, 0.5, 1.0]]

    learner = taught(BiC(5, (6,), buffer=60, lr=0.01, device="cpu"), [0, 1], [2, 3], n=60)
    x = np.random.default_rng(9).random((8, 6), np.float32)
    plain = learner.network(torch.from_numpy(x)).detach().numpy()
    scores, (alpha, beta) = learner.scores(x), learner.bias.values.tolist()
    np.testing.assert_array_equal(scores[:, :2], plain[:, :2])
    np.testing.assert_allclose(scores[:, 2:4], alpha * plain[:, 2:4] + beta, rtol=1e-5)
    assert (alpha, beta) != (1, 0)
    learner.begin_task({4: 5})
    np.testing.assert_array_equal(learner.scores(x)[:, :4], plain[:, :4])


def test_the_bias_layer_lowers_the_loss_of_what_was_set_aside_and_the_network_stands_still():
    learner = BiC(4, (4,), hidden=(), buffer=5, bias_epochs=300, device="cpu")
    learner.begin_task({0: 1, 1: 1})
    learner.seen[:2] = True
    learner.begin_task({2: 1, 3: 1})
    x, y = 3 * torch.eye(4).repeat(10, 1), torch.arange(4).repeat(10)
    with torch.no_grad():
        learner.network.head.weight.copy_(torch.eye(4))
        learner.network.head.bias.copy_(torch.tensor([0, 0, 2.0, 2.0]))  # too much for the new
    before = [p.clone() for p in learner.network.parameters()]
    alpha, beta = learner.fitted(x, y).tolist()
    assert alpha != 1 and beta < -0.3
    for now, then in zip(learner.network.parameters(), before, strict=True):
        assert torch.equal(now, then)
    assert learner.network.training
    logits = learner.network(x)
    corrected = Bias(learner.current, torch.tensor([alpha, beta]))(logits)
    assert F.cross_entropy(corrected, y) < F.cross_entropy(logits, y) - 0.02


@pytest.mark.parametrize(("released", "lam"), [(True, 1 / 3), (False, 4 / 6)])
def test_the_loss_is_its_equation(released, lam):
    learner = BiC(8, (6,), buffer=60, lr=0.01, released=released, temperature=3.0, device="cpu")
    taught(learner, [0, 1], [2, 3], n=60)
    learner.begin_task({4: 5, 5: 5})
    assert learner.lam == pytest.approx(lam)
    with torch.no_grad():
        learner.network.head.weight += torch.linspace(0, 1, 8).unsqueeze(1)
    raw = torch.rand(7, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3, 4, 5, 5])
    logits, before = learner.network(raw), learner.old_network(raw)
    alpha, beta = learner.old_bias.values
    before = torch.cat([before[:, :2], alpha * before[:, 2:4] + beta], 1)
    soft = (before / 3).softmax(1)
    distilled = -(soft * (logits[:, :4] / 3).log_softmax(1)).sum(1).mean()
    expected = (1 - lam) * F.cross_entropy(logits[:, :6], labels) + lam * 9 * distilled
    torch.testing.assert_close(learner.loss(raw, labels), expected)


def test_the_first_task_is_plain_cross_entropy_over_its_classes():
    learner = BiC(4, (6,), device="cpu")
    learner.begin_task({0: 2, 1: 2})
    raw, labels = (
        torch.from_numpy(np.random.default_rng(0).random((4, 6), np.float32)),
        torch.tensor([0, 1, 1, 0]),
    )
    expected = F.cross_entropy(learner.network(raw)[:, :2], labels)
    torch.testing.assert_close(learner.loss(raw, labels), expected)


def test_as_many_of_the_task_as_of_the_buffer_are_set_aside_and_never_trained_on():
    learner = taught(BiC(4, (6,), buffer=200, schedule="linear", device="cpu"), [0], n=300)
    batches = watched_steps(learner)
    x = np.random.default_rng(1).random((300, 6), np.float32)
    learner.begin_task({1: 600}, passes=[300, 300])
    for order in (np.arange(300), np.arange(300)[::-1]):
        learner.learn(x[order], np.ones(300, int))
    train, validate = learner.parted()
    n = int((validate["y"] == 0).sum())
    assert 8 < n < 35 and (validate["y"] == 1).sum() == n  # 20 of 200 on the average
    assert sorted(sum(batches, [])) == [0] * 2 * (200 - n) + [1] * 2 * (300 - n)
    assert learner.expected == learner.steps == 2 * -(-(500 - 2 * n) // 10)
    together = torch.cat([train["x"], validate["x"]])
    assert len(together.unique(dim=0)) == len(together) == 500


def test_the_buffer_has_a_share_for_each_task_or_for_each_class():
    released = taught(BiC(6, (6,), buffer=30, bias_epochs=2, device="cpu"), [0, 1], [2, 3], [4, 5])
    kept = released.buffer.fields
    assert kept["task"].tolist() == [1] * 10 + [2] * 10 + [3] * 10
    assert (kept["y"][:10] < 2).all() and (kept["y"][20:] < 4).any()  # old ones among the new

    exact = BiC(6, (6,), buffer=30, bias_epochs=2, released=False, device="cpu")
    taught(exact, [0, 1], [2, 3], [4, 5])
    assert exact.buffer.fields["y"].bincount().tolist() == [5] * 6


def test_the_bias_layer_is_fitted_by_adam_on_cross_entropy():
    learner = taught(BiC(7, (6,), buffer=20, bias_epochs=3, device="cpu"), [0, 1, 2])
    learner.begin_task({3: 1, 4: 1})
    x = torch.rand(25, 6, generator=torch.Generator().manual_seed(0))
    y = torch.arange(25) % 5
    chance = torch.Generator()
    chance.set_state(learner.buffer.generator.get_state())
    alpha, beta = (torch.tensor(value, requires_grad=True) for value in (1.0, 0.0))
    optimizer = torch.optim.Adam([alpha, beta], lr=0.001)
    logits = learner.network(x).detach()
    for _ in range(3):
        for rows in torch.randperm(25, generator=chance).split(10):
            optimizer.zero_grad()
            moved = torch.cat([logits[rows, :3], alpha * logits[rows, 3:5] + beta], 1)
            F.cross_entropy(moved, y[rows]).backward()
            optimizer.step()
    torch.testing.assert_close(learner.fitted(x, y), torch.stack([alpha, beta]).detach())


@pytest.mark.parametrize("augment", [True, False])
def test_the_bias_layer_is_fitted_in_evaluation_mode_to_views_as_the_stream_has_them(augment):

    settings = {"width": 2, "buffer": 5, "bias_epochs": 3, "augment": augment}
    learner = BiC(3, (8, 8, 3), **settings, device="cpu")
    learner.begin_task({0: 3, 1: 3})
    before = {name: values.clone() for name, values in learner.network.state_dict().items()}
    passes, modes = watched_passes(learner), []
    learner.network.body.register_forward_hook(lambda body, *_: modes.append(body.training))
    raw = torch.rand(6, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    learner.fitted(raw, torch.arange(6) % 2)
    assert modes == [False] * (3 if augment else 1) and learner.network.training
    for name, values in learner.network.state_dict().items():
        assert torch.equal(values, before[name]), name
    plain = raw.movedim(-1, 1)
    assert not any(torch.equal(inputs, plain) == augment for inputs in passes)
    assert not augment or not torch.equal(passes[0], passes[1])  # other views for every epoch
