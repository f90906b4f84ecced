"""Every dataset known by name, and where its data comes from."""

import functools
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pecil.data import core50, files, hub
from pecil.data.files import Arrays
from pecil.files import alone, written_whole

Channels = tuple[float, ...] | None


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a dataset before it is loaded.

    Examples
    --------
    >>> from pecil.data import DATASETS
    >>> DATASETS["cifar10"].shape, DATASETS["cifar10"].n_classes
    ((32, 32, 3), 10)
    """

    name: str
    """The name to `load` it by; its file is ``NAME.npz``."""
    title: str
    """The name as it is written in text."""
    shape: tuple[int, ...]
    """The shape of one sample: (h, w), (h, w, c) or (features,)."""
    n_train: int
    n_test: int
    source: str
    """A dataset repository of the Hugging Face hub if `tables` is given, else words."""
    licence: str
    n_classes: int = 10
    """Labels are 0 ... n_classes - 1."""
    mean: Channels = None
    """Per channel, of inputs in [0, 1]; None: inputs stay in [0, 1]."""
    std: Channels = None
    mirror: bool = False
    """Whether the mirror image of a sample is still of its class."""
    pictures: str = ""
    """What kind its pictures are, by the name of the teacher of whitened PEC that is made for
    them: natural, strokes or signs; empty for vectors."""
    note: str = ""
    """What has to be known when its numbers are read."""
    class_names: tuple[str, ...] | None = None
    tables: hub.Tables | None = None
    """Where the samples lie in the hub's repository."""
    how: str = ""
    """How to get it, for a dataset that cannot be downloaded."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """The samples of a dataset, as numpy arrays.

    Images are uint8, (n, h, w) or (n, h, w, c); vectors are (n, features).

    Examples
    --------
    >>> from pecil.data import load
    >>> digits = load("digits")
    >>> digits
    Dataset('digits', train_x=(1442, 8, 8) uint8, test_x=(355, 8, 8) uint8)
    >>> digits.train_x.shape, digits.train_x.dtype, digits.test_y[:5]
    ((1442, 8, 8), dtype('uint8'), array([5, 0, 9, 8, 7]))
    """

    name: str
    train_x: NDArray[Any]
    train_y: NDArray[Any] | Any
    """None where the data has no labels, which `load` allows with ``labelled=False``."""
    test_x: NDArray[Any] | None = None
    """None, like `test_y`, where the data has no test part."""
    test_y: NDArray[Any] | None = None
    """None, too, where the test part has no labels."""
    mean: Channels = None
    std: Channels = None
    class_names: tuple[str, ...] | None = None
    """Names of the labels 0, 1, ...; None where the labels speak for themselves."""
    note: str = ""
    """What this copy of the data says of itself, such as where it comes from."""
    train_files: tuple[str, ...] | None = None
    """Where the samples of an image folder lie in it, such as cat/1.png; else None."""
    test_files: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None
    """The columns of a table, but for the labels; else None."""

    def __repr__(self) -> str:
        """Return the name and what there is, not the samples themselves."""
        parts = {"train_x": self.train_x, "test_x": self.test_x}
        known = (f", {n}={x.shape} {x.dtype}" for n, x in parts.items() if x is not None)
        return f"Dataset({self.name!r}{''.join(known)})"


_DIGITS = "0 1 2 3 4 5 6 7 8 9"
_FASHION = "t-shirt trouser pullover dress coat sandal shirt sneaker bag ankle_boot"
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
    crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
    keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse
    mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
    porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
    snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television
    tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_SVHN_MEAN, _SVHN_STD = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
_CIFAR10_MEAN, _CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615)
_SVHN_LICENCE = "non-commercial use only"
_CIFAR_LICENCE = "none stated; research use, cite Krizhevsky (2009)"

DATASETS: dict[str, DatasetInfo] = {
    info.name: info
    for info in (
        DatasetInfo(
            name="digits",
            title="digits",
            shape=(8, 8),
            n_train=1442,
            n_test=355,
            source="scikit-learn",
            licence="CC BY 4.0",
            pictures="strokes",
            class_names=tuple(_DIGITS.split()),
        ),
        DatasetInfo(
            name="mnist",
            title="MNIST",
            shape=(28, 28),
            n_train=60_000,
            n_test=10_000,
            source="ylecun/mnist",
            licence="MIT, as the hub states it",
            pictures="strokes",
            class_names=tuple(_DIGITS.split()),
            tables=hub.Tables("mnist"),
        ),
        DatasetInfo(
            name="fashion_mnist",
            title="Fashion-MNIST",
            shape=(28, 28),
            n_train=60_000,
            n_test=10_000,
            source="zalando-datasets/fashion_mnist",
            licence="MIT",
            pictures="strokes",
            mirror=True,
            class_names=tuple(_FASHION.split()),
            tables=hub.Tables("fashion_mnist"),
        ),
        DatasetInfo(
            name="svhn",
            title="SVHN",
            shape=(32, 32, 3),
            n_train=73_257,
            n_test=26_032,
            source="ufldl-stanford/svhn",
            licence=_SVHN_LICENCE,
            pictures="signs",
            mean=_SVHN_MEAN,
            std=_SVHN_STD,
            class_names=tuple(_DIGITS.split()),
            tables=hub.Tables("cropped_digits"),
        ),
        DatasetInfo(
            name="balanced_svhn",
            title="Balanced SVHN",
            shape=(32, 32, 3),
            n_train=46_590,
            n_test=15_950,
            source="svhn",
            licence=_SVHN_LICENCE,
            pictures="signs",
            mean=_SVHN_MEAN,
            std=_SVHN_STD,
            note="the first images of each class, as many as the smallest class has",
            class_names=tuple(_DIGITS.split()),
        ),
        DatasetInfo(
            name="cifar10",
            title="CIFAR-10",
            shape=(32, 32, 3),
            n_train=50_000,
            n_test=10_000,
            source="uoft-cs/cifar10",
            licence=_CIFAR_LICENCE,
            pictures="natural",
            mean=_CIFAR10_MEAN,
            std=_CIFAR10_STD,
            mirror=True,
            class_names=tuple(_CIFAR10.split()),
            tables=hub.Tables("plain_text", image="img"),
        ),
        DatasetInfo(
            name="imbalanced_cifar10",
            title="Imbalanced CIFAR-10",
            shape=(32, 32, 3),
            n_train=52_500,
            n_test=10_000,
            source="cifar10",
            licence=_CIFAR_LICENCE,
            pictures="natural",
            mean=_CIFAR10_MEAN,
            std=_CIFAR10_STD,
            mirror=True,
            note="the images of class 0 appear twice, class 1 keeps its first 2,500",
            class_names=tuple(_CIFAR10.split()),
        ),
        DatasetInfo(
            name="cifar100",
            title="CIFAR-100",
            shape=(32, 32, 3),
            n_train=50_000,
            n_test=10_000,
            source="uoft-cs/cifar100",
            licence=_CIFAR_LICENCE,
            pictures="natural",
            n_classes=100,
            mean=(0.5071, 0.4867, 0.4408),
            std=(0.2675, 0.2565, 0.2761),
            mirror=True,
            class_names=tuple(_CIFAR100.split()),
            tables=hub.Tables("cifar100", image="img", label="fine_label"),
        ),
        DatasetInfo(
            name="cifar100_features",
            title="CIFAR-100 features",
            shape=(1024,),
            n_train=50_000,
            n_test=10_000,
            source="cifar100",
            licence=_CIFAR_LICENCE,
            n_classes=100,
            note="features of a small network pre-trained on CIFAR-10",
            class_names=tuple(_CIFAR100.split()),
        ),
        DatasetInfo(
            name="miniimagenet",
            title="miniImageNet",
            shape=(84, 84, 3),
            n_train=50_000,
            n_test=10_000,
            source="ImageNet, cut to 100 classes (Vinyals et al., 2016)",
            licence="ImageNet's terms: non-commercial research",
            pictures="natural",
            n_classes=100,
            mean=(0.4729, 0.4487, 0.4030),
            std=(0.2833, 0.2752, 0.2886),
            mirror=True,
            how="Get the 60,000 images of the few-shot benchmark at 84x84; number the classes by "
            "synset name within its train, then validation, then test classes; the first 500 "
            "images of a class are for training, the last 100 for testing.",
        ),
        DatasetInfo(
            name="core50",
            title="CORe50 features",
            shape=(512,),
            n_train=119_894,
            n_test=44_972,
            source="CORe50 (Lomonaco and Maltoni, 2017), your own features",
            licence="CC BY 4.0",
            class_names=core50.CATEGORIES,
            how="Take core50_128x128.zip from https://vlomonaco.github.io/core50, and the 512 "
            "features of an ImageNet ResNet18 from it: pecil features core50_128x128.zip "
            "--network timm:resnet18 -o core50.npz.",
        ),
    )
}


def load(
    dataset: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    download: bool = True,
    label: str | None = None,
    labelled: bool = True,
    on_disk: bool = False,
) -> Dataset:
    r"""Load a dataset by its name, or the user's own data by its path.

    A name is looked up as ``NAME.npz`` in one folder: `root` if given, else the one in
    the environment variable ``PECIL_DATA``, else ``~/.cache/pecil``. What is not there
    is downloaded from the Hugging Face hub into that folder (``pip install
    "pecil[hub]"``; ``HF_ENDPOINT`` chooses a mirror). Digits come with scikit-learn:
    uint8, 0 ... 255, every fifth sample of a class for testing.

    A path is one of

    - a folder with one sub-folder of images per class, or with such folders in
      ``train/`` and ``test/``; the labels are the names of the sub-folders, as text;
    - an ``.npz`` with train_x, train_y and perhaps test_x, test_y; or x (or X) and y;
    - a ``.csv`` or ``.parquet`` with one row a sample: the column `label` holds the
      labels, all others the features (numbers, or one column of lists of numbers);
    - ``core50_128x128.zip`` or what it unpacks to: see `pecil.data.core50`.

    With ``labelled=False`` a path may as well lead to a plain folder of images, an ``.npz``
    without train_y, test_y or y, or a table without the column `label`; the labels that
    are there are read all the same.

    A name wins over a path of the same spelling: write ``./mnist`` for a folder.

    Parameters
    ----------
    dataset : str or path-like
        A name in `DATASETS`, or a path.
    root : path-like, optional
        The folder of the ``NAME.npz`` files.
    download : bool, default True
        Whether a missing dataset may be downloaded.
    label : str, default "label"
        The column of labels in a CSV or Parquet file; "category" (the default) or "object"
        for CORe50's images.
    labelled : bool, default True
        Whether the data at a path must have labels.
    on_disk : bool, default False
        Whether the images of a folder stay on disk until they are asked for
        (`pecil.data.ImageFiles`); they may then differ in size.

    Returns
    -------
    Dataset
        The samples; `test_x` and `test_y` are None where there is no test part, `train_y`
        or `test_y` where there are no labels.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from pecil.data import load
    >>> load("digits").test_x.shape
    (355, 8, 8)
    >>> own = Path(tempfile.mkdtemp()) / "flowers.csv"
    >>> _ = own.write_text("petal,sepal,kind\n1.4,0.2,rose\n4.7,1.4,lily\n")
    >>> load(own, label="kind").train_y
    array(['rose', 'lily'], dtype='<U4')
    >>> _ = own.write_text("petal,sepal\n1.3,0.2\n4.9,1.5\n")
    >>> unknown = load(own, labelled=False)
    >>> unknown.train_x.shape, unknown.train_y
    ((2, 2), None)
    """
    if isinstance(dataset, str) and dataset in DATASETS:
        if label is not None:
            raise ValueError(f"label={label!r} is for CSV and Parquet files, not for {dataset!r}")
        info = DATASETS[dataset]
        return Dataset(
            info.name,
            **_found(info, data_folder(root), download),
            mean=info.mean,
            std=info.std,
            class_names=info.class_names,
        )
    path = Path(dataset).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{os.fspath(dataset)!r} is neither a dataset nor a path that exists; the datasets "
            f"are {', '.join(DATASETS)}; a path leads to {files.KINDS}"
        )
    path = path.resolve()
    name = path.name if path.is_dir() else path.stem
    if core50.is_core50(path):
        return Dataset(name, **core50.read(path, label))
    return Dataset(name, **files.read(path, label, labelled, on_disk))


def digest(dataset: str) -> str:
    """Return what tells whether the data that a path leads to has changed; nothing for a name."""
    if dataset in DATASETS or not (path := Path(dataset).expanduser().resolve()).exists():
        return ""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    states = ((file, file.stat()) for file in found if file.is_file())
    return _digest(path, tuple((file, state.st_size, state.st_mtime_ns) for file, state in states))


@functools.lru_cache(maxsize=8)
def _digest(path: Path, states: tuple[tuple[Path, int, int], ...]) -> str:
    """Read files once, as long as none changes."""
    whole = hashlib.sha256()
    for file, size, _ in states:
        with file.open("rb") as opened:
            content = hashlib.file_digest(opened, "sha256").hexdigest()
        whole.update(f"{file.relative_to(path).as_posix()} {size} {content}\n".encode())
    return whole.hexdigest()[:16]


def data_folder(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the ``NAME.npz`` files."""
    return Path(root or os.environ.get("PECIL_DATA") or "~/.cache/pecil").expanduser()


