"""The user's own data: folders of images, .npz archives, tables of features."""

import importlib
import sys
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, Any]
"""The fields of a `Dataset` that a path provides: those of the parts, and perhaps a note."""

KINDS = "a folder with one sub-folder of images per class, an .npz, a .csv or a .parquet"

_T = TypeVar("_T")
_IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def read(
    path: Path, label: str | None = None, labelled: bool = True, on_disk: bool = False
) -> Arrays:
    """Read a folder of images, an .npz archive, or a CSV or Parquet table.

    Parameters
    ----------
    path : pathlib.Path
        An existing file or folder.
    label : str, default "label"
        The column of labels in a table.
    labelled : bool, default True
        Whether there must be labels.
    on_disk : bool, default False
        Whether the images of a folder stay there, as `pecil.data.ImageFiles`.

    Returns
    -------
    dict
        train_x, train_y and perhaps test_x, test_y, train_files, test_files, feature_names
        and note; train_y and test_y are None where there are no labels.
    """
    kind = "folder" if path.is_dir() else path.suffix.lower()
    if kind in {".csv", ".parquet"}:
        return read_table(path, "label" if label is None else label, labelled)
    if label is not None:
        raise ValueError(f"label={label!r} is for CSV and Parquet files, not for {path}")
    if kind == "folder":
        return read_folder(path, labelled, on_disk)
    if kind == ".npz":
        return read_npz(path, labelled)
    raise ValueError(f"cannot tell what {path} holds by its name: expected {KINDS}")


def read_npz(path: Path, labelled: bool = True) -> Arrays:
    """Read train_x, train_y and perhaps test_x, test_y; or x (or X) and y; and a note.

    Unless `labelled`, every y may be absent.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "own.npz"
    >>> np.savez(path, X=np.zeros((4, 2)), y=["a", "a", "b", "b"])
    >>> {name: array.shape for name, array in read_npz(path).items()}
    {'train_x': (4, 2), 'train_y': (4,)}
    """
    stored, names = _unpacked(path)
    if not {"train_x", "train_y"} & set(stored):
        short = {"X": "train_x", "x": "train_x", "y": "train_y"}
        stored = {short.get(name, name): array for name, array in stored.items()}
    arrays: Arrays = {}
    for part in ("train", "test"):
        x, y = stored.get(f"{part}_x"), stored.get(f"{part}_y")
        if part == "test" and x is None and y is None:
            continue
        if x is None or (y is None and labelled):
            raise ValueError(
                f"{path}: expected train_x and train_y, perhaps test_x and test_y; or x and y; "
                f"found {', '.join(names) or 'nothing'}"
            )
        _check_samples(x, y, f"{path}: {part}_x", f"{path}: {part}_y")
        _check_finite(x, f"{path}: {part}_x")
        arrays |= {f"{part}_x": x, f"{part}_y": y}
    if "test_x" in arrays and arrays["test_x"].shape[1:] != arrays["train_x"].shape[1:]:
        raise ValueError(
            f"{path}: the samples differ in shape, {arrays['train_x'].shape[1:]} in train_x and "
            f"{arrays['test_x'].shape[1:]} in test_x"
        )
    if "note" in stored:
        arrays["note"] = str(stored["note"])
    return arrays


