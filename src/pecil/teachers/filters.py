"""The teacher of images that is a seed: random filters, pooled over grids.

The filters come from synthetic pictures; no training sample is used. Their values are drawn on
the CPU and then moved: the same seed gives the same teacher on every device.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pecil.pec.machine import by_threads, in_full, linear
from pecil.pec.networks import cut, pooling
from pecil.teachers.base import FeatureTeacher, Remade, between, probe, reduction, whole
from pecil.teachers.pictures import dead_leaves, strokes

CONTRAST = 0.01  # added to a patch's variance: flat patches are not blown up
PICTURES, PATCHES = 150, 50_000  # synthetic pictures behind the filters, patches taken from them
LIVELY = 0.05  # variance of a patch that may become a filter
ROOM = {"cpu": 2**21, "cuda": 2**27}  # floats of responses held at a time


@dataclass(frozen=True)
class Filters:
    """Random filters for images, pooled over grids.

    Every k×k patch is centred and divided by its contrast, √(variance + 0.01). Responses z to
    a filter pass a two-sided soft threshold, relu(z − θ) and relu(−z − θ), and are averaged
    over the cells of an r×r grid.

    Filters come from synthetic pictures: whitened patches of them, as Coates and Ng (2011)
    take them from training images. With Σ the covariance of such patches, scaled to mean
    eigenvalue 1, a patch p becomes the filter (Σ + ridge·I)⁻¹ p. They are scaled to norm 1.

    Parameters
    ----------
    prior : {"leaves", "strokes", "spectrum"}
        Pictures of dead leaves, or of pen strokes; "spectrum" takes Σ from a power spectrum
        ∝ 1/f² with channels correlated 0.9, and draws normal filters.
    draw : {"patches", "normal"}
        "normal": (Σ + ridge·I)^(−½) times a normal vector instead of a patch.
    sizes : tuple of int
        Filter sizes k, each with the same share of the features.
    grids : tuple of int
        Grids r, each with the same share of the features.
    ridge : float
    threshold : float
        θ.
    grey : float
        Share of the filters that look at brightness alone.
    signed : bool
        Whether light on dark differs from dark on light: if not, the two sides of the
        threshold are added up.
    spread : int
        Draw so many times more features and mix them at random into D.
    mirror : bool
        Add the responses to the mirrored image and keep the left half of each grid: mirror
        images get the same features.
    reduce : int, optional
        Side of the squares of pixels that are averaged first; by default 1 up to 64 pixels,
        else what brings the shorter side near 40.

    Examples
    --------
    >>> teacher = Filters().teacher((3, 32, 32), 1000, seed=0, device=torch.device("cpu"))
    >>> teacher(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 972])
    """

    prior: str = "leaves"
    draw: str = "patches"
    sizes: tuple[int, ...] = (3, 5)
    grids: tuple[int, ...] = (1, 2, 3)
    ridge: float = 0.3
    threshold: float = 0.3
    grey: float = 0.5
    signed: bool = True
    spread: int = 1
    mirror: bool = True
    reduce: int | None = None

    def __post_init__(self) -> None:
        if self.prior not in ("leaves", "strokes", "spectrum"):
            raise ValueError(
                f"prior must be 'leaves', 'strokes' or 'spectrum', but it is {self.prior!r}"
            )
        if self.draw not in ("patches", "normal") or (self.prior, self.draw) == (
            "spectrum",
            "patches",
        ):
            raise ValueError(
                "draw must be 'patches' or, the only way with prior='spectrum', 'normal', "
                f"but it is {self.draw!r}"
            )
        for name in ("sizes", "grids"):
            values = getattr(self, name)
            values = tuple(values) if isinstance(values, list | tuple) else ()
            if not values or not all(whole(value) for value in values):
                raise ValueError(
                    f"{name} must be a tuple of whole numbers of at least 1, but it is "
                    f"{getattr(self, name)!r}"
                )
            object.__setattr__(self, name, tuple(map(int, values)))
        self._check_numbers()

    def _check_numbers(self) -> None:
        if not between(self.ridge, 0, math.inf):
            raise ValueError(f"ridge must be a positive number, but it is {self.ridge!r}")
        for name, most_of in (("threshold", math.inf), ("grey", 1.0)):
            value = getattr(self, name)
            fits = value in (0, most_of) and math.isfinite(value)
            if not fits and not between(value, 0, most_of):
                raise ValueError(f"{name} must be from 0 to {most_of}, but it is {value!r}")
        for name in ("spread", "reduce"):
            value = getattr(self, name)
            if not whole(value) and not (name == "reduce" and value is None):
                raise ValueError(
                    f"{name} must be a whole number of at least 1, but it is {value!r}"
                )

    def cells(self, grid: int) -> int:
        """Features of one filter on a grid."""
        columns = (grid + 1) // 2 if self.mirror else grid
        return (2 if self.signed else 1) * grid * columns

    @property
    def fewest(self) -> int:
        """Features of one filter of each size on each grid."""
        return len(self.sizes) * sum(self.cells(grid) for grid in self.grids)

    def teacher(
        self, input_shape: tuple[int, ...], dim: int, seed: int, device: torch.device
    ) -> FeatureTeacher:
        """Draw the filters that ``dim`` features allow, or exactly ``dim`` mixtures."""
        if len(input_shape) != 3:
            raise ValueError(
                "a teacher of filters needs images, (n, h, w), (n, h, w, c) or (n, c, h, w), but "
                f"X holds vectors of {input_shape[0]} features"
            )
        side = min(input_shape[1:]) // (self.reduce or 1)
        if side < 2:
            raise ValueError(
                "a teacher of filters needs images of at least 2×2 pixels, but they have "
                f"{input_shape[1]}×{input_shape[2]}"
                + (f", reduced by {self.reduce}" if self.reduce else "")
            )
        return _Filters(self, input_shape, dim, seed, device)

    def counts(self, features: int) -> dict[int, int]:
        """Return the filters of each grid, for each size, that ``features`` allow."""
        sizes, cells = len(self.sizes), {grid: self.cells(grid) for grid in self.grids}
        if features < self.fewest:
            raise ValueError(
                f"{features} features are too few for filters of sizes {self.sizes} on grids "
                f"{self.grids}, which take at least {self.fewest}; give more "
                "memory, or fewer sizes and grids"
            )
        each = features // (sizes * len(cells))
        counts = {grid: max(1, each // n) for grid, n in cells.items()}
        while sizes * sum(counts[grid] * n for grid, n in cells.items()) > features:
            largest = max(counts, key=lambda grid: counts[grid] * cells[grid] * (counts[grid] > 1))
            counts[largest] -= 1
        return counts


@dataclass(frozen=True)
class _Bank:
    """Filters of one size."""

    size: int
    weights: list[Tensor]  # (filters, length), of whole patches or of their even and odd parts
    counts: dict[int, int]  # filters of each grid


class _Filters(Remade):
    def __init__(
        self,
        recipe: Filters,
        input_shape: tuple[int, ...],
        dim: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._made_of = (recipe, input_shape, dim, seed, device)
        self.recipe = recipe
        channels, height, width = input_shape
        side = min(height, width)
        self.reduce = reduction(side, recipe.reduce)
        side //= self.reduce
        generator = torch.Generator().manual_seed(seed)
        prior = _Prior(recipe, channels, generator)
        counts = recipe.counts(recipe.spread * dim)
        self.banks: list[_Bank] = []
        for size in recipe.sizes:
            filters = prior.filters(min(size, side), sum(counts.values()))
            self.banks.append(_Bank(min(size, side), self._laid_out(filters, device), counts))
        features = len(self.banks) * sum(n * recipe.cells(grid) for grid, n in counts.items())
        self.features, self.output_dim, self.mix = features, features, None
        if recipe.spread > 1:
            mix = torch.randn(features, dim, generator=generator) / math.sqrt(features)
            self.mix, self.output_dim = mix.to(device), dim
        self.checksum = probe(self, input_shape, device)

    def _laid_out(self, filters: Tensor, device: torch.device) -> list[Tensor]:
        """Lay filters (f, channels, k, k) out as rows.

        A filter and its mirror image have the same product with what is even in a patch, and
        opposite ones with what is odd: together they cost no more than one.
        """
        parts = [0.5 * part for part in _even_odd(filters)] if self.recipe.mirror else [filters]
        if self.recipe.mirror and filters.shape[-1] % 2:
            parts[0][..., -1] *= 0.5  # the middle column is its own mirror image
        return [part.flatten(1).contiguous().to(device) for part in parts]

    @in_full
    def __call__(self, x: Tensor) -> Tensor:
        """Return the features; on a CPU each thread has pictures of its own."""
        positions = x.shape[2] * x.shape[3] // self.reduce**2
        widest = max(len(b.weights) * max(b.counts.values()) for b in self.banks)
        widest = max(widest, *(b.weights[0].shape[1] for b in self.banks))
        rows = max(1, ROOM.get(x.device.type, ROOM["cpu"]) // (positions * widest))
        out = x.new_empty(len(x), self.output_dim)
        pictures, targets = x.split(rows), out.split(rows)

        def work(k: int) -> None:
            self._fill(pictures[k], targets[k])

        if x.device.type == "cpu" and len(pictures) >= torch.get_num_threads():
            by_threads(work, len(pictures))
        else:
            for k in range(len(pictures)):
                work(k)
        return out

    @torch.no_grad()
    def _fill(self, x: Tensor, out: Tensor) -> None:
        """Write the features, (n, D), of some pictures."""
        if self.reduce > 1:
            x = F.adaptive_avg_pool2d(x, (x.shape[2] // self.reduce, x.shape[3] // self.reduce))
        features = out if self.mix is None else x.new_empty(len(x), self.features)
        start, sides = 0, 2 if self.recipe.signed else 1
        for bank in self.banks:
            parts, first = self._parts(x, bank.size), 0
            shape = (x.shape[2] - bank.size + 1, x.shape[3] - bank.size + 1)
            for grid, count in bank.counts.items():
                size = count * self.recipe.cells(grid)
                target = features[:, start : start + size].unflatten(1, (sides, grid, -1, count))
                weights = [weight[first : first + count] for weight in bank.weights]
                self._pool(self._responses(parts, weights).unflatten(2, shape), target)
                start, first = start + size, first + count
        if self.mix is not None:
            torch.mm(features, self.mix, out=out)

    def _parts(self, x: Tensor, size: int) -> list[Tensor]:
        """Return normalised patches, or what is even and what is odd in them, (n, positions, …)."""
        patches = _normalised(_patches(x, size))
        if not self.recipe.mirror:
            return [patches]
        return [part.flatten(2) for part in _even_odd(patches.unflatten(2, (-1, size)))]

    def _responses(self, parts: list[Tensor], weights: list[Tensor]) -> Tensor:
        """Responses of filters and of their mirror images, (1 or 2, n, positions, f), shrunk."""
        products = [linear(part, weight) for part, weight in zip(parts, weights, strict=True)]
        z = products[0].unsqueeze(0)
        if self.recipe.mirror:
            even, odd = products
            z = even.new_empty(2, *even.shape)
            torch.add(even, odd, out=z[0])
            torch.sub(even, odd, out=z[1])
        return torch.ops.aten.softshrink.out(z, self.recipe.threshold, out=z)

    def _pool(self, maps: Tensor, out: Tensor) -> None:
        """Write the averages of both sides of the threshold, or of |z|, over the cells of a grid.

        ``maps`` is (1 or 2, n, height, width, f), ``out`` (n, 1 or 2, grid, columns, f).
        """
        if not self.recipe.signed:
            out[:, 0] = self._averages(maps.abs_(), out)
            return
        sums, sizes = self._averages(maps, out), self._averages(maps.abs_(), out)
        out[:, 0] = (sizes + sums).mul_(0.5)
        out[:, 1] = (sizes - sums).mul_(0.5)

    def _averages(self, maps: Tensor, out: Tensor) -> Tensor:
        """Averages over the cells of a grid, (n, grid, columns, f); of both mirror images, sums."""
        grid = out.shape[2]
        if maps.device.type == "cpu":
            flat = maps.flatten(0, 1).movedim(-1, 1)
            means = F.adaptive_avg_pool2d(flat, grid).movedim(1, -1).unflatten(0, maps.shape[:2])
        else:
            cells = pooling(tuple(maps.shape[2:4]), (grid, grid), maps.device).T
            means = torch.matmul(cells, maps.flatten(2, 3)).unflatten(2, (grid, grid))
        if self.recipe.mirror:
            return (means[0] + means[1].flip(2))[:, :, : out.shape[3]]
        return means[0]


class _Prior:
    """Where filters come from."""

    def __init__(self, recipe: Filters, channels: int, generator: torch.Generator) -> None:
        self.recipe, self.channels, self.generator = recipe, channels, generator
        if recipe.prior != "spectrum":
            painter = dead_leaves if recipe.prior == "leaves" else strokes
            self.pictures = painter(PICTURES, channels, generator)

    def filters(self, size: int, count: int) -> Tensor:
        """Draw ``count`` filters (count, channels, k, k), centred, of norm 1."""
        recipe, length = self.recipe, self.channels * size * size
        if recipe.prior == "spectrum":
            patches, covariance = torch.empty(0, length), spectrum(self.channels, size)
        else:
            patches, covariance = self._patches(size)
        values, vectors = torch.linalg.eigh(covariance)
        values = (values / values.mean()).clamp(min=0) + recipe.ridge
        if recipe.draw == "normal":
            drawn = torch.randn(count, length, generator=self.generator).double()
            power = -0.5
        else:
            drawn = patches[torch.arange(count) % len(patches)]
            power = -1.0
        filters = drawn @ ((vectors * values.pow(power)) @ vectors.T)
        filters = filters.float().view(count, self.channels, size, size)
        brightness = round(recipe.grey * count)
        filters[:brightness] = filters[:brightness].mean(1, keepdim=True)
        filters = filters[torch.randperm(count, generator=self.generator)]  # grids get both kinds
        filters -= filters.mean((1, 2, 3), keepdim=True)
        norm = filters.flatten(1).norm(dim=1).clamp(min=1e-6)
        return filters / norm.view(-1, 1, 1, 1)

    def _patches(self, size: int) -> tuple[Tensor, Tensor]:
        """Return lively patches of the pictures, normalised, and the covariance of all."""
        patches = _patches(self.pictures, size, stride=2).flatten(0, 1)
        order = torch.randperm(len(patches), generator=self.generator)[:PATCHES]
        patches = patches[order]
        lively = patches.var(1) > LIVELY
        patches = _normalised(patches.unsqueeze(0))[0].double()
        return patches[lively], patches.T.cov(correction=0)


def _patches(x: Tensor, size: int, stride: int = 1) -> Tensor:
    """Cut images (n, c, h, w) into patches (n, positions, c·k²)."""
    return cut(x, size, stride).permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)


def _even_odd(x: Tensor) -> list[Tensor]:
    """Return what columns and their mirror images have in common, and by what they differ.

    The last axis has k columns; of the results' (k + 1)//2 and k//2.
    """
    size, half = x.shape[-1], (x.shape[-1] + 1) // 2
    left, right = x[..., :half], x[..., size - half :].flip(-1)
    return [left + right, (left - right)[..., : size // 2]]


def _normalised(patches: Tensor) -> Tensor:
    """Centre patches (n, positions, length) and divide them by their contrast."""
    patches = patches - patches.mean(2, keepdim=True)
    contrast = patches.square().mean(2, keepdim=True).add_(CONTRAST).rsqrt_()
    return patches.mul_(contrast)


def spectrum(channels: int, size: int) -> Tensor:
    """Covariance of centred patches of pictures with power spectrum 1/f², channels alike 0.9."""
    f = torch.fft.fftfreq(64, dtype=torch.float64)
    power = f[:, None] ** 2 + f[None] ** 2
    power[0, 0] = math.inf
    lag = torch.fft.ifft2(1 / power).real
    at = torch.cartesian_prod(torch.arange(size), torch.arange(size))
    apart = (at[:, None] - at[None]) % 64
    space = lag[apart[..., 0], apart[..., 1]]
    colour = torch.full((channels, channels), 0.9, dtype=torch.float64).fill_diagonal_(1.0)
    covariance = torch.kron(colour, space)
    centre = torch.eye(len(covariance), dtype=torch.float64) - 1 / len(covariance)
    return centre @ covariance @ centre
