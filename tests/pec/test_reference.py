"""pecil.PEC learns what the plain reference learns, weight by weight."""

import numpy as np
import pytest
import torch

from pecil import PEC
from pecil.pec.estimator import TEACHER
from pecil.pec.networks import draw
from reference import ReferencePEC, conv, mlp

LR = 0.01
COUNTS = {"a": 60, "b": 40, "c": 25}

# Both sides compute the same sums in float32, in another order: that moves no weight by more
# than 1e-6. A slip in Adam or in the schedule moves some weight by more than 1e-3, as
# test_a_slip_is_seen shows. The tolerance lies between.
TOLERANCE = 2e-5
SLIP = 1e-3

architectures = pytest.mark.parametrize("architecture", ["mlp", "conv"])
schedules = pytest.mark.parametrize("schedule", ["linear", "constant"])


def samples(architecture, seed=0):
    """Classes of unequal size in mixed order, each around a centre of its own.

    The last feature (channel) is tiny, so that the gradients of its weights are about as
    small as Adam's epsilon, and a wrong epsilon shows.
    """
    rng = np.random.default_rng(seed)
    shape = (12,) if architecture == "mlp" else (3, 8, 8)
    centres = dict(zip(COUNTS, np.random.default_rng(9).normal(size=(3, *shape)), strict=True))
    y = rng.permutation([label for label, n in COUNTS.items() for _ in range(n)])
    x = np.stack([centres[label] for label in y]) + rng.normal(scale=0.5, size=(len(y), *shape))
    x[:, -1] *= 1e-6
    return x.astype(np.float32), y


def learn(architecture, schedule, how="fit"):
    """Return a PEC that has learned the samples in their order."""
    model = PEC(
        architecture=architecture,
        student_width=6,
        teacher_width=40,
        output_dim=7,
        pool=3,
        lr=LR,
        schedule=schedule,
        expected_samples=COUNTS,
        shuffle=False,
        channels="first",
        device="cpu",
    )
    x, y = samples(architecture)
    if how == "fit":
        return model.fit(x, y)
    size = {"batches": 30, "single samples": 1}[how]
    for start in range(0, len(x), size):
        model.partial_fit(x[start : start + size], y[start : start + size])
    return model


def learn_plainly(model, kind=ReferencePEC, counts=COUNTS, **options):
    """Return a reference that began with the same values and has learned the same samples."""
    (pair,) = model._pairs
    architecture = pair.teacher.architecture
    generator = torch.Generator().manual_seed(model._seed(TEACHER, 0))
    plain = kind(
        network(architecture, draw(architecture, "kaiming", generator)),
        network(pair.students.architecture, pair.students.start),
        lr=LR,
        counts=counts if model.schedule == "linear" else None,
        **options,
    )
    x, y = samples(model.architecture)
    return plain.fit(torch.from_numpy(x), y.tolist())


def network(architecture, row):
    """Return a row of values as a torch module."""
    inputs, width, outputs = *architecture.input_shape[:1], architecture.width, 7
    if architecture.kind == "mlp":
        module = mlp(inputs, width, outputs)
    else:
        module = conv(inputs, width, outputs, architecture.pool)
    values = architecture.views(row).values()
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.copy_(value.view_as(parameter))
    return module


def students(model):
    """Return the student of each label as a torch module."""
    (pair,) = model._pairs
    rows = pair.students.rows.split(1)
    return {
        label: network(pair.students.architecture, rows[slot])
        for label, slot in model._slots.items()
    }


def distance(ours, theirs):
    """Return the largest difference of any weight of any class.

    A convolution's bias is left out: normalisation takes it away again, so that it changes no
    output, its gradient is rounding noise around zero, and Adam turns that into large steps.
    """
    ours, theirs = (
        torch.cat(
            [
                parameter.detach().flatten()
                for label in COUNTS
                for name, parameter in by_label[label].named_parameters()
                if name != "0.bias" or isinstance(by_label[label][0], torch.nn.Linear)
            ]
        )
        for by_label in (ours, theirs)
    )
    return (ours - theirs).abs().max().item()


@architectures
@schedules
@pytest.mark.parametrize("how", ["fit", "batches", "single samples"])
def test_same_students_on_the_same_order(architecture, schedule, how):
    model = learn(architecture, schedule, how)
    plain = learn_plainly(model)
    assert distance(students(model), plain.students) < TOLERANCE
    moved = distance(students(model), dict.fromkeys(COUNTS, plain.start))
    assert moved > 0.05


@architectures
@schedules
def test_same_errors_predictions_and_accuracy(architecture, schedule):
    model = learn(architecture, schedule)
    plain = learn_plainly(model)
    x, y = samples(architecture, seed=1)
    errors = plain.errors(torch.from_numpy(x)).numpy()
    columns = [list(plain.students).index(label) for label in model.classes_]
    np.testing.assert_allclose(model.errors(x), errors[:, columns], rtol=1e-3)
    predicted = np.array(plain.predict(torch.from_numpy(x)))
    assert (model.predict(x) == predicted).all()
    assert model.score(x, y) == np.mean(predicted == y) > 0.8


class Uncorrected(ReferencePEC):
    """Without Adam's bias correction, but for the first step."""

    def learn(self, x, label):
        super().learn(x, label)
        for state in self.optimizers[label].state.values():
            state["step"].fill_(1e6)


class OneStepLate(ReferencePEC):
    """With Adam's bias correction one step behind."""

    def learn(self, x, label):
        super().learn(x, label)
        if self.schedules[label].last_epoch > 1:
            return
        for state in self.optimizers[label].state.values():
            state["step"].fill_(0)


@architectures
@pytest.mark.parametrize(
    "slip",
    [
        {"kind": Uncorrected},
        {"kind": OneStepLate},
        {"eps": 3e-8},
        {"betas": (0.9, 0.99)},
        {"betas": (0.89, 0.999)},
        {"counts": {label: n + 1 for label, n in COUNTS.items()}},
        {"counts": dict.fromkeys(COUNTS, sum(COUNTS.values()))},
    ],
    ids=str,
)
def test_a_slip_is_seen(architecture, slip):
    model = learn(architecture, "linear")
    plain = learn_plainly(model, **slip)
    assert distance(students(model), plain.students) > SLIP > 10 * TOLERANCE
