"""VAE-GC: likelihoods against closed forms, both update rules, the paper's sizes."""

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.distributions import Bernoulli, MultivariateNormal, Normal, kl_divergence
from torch.nn import functional as F

from pecil.checks import check_learner
from pecil.methods import METHODS, Method
from pecil.methods.vae_gc import VAEGC, conv_vae, draw, perceptron_vae

METHOD = Method("vae_gc", "VAE-GC", "2021", "", VAEGC, ("lr",), by_task=True)


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(vae, seed=0):
    draw(vae, chance(seed))
    return vae


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=chance(seed))


def test_conformance():
    check_learner(METHOD, lr=0.03, updates="batch", importance_samples=10)


# --------------------------------------------------------------------- sizes of the paper


@pytest.mark.parametrize(
    ("n_classes", "shape", "sizes", "each", "paper"),
    [
        (10, (28, 28), {}, 8_854, 89_600),
        (10, (32, 32, 3), {}, 1_096_821, 11_170_430),
        (100, (32, 32, 3), {"width": 15, "latent": 18}, 110_526, 11_200_000),
        (100, (84, 84, 3), {"width": 10, "latent": 44, "size": 32}, 111_137, 11_200_000),
    ],
)
def test_the_paper_s_sizes(n_classes, shape, sizes, each, paper):
    assert VAEGC(2, shape, device="cpu", **sizes).n_parameters == 2 * each
    assert n_classes * each == pytest.approx(paper, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "sizes", "paper"),
    [
        ((28, 28), {"hidden": (85, 85), "latent": 5, "batch_norm": True}, 150_000),
        ((32, 32, 3), {"width": 15, "latent": 100}, 350_000),
        ((1024,), {"hidden": (85,), "latent": 20}, 180_000),
        ((512,), {"hidden": (), "latent": 110}, 170_000),
    ],
)
def test_the_sizes_of_van_de_ven_et_al(shape, sizes, paper):
    assert VAEGC(1, shape, device="cpu", **sizes).n_parameters == pytest.approx(paper, rel=0.02)


def test_batch_norm_takes_the_place_of_biases_between_layers():
    vae = perceptron_vae(8, (5, 4), 3, binary=True, batch_norm=True)
    hidden = ("Linear", "BatchNorm1d", "ReLU") * 2
    assert tuple(type(layer).__name__ for layer in vae.encoder) == hidden
    assert tuple(type(layer).__name__ for layer in vae.decoder) == (*hidden, "Linear")
    biases = [layer.bias is None for layer in vae.modules() if isinstance(layer, torch.nn.Linear)]
    assert biases == [True] * 4 + [False, False, True]
    learner = VAEGC(2, (8,), batch_norm=True, importance_samples=5, device="cpu")
    learner.begin_task({0: 20})
    learner.learn(np.random.default_rng(0).random((20, 8), np.float32), np.zeros(20, int))
    assert np.isfinite(learner.scores(np.zeros((1, 8), np.float32))[:, 0]).all()


def test_the_layers_are_those_of_the_paper():
    vae = conv_vae((32, 32, 3), 4, 6, binary=False)
    shapes = {name: tuple(p.shape) for name, p in vae.named_parameters() if p.ndim > 1}
    assert shapes == {
        "encoder.0.weight": (4, 3, 3, 3),
        "encoder.3.weight": (8, 4, 3, 3),
        "encoder.6.weight": (16, 8, 3, 3),
        "mean.weight": (6, 16 * 4 * 4),
        "log_variance.weight": (6, 16 * 4 * 4),
        "decoder.0.weight": (16 * 4 * 4, 6),
        "decoder.2.weight": (16, 8, 4, 4),
        "decoder.5.weight": (8, 4, 4, 4),
        "decoder.8.weight": (4, 3, 4, 4),
    }
    assert vae.log_variance.bias is None and vae.mean.bias is not None
    assert [type(layer).__name__ for layer in vae.encoder] == [
        *("Conv2d", "BatchNorm2d", "ReLU") * 2,
        *("Conv2d", "Flatten"),
    ]


@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 3), (9, 14, 3), (4, 4, 1)])
def test_pictures_of_any_size_are_decoded_to_their_size(shape):
    vae = drawn(conv_vae(shape, 2, 3, binary=False)).eval()
    x = normal(5, shape[2], *shape[:2])
    assert vae.decoder(normal(5, 3)).shape == (5, math.prod(shape))
    assert vae.bound(x, normal(5, 3)).isfinite()
    assert vae.log_likelihood(x, normal(7, 3)).shape == (5,)


