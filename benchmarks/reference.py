"""PEC written down plainly: what :class:`pecil.PEC` must equal, and be faster than.

One module, one Adam and one schedule per class, samples one by one from a ``DataLoader``,
the teacher run anew for every sample in training (and its outputs detached) and, in scoring,
for every image and every class: the arithmetic and the order of work of the method's released
code, with nothing shared, stacked or batched.
"""

import copy
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, PolynomialLR
from torch.utils.data import DataLoader


def mlp(features: int, width: int, outputs: int) -> nn.Sequential:
    """Linear, LayerNorm, GELU, Linear; for vectors (n, features)."""
    return nn.Sequential(
        nn.Linear(features, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, outputs)
    )


def conv(channels: int, width: int, outputs: int, pool: int) -> nn.Sequential:
    """Convolution, InstanceNorm, ReLU, pooling to pool x pool, Linear; for images (n, c, h, w)."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.InstanceNorm2d(width, affine=True),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(pool),
        nn.Flatten(),
        nn.Linear(width * pool * pool, outputs),
    )


class ReferencePEC:
    r"""Learn to predict the teacher on each class; the class predicted best is the answer.

    .. math:: \hat y(x) = \arg\min_c \tfrac1d \lVert g_{\theta_c}(x) - h(x) \rVert^2

    Parameters
    ----------
    teacher : torch.nn.Module
        The frozen network h.
    student : torch.nn.Module
        The values that the student g of every class starts from.
    lr : float
        Learning rate of Adam.
    counts : mapping of label to int, optional
        Samples T of each class: its rate is ``lr * (1 - t / T)`` at its t-th step, t from 0.
        Without it the rate is constant.
    betas, eps : tuple of float, float
        Adam's other settings.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        *,
        lr: float,
        counts: Mapping[Hashable, int] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.teacher = teacher
        self.start = student
        self.lr = lr
        self.counts = counts
        self.betas = betas
        self.eps = eps
        self.students: dict[Hashable, nn.Module] = {}
        self.optimizers: dict[Hashable, torch.optim.Adam] = {}
        self.schedules: dict[Hashable, LRScheduler] = {}

    def learn(self, x: Tensor, label: Hashable) -> None:
        """One Adam step of the label's student, on one sample (1, ...)."""
        if label not in self.students:
            self._start(label)
        optimizer = self.optimizers[label]
        optimizer.zero_grad()
        loss = functional.mse_loss(self.students[label](x), self.teacher(x).detach())
        loss.backward()
        optimizer.step()
        self.schedules[label].step()

    def _start(self, label: Hashable) -> None:
        student = self.students[label] = copy.deepcopy(self.start)
        optimizer = torch.optim.Adam(student.parameters(), self.lr, self.betas, self.eps)
        self.optimizers[label] = optimizer
        self.schedules[label] = (
            ExponentialLR(optimizer, gamma=1.0)
            if self.counts is None
            else PolynomialLR(optimizer, self.counts[label])
        )

    def fit(self, x: Tensor, y: Iterable[Hashable]) -> "ReferencePEC":
        """Learn the samples (n, ...) one by one, in the order given."""
        pairs: Any = list(zip(x, y, strict=True))
        for sample, label in DataLoader(pairs, batch_size=1):
            self.learn(sample, label[0] if isinstance(label, list | tuple) else label.item())
        return self

    @torch.no_grad()
    def errors(self, x: Tensor) -> Tensor:
        """Error of every class on every sample, (n, classes); columns in order of first sight."""
        rows = [
            [functional.mse_loss(g(sample), self.teacher(sample)) for g in self.students.values()]
            for sample in x[:, None]  # (1, ...)
        ]
        return torch.stack([torch.stack(row) for row in rows])

    def predict(self, x: Tensor) -> list[Hashable]:
        """Return the label of the smallest error for each sample."""
        labels = list(self.students)
        return [labels[c] for c in self.errors(x).argmin(1).tolist()]
