"""ER: experience replay.

A buffer keeps samples of the stream, each that ever came with the same chance (a reservoir).
With every batch of b new samples (x, y), b old ones (x', y') are drawn from it, and the network
takes one step on both together:

    loss = mean over (x, y) and (x', y') of -log softmax(f(x))_y    over all classes

The new samples join the buffer after the draw.

Chaudhry, Rohrbach, Elhoseiny, Ajanthan, Dokania, Torr and Ranzato (2019). On Tiny Episodic
Memories in Continual Learning. Robins (1995) has the idea, as rehearsal; Vitter (1985) the
reservoir.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from pecil.methods.trained import Replaying


class ER(Replaying):
    """One step on the new samples and on as many old ones (Chaudhry et al. 2019).

    Departure of the authors' released code, which ``augment_replayed=False`` undoes: replayed
    colour pictures are cropped at random (and mirrored, if ``flip``), whether those of the stream
    are or not.

    Parameters
    ----------
    n_classes, input_shape, **given
        As in `pecil.methods.trained.Trained`. With ``labels_trick``, the softmax of new samples
        has the classes of the task alone; that of old ones has all.
    buffer : int
        The samples that may be kept.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(2, dtype=np.float32).repeat(50, axis=0), np.arange(2).repeat(50)
    >>> learner = ER(n_classes=3, input_shape=(2,), buffer=10, lr=0.01)
    >>> for label in (0, 1):
    ...     learner.begin_task({label: 1000})
    ...     for _ in range(20):
    ...         learner.learn(x[y == label], y[y == label])
    ...     learner.end_task()
    >>> bool((learner.scores(x).argmax(axis=1) == y).all())  # fine-tuning forgets class 0
    True
    >>> learner.n_buffered
    10
    """

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over new samples and old."""
        old = self.buffer.draw(len(raw))
        if old:
            inputs = self.together(raw, old["x"])
            targets = torch.cat((labels, old["y"]))
        else:
            inputs, targets = self.view(raw), labels
        self.buffer.add(x=raw, y=labels)
        logits = self.network(inputs)
        if self.labels_trick:
            logits[: len(raw)].masked_fill_(~self.current, -torch.inf)
        return F.cross_entropy(logits, targets)

    def together(self, raw: Tensor, old: Tensor) -> Tensor:
        """Return new and old samples as one batch of inputs."""
        if raw.ndim == 4:
            return torch.cat((self.view(raw), self.replayed(old)))
        return self.view(torch.cat((raw, old)))  # all alike: only colour pictures are augmented

    def apart(self, raw: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of new samples and of old ones, each a batch of its own.

        Only batch norm tells two passes through the network from one, and perceptrons have none.
        """
        if raw.ndim == 4:
            return self.network(self.view(raw)), self.network(self.replayed(old))
        both: Tensor = self.network(self.together(raw, old))
        first, second = both.split((len(raw), len(old)))
        return first, second
