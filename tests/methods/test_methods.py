import re
import tomllib
from importlib import resources

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NearestCentroid

from pecil.data import DATASETS
from pecil.methods import METHODS, Trained, whitened_pec
from pecil.methods.learner import Inputs
from pecil.teachers import RECIPES

SMALL = {
    "whitened_pec": {"teacher": "relu", "dim": 40},
    "pec": {"teacher_width": 50},
    "randumb": {"dim": 40},
    "slda": {"shrinkage": 1e-4},
    "nearest_mean": {},
    **{name: {"lr": 0.01} for name, method in METHODS.items() if method.by_task},
    "bic": {"lr": 0.01, "bias_epochs": 5},
    "vae_gc": {"lr": 0.01, "importance_samples": 5},
    "ensemble": {"lr": 0.01, "hidden": [10]},
}
WITHOUT_CHANCE = {"slda", "nearest_mean"}  # no teacher to be drawn


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


@pytest.fixture
def blobs():
    random = np.random.default_rng(0)
    y = np.arange(3).repeat(40)
    return (4 * np.eye(3)[y] + random.normal(size=(120, 3))).astype(np.float32), y


def taught(method, x, y, *, seed=0, n_classes=4, batch=10):
    learner = method.learner(n_classes, x.shape[1:], seed=seed, device="cpu", **SMALL[method.name])
    learner.begin_task({label: int((y == label).sum()) for label in np.unique(y).tolist()})
    order = np.random.default_rng(0).permutation(len(x))
    for rows in np.split(order, range(batch, len(x), batch)):
        learner.learn(x[rows], y[rows])
    learner.end_task()
    return learner


def test_the_name_leads_to_the_method(method):
    assert METHODS[method.name] is method
    assert method.title
    assert method.reference
    assert method.description


def test_another_seed_gives_other_scores_where_something_is_left_to_chance(method, blobs):
    first, other = (taught(method, *blobs, seed=seed).scores(blobs[0]) for seed in (1, 2))
    assert np.allclose(first[:, :3], other[:, :3]) == (method.name in WITHOUT_CHANCE)


def test_bytes_are_normalised_per_channel(method):
    random = np.random.default_rng(0)
    shape, mean, std = (4, 4, 3), (0.1, 0.5, 0.3), (0.2, 0.1, 0.5)
    images = random.integers(0, 256, (20, *shape), dtype=np.uint8)
    y = np.arange(2).repeat(10)
    scores = []
    for x, normalisation in (
        (images, {"mean": mean, "std": std}),
        (((images / 255 - mean) / std).astype(np.float32), {}),
    ):
        learner = method.learner(2, shape, device="cpu", **SMALL[method.name], **normalisation)
        if isinstance(learner, Trained):
            scores.append(learner.view(torch.from_numpy(x)))
            continue
        learner.begin_task({0: 10, 1: 10})
        learner.learn(x, y)
        scores.append(learner.scores(x))
    np.testing.assert_allclose(*scores, rtol=1e-3, atol=1e-3)


def test_settings_are_what_a_user_can_choose(method):
    assert set(SMALL[method.name]) <= set(method.settings)
    assert not {"mean", "std", "seed", "random_state", "device", "n_classes"} & set(method.settings)
    assert len(set(method.settings)) == len(method.settings)


def test_each_method_has_its_own_settings():
    assert {"lr", "batch_size", "schedule"} <= set(METHODS["pec"].settings)
    assert {"lr", "batch_size", "hidden"} <= set(METHODS["finetuning"].settings)
    assert "teacher" not in METHODS["pec"].settings
    wanted = {"teacher", "memory", "dim", "mirror", "shrinkage", "gamma", "ridge", "sizes"}
    assert wanted <= set(METHODS["whitened_pec"].settings)
    assert not {"expected_classes", "kind", "epochs"} & set(METHODS["whitened_pec"].settings)
    assert set(METHODS["randumb"].settings) == {"dim", "memory", "gamma", "flip", "shrinkage"}
    assert METHODS["slda"].settings == ("shrinkage", "size")
    assert METHODS["nearest_mean"].settings == ("size",)
    assert METHODS["joint"].settings == METHODS["finetuning"].settings


