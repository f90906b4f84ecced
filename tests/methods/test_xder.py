import numpy as np
import pytest
import torch
from helpers import accuracy_on_digits, described, taught
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods.xder import (
    XDER,
    as_bytes,
    contrastive,
    counting,
    norms,
    recoloured,
    tamed,
    untracked,
    zoomed,
)


def test_xder_keeps_to_what_all_methods_keep_to():
    check_learner(described(XDER, revisits=True), lr=0.01, buffer=20)


@pytest.mark.parametrize("split", ["10/1", "5/2"])
def test_digits_are_learned(split):
    learner = XDER(10, (8, 8), lr=0.003, buffer=100, device="cpu")
    assert accuracy_on_digits(learner, split, passes=2) > 0.6
    assert learner.n_buffered == 100


# --------------------------------------------------------------------------------- terms


@pytest.fixture
def learner():
    """Return a learner at the beginning of the second of four tasks, two classes each."""
    learner = XDER(8, (6,), buffer=9, batch_size=5, lr=0.05, m=0.4, device="cpu")
    taught(learner, [0, 1])
    learner.begin_task({2: 5, 3: 5})
    with torch.no_grad():
        learner.network.head.weight += torch.linspace(-0.1, 0.1, 8).unsqueeze(1)
    return learner


@pytest.fixture
def batch():
    raw = torch.rand(5, 6, generator=torch.Generator().manual_seed(1))
    return raw, torch.tensor([2, 3, 3, 2, 3])


def drawn(learner):
    """Return the rows of the buffer that are drawn, always the same from now on."""
    learner.buffer.pick = lambda n: torch.arange(n)
    return {name: values[:5].clone() for name, values in learner.buffer.fields.items()}


def test_the_present_head_learns_the_stream(learner, batch):
    raw, labels = batch
    expected = F.cross_entropy(learner.network(raw)[:, 2:4], labels - 2)
    torch.testing.assert_close(learner.terms(raw, labels)["present"], expected)


def test_all_logits_are_replayed_and_past_heads_learn_labels(learner, batch):
    old = drawn(learner)
    terms, now = learner.terms(*batch), learner.network(old["x"])
    torch.testing.assert_close(terms["logits"], (now - old["z"]).square().sum() / (5 * 8))
    torch.testing.assert_close(terms["past"], F.cross_entropy(now[:, :2], old["y"]))


def hinged(bad, good, m):
    excess = [b + m - g for b, g in zip(bad.tolist(), good.tolist(), strict=True)]
    broken = [e for e in excess if e > 0]
    return sum(broken) / max(1, len(broken))


def test_past_and_future_heads_are_bounded(learner, batch):
    raw, labels = batch
    old = drawn(learner)
    past_bound, future_bound = [], []
    for m in (0.4, -0.05, -9.0):  # broken by all, by some, by none
        learner.m = m
        found = learner.terms(raw, labels)["bounds"].item()
        outputs, replayed = learner.network(raw), learner.network(old["x"])
        shares = outputs[:, :4].softmax(1)
        past_bound.append(hinged(shares[:, :2].amax(1), shares[:, 2:].amax(1), m))
        future = torch.cat([outputs, replayed])[:, 4:].amax(1)
        own = torch.cat([outputs[:, 2:4], replayed[:, :2]]).amax(1)
        future_bound.append(hinged(future, own, m))
        assert found == pytest.approx(past_bound[-1] + future_bound[-1], rel=1e-5)
    assert past_bound[0] > 0 and future_bound[0] > 0 and past_bound[2] == future_bound[2] == 0


def test_the_past_is_bounded_by_raising_the_present(learner, batch):
    outputs = learner.network(batch[0]).detach().requires_grad_()
    shares = outputs[:, :4].softmax(1)
    expected = (shares[:, :2].amax(1).detach() + 0.4 - shares[:, 2:].amax(1)).relu()
    (wanted,) = torch.autograd.grad(expected.sum() / (expected > 0).sum(), outputs)
    (found,) = torch.autograd.grad(learner.past_bound(outputs), outputs)
    torch.testing.assert_close(found, wanted)


