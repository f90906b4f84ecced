import json
import pickle
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import pecil
from pecil import WhitenedPEC
from pecil.teachers import RECIPES, Filters, Synthetic, network
from pecil.teachers.network import SHIPPED, Encoder, load_weights, save_weights, standardised
from pecil.teachers.synthetic import Settings

CHANNELS = (4, 6, 8, 8, 10, 12)
CPU = torch.device("cpu")


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    made = Encoder(CHANNELS)
    with torch.no_grad():  # batch norm that does something
        for _, norm in made.layers:
            for values in (norm.weight, norm.bias, norm.running_mean):
                values.uniform_(0.5, 1.5)
            norm.running_var.uniform_(0.5, 2)
    return made.eval()


@pytest.fixture
def weights(encoder, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_weights(encoder, path, {"note": "a test"})
    return str(path)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("grids", [(3, 2, 1), (0, 0, 2), (0, 1, 0)])
def test_features_are_averages_of_the_encoders_maps(encoder, weights, mirror, grids):
    x = torch.rand(3, 3, 32, 32)
    teacher = Synthetic(weights, grids, mirror, beside=None).teacher((3, 32, 32), 10**6, 0, CPU)
    with torch.no_grad():
        maps, mirrored = encoder(x), encoder(x.flip(3))
    parts = []
    for block, grid in enumerate(grids):
        if not grid:
            continue
        means = F.adaptive_avg_pool2d(maps[block], grid)
        if mirror:
            means = means + F.adaptive_avg_pool2d(mirrored[block], grid)
            means = means[..., : (grid + 1) // 2]
        parts.append(means.flatten(1))
    expected = torch.cat(parts, 1)
    assert teacher.output_dim == expected.shape[1]
    torch.testing.assert_close(teacher(x), expected, rtol=5e-3, atol=5e-3)  # half precision
    if mirror:
        torch.testing.assert_close(teacher(x.flip(3)), teacher(x), rtol=1e-4, atol=1e-4)


def test_pictures_are_looked_at_whatever_their_light():
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(standardised(5 * x + 3), standardised(50 * x), rtol=0, atol=1e-2)
    assert not standardised(torch.full((1, 3, 4, 4), 0.3)).any()


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((3, 32, 32), (32, 32)),
        ((1, 28, 28), (28, 28)),
        ((1, 8, 8), (16, 16)),
        ((3, 5, 9), (20, 36)),
        ((3, 17, 40), (17, 40)),
        ((3, 64, 80), (64, 80)),
        ((3, 84, 84), (42, 42)),
        ((3, 224, 300), (37, 50)),
    ],
)
def test_images_of_any_size_grey_and_colour(weights, shape, size):
    teacher = Synthetic(weights, beside=None).teacher(shape, 10**6, 0, CPU)
    x = torch.rand(2, *shape)
    found = teacher(x)
    assert teacher.size == size
    assert found.shape == (2, teacher.output_dim) and found.isfinite().all()
    assert not torch.allclose(found[0], found[1])
    if shape[0] == 1:  # grey ones are colour ones without colour
        colour = Synthetic(weights, beside=None).teacher((3, *shape[1:]), 10**6, 0, CPU)
        torch.testing.assert_close(colour(x.expand(-1, 3, -1, -1)), found)


def test_pictures_do_not_depend_on_their_company(weights):
    teacher = Synthetic(weights, beside=None).teacher((3, 16, 16), 10**6, 0, CPU)
    x = torch.rand(70, 3, 16, 16)
    alone = torch.cat([teacher(one) for one in x.split(1)])
    torch.testing.assert_close(teacher(x), alone, rtol=1e-4, atol=1e-4)


def test_fewer_features_are_mixtures_that_the_seed_decides(weights):
    recipe, x = Synthetic(weights, beside=None), torch.rand(2, 3, 16, 16)
    whole = recipe.teacher((3, 16, 16), 10**6, 0, CPU)
    a, b, c = (recipe.teacher((3, 16, 16), 20, seed, CPU) for seed in (1, 1, 2))
    assert a.output_dim == 20 and a(x).shape == (2, 20)
    torch.testing.assert_close(a(x), whole(x) @ a.mix)
    assert torch.equal(a(x), b(x)) and not torch.equal(a(x), c(x))
    assert a.checksum == b.checksum != c.checksum