def test_slda_adds_its_shrinkage_to_the_diagonal_as_it_stands(blobs):
    x, y = blobs
    x = x * np.array([1, 10, 0.1], np.float32)
    learner = METHODS["slda"].learner(4, (3,), device="cpu", shrinkage=0.3)
    for rows in np.split(np.random.default_rng(0).permutation(120), 12):
        learner.learn(x[rows], y[rows])
    means = np.stack([x[y == label].mean(0, dtype=float) for label in range(3)])
    covariance = np.cov((x - means[y]).T, ddof=0)
    weights = np.linalg.solve(0.7 * covariance + 0.3 * np.eye(3), means.T)
    expected = x @ weights - 0.5 * (means.T * weights).sum(0)
    np.testing.assert_allclose(learner.scores(x)[:, :3], expected, rtol=1e-4, atol=1e-4)
    assert learner.n_parameters == 3 * 3 + 6


def test_slda_without_the_covariance_is_nearest_mean(blobs):
    x, y = blobs
    learner = METHODS["slda"].learner(4, (3,), device="cpu", shrinkage=1.0)
    learner.learn(x, y)
    nearest = taught(METHODS["nearest_mean"], x, y)
    np.testing.assert_allclose(learner.scores(x), nearest.scores(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["slda", "nearest_mean", "finetuning"])
def test_before_the_first_sample_every_class_is_unknown(name):
    learner = METHODS[name].learner(4, (3,), device="cpu")
    assert np.isneginf(learner.scores(np.zeros((2, 3)))).all()
    assert learner.scores(np.zeros((0, 3))).shape == (0, 4)


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3)])
def test_pictures_are_resized_as_pil_does_it(shape):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, *shape), dtype=np.uint8)
    expected = np.stack([image.fromarray(x).resize((3, 3), image.BILINEAR) for x in pixels])
    found = Inputs("cpu", size=3)(pixels) * 255
    assert (
        found.shape == (5, Inputs("cpu", size=3).n_features(shape)) == (5, 9 * pixels[0, 0, 0].size)
    )
    assert np.abs(found.numpy() - expected.reshape(5, -1)).max() < 1.01
    with pytest.raises(ValueError, match="images of bytes, but samples are torch.float32"):
        Inputs("cpu", size=3)(np.zeros((2, 8), np.float32))


def test_a_shrinkage_of_nothing_is_refused():
    with pytest.raises(ValueError, match="above 0 and at most 1, but it is 0"):
        METHODS["slda"].learner(2, (3,), shrinkage=0)


def test_slda_is_linear_discriminant_analysis(blobs):
    x, y = blobs
    reference = LinearDiscriminantAnalysis().fit(x, y)
    ours = taught(METHODS["slda"], x, y).scores(x).argmax(axis=1)
    np.testing.assert_array_equal(ours, reference.predict(x))


def test_nearest_mean_is_plain_distance_and_holds_the_means_alone(blobs):
    x, y = blobs
    x = x * np.array([1, 10, 0.1], np.float32)  # so that whitening would change the answers
    learner = taught(METHODS["nearest_mean"], x, y)
    expected = NearestCentroid().fit(x, y).predict(x)
    np.testing.assert_array_equal(learner.scores(x).argmax(axis=1), expected)
    assert (expected != taught(METHODS["slda"], x, y).scores(x).argmax(axis=1)).any()
    assert learner.n_parameters == 3 * 3


@pytest.mark.parametrize("name", ["finetuning", "joint"])
def test_networks_say_what_they_cannot_be(name):
    with pytest.raises(ValueError, match="one of linear, constant, not 'cosine'"):
        METHODS[name].learner(2, (8,), schedule="cosine")
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1, not 0"):
        METHODS[name].learner(2, (8,), batch_size=0)


def test_fine_tuning_pushes_down_classes_that_have_not_come(blobs):
    x, y = blobs
    learner = METHODS["finetuning"].learner(4, (3,), device="cpu", lr=0.01)
    inputs = learner.view(torch.from_numpy(x))
    before = learner.network(inputs).log_softmax(1)[:, 3].mean()
    for rows in np.split(np.arange(120), 12):
        learner.learn(x[rows], y[rows])
    assert (
        learner.network(learner.view(torch.from_numpy(x))).log_softmax(1)[:, 3].mean() < before - 1
    )


