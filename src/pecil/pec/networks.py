"""The networks of PEC, students' and teacher's: shapes, initial values, forward and backward pass.

The paper's networks (Zając, Tuytelaars, van de Ven, ICLR 2024, Appendix A.1) have one
hidden layer, either linear or convolutional::

    mlp     Linear → LayerNorm → GELU → Linear
    conv    Conv 3×3 → InstanceNorm → ReLU → average pooling to r×r → Linear
    linear  Linear

A pass works on a stack of C networks at once: every parameter and every activation has a
leading class axis. The backward pass is written
out by hand: with one sample a step the work is tiny, and an automatic-differentiation
graph would cost several times more than the arithmetic.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pecil.pec.machine import by_threads, cached, linear

KINDS = ("mlp", "conv", "linear")
ACTIVATIONS = ("gelu", "relu", "identity")
INITS = ("kaiming", "xavier", "uniform0.001", "uniform0.01", "uniform0.1")
EPS = 1e-5  # of both normalisations, as in PyTorch
FULL = 32  # floats: two vectors of 512 bits, what a loop over them takes at a time
CHANNELS = 1024  # of maps that a CPU makes at a time
ALIGN = 16  # floats: every parameter of a row starts on a 64-byte border

Tape = list[tuple[Tensor, ...]]

_gelu_backward = torch.ops.aten.gelu_backward.default
_threshold_backward = torch.ops.aten.threshold_backward.default
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


@dataclass(frozen=True)
class Architecture:
    """The shape of a student or of the teacher.

    Parameters
    ----------
    kind : {"mlp", "conv", "linear"}
    input_shape : tuple of int
        ``(features,)`` or ``(channels, height, width)``; only "conv" needs the latter.
    width : int
        Neurons or channels of each hidden layer (w in the paper).
    output_dim : int
        Outputs (d in the paper).
    pool : int
        Side of the pooled map (r in the paper); "conv" only.
    hidden_layers : int
        Hidden layers before the linear output layer; none for "linear".
    activation : {"gelu", "relu", "identity"}
        "identity" is the paper's *removed nonlinearity*.

    Examples
    --------
    >>> Architecture("mlp", (784,), width=10, output_dim=99).n_parameters
    8959
    >>> Architecture("conv", (3, 32, 32), 60, 743, pool=5, activation="relu").n_parameters
    1117043
    """

    kind: str
    input_shape: tuple[int, ...]
    width: int
    output_dim: int
    pool: int = 1
    hidden_layers: int = 1
    activation: str = "gelu"

    @property
    def n_features(self) -> int:
        """Inputs of one sample."""
        return math.prod(self.input_shape)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, in the order in which they are drawn."""
        fan_in = self.input_shape[0] * 9 if self.kind == "conv" else self.n_features
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(0 if self.kind == "linear" else self.hidden_layers):
            shapes[f"hidden{layer}.weight"] = (self.width, fan_in)
            shapes[f"hidden{layer}.bias"] = (self.width,)
            shapes[f"norm{layer}.weight"] = (self.width,)
            shapes[f"norm{layer}.bias"] = (self.width,)
            fan_in = self.width * 9 if self.kind == "conv" else self.width
        if self.kind == "conv":
            fan_in = self.width * self.pool**2
        shapes["out.weight"] = (self.output_dim, fan_in)
        shapes["out.bias"] = (self.output_dim,)
        return shapes

    @property
    def n_parameters(self) -> int:
        """Trainable numbers of one network."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of one sample, counted as the paper does.

        Beside the products an addition of biases, a rectifier and a pooling count one operation
        a number, a normalisation with scale and shift four.

        >>> Architecture("mlp", (784,), width=10, output_dim=99).macs
        8989
        """
        positions = math.prod(self.input_shape[1:]) if self.kind == "conv" else 1
        total = 0
        for name, shape in self.shapes.items():
            hidden = positions if name.startswith("hidden") else 1
            if not name.startswith("norm"):
                total += hidden * math.prod(shape)
            elif name.endswith("weight"):
                active = self.activation != "identity"
                total += positions * self.width * (4 + active)
        if self.kind == "conv":
            total += positions * self.width
        return total

    @property
    def row(self) -> int:
        """Length of the flat row that holds one network, alignment gaps included."""
        return sum(_aligned(math.prod(shape)) for shape in self.shapes.values())

    @property
    def temporaries(self) -> int:
        """Floats that the largest temporary of a forward pass holds for one sample."""
        if self.kind != "conv":
            return max(self.width, self.output_dim)
        deep = 9 if self.hidden_layers > 1 else 1
        channels = max(self.width * deep, 9 * self.input_shape[0])
        return max(channels * math.prod(self.input_shape[1:]), self.output_dim)

    @property
    def kept(self) -> int:
        """Floats that a network makes of one sample in the end: outputs, or what they are of."""
        return max(self.output_dim, self.width * self.pool**2)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Name the parts of flat rows (C, row): tensors (C, *shape) that share memory."""
        parts, start = {}, 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            parts[name] = rows[:, start : start + size].view(-1, *shape)
            start += _aligned(size)
        return parts

    def fitting(self, budget: int) -> "Architecture":
        """Return this architecture with the largest output that fits ``budget`` parameters.

        So the paper matches its parameter counts: widths are fixed, d takes up the rest.

        >>> Architecture("conv", (3, 32, 32), 40, 1, pool=4).fitting(112_000).output_dim
        172
        """
        one = replace(self, output_dim=1).n_parameters
        each = replace(self, output_dim=2).n_parameters - one
        if budget < one:
            raise ValueError(
                f"budget={budget} parameters per class is too small: a {self.kind} student of "
                f"width {self.width} on inputs of shape {self.input_shape} needs at least {one}; "
                "give a larger budget or a smaller student_width"
            )
        return replace(self, output_dim=1 + (budget - one) // each)

    def inputs(self, x: Tensor) -> Tensor:
        """Turn samples (n, *input_shape) into what the first layer multiplies.

        Features (n, f), or for "conv" the 3×3 patches (n, 9·channels, positions).
        """
        if self.kind == "conv":
            cut = self._cut(x)
            return cut.permute(0, 1, 4, 5, 2, 3).flatten(1, 3).flatten(2)
        return x.reshape(len(x), -1)

    def patches(self, x: Tensor) -> Tensor:
        """Turn samples into 3×3 patches (n, positions, 9·channels)."""
        return self._cut(x).permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2).contiguous()

    def _cut(self, x: Tensor) -> Tensor:
        return cut(F.pad(x.view(-1, *self.input_shape), (1, 1, 1, 1)), 3)


def cut(x: Tensor, size: int, stride: int = 1) -> Tensor:
    """View images (n, c, h, w) as patches (n, c, rows, columns, size, size)."""
    return x.unfold(2, size, stride).unfold(3, size, stride)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def draw(architecture: Architecture, init: str, generator: torch.Generator) -> Tensor:
    """Draw one network's initial values on the CPU: a flat row (1, row).

    "kaiming" is PyTorch's default, U(±1/√fan_in) for weights and biases; "xavier" is
    U(±√(6/(fan_in+fan_out))) with zero biases; "uniform0.01" is U(±0.01) for both.
    Normalisation layers start at (1, 0).
    """
    row, bound = torch.zeros(1, architecture.row), 0.0
    for name, value in architecture.views(row).items():
        layer, part = name.split(".")
        if layer.startswith("norm"):
            value.fill_(1.0 if part == "weight" else 0.0)
            continue
        if part == "weight":
            bound = _bound(architecture, init, name, architecture.shapes[name])
        elif init == "xavier":
            continue
        value.uniform_(-bound, bound, generator=generator)
    return row


def _bound(architecture: Architecture, init: str, name: str, shape: tuple[int, ...]) -> float:
    fan_out, fan_in = shape
    if init == "kaiming":
        return 1 / math.sqrt(fan_in)
    if init == "xavier":
        field = 9 if architecture.kind == "conv" and name.startswith("hidden") else 1
        return math.sqrt(6 / (fan_in + fan_out * field))
    return float(init.removeprefix("uniform"))


@cache
def pooling(shape: tuple[int, ...], cells: tuple[int, int], device: torch.device) -> Tensor:
    """Adaptive average pooling of maps (height, width) as a matrix (positions, cells)."""
    sides = []
    for length, count in zip(shape, cells, strict=True):
        side = torch.zeros(length, count)
        for cell, (start, stop) in enumerate(_windows(length, count)):
            side[start:stop, cell] = 1 / (stop - start)
        sides.append(side)
    return torch.kron(*sides).to(device)


def _windows(length: int, side: int) -> list[tuple[int, int]]:
    """Borders of adaptive average pooling from ``length`` to ``side``."""
    return [(i * length // side, -(-(i + 1) * length // side)) for i in range(side)]


def activate(name: str, a: Tensor, apart: bool = False) -> Tensor:
    """Apply the nonlinearity of a name; of networks apart, in whole vectors."""
    if name == "gelu":
        return F.gelu(_in_full(a))[..., : a.shape[-1]] if apart else F.gelu(a)
    return torch.relu(a) if name == "relu" else a


def _in_full(a: Tensor) -> Tensor:
    """Fill rows up so that each is computed in whole vectors, none in a remainder."""
    width = a.shape[-1]
    return a if width % FULL == 0 else F.pad(a, (0, FULL - width % FULL))


def _activate_backward(name: str, dh: Tensor, a: Tensor, apart: bool = False) -> Tensor:
    if name == "gelu":
        if apart:
            return _gelu_backward(_in_full(dh), _in_full(a))[..., : a.shape[-1]]
        return _gelu_backward(dh, a)
    if name == "relu":
        return _threshold_backward(dh, a, 0.0)
    return dh


# --------------------------------------------------------------------------- students


@dataclass(frozen=True)
class Layer:
    """One hidden layer of C stacked networks, its parameters shaped for the passes below."""

    weight: Tensor  # (C, w, fan_in)
    turned: Tensor  # (C, fan_in, w), the same transposed
    bias: Tensor  # (C, 1, w)
    scale: Tensor  # (C, 1, w) or, for "conv", (C, 1, w, 1)
    shift: Tensor


@dataclass(frozen=True)
class Stack:
    """C stacked networks as views of flat rows (C, row), ready for many passes."""

    architecture: Architecture
    hidden: tuple[Layer, ...]
    weight: Tensor  # of the output layer, (C, d, fan_in)
    turned: Tensor  # (C, fan_in, d)
    bias: Tensor  # (C, 1, d)
    apart: bool = False
    """Whether a network's numbers may not depend, to the last bit, on its place in the stack.
    The library's batched products and vectorised functions do on a CPU."""

    @classmethod
    def over(cls, arch: Architecture, rows: Tensor, apart: bool = False) -> "Stack":
        """View flat rows, or rows of gradients, as a stack of networks."""
        p = arch.views(rows)
        ones = (1,) if arch.kind == "conv" else ()
        hidden = tuple(
            Layer(
                p[f"hidden{k}.weight"],
                p[f"hidden{k}.weight"].transpose(1, 2),
                p[f"hidden{k}.bias"].unsqueeze(1),
                p[f"norm{k}.weight"].view(len(rows), 1, arch.width, *ones),
                p[f"norm{k}.bias"].view(len(rows), 1, arch.width, *ones),
            )
            for k in range(0 if arch.kind == "linear" else arch.hidden_layers)
        )
        weight = p["out.weight"]
        bias = p["out.bias"].unsqueeze(1)
        return cls(arch, hidden, weight, weight.transpose(1, 2), bias, apart)


