"""LwF: learning without forgetting.

What the network said of old classes when the last task ended, it should go on saying, of the new
samples: there are no others. With f* the network at the end of the last task, O the classes seen
before this one, and softmax_T(f) = softmax(f / T) over O,

    loss(x, y) = -log softmax(f(x))_y - α Σ_{k in O} softmax_T(f*(x))_k log softmax_T(f(x))_k.

In the first task, and while O has one class only, the second term changes nothing.

Li and Hoiem (2018). Learning without Forgetting. TPAMI 40.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pecil.methods.networks import Network
from pecil.methods.trained import Trained


class LwF(Trained):
    """The network is held to what it said of old classes before (Li and Hoiem 2018).

    As in the authors' released code the second term has no factor T², f* is in evaluation mode,
    and new outputs are not trained alone at first, while the article warms them up. A class that
    comes again is not among the old ones while it does.

    Parameters
    ----------
    n_classes, input_shape, **given
        As in `pecil.methods.trained.Trained`; ``labels_trick`` makes it LwF + LT.
    alpha : float
        α, the weight of the second term.
    temperature : float
        T: above 1, small differences between improbable classes count for more.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(4, dtype=np.float32).repeat(50, axis=0), np.arange(4).repeat(50)
    >>> learner = LwF(4, (4,), alpha=5.0, labels_trick=True, lr=0.01)
    >>> for task in (y < 2, y >= 2):
    ...     learner.begin_task({label: 500 for label in np.unique(y[task]).tolist()})
    ...     for rows in [np.random.default_rng(0).permutation(np.flatnonzero(task))] * 10:
    ...         learner.learn(x[rows], y[rows])
    ...     learner.end_task()
    >>> bool((learner.scores(x[y < 2])[:, :2].argmax(axis=1) == y[y < 2]).all())
    True
    """

    lasting = False
    former: Network | None = None  # f*

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        alpha: float = 5.0,
        temperature: float = 2.0,
        **given: Any,
    ) -> None:
        super().__init__(n_classes, input_shape, **given)
        self.alpha, self.temperature = alpha, temperature

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Start Adam anew; the classes seen until now are the old ones."""
        super().begin_task(counts, passes)
        self.old = (self.seen & ~self.current).nonzero().flatten()  # O

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy and, from the second task on, the distance to f*."""
        inputs = self.view(raw)
        logits = self.network(inputs)
        loss = self.cross_entropy(logits, labels)
        if self.former is None or len(self.old) == 0:
            return loss
        with torch.no_grad():
            wanted = self.softened(self.former(inputs)).softmax(1)
        return loss + self.alpha * F.cross_entropy(self.softened(logits), wanted)

    def softened(self, logits: Tensor) -> Tensor:
        """Return the logits of the old classes, divided by the temperature."""
        return logits.index_select(1, self.old) / self.temperature

    def end_task(self) -> None:
        """Remember the network as it is."""
        self.former = copy.deepcopy(self.network).eval().requires_grad_(False)
