import copy
import pickle
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from torch import nn
from torch.nn import functional as F

from pecil import PEC, WhitenedPEC
from pecil.data import Features, ImageFiles, StreamPipeline, features

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (10, 12, 9, 3), dtype=np.uint8)


class Counted(nn.Module):
    """A network with everything that must not change, which counts the images it sees."""

    def __init__(self, channels=3, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.norm = nn.Conv2d(channels, 6, 3), nn.BatchNorm2d(6)
        self.drop, self.seen = nn.Dropout(), 0

    def forward(self, x):
        self.seen += len(x)
        return self.drop(self.norm(self.conv(x)))


@pytest.fixture
def network():
    return Counted()


def expected(network, x):
    """Return the features of a float tensor (n, c, h, w) without any of the machinery."""
    with torch.no_grad():
        return copy.deepcopy(network).eval()(x).mean((2, 3)).numpy()


def made(network, **settings):
    return Features(network, device="cpu", **settings)


def files_in(folder):
    return sorted(folder.rglob("*.npz"))


class TestFeatures:
    def test_are_the_networks_answers_pooled(self, network):
        x = torch.from_numpy(COLOUR).permute(0, 3, 1, 2) / 255
        plain = made(network, batch_size=3, block_size=4).transform(COLOUR)
        assert plain.dtype == np.float32 and plain.shape == (10, 6)
        np.testing.assert_allclose(plain, expected(network, x), atol=1e-6)
        normal = made(network, mean=(0.1, 0.2, 0.3), std=0.5).transform(COLOUR)
        mean = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
        np.testing.assert_allclose(normal, expected(network, (x - mean) / 0.5), atol=1e-6)

    def test_vectors_need_no_pooling(self):
        flat = nn.Sequential(nn.Flatten(), nn.Linear(12 * 9 * 3, 5))
        assert made(flat).transform(COLOUR).shape == (10, 5)

    @pytest.mark.parametrize(("size", "both"), [(7, (7, 7)), ((20, 8), (20, 8))])
    def test_images_are_resized(self, network, size, both):
        x = torch.from_numpy(COLOUR).permute(0, 3, 1, 2) / 255
        x = F.interpolate(x, both, mode="bilinear", antialias=True)
        found = made(network, size=size).transform(COLOUR)
        np.testing.assert_allclose(found, expected(network, x), atol=1e-6)

    def test_every_kind_of_image_means_the_same(self, network):
        extractor = made(network)
        usual = extractor.transform(COLOUR)
        first = COLOUR.transpose(0, 3, 1, 2)
        same = (
            COLOUR.astype(np.float32) / 255,
            torch.from_numpy(first.copy()),
            list(COLOUR),
            [torch.from_numpy(image) for image in COLOUR],
        )
        for x in same:
            np.testing.assert_allclose(extractor.transform(x), usual, atol=1e-5)

    def test_grey_becomes_three_channels_and_colour_becomes_brightness(self, network):
        grey = COLOUR[..., 0]
        found = made(network).transform(grey)
        three = np.repeat(grey[..., None], 3, axis=3)
        np.testing.assert_allclose(found, made(network).transform(three), atol=1e-6)
        alone = made(Counted(1), in_channels=1)
        assert np.array_equal(alone.transform(grey), alone.transform(grey[..., None]))
        np.testing.assert_allclose(alone.transform(three), alone.transform(grey), atol=1e-5)

    def test_a_list_may_mix_sizes(self, network):
        mixed = [COLOUR[0], COLOUR[1][:5], COLOUR[2][..., 0]]
        found = made(network, size=8, batch_size=2).transform(mixed)
        for image, row in zip(mixed, found, strict=True):
            np.testing.assert_allclose(
                made(network, size=8).transform(image[None])[0], row, atol=1e-6
            )
        with pytest.raises(ValueError, match="size must be given for images of different sizes"):
            made(network).transform(mixed)

    def test_half_precision_networks_give_float32(self, network):
        found = made(copy.deepcopy(network).bfloat16()).transform(COLOUR)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, made(network).transform(COLOUR), atol=0.05)

    def test_the_network_stays_as_it_was(self, network):
        network.train()
        network.norm.eval()
        before = copy.deepcopy(network.state_dict())
        made(network).transform(COLOUR)
        assert network.training and network.drop.training and not network.norm.training
        assert all(p.requires_grad for p in network.parameters())
        for name, value in network.state_dict().items():
            assert torch.equal(value, before[name])

    def test_the_mode_is_put_back_after_an_error(self, network):
        network.train()
        with pytest.raises(ValueError):
            made(network, size=2).transform(COLOUR)
        assert network.training and network.drop.training

    def test_blocks_come_one_at_a_time(self, network):
        blocks = made(network, block_size=4).blocks(COLOUR)
        assert network.seen == 0
        assert [next(blocks).shape, network.seen] == [(4, 6), 4]
        assert [len(block) for block in blocks] == [4, 2]

    def test_images_may_stay_on_disk(self, network, tmp_path):
        mapped = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, COLOUR.shape)
        mapped[:] = COLOUR
        mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
        found = made(network, block_size=4).transform(mapped)
        assert np.array_equal(found, made(network, block_size=4).transform(COLOUR))


