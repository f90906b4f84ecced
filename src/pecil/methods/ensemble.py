"""Ensemble: a network for every task, with a softmax of its own.

The baseline that Zając, Tuytelaars and van de Ven (2024) set against PEC: does PEC owe its
accuracy to having networks of its own for what comes, or to its rule? Here each task has a
network f_t, trained by cross-entropy over the classes C_t of the task and left alone afterwards.

    train     minimise  -log softmax(f_t(x))_y    over C_t, the classes of the task t
    classify  argmax_c  f_t(x)_c                  over all classes of all tasks

Nothing is forgotten, but no network has seen the classes of another task: what it says of them may
be as high as what it says of its own. With one class a task there is nothing to learn.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pecil.methods.learner import Array
from pecil.methods.networks import Network, draw, network_for
from pecil.methods.trained import WEIGHTS, Trained

NETWORKS = ("full", "small", "pec")
ROOM = 2**28  # floats of a map: PEC's convolution has tens of thousands of channels


class Ensemble(Trained):
    """A network for each task; the highest of all their outputs wins (Zając et al. 2024).

    The paper's code for it is not released, and its text leaves open whether the outputs are
    compared as they are or after each network's softmax. As they are, all three networks
    agree with the paper on MNIST; after the softmax the small ones come out 8 points higher.

    Parameters
    ----------
    n_classes : int
    input_shape : tuple of int
    network : {"full", "small", "pec"}
        Each task's network: the one that fine-tuning has for all classes; the same, so narrow
        that the networks of all tasks have as many parameters as that one; or the network of a
        student of PEC, of one hidden layer, wide enough for as many.
    hidden : sequence of int
        Widths of the perceptron's hidden layers, if it is not made narrow.
    width : int
        Channels of ResNet18's first stage, if it is not made narrow.
    pool : int
        Side of the map to which PEC's convolution is pooled.
    softmax : bool
        Whether networks are compared by log softmax(f_t(x)) instead of f_t(x).
    **given
        lr, schedule, batch_size, augment, flip, mean, std, seed and device, as all methods have
        them: see `pecil.methods.trained.Trained`.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(4, dtype=np.float32).repeat(50, axis=0), np.arange(4).repeat(50)
    >>> learner = Ensemble(n_classes=4, input_shape=(4,), lr=0.01, device="cpu")
    >>> for task in ((0, 1), (2, 3)):
    ...     learner.begin_task({label: 250 for label in task})
    ...     rows = np.random.default_rng(0).permutation(np.flatnonzero(np.isin(y, task)))
    ...     for _ in range(5):
    ...         learner.learn(x[rows], y[rows])
    ...     learner.end_task()
    >>> scores = learner.scores(x)
    >>> bool((scores[y < 2, :2].argmax(axis=1) == y[y < 2]).all())  # the first task is kept
    True
    >>> bool((scores[y > 1, 2:].argmax(axis=1) == y[y > 1] - 2).all())
    True
    """

    may_mask = False
    lasting = False

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        network: str = "full",
        hidden: Sequence[int] = (100, 100),
        width: int = 64,
        pool: int = 5,
        softmax: bool = False,
        **given: Any,
    ) -> None:
        if network not in NETWORKS:
            raise ValueError(f"network must be one of {', '.join(NETWORKS)}, not {network!r}")
        self.kind, self.hidden, self.width, self.pool = network, hidden, width, pool
        self.softmax = softmax
        self.members: list[tuple[list[int], Network]] = []  # by task, with their classes
        super().__init__(n_classes, input_shape, hidden=hidden, width=width, **given)
        self.budget = super().n_parameters  # of one network for all classes
        self.weights = self.generator(WEIGHTS)

    @property
    def n_parameters(self) -> int:
        """The number of trainable parameters, all networks so far together."""
        return sum(_count(network) for _, network in self.members)

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Draw a network for the classes of the task; leave the last one alone."""
        if counts:
            classes = sorted(counts)
            self.network.eval()
            self.network = self.member(len(classes)).to(self.device)
            self.members.append((classes, self.network))
            self.start_optimizer()
            self.places = torch.full((self.n_classes,), -1, device=self.device)
            self.places[classes] = torch.arange(len(classes), device=self.device)
        super().begin_task(counts, passes)

    def member(self, n_outputs: int) -> Network:
        """Draw a network for a task of so many classes."""
        shape = self.input_shape
        if self.kind == "full":
            sizes: dict[str, Any] = {"hidden": self.hidden, "width": self.width}
            return network_for(shape, n_outputs, **sizes, init=self.init, generator=self.weights)
        make = (
            partial(pec_network, shape, n_outputs, self.pool)
            if self.kind == "pec"
            else partial(small_network, shape, n_outputs, len(self.hidden), self.init)
        )
        share = self.budget * n_outputs / self.n_classes
        return make(fitting(share, lambda width: _count(make(width))), self.weights)

    def learn(self, x: Array, y: Array) -> None:
        """Take a step on every batch."""
        classes = self.members[-1][0] if self.members else []
        if strange := sorted(set(np.unique(y).tolist()) - set(classes)):
            raise ValueError(
                f"expected samples of the classes of the task, {classes}, got some of {strange}"
            )
        super().learn(x, y)

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy over the classes of the task."""
        return F.cross_entropy(self.network(self.view(raw)), self.places[labels])

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the outputs of all networks, the higher one for a class of two of them."""
        found = inputs.new_full((len(inputs), self.n_classes), -torch.inf)
        for classes, network in self.members:
            widest = max(values.shape[0] for values in network.parameters())
            parts = inputs.split(max(1, ROOM // (widest * prod(inputs.shape[2:]))))
            outputs = torch.cat([network(part) for part in parts])
            outputs = outputs.log_softmax(1) if self.softmax else outputs
            found[:, classes] = torch.maximum(found[:, classes], outputs)
        return found


def small_network(
    input_shape: Sequence[int],
    n_outputs: int,
    layers: int,
    init: str,
    width: int,
    generator: torch.Generator | None = None,
) -> Network:
    """Make the paper's network with another width: of all hidden layers, or of ResNet18."""
    chance = generator or torch.Generator()
    sizes: dict[str, Any] = {"hidden": (width,) * layers, "width": width}
    return network_for(input_shape, n_outputs, **sizes, init=init, generator=chance)


def pec_network(
    input_shape: Sequence[int],
    n_outputs: int,
    pool: int,
    width: int,
    generator: torch.Generator | None = None,
) -> Network:
    """Make the network of a student of PEC, with an output for each class of a task.

    >>> _count(pec_network((28, 28), 99, 0, 10))
    8959
    >>> _count(pec_network((32, 32, 3), 743, 5, 60))
    1117043
    """
    with torch.device("meta"):
        body: list[nn.Module]
        if len(input_shape) < 3:
            n_features = width
            body = [nn.Linear(prod(input_shape), width), nn.LayerNorm(width), nn.GELU()]
        else:
            n_features = width * pool**2
            body = [nn.Conv2d(input_shape[2], width, 3, padding=1)]
            body += [nn.InstanceNorm2d(width, affine=True), nn.ReLU()]
            body += [nn.AdaptiveAvgPool2d(pool), nn.Flatten()]
        network = Network(nn.Sequential(*body), nn.Linear(n_features, n_outputs))
    draw(network.to_empty(device="cpu"), generator or torch.Generator())
    return network


def fitting(budget: float, count: Callable[[int], int]) -> int:
    """Return the width at which a network has about so many parameters, at least 1.

    Their number is a polynomial of degree 2 of the width, or 1: three small networks tell it.

    >>> fitting(115, lambda width: width**2 + 5)
    10
    >>> fitting(30.0, lambda width: 10 * width + 2)
    3
    """
    first, second, third = (count(width) for width in (1, 2, 3))
    a = (third - 2 * second + first) / 2
    b = second - first - 3 * a
    c = first - a - b - budget
    width = (sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a) if a else -c / b
    return max(1, round(width))


def _count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
