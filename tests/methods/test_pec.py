import numpy as np
import pytest
import torch

from pecil.methods.learner import resized
from pecil.methods.pec import PECLearner

SETTINGS = {"architecture": "linear", "output_dim": 6, "lr": 0.01, "device": "cpu"}


@pytest.mark.parametrize("shape", [(12, 12), (12, 12, 3)])
def test_images_are_looked_at_in_another_size(shape):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (20, *shape), dtype=np.uint8)
    y = np.arange(20) % 2
    smaller = resized(torch.from_numpy(x), 8).numpy()
    given, alone = PECLearner(2, shape, size=8, **SETTINGS), PECLearner(2, (8, 8), **SETTINGS)
    for learner, samples in ((given, x), (alone, smaller)):
        for label in (0, 1):
            learner.begin_task({label: 10})
            learner.learn(samples[y == label], y[y == label])
    assert np.array_equal(given.scores(x), alone.scores(smaller))
    assert given.n_parameters == alone.n_parameters


def test_a_buffer_keeps_them_in_that_size():
    x = np.random.default_rng(0).integers(0, 256, (20, 12, 12), dtype=np.uint8)
    y = np.arange(20) % 2
    learner = PECLearner(2, (12, 12), size=8, balancing="buffer", buffer=5, **SETTINGS)
    for label in (0, 1):
        learner.begin_task({label: 10})
        learner.learn(x[y == label], y[y == label])
    assert learner.kept.fields["x"].shape == (5, 8, 8)
    assert learner.scores(x).shape == (20, 2)
