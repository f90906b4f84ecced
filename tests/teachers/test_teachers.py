"""Teachers: what they compute, that a seed decides it, and how they refuse what cannot be."""

import math
import pickle
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pecil.pec import machine
from pecil.pec.saving import alike
from pecil.teachers import RECIPES, Filters, Identity, RandomFeatures, filters
from pecil.teachers.filters import spectrum

CPU = torch.device("cpu")
SMALL = Filters(sizes=(3,), grids=(2,))
NAMES = [
    *("natural", "strokes", "signs"),
    *("synthetic", "synthetic-strokes", "synthetic-signs"),
    *("relu", "rbf", "identity"),
]


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    """Draw filters from a handful of pictures: the drawing of hundreds takes a second."""
    monkeypatch.setattr(filters, "PICTURES", 8)


def drawn(recipe, shape=(3, 12, 12), dim=400, seed=0):
    return recipe.teacher(shape, dim, seed, CPU)


def images(n=4, shape=(3, 12, 12), seed=0):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------ every teacher


@pytest.fixture(params=NAMES)
def recipe(request):
    return RECIPES[request.param]


def test_the_names_are_these():
    assert list(RECIPES) == NAMES


def test_the_seed_decides(recipe):
    x, before = images(), torch.get_rng_state()
    one, same, other = (drawn(recipe, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one(x), same(x)) and one.checksum == same.checksum
    assert torch.equal(torch.get_rng_state(), before)
    if recipe != Identity():
        assert (one(x) - other(x)).abs().max() > 0.1
        assert not alike(one.checksum, other.checksum)


def test_features_are_as_many_as_announced(recipe):
    x = images()
    before, teacher = x.clone(), drawn(recipe)
    features = teacher(x)
    assert features.shape == (4, teacher.output_dim) and features.dtype == torch.float32
    assert torch.isfinite(features).all() and features.std(0).max() > 0.01
    assert torch.equal(x, before)
    if recipe != Identity():
        assert 0.8 * 400 < teacher.output_dim <= 400
    features += 1  # which are a copy, also of the identity
    assert torch.equal(x, before)


def test_features_do_not_depend_on_the_batch(recipe, monkeypatch):
    teacher, x = drawn(recipe), images(9)
    whole = teacher(x)
    single = torch.cat([teacher(part) for part in x.split(1)])
    torch.testing.assert_close(single, whole, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(machine, "CPU_CACHED", 1)
    monkeypatch.setattr(machine, "CPU_MOST", 1)
    torch.testing.assert_close(teacher(x), whole, rtol=1e-4, atol=1e-5)


def test_a_pickle_holds_the_recipe_alone(recipe):
    teacher, x = drawn(recipe), images()
    content = pickle.dumps(teacher)
    assert len(content) < 1500
    assert torch.equal(pickle.loads(content)(x), teacher(x))


# ------------------------------------------------------------------------------- vectors


def test_identity():
    x = torch.rand(3, 5)
    teacher = drawn(Identity(), (5,), dim=99)
    assert torch.equal(teacher(x), x) and teacher.output_dim == 5
    assert torch.equal(drawn(Identity())(images()), images().flatten(1))
    assert drawn(Identity(), (6,)).checksum != teacher.checksum


def test_relu_features_have_the_announced_distribution():
    teacher = drawn(RandomFeatures(), (50,), dim=4000)
    x = torch.rand(3, 50)
    assert torch.equal(teacher(x), torch.addmm(teacher.bias, x, teacher.weight.T).relu())
    assert float(teacher.weight.var()) == pytest.approx(1 / 50, rel=0.05)
    assert float(teacher.bias.std()) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("gamma", [None, 0.02, 0.5], ids=str)
def test_rbf_features_approximate_the_kernel(gamma):
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 8))).float()
    features = drawn(RandomFeatures("rbf", gamma), (8,), dim=20_000)(x)
    kernel = torch.exp(-(gamma or 1 / 8) * torch.cdist(x, x) ** 2)
    np.testing.assert_allclose(features @ features.T * (2 / 20_000), kernel, atol=0.035)
    assert kernel.min() < 0.7  # not all alike


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"kind": "tanh"}, "kind must be 'relu' or 'rbf', but it is 'tanh'"),
        ({"kind": "rbf", "gamma": 0}, "gamma must be a positive number, but it is 0"),
        ({"kind": "rbf", "gamma": math.inf}, "gamma must be a positive number, but it is inf"),
        ({"kind": "rbf", "gamma": math.nan}, "gamma must be a positive number, but it is nan"),
    ],
    ids=str,
)
def test_bad_random_features_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        RandomFeatures(**parameters)