def forward(nets: Stack, x: Tensor) -> tuple[Tensor, Tape]:
    """Run C stacked networks.

    Parameters
    ----------
    nets : Stack
    x : Tensor
        What :meth:`Architecture.inputs` gives, with a class axis in front: (C, n, …), for
        each network its own, or (1, n, …) for all networks alike.

    Returns
    -------
    y : Tensor
        Outputs (C, n, d).
    tape : list
        What :func:`backward` needs.
    """
    arch, tape = nets.architecture, Tape()
    conv = arch.kind == "conv"
    for k, layer in enumerate(nets.hidden):
        if conv and k:
            x = _patches(arch, x)
        z = _convolve(layer, x) if conv else _multiply(layer, x, nets.apart)
        if conv or nets.apart or len(z) > 1:
            norm, mean, rstd = torch.native_layer_norm(z, z.shape[-1:], None, None, EPS)
            a = torch.addcmul(layer.shift, norm, layer.scale)
        else:  # a single network's affine map can be done in the same go
            scale, shift = layer.scale.view(-1), layer.shift.view(-1)
            a, mean, rstd = torch.native_layer_norm(z, z.shape[-1:], scale, shift, EPS)
            norm = a
        tape.append((x, z, mean, rstd, norm, a))
        x = activate(arch.activation, a, nets.apart)
    if conv:
        x = _each(x, pooling(arch.input_shape[1:], (arch.pool, arch.pool), x.device)).flatten(2)
    tape.append((x,))
    return _multiply(nets, x, nets.apart), tape


