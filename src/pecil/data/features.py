"""Features of a frozen network: from images to vectors, in blocks, kept on disk.

`Features` puts a pre-trained network in front of any classifier; `StreamPipeline` lets
the two learn from a stream together.
"""

import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.pipeline import Pipeline
from torch import Tensor
from torch.nn import Module

from pecil.data.files import needed, progress, read_npz
from pecil.files import written_whole
from pecil.pec.base import count
from pecil.pec.inputs import Raw, check_samples, check_statistics, to_tensor
from pecil.pec.machine import device_named
from pecil.pec.teacher import fitting

FORMAT = b"pecil features 1"  # to be changed when the same settings give other features
TIMM = "timm:"
PROBED = 16  # outputs that tell networks of equal weights apart
LUMA = (0.299, 0.587, 0.114)  # brightness of red, green and blue


class Features(TransformerMixin, BaseEstimator):
    """The outputs of a frozen network, as a scikit-learn transformer.

    Images of any size, grey or colour, are resized on the device (bilinear, antialiased, to
    `size` whatever their proportions), normalised, and given to the network in batches. It
    needs no fitting and learns nothing.

    Parameters
    ----------
    network : torch.nn.Module or str
        Maps images (n, c, h, w) to features, (n, d) or (n, d, h, w); the latter are averaged
        over h and w. "timm:NAME" is a pre-trained model of timm without its last layer
        (``pip install "pecil[timm]"``); any other text is the path of a TorchScript file.
    size : int or (int, int), optional
        Height and width that images are brought to; by default what a timm model says of
        itself, else the images stay as they are.
    mean, std : float or sequence, optional
        Inputs become (x - mean) / std; uint8 is divided by 255 first. By default what a timm
        model says of itself, else nothing.
    in_channels : {1, 3}, optional
        What the network takes; grey images are repeated for 3, colour ones become their
        brightness for 1. By default what a timm model says of itself, else 3.
    channels : {"auto", "first", "last"}
        The channel axis of four-dimensional input.
    batch_size : int
        Images that are in the network at a time.
    block_size : int
        Images whose features are computed, and kept in one file, at a time.
    device : str or torch.device
        "auto": the GPU if there is one. The network is moved there.
    cache : path-like, optional
        A folder, made if need be, where the features of every block are kept. They are found
        again by a hash of the images of the block, the network's weights, its answer to a
        fixed input, and the settings: after an interrupt only what is missing is computed.

    Notes
    -----
    The network is in evaluation mode while it is asked, and is as before afterwards.
    Whatever `X` gives for ``X[start:stop]`` is in memory a block at a time: a memory-mapped
    array or `pecil.data.ImageFiles` may be larger than memory. A list may hold images of
    different sizes.

    Examples
    --------
    >>> import numpy as np
    >>> network = torch.nn.Conv2d(3, 5, 3)  # a pre-trained one in earnest
    >>> photos = np.zeros((10, 40, 30, 3), dtype=np.uint8)
    >>> Features(network, size=16).transform(photos).shape
    (10, 5)
    """

    def __init__(
        self,
        network: Module | str,
        *,
        size: int | Sequence[int] | None = None,
        mean: Any = None,
        std: Any = None,
        in_channels: int | None = None,
        channels: str = "auto",
        batch_size: int = 64,
        block_size: int = 1024,
        device: str | torch.device = "auto",
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        self.network = network
        self.size = size
        self.mean = mean
        self.std = std
        self.in_channels = in_channels
        self.channels = channels
        self.batch_size = batch_size
        self.block_size = block_size
        self.device = device
        self.cache = cache

    def fit(self, X: Any = None, y: Any = None) -> Self:
        """Check the settings and load the network; it learns nothing."""
        self._extractor()
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Return the features of images.

        Parameters
        ----------
        X : array, Tensor, list of arrays, or anything with a length and slices
            n images: (n, h, w), (n, h, w, c) or (n, c, h, w), uint8 or float.

        Returns
        -------
        ndarray of shape (n, d)
        """
        blocks = self.blocks(X)
        first = next(blocks)
        features = np.empty((len(X), first.shape[1]), np.float32)
        starts = range(0, len(X), self.block_size)
        every = progress(chain([first], blocks), len(starts), "features, block")
        for start, block in zip(starts, every, strict=True):
            features[start : start + len(block)] = block
        return features

    def blocks(self, X: Any) -> Iterator[NDArray[np.float32]]:
        """Yield the features block by block, (block_size, d); the last block may be smaller."""
        extractor = self._extractor()
        if len(X) == 0:
            raise ValueError("expected images, found none")
        for start in range(0, len(X), self.block_size):
            yield extractor.features(X[start : start + self.block_size])

    def _extractor(self) -> "_Extractor":
        """Return the network, ready to be asked; one that is named is loaded once."""
        made = getattr(self, "_made", None)
        if made is None or made[0] is not self.network:
            self._made = made = (self.network, _network(self.network))
        return _Extractor(self, made[1])

    def __getstate__(self) -> dict[str, Any]:
        """Leave a network that was loaded by its name out of pickles: its name loads it again."""
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_made"}

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that images are welcome, and fitting is not needed."""
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        return tags


class StreamPipeline(Pipeline):
    """A scikit-learn pipeline that also has ``partial_fit``.

    The steps before the last are used as they are, so they must need no fitting, like
    `Features`, or be fitted; the last one learns.

    Examples
    --------
    >>> import numpy as np
    >>> from pecil import WhitenedPEC
    >>> network = torch.nn.Conv2d(3, 5, 3)
    >>> steps = [("features", Features(network)), ("classifier", WhitenedPEC(teacher="identity"))]
    >>> model = StreamPipeline(steps)
    >>> dark, light = np.zeros((9, 8, 8, 3), np.uint8), np.full((9, 8, 8, 3), 200, np.uint8)
    >>> model = model.partial_fit(dark, ["night"] * 9)
    >>> model = model.partial_fit(light, ["day"] * 9)  # a new class
    >>> model.predict(light[:2])
    array(['day', 'day'], dtype='<U5')
    """

    def partial_fit(self, X: Any, y: Any, **parameters: Any) -> Self:
        """Transform samples by all steps but the last, which goes on learning with them.

        Parameters
        ----------
        X : what the first step takes
        y : array-like of n labels
        **parameters
            For the ``partial_fit`` of the last step, such as scikit-learn's ``classes``.
        """
        for _, step in self.steps[:-1]:
            X = step.transform(X)
        self.steps[-1][1].partial_fit(X, y, **parameters)
        return self


class _Extractor:
    """A network on its device, with settings that were checked."""

    def __init__(self, asked: Features, network: Module) -> None:
        count("batch_size", asked.batch_size)
        count("block_size", asked.block_size)
        says = getattr(network, "pretrained_cfg", None) or {}  # of a timm model
        channels, *size = says.get("input_size", (3,))
        self.in_channels = channels if asked.in_channels is None else asked.in_channels
        if self.in_channels not in (1, 3):
            raise ValueError(f"in_channels must be 1 or 3, but it is {self.in_channels!r}")
        self.size = _size(size or None if asked.size is None else asked.size)
        given = {"mean": asked.mean, "std": asked.std}
        self.mean, self.std = (
            check_statistics(name, says.get(name) if value is None else value, (self.in_channels,))
            for name, value in given.items()
        )
        self.layout, self.batch_size = asked.channels, asked.batch_size
        self.device = device_named(asked.device)
        self.network = network.to(self.device)
        self.cache = None if asked.cache is None else Path(asked.cache).expanduser()
        self._key = b""  # of network and settings, made with the first block

    def features(self, block: Any) -> NDArray[np.float32]:
        """Return the features of a block: those kept, else new ones, which are then kept."""
        images = self._checked(block)
        if self.cache is None:
            return self._computed(images)
        self._key = self._key or self._fingerprint(images[0].shape[-2:])
        name = _digest([self._key], *map(_content, images)).hex()
        path = self.cache / name[:2] / f"{name}.npz"
        found = _found(path, sum(map(len, images)))
        if found is not None:
            return found
        features = self._computed(images)
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as temporary:
            np.savez(temporary, x=features)
        return features

    def _checked(self, block: Any) -> list[Raw]:
        """Return one array (n, c, h, w), or many of one image for a list."""
        parts = [block]
        if isinstance(block, list | tuple):
            parts = [x[None] if isinstance(x, Tensor) else np.asarray(x)[None] for x in block]
        for part in parts:
            if part.ndim < 3:
                raise ValueError(
                    "expected images of shape (n, h, w), (n, h, w, c) or (n, c, h, w), found shape "
                    f"{tuple(part.shape)}"
                )
            if part is block and part.ndim == 3 and part.shape[2] in (3, 4):
                raise ValueError(
                    "expected images of shape (n, h, w, c), found what looks like a single one, of "
                    f"shape {tuple(part.shape)}: give it as x[None]"
                )
        unknown = SimpleNamespace()  # takes note of the shape, which may differ from the last
        return [check_samples(unknown, p, reset=True, layout=self.layout) for p in parts]

    def _computed(self, images: list[Raw]) -> NDArray[np.float32]:
        with _evaluating(self.network), torch.no_grad():
            answers = [self._ask(batch).cpu().numpy() for batch in self._batches(images)]
        return np.concatenate(answers)

    def _batches(self, images: list[Raw]) -> Iterator[Tensor]:
        """Yield what the network takes, some images at a time."""
        if len(images) == 1:
            for start in range(0, len(images[0]), self.batch_size):
                yield self._prepared(images[0][start : start + self.batch_size])
            return
        for start in range(0, len(images), self.batch_size):
            batch = [self._prepared(image) for image in images[start : start + self.batch_size]]
            shapes = sorted({tuple(image.shape[2:]) for image in batch})
            if len(shapes) > 1:
                raise ValueError(f"size must be given for images of different sizes: {shapes}")
            yield torch.cat(batch)

    def _prepared(self, raw: Raw) -> Tensor:
        """Return images with the right channels, resized and normalised."""
        x = to_tensor(raw, self.device, None, None)
        if x.shape[1] not in (1, 3):
            raise ValueError(f"expected images with 1 or 3 channels, found {x.shape[1]}")
        if x.shape[1] > self.in_channels:
            x = (x * x.new_tensor(LUMA).view(3, 1, 1)).sum(1, keepdim=True)
        x = x.expand(-1, self.in_channels, -1, -1)
        if self.size is not None and tuple(x.shape[2:]) != self.size:
            x = F.interpolate(x, self.size, mode="bilinear", antialias=True)
        return to_tensor(x, self.device, self.mean, self.std)

    def _ask(self, x: Tensor) -> Tensor:
        """Return the network's features of images, (n, d)."""
        kinds = (p.dtype for p in self.network.parameters() if p.is_floating_point())
        with fitting(f"images of shape {tuple(x.shape[1:])}", "size= and in_channels= change it"):
            answer = self.network(x.to(next(kinds, torch.float32)))
        shape = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        if not isinstance(answer, Tensor) or answer.ndim not in (2, 4) or len(answer) != len(x):
            raise ValueError(
                f"expected the network to map {len(x)} images to a tensor of shape ({len(x)}, d) "
                f"or ({len(x)}, d, h, w), got {shape}"
            )
        features = answer.float() if answer.ndim == 2 else answer.float().mean((2, 3))
        if not bool(torch.isfinite(features).all()):
            raise ValueError("the network returned NaN or infinite features")
        return features

    def _fingerprint(self, shape: Sequence[int]) -> bytes:
        """Return a hash of all that features depend on beside the images."""
        chance = torch.Generator().manual_seed(0)
        probe = torch.rand(2, self.in_channels, *(self.size or shape), generator=chance)
        with _evaluating(self.network), torch.no_grad():
            answer = self._ask(probe.to(self.device)).flatten().tolist()
        some = [f"{value:.3g}" for value in answer[:: max(1, len(answer) // PROBED)]]
        numbers = [None if v is None else v.tolist() for v in (self.mean, self.std)]
        text = repr((some, self.in_channels, self.size, numbers, repr(self.network)))
        weights = sorted(self.network.state_dict().items())
        named = (chain([n.encode()], _content(w)) for n, w in weights if isinstance(w, Tensor))
        return _digest([FORMAT, text.encode()], *named)


@contextmanager
def _evaluating(network: Module) -> Iterator[None]:
    """Put all parts of a network into evaluation mode; in the end they are as before."""
    modes = [(part, part.training) for part in network.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


def _content(values: Any) -> Iterator[Any]:
    """Yield the type, the shape and the bytes of an array or a tensor."""
    array = values
    if isinstance(values, Tensor):
        array = values.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    yield f"{values.dtype} {tuple(values.shape)}".removeprefix("torch.").encode()
    yield np.ascontiguousarray(array)


def _digest(*parts: Iterable[Any]) -> bytes:
    digest = hashlib.sha256()
    for part in chain.from_iterable(parts):
        digest.update(part)
    return digest.digest()


def _found(path: Path, n: int) -> NDArray[np.float32] | None:
    """Return the features of n images from a file; None if it is not there or damaged."""
    if not path.is_file():
        return None
    try:
        features = read_npz(path, labelled=False)["train_x"]
        if len(features) != n:
            raise ValueError(f"{path}: expected the features of {n} images, found {len(features)}")
    except ValueError as error:
        warnings.warn(f"{error}; its features are computed again", stacklevel=2)
        return None
    return features


def _network(asked: Module | str) -> Module:
    """Return the network, or make the one that is named."""
    if isinstance(asked, Module):
        return asked
    if not isinstance(asked, str):
        raise ValueError(
            f"network must be a torch.nn.Module, {TIMM}NAME or the path of a TorchScript file, "
            f"but it is {asked!r}"
        )
    if asked.startswith(TIMM):
        return _from_timm(asked.removeprefix(TIMM))
    return _from_file(Path(asked).expanduser())


def _from_timm(name: str) -> Module:
    timm = needed("timm", "timm")
    try:
        return timm.create_model(name, pretrained=True, num_classes=0)
    except RuntimeError as error:
        raise ValueError(f"timm cannot make {name!r}: {error}") from error


def _from_file(path: Path) -> Module:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no network {str(path)!r}: expected {TIMM}NAME or the path of a TorchScript "
            "file"
        )
    try:
        with warnings.catch_warnings():  # it is deprecated; its successor unpickles
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(path, map_location="cpu")
    except RuntimeError as error:
        raise ValueError(
            f"{path} is damaged or no TorchScript file (torch.jit.trace makes one): "
            f"{str(error).splitlines()[0]}"
        ) from error


def _size(size: Any) -> tuple[int, int] | None:
    """Return height and width."""
    if size is None:
        return None
    both = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(both) != 2:
        raise ValueError(f"size must be one number, or height and width, but it is {size!r}")
    for side in both:
        count("size", side)
    return both