def test_initial_values_are_pytorch_s_and_differ_between_classes():
    learner = VAEGC(2, (16, 16, 3), width=8, device="cpu", seed=3)
    torch.manual_seed(0)
    theirs = conv_vae((16, 16, 3), 8, 100, binary=False)
    triples = zip(*(vae.parameters() for vae in (*learner.vaes, theirs)), strict=True)
    for ours, other, default in triples:
        assert torch.equal(ours, other) == (len(default.unique()) == 1)  # batch norm
        if default.ndim > 1:  # all have enough values to tell their bounds
            ours, default = ours.detach(), default.detach()
            assert float(ours.abs().max()) == pytest.approx(float(default.abs().max()), rel=0.05)
            assert float(ours.std()) == pytest.approx(float(default.std()), rel=0.15)
    again = VAEGC(2, (16, 16, 3), width=8, device="cpu", seed=3)
    assert all(map(torch.equal, learner.network.parameters(), again.network.parameters()))


# ------------------------------------------------------------------------ mathematics


def linear_gaussian(log_variance):
    """Return a linear VAE, samples, and their log-likelihoods in closed form.

    x = W z + b + noise, so x ~ N(b, W Wᵀ + I). The columns of W are orthogonal, so that the
    posterior of z is independent in each direction: N(Wᵀ(x - b) / (1 + s), 1 / (1 + s)), s the
    squared lengths. The first input is always 1: through it log σ² can be a constant.
    """
    n_inputs, latent = 6, 3
    columns = torch.linalg.qr(normal(n_inputs - 1, latent))[0] * torch.tensor([0.5, 1.0, 2.0])
    w = torch.cat([torch.zeros(1, latent), columns])
    b = torch.cat([torch.ones(1), normal(n_inputs - 1, seed=1)])
    lengths = w.square().sum(0)
    vae = perceptron_vae(n_inputs, (), latent, binary=False)
    with torch.no_grad():
        vae.decoder[0].weight.copy_(w)
        vae.decoder[0].bias.copy_(b)
        vae.mean.weight.copy_(w.T / (1 + lengths).unsqueeze(1))
        vae.mean.bias.copy_(-vae.mean.weight @ b)
        vae.log_variance.weight.zero_()
        vae.log_variance.weight[:, 0] = -lengths.log1p() if log_variance is None else log_variance
    x = b + normal(20, latent, seed=2) @ w.T + normal(20, n_inputs, seed=3)
    x[:, 0] = 1
    exact = MultivariateNormal(b, w @ w.T + torch.eye(n_inputs)).log_prob(x)
    return vae, x, exact


@pytest.mark.parametrize("n_samples", [1, 7])
def test_the_likelihood_is_exact_if_the_encoder_is(n_samples):
    """All importance weights are then p(x) itself, however few there are."""
    vae, x, exact = linear_gaussian(log_variance=None)
    with torch.no_grad():
        found = vae.log_likelihood(x, normal(n_samples, 3, seed=4))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def test_the_likelihood_converges_if_the_encoder_is_wrong():
    vae, x, exact = linear_gaussian(log_variance=0.0)
    with torch.no_grad():
        few, many = (vae.log_likelihood(x, normal(n, 3, seed=4)) - exact for n in (1, 20_000))
    assert many.abs().max() < 0.05 < few.abs().mean()


def test_the_bound_is_the_negative_evidence_for_an_exact_encoder():
    """Then the expected bound is -log p(x), less the constant that is left out."""
    vae, x, exact = linear_gaussian(log_variance=None)
    one = x[:1].expand(40_000, -1)
    with torch.no_grad():
        found = float(vae.bound(one, normal(40_000, 3, seed=5))) * 6 + 3 * math.log(2 * math.pi)
    assert found == pytest.approx(-float(exact[0]), abs=0.03)


@pytest.mark.parametrize("binary", [False, True])
def test_the_bound_is_reconstruction_and_divergence_by_inputs(binary):
    vae = drawn(perceptron_vae(8, (5, 4), 3, binary))
    x, noise = torch.rand(10, 8, generator=chance()), normal(10, 3)
    mean, log_variance = vae.encode(x)
    scale = (log_variance / 2).exp()
    decoded = vae.decoder(mean + scale * noise)
    if binary:
        likelihood = Bernoulli(logits=decoded, validate_args=False).log_prob(x)
    else:
        likelihood = Normal(decoded, 1).log_prob(x) + math.log(2 * math.pi) / 2
    divergence = kl_divergence(Normal(mean, scale), Normal(0, 1))
    expected = (divergence.sum(1) - likelihood.sum(1)).mean() / 8
    torch.testing.assert_close(vae.bound(x, noise), expected)


