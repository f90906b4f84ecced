"""EWC: elastic weight consolidation.

A parameter that matters for earlier tasks should stay where it is. How much it matters is read
off the diagonal of the Fisher information: the mean square of the slope of log p(y|x) along it,
p = softmax(f(x)), over the samples of a task when the task ends. With θ* the parameters at the
end of the last task,

    loss(x, y) = -log softmax(f(x))_y + λ Σ_j F_j (θ_j - θ*_j)²
    F  <-  γ F + mean over the task's samples of p(y|x) (∂ log p(y|x) / ∂θ)²    at its end.

Kirkpatrick et al. (2017). Overcoming catastrophic forgetting in neural networks. PNAS 114. One
sum F and one θ* for all tasks (online EWC): Schwarz et al. (2018). Progress & Compress. ICML.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from pecil.methods.learner import Array
from pecil.methods.trained import Trained

FISHERS = ("released", "exact")
ANCHORS = ("last", "each")
SLOPES = 2**28  # of single samples that are held at a time
SAMPLES = 4096  # that pass a perceptron at a time
MOMENTUM = 0.1  # of batch norm: the share of the newest sample in its running statistics


class EWC(Trained):
    """Important parameters are held where they were (Kirkpatrick et al. 2017).

    The samples of a task's first pass are held until it ends: they pass by once more, one by one,
    for F.

    Departures of the authors' released code, which are the default. The sum over all labels y in
    F has one term left: that of the sample's own label, still weighted by p(y|x). p is the
    softmax over all classes even if the labels trick trains one over those of the task. Batch
    norm is in training mode: it normalises each sample by its own pixels, and its running
    statistics go on moving. The last batch of a task counts as a full one in the mean. The
    penalty has no factor ½, so that λ is half of the article's. ``fisher="exact"`` sums over all
    labels, p being the softmax that is trained, in evaluation mode, and takes the plain mean.

    The article has a penalty for each task, around the parameters at its end: ``anchors="each"``.
    Such penalties add up to one, but for a constant, around the mean of those parameters, each
    weighted by its task's F; so this is all that has to be kept.

    Parameters
    ----------
    n_classes, input_shape, **given
        As in `pecil.methods.trained.Trained`; ``labels_trick`` makes it EWC + LT.
    lam : float
        λ, the weight of the penalty.
    gamma : float
        γ, the share of F that is left when a task ends.
    fisher : {"released", "exact"}
        Which F.
    fisher_samples : int, optional
        F is the mean over the first so many samples of a task; by default over all.
    anchors : {"last", "each"}
        Whether θ* are the parameters at the end of the last task, or of each task for its own F.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(4, dtype=np.float32).repeat(50, axis=0), np.arange(4).repeat(50)
    >>> learner = EWC(4, (4,), lam=1000.0, labels_trick=True, lr=0.01)
    >>> for task in (y < 2, y >= 2):
    ...     learner.begin_task({label: 500 for label in np.unique(y[task]).tolist()})
    ...     for rows in [np.random.default_rng(0).permutation(np.flatnonzero(task))] * 10:
    ...         learner.learn(x[rows], y[rows])
    ...     learner.end_task()
    >>> learner.importance.shape, bool((learner.importance >= 0).all())
    (torch.Size([11004]), True)
    """

    lasting = False
    anchor: Tensor | None = None  # θ*; nothing is held before the first task has ended

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        lam: float = 100.0,
        gamma: float = 1.0,
        fisher: str = "released",
        fisher_samples: int | None = None,
        anchors: str = "last",
        **given: Any,
    ) -> None:
        for name, asked, choice in (("fisher", fisher, FISHERS), ("anchors", anchors, ANCHORS)):
            if asked not in choice:
                raise ValueError(f"{name} must be one of {', '.join(choice)}, not {asked!r}")
        super().__init__(n_classes, input_shape, **given)
        self.lam, self.gamma, self.exact = lam, gamma, fisher == "exact"
        self.fisher_samples, self.anchors = fisher_samples, anchors
        self.importance = torch.zeros(self.n_parameters, device=self.device)  # F

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Start Adam anew and hold samples from now on."""
        super().begin_task(counts, passes)
        self.held: list[tuple[Tensor, Tensor]] = []

    def learn(self, x: Array, y: Array) -> None:
        """Take a step on every batch; hold what is needed at the end of the task."""
        super().learn(x, y)
        held = sum(len(labels) for _, labels in self.held)
        first = self.of_first_pass(held, len(y))
        if self.fisher_samples is not None:
            first = min(first, max(0, self.fisher_samples - held))
        raw, labels = (torch.tensor(part[:first], device=self.device) for part in (x, y))
        self.held.append((raw, labels))

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy and the penalty."""
        loss = super().loss(raw, labels)
        if self.anchor is None:
            return loss
        moved = flat(self.network.parameters()) - self.anchor
        return loss + self.lam * ((self.importance * moved) @ moved)

    def end_task(self) -> None:
        """Add the task's Fisher information; hold the parameters where they are now."""
        now = flat(self.network.parameters()).detach()
        self.importance *= self.gamma
        if self.held:
            raw, labels = (torch.cat(parts) for parts in zip(*self.held, strict=True))
            of_task = self.information(raw, labels)
            self.importance += of_task
            if self.anchors == "each" and self.anchor is not None:
                share = torch.where(of_task > 0, of_task / self.importance, 0)
                now = self.anchor + share * (now - self.anchor)
        self.anchor = now
        self.held = []

    # ------------------------------------------------------------------ Fisher information

    def information(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of p(y|x) (∂ log p(y|x) / ∂θ)² over samples, as one vector."""
        linear = len(self.input_shape) < 3  # a perceptron
        squares = self._by_layer if linear else self._by_sample
        size = SAMPLES if linear else max(1, SLOPES // self.n_parameters)
        total = torch.zeros_like(self.importance)
        classes = self.competing().nonzero().flatten().tolist() if self.exact else []

        def add(some: Tensor, own: Tensor) -> None:
            inputs = self.view(some)
            total.add_(squares(inputs, [torch.full_like(own, label) for label in classes] or [own]))

        self.network.train(not self.exact)
        for some, own in zip(raw.split(size), labels.split(size), strict=True):
            self.recorder(("information", len(some)), add, some, own)
        self.network.train()
        full = -(-len(raw) // self.batch_size) * self.batch_size
        return total / (len(raw) if self.exact else full)

    def log_likelihood(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log p(y|x) for each sample."""
        if self.exact:
            logits = self.masked(logits)
        return -F.cross_entropy(logits, labels, reduction="none")

    def _by_layer(self, inputs: Tensor, labels: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares for a perceptron.

        In a linear layer that makes b of a, the slopes of one sample are those of b times a,
        δ aᵀ. So the sum of their squares is a product of two matrices: of all δ² and all a².
        """
        passed: list[tuple[Tensor, Tensor]] = []  # a and b of every linear layer
        for layer in (*self.network.body.children(), self.network.head):
            before, inputs = inputs, layer(inputs)
            if isinstance(layer, nn.Linear):
                passed.append((before, inputs))
        outputs = [after for _, after in passed]
        weighted = [torch.zeros_like(after) for after in outputs]
        for y in labels:
            values = self.log_likelihood(inputs, y)
            slopes = torch.autograd.grad(values.sum(), outputs, retain_graph=True)
            for sum_, slope in zip(weighted, slopes, strict=True):
                sum_ += values.detach().exp().unsqueeze(1) * slope.square()
        squares: list[Tensor] = []
        for (before, _), of_outputs in zip(passed, weighted, strict=True):
            squares += [of_outputs.T @ before.detach().square(), of_outputs.sum(0)]
        return flat(squares)

    def _by_sample(self, inputs: Tensor, labels: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares for any network."""
        return torch.stack([self._of_label(inputs, y) for y in labels]).sum(0)

    def _of_label(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of squares for any network, its samples one by one but side by side.

        Each sample meets batch norm alone. In training mode its running statistics r become
        (1 - m) r + m s of a sample with the statistics s; every sample starts from r = 0 here,
        and what is left of each, had they come in turn, is added up.
        """
        n, training = len(inputs), self.network.training
        buffers = dict(self.network.named_buffers())
        each = {
            name: value.new_zeros(n, *value.shape) if training else value.expand(n, *value.shape)
            for name, value in buffers.items()
        }

        def likelihood(
            parameters: dict[str, Tensor], state: dict[str, Tensor], x: Tensor, label: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            logits = functional_call(self.network, (parameters, state), (x.unsqueeze(0),))
            return self.log_likelihood(logits, label.unsqueeze(0))[0], state

        parameters = {name: value.detach() for name, value in self.network.named_parameters()}
        slopes, (values, states) = vmap(
            grad_and_value(likelihood, has_aux=True), in_dims=(None, 0, 0, 0)
        )(parameters, each, inputs, labels)
        if training:
            left = (1 - MOMENTUM) ** torch.arange(n - 1, -1, -1, device=inputs.device)
            for name, value in buffers.items():
                if value.is_floating_point():
                    value.mul_((1 - MOMENTUM) ** n).add_(torch.tensordot(left, states[name], 1))
                else:
                    value.add_(n)  # batches that came
        weights = values.exp()
        return flat([torch.tensordot(weights, slope.square_(), 1) for slope in slopes.values()])


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return the numbers of tensors, whatever their layout in memory, as one vector.

    Examples
    --------
    >>> flat([torch.eye(2), torch.tensor([2.0])])
    tensor([1., 0., 0., 1., 2.])
    """
    return torch.cat([values.flatten() for values in tensors])
