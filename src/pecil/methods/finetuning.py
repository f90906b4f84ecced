"""Fine-tuning: one network, trained on the stream as it comes.

McCloskey and Cohen (1989): what it learned about earlier classes is overwritten
as soon as they stop coming. The lower end of every class-incremental benchmark.

    loss(x, y) = -log softmax(f(x))_y    over the classes seen so far
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pecil.methods.learner import Array


class FineTuning:
    """A multilayer perceptron with ReLU, trained by cross-entropy; forgets.

    Adam starts anew with every task. Classes not seen yet take no part in the
    softmax and are never predicted.

    Parameters
    ----------
    n_classes : int
        Outputs of the network.
    input_shape : tuple of int
        Shape of one sample, channels last.
    hidden : sequence of int
        Widths of the hidden layers.
    lr : float
        Learning rate of Adam.
    mean, std : sequence of float, optional
        Per channel; inputs become (x - mean) / std.
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
    ...     learner.begin_task({label: 50})
    ...     for _ in range(5):
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
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.lr = lr
        self.mean, self.std = mean, std
        self.seen = torch.zeros(n_classes, dtype=torch.bool, device=self.device)
        generator = torch.Generator().manual_seed(seed)
        widths = [int(np.prod(input_shape)), *hidden, n_classes]
        self.network = _perceptron(widths, generator).to(self.device)
        self.optimizer = self._new_optimizer()

    @property
    def n_parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(p.numel() for p in self.network.parameters())

    def begin_task(self, counts: Mapping[int, int]) -> None:
        """Open the outputs of the task's classes; start Adam anew."""
        self.seen[list(counts)] = True
        self.optimizer = self._new_optimizer()

    def learn(self, x: Array, y: Array) -> None:
        """Take one step on a batch."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self._logits(x), torch.as_tensor(y, device=self.device))
        torch.autograd.backward(loss)
        self.optimizer.step()

    def end_task(self) -> None:
        """Do nothing: nothing is kept."""

    @torch.no_grad()
    def scores(self, x: Array) -> Array:
        """Return the logits, (n, n_classes)."""
        return self._logits(x).cpu().numpy()

    def _logits(self, x: Array) -> Tensor:
        logits: Tensor = self.network(self._prepared(x))
        return logits.masked_fill(~self.seen, -torch.inf)

    def _prepared(self, x: Array) -> Tensor:
        """Bring samples to (n, features): bytes to [0, 1], then normalised."""
        inputs = torch.as_tensor(x, device=self.device)
        inputs = inputs / 255 if inputs.dtype == torch.uint8 else inputs.float()
        if self.mean is not None and self.std is not None:
            inputs = (inputs - inputs.new_tensor(self.mean)) / inputs.new_tensor(self.std)
        return inputs.flatten(1)

    def _new_optimizer(self) -> torch.optim.Adam:
        return torch.optim.Adam(self.network.parameters(), lr=self.lr)


def _perceptron(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Stack linear layers and ReLU: Xavier-uniform weights, zero biases."""
    layers: list[nn.Module] = []
    for n_in, n_out in zip(widths, widths[1:], strict=False):
        linear = nn.Linear(n_in, n_out, device="meta").to_empty(device="cpu")
        nn.init.xavier_uniform_(linear.weight, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
