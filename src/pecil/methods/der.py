"""DER and DER++: dark experience replay.

The buffer keeps, with a sample x', what the network said of it when it came: its logits z', in
training mode, before the step that it was part of. Replay holds the network to them, which says
more of what it knew than a label does. With a batch (x, y) and as many samples of the buffer,

    loss = CE(f(x), y) + α MSE(f(x'), z')                       DER
    loss = CE(f(x), y) + α MSE(f(x'), z') + β CE(f(x'), y')     DER++

CE is the mean of -log softmax over all classes, MSE the mean over samples and all logits, those
of classes to come included. The replayed samples are a batch of their own for batch norm.

Buzzega, Boschini, Porrello, Abati and Calderara (2020). Dark Experience for General Continual
Learning: a Strong, Simple Baseline. NeurIPS.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from pecil.methods.er import ER


class DER(ER):
    """Replay that holds the network to what it said before (Buzzega et al. 2020).

    Departure of the authors' released code, which ``augment_replayed=False`` undoes: replayed
    colour pictures are cropped at random (and mirrored, if ``flip``), whether those of the stream
    are or not; the logits are those of the stream's view.

    Parameters
    ----------
    n_classes, input_shape, **given
        As in `pecil.methods.trained.Trained`.
    buffer : int
        The samples that may be kept.
    alpha : float
        α, the weight of the distance to the logits kept.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(2, dtype=np.float32).repeat(50, axis=0), np.arange(2).repeat(50)
    >>> learner = DER(n_classes=3, input_shape=(2,), buffer=10, alpha=1.0, lr=0.01)
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
        alpha: float = 1.0,
        **given: Any,
    ) -> None:
        super().__init__(n_classes, input_shape, buffer=buffer, **given)
        self.alpha = alpha

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of new samples and the rehearsal of old ones."""
        old = self.buffer.draw(len(raw))
        if old:
            logits, again = self.apart(raw, old["x"])
            loss = self.cross_entropy(logits, labels) + self.rehearsal(again, old)
        else:
            logits = self.network(self.view(raw))
            loss = self.cross_entropy(logits, labels)
        self.buffer.add(x=raw, y=labels, z=logits)  # DER itself needs no labels
        return loss

    def rehearsal(self, logits: Tensor, old: Mapping[str, Tensor]) -> Tensor:
        """Return how far the network is from what it said of old samples."""
        return self.alpha * F.mse_loss(logits, old["z"])


class DERpp(DER):
    """DER, with the labels of the same replayed samples as well (Buzzega et al. 2020).

    Departures: those of `DER`; and one draw from the buffer serves both terms, where the
    method's paper draws twice.

    Parameters
    ----------
    n_classes, input_shape, **given
        As in `pecil.methods.trained.Trained`.
    buffer : int
        The samples that may be kept.
    alpha, beta : float
        α and β, the weights of the distance to the logits kept, and of the labels kept.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(2, dtype=np.float32).repeat(50, axis=0), np.arange(2).repeat(50)
    >>> learner = DERpp(n_classes=3, input_shape=(2,), buffer=10, alpha=0.5, beta=0.5, lr=0.01)
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
        alpha: float = 1.0,
        beta: float = 1.0,
        **given: Any,
    ) -> None:
        super().__init__(n_classes, input_shape, buffer=buffer, alpha=alpha, **given)
        self.beta = beta

    def rehearsal(self, logits: Tensor, old: Mapping[str, Tensor]) -> Tensor:
        """Return how far the network is from what it said of old samples, and from their labels."""
        return super().rehearsal(logits, old) + self.beta * F.cross_entropy(logits, old["y"])
