"""Forward and backward passes, teachers and initial values against PyTorch's own layers."""

import math
from threading import Event, Semaphore, Thread

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.base import clone
from torch.utils._python_dispatch import TorchDispatchMode

from pecil import PEC, WhitenedPEC
from pecil.pec import estimator, networks
from pecil.pec.networks import (
    Answers,
    Architecture,
    Stack,
    Teacher,
    asked,
    backward,
    draw,
    forward,
    one_thread,
    outputs,
)
from pecil.pec.students import Lesson, Students
from reference import conv, mlp

CPU = torch.device("cpu")
NETWORKS = [
    *(
        Architecture("mlp", (7,), 5, 4, hidden_layers=layers, activation=activation)
        for layers in (1, 2)
        for activation in ("gelu", "relu", "identity")
    ),
    *(
        Architecture("conv", (2, 6, 5), 3, 4, pool=2, hidden_layers=layers, activation=activation)
        for layers in (1, 2)
        for activation in ("gelu", "relu", "identity")
    ),
    Architecture("mlp", (1, 3, 2), 5, 4),
    Architecture("conv", (1, 5, 7), 3, 4, pool=3, activation="relu"),
    Architecture("linear", (7,), 1, 4),
    Architecture("linear", (2, 3, 3), 1, 4),
]
all_networks = pytest.mark.parametrize(
    "arch",
    NETWORKS,
    ids=lambda a: f"{a.kind}{a.input_shape}-{a.hidden_layers}-{a.activation}".replace(" ", ""),
)


@pytest.fixture
def double():
    """Compute in float64, in which a wrong gradient cannot hide behind rounding."""
    torch.set_default_dtype(torch.float64)
    networks.pooling.cache_clear()
    yield
    torch.set_default_dtype(torch.float32)
    networks.pooling.cache_clear()


