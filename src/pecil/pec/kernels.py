"""Kernels for GPUs, in Triton, that comes with PyTorch there: a convolution pooled, and Adam.

Each does in one pass what takes the library several, with all that lies between written to
memory and read again. On a CPU, or without Triton, the library's operations do the same.
"""

import triton
import triton.language as tl
from torch import Tensor

POSITIONS, CHANNELS, WARPS, STAGES = 64, 128, 4, 2  # of a block; the fastest of those tried
NUMBERS = 1024  # of a row that one program of Adam takes


def pool(patches: Tensor, filters: Tensor, cells: Tensor, out: Tensor, rectify: bool) -> None:
    """Write the maps of all filters, rectified or not, pooled; the maps are never in memory.

    Products are sums of three in TF32: as exact as float32.

    Parameters
    ----------
    patches : Tensor, (n, positions, k)
    filters : Tensor, (k, w)
    cells : Tensor, (r, positions)
        The weight of every position in every cell.
    out : Tensor, (n, r, w)
    rectify : bool
    """
    (n, positions, k), (r, _), width = patches.shape, cells.shape, filters.shape[1]
    sizes = {"K": _padded(k), "R": _padded(r), "P": POSITIONS, "C": CHANNELS}
    _pool[triton.cdiv(width, CHANNELS), n](
        *(patches, filters, cells, out, width, positions, k, r),
        **sizes,
        RECTIFY=rectify,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def _padded(n: int) -> int:
    """Return the side of the block that holds n rows or columns."""
    return max(16, triton.next_power_of_2(n))


@triton.jit
def _pool(
    patches,
    filters,
    cells,
    out,
    width,
    positions,
    k_used,
    r_used,
    K: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    RECTIFY: tl.constexpr,
):
    """Handle one picture and C channels: positions P by P."""
    picture = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * C + tl.arange(0, C)
    k, r = tl.arange(0, K), tl.arange(0, R)
    inside = c < width
    w = tl.load(
        filters + k[:, None] * width + c[None, :],
        mask=(k[:, None] < k_used) & inside[None, :],
        other=0.0,
    )
    total = tl.zeros((R, C), tl.float32)
    for start in range(0, positions, P):
        p = start + tl.arange(0, P)
        x = tl.load(
            patches + (picture * positions + p)[:, None] * k_used + k[None, :],
            mask=(p[:, None] < positions) & (k[None, :] < k_used),
            other=0.0,
        )
        maps = tl.dot(x, w, input_precision="tf32x3")
        if RECTIFY:
            maps = tl.maximum(maps, 0.0)
        a = tl.load(
            cells + r[:, None] * positions + p[None, :],
            mask=(r[:, None] < r_used) & (p[None, :] < positions),
            other=0.0,
        )
        total = tl.dot(a, maps, total, input_precision="tf32x3")
    tl.store(
        out + (picture * r_used + r)[:, None] * width + c[None, :],
        total,
        mask=(r[:, None] < r_used) & inside[None, :],
    )


def adam(
    rows: Tensor, gradient: Tensor, first: Tensor, second: Tensor, table: Tensor, eps: float
) -> None:
    """Take a step of Adam with every row, each at its own rates.

    Parameters
    ----------
    rows, gradient : Tensor, (n, row)
    first, second : Tensor, (n, row)
        The running means of the gradient and of its square.
    table : Tensor, (4, n)
        For every row: the weights of the new gradient and of its square in their means, the rate
        and what the root of the second mean is multiplied by.
    eps : float
    """
    n, length = rows.shape
    grid = (triton.cdiv(length, NUMBERS), n)
    _adam[grid](rows, gradient, first, second, table, length, n, eps, N=NUMBERS, num_warps=4)


@triton.jit
def _adam(rows, gradient, first, second, table, length, n, eps, N: tl.constexpr):
    """Handle N numbers of one row."""
    row = tl.program_id(1)
    at = tl.program_id(0) * N + tl.arange(0, N)
    inside = at < length
    at += row.to(tl.int64) * length
    new1, new2 = tl.load(table + row), tl.load(table + n + row)
    rate, scale = tl.load(table + 2 * n + row), tl.load(table + 3 * n + row)
    g = tl.load(gradient + at, mask=inside)
    m = tl.load(first + at, mask=inside)
    v = tl.load(second + at, mask=inside)
    m += new1 * (g - m)
    v += new2 * (g * g - v)
    x = tl.load(rows + at, mask=inside)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
    tl.store(rows + at, x + rate * (m / (tl.sqrt_rn(v) * scale + eps)), mask=inside)