def _found(info: DatasetInfo, folder: Path, download: bool) -> Arrays:
    """Return a dataset's arrays from the first place that has them."""
    if info.name == "digits":
        return _digits()
    path = folder / f"{info.name}.npz"
    if path.is_file():
        return _checked(files.read_npz(path), info, str(path))
    if info.name in _CUTS:
        return _CUTS[info.name](_found(DATASETS[info.source], folder, download))
    if info.name == "cifar100_features":
        return _kept(path, lambda: _pretrained(info, path, download))
    if (tables := info.tables) is not None and download:
        return _kept(path, lambda: _downloaded(info, tables, path))
    raise FileNotFoundError(_missing(info, path))


def _downloaded(info: DatasetInfo, tables: hub.Tables, path: Path) -> Arrays:
    """Download a dataset and check it."""
    try:
        arrays = hub.fetch(info.source, tables, info.shape, path.parent)
    except (ImportError, ConnectionError) as error:
        raise type(error)(f"{str(error).rstrip('.')}. {_missing(info, path)}") from error
    arrays = _checked(arrays, info, info.source)
    counts = len(arrays["train_y"]), len(arrays["test_y"])
    if counts != (info.n_train, info.n_test):
        raise ValueError(
            f"{info.source} has changed: expected {info.n_train} samples for training and "
            f"{info.n_test} for testing, found {counts[0]} and {counts[1]}"
        )
    arrays["note"] = f"from the Hugging Face hub, {info.source}"
    return arrays