def plain(arch, row, x):
    """Run one network, a row (1, row), on samples (n, *input_shape), with PyTorch's layers."""
    p = {name: value[0] for name, value in arch.views(row).items()}
    activate = {"gelu": F.gelu, "relu": F.relu, "identity": lambda a: a}[arch.activation]
    x = x if arch.kind == "conv" else x.flatten(1)
    for k in range(0 if arch.kind == "linear" else arch.hidden_layers):
        weight, bias = p[f"hidden{k}.weight"], p[f"hidden{k}.bias"]
        scale, shift = p[f"norm{k}.weight"], p[f"norm{k}.bias"]
        if arch.kind == "conv":
            x = F.conv2d(x, weight.unflatten(1, (-1, 3, 3)), bias, padding=1)
            x = F.instance_norm(x, weight=scale, bias=shift)
        else:
            x = F.layer_norm(F.linear(x, weight, bias), scale.shape, scale, shift)
        x = activate(x)
    if arch.kind == "conv":
        x = F.adaptive_avg_pool2d(x, arch.pool)
    return F.linear(x.flatten(1), p["out.weight"], p["out.bias"])


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_row(arch, init="kaiming", seed=0):
    return draw(arch, init, torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------ passes


@all_networks
@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("n", [1, 4])
def test_passes_equal_automatic_differentiation(arch, classes, n, double):
    rows = random(classes, arch.row).requires_grad_()
    x = random(classes, n, *arch.input_shape, seed=1)
    expected = torch.stack([plain(arch, rows[k : k + 1], x[k]) for k in range(classes)])
    dy = random(classes, n, arch.output_dim, seed=2)
    expected.backward(dy)

    with torch.no_grad():
        nets, gradient = Stack.over(arch, rows), torch.zeros_like(rows)
        inputs = torch.stack([arch.inputs(samples) for samples in x])
        y, tape = forward(nets, inputs)
        backward(nets, tape, dy, Stack.over(arch, gradient))
    torch.testing.assert_close(y, expected.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(gradient, rows.grad, rtol=0, atol=1e-9)
    assert gradient.abs().max() > 0.1


@all_networks
def test_a_stack_answers_as_its_networks_one_by_one_and_on_shared_input(arch, double):
    rows, x = random(3, arch.row), random(4, *arch.input_shape, seed=1)
    shared = arch.inputs(x).unsqueeze(0)
    each = torch.stack([plain(arch, row, x) for row in rows.split(1)])
    merged, _ = forward(Stack.over(arch, rows), shared)
    apart, _ = forward(Stack.over(arch, rows), shared.expand(3, *shared.shape[1:]))
    torch.testing.assert_close(merged, each, rtol=0, atol=1e-9)
    torch.testing.assert_close(apart, each, rtol=0, atol=1e-9)


@all_networks
@pytest.mark.parametrize("threads", [1, 3])
def test_outputs_are_those_of_a_forward_pass(arch, threads, double, monkeypatch):
    monkeypatch.setattr(networks, "CHANNELS", 4)
    monkeypatch.setattr(networks, "CPU_CACHED", 2 * 3 * arch.temporaries)
    nets, x = Stack.over(arch, random(3, arch.row)), random(5, *arch.input_shape, seed=1)
    expected, _ = forward(nets, arch.inputs(x).unsqueeze(0))
    torch.set_num_threads(threads)
    try:
        found = outputs(nets, x)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("batch_size", [1, 3, 10])
@pytest.mark.parametrize(
    "arch",
    [NETWORKS[0], NETWORKS[3], NETWORKS[6], NETWORKS[-2]],
    ids=["mlp", "deep", "conv", "linear"],
)
def test_a_student_learns_as_torch_adam_does(arch, batch_size):
    x, target = random(10, *arch.input_shape), random(10, arch.output_dim, seed=1)
    order, rates = torch.arange(10).flip(0), torch.linspace(0.02, 0.01, 10)
    students = Students(arch, "kaiming", 0, CPU)
    students.add()
    ((slot, losses),) = students.learn([Lesson(0, x, target, order, rates)], batch_size)

    row = students.start.clone().requires_grad_()
    adam, expected = torch.optim.Adam([row]), []
    for part, rate in zip(order.split(batch_size), rates[::batch_size], strict=True):
        adam.param_groups[0]["lr"] = rate.item()
        adam.zero_grad()
        error = (plain(arch, row, x[part]) - target[part]).square()
        expected.extend(error.detach().mean(1))
        error.mean().backward()
        adam.step()
    if arch.kind == "conv":  # normalisation takes this bias away: Adam moves it by rounding alone
        arch.views(students.rows)["hidden0.bias"].zero_()
        arch.views(row.detach())["hidden0.bias"].zero_()
    assert slot == 0
    torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(students.rows, row.detach(), rtol=0, atol=2e-5)
    assert (students.rows - students.start).abs().max() > 0.009
    assert students.steps == [math.ceil(10 / batch_size)]


# ---------------------------------------------------------------------------- teachers


@pytest.mark.parametrize("activation", ["relu", "identity"])
@pytest.mark.parametrize(
    ("shape", "pool"),
    [((3, 8, 8), 4), ((1, 7, 5), 3), ((3, 9, 6), 4), ((2, 3, 2), 5), ((1, 13, 1), 1)],
)
@pytest.mark.parametrize("chunk", [None, 200])
def test_the_fast_conv_teacher_equals_plain_layers(shape, pool, activation, chunk, monkeypatch):
    if chunk:
        monkeypatch.setattr(networks, "CPU_CACHED", chunk)
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
        monkeypatch.setattr(networks, "CPU_CACHED", chunk)
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
    assert networks.fingerprint(shifted) != networks.fingerprint(row)


# ---------------------------------------------------------------------- initial values


@pytest.mark.parametrize("arch", [NETWORKS[3], NETWORKS[6], NETWORKS[-1]], ids=lambda a: a.kind)
@pytest.mark.parametrize("init", networks.INITS)
def test_initial_values_fill_their_range(arch, init):
    arch = Architecture(arch.kind, arch.input_shape, 60, 70, arch.pool, arch.hidden_layers)
    parts = arch.views(one_row(arch, init))
    for name, value in parts.items():
        layer, part = name.split(".")
        if layer.startswith("norm"):
            assert (value == (part == "weight")).all()
        elif init == "xavier" and part == "bias":
            assert (value == 0).all()
        else:
            bound = expected_bound(arch, init, parts[f"{layer}.weight"][0], layer)
            assert 0.8 * bound < value.max() <= bound
            assert -0.8 * bound > value.min() >= -bound


def expected_bound(arch, init, weight, layer):
    if init == "kaiming":
        return 1 / math.sqrt(weight.shape[1])
    if init == "xavier":
        conv = arch.kind == "conv" and layer != "out"
        full = weight.unflatten(1, (-1, 3, 3)) if conv else weight
        fan_in, fan_out = torch.nn.init._calculate_fan_in_and_fan_out(full)
        return math.sqrt(6 / (fan_in + fan_out))
    return float(init[len("uniform") :])


# --------------------------------------------------------------------- parameter counts


@pytest.mark.parametrize(
    ("arch", "module", "count"),
    [
        (Architecture("mlp", (784,), 10, 99), mlp(784, 10, 99), 8_959),
        (Architecture("conv", (3, 32, 32), 60, 743, 5), conv(3, 60, 743, 5), 1_117_043),
        (Architecture("conv", (3, 32, 32), 40, 172, 4), conv(3, 40, 172, 4), 111_452),
    ],
    ids=["MNIST", "CIFAR-10", "CIFAR-100"],
)
def test_the_papers_parameter_counts(arch, module, count):
    assert arch.n_parameters == count == sum(p.numel() for p in module.parameters())


@all_networks
@pytest.mark.parametrize("spare", [0, 1, 17])
def test_fitting_takes_the_largest_output(arch, spare):
    fitted = arch.fitting(arch.n_parameters + spare)
    assert fitted.n_parameters <= arch.n_parameters + spare
    one_more = Architecture(**vars(fitted) | {"output_dim": fitted.output_dim + 1})
    assert one_more.n_parameters > arch.n_parameters + spare
    if not spare:
        assert fitted == arch


# ------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel() * tensor.element_size())
        return out


@pytest.mark.parametrize(
    ("shape", "n"), [((784,), 3000), ((3, 32, 32), 700), ((3, 84, 84), 64)], ids=str
)
@pytest.mark.parametrize("classes", [1, 4])
def test_scoring_needs_no_more_memory_than_stated(shape, n, classes, small, monkeypatch):
    """The stated 64 MiB and the samples, all sixteen times smaller."""
    assert networks.CPU_MOST * 4 == 64 * 2**20
    monkeypatch.setattr(networks, "CPU_MOST", networks.CPU_MOST // 16)
    monkeypatch.setattr(networks, "CPU_CACHED", networks.CPU_CACHED // 16)
    x = np.random.default_rng(0).integers(0, 256, (n, *shape), dtype=np.uint8)
    model = small().fit(x[:classes], list(range(classes)))
    with Largest() as largest:
        model.errors(x)
    assert 2**19 < largest.size <= 4 * 2**20


def test_pooling_large_images_needs_little_memory():
    networks.pooling.cache_clear()
    with Largest() as largest:
        pooling = networks.pooling((84, 84), (4, 4), CPU)
    assert pooling.shape == (84 * 84, 16)
    assert largest.size <= 8 * 2**20


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
        told = []
        networks.by_threads(lambda place: told.append((place, torch.get_num_threads())), 7)
        assert sorted(told) == [(place, 1) for place in range(7)]
        other = Thread(target=lambda: told.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert told[-1] == 3
        with pytest.raises(ZeroDivisionError):
            networks.by_threads(lambda place: 1 / place, 2)
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
    monkeypatch.setattr(networks, "AHEAD", 400)
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
    monkeypatch.setattr(networks, "AHEAD", 400)
    x = torch.ones(30, 9)
    x[10] = 0
    answers = Answers(Wrong(Architecture("mlp", (9,), 40, 7), "kaiming", 0, CPU), x)
    with asked([answers]):
        assert answers[torch.tensor([9])].shape == (1, 7)
        with pytest.raises(ZeroDivisionError):
            answers[torch.tensor([10])]


def test_what_was_interrupted_is_answered_no_more(monkeypatch, threads):
    monkeypatch.setattr(networks, "AHEAD", 40)
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
    monkeypatch.setattr(networks, "AHEAD", 2000)
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


def test_small_work_is_done_in_one_thread_and_the_others_come_back():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread(small=False):
            assert torch.get_num_threads() == 3
        with pytest.raises(KeyError), one_thread():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 3
        seen = []
        for model in (PEC(teacher_width=20, output_dim=5), WhitenedPEC(dim=6)):
            model.partial_fit([[1.0, 2.0], [2.0, 1.0]], ["a", "b"])
            own = model._tensor
            model._tensor = lambda raw, own=own: seen.append(torch.get_num_threads()) or own(raw)
            model.partial_fit([[1.0, 2.0]], ["a"]).predict([[1.0, 2.0]])
            assert torch.get_num_threads() == 3
        assert seen == [1] * 4
    finally:
        torch.set_num_threads(before)