class TestMistakes:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"size": 0}, "size must be a whole number of at least 1"),
            ({"size": (1, 2, 3)}, "size must be one number, or height and width"),
            ({"batch_size": 0}, "batch_size must be a whole number"),
            ({"block_size": 0}, "block_size must be a whole number"),
            ({"in_channels": 2}, "in_channels must be 1 or 3, but it is 2"),
            ({"std": 0}, "std must be positive"),
            ({"mean": (1, 2)}, "mean must be None, one finite number or 3"),
            ({"device": "cude"}, "device must be 'auto' or one that torch can use"),
        ],
    )
    def test_settings(self, network, settings, message):
        for method in (Features.fit, Features.transform):
            with pytest.raises(ValueError, match=message):
                method(Features(network, **settings), COLOUR)

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (np.zeros((3, 4)), r"expected images of shape .* found shape \(3, 4\)"),
            (COLOUR[0], r"a single one, of shape \(12, 9, 3\): give it as x\[None\]"),
            (COLOUR[:0], "expected images, found none"),
            (np.zeros((2, 8, 8, 4), np.uint8), "expected images with 1 or 3 channels, found 4"),
            (np.full((2, 8, 8), np.nan), "NaN"),
        ],
    )
    def test_images(self, network, x, message):
        with pytest.raises(ValueError, match=message):
            made(network).transform(x)

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (lambda x: x[:, 0], r"shape \(10, d\) or \(10, d, h, w\), got \(10, 12, 9\)"),
            (lambda x: x.flatten(1)[:3], r"got \(3, 324\)"),
            (lambda x: [x], "got list"),
            (lambda x: x.flatten(1) / 0, "NaN or infinite features"),
        ],
    )
    def test_answers(self, answer, message):
        network = nn.Module()
        network.forward = answer
        with pytest.raises(ValueError, match=message):
            made(network).transform(COLOUR)

    def test_networks(self, tmp_path):
        with pytest.raises(ValueError, match="network must be a torch.nn.Module, timm:NAME"):
            made(len).transform(COLOUR)
        with pytest.raises(FileNotFoundError, match="there is no network"):
            made(str(tmp_path / "no.pt")).transform(COLOUR)
        (tmp_path / "bad.pt").write_bytes(b"no network")
        with pytest.raises(ValueError, match=r"bad.pt is damaged or no TorchScript file"):
            made(str(tmp_path / "bad.pt")).transform(COLOUR)


