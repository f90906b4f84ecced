"""Fine-tuning: one network, trained on the stream as it comes.

McCloskey and Cohen (1989): what it learned about earlier classes is overwritten
as soon as they stop coming. The lower end of every class-incremental benchmark.

    loss(x, y) = -log softmax(f(x))_y    over all classes, those to come included
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pecil.methods.learner import Array, Inputs

SCHEDULES = ("linear", "constant")


class FineTuning:
    """A multilayer perceptron with ReLU, trained by cross-entropy; forgets.

    Adam starts anew with every task (McCloskey and Cohen 1989 had plain gradient descent). The
    softmax has all classes from the start, as in the PEC paper; a class never seen is never
    predicted.

    Departures from the PEC paper: the linear schedule counts samples where the paper counts
    batches, which differs by less than one batch a task.

    Parameters
    ----------
    n_classes : int
        Outputs of the network.
    input_shape : tuple of int
        Shape of one sample: vectors, or grey pictures.
    hidden : sequence of int
        Widths of the hidden layers.
    lr : float
        Learning rate of Adam.
    schedule : {"linear", "constant"}
        Whether the learning rate falls to zero within each task.
    mean, std : float or sequence of float, optional
        Inputs become (x - mean) / std.
    seed : int
        Decides the initial weights.
    device : str
        "auto", "cpu", "cuda", ...

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(2, dtype=np.float32).repeat(50, axis=0), np.arange(2).repeat(50)
    >>> learner = FineTuning(n_classes=3, input_shape=(2,), lr=0.01)
    >>> for label in (0, 1):
    ...     learner.begin_task({label: 1000})
    ...     for _ in range(20):
    ...         learner.learn(x[y == label], y[y == label])
    ...     learner.end_task()
    >>> learner.scores(x).argmax(axis=1).tolist() == [1] * 100  # class 0 is forgotten
    True
    """

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        hidden: Sequence[int] = (100, 100),
        lr: float = 0.001,
        schedule: str = "constant",
        mean: Any = None,
        std: Any = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        if not supports(input_shape):
            raise ValueError(
                "expected vectors, (features,), or grey pictures, (height, width), for which there "
                f"is a network; got samples of shape {tuple(input_shape)}"
            )
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
        self.lr, self.schedule = lr, schedule
        self.inputs = Inputs(device, mean, std)
        self.seen = torch.zeros(n_classes, dtype=torch.bool, device=self.device)
        generator = torch.Generator().manual_seed(seed)
        widths = [self.inputs.n_features(input_shape), *hidden, n_classes]
        self.network = _perceptron(widths, generator).to(self.device)
        self.begin_task({})

    @property
    def device(self) -> torch.device:
        """Where the learner computes."""
        return torch.device(self.inputs.device)

    @property
    def n_parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(p.numel() for p in self.network.parameters())

    def begin_task(self, counts: Mapping[int, int]) -> None:
        """Start Adam and its schedule anew."""
        self.expected, self.done = sum(counts.values()), 0
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=self.lr, fused=True)

    def learn(self, x: Array, y: Array) -> None:
        """Take one step on a batch."""
        labels = torch.as_tensor(y, device=self.device)
        self.seen[labels] = True
        if self.schedule == "linear":
            left = max(0.0, 1 - self.done / max(1, self.expected))
            self.optimizer.param_groups[0]["lr"] = self.lr * left
        self.done += len(x)
        self.optimizer.zero_grad()
        torch.autograd.backward(self.loss(self.inputs(x), labels))
        self.optimizer.step()

    def end_task(self) -> None:
        """Do nothing: nothing is kept."""

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of -log softmax(f(x))_y."""
        return F.cross_entropy(self.network(inputs), labels)

    @torch.no_grad()
    def scores(self, x: Array) -> Array:
        """Return the logits, (n, n_classes)."""
        logits: Tensor = self.network(self.inputs(x))
        return logits.masked_fill(~self.seen, -torch.inf).cpu().numpy()


def supports(input_shape: Sequence[int]) -> bool:
    """Say whether there is a network for samples of this shape."""
    return len(input_shape) < 3


def _perceptron(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Stack linear layers and ReLU: Xavier-uniform weights, zero biases."""
    layers: list[nn.Module] = []
    for n_in, n_out in zip(widths, widths[1:], strict=False):
        linear = nn.Linear(n_in, n_out, device="meta").to_empty(device="cpu")
        nn.init.xavier_uniform_(linear.weight, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