def _pretrained(info: DatasetInfo, path: Path, download: bool) -> Arrays:
    """Return what a network makes of CIFAR-100 that is trained on CIFAR-10, or was before."""
    from pecil.data.cifar100_features import features_of

    sources = [load(name, root=path.parent, download=download) for name in ("cifar100", "cifar10")]
    arrays = features_of(*sources, weights=path.with_name("cifar100_network.safetensors"))
    return _checked(arrays, info, info.title)


def _kept(path: Path, make: Callable[[], Arrays]) -> Arrays:
    """Make arrays and write them as ``path``, unless another process did so meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path):
        if not path.is_file():
            arrays = make()
            with written_whole(path) as temporary:
                np.savez(temporary, **arrays)
    return files.read_npz(path)


def _missing(info: DatasetInfo, path: Path) -> str:
    """Say how to get a dataset."""
    how = info.how or (
        f"Unless download=False, it comes from {info.source} on the Hugging Face hub, given the "
        'extra: pip install "pecil[hub]".'
    )
    return (
        f"{info.title} is not at {path} (PECIL_DATA or root= choose another folder). {how} "
        f"The file holds train_x and test_x of shape {_shape(info)}, train_y and test_y with the "
        f"labels 0 to {info.n_classes - 1}"
    )


def _checked(arrays: Arrays, info: DatasetInfo, where: str) -> Arrays:
    """Refuse arrays that are not the dataset they claim to be."""
    if "test_x" not in arrays:
        raise ValueError(f"{where}: {info.title} has a test part, expected test_x and test_y too")
    kinds = (np.floating, "float") if len(info.shape) == 1 else (np.uint8, "uint8")
    labels = np.arange(info.n_classes)
    for part in ("train", "test"):
        x, y = arrays[f"{part}_x"], arrays[f"{part}_y"]
        if x.shape[1:] != info.shape or not np.issubdtype(x.dtype, kinds[0]):
            raise ValueError(
                f"{where}: expected {part}_x as {kinds[1]} of shape {_shape(info)}, found "
                f"{x.dtype} of shape {x.shape}"
            )
        found = np.unique(y)
        if not np.issubdtype(y.dtype, np.integer) or not np.array_equal(found, labels):
            raise ValueError(
                f"{where}: expected every label from 0 to {labels[-1]} in {part}_y, found "
                f"{len(found)} labels from {found[0]} to {found[-1]} ({y.dtype})"
            )
        arrays[f"{part}_y"] = y.astype(np.int64, copy=False)
    return arrays


def _shape(info: DatasetInfo) -> str:
    return f"({', '.join(['n', *map(str, info.shape)])})"


def _digits() -> Arrays:
    """Return scikit-learn's digits, every fifth sample of a class for testing."""
    from sklearn.datasets import load_digits

    pixels, y = load_digits(return_X_y=True)  # 0 ... 16
    x = np.round(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    test = np.zeros(len(y), dtype=bool)
    for c in range(10):
        test[np.flatnonzero(y == c)[4::5]] = True
    return {"train_x": x[~test], "train_y": y[~test], "test_x": x[test], "test_y": y[test]}


def _balanced(arrays: Arrays) -> Arrays:
    """Keep the first samples of each class, as many as the smallest class has."""
    cut = dict(arrays)
    for part in ("train", "test"):
        y = arrays[f"{part}_y"]
        m = np.bincount(y).min()
        kept = np.sort(np.concatenate([np.flatnonzero(y == c)[:m] for c in np.unique(y)]))
        cut[f"{part}_x"], cut[f"{part}_y"] = arrays[f"{part}_x"][kept], y[kept]
    return cut


def _imbalanced(arrays: Arrays) -> Arrays:
    """Let the samples of class 0 appear twice and class 1 keep its first 2,500."""
    y = arrays["train_y"]
    times = np.where(y == 0, 2, 1)
    times[np.flatnonzero(y == 1)[2500:]] = 0
    kept = np.repeat(np.arange(len(y)), times)
    return arrays | {"train_x": arrays["train_x"][kept], "train_y": y[kept]}


_CUTS: dict[str, Callable[[Arrays], Arrays]] = {
    "balanced_svhn": _balanced,
    "imbalanced_cifar10": _imbalanced,
}