def test_importance_sampling_one_by_one():
    vae = drawn(perceptron_vae(8, (5,), 3, binary=True))
    x, noise = torch.rand(4, 8, generator=chance()), normal(6, 3)
    with torch.no_grad():
        found = vae.log_likelihood(x, noise)
        for sample, value in zip(x, found, strict=True):
            mean, log_variance = vae.encode(sample.unsqueeze(0))
            proposal = Normal(mean[0], (log_variance[0] / 2).exp())
            weights = []
            for epsilon in noise:
                z = proposal.mean + proposal.stddev * epsilon
                joint = Normal(vae.decoder(z).sigmoid(), 1).log_prob(sample).sum()
                joint += Normal(0, 1).log_prob(z).sum()
                weights.append(float((joint - proposal.log_prob(z).sum()).exp()))
            assert float(value) == pytest.approx(math.log(np.mean(weights)), abs=1e-4)


def test_scores_are_likelihoods_in_whatever_pieces(monkeypatch):
    x = np.random.default_rng(0).random((9, 5), np.float32)
    learner = VAEGC(3, (5,), device="cpu", importance_samples=8)
    learner.begin_task({0: 9, 2: 9})
    learner.learn(np.concatenate([x, x]), np.array([0, 2]).repeat(9))
    scores = learner.scores(x)
    assert np.isneginf(scores[:, 1]).all() and np.isfinite(scores[:, ::2]).all()
    monkeypatch.setattr("pecil.methods.vae_gc.CPU_MOST", 1)
    np.testing.assert_allclose(learner.scores(x), scores, rtol=1e-5)


# --------------------------------------------------------------------------- learning


def steps_of(learner):
    """Return the steps that each class's Adam has taken."""
    states = [[int(s["step"]) for s in adam.state.values()] for adam in learner.adams]
    assert all(len(set(state)) <= 1 for state in states)
    return [state[0] if state else 0 for state in states]


@pytest.mark.parametrize(
    ("updates", "first", "then"),
    [("released", [6, 3, 0], [6, 3, 2]), ("batch", [2, 2, 0], [2, 2, 1])],
)
def test_steps_of_a_class(updates, first, then):
    """Batches of 4: class 0 alone, both, class 1 alone."""
    x, y = np.random.default_rng(0).random((9, 5), np.float32), np.array([0] * 6 + [1] * 3)
    learner = VAEGC(3, (5,), device="cpu", batch_size=4, updates=updates, schedule="linear")
    rates, refine = {}, learner.refine

    def watched(label, *given):
        rates[label] = float(learner.rate)
        refine(label, *given)

    learner.refine = watched
    learner.begin_task({0: 6, 1: 3})
    learner.learn(x, y)
    assert steps_of(learner) == first
    assert rates == pytest.approx({0: 0.001 * 2 / 3, 1: 0.001 / 3})  # falls once a batch
    learner.begin_task({2: 2})  # the schedule starts anew
    learner.learn(x[:2], np.array([2, 2]))
    assert steps_of(learner) == then
    assert rates[2] == 0.001


