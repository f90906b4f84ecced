"""A teacher of images that was trained, on synthetic pictures alone: a small convolutional network.

Its maps, averaged over the cells of grids, are the features. It has seen no photograph: the
pictures it was trained on are drawn by `pecil.teachers.scenes`, the training is
`pecil.teachers.synthetic`. Unlike a teacher that is a seed, it has weights, and they count.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pecil.files import read_tensors, write_tensors
from pecil.pec.machine import in_full
from pecil.teachers.base import FeatureTeacher, Remade, reduction, whole
from pecil.teachers.filters import Filters

BLOCKS = 3  # of two convolutions each, at full, half and quarter resolution
LEAST = 16  # pixels of a side up to which images are enlarged
SHARP = 0.01  # added to a picture's variance
ROWS = {"cpu": 32, "cuda": 1024}  # pictures at a time
HERE = Path(__file__).parent / "weights"
SHIPPED = {  # weights that come with the package, and the SHA-256 of their files
    "small": "03caaa9c4cbc04211b20d0a5572aa68e1d5dbcf0d6fb7c52ec79c18cbfe7734d",
}


class Encoder(nn.Module):
    """3×3 convolutions with batch norm and ReLU, two to a block, averages between the blocks.

    Parameters
    ----------
    channels : sequence of int
        Of the six convolutions.

    Examples
    --------
    >>> encoder = Encoder((4, 8, 8, 8, 16, 16))
    >>> [tuple(maps.shape[1:]) for maps in encoder(torch.rand(2, 3, 32, 32))]
    [(8, 32, 32), (8, 16, 16), (16, 8, 8)]
    """

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        if len(channels) != 2 * BLOCKS or not all(whole(n) for n in channels):
            raise ValueError(
                f"channels must be {2 * BLOCKS} whole numbers of at least 1, but they are "
                f"{tuple(channels)}"
            )
        sizes = [3, *channels]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out))
            for n_in, n_out in zip(sizes, channels, strict=False)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the maps of each block for pictures (n, 3, height, width)."""
        return blocks(standardised(x), list(self.layers))

    def folded(self) -> dict[str, Tensor]:
        """Return the weights and biases of convolutions that do what these and batch norm do."""
        tensors: dict[str, Tensor] = {}
        for k, (made, norm) in enumerate(map(nn.Module.children, self.layers)):
            assert isinstance(made, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
            assert norm.running_mean is not None and norm.running_var is not None
            scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            tensors[f"weight{k}"] = made.weight * scale.view(-1, 1, 1, 1)
            tensors[f"bias{k}"] = norm.bias - norm.running_mean * scale
        return tensors


def standardised(x: Tensor) -> Tensor:
    """Centre each picture and divide it by its contrast, √(variance + 0.01)."""
    x = x - x.mean((1, 2, 3), keepdim=True)
    return x * (x.square().mean((1, 2, 3), keepdim=True) + SHARP).rsqrt()


def blocks(x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
    """Return the maps of each block; a layer makes maps of maps, ReLU comes on top."""
    maps = []
    for k, layer in enumerate(layers):
        if k and k % 2 == 0:
            x = F.avg_pool2d(x, 2)
        x = F.relu(layer(x))
        if k % 2:
            maps.append(x)
    return maps


def save_weights(encoder: Encoder, path: Path, about: dict[str, Any]) -> None:
    """Write an encoder for use as a teacher: folded, in half precision."""
    tensors = {name: values.half() for name, values in encoder.folded().items()}
    write_tensors(path, tensors, {"about": json.dumps(about)})


@dataclass(frozen=True)
class Weights:
    """Folded weights, as they lie in a file."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]
    sha256: str

    @property
    def count(self) -> int:
        """How many numbers they are."""
        return sum(values.numel() for values in self.tensors.values())

    @property
    def channels(self) -> list[int]:
        """Of the six convolutions."""
        return [len(self.tensors[f"bias{k}"]) for k in range(2 * BLOCKS)]


def load_weights(name: str) -> Weights:
    """Read weights: those of the package by name, others by path."""
    path = HERE / f"{name}.safetensors" if name in SHIPPED else Path(name)
    if not path.is_file():
        raise FileNotFoundError(
            f"expected weights out of {', '.join(SHIPPED)}, or a file, got {name!r}"
        )
    weights = _read(path, path.stat().st_mtime_ns)
    if name in SHIPPED and weights.sha256 != SHIPPED[name]:
        raise ValueError(
            f"{path} is damaged: its SHA-256 is {weights.sha256}, not {SHIPPED[name]}; install "
            "pecil anew"
        )
    return weights


@lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> Weights:
    content = path.read_bytes()
    tensors, about = read_tensors(content)
    expected = {f"{kind}{k}" for kind in ("weight", "bias") for k in range(2 * BLOCKS)}
    if set(tensors) != expected:
        raise ValueError(f"{path} holds {sorted(tensors)}, not the weights of a teacher")
    return Weights(
        {name: values.float() for name, values in tensors.items()},
        json.loads(about["about"]),
        hashlib.sha256(content).hexdigest(),
    )


@dataclass(frozen=True)
class Synthetic:
    """A network trained on synthetic pictures, its maps averaged over grids, beside filters.

    Parameters
    ----------
    weights : str
        The name of weights that come with the package, or the path of others.
    grids : tuple of int
        The grid r×r of each block: fine, then coarser ones; 0 leaves a block's maps out.
    mirror : bool
        Add the maps of the mirrored image and keep the left half of each grid: mirror images
        get the same features.
    reduce : int, optional
        Side of the squares of pixels that are averaged first; by default 1 up to 64 pixels, else
        what brings the shorter side near 40. Images of less than 16 pixels are enlarged.
    beside : Filters, optional
        Where more features are asked for than the network has, filters of the seed that make
        up for the rest; None: there are no more. ``mirror`` holds for them, too.
    """

    weights: str = "small"
    grids: tuple[int, ...] = (2, 2, 2)
    mirror: bool = True
    reduce: int | None = None
    beside: Filters | None = Filters()

    def __post_init__(self) -> None:
        grids = tuple(self.grids) if isinstance(self.grids, list | tuple) else ()
        if len(grids) != BLOCKS or not all(whole(grid) or grid == 0 for grid in grids):
            raise ValueError(
                f"grids must be {BLOCKS} whole numbers of at least 0, but they are {self.grids!r}"
            )
        if not any(grids):
            raise ValueError("grids must not all be 0: no features would be left")
        object.__setattr__(self, "grids", tuple(map(int, grids)))
        if self.reduce is not None and not whole(self.reduce):
            raise ValueError(
                f"reduce must be a whole number of at least 1, but it is {self.reduce!r}"
            )
        if self.beside is not None:
            object.__setattr__(self, "beside", replace(self.beside, mirror=self.mirror))

    @property
    def n_weights(self) -> int:
        """The numbers of the network."""
        return load_weights(self.weights).count

    def cells(self, grid: int) -> int:
        """Features of one map."""
        return grid * ((grid + 1) // 2 if self.mirror else grid)

    def teacher(
        self, input_shape: tuple[int, ...], dim: int, seed: int, device: torch.device
    ) -> FeatureTeacher:
        """Load the network; if ``dim`` is less than its features, mixtures of them are drawn."""
        if len(input_shape) != 3 or input_shape[0] not in (1, 3):
            raise ValueError(
                "a trained teacher needs grey or colour images, (n, h, w), (n, h, w, 3) or "
                f"(n, 3, h, w), but samples have the shape {input_shape}"
            )
        network = _Synthetic(self, input_shape, dim, seed, device)
        rest = dim - network.output_dim
        if self.beside is None or rest < self.beside.fewest:
            return network
        return _Beside(network, self.beside.teacher(input_shape, rest, seed, device))


class _Beside:
    """Two teachers, the features of one after those of the other."""

    def __init__(self, *teachers: FeatureTeacher) -> None:
        self.teachers = teachers
        self.output_dim = sum(teacher.output_dim for teacher in teachers)
        self.checksum = [teacher.checksum for teacher in teachers]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([teacher(x) for teacher in self.teachers], 1)


class _Synthetic(Remade):
    def __init__(
        self,
        recipe: Synthetic,
        input_shape: tuple[int, ...],
        dim: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._made_of = (recipe, input_shape, dim, seed, device)
        self.recipe = recipe
        weights = load_weights(recipe.weights)
        self.layers = [
            (
                weights.tensors[f"weight{k}"].to(device, memory_format=torch.channels_last),
                weights.tensors[f"bias{k}"].to(device),
            )
            for k in range(2 * BLOCKS)
        ]
        self.size = self._size(input_shape[1:])
        cells = [recipe.cells(grid) for grid in recipe.grids]
        self.features = sum(map(int.__mul__, weights.channels[1::2], cells))
        self.output_dim, self.mix = min(dim, self.features), None
        if dim < self.features:
            generator = torch.Generator().manual_seed(seed)
            mix = torch.randn(self.features, dim, generator=generator) / self.features**0.5
            self.mix = mix.to(device)
        self.checksum = f"{weights.sha256} {recipe.grids} {recipe.mirror} {self.size}"
        if self.mix is not None:
            self.checksum += f" {dim} {seed}"

    def _size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the height and width at which images are looked at."""
        side = min(shape)
        if side < LEAST:
            factor = -(-LEAST // side)
            return shape[0] * factor, shape[1] * factor
        reduce = reduction(side, self.recipe.reduce)
        return max(1, shape[0] // reduce), max(1, shape[1] // reduce)

    @in_full
    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        rows = ROWS.get(x.device.type, ROWS["cpu"])
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return torch.cat([self._features(part) for part in x.split(rows)])

    def _features(self, x: Tensor) -> Tensor:
        x = self._sized(x)
        if self.recipe.mirror:
            x = torch.cat([x, x.flip(3)])
        x = standardised(x).contiguous(memory_format=torch.channels_last)
        layers = [
            lambda maps, w=weight, b=bias: F.conv2d(maps, w, b, padding=1)
            for weight, bias in self.layers
        ]
        parts = []
        for maps, grid in zip(blocks(x, layers), self.recipe.grids, strict=True):
            if not grid:
                continue
            means = F.adaptive_avg_pool2d(maps, grid)
            if self.recipe.mirror:
                own, mirrored = means.chunk(2)
                means = (own + mirrored)[..., : (grid + 1) // 2]
            parts.append(means.flatten(1))
        features = torch.cat(parts, 1)
        return features if self.mix is None else features @ self.mix

    def _sized(self, x: Tensor) -> Tensor:
        """Return colour images of the size at which they are looked at."""
        if tuple(x.shape[2:]) != self.size:
            if self.size[0] > x.shape[2]:
                x = F.interpolate(x, self.size, mode="bilinear", align_corners=False)
            else:
                x = F.adaptive_avg_pool2d(x, self.size)
        return x.expand(-1, 3, -1, -1)
