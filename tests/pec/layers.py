"""Networks of every kind, and the same made of PyTorch's own layers."""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pecil.pec.networks import Architecture, draw

CPU = torch.device("cpu")
NETWORKS = [
    *(
        Architecture("mlp", (7,), 5, 4, hidden_layers=layers, activation=activation)
        for layers in (1, 2)
        for activation in ("gelu", "relu", "identity")
    ),
    *(
        Architecture("conv", (2, 6, 5), 3, 4, pool=2, hidden_layers=layers, activation=activation)
        for layers in (1, 2)
        for activation in ("gelu", "relu", "identity")
    ),
    Architecture("mlp", (1, 3, 2), 5, 4),
    Architecture("conv", (1, 5, 7), 3, 4, pool=3, activation="relu"),
    Architecture("linear", (7,), 1, 4),
    Architecture("linear", (2, 3, 3), 1, 4),
]


def plain(arch, row, x):
    """Run one network, a row (1, row), on samples (n, *input_shape), with PyTorch's layers."""
    p = {name: value[0] for name, value in arch.views(row).items()}
    activate = {"gelu": F.gelu, "relu": F.relu, "identity": lambda a: a}[arch.activation]
    x = x if arch.kind == "conv" else x.flatten(1)
    for k in range(0 if arch.kind == "linear" else arch.hidden_layers):
        weight, bias = p[f"hidden{k}.weight"], p[f"hidden{k}.bias"]
        scale, shift = p[f"norm{k}.weight"], p[f"norm{k}.bias"]
        if arch.kind == "conv":
            x = F.conv2d(x, weight.unflatten(1, (-1, 3, 3)), bias, padding=1)
            x = F.instance_norm(x, weight=scale, bias=shift)
        else:
            x = F.layer_norm(F.linear(x, weight, bias), scale.shape, scale, shift)
        x = activate(x)
    if arch.kind == "conv":
        x = F.adaptive_avg_pool2d(x, arch.pool)
    return F.linear(x.flatten(1), p["out.weight"], p["out.bias"])


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_row(arch, init="kaiming", seed=0):
    return draw(arch, init, torch.Generator().manual_seed(seed))


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel() * tensor.element_size())
        return out
