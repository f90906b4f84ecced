"""ER-ACE: experience replay with asymmetric cross-entropy.

When a class is new, plain replay pushes down the scores of old classes for its samples, and the
network's features of old samples change at once. Here new samples leave old classes alone: the
classes that came before and are not in the batch are no part of its softmax. Old samples, with
the softmax over all classes, tell old and new apart.

    loss = mean over (x, y)   of -log exp f(x)_y / Σ_c exp f(x)_c    c in the batch or not yet seen
         + mean over (x', y') of -log softmax(f(x'))_y'              over all classes

During the first task there is nothing old: its loss is the plain cross-entropy of the batch,
and the buffer fills.

Caccia, Aljundi, Asadi, Tuytelaars, Pineau and Belilovsky (2022). New Insights on Reducing Abrupt
Representation Change in Online Continual Learning. ICLR.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pecil.methods.er import ER
from pecil.methods.trained import Trained


class ERACE(ER):
    """Replay whose new samples leave the scores of old classes alone (Caccia et al. 2022).

    Departures of the authors' released code from the method's paper, reproduced unless
    ``released`` is False: classes not yet seen stay in both softmaxes, and the first task is
    learned without replay. The head is linear in both, not one of cosines. The released code takes
    the classes from the largest one seen on for those not yet seen; here they are those that have
    not come, whatever the order of the classes. ``augment_replayed`` is as in `ER`.

    Parameters
    ----------
    n_classes, input_shape, **given
        As in `pecil.methods.trained.Trained`.
    buffer : int
        The samples that may be kept.
    released : bool
        Whether to do as the paper's released code; if not, as ER-ACE's authors.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(2, dtype=np.float32).repeat(50, axis=0), np.arange(2).repeat(50)
    >>> learner = ERACE(n_classes=3, input_shape=(2,), buffer=10, lr=0.01)
    >>> for label in (0, 1):
    ...     learner.begin_task({label: 1000})
    ...     for _ in range(20):
    ...         learner.learn(x[y == label], y[y == label])
    ...     learner.end_task()
    >>> bool((learner.scores(x).argmax(axis=1) == y).all())  # fine-tuning forgets class 0
    True
    """

    lasting = False

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        buffer: int = 500,
        released: bool = True,
        **given: Any,
    ) -> None:
        super().__init__(n_classes, input_shape, buffer=buffer, **given)
        self.released = released
        self.first = True  # is the task the first one?
        self.came = torch.zeros_like(self.seen)  # the classes of all batches so far

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of new samples, without old classes, and that of old samples."""
        if self.released and self.first:
            loss = Trained.loss(self, raw, labels)
        elif old := self.buffer.draw(len(raw)):
            logits, again = self.apart(raw, old["x"])
            if not self.released:
                again = again.masked_fill(~self.came, -torch.inf)
            loss = self.among_new(logits, labels) + F.cross_entropy(again, old["y"])
        else:
            loss = self.among_new(self.network(self.view(raw)), labels)
        self.came.index_fill_(0, labels, True)
        self.buffer.add(x=raw, y=labels)
        return loss

    def among_new(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of new samples, their rivals the classes that are not old."""
        old = self.came if self.released else torch.ones_like(self.came)
        absent = old.index_fill(0, labels, False)
        return self.cross_entropy(logits.masked_fill(absent, -torch.inf), labels)

    def end_task(self) -> None:
        """Replay from now on, if there was anything to keep."""
        self.first = not len(self.buffer)
