"""Files written whole or not at all, by one process; tensors in the safetensors format."""

import contextlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # not a POSIX system: nobody waits
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "U8": "uint8"}


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` on success and vanishes on failure.

    The temporary file lies beside its target, so that the final rename is atomic:
    a reader, a crash or Ctrl-C sees either the old file or the whole new one.
    A symbolic link stays, and what it leads to is written.

    Parameters
    ----------
    path : path-like
        The file to be written; its folder must exist. A folder, a device or a pipe is refused.

    Yields
    ------
    pathlib.Path
        An empty file to write into, of the same suffix as ``path``.

    Examples
    --------
    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with written_whole(target) as temporary:
    ...     _ = temporary.write_text("all of it")
    >>> target.read_text()
    'all of it'
    """
    target, temporary = _begun(Path(path))
    try:
        yield temporary
        temporary.chmod(_mode(target))
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise the OSError that `written_whole` would raise at once; change nothing.

    Parameters
    ----------
    path : path-like
        The file that is to be written later.
    """
    _, temporary = _begun(Path(path))
    temporary.unlink()


def _begun(path: Path) -> tuple[Path, Path]:
    """Return the file that a path leads to, and an empty temporary one beside it."""
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {target.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"cannot write {path}: it is a device or a pipe, not a file")
    try:
        handle, name = tempfile.mkstemp(
            prefix=f".{target.stem}-", suffix=path.suffix, dir=target.parent
        )
    except OSError as error:
        raise type(error)(
            f"cannot write {path}: no file can be made in {target.parent}: {error.strerror}"
        ) from error
    os.close(handle)
    return target, Path(name)


@contextlib.contextmanager
def alone(path: str | os.PathLike[str]) -> Iterator[None]:
    """Wait until no other process makes the same file.

    Parameters
    ----------
    path : path-like
        The file that is to be made; whoever waited should look whether it is there now.
    """
    if fcntl is None:
        yield
        return
    target = Path(path)
    lock = target.with_name(f".{target.name}.lock")
    while True:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is(file.fileno(), lock):  # whoever had it took it away
                continue
            try:
                yield
            finally:
                lock.unlink()
            return


def _is(descriptor: int, path: Path) -> bool:
    """Say whether an open file is the one that has a name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _mode(target: Path) -> int:
    """Return the permissions the file has, or would have if it were created plainly."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def write_tensors(
    path: str | os.PathLike[str], tensors: "Mapping[str, Tensor]", about: Mapping[str, str]
) -> None:
    """Write tensors and some texts about them, whole or not at all.

    Parameters
    ----------
    path : path-like
    tensors : mapping of str to Tensor
        Of type float16, float32, float64, int64 or uint8.
    about : mapping of str to str
    """
    names = {name: short for short, name in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": dict(about)}
    parts, start = [], 0
    for name, tensor in tensors.items():
        part = tensor.detach().cpu().contiguous().numpy()
        header[name] = {
            "dtype": names[str(part.dtype)],
            "shape": list(part.shape),
            "data_offsets": [start, start + part.nbytes],
        }
        parts.append(part)
        start += part.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with written_whole(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for part in parts:
            file.write(part.tobytes())


def read_tensors(content: bytes) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Read what `write_tensors` wrote: the tensors, and the texts about them.

    Parameters
    ----------
    content : bytes
        All bytes of the file.
    """
    import numpy as np
    import torch

    try:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        about = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            if stop > len(content):
                raise ValueError(f"{name} ends at byte {stop} of {len(content)}")
            flat = np.frombuffer(content[start:stop], DTYPES[entry["dtype"]])
            tensors[name] = torch.from_numpy(flat.reshape(entry["shape"]).copy())
    except (struct.error, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"expected tensors in the safetensors format: {error}") from error
    return tensors, about