# ------------------------------------------------------------------------------- filters


def filters_of(teacher, bank, channels):
    """Return a bank's filters (f, channels, k, k) from their even and odd parts."""
    parts = [w.reshape(len(w), channels, bank.size, -1) for w in bank.weights]
    if not teacher.recipe.mirror:
        return parts[0]
    (even, odd), half = parts, bank.size // 2
    left, right = even[..., :half] + odd, (even[..., :half] - odd).flip(-1)
    return torch.cat([left, 2 * even[..., half:], right], -1)


def plain_features(teacher, x):
    """Compute features one filter at a time, by convolution and pooling of torch's own."""
    recipe, result = teacher.recipe, []
    if teacher.reduce > 1:
        x = F.avg_pool2d(x, teacher.reduce)
    channels = x.shape[1]
    for bank in teacher.banks:
        k, start = bank.size, 0
        ones = torch.ones(1, channels, k, k) / (channels * k * k)
        mean = F.conv2d(x, ones)  # of the patch at each position
        variance = F.conv2d(x**2, ones) - mean**2
        filters = filters_of(teacher, bank, channels)

        def responses(weight, x=x, mean=mean, variance=variance):
            """w·(p − p̄) / √(variance + 0.01), since (p − p̄)·w = p·w − p̄ Σw."""
            moved = F.conv2d(x, weight[None]) - mean * weight.sum()
            return moved / (variance + 0.01).sqrt()

        for grid, count in bank.counts.items():
            sides = []
            for sign in (1, -1):
                maps = []
                for weight in filters[start : start + count]:
                    z = F.relu(sign * responses(weight) - recipe.threshold)
                    cells = F.adaptive_avg_pool2d(z, grid)[:, 0]  # (n, r, r)
                    if recipe.mirror:
                        z = F.relu(sign * responses(weight.flip(-1)) - recipe.threshold)
                        cells = cells + F.adaptive_avg_pool2d(z, grid)[:, 0].flip(-1)
                        cells = cells[..., : (grid + 1) // 2]
                    maps.append(cells)
                sides.append(torch.stack(maps, -1).flatten(1))
            result += sides if recipe.signed else [sides[0] + sides[1]]
            start += count
    features = torch.cat(result, 1)
    return features if teacher.mix is None else features @ teacher.mix


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (3, 9, 9)),
        ({"mirror": False}, (3, 9, 9)),
        ({"signed": False}, (1, 9, 9)),
        ({"signed": False, "mirror": False}, (3, 9, 7)),
        ({"spread": 3}, (3, 9, 9)),
        ({"spread": 3, "mirror": False, "prior": "strokes"}, (1, 7, 9)),
        ({"sizes": (2, 5), "grids": (1, 3)}, (3, 11, 11)),
        ({"grids": (4,), "threshold": 0.0}, (4, 10, 10)),
        ({"reduce": 2}, (3, 12, 14)),
        ({"prior": "spectrum", "draw": "normal"}, (3, 8, 8)),
    ],
    ids=str,
)
def test_filters_against_a_plain_implementation(changes, shape):
    teacher = drawn(replace(SMALL, **changes), shape, dim=60)
    x = images(3, shape)
    features = teacher(x)
    assert features.std(0).median() > 0.01
    torch.testing.assert_close(features, plain_features(teacher, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spread", [1, 3])
def test_neither_threads_nor_portions_matter(spread, monkeypatch):
    teacher = drawn(replace(SMALL, spread=spread), (3, 9, 9), dim=60)
    x = torch.rand(7, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    whole = teacher(x)
    monkeypatch.setitem(filters.ROOM, "cpu", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        torch.testing.assert_close(teacher(x), whole)
        torch.testing.assert_close(teacher(x[:2]), whole[:2])
    finally:
        torch.set_num_threads(before)


def test_a_filter_by_hand():
    """One patch, one filter: the response of a patch to itself is its length."""
    teacher = drawn(Filters(sizes=(2,), grids=(1,), mirror=False, threshold=0.25), (1, 2, 2), dim=2)
    (bank,) = teacher.banks
    weight = bank.weights[0][0]
    x = (5 + 0.2 * weight).view(1, 1, 2, 2)  # brightness does not matter, contrast nearly not
    response = 0.2 / math.sqrt(0.2**2 / 4 + 0.01)
    expected = torch.tensor([[response - 0.25, 0.0]])
    torch.testing.assert_close(teacher(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(teacher(10 - x), expected.flip(1), rtol=1e-4, atol=1e-5)
    assert (teacher(torch.full_like(x, 3)) == 0).all()  # a flat patch is not blown up


def test_filters_are_centred_of_norm_1_and_some_are_grey():
    teacher = drawn(Filters(sizes=(4,), grids=(1,), grey=0.25), dim=400)
    filters = filters_of(teacher, teacher.banks[0], 3)
    assert len(filters) == 200
    torch.testing.assert_close(filters.flatten(1).norm(dim=1), torch.ones(200))
    torch.testing.assert_close(filters.mean((1, 2, 3)), torch.zeros(200), rtol=0, atol=1e-6)
    spread = filters.std(1).flatten(1).amax(1)
    assert (spread < 1e-6).sum() == 50
    assert torch.nonzero(spread < 1e-6).max() > 100  # not the first ones: grids get both kinds


def test_unsigned_features_do_not_tell_light_from_dark():
    x = images()
    for recipe, same in ((RECIPES["signs"], True), (RECIPES["natural"], False)):
        teacher = drawn(recipe)
        assert torch.allclose(teacher(1 - x), teacher(x), atol=1e-5) is same


@pytest.mark.parametrize(
    "shape",
    [(3, 12, 12), (1, 13, 20), (3, 5, 4), (3, 80, 70), (3, 12, 13), (3, 80, 71)],
    ids=str,
)
def test_mirror_images_get_the_same_features(shape):
    x = images(3, shape)
    for mirror in (True, False):
        teacher = drawn(Filters(mirror=mirror), shape)
        apart = (teacher(x) - teacher(x.flip(-1))).abs().max()
        assert apart < 1e-5 if mirror else apart > 0.05


def test_turned_images_get_other_features():
    teacher, x = drawn(Filters()), images()
    assert (teacher(x) - teacher(x.flip(-2))).abs().max() > 0.05


@pytest.mark.parametrize("shape", [(3, 64, 64), (3, 65, 90), (1, 120, 130), (3, 200, 81)], ids=str)
def test_large_images_are_reduced(shape):
    teacher = drawn(Filters(), shape)
    assert teacher.reduce == (1 if shape[1] == 64 else round(min(shape[1:]) / 40))
    assert 0.8 * 400 < teacher(images(2, shape)).shape[1] <= 400
    fixed = drawn(Filters(reduce=4), shape)
    assert fixed.reduce == 4 and not alike(fixed.checksum, teacher.checksum)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("natural", (3, 7, 3)),
        ("strokes", (1, 2, 2)),
        ("strokes", (1, 2, 9)),
        ("strokes", (3, 4, 3)),
        ("signs", (1, 2, 2)),
    ],
    ids=str,
)
def test_images_smaller_than_the_filters(name, shape):
    teacher = drawn(RECIPES[name], shape)
    features = teacher(images(5, shape))
    assert features.shape == (5, teacher.output_dim) and torch.isfinite(features).all()
    assert features.std(0).max() > 0.01


@pytest.mark.parametrize("name", ["natural", "strokes", "signs"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 6), (1, 5, 1)], ids=str)
def test_one_row_of_pixels_is_refused(name, shape):
    size = f"{shape[1]}×{shape[2]}"
    with pytest.raises(ValueError, match=f"at least 2×2 pixels, but they have {size}$"):
        drawn(RECIPES[name], shape)


def test_too_few_features_are_refused():
    message = r"50 features are too few for filters of sizes \(3, 5, 8\) on grids \(1, 2, 3\), .*"
    with pytest.raises(ValueError, match=message + "; give more memory, or fewer sizes and grids"):
        drawn(Filters(sizes=(3, 5, 8), grids=(1, 2, 3)), dim=50)
    assert drawn(Filters(sizes=(3,), grids=(1,)), dim=2).output_dim == 2


def test_as_many_features_as_the_refusal_asks_for_are_enough():
    recipe = Filters(prior="strokes", sizes=(3, 5, 8), grids=(1, 2, 3))
    with pytest.raises(ValueError, match="take at least 54"):
        drawn(recipe, dim=53)
    assert drawn(recipe, dim=54).output_dim == 54
    for dim in range(54, 400):
        counts = recipe.counts(dim)
        assert min(counts.values()) >= 1
        assert 3 * sum(n * recipe.cells(grid) for grid, n in counts.items()) <= dim


def test_vectors_are_refused():
    with pytest.raises(ValueError, match="filters needs images.* but X holds vectors of 5 feat"):
        drawn(Filters(), (5,))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"prior": "photos"}, "prior must be 'leaves', 'strokes' or 'spectrum', but it is 'photos"),
        ({"draw": "lots"}, "draw must be 'patches' or.*'normal', but it is 'lots'"),
        ({"prior": "spectrum"}, "the only way with prior='spectrum', 'normal', but it is 'patches"),
        ({"sizes": ()}, r"sizes must be a tuple of whole numbers of at least 1, .* is \(\)"),
        ({"sizes": 5}, "sizes must be a tuple of whole numbers of at least 1, but it is 5"),
        ({"sizes": (3, 0)}, r"sizes must be a tuple of whole numbers .* is \(3, 0\)"),
        ({"sizes": (2.5,)}, r"sizes must be a tuple of whole numbers .* is \(2.5,\)"),
        ({"grids": (0,)}, r"grids must be a tuple of whole numbers .* is \(0,\)"),
        ({"ridge": 0}, "ridge must be a positive number, but it is 0"),
        ({"ridge": "much"}, "ridge must be a positive number, but it is 'much'"),
        ({"ridge": math.nan}, "ridge must be a positive number, but it is nan"),
        ({"threshold": -1}, "threshold must be from 0 to inf, but it is -1"),
        ({"threshold": math.nan}, "threshold must be from 0 to inf, but it is nan"),
        ({"grey": 1.5}, "grey must be from 0 to 1.0, but it is 1.5"),
        ({"spread": 0}, "spread must be a whole number of at least 1, but it is 0"),
        ({"spread": 1.5}, "spread must be a whole number of at least 1, but it is 1.5"),
        ({"spread": None}, "spread must be a whole number of at least 1, but it is None"),
        ({"reduce": 0}, "reduce must be a whole number of at least 1, but it is 0"),
        ({"reduce": 1.5}, "reduce must be a whole number of at least 1, but it is 1.5"),
    ],
    ids=str,
)
def test_bad_filters_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        Filters(**parameters)