def test_the_contrastive_loss_is_its_equation():
    chance = torch.Generator().manual_seed(0)
    heads = F.normalize(torch.randn(2, 6, 3, generator=chance), dim=2)
    labels = torch.tensor([0, 1, 1, 0, 1, 1])
    expected = []
    for head in heads:
        for i in range(6):
            alike = [j for j in range(6) if j != i and labels[j] == labels[i]]
            all_others = sum(torch.exp(head[i] @ head[j] / 5) for j in range(6) if j != i)
            logs = [head[i] @ head[j] / 5 - all_others.log() for j in alike]
            expected.append(-sum(logs) / len(logs))
    torch.testing.assert_close(contrastive(heads, labels, 5.0), torch.stack(expected).mean())


def test_future_heads_contrast_views_of_stream_and_buffer(learner, batch):
    raw, labels = batch
    old = drawn(learner)
    both = torch.cat([raw, old["x"]]).repeat(2, 1)  # vectors have but one view
    outputs = learner.network(both)
    heads = torch.stack([F.normalize(outputs[:, 4:6]), F.normalize(outputs[:, 6:8])])
    expected = contrastive(heads, torch.cat([labels, old["y"]]).repeat(2), 5.0)
    torch.testing.assert_close(learner.terms(raw, labels)["future"], expected)


def test_the_loss_weighs_its_terms(batch):
    weights = {"alpha": 2.0, "beta": 3.0, "lam": 5.0, "eta": 7.0}
    learner = taught(XDER(8, (6,), buffer=5, batch_size=5, device="cpu", **weights), [0, 1])
    learner.begin_task({2: 5, 3: 5})
    learner.rewrite = lambda places, outputs: None
    terms = learner.terms(*batch)
    assert set(terms) == {"present", "logits", "past", "future", "bounds"}
    named = [terms[name] for name in ("present", "logits", "past", "future", "bounds")]
    expected = sum(weight * term for weight, term in zip((1, 2, 3, 5, 7), named, strict=True))
    torch.testing.assert_close(learner.loss(*batch), expected)


def test_the_first_and_the_last_task_have_fewer_terms(batch):
    learner = XDER(4, (6,), buffer=5, device="cpu")
    learner.begin_task({0: 5, 1: 5})
    assert set(learner.terms(batch[0], batch[1] - 2)) == {"present", "future", "bounds"}
    taught(learner, [0, 1])
    learner.begin_task({2: 5, 3: 5})
    assert set(learner.terms(*batch)) == {"present", "logits", "past", "bounds"}


def test_with_one_class_a_task_only_the_bounds_teach_the_first():
    learner = XDER(4, (6,), buffer=5, device="cpu")
    learner.begin_task({0: 5})
    raw, labels = torch.eye(5, 6), torch.zeros(5, dtype=torch.long)
    terms = learner.terms(raw, labels)
    assert set(terms) == {"present", "bounds"} and terms["present"] == 0


# ------------------------------------------------------------------------------ memories


def test_memories_are_rewritten_in_later_heads_alone(learner):
    before = learner.buffer.fields["z"].clone()
    outputs = 10 * torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    labels = learner.buffer.fields["y"]
    learner.rewrite(torch.arange(9), outputs)  # drawn for the first time: all are
    after = learner.buffer.fields["z"]
    assert torch.equal(after[:, :2], before[:, :2])
    for row in range(9):
        true, top = before[row, labels[row]], outputs[row, 2:].max()
        scale = 0.85 * true / top if top > true else 1.0
        torch.testing.assert_close(after[row, 2:], scale * outputs[row, 2:])
    assert (learner.buffer.fields["visits"] == 1).all()


def test_memories_are_rewritten_the_seldomer_the_oftener_they_were_drawn():
    learner = taught(XDER(4, (6,), buffer=800, device="cpu"), [0, 1], n=400)
    learner.begin_task({2: 5, 3: 5})
    shares = []
    for k in range(4):
        before = learner.buffer.fields["z"].clone()
        learner.rewrite(torch.arange(800), torch.full((800, 4), -100.0 - k))
        shares.append((learner.buffer.fields["z"] != before).any(1).float().mean().item())
    np.testing.assert_allclose(shares, [1, 1 / 2, 1 / 3, 1 / 4], atol=0.06)


