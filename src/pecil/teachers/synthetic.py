"""Train a teacher on synthetic pictures: ``python -m pecil.teachers.synthetic FOLDER``.

An encoder learns from pairs of views of pictures that `pecil.teachers.scenes` draws: crops,
mirrored, their light and colours changed. It never sees a real image; the accuracies on real
training sets that may be reported on the way change nothing.

FOLDER gets ``settings.json``, ``log.jsonl`` (a line for each report), ``checkpoint.pt`` from which
the same command goes on, and in the end ``weights.safetensors``, a teacher for
`pecil.teachers.Synthetic`.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pecil.files import written_whole
from pecil.pec.machine import device_named
from pecil.teachers.base import Recipe
from pecil.teachers.network import BLOCKS, Encoder, Synthetic, save_weights
from pecil.teachers.scenes import FAMILIES, PAINTS, SHAPES, Drawn, check_shares, draw

VIEW = 32  # pixels of a view's side
CELLS = 8  # to a side, where a scene is to be told
HIDDEN, CODE = 512, 128  # sizes of the head
OFFSET = 1e-4  # under a root


@dataclass(frozen=True)
class Settings:
    """All that decides what comes out."""

    channels: tuple[int, ...] = (64, 128, 256, 256, 512, 496)
    """Channels of the six convolutions."""
    objective: str = "simclr"
    """simclr, barlow or vicreg; or scene: tell shapes, paints, directions, sizes everywhere."""
    deep: int = 1
    """How many of the three blocks are taught, each by a head of its own, from the last one."""
    families: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(FAMILIES, 1.0))
    """Families of scenes, and the share of each."""
    pictures: int = 98_304
    """How many pictures there are; each is seen again and again."""
    side: int = 48
    """Pixels of a picture's side."""
    steps: int = 5_700
    """Steps of training."""
    batch: int = 1024
    """Pictures of a step, two views of each."""
    lr: float = 2e-3
    """Highest learning rate of AdamW; it rises for 200 steps, then falls as a cosine."""
    decay: float = 1e-4
    """Weight decay."""
    temperature: float = 0.2
    """Of simclr."""
    crop: float = 0.35
    """The smallest crop's share of a picture."""
    colour: float = 1.0
    """How much light and colours of views change; 0: not at all."""
    elsewhere: float = 1.0
    """Share of pictures whose second view shows the same things in other surroundings."""
    seed: int = 0
    """Decides the pictures, the first weights, and the views."""

    def __post_init__(self) -> None:
        check_shares(self.families)
        if self.objective not in OBJECTIVES:
            raise ValueError(
                f"objective must be one of {', '.join(OBJECTIVES)}, but it is {self.objective!r}"
            )
        if not 1 <= self.deep <= BLOCKS:
            raise ValueError(f"deep must be from 1 to {BLOCKS}, but it is {self.deep!r}")
        for name in ("pictures", "side", "steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but it is {getattr(self, name)!r}")
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop must be above 0 and at most 1, but it is {self.crop!r}")
        if not 0 <= self.elsewhere <= 1:
            raise ValueError(f"elsewhere must be from 0 to 1, but it is {self.elsewhere!r}")
        if not 0 <= self.colour < math.inf:
            raise ValueError(f"colour must be at least 0, but it is {self.colour!r}")


# --------------------------------------------------------------------------------- views


@dataclass(frozen=True)
class View:
    """Views of pictures, and where in the pictures they are."""

    pictures: Tensor
    """(n, 3, 32, 32), between 0 and 1, or a little beyond."""
    where: Tensor
    """The affine maps from views to pictures, (n, 2, 3)."""


