"""VAE-GC: a generative classifier with a variational autoencoder for every class.

Van de Ven, Li and Tolias (2021): each class has a model of its own samples, learned from them
alone, and the model that finds a sample likeliest names its class. Nothing is shared between
classes, so nothing can be forgotten. The model is a VAE (Kingma and Welling 2014): an encoder
q(z|x) = N(μ(x), diag σ²(x)), a decoder p(x|z) with the mean g(z), and the prior p(z) = N(0, I).
With D inputs, ε ~ N(0, I) and z = μ(x) + σ(x) ε,

    train     minimise  ( -log p(x|z) + KL(q(z|x) ‖ p(z)) ) / D
    classify  argmax_c  log p_c(x),   p(x) ≈ 1/S Σ_s p(x|z_s) p(z_s) / q(z_s|x)
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pecil.methods.learner import Array, resized
from pecil.methods.networks import draw
from pecil.methods.trained import NOISE, SAMPLES, WEIGHTS, Trained

UPDATES = ("released", "batch")
CPU_MOST, GPU_MOST = 2**20, 2**26  # numbers decoded at a time


class VAEGC(Trained):
    """A VAE for each class; the highest likelihood names the class (van de Ven et al. 2021).

    Colour pictures are encoded by three convolutions of stride 2, all else by a perceptron. Each
    VAE has an Adam of its own, which is kept for good. The likelihood p(x|z) is a normal
    distribution of variance 1 when samples are classified, whatever it is in training.

    *Departure of the paper's released code*: its loop over the labels of a batch takes a step for
    each sample instead of each class, all on the same samples of the class, with new noise; the
    schedule goes on once a batch. This is ``updates="released"``, the default;
    ``updates="batch"`` takes the one step that was meant.

    The noise of the importance samples depends on the seed alone: scores are the same whenever
    and in whatever batches they are asked for.

    Parameters
    ----------
    n_classes : int
    input_shape : tuple of int
        (features,), (height, width) or (height, width, channels).
    hidden : sequence of int
        Widths of the perceptron's hidden layers, from x to z; back they come in reverse.
    batch_norm : bool
        Whether these have batch norm, as the convolutions do; steps then take two samples of a
        class or more.
    width : int
        Channels of the first convolution; the next two have twice and four times as many.
    latent : int, optional
        The length of z: by default 10 for the perceptron, 100 for convolutions.
    size : int, optional
        Pictures of bytes are first brought to this height and width.
    binary : bool, optional
        Whether p(x|z) is, in training, a Bernoulli distribution, for inputs in [0, 1], or a
        normal one of variance 1. By default it is for grey pictures as they are (no ``mean``,
        no ``std``).
    updates : {"released", "batch"}
        For each class in a batch as many steps as it has samples there, or one.
    importance_samples : int
        S, of the likelihood; as many of them at a time as memory is set aside for.
    **given
        lr, schedule, batch_size, augment, flip, mean, std, seed and device, as all methods have
        them: see `pecil.methods.trained.Trained`.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(2, dtype=np.float32).repeat(20, axis=0), np.arange(2).repeat(20)
    >>> learner = VAEGC(n_classes=3, input_shape=(2,), lr=0.03, device="cpu")
    >>> for label in (0, 1):
    ...     learner.begin_task({label: 40})
    ...     for _ in range(2):
    ...         learner.learn(x[y == label], y[y == label])
    ...     learner.end_task()
    >>> bool((learner.scores(x).argmax(axis=1) == y).all())  # nothing is forgotten
    True
    """

    may_mask = False

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        hidden: Sequence[int] = (5, 5),
        batch_norm: bool = False,
        width: int = 38,
        latent: int | None = None,
        size: int | None = None,
        binary: bool | None = None,
        updates: str = "released",
        importance_samples: int = 100,
        **given: Any,
    ) -> None:
        if updates not in UPDATES:
            raise ValueError(f"updates must be one of {', '.join(UPDATES)}, not {updates!r}")
        if type(importance_samples) is not int or importance_samples < 1:
            came = repr(importance_samples)
            raise ValueError(f"importance_samples must be a whole number from 1, not {came}")
        self.size, self.updates, self.importance_samples = size, updates, importance_samples
        self.latent = latent or (100 if len(input_shape) == 3 else 10)
        self.binary, self.batch_norm = binary, batch_norm
        shape = tuple(input_shape) if size is None else (size, size, *input_shape[2:])
        super().__init__(n_classes, shape, hidden=hidden, width=width, keep_adam=True, **given)
        self.noise = self.generator(NOISE)

    def new_network(self, n_outputs: int, hidden: Sequence[int], width: int) -> Any:
        """Draw a VAE for each class."""
        chance = self.generator(WEIGHTS)
        if self.binary is None:
            self.binary = is_binary(self)
        self.vaes = [
            vae_for(
                self.input_shape,
                hidden=hidden,
                batch_norm=self.batch_norm,
                width=width,
                latent=self.latent,
                binary=self.binary,
                generator=chance,
            ).to(self.device)
            for _ in range(n_outputs)
        ]
        return nn.ModuleList(self.vaes)

    def view(self, raw: Tensor, augment: bool | None = None) -> Tensor:
        """Return samples as the VAEs take them, resized if asked for."""
        return super().view(raw if self.size is None else resized(raw, self.size), augment)

    # ------------------------------------------------------------------------ learning

    def start_optimizer(self) -> None:
        """Make an Adam for each VAE."""
        self.adams = [self.optimizer_of(vae) for vae in self.vaes]

    def learn(self, x: Array, y: Array) -> None:
        """Take the steps of every batch."""
        raw, labels = torch.as_tensor(x, device=self.device), torch.as_tensor(y)
        if self.binary:
            check_range(self, raw)
        self.seen[labels.to(self.device)] = True
        for some, of in self.batches(raw, labels):
            self.step(some, of)

    def step(self, raw: Tensor, labels: Tensor) -> None:
        """Take steps with the VAE of each class of a batch; the labels are on the CPU."""
        inputs = self.view(raw)
        if self.schedule == "linear":
            self.rate.copy_(self.next_rate())
        classes, counts = labels.unique(return_counts=True)
        for label, count in zip(classes.tolist(), counts.tolist(), strict=True):
            own = inputs if count == len(labels) else inputs[labels == label]
            times = count if self.updates == "released" else 1
            noise = torch.randn(times, count, self.latent, generator=self.noise)
            for epsilon in noise.to(self.device):
                self.recorder((label, count), partial(self.refine, label), own, epsilon)

    def refine(self, label: int, inputs: Tensor, noise: Tensor) -> None:
        """Take one step with the VAE of a class."""
        self.adams[label].zero_grad()
        torch.autograd.backward(self.vaes[label].bound(inputs, noise))
        self.adams[label].step()

    # ------------------------------------------------------------------------- scoring

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the log-likelihoods of inputs, (n, n_classes), -inf for classes never seen."""
        shape = (self.n_classes, self.importance_samples, self.latent)
        noise = torch.randn(shape, generator=self.generator(SAMPLES)).to(self.device)
        most = CPU_MOST if self.device.type == "cpu" else GPU_MOST
        at_a_time = max(1, most // math.prod(self.input_shape))  # decoded
        rows = max(1, at_a_time // self.importance_samples)
        found = inputs.new_full((len(inputs), self.n_classes), -torch.inf)
        for label in self.seen.nonzero().flatten().tolist():
            for part, target in zip(inputs.split(rows), found.split(rows), strict=True):
                own = self.vaes[label].log_likelihood(part, noise[label], at_a_time)
                target[:, label] = own
        return found


class VAE(nn.Module):
    """A variational autoencoder.

    Parameters
    ----------
    encoder : torch.nn.Module
        Makes features of inputs, (n, n_features); μ and log σ² are linear in them, the latter
        without a bias.
    n_features, latent : int
    decoder : torch.nn.Module
        Makes g(z), (n, D), of z, (n, latent); before the sigmoid if ``binary``.
    binary : bool
        Whether inputs are in [0, 1], and g ends in a sigmoid.
    """

    def __init__(
        self, encoder: nn.Module, n_features: int, latent: int, decoder: nn.Module, binary: bool
    ) -> None:
        super().__init__()
        self.encoder, self.decoder, self.binary = encoder, decoder, binary
        self.mean = nn.Linear(n_features, latent)
        self.log_variance = nn.Linear(n_features, latent, bias=False)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ and log σ² of q(z|x), both (n, latent)."""
        features = self.encoder(x)
        return self.mean(features), self.log_variance(features)

    def bound(self, x: Tensor, noise: Tensor) -> Tensor:
        """Return (-log p(x|z) + KL(q(z|x) ‖ p(z))) / D, the mean over samples; constants left out.

        Parameters
        ----------
        x : Tensor
            (n, ...)
        noise : Tensor
            ε, (n, latent).
        """
        mean, log_variance = self.encode(x)
        decoded, wanted = self.decoder(mean + (log_variance / 2).exp() * noise), x.flatten(1)
        error = (
            F.binary_cross_entropy_with_logits(decoded, wanted)
            if self.binary
            else F.mse_loss(decoded, wanted) / 2
        )
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum() / 2
        return error + divergence / wanted.numel()

    def log_likelihood(self, x: Tensor, noise: Tensor, at_a_time: int | None = None) -> Tensor:
        """Return an estimate of log p(x), (n,), for p(x|z) = N(g(z), I).

        Parameters
        ----------
        x : Tensor
            (n, ...)
        noise : Tensor
            ε, (S, latent): S importance samples of each sample.
        at_a_time : int, optional
            Importance samples of each sample that are decoded at a time; by default all.
        """
        mean, log_variance = (values.unsqueeze(1) for values in self.encode(x))
        wanted, weights = x.flatten(1).unsqueeze(1), []
        for some in noise.split(at_a_time or len(noise)):
            z = mean + (log_variance / 2).exp() * some  # (n, s, latent)
            decoded = self.generated(z.flatten(0, 1)).unflatten(0, z.shape[:2])
            errors = decoded.sub_(wanted).square_().sum(2)
            surplus = (some.square() + log_variance - z.square()).sum(2)  # 2 log p(z) / q(z|x)
            weights.append((surplus - errors) / 2)
        every = torch.cat(weights, 1)  # (n, S)
        constant = math.log(every.shape[1]) + math.log(2 * math.pi) * wanted.shape[2] / 2
        return every.logsumexp(1) - constant

    def generated(self, z: Tensor) -> Tensor:
        """Return g(z), (n, D)."""
        decoded: Tensor = self.decoder(z)
        return decoded.sigmoid() if self.binary else decoded


def is_binary(learner: Trained) -> bool:
    """Say whether a learner's inputs are grey pictures as they are, in [0, 1]."""
    return len(learner.input_shape) == 2 and learner.mean is None and learner.std is None


def check_range(learner: Trained, raw: Tensor) -> None:
    """Raise ValueError if inputs that are to be probabilities are not in [0, 1]."""
    plain = learner.mean is None and learner.std is None
    if raw.numel() and not (plain and raw.dtype == torch.uint8):
        low, high = (float(value) for value in learner.view(raw, False).aminmax())
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"a Bernoulli distribution needs inputs from 0 to 1, got {low:.4g} to {high:.4g}: "
                "divide them, or choose binary=False and a mean and std that suit them"
            )


def vae_for(
    shape: Sequence[int],
    *,
    hidden: Sequence[int],
    batch_norm: bool = False,
    width: int,
    latent: int,
    binary: bool,
    generator: torch.Generator,
) -> VAE:
    """Draw a VAE: of convolutions for colour pictures, else a perceptron."""
    with torch.device("meta"):
        vae = (
            conv_vae(shape, width, latent, binary)
            if len(shape) == 3
            else perceptron_vae(math.prod(shape), hidden, latent, binary, batch_norm)
        )
    draw(vae.to_empty(device="cpu"), generator)
    return vae


def perceptron_vae(
    n_inputs: int, hidden: Sequence[int], latent: int, binary: bool, batch_norm: bool = False
) -> VAE:
    """Make a VAE of linear layers and ReLU, with or without batch norm between them.

    >>> sum(p.numel() for p in perceptron_vae(784, (5, 5), 10, True).parameters())
    8854
    """
    down, up = [n_inputs, *hidden], [latent, *reversed(hidden)]
    decoder = nn.Sequential(*_rectified(up, batch_norm), nn.Linear(up[-1], n_inputs))
    encoder = nn.Sequential(*_rectified(down, batch_norm))
    return VAE(encoder, down[-1], latent, decoder, binary)


def conv_vae(shape: Sequence[int], width: int, latent: int, binary: bool) -> VAE:
    """Make a VAE of convolutions for pictures, (height, width, channels).

    Three of stride 2, with batch norm and ReLU between them, lead to z, three transposed ones
    back; what these make beyond the picture's size is cut off.

    >>> sum(p.numel() for p in conv_vae((32, 32, 3), 38, 100, False).parameters())
    1096821
    """
    sides = [-(-side // 8) for side in shape[:2]]
    widths = [shape[2], width, 2 * width, 4 * width]
    down = [nn.Conv2d(*pair, 3, 2, 1) for pair in zip(widths, widths[1:], strict=False)]
    widths.reverse()
    up = [nn.ConvTranspose2d(*pair, 4, 2, 1) for pair in zip(widths, widths[1:], strict=False)]
    n_features = 4 * width * math.prod(sides)
    decoder = nn.Sequential(
        nn.Linear(latent, n_features),
        nn.Unflatten(1, (4 * width, *sides)),
        *_normalised(up),
        _Cut(*shape[:2]),
        nn.Flatten(),
    )
    encoder = nn.Sequential(*_normalised(down), nn.Flatten())
    return VAE(encoder, n_features, latent, decoder, binary)


def _rectified(widths: Sequence[int], batch_norm: bool) -> list[nn.Module]:
    """Return linear layers, each followed by ReLU, batch norm (instead of a bias) before it."""
    layers: list[nn.Module] = []
    for n_in, n_out in zip(widths, widths[1:], strict=False):
        layers.append(nn.Linear(n_in, n_out, bias=not batch_norm))
        layers += [nn.BatchNorm1d(n_out)] if batch_norm else []
        layers.append(nn.ReLU())
    return layers


def _normalised(layers: Iterable[nn.Conv2d | nn.ConvTranspose2d]) -> list[nn.Module]:
    """Put batch norm and ReLU between convolutions."""
    chain: list[nn.Module] = []
    for layer in layers:
        chain += [layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU()]
    return chain[:-2]


class _Cut(nn.Module):
    """Cuts pictures (n, c, h, w) to a height and a width."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : self.height, : self.width]