def test_the_task_s_end_fills_the_buffer_class_by_class():
    learner = taught(XDER(6, (6,), buffer=11, batch_size=4, device="cpu"), [0, 1])
    first = {name: values.clone() for name, values in learner.buffer.fields.items()}
    assert sorted(first["y"].bincount().tolist()) == [5, 6]
    learner.begin_task({2: 12, 3: 12})
    random = np.random.default_rng(4)
    x, y = random.random((24, 6), np.float32), np.arange(24) % 2 + 2
    learner.learn(x, y)
    assert learner.n_held == 24 and (learner.buffer.fields["visits"] > 0).any()
    before = learner.buffer.fields["z"].clone()
    learner.end_task()
    kept = learner.buffer.fields
    counts = kept["y"].bincount().tolist()
    assert counts[:2] == [2, 2] and sorted(counts[2:]) == [3, 4] and learner.held == []
    assert (kept["visits"] == 0).all()
    for label in (0, 1):  # the first ones stay, their newer logits are those of the network
        own = kept["y"] == label
        assert torch.equal(kept["x"][own], first["x"][first["y"] == label][:2])
        past = before[first["y"] == label][:2]
        new = learner.network(kept["x"][own]).detach()
        expected = tamed(past, new, kept["y"][own], torch.arange(6) > 1, 0.85)
        torch.testing.assert_close(kept["z"][own], expected)
    new = kept["y"] > 1
    logits = learner.network(kept["x"][new]).detach()
    expected = tamed(logits, logits, kept["y"][new], torch.arange(6) < 2, 0.85)
    torch.testing.assert_close(kept["z"][new], expected)


def test_memories_are_rewritten_in_the_company_of_all_samples_of_the_buffer():
    learner = taught(XDER(6, (6,), buffer=60, batch_size=4, device="cpu"), [0, 1], n=30)
    learner.begin_task({2: 30, 3: 30})
    x, y = np.random.default_rng(4).random((60, 6), np.float32), np.arange(60) % 2 + 2
    learner.learn(x, y)
    asked, outputs = [], learner.outputs
    learner.outputs = lambda inputs: asked.append(inputs) or outputs(inputs)
    learner.end_task()
    kept, seen = learner.buffer.fields, asked[-1]
    order = (seen.unsqueeze(1) == kept["x"]).all(2).float().argmax(1)
    assert sorted(order.tolist()) == list(range(60))
    batches = kept["y"][order].split(4)
    assert sum(len(batch.unique()) > 1 for batch in batches) > 10  # not class after class


# --------------------------------------------------------------------------------- views


def test_views_are_parts_of_pictures():
    chance = torch.Generator().manual_seed(0)
    ramp = torch.linspace(0, 1, 16).expand(400, 1, 16, 16)  # from left to right
    views = zoomed(ramp, torch.rand(5, 400, generator=chance))
    assert views.shape == ramp.shape and views.min() >= 0 and views.max() <= 1
    rows = views[:, 0, 0]
    assert torch.allclose(views[:, 0], rows.unsqueeze(1).expand(-1, 16, -1), atol=1e-5)
    rising = rows[:, -1] > rows[:, 0]
    assert 0.4 < rising.float().mean() < 0.6
    widths = (rows[:, -1] - rows[:, 0]).abs()
    assert widths.min() < 0.5 and widths.max() > 0.9


def test_colours_change_and_grey_stays_grey():
    chance = torch.Generator().manual_seed(0)
    grey = torch.rand(300, 1, 4, 4, generator=chance).expand(-1, 3, -1, -1)
    changed = recoloured(grey, torch.rand(6, 300, generator=chance))
    torch.testing.assert_close(changed, changed[:, :1].expand(-1, 3, -1, -1), atol=2e-3, rtol=0)
    same = ((changed - grey).abs().amax((1, 2, 3)) < 1e-3).float().mean()
    assert 0.1 < same < 0.3
    pictures = torch.rand(300, 3, 4, 4, generator=chance)
    colours = recoloured(pictures, torch.rand(6, 300, generator=chance))
    lost = ((colours - colours.mean(1, keepdim=True)).abs().amax((1, 2, 3)) < 5e-3).float().mean()
    assert 0.1 < lost < 0.3