def view(pictures: Tensor, settings: Settings, generator: torch.Generator) -> View:
    """Look at pictures (bytes) anew: crop, mirror, light, colour, grey, noise."""
    n, device = len(pictures), pictures.device

    def even(low: float, high: float, *more: int) -> Tensor:
        return low + (high - low) * torch.rand(n, *more, generator=generator, device=device)

    scale, aspect = even(settings.crop, 1).sqrt(), even(-0.25, 0.25).exp()
    across, down = (scale * aspect).clamp(max=1), (scale / aspect).clamp(max=1)
    where = torch.zeros(n, 2, 3, device=device)
    where[:, 0, 0], where[:, 1, 1] = across * even(-1, 1).sign(), down
    where[:, 0, 2], where[:, 1, 2] = (1 - across) * even(-1, 1), (1 - down) * even(-1, 1)
    places = F.affine_grid(where, [n, 3, VIEW, VIEW], align_corners=False)
    x = F.grid_sample(
        pictures.float() / 255, places, align_corners=False, padding_mode="reflection"
    )
    much = settings.colour
    grey = (even(0, 1, 1, 1, 1) < 0.2 * much).float()
    x = torch.lerp(x, x.mean(1, keepdim=True).expand_as(x), grey)
    middle = x.mean((1, 2, 3), keepdim=True)
    x = (x - middle) * (1 + much * even(-0.5, 0.5, 1, 1, 1)) + middle
    x = x + much * even(-0.2, 0.2, 1, 1, 1)
    x = x * (1 + much * even(-0.15, 0.15, 3, 1, 1))
    noise = torch.randn(x.shape, generator=generator, device=device)
    return View(x + even(0, 0.03, 1, 1, 1) * noise, where)


# ---------------------------------------------------------------------------- objectives


