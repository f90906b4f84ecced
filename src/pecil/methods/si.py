"""SI: synaptic intelligence.

A parameter matters for earlier tasks if the loss fell by its moving. Along the way through a task
the loss falls by the sum of -g_j Δθ_j, of slopes and moves, so that each parameter has its share
ω_j. Per square of the way that it has come in all, this is how much it matters to have it there:

    loss(x, y) = -log softmax(f(x))_y + c Σ_j Ω_j (θ_j - θ*_j)²
    ω_j  <-  ω_j - g_j Δθ_j                           at every step
    Ω_j  <-  Ω_j + ω_j / ((θ_j - θ*_j)² + ξ),         at the end of a task; then θ* = θ, ω = 0.

Zenke, Poole and Ganguli (2017). Continual Learning Through Synaptic Intelligence. ICML.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pecil.methods.ewc import flat
from pecil.methods.trained import Trained

PATHS = ("released", "exact", "penalised")
STEEPEST = 1.0  # slope that is followed, and counted, as released


class SI(Trained):
    """Parameters whose moving made the loss fall are held (Zenke et al. 2017).

    Departures of the authors' released code, which are the default: slopes are those of the loss
    with its penalty, cut to [-1, 1] for Adam too; and a move counts as that of plain gradient
    descent, ω_j <- ω_j + η g_j², with the learning rate η as set, whatever its schedule and Adam
    make of it. ``path="exact"`` is the sum above: moves as they are, slopes of the cross-entropy
    alone, none of them cut. With ``path="penalised"`` (van de Ven et al. 2021) slopes are those of
    the loss with its penalty.

    Parameters
    ----------
    n_classes, input_shape, **given
        As in `pecil.methods.trained.Trained`; ``labels_trick`` makes it SI + LT.
    c : float
        The weight of the penalty.
    xi : float
        ξ, which keeps Ω small for parameters that hardly move.
    path : {"released", "exact", "penalised"}
        How ω is added up.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(4, dtype=np.float32).repeat(50, axis=0), np.arange(4).repeat(50)
    >>> learner = SI(4, (4,), c=1.0, xi=0.9, labels_trick=True, lr=0.01)
    >>> for task in (y < 2, y >= 2):
    ...     learner.begin_task({label: 500 for label in np.unique(y[task]).tolist()})
    ...     for rows in [np.random.default_rng(0).permutation(np.flatnonzero(task))] * 10:
    ...         learner.learn(x[rows], y[rows])
    ...     learner.end_task()
    >>> learner.importance.shape, bool((learner.importance >= 0).all())
    (torch.Size([11004]), True)
    """

    lasting = False

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        c: float = 1.0,
        xi: float = 1.0,
        path: str = "released",
        **given: Any,
    ) -> None:
        if path not in PATHS:
            raise ValueError(f"path must be one of {', '.join(PATHS)}, not {path!r}")
        super().__init__(n_classes, input_shape, **given)
        self.c, self.xi, self.path = c, xi, path
        self.anchor = self.values()  # θ*
        self.importance = torch.zeros_like(self.anchor)  # Ω
        self.shares = torch.zeros_like(self.anchor)  # ω

    def values(self) -> Tensor:
        """Return a copy of the parameters, θ, as one vector."""
        return flat(self.network.parameters()).detach()

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return a linear function of θ with the slopes that are to be followed."""
        weights = tuple(self.network.parameters())
        own = flat(torch.autograd.grad(super().loss(raw, labels), weights))
        theta = flat(weights)
        slopes = own + 2 * self.c * self.importance * (theta.detach() - self.anchor)
        if self.path == "released":
            slopes.clamp_(-STEEPEST, STEEPEST)
            self.shares.addcmul_(slopes, slopes, value=self.lr)
        else:
            self.way = own if self.path == "exact" else slopes, theta.detach()
        return theta @ slopes

    def take(self, raw: Tensor, labels: Tensor) -> None:
        """Take one step and, unless gradient descent stands for it, count how far it went."""
        super().take(raw, labels)
        if self.path != "released":
            slopes, before = self.way
            self.shares -= slopes * (self.values() - before)

    def end_task(self) -> None:
        """Turn what the parameters did into how much they matter."""
        now = self.values()
        self.importance += self.shares / ((now - self.anchor).square() + self.xi)
        self.anchor, self.shares = now, torch.zeros_like(now)