def test_pictures_of_bytes_are_learned_and_views_leave_batch_norm_alone():
    learner = XDER(6, (8, 8, 3), width=2, buffer=6, batch_size=4, device="cpu")
    x = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    for first in (0, 2):
        learner.begin_task({first: 6, first + 1: 6})
        learner.learn(x, np.arange(12) % 2 + first)
        learner.end_task()
    assert np.isfinite(learner.scores(x)[:, :4]).all()
    views = learner.varied(torch.from_numpy(x))
    assert views.shape == x.shape and views.min() >= 0 and views.max() <= 1
    norm = learner.network.body[1]
    before = norm.running_mean.clone()
    with untracked(learner.network):
        learner.network(torch.ones(4, 3, 8, 8))
    assert torch.equal(norm.running_mean, before)
    learner.network(torch.ones(4, 3, 8, 8))
    assert not torch.equal(norm.running_mean, before)


@pytest.mark.parametrize("wrapped", [True, False])
def test_views_of_replayed_pictures_are_of_what_the_network_saw_or_of_the_samples(wrapped):
    learner = XDER(
        *(6, (8, 8, 3)), width=2, buffer=6, batch_size=4, mean=0.5, std=0.2, wrapped=wrapped
    )
    x = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    learner.begin_task({0: 6, 1: 6})
    learner.learn(x, np.arange(12) % 2)
    learner.end_task()
    learner.begin_task({2: 6, 3: 6})
    samples, contrast = [], learner.contrast
    learner.contrast = lambda raw, labels: samples.append(raw) or contrast(raw, labels)
    inputs, replayed = [], learner.replayed
    learner.replayed = lambda raw: inputs.append(replayed(raw)) or inputs[-1]
    learner.terms(torch.from_numpy(x[:4]), torch.tensor([2, 3, 2, 3]))
    own, old = samples[0].split([4, 4])
    assert torch.equal(own, torch.from_numpy(x[:4]))
    numbers = (inputs[0] * 255).trunc().movedim(1, -1).numpy()
    assert numbers.min() < 0 and numbers.max() > 255
    assert np.array_equal(old.numpy(), np.mod(numbers, 256).astype(np.uint8)) == wrapped
    known = (old.unsqueeze(1) == learner.buffer.fields["x"]).flatten(2).all(2).any(1)
    assert bool(known.all()) != wrapped


def test_bytes_go_round():
    assert as_bytes(torch.tensor([[[[2.5]], [[-1.0]], [[1.0]]]])).tolist() == [[[[125, 1, 255]]]]


def test_replayed_samples_count_twice_in_the_averages_of_batch_norm():
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    once, again = (XDER(6, (8, 8, 3), width=2, device="cpu").network for _ in range(2))
    with counting(once, 2):
        once(x)
    again(x)
    again(x)
    for name, value in once.named_buffers():
        if value.is_floating_point():
            torch.testing.assert_close(value, again.get_buffer(name))
    assert once.body[1].momentum == 0.1


@pytest.mark.parametrize("passes", [1, 2])
def test_steps_differ_in_the_averages_of_batch_norm_alone(passes):
    x = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    learners = []
    for number in (passes, 3):
        learner = XDER(6, (8, 8, 3), width=2, buffer=6, batch_size=4, passes=number, device="cpu")
        for first in (0, 2):
            learner.begin_task({first: 6, first + 1: 6})
            learner.learn(x, np.arange(12) % 2 + first)
            learner.end_task()
        learners.append(learner)
    one, other = (learner.network for learner in learners)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.body[1].running_mean, other.body[1].running_mean)


# ------------------------------------------------------- pictures at the ends of their ranges


def of_pictures(**settings):
    """Return a learner of pictures at the end of the second of three tasks."""
    learner = XDER(6, (8, 8, 3), width=2, buffer=6, batch_size=4, device="cpu", **settings)
    taught(learner, [0, 1], n=3, shape=(8, 8, 3))
    learner.begin_task({2: 3, 3: 3})
    learner.learn(np.random.default_rng(1).random((6, 8, 8, 3), np.float32), np.arange(6) % 2 + 2)
    return learner