@pytest.mark.parametrize("mirror", [False, True])
def test_filters_stand_beside_the_network_where_more_features_are_asked_for(weights, mirror):
    shape, x = (3, 16, 16), torch.rand(4, 3, 16, 16)
    filters = Filters(sizes=(3,), grids=(2,), mirror=not mirror)  # the recipe's own counts
    recipe = Synthetic(weights, mirror=mirror, beside=filters)
    network = replace(recipe, beside=None).teacher(shape, 10**6, 0, CPU)
    fewest, n = recipe.beside.fewest, network.output_dim
    teacher = recipe.teacher(shape, n + 3 * fewest + 1, 0, CPU)
    assert teacher.output_dim == n + 3 * fewest
    found = teacher(x)
    assert torch.equal(found[:, :n], network(x))
    expected = replace(filters, mirror=mirror).teacher(shape, 3 * fewest, 0, CPU)
    assert torch.equal(found[:, n:], expected(x))
    other = recipe.teacher(shape, n + 3 * fewest + 1, 1, CPU)(x)
    assert torch.equal(other[:, :n], network(x)) and not torch.equal(other, found)
    assert recipe.teacher(shape, n + fewest - 1, 0, CPU).output_dim == n  # too few for filters
    assert recipe.teacher(shape, n + fewest, 0, CPU).output_dim == n + fewest


def test_a_model_with_both_is_saved_and_its_parts_are_checked(weights, encoder, tmp_path):
    path, X = tmp_path / "model.safetensors", np.random.default_rng(0).random((8, 16, 16))
    recipe = Synthetic(weights, beside=Filters(sizes=(3,), grids=(1, 2), threshold=0.2))
    model = WhitenedPEC(teacher=recipe, dim=200).fit(X, [0, 1] * 4)
    model.save(path)
    again = pecil.load(path)
    assert again.teacher == recipe and again.dim_ == model.dim_ > 180
    np.testing.assert_array_equal(again.errors(X), model.errors(X))
    with torch.no_grad():
        encoder.layers[0][0].weight.mul_(2)
    save_weights(encoder, weights, {})
    with pytest.raises(pecil.ModelFileError, match="the teacher here is not the one"):
        pecil.load(path)


def test_it_teaches_and_its_weights_count(weights, tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    X = (rng.random((60, 16, 16, 3)) * 80).astype(np.uint8)
    X[y == 1, :, 4:8] += 120  # a bright bar
    numbers = load_weights(weights).count
    recipe = Synthetic(weights, (4, 3, 2))
    model = WhitenedPEC(teacher=recipe, memory=numbers + 5_000, expected_classes=2)
    model.fit(X[:40], y[:40])
    assert model.score(X[40:], y[40:]) == 1
    assert model.dim_ == 97  # 97·98/2 + 2·97 ≤ 5,000
    assert model.n_parameters_ == 97 * 98 // 2 + 2 * 97 + numbers
    model.save(tmp_path / "model.safetensors")
    again = pecil.load(tmp_path / "model.safetensors")
    assert np.array_equal(again.errors(X), model.errors(X))
    assert np.array_equal(pickle.loads(pickle.dumps(model)).errors(X), model.errors(X))
    message = f"memory=100 is too small: .* take {3 + numbers} numbers, {numbers} of them the teach"
    with pytest.raises(ValueError, match=message):
        WhitenedPEC(teacher=Synthetic(weights), memory=100, expected_classes=2).fit(X, y)


def test_a_model_wants_the_weights_it_was_trained_with(weights, encoder, tmp_path):
    X = np.random.default_rng(0).random((8, 16, 16))
    model = WhitenedPEC(teacher=Synthetic(weights), dim=10).fit(X, [0, 1] * 4)
    model.save(tmp_path / "model.safetensors")
    with torch.no_grad():
        encoder.layers[0][0].weight.mul_(2)
    save_weights(encoder, weights, {})
    with pytest.raises(pecil.ModelFileError, match="the teacher here is not the one"):
        pecil.load(tmp_path / "model.safetensors")


def test_weights_are_few_and_in_half_precision(weights):
    found = load_weights(weights)
    sizes = [3, *CHANNELS]
    expected = sum(9 * a * b + b for a, b in zip(sizes, CHANNELS, strict=False))
    assert found.count == expected == Synthetic(weights).n_weights
    assert found.channels == list(CHANNELS)
    assert found.about == {"note": "a test"}


def test_mirror_of_the_estimator_is_the_teachers(weights):
    X = np.random.default_rng(0).random((4, 16, 16))
    model = WhitenedPEC(teacher=Synthetic(weights), dim=10, mirror=False).fit(X, [0, 1, 0, 1])
    assert model._teacher.recipe.mirror is False


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Synthetic(grids=(4, 3)), r"grids must be 3 whole numbers .* they are \(4, 3\)"),
        (lambda: Synthetic(grids=(4, 3, -1)), "grids must be 3 whole numbers of at least 0"),
        (lambda: Synthetic(grids=(0, 0, 0)), "grids must not all be 0"),
        (lambda: Synthetic(grids=3), "grids must be 3 whole numbers .* they are 3"),
        (lambda: Synthetic(reduce=0), "reduce must be a whole number of at least 1, .* is 0"),
        (lambda: Encoder((1, 2, 3)), r"channels must be 6 whole numbers .* \(1, 2, 3\)"),
    ],
)
def test_wrong_settings_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_wrong_files_and_samples_are_refused(weights, tmp_path):
    with pytest.raises(FileNotFoundError, match="or a file, got 'huge'"):
        load_weights("huge")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(Path(weights).read_bytes()[:-100])
    with pytest.raises(ValueError, match="expected tensors in the safetensors format"):
        load_weights(str(broken))
    pecil.files.write_tensors(broken, {"a": torch.ones(2)}, {})
    with pytest.raises(ValueError, match=re.escape("holds ['a'], not the weights of a teacher")):
        load_weights(str(broken))
    for shape in ((5,), (4, 16, 16)):
        with pytest.raises(ValueError, match="needs grey or colour images"):
            Synthetic(weights).teacher(shape, 10, 0, CPU)