def simclr(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """Tell which of all views is of the same picture (Chen et al. 2020)."""
    z = F.normalize(torch.cat([a, b]), dim=1)
    alike = z @ z.T / temperature
    alike.fill_diagonal_(-math.inf)
    n = len(a)
    other = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(alike, other)


def barlow(a: Tensor, b: Tensor, rest: float = 0.005) -> Tensor:
    """Make the views' correlation the identity (Zbontar et al. 2021)."""
    a, b = ((z - z.mean(0)) / (z.var(0) + OFFSET).sqrt() for z in (a, b))
    correlation = a.T @ b / len(a)
    own = correlation.diagonal()
    return (own - 1).square().sum() + rest * (correlation.square().sum() - own.square().sum())


def vicreg(a: Tensor, b: Tensor) -> Tensor:
    """Make views alike, all numbers vary, and no two of them together (Bardes et al. 2022)."""
    loss = 25 * F.mse_loss(a, b)
    for z in (a, b):
        z = z - z.mean(0)
        loss = loss + 25 * F.relu(1 - (z.var(0) + OFFSET).sqrt()).mean()
        covariance = z.T @ z / (len(z) - 1)
        spread = covariance.square().sum() - covariance.diagonal().square().sum()
        loss = loss + spread / z.shape[1]
    return loss


def scene(told: Tensor, looked: View, seen: Tensor, traits: Tensor) -> Tensor:
    """Tell at every place of a view what one sees there: its shape, paint, direction and size."""
    n = len(told)
    places = F.affine_grid(looked.where, [n, 1, CELLS, CELLS], align_corners=False)
    layers = seen.float().unsqueeze(1)
    layers = F.grid_sample(layers, places, mode="nearest", align_corners=False).squeeze(1)
    each = torch.arange(n, device=told.device).view(-1, 1, 1)
    traits = traits[each, layers.long()].float()  # (n, cells, cells, 5)
    mirrored = looked.where[:, 0, 0].sign().view(-1, 1, 1)
    larger = looked.where[:, 0, 0].abs().log().view(-1, 1, 1)
    shape, paint, along, across, size = traits.unbind(3)
    kinds, paints, rest = told.split([SHAPES, PAINTS, 3], 1)
    direct = torch.stack([along, across * mirrored, size - larger], 1)
    return (
        F.cross_entropy(kinds, shape.long())
        + F.cross_entropy(paints, paint.long())
        + F.smooth_l1_loss(rest, direct)
    )


OBJECTIVES = ("simclr", "barlow", "vicreg", "scene")


def has_bfloat16(device: torch.device) -> bool:
    """Say whether products in bfloat16 are faster than in float32: a GPU, or a CPU with AMX."""
    able: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cuda" or bool(able.get("amx_bf16"))


class Head(nn.Module):
    """What makes of a block's maps what the objective needs."""

    def __init__(self, channels: int, objective: str) -> None:
        super().__init__()
        self.dense = objective == "scene"
        if self.dense:
            self.layers = nn.Sequential(nn.Conv2d(channels, SHAPES + PAINTS + 3, 1))
        else:
            self.layers = nn.Sequential(
                nn.Linear(channels, HIDDEN),
                nn.BatchNorm1d(HIDDEN),
                nn.ReLU(),
                nn.Linear(HIDDEN, CODE),
            )

    def forward(self, maps: Tensor) -> Tensor:
        """Return codes (n, 128), or what is told of each cell (n, kinds, 8, 8)."""
        pooled = F.adaptive_avg_pool2d(maps, CELLS) if self.dense else maps.mean((2, 3))
        out: Tensor = self.layers(pooled)
        return out.float()


# ------------------------------------------------------------------------------ training


class Training:
    """A training under way.

    Parameters
    ----------
    settings : Settings
    device : str or torch.device
    """

    def __init__(self, settings: Settings, device: str | torch.device = "auto") -> None:
        self.settings, self.device = settings, device_named(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.encoder = Encoder(settings.channels)
            ends = settings.channels[::-2][: settings.deep]
            self.heads = nn.ModuleList(Head(channels, settings.objective) for channels in ends)
        self.encoder.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.heads.to(self.device)
        parameters = [*self.encoder.parameters(), *self.heads.parameters()]
        self.optimizer = torch.optim.AdamW(
            parameters, settings.lr, weight_decay=settings.decay, fused=True
        )
        parts = [
            draw(
                settings.families,
                settings.pictures,
                seed=settings.seed,
                side=settings.side,
                device=self.device,
                elsewhere=elsewhere,
            )
            for elsewhere in ((False, True) if settings.elsewhere else (False,))
        ]
        self.drawn = Drawn(
            *(torch.cat([getattr(part, one.name) for part in parts]) for one in fields(Drawn))
        )
        self.done = 0
        self.loss = torch.zeros((), device=self.device)

    def rate(self) -> float:
        """Return the learning rate of the next step."""
        settings = self.settings
        rise = min(1.0, (self.done + 1) / min(200, settings.steps))
        return settings.lr * rise * 0.5 * (1 + math.cos(math.pi * self.done / settings.steps))

    def step(self) -> None:
        """Take a step; what it draws depends on the seed and on its number alone."""
        settings = self.settings
        generator = torch.Generator(self.device)
        generator.manual_seed(settings.seed * 2**24 + self.done)
        some = torch.randint(
            settings.pictures, (settings.batch,), generator=generator, device=self.device
        )
        both = [some, some]
        if settings.elsewhere:
            chance = torch.rand(settings.batch, generator=generator, device=self.device)
            both[1] = some + settings.pictures * (chance < settings.elsewhere)
        looked = [view(self.drawn.pictures[one], settings, generator) for one in both]
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        x = torch.cat([part.pictures for part in looked])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=has_bfloat16(self.device)):
            maps = self.encoder(x.contiguous(memory_format=torch.channels_last))
            outs = [head(m) for head, m in zip(self.heads, reversed(maps), strict=False)]
        losses = [self._loss(out, looked, both) for out in outs]
        self.loss = torch.stack(losses).sum()
        self.optimizer.zero_grad()
        torch.autograd.backward(self.loss)
        self.optimizer.step()
        self.done += 1

    def _loss(self, out: Tensor, looked: Sequence[View], some: Sequence[Tensor]) -> Tensor:
        """Return the loss of what a head made of two views of some pictures."""
        a, b = out.chunk(2)
        if self.settings.objective == "scene":
            seen, traits = self.drawn.seen, self.drawn.traits
            each = zip((a, b), looked, some, strict=True)
            return sum((scene(t, v, seen[k], traits[k]) for t, v, k in each), out.new_zeros(()))
        if self.settings.objective == "simclr":
            return simclr(a, b, self.settings.temperature)
        return (barlow if self.settings.objective == "barlow" else vicreg)(a, b)

    def save(self, path: Path) -> None:
        """Keep all that is needed to go on."""
        state = {
            "settings": json.dumps(asdict(self.settings)),
            "done": self.done,
            "encoder": self.encoder.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        with written_whole(path) as temporary:
            torch.save(state, temporary)

    def load(self, path: Path) -> None:
        """Go on from where another training of the same settings was saved."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        mine = json.loads(json.dumps(asdict(self.settings)))
        theirs = json.loads(state["settings"])
        if mine != theirs:
            differ = [name for name in mine if mine[name] != theirs.get(name)]
            raise ValueError(
                f"{path} is of a training with other settings: "
                + ", ".join(f"{name} {theirs.get(name)} instead of {mine[name]}" for name in differ)
            )
        self.done = state["done"]
        self.encoder.load_state_dict(state["encoder"])
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])

    def export(self, path: Path) -> None:
        """Write the encoder as a teacher."""
        about = {"settings": asdict(self.settings), "steps": self.done, "torch": torch.__version__}
        save_weights(self.encoder.eval(), path, about)
        self.encoder.train()


def validate(
    teacher: Recipe, dataset: str, samples: int, device: str | torch.device = "auto"
) -> float:
    """Return the accuracy of whitened PEC on a tenth of a dataset's training set, held out.

    Parameters
    ----------
    teacher : recipe
    dataset : str
        Its test set is not touched.
    samples : int
        How many samples of the training set take part, drawn at random.
    device : str or torch.device
    """
    import numpy as np

    from pecil import WhitenedPEC
    from pecil.data import DATASETS, load

    data = load(dataset)
    order = np.random.default_rng(0).permutation(len(data.train_y))[:samples]
    held, rest = np.split(order, [max(1, len(order) // 10)])
    model = WhitenedPEC(
        teacher=teacher,
        dim=10**9,
        expected_classes=DATASETS[dataset].n_classes,
        mean=data.mean,
        std=data.std,
        device=device,
    )
    model.fit(data.train_x[rest], data.train_y[rest])
    return float(model.score(data.train_x[held], data.train_y[held]))


def train(
    settings: Settings,
    folder: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    every: int = 500,
    datasets: Sequence[str] = (),
    samples: int = 20_000,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Path:
    """Train a teacher, or go on where it was stopped; return the file of its weights.

    Parameters
    ----------
    settings : Settings
    folder : path-like
        Made if it is not there.
    device : str or torch.device
    every : int
        Steps after which it is saved and reported.
    datasets : sequence of str
        Real datasets on whose training sets to validate at each report.
    samples : int
        Samples of each that take part.
    report : callable
        Called with each row of the log.
    """
    from pecil.data import DATASETS

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, weights = folder / "checkpoint.pt", folder / "weights.safetensors"
    training = Training(settings, device)
    if checkpoint.exists():
        training.load(checkpoint)
    with written_whole(folder / "settings.json") as temporary:
        temporary.write_text(json.dumps(asdict(settings), indent=1) + "\n", encoding="utf-8")
    start, before = time.perf_counter(), training.done
    while training.done < settings.steps:
        training.step()
        if training.done % every and training.done < settings.steps:
            continue
        row = {"step": training.done, "loss": float(training.loss.detach())}
        if not math.isfinite(row["loss"]):
            raise ValueError(f"the loss is {row['loss']} after {training.done} steps; lower lr")
        row["seconds"] = time.perf_counter() - start
        row["steps_a_second"] = (training.done - before) / row["seconds"]
        training.save(checkpoint)
        training.export(weights)
        for name in datasets:
            alone = Synthetic(str(weights), mirror=DATASETS[name].mirror, beside=None)
            row[name] = validate(alone, name, samples, training.device)
        with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        report(row)
    return weights


# -------------------------------------------------------------------------- command line


def _shares(text: str) -> dict[str, float]:
    """Read shares: leaves=2,glyphs=1."""
    return {
        name: float(share or 1) for name, _, share in (p.partition("=") for p in text.split(","))
    }


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m pecil.teachers.synthetic", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    default = Settings()
    for one in fields(Settings):
        value = getattr(default, one.name)
        kind = {"channels": _numbers, "families": _shares}.get(one.name, type(value))
        parser.add_argument(f"--{one.name}", type=kind, default=value, help=f"[{value}]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--every", type=int, default=500, help="steps between reports [500]")
    parser.add_argument("--datasets", nargs="*", default=[], help="to validate on")
    parser.add_argument("--samples", type=int, default=20_000, help="of each of them [20000]")
    given = vars(parser.parse_args(arguments))
    names = {one.name for one in fields(Settings)}
    try:
        train(
            Settings(**{name: given[name] for name in names}),
            given["folder"],
            report=lambda row: print(json.dumps(row), flush=True),
            **{name: given[name] for name in ("device", "every", "datasets", "samples")},
        )
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