def _unpacked(path: Path) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return the known arrays of an .npz archive, and all names; damage and pickles are refused."""
    wanted = {"x", "X", "y", "train_x", "train_y", "test_x", "test_y", "note"}
    damage = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError)
    try:
        with zipfile.ZipFile(path) as archive:  # np.load would take other kinds of files too
            names = sorted({name.removesuffix(".npy") for name in archive.namelist()})
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names if name in wanted}, names
    except PermissionError:
        raise
    except damage as error:
        raise ValueError(
            f"{path} is damaged or not an .npz archive of plain arrays: {error}"
        ) from error


def _check_samples(x: NDArray[Any], y: NDArray[Any] | None, x_name: str, y_name: str) -> None:
    if x.dtype.kind not in "biuf" or x.ndim < 2 or len(x) == 0:
        raise ValueError(
            f"{x_name}: expected numbers, one vector or image per sample, found {x.dtype} of "
            f"shape {x.shape}"
        )
    if y is None:
        return
    if y.dtype.kind not in "biufU" or y.shape != x.shape[:1]:
        raise ValueError(
            f"{y_name}: expected {len(x)} labels, numbers or text, found {y.dtype} of shape "
            f"{y.shape}"
        )
    missing = y != y if y.dtype.kind != "U" else y == ""  # only NaN differs from itself
    if missing.any():
        raise ValueError(f"{y_name}: sample {np.flatnonzero(missing)[0]} has no label")


def _check_finite(x: NDArray[Any], where: str) -> None:
    if x.dtype.kind != "f":
        return
    with np.errstate(over="ignore"):
        finite = np.isfinite(x.astype(np.float32, copy=False))
    if not finite.all():
        row = np.flatnonzero(~finite.reshape(len(x), -1).all(axis=1))[0]
        raise ValueError(f"{where}: row {row} holds a number that is not finite in float32")


def read_folder(path: Path, labelled: bool = True, on_disk: bool = False) -> Arrays:
    """Read one sub-folder of images per class, perhaps within train/ and test/.

    Unless `labelled`, images without sub-folders are welcome and have no labels.

    Labels are the names of the sub-folders, as text. Images anywhere else, beside the
    sub-folders of classes or in folders below them, are refused. Samples are uint8 and come by
    class and file name: (n, h, w) if every image is grey, else (n, h, w, 3), without
    transparency. If they stay on disk, they are in colour and may differ in size.
    """
    from pecil.data.images import ImageFiles

    folders = _folders(path, labelled)
    parts = {"train": path}
    if "train" in folders and (others := {"val", "valid", "validation"} & set(folders)):
        raise ValueError(
            f"{path}: expected {_wanted(labelled)}, or train/ and test/ of these, but there is "
            f"{min(others)}/, too: choose one of them as test/, or read each on its own"
        )
    if "train" in folders and set(folders) <= {"train", "test"}:
        parts = {part: path / part for part in ("train", "test") if part in folders}
    found = {part: _images(folder, labelled) for part, folder in parts.items()}
    every = [file for images in found.values() for file, _ in images]
    form = None if on_disk else _common_form(every)
    arrays: Arrays = {}
    for part, images in found.items():
        labels = [label for _, label in images]
        names = tuple(file.relative_to(path).as_posix() for file, _ in images)
        arrays[f"{part}_x"] = (
            _decoded([file for file, _ in images], *form) if form else ImageFiles(path, names)
        )
        arrays[f"{part}_y"] = None if None in labels else np.array(labels)
        arrays[f"{part}_files"] = names
    return arrays


def _wanted(labelled: bool) -> str:
    return "one sub-folder of images per class" + ("" if labelled else " or images alone")


def _folders(path: Path, labelled: bool) -> list[str]:
    """List the sub-folders that are not hidden; images beside them are refused."""
    folders = sorted(p.name for p in path.iterdir() if p.is_dir() and not _passed_over(p.name))
    if folders and (images := _image_files(path)):
        raise ValueError(
            f"{path}: expected {_wanted(labelled)}, found images beside folders, such as "
            f"{images[0].name}"
        )
    return folders


def _image_files(path: Path) -> list[Path]:
    files = (p for p in path.iterdir() if p.suffix.lower() in _IMAGES)
    return sorted(p for p in files if not _passed_over(p.name))


def _passed_over(name: str) -> bool:
    """Say whether a file or folder is hidden, or what macOS puts into archives."""
    return name.startswith(".") or name == "__MACOSX"


def _images(path: Path, labelled: bool) -> list[tuple[Path, str | None]]:
    """List the images of every class folder with its name; or a plain folder's, with None."""
    labels = _folders(path, labelled)
    plain = [] if labelled else _image_files(path)
    if not labels and not plain:
        found = "no folder" if labelled else "neither"
        raise ValueError(f"{path}: expected {_wanted(labelled)}, found {found}")
    images: list[tuple[Path, str | None]] = [(file, None) for file in plain]
    for label in labels:
        images += [(file, label) for file in _class_files(path / label)]
    return images


def _class_files(path: Path) -> list[Path]:
    """List the images of a class; those in folders below might be of other classes."""
    files = _image_files(path)
    for folder in sorted(path.rglob("*/")):
        below = folder.relative_to(path)
        hidden = any(map(_passed_over, below.parts))
        if not hidden and (deeper := _image_files(folder)):
            raise ValueError(
                f"{path}: expected the images of a class, all in this folder, found "
                f"{(below / deeper[0].name).as_posix()}; move them here, or give them a class of "
                "their own"
            )
    if not files:
        raise ValueError(
            f"{path}: expected the images of a class, found none ({', '.join(sorted(_IMAGES))})"
        )
    return files


