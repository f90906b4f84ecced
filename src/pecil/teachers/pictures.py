"""Synthetic pictures: what a teacher may look at, since it must never see a training image.

Drawn on the CPU from a generator, geometry in float64, so that the same seed gives the same
pictures everywhere.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE = 32  # pixels of a side
LEAVES, CURVES = 80, 3  # shapes in a picture
POINTS = 24  # of a curve


def dead_leaves(n: int, channels: int, generator: torch.Generator) -> Tensor:
    """Draw opaque ellipses and boxes that fell one over another.

    Radii have density ∝ r⁻³ between 1.5 and 20 pixels, which gives the pictures the scale
    invariance of natural ones (Lee, Mumford and Huang 2001); colours are grey with a little
    hue; slight blur and noise.

    Returns
    -------
    Tensor
        (n, channels, 32, 32), of about mean 0 and deviation 1.
    """
    uniform = _Uniform(generator)
    yy, xx = _pixels()
    pictures = uniform(n, channels, 1, 1).expand(n, channels, SIZE, SIZE).clone()
    small, large = 1.5**-2, 20.0**-2
    for _ in range(LEAVES):
        cx, cy = uniform(n, 1, 1) * SIZE, uniform(n, 1, 1) * SIZE
        radius = (small + (large - small) * uniform(n, 1, 1)) ** -0.5
        angle, squash = uniform(n, 1, 1) * math.pi, 1 + 2 * uniform(n, 1, 1)
        p = (xx - cx) * angle.cos() + (yy - cy) * angle.sin()
        q = ((yy - cy) * angle.cos() - (xx - cx) * angle.sin()) * squash
        ellipse = p**2 + q**2 < radius**2
        box = (p.abs() < radius) & (q.abs() < radius)
        leaf = torch.where(uniform(n, 1, 1) < 0.5, ellipse, box).unsqueeze(1)
        colour = uniform(n, 1, 1, 1) + 0.3 * (uniform(n, channels, 1, 1) - 0.5)
        pictures = torch.where(leaf, colour.clamp(0, 1), pictures)
    pictures += 0.02 * torch.randn(pictures.shape, generator=generator, dtype=torch.float64)
    blurred = F.avg_pool2d(F.pad(pictures, (1, 1, 1, 1), mode="replicate"), 3, 1)
    return ((0.5 * pictures + 0.5 * blurred - 0.45) / 0.25).float()


def strokes(n: int, channels: int, generator: torch.Generator) -> Tensor:
    """Draw three curved strokes of a pen, one to two pixels wide to each side, on plain ground.

    Returns
    -------
    Tensor
        (n, channels, 32, 32), of about mean 0 and deviation 1.
    """
    uniform = _Uniform(generator)
    yy, xx = _pixels()
    t = torch.linspace(0, 1, POINTS, dtype=torch.float64).view(1, -1, 1)
    pictures = torch.zeros(n, SIZE, SIZE, dtype=torch.float64)
    for _ in range(CURVES):
        ends = uniform(n, 3, 2) * SIZE * 0.8 + SIZE * 0.1
        radius = 1 + uniform(n, 1, 1)
        curve = (1 - t) ** 2 * ends[:, :1] + 2 * (1 - t) * t * ends[:, 1:2] + t**2 * ends[:, 2:]
        distance = torch.full((n, SIZE, SIZE), math.inf, dtype=torch.float64)
        for point in curve.unbind(1):  # (n, 2)
            x, y = point[:, 0].view(-1, 1, 1), point[:, 1].view(-1, 1, 1)
            torch.minimum(distance, (xx - x) ** 2 + (yy - y) ** 2, out=distance)
        pictures = torch.maximum(pictures, torch.sigmoid(3 * (radius - distance.sqrt())))
    return ((pictures - 0.13) / 0.31).float().unsqueeze(1).expand(-1, channels, -1, -1)


class _Uniform:
    """Uniform numbers between 0 and 1, in float64."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __call__(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)


def _pixels() -> tuple[Tensor, Tensor]:
    side = torch.arange(SIZE, dtype=torch.float64)
    yy, xx = torch.meshgrid(side, side, indexing="ij")
    return yy, xx
