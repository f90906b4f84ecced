"""iCaRL, and what BiC and X-DER share with it."""

import numpy as np
import pytest
import torch
from helpers import accuracy_on_digits, described, taught, watched_steps
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods.buffer import Reservoir
from pecil.methods.ewc import EWC
from pecil.methods.icarl import ICaRL, first_of_each, herded, keep_first
from pecil.methods.recording import Chance
from pecil.methods.xder import XDER


@pytest.mark.parametrize("released", [True, False])
def test_icarl_keeps_to_what_all_methods_keep_to(released):
    check_learner(described(ICaRL, revisits=True), lr=0.01, buffer=20, released=released)


@pytest.mark.parametrize(("split", "released"), [("10/1", True), ("5/2", True), ("5/2", False)])
def test_digits_are_learned(split, released):
    learner = ICaRL(10, (8, 8), lr=0.003, buffer=100, released=released, device="cpu")
    assert accuracy_on_digits(learner, split, passes=2) > 0.7
    assert learner.n_buffered == 100


# ------------------------------------------------------------------------------- herding


def test_herding_picks_what_brute_force_picks():
    random = np.random.default_rng(0)
    for _ in range(20):
        x = random.normal(size=(9, 3)).astype(np.float32)
        chosen = []
        for _ in range(6):
            left = [k for k in range(9) if k not in chosen]
            mean_if = [x[[*chosen, k]].mean(0, dtype=float) for k in left]
            distances = [np.linalg.norm(x.mean(0, dtype=float) - mean) for mean in mean_if]
            chosen.append(left[int(np.argmin(distances))])
        assert herded(torch.from_numpy(x), 6).tolist() == chosen
    assert sorted(herded(torch.from_numpy(x), 99).tolist()) == [*range(9)]
    assert herded(torch.from_numpy(x), 0).tolist() == []


def test_exemplars_are_herded_and_cut_short_from_the_end():
    learner = ICaRL(6, (6,), buffer=12, device="cpu")
    taught(learner, [0, 1])
    before = {name: values.clone() for name, values in learner.buffer.fields.items()}
    assert before["y"].tolist() == [0] * 6 + [1] * 6
    taught(learner, [2, 3], seed=1)
    after = learner.buffer.fields
    assert after["y"].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert torch.equal(after["x"][:3], before["x"][:3])
    assert torch.equal(after["x"][3:6], before["x"][6:9])

    x = np.random.default_rng(1).random((24, 6), np.float32)[::2]  # the samples of class 2
    features = learner.features(torch.from_numpy(x))
    assert torch.equal(after["x"][6:9], torch.from_numpy(x)[herded(features, 3)])


def test_a_class_that_comes_again_has_no_more_than_its_share():
    learner = taught(ICaRL(6, (6,), buffer=12, device="cpu"), [0, 1], [1, 2])
    assert learner.buffer.fields["y"].tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_the_first_rows_of_each_group_are_kept():
    buffer = Reservoir(10, 0, Chance(torch.device("cpu")))
    keep_first(buffer, 3)  # nothing to keep
    groups = torch.tensor([4, 1, 4, 1, 1, 7])
    buffer.add(x=torch.arange(6.0), y=groups)
    keep_first(buffer, 2)
    assert buffer.fields["x"].tolist() == [1, 3, 0, 2, 5]
    keep_first(buffer, 1, but=torch.tensor([4]))
    assert buffer.fields["x"].tolist() == [1, 5] and len(buffer) == 2
    assert first_of_each(groups, 0).tolist() == []


# ------------------------------------------------------------------------- loss and means


