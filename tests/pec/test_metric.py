"""PEC with the whitened metric: errors measured by their own covariance."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import pecil
from pecil.pec import lockstep
from pecil.pec.networks import Architecture, Stack, forward
from pecil.pec.students import SHRINKAGE, Lesson, Moment, Students

ARCHITECTURE = Architecture("mlp", (9,), 4, 6)


def made(**changes):
    settings = {"lr": 0.01, "teacher_width": 300, "output_dim": 20, "mean": 8, "std": 8}
    return pecil.PEC(**settings | {"metric": "whitened", "device": "cpu"} | changes)


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    return x[:1000], y[:1000], x[1000:], y[1000:]


def test_it_is_worth_it(digits):
    x, y, test_x, test_y = digits
    plain = made(metric="plain").fit(x, y).score(test_x, test_y)
    assert made().fit(x, y).score(test_x, test_y) > plain + 0.05


def test_errors_are_measured_by_the_covariance_of_errors(digits):
    x, y, test_x, _ = digits
    model, plain = made().fit(x, y), made(metric="plain").fit(x, y)
    students, moment = plain._pairs[0].students, model._pairs[0].students.moment
    sigma = moment.matrix.double() / moment.weight.double()
    shrunk = (1 - SHRINKAGE) * sigma
    shrunk.diagonal().add_(SHRINKAGE * sigma.diagonal().mean())
    sample = plain._tensor(test_x[:5])
    wanted = plain._pairs[0].teacher(sample)
    with torch.no_grad():
        y_hat, _ = forward(Stack.over(students.architecture, students.rows), sample.unsqueeze(0))
    error = (y_hat - wanted).double()  # (classes, n, d)
    expected = torch.einsum("cnd,de,cne->nc", error, torch.linalg.inv(shrunk), error) / 20
    np.testing.assert_allclose(model._class_errors(test_x[:5]), expected, rtol=1e-3)


def test_the_moment_weighs_late_errors_more():
    moment = Moment(2, torch.device("cpu"))
    moment.add(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0.25, 1.0]))
    assert moment.matrix.tolist() == [[0.25, 0.0], [0.0, 9.0]]
    assert float(moment.weight) == 1.25


def test_without_errors_the_metric_is_plain():
    assert torch.equal(Moment(3, torch.device("cpu")).whitener(), torch.eye(3))


@pytest.mark.parametrize("learn", [lockstep.learn, Students.learn], ids=["GPU", "CPU"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_lockstep_keeps_the_same_moment(learn, batch_size):
    moments = []
    for way in (learn, one_by_one):
        students = Students(ARCHITECTURE, "kaiming", 1, torch.device("cpu"))
        students.moment = Moment(6, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        lessons = []
        for slot, n in enumerate((150, 140, 40, 5)):
            students.add()
            x, target = (torch.randn(n, k, generator=generator) for k in (9, 6))
            weights = torch.rand(n, generator=generator)
            lessons.append(Lesson(slot, x, target, torch.arange(n), [0.01] * n, weights))
        with torch.no_grad():
            way(students, lessons, batch_size)
        moments.append(students.moment)
    torch.testing.assert_close(moments[0].matrix, moments[1].matrix, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(moments[0].weight, moments[1].weight)


def one_by_one(students, lessons, batch_size):
    return [students.learn_one(lesson, batch_size) for lesson in lessons]


def test_merging_equals_training_together(digits):
    x, y, test_x, _ = digits
    low, high = made().fit(x[y < 5], y[y < 5]), made().fit(x[y >= 5], y[y >= 5])
    together = made().fit(x, y)
    np.testing.assert_allclose(low.merge(high).errors(test_x), together.errors(test_x), rtol=1e-3)


def test_saved_and_loaded_it_goes_on_as_before(digits, tmp_path):
    x, y, test_x, _ = digits
    model = made().fit(x[:500], y[:500])
    model.save(tmp_path / "model.pecil")
    again = pecil.load(tmp_path / "model.pecil", device="cpu")
    np.testing.assert_array_equal(again.errors(test_x), model.errors(test_x))
    for one in (model, again):
        one.partial_fit(x[500:600], y[500:600])
    np.testing.assert_array_equal(again.errors(test_x), model.errors(test_x))


def test_a_stream_without_known_length_works(digits):
    x, y, test_x, test_y = digits
    model = made()
    for start in range(0, 1000, 100):
        model.partial_fit(x[start : start + 100], y[start : start + 100])
    assert model.score(test_x, test_y) > 0.7


def test_its_numbers_are_counted(digits):
    x, y, *_ = digits
    plain, model = made(metric="plain").fit(x[:50], y[:50]), made().fit(x[:50], y[:50])
    assert model.n_parameters_ == plain.n_parameters_ + 20 * 21 // 2


def test_its_threshold_comes_from_samples_not_from_the_stream(digits):
    """Errors of the stream were measured by a covariance that was only beginning."""
    x, y, test_x, _ = digits
    model = made().fit(x, y)
    for ask in (model.calibrate, lambda: model.predict(test_x, reject_as=-1)):
        with pytest.raises(ValueError, match=r"metric='whitened'.*calibrate\(X\)"):
            ask()
    rejected = model.calibrate(test_x[:400]).predict(test_x[400:], reject_as=-1) == -1
    assert 0.01 < rejected.mean() < 0.15


def test_unknown_metrics_are_refused(digits):
    with pytest.raises(ValueError, match="metric must be one of plain, whitened, but it is 'l1'"):
        made(metric="l1").fit(digits[0], digits[1])
