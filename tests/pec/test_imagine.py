"""Inputs that a class finds its own: the descended error is the model's, and it falls."""

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from pecil import PEC, WhitenedPEC
from pecil.pec import imagine as imagining
from pecil.pec.imagine import differentiable, imagine

KINDS = {
    "mlp": ((6,), {}),
    "deep mlp": ((6,), {"hidden_layers": 2}),
    "linear": ((6,), {"architecture": "linear"}),
    "ensemble": ((6,), {"ensemble": 2}),
    "whitened metric": ((6,), {"metric": "whitened"}),
    "normalised": ((6,), {"mean": 0.3, "std": 2.0}),
    "conv": ((3, 9, 9), {"architecture": "conv", "pool": 2, "mean": [0.1, 0.2, 0.3]}),
    "conv, gelu": ((1, 9, 9), {"architecture": "conv", "pool": 2, "activation": "gelu"}),
    "deep conv": ((3, 9, 9), {"architecture": "conv", "pool": 2, "hidden_layers": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_descended_is_the_error_of_the_class(kind, small, clusters, monkeypatch):
    shape, changes = KINDS[kind]
    x, y = clusters(n=8, shape=shape)
    model = small(channels="first", **changes).fit(x, y)
    wanted = model.errors(x)[np.arange(len(y)), [model.classes_.tolist().index(c) for c in y]]
    slots = [model._slots[label] for label in y]
    samples = torch.tensor(x, requires_grad=True)
    whole = list(differentiable(model, slots)(samples))
    np.testing.assert_allclose(torch.cat(whole).detach(), wanted, rtol=2e-4)
    monkeypatch.setattr(imagining, "most", lambda device: 1)  # one sample at a time
    parts = list(differentiable(model, slots)(samples))
    assert len(whole) == 1 < len(parts) == len(y)
    np.testing.assert_allclose(torch.cat(parts).detach(), wanted, rtol=2e-4)


def test_the_gradient_is_that_of_the_models_errors(small, clusters):
    x, y = clusters(n=8)
    model = small().fit(x, y)
    sample = torch.tensor(x[:1], requires_grad=True)
    for part in differentiable(model, [model._slots["a"]])(sample):
        torch.autograd.backward(part.sum())
    for k in range(x.shape[1]):
        step = np.zeros_like(x[:1])
        step[0, k] = 0.01
        up, down = (model.errors(moved)[0, 0] for moved in (x[:1] + step, x[:1] - step))
        assert sample.grad[0, k] == pytest.approx((up - down) / 0.02, abs=2e-3)


def test_errors_fall_and_the_model_stays(small, clusters, state):
    x, y = clusters(n=100)
    model = small().fit(x, y)
    before, labels = state(model), ["c", "a", "a", "b"]
    done = []
    found = imagine(
        model, labels, updates=200, lr=0.02, progress=lambda now, all_: done.append((now, all_))
    )
    assert found.shape == (4, 5)
    assert found.dtype == np.float32
    columns = [model.classes_.tolist().index(label) for label in labels]
    own = model.errors(found)[range(4), columns]
    start = imagine(model, labels, updates=1, lr=1e-9)
    assert ((start >= 0) & (start < 1)).all()
    assert (own < 0.5 * model.errors(start)[range(4), columns]).all()
    assert state(model) == before
    assert done[0] == (1, 200)
    assert done[-1] == (200, 200)


def test_seed_and_start_decide(small, clusters):
    x, y = clusters()
    model = small().fit(x, y)
    first, again = (imagine(model, ["a"] * 2, updates=3) for _ in range(2))
    assert first.tolist() == again.tolist()
    assert first.tolist() != imagine(model, ["a"] * 2, updates=3, random_state=1).tolist()
    assert first[0].tolist() != first[1].tolist()
    kept = x.copy()
    near = imagine(model, ["a"] * 2, start=x[:2], updates=3, lr=0.01)
    assert 0 < np.abs(near - x[:2]).max() <= 0.031
    far = imagine(model, ["a"] * 2, start=x[:2], updates=3, lr=9, optimizer=torch.optim.SGD)
    assert np.abs(far - x[:2]).max() > 0.031
    np.testing.assert_array_equal(x, kept)


def test_wrong_input_is_explained(small, clusters):
    x, y = clusters()
    model = small().fit(x, y)
    with pytest.raises(ValueError, match="'d' is not a known class"):
        imagine(model, ["a", "d"])
    with pytest.raises(ValueError, match="updates must be a whole number"):
        imagine(model, ["a"], updates=0)
    with pytest.raises(ValueError, match="start must hold a sample for each of the 1 labels.*60"):
        imagine(model, ["a"], start=x)
    with pytest.raises(NotFittedError):
        imagine(PEC(), ["a"])
    with pytest.raises(ValueError, match="expected a PEC with a teacher of its own.*WhitenedPEC"):
        imagine(WhitenedPEC(dim=5, device="cpu").fit(x, y), ["a"])
    custom = PEC(teacher=torch.sin, device="cpu").fit(x, y)
    with pytest.raises(ValueError, match="expected a PEC with a teacher of its own.*sin"):
        imagine(custom, ["a"])