# ------------------------------------------------------------- weights of the package


@pytest.mark.parametrize("name", SHIPPED)
def test_the_packages_weights_load_are_few_and_tell_how_they_were_made(name):
    found = load_weights(name)
    assert found.sha256 == SHIPPED[name]
    assert found.count < 5_000_000
    assert all(values.isfinite().all() for values in found.tensors.values())
    settings = found.about["settings"]
    assert found.channels == settings["channels"] and found.about["steps"] == settings["steps"]
    again = Settings(**settings | {"channels": tuple(settings["channels"])})  # can be trained
    assert json.loads(json.dumps(asdict(again))) == settings  # nothing is left to defaults


def test_the_packages_weights_take_no_more_than_ten_megabytes():
    """Those that are there, with room for a network of the default size beside the small one."""
    sizes = {path.stem: path.stat().st_size for path in network.HERE.glob("*.safetensors")}
    assert set(sizes) == set(SHIPPED)
    default = sum(p.numel() for p in Encoder(Settings.channels).parameters())
    assert sum(sizes.values()) + (2 * default if len(sizes) == 1 else 0) < 10_000_000


def test_weights_of_the_package_that_are_damaged_are_refused(weights, monkeypatch, tmp_path):
    monkeypatch.setattr(network, "HERE", Path(weights).parent)
    Path(weights).rename(Path(weights).with_stem("small"))
    with pytest.raises(ValueError, match="small.safetensors is damaged: its SHA-256 is .* anew"):
        load_weights("small")
    monkeypatch.setattr(network, "HERE", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="expected weights out of small"):
        load_weights("small")


@pytest.mark.parametrize("name", ["synthetic", "synthetic-strokes", "synthetic-signs"])
def test_teachers_by_name_have_a_network_and_filters(name):
    """Some digits of scikit-learn, enlarged; all features of the network, and filters."""
    digits = load_digits()
    X, y = digits.images[:600], digits.target[:600]
    memory = RECIPES[name].n_weights + 1_000_000
    model = WhitenedPEC(teacher=name, memory=memory, mean=8, std=8).fit(X[:300], y[:300])
    assert model.dim_ > RECIPES[name].teacher((1, 8, 8), 1, 0, CPU).features
    assert model.n_parameters_ <= memory
    assert model.score(X[300:], y[300:]) > 0.8