@pytest.mark.parametrize("reduce", [7, 20])
def test_reducing_to_a_single_pixel_is_refused(reduce):
    with pytest.raises(ValueError, match=f"2×2 pixels, .*have 12×12, reduced by {reduce}$"):
        drawn(Filters(reduce=reduce))


def test_lists_become_tuples():
    assert Filters(sizes=[3, 5], grids=[2]) == Filters(sizes=(3, 5), grids=(2,))
    assert hash(Filters(sizes=[3]))


# ------------------------------------------------------------------------------- the prior


@pytest.mark.parametrize(("channels", "size"), [(1, 3), (3, 5)])
def test_the_spectrum_prior(channels, size):
    covariance = spectrum(channels, size)
    n = channels * size**2
    assert covariance.shape == (n, n)
    torch.testing.assert_close(covariance, covariance.T)
    torch.testing.assert_close(covariance.sum(0), torch.zeros(n).double(), rtol=0, atol=1e-9)
    assert torch.linalg.eigvalsh(covariance).min() > -1e-9
    grid = covariance.view(channels, size, size, channels, size, size)
    corner = grid[0, 0, 0, 0] / grid[0, 0, 0, 0, 0, 0]
    assert (corner[0, :-1] > corner[0, 1:]).all()  # the farther, the less alike
    if channels > 1:
        variance = covariance.diagonal().view(channels, -1)
        torch.testing.assert_close(variance[0], variance[1])
        assert grid[0, 0, 0, 1, 0, 0] / grid[0, 0, 0, 0, 0, 0] > 0.8


def test_spectrum_filters_prefer_what_is_rare():
    """Whitening lifts fine detail, and differences of channels, over smooth brightness."""
    recipe = Filters(prior="spectrum", draw="normal", sizes=(5,), grids=(1,), grey=0.0, ridge=0.01)
    covariance = spectrum(3, 5)
    values, vectors = torch.linalg.eigh(covariance / covariance.diagonal().mean())
    teacher = drawn(recipe, dim=4000)
    filters = filters_of(teacher, teacher.banks[0], 3).flatten(1).double()
    along = (filters @ vectors).square().mean(0)  # energy along each direction, rare ones first
    assert along[5] > 10 * along[-1]
    expected = 1 / (values[1:] + 0.01)  # the first is the mean, which filters do not have
    np.testing.assert_allclose(along[1:] / along[1:].sum(), expected / expected.sum(), rtol=0.3)


def test_pictures_make_filters_of_their_own():
    kinds = product(("leaves", "strokes"), ("patches", "normal"))
    made = [drawn(Filters(prior=prior, draw=draw)) for prior, draw in kinds]
    for one, other in combinations(made, 2):
        assert not alike(one.checksum, other.checksum)
    for teacher in made:
        assert torch.isfinite(teacher(images())).all()
