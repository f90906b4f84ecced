"""Download image datasets from the Hugging Face hub.

A dataset repository keeps its samples in Parquet files named
``FOLDER/train-00000-of-00001.parquet``, with one column of encoded images and one of
labels. They are fetched into a temporary folder, compared with the SHA-256 that the
hub states for them, and decoded.
"""

import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pecil.data.files import Arrays, needed, progress


@dataclass(frozen=True)
class Tables:
    """Where the samples lie in a dataset repository."""

    folder: str
    image: str = "image"
    """The column of encoded images."""
    label: str = "label"
    """The column of labels."""


def fetch(repository: str, tables: Tables, shape: tuple[int, ...], folder: Path) -> Arrays:
    """Download the training and test images of a dataset repository.

    Parameters
    ----------
    repository : str
        A dataset repository, "owner/name". The environment variable ``HF_ENDPOINT``
        names a mirror of the hub.
    tables : Tables
        The folder and columns to read.
    shape : tuple of int
        The shape of one image, (h, w) or (h, w, 3).
    folder : pathlib.Path
        Where the temporary folder is made; it is gone afterwards.

    Returns
    -------
    dict
        train_x, train_y, test_x, test_y: uint8 images and int64 labels.

    Raises
    ------
    ImportError
        If huggingface_hub, pyarrow or pillow is not installed.
    ConnectionError
        If the hub cannot be reached or refuses.
    ValueError
        If what arrives is not what the hub promised.
    """
    client, *_ = (needed(m, "hub") for m in ("huggingface_hub", "pyarrow.parquet", "PIL.Image"))
    arrays: Arrays = {}
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        try:  # the client's errors have no base class that holds for all of its versions
            api = client.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=False)
            listed = list(api.list_repo_tree(repository, tables.folder, repo_type="dataset"))
            parts = {part: _files(listed, tables.folder, part) for part in ("train", "test")}
            for file in (file for files in parts.values() for file in files):
                api.hf_hub_download(repository, file.path, repo_type="dataset", local_dir=temporary)
        except Exception as error:
            raise ConnectionError(f"cannot download {repository}: {error}") from error
        for part, files in parts.items():
            if not files:
                raise ValueError(f"{repository} has no {tables.folder}/{part}-*.parquet")
            paths = [_verified(Path(temporary, file.path), file, repository) for file in files]
            arrays[f"{part}_x"], arrays[f"{part}_y"] = _decoded(paths, tables, shape, repository)
    return arrays


def _files(listed: list[Any], folder: str, part: str) -> list[Any]:
    """Return the Parquet files of a part, in order."""
    prefix = f"{folder}/{part}-"
    return sorted(
        (f for f in listed if f.path.startswith(prefix) and f.path.endswith(".parquet")),
        key=lambda f: str(f.path),
    )


def _verified(path: Path, file: Any, repository: str) -> Path:
    """Return the path of a downloaded file if it has the SHA-256 that the hub states."""
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    stated = file.lfs.sha256 if file.lfs else "none"
    if found != stated:
        raise ValueError(
            f"{repository}: {file.path} did not arrive whole, try again: the hub states the "
            f"SHA-256 {stated}, the file has {found}"
        )
    return path


def _decoded(
    paths: list[Path], tables: Tables, shape: tuple[int, ...], repository: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Decode the images of Parquet files."""
    image = needed("PIL.Image", "hub")
    parquet = needed("pyarrow.parquet", "hub")
    opened = [parquet.ParquetFile(path) for path in paths]
    n = sum(file.metadata.num_rows for file in opened)
    x, y = np.empty((n, *shape), np.uint8), np.empty(n, np.int64)
    mode = "L" if len(shape) == 2 else "RGB"
    for i, (encoded, label) in enumerate(progress(_rows(opened, tables), n, "decoding images")):
        pixels = np.asarray(image.open(io.BytesIO(encoded["bytes"])).convert(mode))
        if pixels.shape != shape:
            raise ValueError(
                f"{repository}: expected images of shape {shape}, found {pixels.shape}"
            )
        x[i], y[i] = pixels, label
    return x, y


def _rows(opened: list[Any], tables: Tables) -> Iterator[tuple[dict[str, bytes], int]]:
    """Yield the rows of Parquet files, a thousand in memory at a time."""
    columns = [tables.image, tables.label]
    for file in opened:
        for batch in file.iter_batches(1000, columns=columns):
            yield from zip(*(batch.column(c).to_pylist() for c in columns), strict=True)
