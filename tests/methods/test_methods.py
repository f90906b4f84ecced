import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NearestCentroid

from pecil.methods import METHODS, whitened_pec
from pecil.pec.teachers import RECIPES

SMALL = {
    "whitened_pec": {"teacher": "relu", "dim": 40},
    "pec": {"teacher_width": 50},
    "randumb": {"dim": 40},
    "slda": {},
    "nearest_mean": {},
    "finetuning": {"lr": 0.01},
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


def test_learns_easy_data_and_never_predicts_a_class_never_seen(method, blobs):
    x, y = blobs
    scores = taught(method, x, y).scores(x)
    assert scores.shape == (120, 4)
    assert (scores.argmax(axis=1) == y).mean() > 0.8
    assert np.isneginf(scores[:, 3]).all()
    assert np.isfinite(scores[:, :3]).all()


def test_the_same_seed_gives_the_same_scores_and_another_seed_others(method, blobs):
    first, again, other = (taught(method, *blobs, seed=s).scores(blobs[0]) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.allclose(first[:, :3], other[:, :3]) == (method.name in WITHOUT_CHANCE)


def test_scores_change_nothing_and_do_not_depend_on_the_batch(method, blobs):
    x, y = blobs
    learner = taught(method, x, y)
    whole = learner.scores(x)
    single = np.concatenate([learner.scores(sample[None]) for sample in x])
    np.testing.assert_allclose(single, whole, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(learner.scores(x), whole)


def test_learning_leaves_its_inputs_unchanged(method, blobs):
    x, y = blobs
    x_before, y_before = x.copy(), y.copy()
    taught(method, x, y)
    np.testing.assert_array_equal(x, x_before)
    np.testing.assert_array_equal(y, y_before)


def test_bytes_are_normalised_per_channel(method):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (20, 4, 4, 3), dtype=np.uint8)
    mean, std = (0.1, 0.5, 0.3), (0.2, 0.1, 0.5)
    y = np.arange(2).repeat(10)
    scores = []
    for x, normalisation in (
        (images, {"mean": mean, "std": std}),
        (((images / 255 - mean) / std).astype(np.float32), {}),
    ):
        learner = method.learner(2, (4, 4, 3), device="cpu", **SMALL[method.name], **normalisation)
        learner.begin_task({0: 10, 1: 10})
        learner.learn(x, y)
        scores.append(learner.scores(x))
    np.testing.assert_allclose(*scores, rtol=1e-3, atol=1e-5)


def test_settings_are_what_a_user_can_choose(method):
    assert set(SMALL[method.name]) <= set(method.settings)
    assert not {"mean", "std", "seed", "random_state", "device", "n_classes"} & set(method.settings)
    assert len(set(method.settings)) == len(method.settings)


def test_each_method_has_its_own_settings():
    assert {"lr", "batch_size", "epochs"} <= set(METHODS["pec"].settings)
    assert {"lr", "batch_size", "epochs"} <= set(METHODS["finetuning"].settings)
    assert "teacher" not in METHODS["pec"].settings
    wanted = {"teacher", "memory", "dim", "mirror", "shrinkage", "gamma", "ridge", "sizes"}
    assert wanted <= set(METHODS["whitened_pec"].settings)
    assert not {"expected_classes", "kind", "epochs"} & set(METHODS["whitened_pec"].settings)
    assert set(METHODS["randumb"].settings) == {"dim", "memory", "gamma", "flip", "shrinkage"}
    assert METHODS["slda"].settings == ("shrinkage",)
    assert METHODS["nearest_mean"].settings == ()


@pytest.mark.parametrize("name", [name for name, m in METHODS.items() if m.independent])
def test_portions_do_not_matter_where_that_is_said(name, blobs):
    x, y = blobs
    whole, parts = (taught(METHODS[name], x, y, batch=batch).scores(x) for batch in (120, 7))
    by_class = METHODS[name].learner(4, (3,), device="cpu", **SMALL[name])
    shuffled = np.random.default_rng(0).permutation(len(x))  # each class keeps its order
    for label in range(3):
        rows = shuffled[y[shuffled] == label]
        by_class.begin_task({label: 40})
        by_class.learn(x[rows], y[rows])
    for other in (parts, by_class.scores(x)):
        np.testing.assert_allclose(other, whole, rtol=2e-3, atol=2e-3)


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
