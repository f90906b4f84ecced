"""DGR: deep generative replay.

Beside the classifier f learns a generator, here a VAE (`pecil.methods.vae_gc`). With every batch of
the t-th task come as many samples that the generator of the tasks before makes up, x' = g*(z) with
z ~ N(0, I), and for labels what the classifier of the tasks before says of them:

    y' = argmax_{k in O} f*(x')_k                        O the classes before this task
    loss = 1/t L(x, y) + (1 - 1/t) L(x', y')
    L(x, y) = -log softmax(f(x))_y + bound(x)            bound: what the VAE makes smaller

Classifier and generator have no parameter in common: each follows its own term.

Shin, Lee, Kim and Kim (2017). Continual Learning with Deep Generative Replay. NeurIPS.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pecil.methods.learner import Array
from pecil.methods.networks import Network
from pecil.methods.trained import NOISE, SAMPLES, Trained
from pecil.methods.vae_gc import VAE, check_range, is_binary, vae_for


class DGR(Trained):
    """Replay of what a generator makes up (Shin et al. 2017).

    As in van de Ven et al. (2021), with whose setup the paper compares it: the generator is a VAE
    (the article has a GAN), which has the hidden layers of the classifier. *Departure*: that of
    colour pictures is the one of `pecil.methods.vae_gc`, with three plain convolutions of
    ``width`` channels and more, where theirs has the blocks of ResNet18.

    Parameters
    ----------
    n_classes, input_shape, **given
        As in `pecil.methods.trained.Trained`; ``hidden`` and ``width`` are those of the VAE too.
    latent : int
        The length of z.
    binary : bool, optional
        Whether the VAE's inputs are in [0, 1], with a Bernoulli distribution; by default for grey
        pictures as they are (no ``mean``, no ``std``).

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(4, dtype=np.float32).repeat(50, axis=0), np.arange(4).repeat(50)
    >>> learner = DGR(4, (4,), lr=0.01, latent=2, device="cpu")
    >>> for task in (y < 2, y >= 2):
    ...     learner.begin_task({label: 1000 for label in np.unique(y[task]).tolist()})
    ...     for rows in [np.random.default_rng(0).permutation(np.flatnonzero(task))] * 20:
    ...         learner.learn(x[rows], y[rows])
    ...     learner.end_task()
    >>> float((learner.scores(x).argmax(axis=1) == y).mean()) > 0.7
    True
    """

    lasting = False
    former: tuple[Network, VAE] | None = None  # f* and g*
    tasks = 0  # that have ended

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        latent: int = 100,
        binary: bool | None = None,
        **given: Any,
    ) -> None:
        if given.get("labels_trick"):
            raise ValueError("labels_trick: samples made up are of other tasks; expected False")
        self.latent, self.binary = latent, binary
        super().__init__(n_classes, input_shape, **given)

    def new_network(self, n_outputs: int, hidden: Sequence[int], width: int) -> Network:
        """Draw the classifier and the generator."""
        self.noise = self.generator(NOISE)
        self.vae = vae_for(
            self.input_shape,
            hidden=hidden,
            width=width,
            latent=self.latent,
            binary=is_binary(self) if self.binary is None else self.binary,
            generator=self.generator(SAMPLES),
        ).to(self.device)
        return super().new_network(n_outputs, hidden, width)

    def start_optimizer(self) -> None:
        """Make Adam for both."""
        self.optimizer = self.optimizer_of(nn.ModuleList([self.network, self.vae]))

    @property
    def n_parameters(self) -> int:
        """The number of trainable parameters, those of the generator included."""
        return super().n_parameters + sum(p.numel() for p in self.vae.parameters())

    def learn(self, x: Array, y: Array) -> None:
        """Take a step on every batch."""
        if self.vae.binary:
            check_range(self, torch.as_tensor(x, device=self.device))
        super().learn(x, y)

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of new samples and, from the second task on, of those made up."""
        inputs, again = self.view(raw), self.batch_size if self.former else 0
        noise = self.normal(len(inputs) + 2 * again)
        of_new, z, of_old = noise.split((len(inputs), again, again))
        loss = self.of_both(inputs, labels, of_new)
        if self.former is None:
            return loss
        old, named = self.replayed(z, inputs.shape[1:])
        new = 1 / (self.tasks + 1)  # 1/t
        return new * loss + (1 - new) * self.of_both(old, named, of_old)

    def of_both(self, inputs: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Return L, the loss of the classifier and that of the generator."""
        loss = self.cross_entropy(self.network(inputs), labels)
        return loss + self.vae.bound(inputs, noise)

    @torch.no_grad()
    def replayed(self, z: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return samples of a shape and labels, out of the tasks before."""
        assert self.former is not None
        network, vae = self.former
        samples = vae.generated(z).view(-1, *shape)
        return samples, network(samples).masked_fill(~self.old, -torch.inf).argmax(1)

    def normal(self, n: int) -> Tensor:
        """Draw from N(0, I), (n, latent)."""
        return self.chance(lambda: torch.randn(n, self.latent, generator=self.noise))

    def end_task(self) -> None:
        """Remember both as they are."""
        self.former = copy.deepcopy(self.network), copy.deepcopy(self.vae)
        for part in self.former:
            part.eval().requires_grad_(False)
        self.old = self.seen.clone()  # O
        self.tasks += 1
