"""What arithmetic asks of the machine it runs on: room in memory, threads, exact products."""

import ctypes
import mmap
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ContextDecorator, contextmanager
from functools import cache
from importlib.util import find_spec
from threading import Barrier, Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KEPT = 7 * 2**20  # floats of a block, just under the 32 MiB to which glibc learns
HUGE = 2**22  # bytes from which on large pages are worth asking for
CPU_CACHED, CPU_MOST, GPU_MOST = 2**22, 2**24, 2**26  # floats that one temporary may hold

EXACT = ("ieee", "none", "highest")  # names of full float32

HAS_ONEDNN = torch.backends.mkldnn.is_available()


def device_named(device: str | torch.device) -> torch.device:
    """Return a device; "auto" is the GPU if there is one.

    >>> device_named("cpu")
    device(type='cpu')
    """
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"device must be 'auto' or one that torch can use, but it is {device!r}: {error}"
        ) from error


def cached(device: torch.device) -> int:
    """Floats that a temporary of a pass may hold: on a CPU what stays in cache."""
    return CPU_CACHED if device.type == "cpu" else GPU_MOST


def most(device: torch.device) -> int:
    """Floats of samples, patches or features that may be held at a time."""
    return CPU_MOST if device.type == "cpu" else GPU_MOST


@cache
def has_kernels(device: torch.device) -> bool:
    """Say whether the kernels of :mod:`pecil.pec.kernels` run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream on which steps are recorded: each new one would keep a workspace."""
    return torch.cuda.Stream(device)


def roomy(*shape: int, device: torch.device) -> Tensor:
    """Return an empty tensor; a large one on a CPU asks for large pages, which are faster."""
    tensor = torch.empty(*shape, device=device)
    if device.type == "cpu" and sys.platform == "linux":
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = tensor.data_ptr() + 4 * tensor.numel() - start
        if length >= HUGE:  # advice: whether it is taken makes no other difference
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return tensor


def by_threads(work: Callable[[int], None], n: int) -> None:
    """Call ``work`` with 0 to n - 1, in as many threads as the library may use, one thread each.

    The library's own way is to share every operation between threads, which then wait for each
    other: with many small operations on a busy machine, longer than they work.
    """
    if torch.get_num_threads() == 1:
        for k in range(n):
            work(k)
        return
    pool = thread_pool()
    started = [pool.submit(work, k) for k in range(n)]
    try:
        for one in started:
            one.result()
    finally:  # when one fails, or on Ctrl-C, the others come to their end first
        for one in started:
            one.cancel()
        wait(started)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait: what is done here, in less than a second or two, is done whole."""
    usual, came = signal.getsignal(signal.SIGINT), []
    if not callable(usual) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *call: came.append(call))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            usual(*came[0])


@contextmanager
def one_thread(small: bool = True) -> Iterator[None]:
    """Let operations of this thread use no other, if what they do is small.

    They would wait for each other: in vain, and where other programs keep all cores busy a
    hundred times as long as they work.
    """
    threads = torch.get_num_threads()
    alone = small and threads > 1
    if alone:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if alone:
            torch.set_num_threads(threads)


def thread_pool() -> ThreadPoolExecutor:
    """Return as many threads as the library may use, in which operations use one each."""
    return _threads(os.getpid(), torch.get_num_threads())


@cache
def _threads(process: int, n: int) -> ThreadPoolExecutor:
    """Return n threads in which operations use one thread each; a forked process has its own.

    A large block that comes and goes teaches glibc to keep what threads give back, up to that
    size: else every temporary's memory would be given back to the system and taken anew.
    """
    torch.empty(KEPT)
    pool, all_there = ThreadPoolExecutor(n, "pecil", initializer=_alone), Barrier(n)
    for _ in pool.map(lambda _: all_there.wait(), range(n)):
        pass
    torch.set_num_threads(n)  # with which any other thread begins
    return pool


def _alone() -> None:
    """Let operations of this thread use no other."""
    torch.get_num_threads()  # the first call takes the number with which threads begin
    torch.set_num_threads(1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, rectify: bool = False) -> Tensor:
    """Return x Wᵀ + b, rectified if asked; on a CPU by oneDNN, faster at products of many rows."""
    many = x.numel() > x.shape[-1]
    if many and x.device.type == "cpu" and x.dtype == torch.float32 and HAS_ONEDNN:
        then = "relu" if rectify else "none"
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "")
    y = F.linear(x, weight, bias)
    return y.relu_() if rectify else y


class _Everywhere(ContextDecorator, ABC):
    """A way of computing that holds for all threads, as long as one is in it."""

    def __init__(self) -> None:
        self.lock, self.inside = Lock(), 0

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                self.begin()

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.end()

    @abstractmethod
    def begin(self) -> None:
        """Change what is set for all."""

    @abstractmethod
    def end(self) -> None:
        """Put it back."""


class _WithoutOneDNN(_Everywhere):
    def begin(self) -> None:
        self.before = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)

    def end(self) -> None:
        torch._C._set_mkldnn_enabled(self.before)


without_onednn = _WithoutOneDNN()
"""Does without oneDNN, which takes far longer to set up a small GELU than to compute it."""


class _InFull(_Everywhere):
    def begin(self) -> None:
        self.allowed = [(m, m.fp32_precision) for m in _matmuls()]
        for matmul, precision in self.allowed:
            if precision not in EXACT:
                matmul.fp32_precision = EXACT[0]

    def end(self) -> None:
        for matmul, precision in self.allowed:
            if precision not in EXACT:
                matmul.fp32_precision = precision


class _AllMatmuls:
    """What PyTorch before 2.9 has: one precision for products on all devices."""

    @property
    def fp32_precision(self) -> str:
        return torch.get_float32_matmul_precision()

    @fp32_precision.setter
    def fp32_precision(self, precision: str) -> None:
        torch.set_float32_matmul_precision("highest" if precision == EXACT[0] else precision)


def _matmuls() -> tuple[Any, ...]:
    """Return what holds the precision of float32 products on a GPU and on a CPU."""
    if hasattr(torch.backends, "fp32_precision"):
        backends: tuple[Any, ...] = (torch.backends.cuda, torch.backends.mkldnn)
        return tuple(backend.matmul for backend in backends)
    return (_AllMatmuls(),)


in_full = _InFull()
"""Keeps products in full float32, as ``with in_full:`` or ``@in_full``.

``torch.set_float32_matmul_precision`` lets a program have products in TF32 or bfloat16, faster and
coarser, everywhere: a covariance made of them need not even be positive definite.
"""