def _common_form(files: list[Path]) -> tuple[str, tuple[int, int]]:
    """Return the one mode (L or RGB) and size that all images can have."""
    image = needed("PIL.Image", "files")
    forms: list[tuple[str, tuple[int, int]]] = []
    for file in files:
        try:
            with image.open(file) as opened:
                forms.append((opened.mode, opened.size))
        except OSError as error:
            raise ValueError(f"cannot read the image {file}: {error}") from error
        if opened.mode.startswith(("I", "F")):
            raise ValueError(f"{file}: expected 8 bits a channel, found the mode {opened.mode}")
    size = Counter(size for _, size in forms).most_common(1)[0][0]
    others = [f"{f} is {s[0]}x{s[1]}" for f, (_, s) in zip(files, forms, strict=True) if s != size]
    if others:
        more = f"; and {len(others) - 3} more" if others[3:] else ""
        raise ValueError(
            f"all images must have one size; most are {size[0]}x{size[1]} (width x height), but "
            f"{'; '.join(others[:3])}{more}; resize them, or learn from their features (pecil "
            "features --size, pecil.data.Features)"
        )
    return "L" if all(mode in {"1", "L"} for mode, _ in forms) else "RGB", size


def _decoded(files: list[Path], mode: str, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Decode images of one size into one array."""
    image = needed("PIL.Image", "files")
    x = np.empty((len(files), size[1], size[0], *([3] if mode == "RGB" else [])), np.uint8)
    for i, file in enumerate(progress(files, len(files), "reading images")):
        try:
            with image.open(file) as opened:
                x[i] = opened.convert(mode)
        except (OSError, SyntaxError) as error:
            raise ValueError(f"cannot read the image {file}: {error}") from error
    return x


def read_table(path: Path, label: str, labelled: bool = True) -> Arrays:
    """Read a CSV (with a header) or Parquet file, one row per sample.

    The column ``label`` holds the labels, kept as they are: numbers or text (all of them
    text if a CSV has whole numbers as no number is written, such as 007); unless
    `labelled`, it may be absent or empty. All others are features and become float32, not
    rescaled; a column of lists (Parquet) counts as many features as its lists are long,
    named ``column[0]`` and so on.
    """
    table = _table(path)
    names = table.column_names
    if labelled and label not in names:
        raise ValueError(
            f"{path} has no column {label!r} for the labels; choose one by label= (--label): "
            f"{', '.join(map(repr, names[:30]))}{', ...' if names[30:] else ''}"
        )
    if len(set(names)) != len(names):
        twice = next(name for name, n in Counter(names).items() if n > 1)
        raise ValueError(f"{path} has more than one column {twice!r}")
    for name in names:
        if not name or name.startswith("__index_level_"):
            raise ValueError(
                f"{path}: the column {name!r} looks like a table's index, not a feature; write "
                "the file without it (pandas: index=False)"
            )
    features = [name for name in names if name != label]
    if table.num_rows == 0 or not features:
        raise ValueError(
            f"{path}: expected samples with features, found {table.num_rows} rows and "
            f"{len(features)} columns beside {label!r}"
        )
    columns = [_features(table.column(name), f"{path}: column {name!r}") for name in features]
    x = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
    where = f"{path}: column {label!r}"
    y = None
    if label in names and (labelled or table.column(label).null_count < table.num_rows):
        y = _labels(table.column(label), where)
    if y is not None and path.suffix.lower() == ".csv":
        y = _as_written(y, path, label)
    _check_samples(x, y, str(path), where)
    widths = [column.shape[1] for column in columns]
    named = tuple(
        name if width == 1 else f"{name}[{k}]"
        for name, width in zip(features, widths, strict=True)
        for k in range(width)
    )
    return {"train_x": x, "train_y": y, "feature_names": named}


def _table(path: Path) -> Any:
    """Read a file into a pyarrow table."""
    arrow = needed("pyarrow", "files")
    try:
        if path.suffix.lower() != ".csv":
            return needed("pyarrow.parquet", "files").read_table(path)
        table = needed("pyarrow.csv", "files").read_csv(path)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not _is_text(table):
        raise ValueError(f"{path} is not UTF-8, as a .csv must be: save it in this encoding")
    return table


def _is_text(table: Any) -> bool:
    """Say whether names and values of a CSV file are UTF-8; pyarrow calls others binary."""
    try:
        names = table.column_names
    except UnicodeDecodeError:
        return False
    types = needed("pyarrow", "files").types
    return not any(types.is_binary(table.schema.field(k).type) for k in range(len(names)))


def _features(column: Any, where: str) -> NDArray[np.float32]:
    """Return one column of numbers, or of lists of numbers, as a float32 matrix."""
    types = needed("pyarrow", "files").types
    n, values = len(column), column.combine_chunks()
    _check_no_gaps(values, where)
    if types.is_list(values.type) or types.is_large_list(values.type):
        lengths = np.unique(np.diff(values.offsets.to_numpy()))
        if len(lengths) != 1 or lengths[0] == 0:
            raise ValueError(f"{where}: expected lists of one length, found {lengths.tolist()}")
        values = values.flatten()
    elif types.is_fixed_size_list(values.type):
        values = values.flatten()
    _check_no_gaps(values, where, per_row=len(values) // n)
    if not types.is_primitive(values.type) or types.is_temporal(values.type):
        at = _first_text(values)
        raise ValueError(
            f"{where}: features must be numbers, found {values.type}, such as "
            f"{values[at].as_py()!r:.40} in row {at // (len(values) // n)}; put a number there, "
            "leave the column out of the file, or choose it by label= (--label)"
        )
    with np.errstate(over="ignore"):
        x = np.asarray(values.to_numpy(zero_copy_only=False), np.float32).reshape(n, -1)
    _check_finite(x, where)
    return x


def _first_text(values: Any) -> int:
    """Return where the first value is that cannot be read as a number, or 0."""
    arrow = needed("pyarrow", "files")
    for at, value in enumerate(values.to_pylist()):
        try:
            arrow.scalar(value).cast(arrow.float64())
        except arrow.ArrowException:
            return at
    return 0


def _labels(column: Any, where: str) -> NDArray[Any]:
    """Return a column of numbers or text."""
    types = needed("pyarrow", "files").types
    _check_no_gaps(column, where)
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_string(column.type) or types.is_large_string(column.type):
        return np.array(column.to_pylist())
    if types.is_primitive(column.type) and not types.is_temporal(column.type):
        return np.asarray(column)
    raise ValueError(f"{where}: labels must be numbers or text, found {column.type}")


def _as_written(y: NDArray[Any], path: Path, label: str) -> NDArray[Any]:
    """Return the labels of a CSV file as text if numbers do not keep it: 007, +1, 20 digits."""
    if y.dtype.kind not in "if":
        return y
    arrow, csv = needed("pyarrow", "files"), needed("pyarrow.csv", "files")
    options = csv.ConvertOptions(include_columns=[label], column_types={label: arrow.string()})
    column = csv.read_csv(path, convert_options=options).column(label)
    texts = [text.strip() for text in column.to_pylist()]
    for number, text in set(zip(y.tolist(), texts, strict=True)):
        whole = isinstance(number, int) or text.lstrip("+-").isdigit()
        if whole and str(int(number)) != text:
            return np.array(texts)
    return y


def _check_no_gaps(values: Any, where: str, per_row: int = 1) -> None:
    if values.null_count:
        row = values.is_null().to_pylist().index(True) // per_row
        raise ValueError(f"{where}: {values.null_count} values are missing, the first in row {row}")


def needed(module: str, extra: str) -> Any:
    """Import a module that comes with an extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{module.partition(".")[0]} is needed for this: pip install "pecil[{extra}]"'
        ) from error


def progress(items: Iterable[_T], total: int, text: str) -> Iterator[_T]:
    """Yield the items; on a terminal, with a line that counts them after a second.

    Examples
    --------
    >>> sum(progress([1, 2, 3], 3, "adding"))
    6
    """
    shown, terminal = time.monotonic() + 1, sys.stderr.isatty()
    line = ""
    for done, item in enumerate(items):
        if terminal and time.monotonic() > shown:
            line = f"{text} {done:,} of {total:,}"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
            shown = time.monotonic() + 0.2
        yield item
    if line:
        print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)
