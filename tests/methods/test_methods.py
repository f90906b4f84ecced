import numpy as np
import pytest

from pecil.methods import METHODS

SMALL = {"pec": {"teacher_width": 50}, "finetuning": {"lr": 0.01}}


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
    assert not np.allclose(first[:, :3], other[:, :3])


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
    assert {"lr", "batch_size", "epochs"} <= set(method.settings)
    assert not {"mean", "std", "seed", "random_state", "device", "n_classes"} & set(method.settings)
    assert len(set(method.settings)) == len(method.settings)