def _multiply(layer: Layer | Stack, x: Tensor, apart: bool) -> Tensor:
    """Return x Wᵀ + b, (C, n, out), of inputs (C, n, in) or (1, n, in)."""
    turned, bias = layer.turned, layer.bias
    classes, _, out = turned.shape
    if apart:  # one sample a network
        return (layer.weight * x).sum(2).unsqueeze(1).add_(bias)
    if len(x) == classes:
        return torch.baddbmm(bias, x, turned)
    stacked = turned.transpose(1, 2).reshape(classes * out, -1)
    y = torch.addmm(bias.reshape(-1), x[0], stacked.T)
    return y.unflatten(1, (classes, out)).transpose(0, 1).contiguous()


def outputs(nets: Stack, x: Tensor) -> Tensor:
    """Return the outputs (C, n, d) of all networks for samples (n, *input_shape), for no tape.

    On a CPU each thread makes, rectifies and pools the maps of a picture of its own, some
    channels of all networks at a time, in its cache.
    """
    arch, classes = nets.architecture, len(nets.weight)
    if x.device.type != "cpu" or arch.kind != "conv" or len(nets.hidden) > 1:
        some = max(1, cached(x.device) // (arch.temporaries * classes))
        parts = [forward(nets, arch.inputs(part).unsqueeze(0))[0] for part in x.split(some)]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    (layer,) = nets.hidden
    filters = layer.weight.flatten(0, 1)  # (C·w, 9c)
    scale, shift = layer.scale.reshape(-1), layer.shift.reshape(-1)
    pooled = x.new_empty(classes * arch.width, len(x), arch.pool**2)

    def work(image: int) -> None:
        patches = centred(arch, x[image : image + 1])
        factor = scale * map_scales(patches, filters.T)[0]
        for some, times, plus, out in zip(
            *(values.split(CHANNELS) for values in (filters, factor, shift, pooled)), strict=True
        ):
            out[:, image] = pooled_maps(arch, patches[0], some * times.unsqueeze(1), plus).T

    by_threads(work, len(x))
    by_image = pooled.view(classes, arch.width, len(x), -1).transpose(1, 2)
    return torch.baddbmm(nets.bias, by_image.flatten(2), nets.turned)


def centred(arch: Architecture, x: Tensor) -> Tensor:
    """Return the patches of pictures, (n, positions, 9c), without their mean."""
    patches = arch.patches(x)
    patches -= patches.mean(1, keepdim=True)
    return patches


def pooled_maps(
    arch: Architecture, patches: Tensor, filters: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return the pooled maps, (cells, w), of one picture's patches on a CPU."""
    relu = arch.activation == "relu"
    maps = linear(patches, filters, bias, rectify=relu)
    maps = maps if relu else activate(arch.activation, maps)
    maps = maps.view(1, *arch.input_shape[1:], len(filters)).movedim(-1, 1)
    return F.adaptive_avg_pool2d(maps, arch.pool).movedim(1, -1).view(-1, len(filters))


def map_scales(patches: Tensor, turned: Tensor) -> Tensor:
    """Return 1 / deviation of the maps, (n, w), that filters (9c, w) make of centred patches."""
    covariances = patches.transpose(1, 2) @ patches / patches.shape[1]
    variances = (covariances @ turned).mul_(turned).sum(1)
    return variances.clamp_(min=0).add_(EPS).rsqrt_()


def _convolve(layer: Layer, x: Tensor) -> Tensor:
    """Return the maps (C, n, w, positions) of patches (C or 1, n, 9c, positions).

    Without the bias: instance normalisation would take it away again.
    """
    classes, width, _ = layer.weight.shape
    if len(x) == classes:
        return layer.weight.unsqueeze(1) @ x
    maps = layer.weight.reshape(classes * width, -1) @ x[0]
    return maps.unflatten(1, (classes, width)).transpose(0, 1).contiguous()


def _each(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply maps (C, n, w, a) by one matrix (a, b), each sample's as a product of its own.

    A single large product would round differently for different C.
    """
    flat = x.flatten(0, 1)
    return torch.bmm(flat, matrix.expand(len(flat), -1, -1)).unflatten(0, x.shape[:2])


def _patches(arch: Architecture, h: Tensor) -> Tensor:
    """3×3 patches (C, n, 9w, positions) of hidden maps (C, n, w, positions)."""
    maps = h.flatten(0, 1).unflatten(-1, arch.input_shape[1:])
    return F.unfold(maps, 3, padding=1).unflatten(0, h.shape[:2])


def backward(nets: Stack, tape: Tape, dy: Tensor, grads: Stack) -> None:
    """Write the gradients of C stacked networks into ``grads``, given that of y (C, n, d)."""
    arch = nets.architecture
    conv = arch.kind == "conv"
    (x,) = tape[-1]
    _multiply_backward(dy, x, grads.weight, grads.bias)
    if not nets.hidden:
        return
    dx = _turn_back(nets, dy, nets.apart)  # (C, n, fan_in)
    if conv:
        cells = pooling(arch.input_shape[1:], (arch.pool, arch.pool), x.device)
        dx = _each(dx.unflatten(-1, (arch.width, -1)), cells.T)
    for k in reversed(range(len(nets.hidden))):
        layer, grad = nets.hidden[k], grads.hidden[k]
        x, z, mean, rstd, norm, a = tape[k]
        da = _activate_backward(arch.activation, dx, a, nets.apart)
        if conv or nets.apart or len(z) > 1:
            over = (1, 3) if conv else (1,)
            torch.sum(da * norm, over, keepdim=True, out=grad.scale)
            torch.sum(da, over, keepdim=True, out=grad.shift)
            dz = _layer_norm_backward(
                da * layer.scale, z, z.shape[-1:], mean, rstd, None, None, [True, False, False]
            )[0]
        else:
            scale, shift = layer.scale.view(-1), layer.shift.view(-1)
            dz, dscale, dshift = _layer_norm_backward(
                da, z, z.shape[-1:], mean, rstd, scale, shift, [True, True, True]
            )
            grad.scale.copy_(dscale)
            grad.shift.copy_(dshift)
        if not conv:
            _multiply_backward(dz, x, grad.weight, grad.bias)
            dx = _turn_back(layer, dz, nets.apart) if k else dx
            continue
        torch.sum(dz @ x.transpose(2, 3), 1, out=grad.weight)
        if k:
            patches = (layer.weight.transpose(1, 2).unsqueeze(1) @ dz).flatten(0, 1)
            maps = F.fold(patches, arch.input_shape[1:], 3, padding=1)
            dx = maps.flatten(2).unflatten(0, dz.shape[:2])


def _turn_back(layer: Layer | Stack, dy: Tensor, apart: bool) -> Tensor:
    """Return the gradient of x, (C, n, in), for y = x Wᵀ + b."""
    if apart:
        return (layer.weight * dy.transpose(1, 2)).sum(1, keepdim=True)
    return torch.bmm(dy, layer.weight)


def _multiply_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Write the gradients of W (C, out, in) and b (C, 1, out) for y = x Wᵀ + b."""
    if dy.shape[1] == 1:
        torch.mul(dy.transpose(1, 2), x, out=weight)
        bias.copy_(dy)
    else:
        torch.bmm(dy.transpose(1, 2), x, out=weight)
        torch.sum(dy, 1, keepdim=True, out=bias)
