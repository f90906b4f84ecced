"""CORe50: 50 objects of 10 categories, filmed in 11 sessions (Lomonaco and Maltoni, 2017).

Its archive ``core50_128x128.zip``, or what it unpacks to, holds the frames of object j in
session i as ``sI/oJ/*.png``. Five objects in a row are of one category; sessions 3, 7 and 10
are for testing.
"""

import re
import zipfile
from pathlib import Path

import numpy as np

from pecil.data.files import Arrays
from pecil.data.images import ImageFiles

_CATEGORIES = """
    plug_adapter mobile_phone scissors light_bulb can glasses ball marker cup remote_control
"""
CATEGORIES = tuple(_CATEGORIES.split())
OBJECTS = tuple(f"{category}_{k}" for category in CATEGORIES for k in range(1, 6))
SESSIONS, TEST_SESSIONS = range(1, 12), (3, 7, 10)
NAMES = {"category": CATEGORIES, "object": OBJECTS}
_FRAME = re.compile(r"(?:.*/)?s(\d+)/o(\d+)/[^/]+\.png")


def is_core50(path: Path) -> bool:
    """Say whether a path is an archive, or a folder laid out like CORe50."""
    if path.is_dir():
        return next(path.glob("s[0-9]*/o[0-9]*/*.png"), None) is not None
    return path.suffix.lower() == ".zip"


def read(path: Path, label: str | None = None) -> Arrays:
    """Find the images of CORe50, by session, object and frame; they stay on disk.

    Parameters
    ----------
    path : pathlib.Path
        ``core50_128x128.zip``, or the folder with s1, s2, ...; not all sessions and
        objects need be there.
    label : {"category", "object"}, default "category"
        What the labels are: 0 to 9, or 0 to 49.

    Returns
    -------
    dict
        train_x, train_y, train_files, class_names and, if any of the sessions 3, 7 and 10
        is there, test_x, test_y and test_files.
    """
    label = label or "category"
    if label not in NAMES:
        raise ValueError(f"label: expected category or object for CORe50, got {label!r}")
    frames = _frames(path)
    arrays: Arrays = {"class_names": NAMES[label]}
    for part in ("train", "test"):
        chosen = [f for f in frames if (f[0] in TEST_SESSIONS) == (part == "test")]
        if not chosen and part == "train":
            raise ValueError(f"{path}: expected sessions for training, found {TEST_SESSIONS} alone")
        if chosen:
            names = tuple(name for _, _, name in chosen)
            objects = np.array([number - 1 for _, number, _ in chosen])
            arrays[f"{part}_x"], arrays[f"{part}_files"] = ImageFiles(path, names), names
            arrays[f"{part}_y"] = objects if label == "object" else objects // 5
    return arrays


def _frames(path: Path) -> list[tuple[int, int, str]]:
    """List (session, object, file) in order."""
    found = ((_FRAME.fullmatch(name), name) for name in _names(path))
    frames = sorted((int(at[1]), int(at[2]), name) for at, name in found if at)
    if not frames:
        raise ValueError(f"{path}: expected CORe50's images as s1/o1/*.png and so on, found none")
    for session, number, name in frames:
        if session not in SESSIONS or not 1 <= number <= len(OBJECTS):
            raise ValueError(
                f"{path}: expected the sessions 1 to 11 and the objects 1 to 50, found {name}"
            )
    return frames


def _names(path: Path) -> list[str]:
    if path.is_dir():
        return [file.relative_to(path).as_posix() for file in path.glob("s*/o*/*.png")]
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is damaged or no .zip archive: {error}") from error
