"""Synthetic pictures to train a teacher on: scenes of painted shapes, one over another.

A scene is a stack of layers, the first of them the ground. A layer is a shape (where, how large,
how turned and squashed) and a paint. Families of scenes differ in what these are drawn from.

All numbers of a scene are drawn on the CPU from one generator; the picture is made of them on any
device. Lengths are in sides of the picture.

``python -m pecil.teachers.scenes sheet.png`` shows them.

>>> drawn = draw({"leaves": 3, "glyphs": 1}, 8, seed=0, side=32)
>>> drawn.pictures.shape, drawn.pictures.dtype
(torch.Size([8, 3, 32, 32]), torch.uint8)
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from pecil.files import written_whole

BLOB, POLYGON, RING, CAPSULE = range(4)  # shapes; a blob without waves is an ellipse
FLAT, GRADIENT, GRATING, GRAIN, SHADED = range(5)  # paints
SHAPES, PAINTS = 4, 5
HUE = 0.35  # how far a colour is from grey, at most
RIM = 0.3  # width of a ring
AMBIENT = 0.25  # light in the shadow
LATTICES = (3, 6, 12, 24)  # points to a side of the noises that add up to grain
CURVE = 6  # capsules of a stroke
LETTERS, PARTS = 3, 3  # glyphs of a row, strokes of a glyph
MOST = 64  # layers of a scene
DRAWN, MADE = 1024, {"cpu": 64, "cuda": 1024}  # scenes, pictures at a time


@dataclass(frozen=True)
class Scenes:
    """The numbers of n scenes with L layers each."""

    centre: Tensor
    """Where a shape is, (n, L, 2): x and y, inside the picture from 0 to 1."""
    radius: Tensor
    """Half its length, (n, L)."""
    squash: Tensor
    """How often its width goes into its length, (n, L)."""
    angle: Tensor
    """How it is turned, (n, L)."""
    shape: Tensor
    """What it is, (n, L)."""
    waves: Tensor
    """Amplitude, number and phase of a blob's waves; a polygon has as many corners, (n, L, 3)."""
    paint: Tensor
    """How it is painted, (n, L)."""
    colours: Tensor
    """Between which two the paint mixes, (n, L, 2, 3)."""
    texture: Tensor
    """Frequency, direction and phase of a grating, direction of a gradient, (n, L, 3)."""
    lamp: Tensor
    """Whence light comes, (n, 1, 3), of length 1."""
    grain: Tensor
    """Values on lattices, (n, 1, points)."""

    def __len__(self) -> int:
        return len(self.centre)

    @property
    def layers(self) -> int:
        """How many layers a scene has (L)."""
        return self.centre.shape[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return scenes, all numbers changed in the same way."""
        return type(self)(*(change(getattr(self, field.name)) for field in fields(self)))

    def part(self, start: int, stop: int, device: torch.device) -> Self:
        """Return some of the scenes, on a device."""
        return self.map(lambda values: values[start:stop].to(device))

    def layer(self, k: int) -> Self:
        """Return the numbers of one layer, without the axis of layers."""
        return self.map(lambda values: values[:, min(k, values.shape[1] - 1)])

    @property
    def traits(self) -> Tensor:
        """What there is to tell of a layer, (n, MOST, 5), zero for layers that are not there.

        Its shape, its paint, twice its angle as a direction (the rounder, the shorter), and the
        logarithm of its radius.
        """
        long = 1 - 1 / self.squash
        told = [self.shape, self.paint]
        told += [long * torch.cos(2 * self.angle), long * torch.sin(2 * self.angle)]
        traits = torch.stack([*(part.float() for part in told), self.radius.log()], 2)
        return F.pad(traits, (0, 0, 0, MOST - self.layers))

    def under(self, other: "Scenes") -> "Scenes":
        """Return these scenes with the layers of others on top; the light is that of these."""
        both = {
            field.name: torch.cat([getattr(self, field.name), getattr(other, field.name)], 1)
            for field in fields(self)
            if field.name not in ("lamp", "grain")
        }
        return replace(self, **both)

    def elsewhere(self, behind: int) -> Self:
        """Return the same things in the surroundings, and the light, of the scene before.

        Parameters
        ----------
        behind : int
            How many layers, the first ones, are surroundings.
        """

        def moved(values: Tensor) -> Tensor:
            return torch.cat([values.roll(1, 0)[:, :behind], values[:, behind:]], 1)

        return self.map(moved)


# ------------------------------------------------------------------------------ painting


def render(scenes: Scenes, side: int) -> tuple[Tensor, Tensor]:
    """Make pictures of scenes, on the device where the scenes are.

    Returns
    -------
    Tensor, Tensor
        The pictures, (n, 3, side, side), between 0 and 1; which layer one sees where,
        (n, side, side).
    """
    at = (torch.arange(side, device=scenes.centre.device) + 0.5) / side
    yy, xx = torch.meshgrid(at, at, indexing="ij")
    grain = _grain(scenes.grain, side)
    pictures = torch.zeros(len(scenes), 3, side, side, device=at.device)
    seen = torch.zeros(len(scenes), side, side, dtype=torch.uint8, device=at.device)
    for k in range(scenes.layers):
        layer = scenes.layer(k)
        p, q = _local(layer, xx, yy)
        cover = _cover(layer, p, q, side)
        first, second = layer.colours[..., None, None].unbind(1)  # (n, 3, 1, 1)
        mixture = _mixture(layer, p, q, xx, yy, grain).unsqueeze(1)
        pictures = torch.lerp(pictures, torch.lerp(first, second, mixture), cover.unsqueeze(1))
        seen = torch.where(cover > 0.5, k, seen).byte()
    return pictures, seen


def _wide(values: Tensor) -> Tensor:
    """Return numbers of scenes, (n,), as they meet pixels, (n, 1, 1)."""
    return values[:, None, None]


def _local(layer: Scenes, xx: Tensor, yy: Tensor) -> tuple[Tensor, Tensor]:
    """Return where pixels are, seen from a shape: along it and across it, 1 being its edge."""
    x, y = xx - _wide(layer.centre[:, 0]), yy - _wide(layer.centre[:, 1])
    cosine, sine = _wide(layer.angle.cos()), _wide(layer.angle.sin())
    radius = _wide(layer.radius)
    p = (x * cosine + y * sine) / radius
    q = (y * cosine - x * sine) / radius * _wide(layer.squash)
    return p, q


def _cover(layer: Scenes, p: Tensor, q: Tensor, side: int) -> Tensor:
    """Return how much of each pixel a shape covers, between 0 and 1."""
    shape, squash = _wide(layer.shape), _wide(layer.squash)
    amplitude, number, phase = (_wide(values) for values in layer.waves.unbind(1))
    r, theta = torch.hypot(p, q), torch.atan2(q, p)
    slice_ = math.pi / number  # half the angle between two corners
    corner = torch.cos(torch.remainder(theta, 2 * slice_) - slice_) / torch.cos(slice_)
    beyond = (p.abs() - 1 + 1 / squash).clamp(min=0) * squash
    level = r / (1 + amplitude * torch.cos(number * theta + phase))
    level = torch.where(shape == POLYGON, r * corner, level)
    level = torch.where(shape == RING, (r - 1 + RIM).abs() / RIM, level)
    level = torch.where(shape == CAPSULE, torch.hypot(beyond, q), level)
    pixels = _wide(layer.radius) * side / squash * torch.where(shape == RING, RIM, 1.0)
    return ((1 - level) * pixels + 0.5).clamp(0, 1)


def _mixture(layer: Scenes, p: Tensor, q: Tensor, xx: Tensor, yy: Tensor, grain: Tensor) -> Tensor:
    """Return how much of its second colour a paint has at each pixel, between 0 and 1."""
    paint = _wide(layer.paint)
    frequency, direction, phase = (_wide(values) for values in layer.texture.unbind(1))
    cosine, sine = direction.cos(), direction.sin()
    slope = (0.5 + 0.5 * (p * cosine + q * sine)).clamp(0, 1)
    wave = torch.sin(2 * math.pi * frequency * (xx * cosine + yy * sine) + phase)
    x, y, z = (_wide(values) for values in layer.lamp.unbind(1))
    cosine, sine = _wide(layer.angle.cos()), _wide(layer.angle.sin())
    height = (1 - p.square() - q.square()).clamp(min=0).sqrt()  # of a round thing
    lit = p * (x * cosine + y * sine) + q * (y * cosine - x * sine) + height * z
    mixture = torch.where(paint == GRADIENT, slope, 0.0)
    mixture = torch.where(paint == GRATING, 0.5 + 0.5 * wave, mixture)
    mixture = torch.where(paint == GRAIN, grain, mixture)
    return torch.where(paint == SHADED, AMBIENT + (1 - AMBIENT) * lit.clamp(min=0), mixture)


def _grain(values: Tensor, side: int) -> Tensor:
    """Return noise, (n, side, side), between 0 and 1: lattices, the finer the fainter."""
    total = torch.zeros(len(values), 1, side, side, device=values.device)
    for points, part in zip(
        LATTICES, values[:, 0].split([m * m for m in LATTICES], 1), strict=True
    ):
        lattice = part.view(-1, 1, points, points)
        smooth = F.interpolate(lattice, (side, side), mode="bilinear", align_corners=True)
        total += (smooth - 0.5) * (8 / points**0.5)
    return total.sigmoid().squeeze(1)


# ------------------------------------------------------------------------------- drawing


class _Dice:
    """Random numbers for n scenes of so many layers."""

    def __init__(self, n: int, layers: int, generator: torch.Generator) -> None:
        self.n, self.layers, self.generator = n, layers, generator

    def of(self, layers: int) -> "_Dice":
        """Return dice for other layers of the same scenes."""
        return _Dice(self.n, layers, self.generator)

    def between(self, low: float, high: float, *more: int) -> Tensor:
        """Draw evenly between two numbers, (n, L, *more)."""
        drawn = torch.rand(self.n, self.layers, *more, generator=self.generator)
        return low + (high - low) * drawn

    def one_of(self, *weights: float) -> Tensor:
        """Draw whole numbers from 0, each as often as its weight says, (n, L)."""
        edges = torch.tensor(weights).cumsum(0) / sum(weights)
        return torch.bucketize(self.between(0, 1), edges[:-1], right=True)

    def radii(self, least: float, most: float) -> Tensor:
        """Draw radii of density ∝ r⁻³, (n, L): pictures then look the same at all scales."""
        return (least**-2 + self.between(0, 1) * (most**-2 - least**-2)).rsqrt()

    def angles(self) -> Tensor:
        """Draw directions, (n, L)."""
        return self.between(0, 2 * math.pi)

    def colours(self, brightness: Tensor | None = None) -> Tensor:
        """Draw colours not far from grey, (n, L, 3), of any brightness or of a given one."""
        grey = self.between(0, 1) if brightness is None else brightness
        hue = HUE * self.between(-1, 1, 3) * self.between(0, 1, 1)
        return (grey.unsqueeze(2) + hue).clamp(0, 1)


def _stack(
    dice: _Dice,
    *,
    shapes: tuple[float, ...] = (3, 2, 0.5, 0.5),
    paints: tuple[float, ...] = (1,),
    radii: tuple[float, float] = (0.045, 0.6),
    squash: float = 3,
    waves: float = 0.4,
) -> Scenes:
    """Draw layers: shapes and paints as often as these weights say, of sizes in this range."""
    paint, colours = dice.one_of(*paints), torch.stack([dice.colours(), dice.colours()], 2)
    shaded = (paint == SHADED)[..., None]
    colours[:, :, 0] = torch.where(shaded, 0, colours[:, :, 0])  # a shadow is black
    lamp = F.normalize(dice.of(1).between(-1, 1, 3), dim=2)
    amplitude = waves * dice.between(0, 1) * (dice.between(0, 1) < 0.5)
    return Scenes(
        centre=dice.between(0, 1, 2),
        radius=dice.radii(*radii),
        squash=dice.between(1, squash),
        angle=dice.angles(),
        shape=dice.one_of(*shapes),
        waves=torch.stack([amplitude, 3.0 + dice.one_of(2, 3, 1, 1), dice.angles()], 2),
        paint=paint,
        colours=colours,
        texture=torch.stack([dice.between(2, 14), dice.angles(), dice.angles()], 2),
        lamp=torch.cat([lamp[..., :2], lamp[..., 2:].abs()], 2),
        grain=dice.of(1).between(0, 1, sum(points**2 for points in LATTICES)),
    )


def _ground(dice: _Dice, *paints: float) -> Scenes:
    """Draw a layer that covers everything."""
    one = _stack(dice.of(1), paints=paints, radii=(1, 1.5), squash=1)
    return replace(
        one,
        centre=torch.full_like(one.centre, 0.5),
        shape=torch.full_like(one.shape, BLOB),
        waves=one.waves * torch.tensor([0.0, 1, 1]),
    )


def _strokes(dice: _Dice, curves: Tensor, width: Tensor, colour: Tensor) -> Scenes:
    """Lay strokes: curves (n, K, 3, 2) through control points, of one width (n, K) and colour."""
    t = torch.linspace(0, 1, CURVE + 1)[:, None]
    a, b, c = (part.unsqueeze(2) for part in curves.unbind(2))
    points = (1 - t) ** 2 * a + 2 * t * (1 - t) * b + t**2 * c  # (n, K, points, 2)
    start, stop = points[:, :, :-1], points[:, :, 1:]
    along = (stop - start).flatten(1, 2)
    width, colour = (part.repeat_interleave(CURVE, 1) for part in (width, colour))
    half = along.norm(dim=2) / 2 + width
    many = _stack(dice.of(along.shape[1]))
    return replace(
        many,
        centre=((start + stop) / 2).flatten(1, 2),
        radius=half,
        squash=half / width,
        angle=torch.atan2(along[..., 1], along[..., 0]),
        shape=torch.full_like(many.shape, CAPSULE),
        colours=colour.unsqueeze(2).expand(-1, -1, 2, -1),
    )


# ------------------------------------------------------------------------------ families


def leaves(n: int, generator: torch.Generator) -> Scenes:
    """Draw many opaque shapes in plain colours, small ones far more often than large ones."""
    dice = _Dice(n, 60, generator)
    return _ground(dice, 1).under(_stack(dice))


def textures(n: int, generator: torch.Generator) -> Scenes:
    """Draw shapes painted with gradients, gratings and grain."""
    dice = _Dice(n, 40, generator)
    return _ground(dice, 1, 1, 1, 1).under(_stack(dice, paints=(1, 1, 1, 1), radii=(0.07, 0.7)))


def solids(n: int, generator: torch.Generator) -> Scenes:
    """Draw round things in the light of one lamp."""
    dice = _Dice(n, 20, generator)
    things = _stack(dice, shapes=(1,), paints=(0, 0, 0, 0, 1), radii=(0.1, 0.5), waves=0.15)
    return _ground(dice, 1, 2, 0, 1).under(things)


def gradients(n: int, generator: torch.Generator) -> Scenes:
    """Draw smooth grounds under a few large shapes."""
    dice = _Dice(n, 6, generator)
    shapes = _stack(dice, shapes=(1,), paints=(0, 2, 0, 1), radii=(0.2, 0.8), waves=0.3)
    return _ground(dice, 0, 1, 0, 1).under(shapes)


def strokes(n: int, generator: torch.Generator) -> Scenes:
    """Draw curved strokes of pens."""
    dice = _Dice(n, 6, generator)
    curves, width = dice.between(0, 1, 3, 2), dice.between(0.015, 0.06)
    return _ground(dice, 2, 1, 0, 1).under(_strokes(dice, curves, width, dice.colours()))


def glyphs(n: int, generator: torch.Generator) -> Scenes:
    """Draw scribbles like signs, up to three in a row in one hand, on any ground."""
    dice = _Dice(n, LETTERS * PARTS, generator)
    one = dice.of(1)
    ground = _ground(dice, 2, 2, 0, 1)
    clutter = _stack(dice.of(3), paints=(1, 1), radii=(0.2, 0.8))
    away = torch.where(one.between(0, 1) < 0.5, 9.0, 0.0)  # half of the grounds are plain
    clutter = replace(clutter, centre=clutter.centre + away.unsqueeze(2))
    height, slim = one.between(0.4, 0.9), one.between(0.35, 0.75)
    width = height * slim
    anchors = dice.between(0, 3, 3, 2).floor() / 2 - 0.5  # ends and bends, three by three places
    anchors = anchors + dice.between(-0.08, 0.08, 3, 2)
    letter = torch.arange(LETTERS).repeat_interleave(PARTS) - LETTERS // 2
    lonely = (one.between(0, 1) < 0.4) * 9.0
    pitch = width * one.between(1.1, 1.5) + lonely
    x = one.between(0.42, 0.58) + letter * pitch
    y = one.between(0.42, 0.58).expand_as(x)
    size = torch.stack([width, height], 2).unsqueeze(2)  # (n, 1, 1, 2)
    curves = torch.stack([x, y], 2).unsqueeze(2) + anchors * size
    pen = (one.between(0.04, 0.11) * height).expand_as(x)
    other = (ground.colours[:, :, 0].mean(2) + one.between(0.25, 0.75)) % 1
    ink = one.colours(other).expand(-1, LETTERS * PARTS, -1)
    return ground.under(clutter).under(_strokes(dice, curves, pen, ink))


@dataclass(frozen=True)
class Family:
    """A kind of scenes: things, and what surrounds them."""

    draw: Callable[[int, torch.Generator], Scenes]
    """Draws n scenes."""
    behind: int
    """How many of their layers, the first ones, are surroundings."""


FAMILIES = {
    "leaves": Family(leaves, 31),
    "textures": Family(textures, 21),
    "solids": Family(solids, 11),
    "gradients": Family(gradients, 1),
    "strokes": Family(strokes, 1),
    "glyphs": Family(glyphs, 4),
}


def check_shares(shares: Mapping[str, float]) -> None:
    """Raise ValueError unless shares are of known families, not negative, and not all nothing."""
    for name, share in shares.items():
        if name not in FAMILIES:
            raise ValueError(f"expected families out of {', '.join(FAMILIES)}, got {name!r}")
        if not (isinstance(share, int | float) and 0 <= share < math.inf):
            raise ValueError(f"the share of {name} must be a number from 0, but it is {share!r}")
    if not sum(shares.values()):
        raise ValueError(f"expected a share of some family, got {dict(shares)}")


@dataclass(frozen=True)
class Drawn:
    """Pictures, and what there is to see in them."""

    pictures: Tensor
    """Bytes, (n, 3, side, side)."""
    seen: Tensor
    """Which layer one sees where, (n, side, side)."""
    traits: Tensor
    """What there is to tell of the layers, see `Scenes.traits`."""


def draw(
    shares: Mapping[str, float],
    n: int,
    *,
    seed: int = 0,
    side: int = 48,
    device: str | torch.device = "cpu",
    elsewhere: bool = False,
) -> Drawn:
    """Draw pictures of several families, in random order.

    Parameters
    ----------
    shares : mapping of str to float
        Of which families, and how many of each compared to the others.
    n : int
        Pictures.
    seed : int
    side : int
        Pixels of a side.
    device : str or torch.device
        Where they are made and left. Devices differ by rounding.
    elsewhere : bool
        Draw the things of the same scenes in other surroundings.
    """
    check_shares(shares)
    device = torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    total, drawn, done = sum(shares.values()), 0, 0.0
    pictures = torch.empty(n, 3, side, side, dtype=torch.uint8, device=device)
    seen = torch.empty(n, side, side, dtype=torch.uint8, device=device)
    traits = torch.empty(n, MOST, 5, dtype=torch.float16, device=device)
    places = torch.randperm(n, generator=generator).to(device)
    for name, share in shares.items():
        done += share
        until, family = round(n * done / total), FAMILIES[name]
        while drawn < until:
            some = min(DRAWN, until - drawn)
            scenes = family.draw(some, generator)
            if elsewhere:
                scenes = scenes.elsewhere(family.behind)
            size = MADE.get(device.type, MADE["cpu"])
            for start in range(0, some, size):
                few = scenes.part(start, start + size, device)
                at = places[drawn + start : drawn + start + len(few)]
                made, seen[at] = render(few, side)
                pictures[at], traits[at] = (made * 255).round().byte(), few.traits.half()
            drawn += some
    return Drawn(pictures, seen, traits)


# --------------------------------------------------------------------------- contact sheet


def contact_sheet(
    path: str | os.PathLike[str],
    families: Sequence[str] = tuple(FAMILIES),
    *,
    columns: int = 12,
    seed: int = 0,
    side: int = 48,
) -> None:
    """Save pictures of each family, below them the same things elsewhere; needs matplotlib.

    Parameters
    ----------
    path : path-like
        A PNG file, or what else matplotlib writes.
    families : sequence of str
    columns : int
        Pictures of each.
    seed : int
    side : int
        Pixels of a side.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('drawing needs matplotlib: pip install "pecil[plot]"') from error

    rows = [(name, elsewhere) for name in families for elsewhere in (False, True)]
    figure = Figure(figsize=(columns, len(rows)), dpi=100)
    all_axes = figure.subplots(len(rows), columns, squeeze=False)
    for (name, elsewhere), row in zip(rows, all_axes, strict=True):
        drawn = draw({name: 1}, columns, seed=seed, side=side, elsewhere=elsewhere)
        for axes, picture in zip(row, drawn.pictures, strict=True):
            axes.imshow(picture.movedim(0, -1).numpy(), interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
        row[0].set_ylabel("elsewhere" if elsewhere else name)
    figure.subplots_adjust(0.06, 0.01, 0.99, 0.99, 0.05, 0.05)
    with written_whole(path) as temporary:
        figure.savefig(temporary)


def main(arguments: Sequence[str] | None = None) -> None:
    """Save a contact sheet as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m pecil.teachers.scenes", description="Save a sheet of synthetic pictures."
    )
    parser.add_argument("path", type=Path, help="a PNG file")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), help=", ".join(FAMILIES))
    parser.add_argument("--columns", type=int, default=12, help="pictures of each [12]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", type=int, default=48, help="pixels of a side [48]")
    given = vars(parser.parse_args(arguments))
    try:
        contact_sheet(**given)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
