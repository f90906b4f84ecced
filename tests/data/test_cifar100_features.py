"""CIFAR-100's features: the network, what decides it, and how they are kept."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from pecil.data import DATASETS, Dataset, cifar100_features, load, registry
from pecil.data.cifar100_features import Pretraining, features_of


def pictures(name, n=40, seed=0):
    random = np.random.default_rng(seed)
    x = random.integers(0, 256, (n, 32, 32, 3), np.uint8)
    y, info = np.arange(n) % DATASETS[name].n_classes, DATASETS[name]
    return Dataset(name, x, y, x[:7], y[:7], mean=info.mean, std=info.std)


@pytest.fixture
def brief(monkeypatch):
    """Make pre-training short."""
    monkeypatch.setattr(cifar100_features, "BATCH", 10)
    monkeypatch.setattr(cifar100_features, "HIDDEN", 20)


def test_the_network():
    learner = Pretraining(10, (32, 32, 3), device="cpu")
    features, *rest = learner.network.body
    kinds = [type(layer).__name__ for layer in features]
    assert kinds == [*["Conv2d", "BatchNorm2d", "ReLU"] * 4, "Conv2d", "Flatten"]
    convolutions = [layer for layer in features if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [16, 32, 64, 128, 256]
    assert [layer.stride[0] for layer in convolutions] == [1, 2, 2, 2, 2]
    assert features(torch.zeros(2, 3, 32, 32)).shape == (2, 1024)
    widths = [layer.out_features for layer in rest if isinstance(layer, nn.Linear)]
    assert [*widths, learner.network.head.out_features] == [2000, 2000, 10]


def test_features_depend_on_the_seed_and_on_what_was_learned(brief):
    data = pictures("cifar100"), pictures("cifar10", seed=1)
    first, same, other, untrained = (
        features_of(*data, passes=passes, seed=seed, device="cpu")
        for passes, seed in ((2, 1), (2, 1), (2, 2), (0, 1))
    )
    assert first["train_x"].shape == (40, 1024) and first["test_x"].shape == (7, 1024)
    assert first["train_x"].dtype == np.float32
    np.testing.assert_array_equal(first["train_x"], same["train_x"])
    for another in (other, untrained):
        assert not np.allclose(first["train_x"], another["train_x"], atol=1e-3)
    np.testing.assert_allclose(first["train_x"][:7], first["test_x"], atol=1e-5)
    np.testing.assert_array_equal(first["train_y"], data[0].train_y)
    assert first["note"].startswith("features of a network trained on cifar10, 2 passes, seed 1, ")
    assert first["note"] == same["note"] != other["note"]


def test_what_is_learned_is_of_use(brief, monkeypatch):
    """Pictures of one colour, of which the network learns to tell ten apart."""
    monkeypatch.setattr(cifar100_features, "RATE", 0.003)
    data = pictures("cifar10", n=200)
    colours = np.random.default_rng(1).integers(0, 256, (10, 3), np.uint8)
    data.train_x[:] = colours[data.train_y][:, None, None]
    seen = []
    learn = Pretraining.learn

    def watched(self, x, y):
        learn(self, x, y)
        seen.append((len(x), float((self.scores(data.train_x).argmax(1) == data.train_y).mean())))

    monkeypatch.setattr(Pretraining, "learn", watched)
    features_of(pictures("cifar100", n=5), data, passes=6, device="cpu")
    assert [n for n, _ in seen] == [200] * 6
    assert seen[-1][1] > max(0.5, seen[0][1])


def test_they_are_made_once_and_kept(brief, tmp_path, monkeypatch):
    for name, n in (("cifar100", 100), ("cifar10", 20)):
        made = pictures(name, n)
        parts = {"train_x": made.train_x, "train_y": made.train_y}
        np.savez(tmp_path / f"{name}.npz", **parts, test_x=made.train_x, test_y=made.train_y)
    usual = features_of.__kwdefaults__ | {"passes": 2, "device": "cpu"}
    monkeypatch.setattr(features_of, "__kwdefaults__", usual)
    first = load("cifar100_features", root=tmp_path, download=False)
    assert first.train_x.shape == (100, 1024)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cifar10.npz",
        "cifar100.npz",
        "cifar100_features.npz",
        "cifar100_network.safetensors",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(cifar100_features, "features_of", None)  # not asked again
        again = load("cifar100_features", root=tmp_path, download=False)
    np.testing.assert_array_equal(first.train_x, again.train_x)
    words = "features of a network trained on cifar10, 2 passes, seed 0, SHA-256 "
    assert again.note == first.note and again.note.startswith(words)

    (tmp_path / "cifar100_features.npz").unlink()
    monkeypatch.setattr(Pretraining, "learn", None)  # the network is not trained again
    anew = load("cifar100_features", root=tmp_path, download=False)
    np.testing.assert_array_equal(first.train_x, anew.train_x)
    assert anew.note == first.note


def test_only_one_process_makes_them(brief, tmp_path, monkeypatch):
    """Whoever comes while they are made waits, and takes what was made."""
    path = tmp_path / "cifar100_features.npz"

    def make(*sources, weights):
        raise AssertionError("made twice")

    @contextmanager
    def meanwhile(waited_for):
        assert waited_for == path
        made = pictures("cifar100", 100)
        x = np.zeros((100, 1024), np.float32)
        np.savez(path, train_x=x, test_x=x, train_y=made.train_y, test_y=made.train_y, note="other")
        yield

    monkeypatch.setattr(cifar100_features, "features_of", make)
    monkeypatch.setattr(registry, "alone", meanwhile)
    assert load("cifar100_features", root=tmp_path, download=False).note == "other"


def test_nothing_is_kept_of_what_failed(brief, tmp_path, monkeypatch):
    for name in ("cifar100", "cifar10"):
        made = pictures(name, 100)
        parts = {"train_x": made.train_x, "train_y": made.train_y}
        np.savez(tmp_path / f"{name}.npz", **parts, test_x=made.train_x, test_y=made.train_y)
    monkeypatch.setattr(Pretraining, "learn", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load("cifar100_features", root=tmp_path, download=False)
    assert not (tmp_path / "cifar100_features.npz").exists()