def test_old_sigmoids_are_targets():
    learner = taught(ICaRL(5, (6,), buffer=12, device="cpu"), [0, 1])
    learner.begin_task({2: 5, 3: 5})
    with torch.no_grad():
        learner.network.head.weight += 0.1
    raw, labels = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)), [0, 2, 3, 2]
    old, now = learner.old_network(raw).sigmoid(), learner.network(raw).sigmoid()
    expected = []
    for row, label in enumerate(labels):
        for c in range(4):  # class 4 has not come
            target = old[row, c] if c < 2 else torch.tensor(float(label == c))
            p = now[row, c]
            expected.append(-(target * p.log() + (1 - target) * (1 - p).log()))
    loss = learner.loss(raw, torch.tensor(labels))
    torch.testing.assert_close(loss, torch.stack(expected).mean())


def test_means_are_those_of_the_released_code_or_true_ones():
    released = taught(ICaRL(3, (6,), buffer=25, batch_size=10, device="cpu"), [0], n=40)
    rows = released.buffer.fields["x"]
    features = released.network.body(rows).detach()
    parts = [features[:10].mean(0), features[10:20].mean(0), features[20:].mean(0)]
    expected = ((parts[0] + parts[1]) / 2 + parts[2]) / 2
    torch.testing.assert_close(released.class_means()[0], expected)
    assert torch.isinf(released.class_means()[1:]).all()

    exact = taught(ICaRL(3, (6,), buffer=25, released=False, device="cpu"), [0], n=40)
    features = F.normalize(exact.network.body(exact.buffer.fields["x"]).detach())
    mean = F.normalize(features.mean(0, keepdim=True))[0]
    torch.testing.assert_close(exact.class_means()[0], mean)
    x = np.random.default_rng(5).random((3, 6), np.float32)
    distances = (F.normalize(exact.network.body(torch.from_numpy(x))) - mean).square().sum(1)
    np.testing.assert_allclose(exact.scores(x)[:, 0], -distances.detach(), rtol=1e-4)


def test_within_a_task_its_samples_stand_for_exemplars():
    learner = taught(ICaRL(4, (6,), buffer=10, device="cpu"), [0])
    learner.begin_task({1: 6})
    x = np.random.default_rng(3).random((6, 6), np.float32)
    for part in np.split(x, 3):
        learner.learn(part, np.ones(2, int))
    scores = learner.scores(x)
    assert np.isfinite(scores[:, :2]).all() and np.isneginf(scores[:, 2:]).all()
    expected = learner.network.body(torch.from_numpy(x)).mean(0)
    torch.testing.assert_close(learner.means[1], expected.detach())


# ------------------------------------------------------------------- merging and holding


def test_the_buffer_is_merged_into_every_pass_and_counted_by_the_schedule():
    learner = taught(ICaRL(3, (6,), buffer=7, schedule="linear", batch_size=5, device="cpu"), [0])
    batches, rates = watched_steps(learner), []
    x = np.random.default_rng(1).random((11, 6), np.float32)
    learner.begin_task({1: 22}, passes=[11, 11])
    for order in (np.arange(11), np.arange(11)[::-1]):
        learner.learn(x[order], np.ones(11, int))
        rates.append(float(learner.rate))
    assert learner.n_held == 11
    assert [len(labels) for labels in batches] == [5, 5, 5, 3] * 2
    for a_pass in (batches[:4], batches[4:]):
        assert sorted(sum(a_pass, [])) == [0] * 7 + [1] * 11
        assert a_pass[0] != [1] * 5 or a_pass[1] != [1] * 5  # mixed
    np.testing.assert_allclose(rates, [0.001 * 5 / 8, 0.001 * 1 / 8])
    learner.end_task()
    assert learner.held == []


def test_in_portions_the_buffer_comes_with_the_first():
    learner = taught(ICaRL(3, (6,), buffer=7, batch_size=20, device="cpu"), [0])
    batches = watched_steps(learner)
    x = np.random.default_rng(1).random((12, 6), np.float32)
    learner.begin_task({1: 24}, passes=[12, 12])
    for _ in range(2):
        for part in np.split(x, 3):
            learner.learn(part, np.ones(4, int))
    assert [labels.count(0) for labels in batches] == [7, 0, 0, 0, 0, 0]
    assert learner.n_held == 12
    learner.held[0]["x"] += 1
    assert (x < 1).all()  # a copy is held


