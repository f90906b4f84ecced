"""X-DER: dark experience replay whose memories are rewritten, with heads for what is to come.

Boschini, Bonicelli, Buzzega, Porrello and Calderara (2022), "Class-Incremental Continual Learning
into the eXtended DER-verse", TPAMI 45. A task's outputs are a head; heads of past, present and
future tasks are told apart. (x, y) is of the stream, (x', y', z') of the buffer, f_h a head:

    present   CE(f_present(x), y)
    logits    ‖ f(x') − z' ‖² / classes
    past      CE(f_past(x'), y')
    future    mean over future heads h of the supervised contrastive loss of f_h / ‖f_h‖ on two
              views of x and x' each
    bounds    max(0, m + max softmax(f)_past(x) − max softmax(f)_present(x))
              + max(0, m + max f_future(x) − max f_own(x)),  own: the head of the sample's class

    loss = present + α logits + β past + λ future + η bounds

Memories z' know nothing of heads that came after them. When such a sample is replayed, and when
a task ends, what the network says in these heads is written into z', scaled down by
γ z'_y' / max if its maximum is above z'_y'.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pecil.methods.icarl import Revisiting, keep_first
from pecil.methods.learner import Array, scaled

VIEWS = 2  # of each sample, for the contrastive loss
AREA, RATIO = (0.2, 1.0), (3 / 4, 4 / 3)  # of the parts of pictures that views show
JITTER, HUE = 0.4, 0.1  # how much colours of views change
CHANGED, GREY = 0.8, 0.2  # how often they do, and how often they vanish


class XDER(Revisiting):
    """Replayed logits that are kept up to date, bounded heads (Boschini et al. 2022).

    The buffer is filled when a task ends, by samples of the task with the logits that they have
    then; all classes that came have their share of it. Each step draws from it once, as many
    samples as a batch has, for all terms.

    With one class a task a head is one output: the present and the future term are constant. All
    that is learned of a class comes from the bounds, and from replay later.

    As in the code with which the paper's results were obtained: a memory that is replayed is
    rewritten with probability 1 / (times that it was drawn in the task); samples of the buffer
    go through the network twice, once for each of two terms, which counts in the moving averages
    of batch norm alone; and their views, if they are colour pictures, are made of inputs that
    were augmented and normalised before, where what is below 0 or above 1 becomes another colour.

    Parameters
    ----------
    n_classes, input_shape, **given
        See `pecil.methods.trained.Trained`.
    buffer : int
        Samples that may be kept.
    alpha, beta, lam, eta : float
        α, β, λ and η: weights of the terms.
    m : float
        Margin of the bounds.
    gamma : float
        γ: how far below the logit of the class rewritten ones have to stay.
    temperature : float
        Of the contrastive loss.
    passes : int
        How often replayed samples count in the moving averages of batch norm.
    wrapped : bool
        Whether views of replayed pictures are made so; if not, of the samples as they are.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(4, dtype=np.float32).repeat(50, axis=0), np.arange(4).repeat(50)
    >>> order = np.random.default_rng(0).permutation(200)
    >>> x, y = x[order], y[order]
    >>> learner = XDER(n_classes=4, input_shape=(4,), lr=0.01, buffer=40, eta=0.1)
    >>> for task in ([0, 1], [2, 3]):
    ...     own = np.isin(y, task)
    ...     learner.begin_task({label: 250 for label in task})
    ...     for _ in range(5):
    ...         learner.learn(x[own], y[own])
    ...     learner.end_task()
    >>> learner.n_buffered, bool((learner.scores(x).argmax(axis=1) == y).all())
    (40, True)
    """

    tasks = 0  # that began, an empty one at the start among them

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        buffer: int = 500,
        alpha: float = 0.3,
        beta: float = 0.8,
        lam: float = 0.05,
        eta: float = 0.01,
        m: float = 0.3,
        gamma: float = 0.85,
        temperature: float = 5.0,
        passes: int = 2,
        wrapped: bool = True,
        **given: Any,
    ) -> None:
        super().__init__(n_classes, input_shape, buffer=buffer, **given)
        self.weights = {"present": 1, "logits": alpha, "past": beta, "future": lam, "bounds": eta}
        self.m, self.gamma, self.temperature, self.passes = m, gamma, temperature, passes
        self.wrapped = wrapped

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Start anew; the classes of the task become the present head."""
        super().begin_task(counts, passes)
        self.tasks += 1
        if self.tasks == 1:
            self.task_of = torch.zeros(self.n_classes, dtype=torch.long, device=self.device)
        self.task_of[self.current] = self.tasks
        self.future = ~self.known
        self.has_past, self.has_future = bool(self.past.any()), bool(self.future.any())
        size = max(1, len(counts))
        unseen = self.future.nonzero()[:, 0]
        self.heads = unseen[: len(unseen) // size * size].view(-1, size)  # (heads, classes)

    def learn(self, x: Array, y: Array) -> None:
        """Take a step on every batch; hold it for the buffer."""
        if len(y):
            self.hold(x, y)
            super().learn(x, y)

    # --------------------------------------------------------------------------- terms

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the terms, each with its weight."""
        terms = [self.weights[name] * term for name, term in self.terms(raw, labels).items()]
        return torch.stack(terms).sum()

    def terms(self, raw: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return those of the five terms that have something to say, by name."""
        outputs = all_outputs = self.network(self.view(raw))
        all_raw, all_labels = raw, labels
        terms = {"present": among(self.current, outputs, labels)}
        if len(self.buffer):
            places = self.buffer.pick(self.batch_size)
            drawn = {name: values[places] for name, values in self.buffer.fields.items()}
            inputs = self.replayed(drawn["x"])
            with counting(self.network, self.passes):
                replayed = self.network(inputs)
            terms["logits"] = F.mse_loss(replayed, drawn["z"])
            terms["past"] = among(self.past, replayed, drawn["y"])
            self.rewrite(places, replayed.detach())
            pictures = self.wrapped and inputs.ndim == 4 and raw.dtype == torch.uint8
            all_raw = torch.cat([raw, as_bytes(inputs) if pictures else drawn["x"]])
            all_labels = torch.cat([labels, drawn["y"]])
            all_outputs = torch.cat([outputs, replayed])
        bounds = []
        if self.has_past:
            bounds.append(self.past_bound(outputs))
        if self.has_future:
            bounds.append(self.future_bound(all_outputs, all_labels))
        if bounds:
            terms["bounds"] = torch.stack(bounds).sum()
        if self.heads.shape[0] and self.heads.shape[1] > 1:  # else constant
            terms["future"] = self.contrast(all_raw, all_labels)
        return terms

    def past_bound(self, outputs: Tensor) -> Tensor:
        """Bound the probabilities of past classes by those of present ones."""
        shares = outputs.masked_fill(self.future, -torch.inf).softmax(1)
        past = shares.masked_fill(~self.past, 0).amax(1).detach()
        return violation(past + self.m - shares.masked_fill(~self.current, 0).amax(1))

    def future_bound(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Bound the logits of classes to come by those of the sample's own head."""
        own = self.task_of[labels].unsqueeze(1) == self.task_of
        future = outputs.masked_fill(~self.future, -torch.inf).amax(1)
        return violation(future + self.m - outputs.masked_fill(~own, -torch.inf).amax(1))

    def contrast(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the contrastive loss of the future heads, views of a class being alike."""
        views = self.view(self.varied(raw.repeat(VIEWS, *[1] * (raw.ndim - 1))), augment=False)
        with untracked(self.network):
            outputs = self.network(views)
        heads = F.normalize(outputs[:, self.heads].movedim(1, 0), dim=2)  # (heads, n, classes)
        return contrastive(heads, labels.repeat(VIEWS), self.temperature)

    # -------------------------------------------------------------------------- buffer

    def rewrite(self, places: Tensor, outputs: Tensor) -> None:
        """Write present and future logits into memories, the seldomer the oftener drawn."""
        kept = self.buffer.fields
        kept["visits"][places] += 1
        chance = self.chance(lambda: torch.rand(len(places), generator=self.buffer.generator))
        chosen = chance * kept["visits"][places] < 1
        before = kept["z"][places]
        after = tamed(before, outputs, kept["y"][places], ~self.past, self.gamma)
        kept["z"][places] = torch.where(chosen.unsqueeze(1), after, before)

    @torch.no_grad()
    def end_task(self) -> None:
        """Make room in the buffer, fill it with samples of the task, rewrite the others.

        What batch norm makes of a sample depends on its company: all of the buffer, mixed.
        """
        if not self.held:
            return
        keep_first(self.buffer, self.buffer.capacity // int(self.known.sum()))
        n_kept, rows = len(self.buffer), self.mixed(self.held)
        self.held = []
        chosen = self.shares(rows["y"])
        raw, labels = rows["x"][chosen], rows["y"][chosen]
        outputs = self.outputs(self.view(raw))
        outputs = tamed(outputs, outputs, labels, self.past, self.gamma)
        self.buffer.add(x=raw, y=labels, z=outputs, visits=torch.zeros_like(outputs[:, 0]))
        if n_kept:
            mixed = torch.randperm(len(self.buffer), generator=self.buffer.generator)
            outputs = self.outputs(self.replayed(self.buffer.fields["x"][mixed]))[mixed.argsort()]
            old = {name: values[:n_kept] for name, values in self.buffer.fields.items()}
            old["z"][:] = tamed(old["z"], outputs[:n_kept], old["y"], ~self.past, self.gamma)
            old["visits"].zero_()

    def shares(self, labels: Tensor) -> Tensor:
        """Choose rows to fill the buffer, as many of each class; chance says who gets one more."""
        classes = labels.unique().tolist()
        each, more = divmod(self.buffer.capacity - len(self.buffer), len(classes))
        order = torch.randperm(len(classes), generator=self.buffer.generator).tolist()
        rows = [
            (labels == label).nonzero()[: each + (place < more), 0]
            for label, place in zip(classes, order, strict=True)
        ]
        return torch.cat(rows).sort().values  # classes mixed, for batch norm

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the logits of inputs in training mode, batch by batch, leaving no trace."""
        with untracked(self.network):
            return torch.cat([self.network(part) for part in inputs.split(self.batch_size)])

    # --------------------------------------------------------------------------- views

    def varied(self, raw: Tensor) -> Tensor:
        """Return parts of pictures, enlarged, half of them mirrored, in other colours.

        Vectors stay as they are.
        """
        if raw.ndim == 2:
            return raw
        x = scaled(raw)
        x = x.unsqueeze(1) if x.ndim == 3 else x.movedim(-1, 1)
        n = len(x)
        where, how = (
            self.chance(partial(torch.rand, rows, n, generator=self.pictures)) for rows in (5, 6)
        )
        x = recoloured(zoomed(x, where), how)
        x = x.clamp(0, 1) if raw.dtype == torch.uint8 else x
        return x.squeeze(1) if raw.ndim == 3 else x.movedim(1, -1)


def among(classes: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of a softmax over some classes."""
    return F.cross_entropy(logits.masked_fill(~classes, -torch.inf), labels)


def violation(excess: Tensor) -> Tensor:
    """Return the mean of what is above zero, zero if nothing is."""
    return excess.relu().sum() / (excess > 0).sum().clamp(min=1)


def contrastive(heads: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the supervised contrastive loss (Khosla et al. 2020), the mean over heads.

    Parameters
    ----------
    heads : Tensor, (heads, n, features)
        Of length 1 each.
    labels : Tensor, (n,)
        Every one is there twice or oftener.
    temperature : float
    """
    same = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    near = (heads @ heads.mT / temperature).masked_fill(same, -torch.inf)
    alike = (labels.unsqueeze(1) == labels) & ~same
    log_shares = near.log_softmax(2).masked_fill(~alike, 0)
    return -(log_shares.sum(2) / alike.sum(1)).mean()


def tamed(memory: Tensor, logits: Tensor, labels: Tensor, classes: Tensor, gamma: float) -> Tensor:
    """Return memories with the logits of some classes written into them.

    They are scaled by γ z_y / max where their maximum is above z_y, the memory of the true class.

    Examples
    --------
    >>> memory, logits = torch.tensor([[2.0, 0, 0]]).repeat(2, 1), torch.tensor([[9.0, 4, -2]])
    >>> new = torch.cat([logits, logits / 4])
    >>> labels, classes = torch.tensor([0, 0]), torch.tensor([False, True, True])
    >>> tamed(memory, new, labels, classes, gamma=0.5).tolist()
    [[2.0, 1.0, -0.5], [2.0, 1.0, -0.5]]
    """
    true = memory.gather(1, labels.unsqueeze(1))
    top = logits.masked_fill(~classes, -torch.inf).amax(1, keepdim=True)
    scale = torch.where(top > true, gamma * true / top, 1.0)
    return torch.where(classes, scale * logits, memory)


def as_bytes(inputs: Tensor) -> Tensor:
    """Read numbers of pictures (n, c, h, w) as bytes, modulo 256, as (n, h, w, c).

    Examples
    --------
    >>> as_bytes(torch.tensor([-0.5, 0.5, 1.5]).view(1, 3, 1, 1)).tolist()
    [[[[129, 127, 126]]]]
    """
    return (inputs * 255).long().remainder(256).byte().movedim(1, -1)


def zoomed(x: Tensor, chance: Tensor) -> Tensor:
    """Enlarge random parts of pictures (n, c, h, w), mirror half of them.

    ``chance`` is (5, n), in [0, 1).
    """
    height, width = x.shape[2:]
    u = chance.unsqueeze(2)
    area = AREA[0] + (AREA[1] - AREA[0]) * u[0]
    ratio = torch.exp(math.log(RATIO[0]) + math.log(RATIO[1] / RATIO[0]) * u[1])
    wide, high = ((area * r).sqrt().clamp(max=1) for r in (ratio, 1 / ratio))
    mirror = torch.where(u[2] < 0.5, -1.0, 1.0)
    columns = (1 - wide) * (2 * u[3] - 1) + mirror * wide * centres(width, x.device)  # (n, width)
    rows = (1 - high) * (2 * u[4] - 1) + high * centres(height, x.device)
    places = columns.unsqueeze(1).expand(-1, height, -1), rows.unsqueeze(2).expand(-1, -1, width)
    return F.grid_sample(x, torch.stack(places, 3), padding_mode="border", align_corners=False)


def centres(n: int, device: torch.device) -> Tensor:
    """Return where the centres of n pixels lie between -1 and 1."""
    return (2 * torch.arange(n, device=device) + 1) / n - 1


@cache
def yiq(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the map from red, green and blue to brightness and two colours, and its inverse."""
    there = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
    return there.to(device), torch.linalg.inv(there).to(device)


def recoloured(x: Tensor, chance: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue of pictures (n, c, h, w); make some grey.

    ``chance`` is (6, n), in [0, 1).
    """
    (n, channels), u = x.shape[:2], chance
    change = u[0] < CHANGED
    factors = torch.where(change, 1 + JITTER * (2 * u[1:4] - 1), 1.0)
    angle = torch.where(change, 2 * math.pi * HUE * (2 * u[4] - 1), 0.0)
    bright, contrast, _ = factors.view(3, n, 1, 1, 1)
    x = x * bright
    to_yiq, from_yiq = yiq(x.device)
    weights = to_yiq[0].view(3, 1, 1) if channels == 3 else x.new_ones(1, 1, 1)
    middle = (weights * x).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    x = middle + contrast * (x - middle)
    if channels != 3:
        return x
    colour = torch.where(u[5] < GREY, 0.0, factors[2])
    turned = torch.polar(colour, angle)  # in the plane of colours
    maps = x.new_zeros(n, 3, 3)
    maps[:, 0, 0] = 1
    maps[:, 1, 1] = maps[:, 2, 2] = turned.real
    maps[:, 1, 2], maps[:, 2, 1] = -turned.imag, turned.imag
    maps = from_yiq @ maps @ to_yiq
    return torch.einsum("nij,njhw->nihw", maps, x)


@contextmanager
def untracked(network: nn.Module) -> Iterator[None]:
    """Let batch norm use the statistics of its batches without remembering them."""
    for layer in norms(network):
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in norms(network):
            layer.track_running_stats = True


@contextmanager
def counting(network: nn.Module, passes: int) -> Iterator[None]:
    """Let batch norm remember a batch as if it passed so many times."""
    before = [layer.momentum or 0.0 for layer in norms(network)]
    for layer, momentum in zip(norms(network), before, strict=True):
        layer.momentum = 1 - (1 - momentum) ** passes
    try:
        yield
    finally:
        for layer, momentum in zip(norms(network), before, strict=True):
            layer.momentum = momentum


def norms(network: nn.Module) -> list[nn.BatchNorm2d]:
    """Return the layers of batch norm."""
    return [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