def test_the_linear_schedule_falls_to_zero_within_a_task(blobs):
    x, y = blobs
    learner = METHODS["finetuning"].learner(
        3, (3,), device="cpu", lr=0.01, schedule="linear", batch_size=40
    )
    rates = []
    for _ in range(2):
        learner.begin_task({0: 40, 1: 40, 2: 40})
        for rows in np.split(np.arange(120), 3):
            learner.learn(x[rows], y[rows])
            rates.append(float(learner.rate))
    np.testing.assert_allclose(rates, 0.01 * np.array([1, 2 / 3, 1 / 3] * 2))
    before = learner.scores(x)
    learner.learn(x, y)  # more than was announced
    np.testing.assert_array_equal(learner.scores(x), before)


def test_joint_training_has_one_task(blobs):
    learner = taught(METHODS["joint"], *blobs)
    with pytest.raises(ValueError, match="one task, with all classes .* classes 1, 2"):
        learner.begin_task({1: 4, 2: 4})


@pytest.mark.parametrize("dataset", DATASETS)
def test_settings_for_splits_and_passes_change_settings_that_exist(dataset):
    file = resources.files("pecil.bench") / "settings" / f"{dataset}.toml"
    sections = tomllib.loads(file.read_text(encoding="utf-8"))
    for section, changes in sections.items():
        name, _, condition = section.partition(" ")
        assert set(changes) - {"augment", "optimizer"} <= set(sections[name])
        assert re.fullmatch(r"(\d+/\d+|\d+ep)?", condition)


def test_memory_holds_the_covariance_and_all_the_classes_to_come(blobs):
    learner = METHODS["whitened_pec"].learner(7, (3,), device="cpu", teacher="relu", memory=500)
    learner.learn(*blobs)
    dim = learner.model.dim_
    assert dim * (dim + 1) // 2 + 7 * dim <= 500 < (dim + 1) * (dim + 2) // 2 + 7 * (dim + 1)
    assert learner.n_parameters == dim * (dim + 1) // 2 + 3 * dim


def test_randumb_learns_mirror_images_too():
    x = np.random.default_rng(0).integers(0, 256, (12, 4, 5, 3), dtype=np.uint8)
    y, both = np.arange(12) % 2, []
    for images in (x, x[:, :, ::-1]):
        learner = METHODS["randumb"].learner(2, (4, 5, 3), device="cpu", dim=30, flip=True)
        learner.learn(images, y)
        both.append(learner.scores(x))
        assert learner.model.samples_seen_ == {0: 12, 1: 12}
    np.testing.assert_allclose(*both, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="flip is for images, but samples are vectors of 8"):
        METHODS["randumb"].learner(2, (8,), flip=True)


def test_randumbs_size_is_that_of_its_authors_unless_memory_says_otherwise():
    assert METHODS["randumb"].learner(2, (8,)).model.dim == 25_000
    small = METHODS["randumb"].learner(2, (8,), memory=1000, gamma=0.5).model
    assert (small.dim, small.memory, small.teacher.gamma) == (None, 1000, 0.5)


def test_fields_of_a_recipe_are_settings():
    model = whitened_pec("signs", ridge=1.0, sizes=[3, 5], mirror=True, memory=5000)
    assert (model.teacher.ridge, model.teacher.sizes, model.mirror) == (1.0, (3, 5), True)
    assert model.teacher.grids == RECIPES["signs"].grids
    assert whitened_pec("signs", memory=5000).teacher == "signs"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ridge": 1.0}, "to change ridge, name a teacher out of natural, .*'auto'"),
        ({"teacher": ["signs"], "ridge": 1.0}, r"but teacher is \['signs'\]"),
        ({"teacher": "rbf", "ridge": 1.0}, "'rbf' has no setting ridge; it has gamma$"),
        ({"teacher": "identity", "gamma": 1.0}, "'identity' has no setting gamma; it has none$"),
        ({"teacher": "signs", "ridge": -1.0}, "ridge must be a positive number, but it is -1.0"),
        (
            {"teacher": "signs", "ridge": "high"},
            "ridge must be a positive number, .*'high'",
        ),
        (
            {"teacher": "signs", "sizes": 3},
            "sizes must be a tuple of whole numbers .* is 3",
        ),
    ],
)
def test_settings_that_a_teacher_does_not_have_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        whitened_pec(**settings)


@pytest.mark.parametrize("name", ["icarl", "bic", "xder", "vae_gc", "ensemble"])
def test_the_labels_trick_is_refused_where_it_would_do_nothing(name):
    with pytest.raises(ValueError, match=r"labels_trick: .* expected False, got True"):
        METHODS[name].learner(3, (6,), labels_trick=True, device="cpu")
