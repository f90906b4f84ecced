"""BiC: distillation, and two numbers that take back what new classes got too much.

Wu, Chen, Wang, Ye, Liu, Guo and Fu (2019), "Large Scale Incremental Learning", CVPR. A network
trained on many samples of new classes and few of old ones favours the new. Each pass over a task
goes over the task's samples and the buffer's, mixed; the network keeps to what it said before:

    loss(x, y) = (1 − λ) CE(f(x), y) + λ T² CE(f_old(x) / T, softmax(f^old_old(x) / T))

the first over all classes that came, the second over the old ones. When the task ends, the
network stands still and a bias layer, α and β, is fitted by cross-entropy to samples that were
set aside, as many of the task as of the buffer:

    q_c(x) = α f_c(x) + β for the classes of the newest task,    q_c(x) = f_c(x) for all others
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pecil.methods.icarl import Merging, Rows, first_of_each, keep_first, together

BIAS_LR = 0.001


@dataclass(frozen=True)
class Bias:
    """Scales and moves the logits of some classes."""

    classes: Tensor
    """Which, (n_classes,), bool."""
    values: Tensor
    """α and β."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the logits, corrected."""
        return torch.where(self.classes, self.values[0] * logits + self.values[1], logits)


class BiC(Merging):
    """Distillation and a bias layer for the newest classes (Wu et al. 2019).

    Each sample of the buffer is set aside for the bias layer with probability ``aside``, and as
    many random ones of the task, once a task; the network is not trained on them. (Where `learn`
    is given less than a pass, they come from the first portion.) The teacher of the distillation
    is the network before the task, with its bias layer; those of earlier tasks are gone.

    The paper's results were obtained with code that departs from BiC, and so does this class
    unless ``released`` is False. There λ = 1 / (t + 1), t being the tasks before this one: the
    more there is to keep, the less it weighs; BiC has the share of old classes among all. And
    there the buffer has capacity // tasks samples of each task, drawn from all that the task was
    trained on, the buffer included; BiC has as many of each class.

    Parameters
    ----------
    n_classes, input_shape, **given
        See `pecil.methods.trained.Trained`.
    buffer : int
        Samples that may be kept.
    temperature : float
        T.
    aside : float
        The share of the buffer that is set aside.
    bias_epochs : int
        Passes over what was set aside, in batches as everywhere, by Adam with a rate of 0.001.
    released : bool
        Whether to do as the paper's released code; if not, as BiC's authors.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(2, dtype=np.float32).repeat(50, axis=0), np.arange(2).repeat(50)
    >>> learner = BiC(n_classes=3, input_shape=(2,), lr=0.01, buffer=30)
    >>> for label in (0, 1):
    ...     learner.begin_task({label: 250}, passes=[50] * 5)
    ...     for _ in range(5):
    ...         learner.learn(x[y == label], y[y == label])
    ...     learner.end_task()
    >>> learner.n_buffered, bool((learner.scores(x).argmax(axis=1) == y).all())
    (30, True)
    """

    old_bias: Bias | None = None
    tasks = 0  # that are over

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        buffer: int = 500,
        temperature: float = 2.0,
        aside: float = 0.1,
        bias_epochs: int = 250,
        released: bool = True,
        **given: Any,
    ) -> None:
        if not 0 <= aside < 1:
            raise ValueError(f"aside: expected a share from 0 to less than 1, got {aside!r}")
        self.temperature, self.aside, self.bias_epochs = temperature, aside, bias_epochs
        self.released = released
        super().__init__(n_classes, input_shape, buffer=buffer, **given)

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Start anew, without a bias layer; nothing is set aside yet."""
        super().begin_task(counts, passes)
        self.bias: Bias | None = None
        self.set_aside: tuple[Tensor, Tensor] | None = None
        self.old = self.past.nonzero()[:, 0]
        if self.released:
            self.lam = 1 / (self.tasks + 1)
        else:
            self.lam = len(self.old) / max(1, int(self.known.sum()))

    # ------------------------------------------------------------------------ learning

    def merged(self) -> Rows:
        """Return the samples to train on: of the task and of the buffer, mixed."""
        if self.set_aside is None:
            chance = self.buffer.generator
            kept = torch.rand(len(self.buffer), generator=chance) < self.aside
            n = min(int(kept.sum()), self.n_held - 1)  # one at least to train on
            new = torch.randperm(self.n_held, generator=chance)[:n]
            self.set_aside = new.to(self.device), kept.to(self.device)
        return self.mixed([self.parted()[0]])

    def parted(self) -> tuple[Rows, Rows]:
        """Return the samples of the task and the buffer: those to train on, those set aside."""
        rows = together(self.parts())
        aside = torch.zeros(len(rows["y"]), dtype=torch.bool, device=self.device)
        if self.set_aside is not None:
            new, kept = self.set_aside
            aside[new] = True
            aside[len(aside) - len(kept) :] = kept
        train, validate = ({k: v[part] for k, v in rows.items()} for part in (~aside, aside))
        return train, validate

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return cross-entropy and distillation, weighted."""
        inputs = self.view(raw)
        logits = self.network(inputs)
        loss = self.cross_entropy(logits, labels)
        if self.old_network is None:
            return loss
        with torch.no_grad():
            before = self.old_network(inputs)
            before = before if self.old_bias is None else self.old_bias(before)
            soft = (before[:, self.old] / self.temperature).softmax(1)
        distilled = F.cross_entropy(logits[:, self.old] / self.temperature, soft)
        return (1 - self.lam) * loss + self.lam * self.temperature**2 * distilled

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of -log softmax(f(x))_y over the classes that came."""
        return F.cross_entropy(logits.masked_fill(~self.known, -torch.inf), labels)

    # -------------------------------------------------------------------- end of a task

    def fill(self) -> None:
        """Fit the bias layer, then keep some of the samples."""
        train, validate = self.parted()
        if len(validate["y"]):
            self.bias = Bias(self.current.clone(), self.fitted(validate["x"], validate["y"]))
        self.old_bias = self.bias
        self.tasks += 1
        rows = self.mixed([train])
        if self.released:
            share = self.buffer.capacity // self.tasks
            keep_first(self.buffer, share, by="task")
            chosen = torch.arange(min(share, len(rows["y"])), device=self.device)
        else:
            share = self.buffer.capacity // int(self.seen.sum())
            came = self.current.nonzero()[:, 0]
            keep_first(self.buffer, share, but=came)
            chosen = first_of_each(rows["y"], share)
            chosen = chosen[self.current[rows["y"][chosen]]]
        labels = rows["y"][chosen]
        self.buffer.add(x=rows["x"][chosen], y=labels, task=torch.full_like(labels, self.tasks))

    @torch.no_grad()
    def fitted(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the α and β of the newest classes that fit samples best, by cross-entropy."""
        values = torch.tensor([1.0, 0.0], device=self.device)
        optimizer = torch.optim.Adam([values], BIAS_LR, fused=True, capturable=values.is_cuda)
        new = self.current.nonzero()[:, 0]
        true = (labels.unsqueeze(1) == new).float()
        logits: Tensor | None = None

        def step(own: Tensor, others: Tensor, truth: Tensor) -> None:
            scores = torch.cat([others, values[0] * own + values[1]], 1)
            slopes = (scores.softmax(1)[:, 1:] - truth) / len(own)  # of the mean, by score
            values.grad = torch.stack([(slopes * own).sum(), slopes.sum()])
            optimizer.step()

        self.network.eval()
        for _ in range(self.bias_epochs):
            if logits is None or self.augment:  # other views, other logits
                logits = self.network(self.view(raw))
                rest = logits.masked_fill(~self.known | self.current, -torch.inf)
                rest = rest.logsumexp(1, keepdim=True)  # all other classes as one
            order = torch.randperm(len(labels), generator=self.buffer.generator).to(self.device)
            for batch in self.batches(*(a[order] for a in (logits[:, new], rest, true))):
                self.recorder(("bias", len(batch[0])), step, *batch)
        self.network.train()
        return values

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits, those of the newest classes corrected."""
        logits: Tensor = self.network(inputs)
        return logits if self.bias is None else self.bias(logits)
