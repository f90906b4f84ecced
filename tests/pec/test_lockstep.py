"""Students in lockstep become what they become one by one.

On a GPU a step is captured and replayed; the arithmetic, the tables and the grouping are the
same on a CPU, where these tests run. A CPU has a way of its own for small students.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pecil.pec import lockstep
from pecil.pec.networks import Architecture
from pecil.pec.students import Lesson, Students, in_time

ARCHITECTURES = {
    "mlp": Architecture("mlp", (9,), 4, 6),
    "conv": Architecture("conv", (2, 6, 6), 4, 6, pool=2, activation="relu"),
    "linear": Architecture("linear", (9,), 1, 6),
}


def taught(arch, sizes, batch_size, learn, epochs=1):
    """Train one student for each size; return the stack and the errors."""
    students = Students(arch, "kaiming", 1, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    lessons = []
    for slot, n in enumerate(sizes):
        students.add()
        x = torch.randn(n, *arch.input_shape, generator=generator)
        target = torch.randn(n, arch.output_dim, generator=generator)
        order = torch.randperm(n, generator=generator).repeat(epochs)
        rates = [0.01 * (1 - t / len(order)) for t in range(len(order))]
        lessons.append(Lesson(slot, x, target, order, rates))
    with torch.no_grad():
        return students, learn(students, lessons, batch_size)


def one_by_one(students, lessons, batch_size):
    return [(lesson.slot, students.learn_one(lesson, batch_size)) for lesson in lessons]


in_lockstep = pytest.mark.parametrize("learn", [lockstep.learn, Students.learn], ids=["GPU", "CPU"])


@in_lockstep
@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_equals_one_by_one(kind, batch_size, learn):
    sizes = (150, 140, 118, 40, 97, 5)  # some stand still, some are too short for a graph
    arch = ARCHITECTURES[kind]
    together, errors = taught(arch, sizes, batch_size, learn, epochs=2)
    apart, expected = taught(arch, sizes, batch_size, one_by_one, epochs=2)
    assert together.steps == apart.steps == [-(-2 * n // batch_size) for n in sizes]
    for mine, theirs in zip(together.parts, apart.parts, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-3)
    errors, expected = dict(errors), dict(expected)
    assert errors.keys() == expected.keys() == set(range(len(sizes)))
    for slot in errors:
        torch.testing.assert_close(errors[slot], expected[slot], atol=1e-4, rtol=1e-3)


@in_lockstep
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_company_makes_no_difference(kind, learn):
    sizes = tuple(range(200, 225))  # more than are trained at a time
    everybody, _ = taught(ARCHITECTURES[kind], sizes, 1, learn)

    def a_few(students, lessons, batch_size):
        return learn(students, lessons[3:6], batch_size)

    few, errors = taught(ARCHITECTURES[kind], sizes, 1, a_few)
    assert sorted(slot for slot, _ in errors) == [3, 4, 5]
    assert torch.equal(everybody.rows[3:6], few.rows[3:6])
    assert torch.equal(everybody.moments[1][3:6], few.moments[1][3:6])
    assert torch.equal(few.rows[6:], few.start.expand(len(sizes) - 6, -1))
    assert few.steps[:3] == [0, 0, 0]


def test_learning_goes_on_where_it_stopped():
    arch = ARCHITECTURES["mlp"]

    def in_two_parts(students, lessons, batch_size):
        halves = [
            [Lesson(e.slot, e.x, e.target, e.order[part], e.rates[part]) for e in lessons]
            for part in (slice(None, 50), slice(50, None))
        ]
        return [lockstep.learn(students, half, batch_size) for half in halves]

    parts, _ = taught(arch, (100, 120), 1, in_two_parts)
    whole, _ = taught(arch, (100, 120), 1, lockstep.learn)
    assert parts.steps == whole.steps
    torch.testing.assert_close(parts.rows, whole.rows, atol=1e-6, rtol=1e-5)


def test_a_few_samples_are_learned_without_set_up(monkeypatch):
    """Giving up threads and taking them back costs more than a few steps do."""
    set_up = []
    monkeypatch.setattr(Students, "_learn_together", lambda self, group: set_up.append(group))
    students, errors = taught(ARCHITECTURES["mlp"], (1, 3), 1, Students.learn)
    assert [slot for slot, _ in errors] == [0, 1]
    assert students.steps == [1, 3]
    assert not set_up


def test_an_interrupt_leaves_students_as_they_were(monkeypatch):
    steps = Students._side_by_side

    def interrupted(self, lessons, span, *more):
        if span.start:
            raise KeyboardInterrupt
        return steps(self, lessons, span, *more)

    def learn(students, lessons, batch_size):
        with pytest.raises(KeyboardInterrupt):
            students.learn(lessons, batch_size)

    monkeypatch.setattr(Students, "_side_by_side", interrupted)
    students, _ = taught(ARCHITECTURES["mlp"], (200, 220), 1, learn)
    assert students.steps == [0, 0]
    assert torch.equal(students.rows, students.start.expand(2, -1))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_samples_come_in_the_order_in_which_they_are_needed_first(order):
    x, order = torch.randn(10, 2), torch.tensor(order)
    sorted_x, new = in_time(x, order)
    assert torch.equal(sorted_x[new], x[order])
    assert list(dict.fromkeys(new.tolist())) == list(range(len(sorted_x)))
