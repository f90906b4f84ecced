"""CIFAR-100 as features: what a small network makes of it that has learned CIFAR-10.

Five 3×3 convolutions with 16, 32, 64, 128 and 256 channels, all but the first of stride 2, batch
norm and ReLU between them: 1,024 features of a picture. They learn on CIFAR-10, below two hidden
layers of 2,000 neurons that are then left out, by 100 passes of Adam: learning rate 0.0001, batches
of 256 pictures, cropped and mirrored at random.

Van de Ven, Li and Tolias (2021). Class-Incremental Learning with Generative Classifiers. CVPR
Workshops. They crop beyond the border from its mirror image; we, as everywhere here, from black.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from pecil.data.features import Features
from pecil.data.files import Arrays, progress
from pecil.data.registry import Dataset
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
    device : str
        "auto", "cpu", "cuda", ...

    Returns
    -------
    dict
        train_x, train_y, test_x, test_y and a note.
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
    n = len(cifar10.train_x)
    for epoch in progress(range(passes), passes, f"{cifar10.name}, pass"):
        rows = np.random.default_rng((seed, epoch)).permutation(n)[: max(1, n // BATCH) * BATCH]
        learner.learn(cifar10.train_x[rows], cifar10.train_y[rows])
    convolutions = learner.network.body.get_submodule("0").eval()
    features = Features(convolutions, mean=cifar100.mean, std=cifar100.std, device=device)
    return {
        "train_x": features.transform(cifar100.train_x),
        "train_y": cifar100.train_y,
        "test_x": features.transform(cifar100.test_x),
        "test_y": cifar100.test_y,
        "note": f"features of a network trained on {cifar10.name}, {passes} passes, seed {seed}",
    }


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