def test_each_step_of_a_batch_has_its_samples_and_noise_of_its_own():
    """A class's samples in a batch, again and again: by hand, on a copy."""
    x, y = np.random.default_rng(0).random((6, 5), np.float32), np.array([1, 0, 1, 1, 0, 1])
    learner, copy = (VAEGC(2, (5,), device="cpu", lr=0.01, batch_size=6) for _ in range(2))
    learner.begin_task({0: 2, 1: 4})
    learner.learn(x, y)
    noise = copy.noise
    for label, count in ((0, 2), (1, 4)):
        own, vae = torch.from_numpy(x[y == label]), copy.vaes[label]
        adam = torch.optim.Adam(vae.parameters(), lr=0.01)
        for epsilon in torch.randn(count, count, 10, generator=noise):
            adam.zero_grad()
            vae.bound(own, epsilon).backward()
            adam.step()
    for ours, theirs in zip(learner.network.parameters(), copy.network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_class_is_left_alone_by_the_others():
    x = np.random.default_rng(0).random((20, 16, 16, 3), np.float32)
    learner = VAEGC(2, (16, 16, 3), width=2, latent=3, device="cpu", importance_samples=5)
    learner.begin_task({0: 20})
    learner.learn(x, np.zeros(20, int))
    before, scores = [v.clone() for v in learner.vaes[0].state_dict().values()], learner.scores(x)
    learner.begin_task({1: 20})
    learner.learn(1 - x, np.ones(20, int))
    assert all(map(torch.equal, before, learner.vaes[0].state_dict().values()))
    np.testing.assert_array_equal(learner.scores(x)[:, 0], scores[:, 0])


def test_batch_norm_counts_what_was_learned_alone():
    x = np.random.default_rng(0).random((8, 16, 16, 3), np.float32)
    learner = VAEGC(1, (16, 16, 3), width=2, latent=3, device="cpu", batch_size=4, updates="batch")
    learner.learn(x, np.zeros(8, int))
    learner.scores(x)
    assert int(learner.vaes[0].encoder[1].num_batches_tracked) == 2
    assert learner.vaes[0].training


def test_pictures_are_resized():
    x = np.random.default_rng(0).integers(0, 256, (3, 20, 20, 3), dtype=np.uint8)
    learner = VAEGC(1, (20, 20, 3), width=2, size=8, mean=0.5, std=0.5, device="cpu")
    found = learner.view(torch.from_numpy(x))
    planes = torch.from_numpy(x).movedim(-1, 1).float()
    expected = F.interpolate(planes, (8, 8), mode="bilinear", antialias=True).round() / 255
    torch.testing.assert_close(found, (expected - 0.5) / 0.5)


@pytest.mark.parametrize(
    ("shape", "given", "binary"),
    [
        ((8, 8), {}, True),
        ((8, 8), {"mean": 0.5, "std": 0.5}, False),
        ((8, 8), {"binary": False}, False),
        ((64,), {}, False),
        ((64,), {"binary": True}, True),
        ((8, 8, 3), {}, False),
    ],
)
def test_grey_pictures_are_bernoulli_in_training(shape, given, binary):
    learner = VAEGC(2, shape, width=2, device="cpu", **given)
    assert [vae.binary for vae in learner.vaes] == [binary, binary]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"updates": "sample"}, "updates must be one of released, batch, not 'sample'"),
        ({"importance_samples": 0}, "importance_samples must be a whole number from 1, not 0"),
        ({"importance_samples": 2.0}, "importance_samples must be a whole number .* not 2.0"),
        ({"schedule": "cosine"}, "one of linear, constant, not 'cosine'"),
    ],
)
def test_what_cannot_be(given, message):
    with pytest.raises(ValueError, match=message):
        VAEGC(2, (8,), device="cpu", **given)


def test_colour_pictures_are_told_apart():
    random = np.random.default_rng(0)
    y = random.permutation(np.arange(80) % 2)
    x = random.normal(size=(80, 8, 8, 3)).astype(np.float32)
    x[..., 0] += np.where(y, 0.5, -0.5)[:, None, None]
    learner = VAEGC(2, (8, 8, 3), width=4, latent=2, lr=0.01, device="cpu", importance_samples=10)
    learner.begin_task({0: 20, 1: 20})
    learner.learn(x[:40], y[:40])
    assert (learner.scores(x[40:]).argmax(axis=1) == y[40:]).mean() > 0.85


def test_digits():
    """One class at a time, nothing forgotten."""
    x, y = load_digits(return_X_y=True)
    x, test = (x / 16).reshape(-1, 8, 8).astype(np.float32), np.arange(len(x)) % 5 == 4
    learner = VAEGC(10, (8, 8), lr=0.01, device="cpu", seed=1, importance_samples=20)
    for label in range(10):
        rows = np.flatnonzero(~test & (y == label))
        learner.begin_task({label: len(rows)})
        learner.learn(x[rows], y[rows])
        learner.end_task()
    assert (learner.scores(x[test]).argmax(axis=1) == y[test]).mean() > 0.8


@pytest.mark.parametrize("method", ["vae_gc", "dgr"])
def test_inputs_that_are_no_probabilities_are_refused(method):
    x, y = 16 * np.random.default_rng(0).random((8, 4, 4), np.float32), np.arange(8) % 2
    learner = METHODS[method].learner(2, (4, 4), device="cpu")
    learner.begin_task({0: 4, 1: 4})
    with pytest.raises(ValueError, match="needs inputs from 0 to 1, got .* choose binary=False"):
        learner.learn(x, y)
    learner.learn(x / 16, y)
    other = METHODS[method].learner(2, (4, 4), device="cpu", binary=False)
    other.begin_task({0: 4, 1: 4})
    other.learn(x, y)
    assert np.isfinite(other.scores(x)).all()


def test_settings_that_mean_nothing_to_it_are_none_of_its_own():
    assert not {"init", "keep_adam"} & set(METHODS["vae_gc"].settings)
