"""Forward and backward passes, teachers and initial values against PyTorch's own layers."""

import math

import pytest
import torch
from layers import CPU, NETWORKS, Largest, one_row, plain, random

from pecil.pec import machine, networks
from pecil.pec.networks import (
    Architecture,
    Stack,
    backward,
    forward,
    outputs,
)
from pecil.pec.students import Lesson, Students
from reference import conv, mlp

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
    monkeypatch.setattr(machine, "CPU_CACHED", 2 * 3 * arch.temporaries)
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


def test_pooling_large_images_needs_little_memory():
    networks.pooling.cache_clear()
    with Largest() as largest:
        pooling = networks.pooling((84, 84), (4, 4), CPU)
    assert pooling.shape == (84 * 84, 16)
    assert largest.size <= 8 * 2**20
