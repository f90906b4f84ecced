"""CIFAR-100 as features: what a small network makes of it that has learned CIFAR-10.

Five 3×3 convolutions with 16, 32, 64, 128 and 256 channels, all but the first of stride 2, batch
norm and ReLU between them: 1,024 features of a picture. They learn on CIFAR-10, below two hidden
layers of 2,000 neurons that are then left out, by 100 passes of Adam: learning rate 0.0001, batches
of 256 pictures, cropped and mirrored at random.

Van de Ven, Li and Tolias (2021). Class-Incremental Learning with Generative Classifiers. CVPR
Workshops. They crop beyond the border from its mirror image; we, as everywhere here, from black.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pecil.data.features import Features
from pecil.data.files import Arrays, progress
from pecil.data.registry import Dataset
from pecil.files import read_tensors, write_tensors
from pecil.methods.networks import Network, draw
from pecil.methods.trained import WEIGHTS, Trained

CHANNELS, STRIDES = (3, 16, 32, 64, 128, 256), (1, 2, 2, 2, 2)
FEATURES, HIDDEN = 1024, 2000
PASSES, BATCH, RATE = 100, 256, 0.0001


def features_of(
    cifar100: Dataset,
    cifar10: Dataset,
    *,
    seed: int = 0,
    passes: int = PASSES,
    weights: Path | None = None,
    device: str = "auto",
) -> Arrays:
    """Pre-train the network on one dataset, and return its features of the other.

    Parameters
    ----------
    cifar100 : Dataset
        Of which features are wanted.
    cifar10 : Dataset
        From whose training part the network learns; pictures of 32×32 in colour, as the others.
    seed : int
        Decides initial values, order and crops.
    passes : int
        Over the samples of CIFAR-10, the last, partial batch of each left out.
    weights : path-like, optional
        A file of the network's convolutions: if it is there they are taken from it, else trained
        and kept in it. On another machine training gives other last digits; the file does not.
    device : str
        "auto", "cpu", "cuda", ...

    Returns
    -------
    dict
        train_x, train_y, test_x, test_y and a note, which tells the weights by their SHA-256.
    """
    learner = Pretraining(
        len(np.unique(cifar10.train_y)),
        cifar10.train_x.shape[1:],
        lr=RATE,
        batch_size=BATCH,
        augment=True,
        flip=True,
        mean=cifar10.mean,
        std=cifar10.std,
        seed=seed,
        device=device,
    )
    convolutions = learner.network.body.get_submodule("0")
    if weights is not None and weights.is_file():
        tensors, about = read_tensors(weights.read_bytes())
        convolutions.load_state_dict(tensors)
        how = about["how"]
    else:
        how = f"{cifar10.name}, {passes} passes, seed {seed}"
        _pretrain(learner, cifar10, passes, seed)
        if weights is not None:
            write_tensors(weights, convolutions.state_dict(), {"how": how})
    convolutions.eval()
    features = Features(convolutions, mean=cifar100.mean, std=cifar100.std, device=device)
    return {
        "train_x": features.transform(cifar100.train_x),
        "train_y": cifar100.train_y,
        "test_x": features.transform(cifar100.test_x),
        "test_y": cifar100.test_y,
        "note": f"features of a network trained on {how}, SHA-256 {_digest(convolutions)}",
    }


def _pretrain(learner: "Pretraining", data: Dataset, passes: int, seed: int) -> None:
    n = len(data.train_x)
    for epoch in progress(range(passes), passes, f"{data.name}, pass"):
        rows = np.random.default_rng((seed, epoch)).permutation(n)[: max(1, n // BATCH) * BATCH]
        learner.learn(data.train_x[rows], data.train_y[rows])


def _digest(module: nn.Module) -> str:
    """Return the beginning of the SHA-256 of a module's numbers."""
    state = module.state_dict().values()
    content = b"".join(values.cpu().contiguous().numpy().tobytes() for values in state)
    return hashlib.sha256(content).hexdigest()[:16]


class Pretraining(Trained):
    """Trains the convolutions, ``network.body[0]``, below layers that are not needed later."""

    def new_network(self, n_outputs: int, hidden: Sequence[int], width: int) -> Network:
        """Draw the network, with PyTorch's default initial values."""
        with torch.device("meta"):
            layers: list[nn.Module] = []
            for n_in, n_out, stride in zip(CHANNELS, CHANNELS[1:], STRIDES, strict=False):
                layers += [nn.Conv2d(n_in, n_out, 3, stride, 1), nn.BatchNorm2d(n_out), nn.ReLU()]
            body = nn.Sequential(
                nn.Sequential(*layers[:-2], nn.Flatten()),  # the last one as it is
                nn.Linear(FEATURES, HIDDEN),
                nn.ReLU(),
                nn.Linear(HIDDEN, HIDDEN),
                nn.ReLU(),
            )
            network = Network(body, nn.Linear(HIDDEN, n_outputs))
        draw(network.to_empty(device="cpu"), self.generator(WEIGHTS))
        return network.to(self.device)
