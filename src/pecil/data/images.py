"""Images that stay on disk until they are asked for."""

import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from pecil.data.files import needed


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images in a folder or a .zip, decoded when they are asked for, as uint8 and in colour.

    ``images[3]`` is one, (h, w, 3); ``images[10:20]`` and ``images[[5, 1]]`` are some,
    (n, h, w, 3), or a list if they differ in size. All of them need not fit into memory:
    `pecil.data.Features` and `pecil.data.stream` take them as they are.

    Parameters
    ----------
    root : pathlib.Path
        The folder or .zip.
    names : tuple of str
        Where the images are in it.

    Examples
    --------
    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, width in (("a.png", 4), ("b.png", 4), ("c.png", 7)):
    ...     Image.new("RGB", (width, 5), "red").save(folder / name)
    >>> images = ImageFiles(folder, ("a.png", "b.png", "c.png"))
    >>> len(images), images[:2].shape, [image.shape for image in images[1:]]
    (3, (2, 5, 4, 3), [(5, 4, 3), (5, 7, 3)])
    """

    root: Path
    names: tuple[str, ...]

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.names)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole, if all images are of the size of the first."""
        return (len(self), *self._first.shape)

    def __getstate__(self) -> dict[str, Any]:
        """Leave an open archive out of pickles."""
        return {name: value for name, value in vars(self).items() if name != "_archive"}

    def __getitem__(self, at: Any) -> Any:
        """Decode one image, or some."""
        chosen = np.arange(len(self))[at]
        if chosen.ndim == 0:
            return self._decoded(self.names[int(chosen)])
        images = [self._decoded(self.names[k]) for k in chosen.tolist()]
        return np.stack(images) if len({image.shape for image in images}) == 1 else images

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Decode all of them."""
        images = np.empty(self.shape, np.uint8 if dtype is None else dtype)
        for k in range(len(self)):
            images[k] = self[k]
        return images

    @cached_property
    def _first(self) -> NDArray[np.uint8]:
        return self._decoded(self.names[0])

    @cached_property
    def _archive(self) -> zipfile.ZipFile | None:
        return None if self.root.is_dir() else zipfile.ZipFile(self.root)

    def _decoded(self, name: str) -> NDArray[np.uint8]:
        image = needed("PIL.Image", "files")
        try:
            with self._open(name) as file, image.open(file) as opened:
                return np.asarray(opened.convert("RGB"))
        except (OSError, SyntaxError, zipfile.BadZipFile) as error:
            raise ValueError(f"cannot read the image {self.root / name}: {error}") from error

    def _open(self, name: str) -> IO[bytes]:
        return self._archive.open(name) if self._archive else (self.root / name).open("rb")
