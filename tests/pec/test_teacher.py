"""Teachers of PEC against PyTorch's own layers; answers that are made ahead."""

from threading import Event, Semaphore

import numpy as np
import pytest
import torch
from layers import CPU, NETWORKS, one_row, plain, random
from sklearn.base import clone

from pecil import PEC
from pecil.pec import estimator, machine
from pecil.pec import teacher as teachers
from pecil.pec.networks import Architecture
from pecil.pec.teacher import Answers, Teacher, asked, fingerprint


@pytest.mark.parametrize("activation", ["relu", "identity"])
@pytest.mark.parametrize(
    ("shape", "pool"),
    [((3, 8, 8), 4), ((1, 7, 5), 3), ((3, 9, 6), 4), ((2, 3, 2), 5), ((1, 13, 1), 1)],
)
@pytest.mark.parametrize("chunk", [None, 200])
def test_the_fast_conv_teacher_equals_plain_layers(shape, pool, activation, chunk, monkeypatch):
    if chunk:
        monkeypatch.setattr(machine, "CPU_CACHED", chunk)
    arch = Architecture("conv", shape, 40, 6, pool=pool, activation=activation)
    teacher = Teacher(arch, "kaiming", 3, CPU)
    assert teacher._fast
    x = 5 + random(70, *shape)  # more than go through at a time, and away from zero
    expected = plain(arch, one_row(arch, seed=3), x)
    torch.testing.assert_close(teacher(x), expected, rtol=0, atol=2e-5)
    assert expected.std() > 0.01


@pytest.mark.parametrize("arch", [a for a in NETWORKS if a.activation == "gelu"], ids=str)
@pytest.mark.parametrize("chunk", [None, 30])
def test_other_teachers_equal_plain_layers(arch, chunk, monkeypatch):
    if chunk:
        monkeypatch.setattr(machine, "CPU_CACHED", chunk)
    x = random(20, *arch.input_shape)
    expected = plain(arch, one_row(arch, seed=3), x)
    torch.testing.assert_close(Teacher(arch, "kaiming", 3, CPU)(x), expected, rtol=0, atol=2e-5)


def test_a_teacher_is_its_seed_and_architecture():
    arch = Architecture("mlp", (5,), 7, 3)
    teacher = Teacher(arch, "kaiming", 3, CPU)
    again = Teacher(arch, "kaiming", 3, CPU)
    x = random(4, 5)
    assert torch.equal(teacher(x), again(x))
    others = [
        Teacher(arch, "kaiming", 4, CPU),
        Teacher(arch, "xavier", 3, CPU),
        Teacher(Architecture("mlp", (5,), 8, 3), "kaiming", 3, CPU),
    ]
    assert teacher.checksum == again.checksum
    assert len({teacher.checksum, *(other.checksum for other in others)}) == 4


@pytest.mark.parametrize(
    ("arch", "checksum"),
    [
        (Architecture("mlp", (5,), 7, 3), "5b16c1eb5471c2d5"),
        (Architecture("conv", (3, 8, 8), 7, 3, pool=2), "b4ae3b6cda80c134"),
    ],
    ids=["mlp", "conv"],
)
def test_drawing_never_changes(arch, checksum):
    """Saved models hold their teacher's seed: another way of drawing would make them useless."""
    assert Teacher(arch, "kaiming", 3, CPU).checksum[:16] == checksum


@pytest.mark.parametrize("where", [0, 1, 1_000_000, 2_000_015])
def test_a_fingerprint_notices_another_drawing(where):
    row = random(1, 2_000_016)
    shifted = torch.cat([row[:, :where], random(1, 2_000_016 - where, seed=1)], 1)
    assert fingerprint(shifted) != fingerprint(row)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_teacher_that_is_shared_by_threads_says_the_same(n):
    arch = Architecture("conv", (3, 9, 9), 700, 11, pool=4, activation="relu")
    teacher = Teacher(arch, "kaiming", 0, torch.device("cpu"))
    x = torch.randn(n, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    alone = teacher(x)
    torch.set_num_threads(3)
    try:
        torch.testing.assert_close(teacher(x), alone)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


@pytest.fixture
def threads():
    """Let the library use three threads."""
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


class Wrong(Teacher):
    """Fails from its second block on."""

    def __call__(self, x):
        if not bool(x[0].any()):
            raise ZeroDivisionError
        return super().__call__(x)


def test_answers_made_ahead_are_the_teachers(monkeypatch, threads):
    monkeypatch.setattr(teachers, "AHEAD", 400)
    arch = Architecture("mlp", (9,), 40, 7)
    teacher = Teacher(arch, "kaiming", 0, CPU)
    short, long = random(25, 9), random(47, 9, seed=1)
    answers = [Answers(teacher, x) for x in (short, long)]
    with asked(answers):
        torch.testing.assert_close(answers[0][torch.tensor([3, 1])], teacher(short)[[3, 1]])
        torch.testing.assert_close(answers[1][torch.arange(47)], teacher(long))
    assert [len(one.asked) for one in answers] == [3, 5]
    with pytest.raises(IndexError):  # nobody asked
        Answers(teacher, short)[torch.tensor([0])]


def test_a_teacher_that_fails_ahead_fails_where_its_answer_is_needed(monkeypatch, threads):
    monkeypatch.setattr(teachers, "AHEAD", 400)
    x = torch.ones(30, 9)
    x[10] = 0
    answers = Answers(Wrong(Architecture("mlp", (9,), 40, 7), "kaiming", 0, CPU), x)
    with asked([answers]):
        assert answers[torch.tensor([9])].shape == (1, 7)
        with pytest.raises(ZeroDivisionError):
            answers[torch.tensor([10])]


def test_what_was_interrupted_is_answered_no_more(monkeypatch, threads):
    monkeypatch.setattr(teachers, "AHEAD", 40)
    begun, may_go_on = Semaphore(0), Event()

    class Slow(Teacher):
        def __call__(self, x):
            begun.release()
            may_go_on.wait()
            return super().__call__(x)

    answers = Answers(Slow(Architecture("mlp", (9,), 40, 7), "kaiming", 0, CPU), random(30, 9))
    with pytest.raises(KeyboardInterrupt), asked([answers]):
        for _ in range(3):  # threads
            assert begun.acquire(timeout=60)
        raise KeyboardInterrupt
    may_go_on.set()
    assert sum(future.cancelled() for future in answers.asked) == 30 - 3


def test_a_model_is_the_same_whether_or_not_its_teacher_answers_ahead(monkeypatch):
    monkeypatch.setattr(teachers, "AHEAD", 2000)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(900, 20)), np.repeat([0, 1, 2], [200, 300, 400])
    model = PEC(teacher_width=50, output_dim=9, epochs=2, schedule="linear", random_state=0)
    alone = clone(model).fit(x, y)
    made = []
    monkeypatch.setattr(estimator, "Answers", lambda *x: made.append(Answers(*x)) or made[-1])
    torch.set_num_threads(2)
    try:
        together = clone(model).fit(x, y)
        apart = [clone(model).fit(x[y == label], y[y == label]) for label in range(3)]
    finally:
        torch.set_num_threads(1)
    assert len(made) == 6
    np.testing.assert_allclose(together.errors(x), alone.errors(x), rtol=1e-3)
    for own, row in zip(apart, together._pairs[0].students.rows, strict=True):
        assert torch.equal(own._pairs[0].students.rows[0], row)  # to the last bit