def test_batch_norm_remembers_neither_contrasted_views_nor_the_end_of_a_task():

    learner = of_pictures()
    before = {name: values.clone() for name, values in learner.network.state_dict().items()}
    raw = torch.rand(4, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    learner.contrast(raw, torch.tensor([2, 3, 0, 1]))
    learner.outputs(learner.view(raw))
    learner.end_task()
    for name, values in learner.network.state_dict().items():
        assert torch.equal(values, before[name]), name
    assert all(layer.track_running_stats for layer in norms(learner.network))


@pytest.mark.parametrize(("augment", "augment_replayed"), [(False, True), (True, False)])
def test_when_a_task_ends_new_samples_are_views_of_the_stream_and_old_ones_replayed(
    augment, augment_replayed
):
    learner = of_pictures(augment=augment, augment_replayed=augment_replayed)
    asked, outputs = [], learner.outputs
    learner.outputs = lambda inputs: asked.append(inputs) or outputs(inputs)
    learner.end_task()
    samples = learner.buffer.fields["x"].movedim(-1, 1).unsqueeze(1)
    plain = [bool((samples == inputs).flatten(2).all(2).any(0).all()) for inputs in asked]
    assert plain == [not augment, not augment_replayed]


@pytest.mark.parametrize("u", [0.0, 0.5, 1.0])
def test_views_show_a_fifth_of_a_picture_or_more_not_much_wider_or_higher(u):
    middle = (torch.arange(16) + 0.5) / 8 - 1  # of the pixels, from -1 to 1
    ramps = torch.stack([middle.expand(16, 16), middle.unsqueeze(1).expand(16, 16)])
    area = 0.2 + 0.8 * u
    for place, ratio in ((0.0, 3 / 4), (0.5, 1.0), (1.0, 4 / 3)):
        chance = torch.tensor([u, place, 0.9, place, 0.5]).unsqueeze(1)
        across, down = zoomed(ramps.unsqueeze(0), chance)[0]
        wide, high = (min(1.0, (area * r) ** 0.5) for r in (ratio, 1 / ratio))
        columns = wide * middle + (1 - wide) * (2 * place - 1)  # to the edges
        limit = middle[-1].item()
        torch.testing.assert_close(across[0], columns.clamp(-limit, limit))
        torch.testing.assert_close(down[:, 0], (high * middle).clamp(-limit, limit))
    mirrored = zoomed(ramps.unsqueeze(0), torch.tensor([1.0, 0.5, 0.1, 0.5, 0.5]).unsqueeze(1))[0]
    torch.testing.assert_close(mirrored, torch.stack([-ramps[0], ramps[1]]))


@pytest.mark.parametrize(("u", "factor", "turns"), [(0.0, 0.6, -0.1), (1.0, 1.4, 0.1)])
def test_colours_change_by_two_fifths_to_either_side_and_hue_by_a_tenth_of_a_turn(u, factor, turns):
    x = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    chance = torch.full((6, 5), 0.5)  # changed, but for the factors 1 and no turn
    chance[torch.arange(1, 5), torch.arange(4)] = u
    chance[0, 4], chance[1:5, 4] = 0.85, u  # not changed
    bright, contrast, saturation, hue, same = recoloured(x, chance)
    yiq = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
    brightness, first, second = torch.einsum("ij,njhw->inhw", yiq, x)
    torch.testing.assert_close(bright, factor * x[0])
    torch.testing.assert_close(contrast - x[1], (factor - 1) * (x[1] - brightness[1].mean()))
    grey = brightness[2].expand(3, -1, -1)
    torch.testing.assert_close(saturation - grey, factor * (x[2] - grey), atol=3e-3, rtol=0)
    turned = torch.complex(first[3], second[3]) * np.exp(2j * np.pi * turns)
    expected = torch.stack([brightness[3], turned.real, turned.imag])
    torch.testing.assert_close(torch.einsum("ij,jhw->ihw", yiq, hue), expected)
    torch.testing.assert_close(same, x[4])


def test_one_picture_in_five_loses_its_colours():
    x = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)).expand(2, -1, -1, -1)
    chance = torch.full((6, 2), 0.5)
    chance[0], chance[5] = 0.9, torch.tensor([0.19, 0.21])
    grey, same = recoloured(x, chance)
    torch.testing.assert_close(grey, grey[:1].expand(3, -1, -1), atol=3e-3, rtol=0)
    torch.testing.assert_close(same, x[1])