def test_pictures_are_learned_by_batch_norm_in_its_modes():
    learner = ICaRL(4, (8, 8, 3), width=2, buffer=6, augment=True, flip=True, device="cpu")
    taught(learner, [0, 1], [2, 3], n=6, shape=(8, 8, 3))
    assert learner.network.training and not learner.old_network.training
    x = np.random.default_rng(0).random((5, 8, 8, 3), np.float32)
    np.testing.assert_allclose(learner.scores(x)[:1], learner.scores(x[:1]), rtol=1e-4)
    assert learner.network.training


def test_before_the_first_sample_every_class_is_unknown():
    learner = ICaRL(3, (6,), device="cpu")
    assert np.isneginf(learner.scores(np.zeros((2, 6)))).all()
    assert learner.scores(np.zeros((0, 6))).shape == (0, 3)


@pytest.mark.parametrize("learner_class", [ICaRL, XDER])
def test_a_portion_of_nothing_changes_nothing(learner_class):
    x, y = np.random.default_rng(0).random((8, 6), np.float32), np.zeros(8, int)
    scores = []
    for sizes in ([8], [0, 8, 0]):
        learner = learner_class(3, (6,), buffer=5, device="cpu")
        learner.begin_task({0: 8})
        for n in sizes:
            learner.learn(x[:n], y[:n])
        learner.end_task()
        scores.append(learner.scores(x))
    np.testing.assert_array_equal(*scores)


@pytest.mark.parametrize("learner_class", [ICaRL, XDER])
def test_samples_that_look_alike_are_all_held(learner_class):
    learner = learner_class(3, (6,), buffer=8, batch_size=5, device="cpu")
    x = np.random.default_rng(0).random((20, 6), np.float32)
    x[10] = x[3]
    learner.begin_task({0: 10, 1: 10})
    for part in (slice(10), slice(10, 20)):
        learner.learn(x[part], np.arange(10) % 2)
    np.testing.assert_array_equal(torch.cat([part["x"] for part in learner.held]), x)


def test_a_pass_that_was_cut_short_has_the_buffer_too_and_no_more_steps():
    learner = taught(ICaRL(3, (6,), buffer=5, schedule="linear", batch_size=5, device="cpu"), [0])
    batches = watched_steps(learner)
    x = np.random.default_rng(1).random((20, 6), np.float32)
    learner.begin_task({1: 30}, passes=[20, 10])
    for rows in (np.arange(20), np.arange(10, 20)):
        learner.learn(x[rows], np.ones(len(rows), int))
    assert [len(labels) for labels in batches] == [5] * 8
    assert learner.steps == learner.expected == 8
    assert sum(batches[:5], []).count(0) == 5
    assert sum(batches[5:], []).count(0) > 0
    assert learner.n_held == 20


def test_a_buffer_without_room_for_every_class_is_refused():
    with pytest.raises(ValueError, match="buffer: expected an exemplar of each class .* 3, got 2"):
        ICaRL(3, (6,), buffer=2)


def test_means_and_herding_know_nothing_of_augmented_views():
    learner = ICaRL(2, (8, 8, 3), width=2, augment=True, flip=True, device="cpu")
    raw = torch.rand(5, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    features = learner.features(raw)
    learner.network.eval()
    torch.testing.assert_close(features, learner.network.body(raw.movedim(-1, 1)).detach())


@pytest.mark.parametrize("learner_class", [ICaRL, XDER, EWC])
def test_all_that_comes_in_an_only_pass_is_held_however_much_was_announced(learner_class):
    learner = learner_class(3, (6,), device="cpu")
    x = np.random.default_rng(0).random((20, 6), np.float32)
    learner.begin_task({0: 5})
    for part in (slice(8), slice(8, 20)):
        learner.learn(x[part], np.arange(20)[part] % 2)
    parts = [part["x"] if isinstance(part, dict) else part[0] for part in learner.held]
    np.testing.assert_array_equal(torch.cat(parts), x)
