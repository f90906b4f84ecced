"""The networks that the paper's methods train: a perceptron, and ResNet18 for small pictures."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INITS = ("xavier", "kaiming")  # of a perceptron's initial values
STAGES = ((1, 1), (2, 2), (4, 2), (8, 2))  # width of a stage as a multiple, stride of its entry
BLOCKS = 2  # in a stage


class Network(nn.Module):
    """A body that makes features of inputs, and a linear head with an output for each class.

    Parameters
    ----------
    body : torch.nn.Module
    head : torch.nn.Linear
    """

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (n, outputs)."""
        logits: Tensor = self.head(self.body(x))
        return logits


def network_for(
    input_shape: Sequence[int],
    n_outputs: int,
    *,
    hidden: Sequence[int] = (100, 100),
    width: int = 64,
    init: str = "xavier",
    generator: torch.Generator,
) -> Network:
    """Make the paper's network: a perceptron for vectors and grey pictures, else ResNet18.

    Parameters
    ----------
    input_shape : sequence of int
        (features,), (height, width) or (height, width, channels).
    n_outputs : int
    hidden : sequence of int
        Widths of the perceptron's hidden layers.
    width : int
        Channels of ResNet18's first stage: 64, or 20 for the narrow one.
    init : {"xavier", "kaiming"}
        The perceptron's initial values, "kaiming" being PyTorch's default.
    generator : torch.Generator
        On the CPU; decides all initial values.

    Examples
    --------
    >>> count = lambda net: sum(p.numel() for p in net.parameters())
    >>> chance = torch.Generator().manual_seed(0)
    >>> count(network_for((28, 28), 10, generator=chance))
    89610
    >>> count(network_for((32, 32, 3), 10, generator=chance))
    11173962
    """
    if len(input_shape) < 3:
        widths = [math.prod(input_shape), *hidden, n_outputs]
        return perceptron(widths, generator, init)
    return resnet18(input_shape[2], n_outputs, width, generator)


def perceptron(widths: Sequence[int], generator: torch.Generator, init: str = "xavier") -> Network:
    """Stack linear layers and ReLU: Xavier-uniform weights and zero biases, or PyTorch's values."""
    layers: list[nn.Module] = []
    for n_in, n_out in zip(widths, widths[1:], strict=False):
        layers += [linear_layer(n_in, n_out, generator, init), nn.ReLU()]
    *body, head, _ = layers
    assert isinstance(head, nn.Linear)
    return Network(nn.Sequential(*body), head)


def linear_layer(n_in: int, n_out: int, generator: torch.Generator, init: str) -> nn.Linear:
    """Draw a linear layer, "xavier" or "kaiming" as in `network_for`."""
    layer: nn.Linear = nn.Linear(n_in, n_out, device="meta").to_empty(device="cpu")
    if init == "kaiming":
        draw(layer, generator)
    else:
        nn.init.xavier_uniform_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
    return layer


def resnet18(channels: int, n_outputs: int, width: int, generator: torch.Generator) -> Network:
    """Make the ResNet18 of He et al. (2016) for small pictures.

    Its stem is one 3×3 convolution of stride 1 without pooling; inputs are (n, channels, h, w).
    PyTorch's default initial values.
    """
    with torch.device("meta"):
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
        n_in = width
        for times, stride in STAGES:
            for block in range(BLOCKS):
                layers.append(_Block(n_in, times * width, 1 if block else stride))
                n_in = times * width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        network = Network(nn.Sequential(*layers), nn.Linear(n_in, n_outputs))
    draw(network.to_empty(device="cpu"), generator)
    for values in network.parameters():
        if values.ndim == 4:  # as pictures of bytes come, and as products on a GPU want them
            values.data = values.data.contiguous(memory_format=torch.channels_last)
    return network


def draw(module: nn.Module, generator: torch.Generator) -> None:
    """Give all layers PyTorch's default initial values, out of a generator on the CPU."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            bound = 1 / math.sqrt(layer.weight[0].numel())
            for values in layer.parameters():
                nn.init.uniform_(values, -bound, bound, generator=generator)
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.InstanceNorm2d | nn.LayerNorm):
            layer.reset_parameters()


class _Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, 1×1 where the shape changes."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.first = _normalised(nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False))
        self.second = _normalised(nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False))
        self.shortcut = (
            nn.Identity()
            if (n_in, stride) == (n_out, 1)
            else _normalised(nn.Conv2d(n_in, n_out, 1, stride, bias=False))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def _normalised(conv: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(conv, nn.BatchNorm2d(conv.out_channels))
