"""Teachers of PEC: the frozen random network h that students learn to predict, or any callable.

Those of whitened PEC are in `pecil.teachers`.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pecil.pec.machine import (
    GPU_MOST,
    by_threads,
    cached,
    has_kernels,
    linear,
    most,
    roomy,
    thread_pool,
)
from pecil.pec.networks import (
    ALIGN,
    CHANNELS,
    EPS,
    Architecture,
    Stack,
    activate,
    centred,
    draw,
    forward,
    map_scales,
    pooled_maps,
    pooling,
)

LARGEST_OUTPUT = 1e8  # of a teacher: squares of squares must stay within float32
BLOCK = 64  # numbers of a patch, or cells, up to which the kernel for GPUs takes them
STEP = 64  # inputs by which numbers of those that are not zero are told apart
AHEAD = 2**21  # floats of a temporary where each thread has its own


class Teacher:
    """A frozen random network h; its outputs are what the students learn to predict.

    The values are drawn on the CPU from the seed and then moved, so that the same seed
    gives the same teacher on every device.

    Parameters
    ----------
    architecture : Architecture
    init : str
        One of :data:`INITS`.
    seed : int
    device : torch.device
    """

    def __init__(
        self, architecture: Architecture, init: str, seed: int, device: torch.device
    ) -> None:
        self.architecture = architecture
        generator = torch.Generator().manual_seed(seed)
        row = draw(architecture, init, generator)
        self.checksum = fingerprint(row)
        self._recipe = (architecture, init, seed, device)
        self._rectify = architecture.activation == "relu"
        self._fast = (
            architecture.kind == "conv"
            and architecture.hidden_layers == 1
            and architecture.activation != "gelu"
        )
        if self._fast:
            self._keep_by_cell(row, device)
            return
        self._stack = Stack.over(architecture, row.to(device))
        self._by_input: Tensor | None = None  # first weights (fan_in, w)
        self._own = local()  # room for some of them, one a thread
        if architecture.kind == "mlp" and device.type == "cpu":
            self._by_input = self._stack.hidden[0].turned[0].contiguous()

    def _keep_by_cell(self, row: Tensor, device: torch.device) -> None:
        """Keep a convolution's values, the output weights cell by cell as maps are pooled."""
        arch, values = self.architecture, self.architecture.views(row)
        out = values["out.weight"].view(arch.output_dim, arch.width, -1)  # the last axis: cells
        self._out = roomy(arch.output_dim, arch.pool**2, arch.width, device=device)
        self._out = self._out.copy_(out.transpose(1, 2)).flatten(1)  # (d, cells·w)
        self._bias = values["out.bias"][0].to(device).clone()
        self._filters = values["hidden0.weight"][0].to(device).clone()  # (w, 9c)
        self._turned = self._filters.T.contiguous()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Leave the drawn values out of pickles: a recipe makes them again."""
        return type(self), self._recipe

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs (n, d) for samples (n, *input_shape), in bounded memory."""
        with torch.no_grad():
            if self._fast:
                return self._conv(x)
            rows = max(1, cached(x.device) // self.architecture.temporaries)
            out = x.new_empty(len(x), self.architecture.output_dim)
            for part, target in zip(x.split(rows), out.split(rows), strict=True):
                inputs = self.architecture.inputs(part)
                if self._by_input is not None:
                    target.copy_(self._mlp(inputs, self._by_input))
                else:
                    target.copy_(forward(self._stack, inputs.unsqueeze(0))[0][0])
            return out

    def _mlp(self, x: Tensor, by_input: Tensor) -> Tensor:
        """Return the outputs of a perceptron on a CPU, given the weights of its first layer."""
        for k, layer in enumerate(self._stack.hidden):
            bias = layer.bias[0, 0]
            z = linear(x, layer.weight[0], bias) if k else self._without_zeros(x, by_input, bias)
            a = F.layer_norm(z, z.shape[1:], layer.scale.view(-1), layer.shift.view(-1), EPS)
            x = activate(self.architecture.activation, a)
        return linear(x, self._stack.weight[0], self._stack.bias[0, 0])

    def _without_zeros(self, x: Tensor, by_input: Tensor, bias: Tensor) -> Tensor:
        """Return x W + b, leaving out inputs that are zero in all samples, such as the border.

        Some are left in: the library keeps what it needs for products of every size it meets.
        """
        active = x.any(0)
        n = int(active.sum())
        if len(x) == 1 and n:
            at = active.nonzero().T
            return F.embedding_bag(at, by_input, per_sample_weights=x[:, at[0]], mode="sum") + bias
        n = -(-n // STEP) * STEP
        if n > 0.8 * x.shape[1]:
            return linear(x, by_input.T, bias)
        chosen = active.byte().argsort(stable=True, descending=True)[:n]
        if not hasattr(self._own, "room"):
            self._own.room = torch.empty_like(by_input)
        kept = torch.index_select(by_input, 0, chosen, out=self._own.room[:n])
        return linear(x.index_select(1, chosen), kept.T, bias)

    def _conv(self, x: Tensor) -> Tensor:
        """One convolution, normalised, rectified and pooled without keeping the map.

        With patches P (positions × 9c), their mean removed, instance normalisation scales
        channel c by 1/√(w_c' cov(P) w_c + ε) > 0, which passes through the rectifier and
        the pooling: it is applied to the small pooled map. The large map is made, rectified
        and pooled in pieces.
        """
        arch, cpu = self.architecture, x.device.type == "cpu"
        held = max(9 * arch.n_features, arch.width * arch.pool**2)  # patches, pooled maps
        rows = max(1, min(128 if cpu else 256, most(x.device) // held, len(x)))
        pooled = roomy(rows, arch.pool**2, arch.width, device=x.device)  # used again and again
        out = x.new_empty(len(x), arch.output_dim)
        for part, target in zip(x.split(rows), out.split(rows), strict=True):
            maps = pooled[: len(part)]
            if cpu:
                self._pool_by_threads(part, maps)
                self._project_by_threads(maps.flatten(1), target)
            else:
                patches = centred(arch, part)
                self._pool(patches, maps)
                maps *= map_scales(patches, self._turned).unsqueeze(1)
                target.copy_(F.linear(maps.flatten(1), self._out, self._bias))
        return out

    def _pool(self, patches: Tensor, pooled: Tensor) -> None:
        """Write the pooled (and rectified) maps of the filters into ``pooled``, (n, r², w)."""
        arch = self.architecture
        cells = pooling(arch.input_shape[1:], (arch.pool, arch.pool), patches.device).T
        if has_kernels(patches.device) and max(len(self._turned), len(cells)) <= BLOCK:
            from pecil.pec import kernels

            kernels.pool(patches, self._turned, cells.contiguous(), pooled, self._rectify)
            return
        images = max(1, GPU_MOST // arch.temporaries)
        for part, target in zip(patches.split(images), pooled.split(images), strict=True):
            maps = part @ self._turned
            torch.matmul(cells, maps.relu_() if self._rectify else maps, out=target)

    def _pool_by_threads(self, x: Tensor, pooled: Tensor) -> None:
        """Write the pooled maps of pictures, scaled, on a CPU: each by one thread, in its cache.

        Where there are more threads than pictures, each thread has some of the channels.
        """
        width, threads = self.architecture.width, torch.get_num_threads()

        def work(k: int) -> None:
            images, first, last = range(k, len(x), threads), 0, width
            if len(x) < threads:
                images = range(len(x))
                first, last = (share * width // threads for share in (k, k + 1))
            filters = self._filters[first:last]
            for image in images:
                patches = centred(self.architecture, x[image : image + 1])
                self._pool_one(patches, filters, pooled[image, :, first:last])

        by_threads(work, threads)

    def _pool_one(self, patches: Tensor, filters: Tensor, out: Tensor) -> None:
        """Write the pooled maps (r², filters) of one picture's patches, scaled."""
        arch, scales = self.architecture, map_scales(patches, filters.T)
        parts = filters.split(CHANNELS), scales.split(CHANNELS, 1), out.split(CHANNELS, 1)
        for some, scale, target in zip(*parts, strict=True):
            torch.mul(pooled_maps(arch, patches[0], some), scale, out=target)

    def _project_by_threads(self, maps: Tensor, target: Tensor) -> None:
        """Write the outputs, (n, d), of pooled maps: each thread has some of them."""
        shares = torch.get_num_threads()
        weights, biases = (values.tensor_split(shares) for values in (self._out, self._bias))
        outputs = target.tensor_split(shares, 1)

        def work(share: int) -> None:
            outputs[share].copy_(linear(maps, weights[share], biases[share]))

        by_threads(work, shares)


class Answers:
    """A teacher's outputs (n, d), made block by block in other threads; indexing waits for them.

    Parameters
    ----------
    teacher : Teacher
        A perceptron on a CPU.
    x : Tensor
        Samples (n, *input_shape), those first that are needed first.
    """

    def __init__(self, teacher: Teacher, x: Tensor) -> None:
        self.teacher, self.x = teacher, x
        self.block = max(1, AHEAD // teacher.architecture.temporaries)  # samples
        self.out = x.new_empty(len(x), teacher.architecture.output_dim)
        self.asked: list[Future[None]] = []

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return the outputs of some samples."""
        for k in range(int(rows.max()) // self.block + 1):
            self.asked[k].result()
        return self.out[rows]

    def answer(self, start: int) -> None:
        """Make the outputs of a block."""
        block = slice(start, start + self.block)
        self.out[block] = self.teacher(self.x[block])


@contextmanager
def asked(answers: Sequence[Answers]) -> Iterator[None]:
    """Have answers made meanwhile: the first block of each, then the second ones, and so on."""
    queue = [(start, one) for one in answers for start in range(0, len(one.x), one.block)]
    if queue:
        pool = thread_pool()
        for start, one in sorted(queue, key=lambda item: item[0]):
            one.asked.append(pool.submit(one.answer, start))
    try:
        yield
    finally:  # what was interrupted needs no answers
        for future in [future for one in answers for future in one.asked]:
            future.cancel()


class CustomTeacher:
    """Any callable as teacher: a pre-trained network, a perceptual hash.

    Parameters
    ----------
    function : callable
        Maps samples (n, *input_shape), a float tensor, to outputs (n, d): a tensor or an
        array. A ``torch.nn.Module`` is put into evaluation mode while it is asked.
    input_shape : tuple of int
    device : torch.device
    """

    BATCH = 256

    def __init__(
        self, function: Callable[..., Any], input_shape: tuple[int, ...], device: torch.device
    ) -> None:
        self.function = function
        self.output_dim = 0  # not known yet
        if isinstance(function, torch.nn.Module):
            function.to(device)
        generator = torch.Generator().manual_seed(0)
        probe = torch.rand(2, *input_shape, generator=generator).to(device)
        answer = self(probe)
        self.output_dim = answer.shape[1]
        self.checksum = [round(float(value), 3) for value in answer.flatten()[:16].cpu()]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs (n, d) as float32 on the device of ``x``."""
        module = self.function if isinstance(self.function, torch.nn.Module) else torch.nn.Module()
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        try:
            with torch.no_grad():
                return torch.cat([self._ask(part) for part in x.split(self.BATCH)])
        finally:
            for part, training in modes:
                part.training = training

    def _ask(self, x: Tensor) -> Tensor:
        with fitting(f"samples of shape {tuple(x.shape[1:])}"):
            answer = torch.as_tensor(self.function(x)).to(x.device, torch.float32)
        outputs = self.output_dim or answer.shape[-1]
        if answer.dim() != 2 or answer.shape != (len(x), outputs):
            raise ValueError(
                f"teacher must map {len(x)} samples to outputs of shape ({len(x)}, "
                f"{self.output_dim or 'd'}), but it returned shape {tuple(answer.shape)}"
            )
        if not bool((answer.abs() <= LARGEST_OUTPUT).all()):
            raise ValueError(
                "teacher returned NaN or infinite outputs, or magnitudes above "
                f"{LARGEST_OUTPUT:.0e}"
            )
        return answer


@contextmanager
def fitting(samples: str, advice: str = "") -> Iterator[None]:
    """Say what a network was given that it failed on."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        more = f"; {advice}" if advice else ""
        raise ValueError(f"the network cannot take {samples}{more}: {error}") from error


def fingerprint(row: Tensor) -> str:
    """Return a checksum of drawn values: evenly spaced samples of the row, and its end."""
    flat = row.reshape(-1)
    sample = torch.cat([flat[:: max(1, len(flat) // 2**16)], flat[-ALIGN:]])
    return hashlib.sha256(sample.numpy().tobytes()).hexdigest()
