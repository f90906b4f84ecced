"""CWR and CWR+: the output weights of a class are copied away when its task ends.

The layers below learn in the first task and stay as they are from then on. For every task the
output layer tw is learned afresh, so that no class has to hold out against new ones; when the task
ends, the weights of its classes are copied to a store cw, and it is cw that names classes:

    scores(x) = cw h(x),   h the layers below
    CWR    tw  <-  new initial values at the beginning;   cw_c <- tw_c             at the end
    CWR+   tw  <-  0                                      cw_c <- tw_c - mean(cw)

for the classes c of the task, with the mean over all weights of the classes so far, theirs
included; biases have a mean of their own.

Lomonaco and Maltoni (2017). CORe50: a New Dataset and Benchmark for Continuous Object Recognition.
CoRL. CWR+: Maltoni and Lomonaco (2019). Continuous learning in single-incremental-task scenarios.
Neural Networks 116.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pecil.methods.networks import Network, linear_layer
from pecil.methods.trained import NOISE, Trained


class CWR(Trained):
    """Output weights learned afresh and copied away, task by task (Lomonaco and Maltoni 2017).

    As in van de Ven et al. (2021), with whose setup the paper compares it. Departures from the
    articles: CWR copies weights as they are, whatever the number of samples of a class; the mean
    of CWR+ is over the classes of all tasks so far instead of the task's own.

    Parameters
    ----------
    n_classes, input_shape, **given
        As in `pecil.methods.trained.Trained`.
    plus : bool
        Whether this is CWR+.
    freeze : bool
        Whether the layers below stay as they are after the first task, batch norm included.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(4, dtype=np.float32).repeat(50, axis=0), np.arange(4).repeat(50)
    >>> learner = CWR(4, (4,), plus=True, lr=0.01, active="seen")
    >>> for task in (y < 2, y >= 2):
    ...     learner.begin_task({label: 500 for label in np.unique(y[task]).tolist()})
    ...     for rows in [np.random.default_rng(0).permutation(np.flatnonzero(task))] * 10:
    ...         learner.learn(x[rows], y[rows])
    ...     learner.end_task()
    >>> bool((learner.scores(x[y < 2])[:, :2].argmax(axis=1) == y[y < 2]).all())
    True
    """

    lasting = False
    frozen = False  # the layers below; from the second task on

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        plus: bool = False,
        freeze: bool = True,
        **given: Any,
    ) -> None:
        self.plus, self.freeze = plus, freeze
        super().__init__(n_classes, input_shape, **given)

    def new_network(self, n_outputs: int, hidden: Sequence[int], width: int) -> Network:
        """Draw a network for the inputs, and make room for the store."""
        network = super().new_network(n_outputs, hidden, width)
        self.heads = self.generator(NOISE)
        self.stored = [torch.zeros_like(values) for values in network.head.parameters()]  # cw
        return network

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Start the output layer afresh."""
        super().begin_task(counts, passes)
        self.network.body.requires_grad_(not self.frozen)
        head = self.network.head  # tw
        if self.plus:
            for values in head.parameters():
                nn.init.zeros_(values)
        else:
            init = self.init if len(self.input_shape) < 3 else "kaiming"
            fresh = linear_layer(head.in_features, head.out_features, self.heads, init)
            head.load_state_dict(fresh.state_dict())

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy; batch norm of frozen layers is in evaluation mode."""
        self.network.body.train(not self.frozen)
        return super().loss(raw, labels)

    def end_task(self) -> None:
        """Copy the weights of the task's classes to the store."""
        super().end_task()
        self.stored = self.consolidated()
        self.frozen = self.freeze

    def consolidated(self) -> list[Tensor]:
        """Return the weights and the biases of cw, were the task to end now."""
        trained = [values.detach() for values in self.network.head.parameters()]
        joined = [cw.clone() for cw in self.stored]
        for cw, tw in zip(joined, trained, strict=True):
            cw[self.current] = tw[self.current]
            if self.plus:
                cw[self.current] -= cw[self.current | self.seen].mean()
        return joined

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the scores of inputs by the store."""
        return F.linear(self.network.body(inputs), *self.consolidated())