class TestCache:
    def test_finished_blocks_are_found_again(self, network, tmp_path):
        extractor = made(network, block_size=4, cache=tmp_path / "new" / "folder")
        blocks = extractor.blocks(COLOUR)
        two = [next(blocks), next(blocks)]
        blocks.close()  # interrupted
        assert len(files_in(tmp_path)) == 2
        network.seen = 0
        found = extractor.transform(COLOUR)
        assert network.seen == 2 + 2  # the rest, and the probe
        assert np.array_equal(found[:8], np.concatenate(two))
        assert np.array_equal(found, made(network, block_size=4).transform(COLOUR))
        network.seen = 0
        assert np.array_equal(extractor.transform(COLOUR), found)
        assert network.seen == 2  # the probe

    def test_an_interrupted_write_leaves_nothing(self, network, tmp_path, monkeypatch):
        def interrupted(path, **arrays):
            path.write_bytes(b"half")
            raise KeyboardInterrupt

        monkeypatch.setattr(features.np, "savez", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made(network, cache=tmp_path).transform(COLOUR)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    @pytest.mark.parametrize("damage", ["flipped", "cut", "short", "empty"])
    def test_damage_is_noticed_and_computed_again(self, network, tmp_path, damage):
        extractor = made(network, cache=tmp_path)
        right = extractor.transform(COLOUR)
        (path,) = files_in(tmp_path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        if damage == "short":
            np.savez(path, x=right[:3])
        else:
            path.write_bytes({"flipped": content, "cut": content[:-40], "empty": b""}[damage])
        with pytest.warns(UserWarning, match="its features are computed again"):
            assert np.array_equal(extractor.transform(COLOUR), right)
        assert np.array_equal(extractor.transform(COLOUR), right)

    def test_what_features_depend_on_is_told_apart(self, network, tmp_path):
        class Rectified(Counted):
            def forward(self, x):
                return super().forward(x).relu()

        Rectified.__name__ = "Counted"  # only its answers tell
        trained, other = copy.deepcopy(network), Rectified()
        with torch.no_grad():
            trained.norm.running_mean += 0.1
        cases = [
            made(network),
            made(network, size=8),
            made(network, mean=0.1),
            made(network, std=0.1),
            made(trained),
            made(other),
        ]
        for n, case in enumerate(cases, start=1):
            found = case.set_params(cache=tmp_path).transform(COLOUR)
            assert len(files_in(tmp_path)) == n
            assert np.array_equal(found, case.set_params(cache=None).transform(COLOUR))

    @pytest.mark.parametrize("x", [COLOUR.copy(), torch.from_numpy(COLOUR.copy()), list(COLOUR)])
    def test_a_changed_image_is_new(self, network, tmp_path, x):
        extractor = made(network, cache=tmp_path)
        extractor.transform(x)
        x[3][0, 0, 0] ^= 1
        extractor.transform(x)
        assert len(files_in(tmp_path)) == 2

    def test_a_copy_of_the_network_finds_the_features(self, network, tmp_path):
        made(network, cache=tmp_path).transform(COLOUR)
        again = Counted()
        made(again, cache=tmp_path, batch_size=5).transform(COLOUR)
        assert again.seen == 2 and len(files_in(tmp_path)) == 1


def scripted(network, folder):
    """Write a network as TorchScript."""
    path = str(folder / "network.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(network.eval(), torch.rand(2, 3, 12, 9)).save(path)
    return path


class TestNamedNetworks:
    def test_torchscript(self, network, tmp_path):
        path = scripted(network, tmp_path)
        found = made(path, cache=tmp_path).transform(COLOUR)
        np.testing.assert_allclose(found, made(network).transform(COLOUR), atol=1e-6)
        assert np.array_equal(clone(made(path)).transform(COLOUR), found)

    def test_a_copy_for_another_process_loads_its_network_again(self, network, tmp_path):
        extractor = made(scripted(network, tmp_path))
        found = extractor.transform(COLOUR)
        assert np.array_equal(pickle.loads(pickle.dumps(extractor)).transform(COLOUR), found)

    def test_timm_says_how_to_prepare_images(self, network, monkeypatch):
        asked = []
        network.pretrained_cfg = {
            "input_size": (3, 8, 6),
            "mean": (0.1, 0.2, 0.3),
            "std": [0.5] * 3,
        }

        def create_model(name, **options):
            asked.append((name, options))
            if name != "tiny":
                raise RuntimeError("Unknown model (huge)")
            return network

        monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
        extractor = made("timm:tiny")
        found = extractor.transform(COLOUR)
        extractor.transform(COLOUR)
        assert asked == [("tiny", {"pretrained": True, "num_classes": 0})]  # loaded once
        usual = made(Counted(), size=(8, 6), mean=(0.1, 0.2, 0.3), std=0.5)
        assert np.array_equal(found, usual.transform(COLOUR))
        assert np.array_equal(
            made(network, size=7).transform(COLOUR),
            made(Counted(), size=7, mean=(0.1, 0.2, 0.3), std=0.5).transform(COLOUR),
        )
        with pytest.raises(ValueError, match=r"timm cannot make 'huge': Unknown model \(huge\)"):
            extractor.set_params(network="timm:huge").transform(COLOUR)

    def test_timm_may_be_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "timm", None)
        with pytest.raises(ImportError, match=r'pip install "pecil\[timm\]"'):
            made("timm:resnet18").transform(COLOUR)


def photos(n=20, seed=0):
    """Return images of three classes that differ in colour."""
    rng = np.random.default_rng(seed)
    y = np.arange(3 * n) % 3
    x = rng.integers(0, 80, (3 * n, 10, 10, 3))
    x[np.arange(3 * n), :, :, y] += 120
    return x.astype(np.uint8), np.array(["red", "green", "blue"])[y]


LEARNERS = [
    WhitenedPEC(teacher="identity", device="cpu"),
    PEC(student_width=4, teacher_width=100, output_dim=8, lr=0.03, device="cpu"),
]


class TestPipelines:
    @pytest.mark.parametrize("learner", LEARNERS, ids=["whitened", "pec"])
    def test_classes_come_one_by_one(self, network, learner):
        steps = [("features", made(network, size=8)), ("learner", clone(learner))]
        model, (x, y) = StreamPipeline(steps), photos()
        for n, label in enumerate(("blue", "green", "red"), start=1):
            assert model.partial_fit(x[y == label], y[y == label]) is model
            assert len(model.classes_) == n
        test_x, test_y = photos(seed=1)
        assert model.score(test_x, test_y) > 0.9
        vectors = steps[0][1].transform(test_x)
        assert np.array_equal(model.predict(test_x), steps[1][1].predict(vectors))
        rejected = steps[1][1].predict(vectors, reject_as="none")
        assert np.array_equal(model.predict(test_x, reject_as="none"), rejected)

    def test_before_any_classifier(self, network):
        x, y = photos()
        model = StreamPipeline([("f", made(network)), ("c", SGDClassifier(random_state=0))])
        model.partial_fit(x[:30], y[:30], classes=["blue", "green", "red"])
        model.partial_fit(x[30:], y[30:])
        assert model.score(x, y) > 0.9

    def test_in_a_plain_pipeline_and_cross_validation(self, network):
        x, y = photos()
        model = make_pipeline(made(network), clone(LEARNERS[0]))
        assert cross_val_score(model, x, y, cv=3).min() > 0.9
        assert model.fit(x, y).predict(x[:2]).tolist() == y[:2].tolist()

    def test_steps_before_the_last_must_be_ready(self, network):
        x, y = photos()
        model = StreamPipeline([("f", made(network)), ("p", PCA(2)), ("c", clone(LEARNERS[0]))])
        with pytest.raises(NotFittedError):
            model.partial_fit(x, y)
        model.fit(x[:30], y[:30])
        before = model["p"].components_.copy()
        model.partial_fit(x[30:], y[30:])
        assert np.array_equal(model["p"].components_, before)
        assert sum(model["c"].samples_seen_.values()) == 60


class TestImageFiles:
    def test_features_of_files(self, network, tmp_path):
        image = pytest.importorskip("PIL.Image")
        for k, x in enumerate(COLOUR):
            image.fromarray(x).save(tmp_path / f"{k}.png")
        files = ImageFiles(tmp_path, tuple(f"{k}.png" for k in range(10)))
        assert np.array_equal(files, COLOUR) and files.shape == COLOUR.shape
        assert np.array_equal(files[-1], COLOUR[-1])
        assert np.array_equal(files[[4, 2]], COLOUR[[4, 2]])
        found = made(network, block_size=4).transform(files)
        assert np.array_equal(found, made(network, block_size=4).transform(COLOUR))

    def test_photographs_of_different_sizes(self, network, tmp_path):
        image = pytest.importorskip("PIL.Image")
        mixed = [COLOUR[0], COLOUR[1][:5], COLOUR[2]]
        for k, x in enumerate(mixed):
            image.fromarray(x).save(tmp_path / f"{k}.png")
        files = ImageFiles(tmp_path, ("0.png", "1.png", "2.png"))
        found = made(network, size=8).transform(files)
        assert np.array_equal(found, made(network, size=8).transform(mixed))

    def test_a_damaged_image_is_named(self, tmp_path):
        (tmp_path / "a.png").write_bytes(b"no image")
        with pytest.raises(ValueError, match=r"cannot read the image .*a.png"):
            ImageFiles(tmp_path, ("a.png",))[0]


def test_a_network_that_does_not_fit_says_what_it_was_given():

    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 5))
    with pytest.raises(ValueError, match=r"cannot take images of shape \(3, 4, 4\); size="):
        Features(network, device="cpu").transform(np.zeros((2, 4, 4, 3), np.uint8))
    with pytest.raises(ValueError, match=r"cannot take samples of shape \(6,\): "):
        WhitenedPEC(teacher=torch.nn.Linear(5, 3), device="cpu").fit(np.zeros((2, 6)), [0, 1])
