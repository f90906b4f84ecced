"""A-GEM: averaged gradient episodic memory.

A step on new samples must not make the loss of old ones grow, to first order. With g the
gradient of the loss on the batch, and r the one on as many samples from the buffer, Adam is given

    g̃ = g                      if g·r >= 0,
    g̃ = g - (g·r / r·r) r      otherwise: the vector nearest to g with g̃·r >= 0.

Chaudhry, Ranzato, Rohrbach and Elhoseiny (2019). Efficient Lifelong Learning with A-GEM. ICLR.
The buffer is a reservoir, not one of fixed shares for the tasks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pecil.methods.er import ER
from pecil.methods.ewc import flat
from pecil.methods.learner import scaled
from pecil.methods.trained import Trained


class AGEM(ER):
    """Steps that do not increase the loss of replayed samples (Chaudhry et al. 2019).

    Departure of the authors' released code: replayed samples reach the network as they are, in
    [0, 1], neither normalised nor augmented, while those of the stream are normalised. The
    reference gradient is then one of inputs that the network does not know; only data without a
    mean and a standard deviation (MNIST) is spared. ``transform=True`` treats replayed samples
    as the other methods do.

    Parameters
    ----------
    n_classes, input_shape, **given
        As in `pecil.methods.trained.Trained`.
    buffer : int
        The samples that may be kept.
    transform : bool
        Whether replayed samples are normalised and, if pictures in colour, augmented.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(2, dtype=np.float32).repeat(50, axis=0), np.arange(2).repeat(50)
    >>> learner = AGEM(n_classes=3, input_shape=(2,), buffer=10, lr=0.01)
    >>> for label in (0, 1):
    ...     learner.begin_task({label: 1000})
    ...     for _ in range(20):
    ...         learner.learn(x[y == label], y[y == label])
    ...     learner.end_task()
    >>> bool((learner.scores(x).argmax(axis=1) == y).all())  # fine-tuning forgets class 0
    True
    """

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        buffer: int = 500,
        transform: bool = False,
        **given: Any,
    ) -> None:
        super().__init__(n_classes, input_shape, buffer=buffer, **given)
        self.transform = transform

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy; once there is replay, a linear function with gradient g̃."""
        loss = Trained.loss(self, raw, labels)
        old = self.buffer.draw(len(raw))
        self.buffer.add(x=raw, y=labels)
        if not old:
            return loss
        weights = tuple(self.network.parameters())
        reference = F.cross_entropy(self.network(self.replayed(old["x"])), old["y"])
        g, r = (flat(torch.autograd.grad(each, weights)) for each in (loss, reference))
        return flat(weights) @ projected(g, r)

    def replayed(self, raw: Tensor) -> Tensor:
        """Return samples from the buffer as the network takes them."""
        if self.transform:
            return super().replayed(raw)
        x = scaled(raw)
        return x.movedim(-1, 1) if x.ndim == 4 else x.flatten(1)


def projected(g: Tensor, r: Tensor) -> Tensor:
    """Return the vector nearest to g whose product with r is not negative.

    Examples
    --------
    >>> r = torch.tensor([2.0, 0.0])
    >>> projected(torch.tensor([-1.0, 3.0]), r), projected(torch.tensor([1.0, 3.0]), r)
    (tensor([0., 3.]), tensor([1., 3.]))
    """
    tiny = torch.finfo(r.dtype).tiny  # a reference of zero asks for nothing
    return g - (g @ r).clamp(max=0) / (r @ r).clamp(min=tiny) * r
