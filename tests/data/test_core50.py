import pickle
import shutil
import zipfile

import numpy as np
import pytest
from PIL import Image

from pecil.data import ImageFiles, load, stream
from pecil.data.core50 import CATEGORIES, OBJECTS

FRAMES = 2


def colour(session, number, frame):
    return np.full((6, 8, 3), (session, number, frame), np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Write frames of four objects, of three categories, in four sessions."""
    root = tmp_path / "core50_128x128"
    for session in (1, 2, 3, 10):
        for number in (1, 5, 6, 50):
            place = root / f"s{session}" / f"o{number}"
            place.mkdir(parents=True)
            for frame in range(FRAMES):
                name = f"C_{session:02}_{number:02}_{frame:03}.png"
                Image.fromarray(colour(session, number, frame)).save(place / name)
    return root


def zipped(folder, prefix=""):
    path = folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*.png"), reverse=True):
            archive.write(file, prefix + file.relative_to(folder).as_posix())
        archive.writestr(prefix + "readme.txt", "no image")
    return path


@pytest.mark.parametrize("kind", ["folder", "zip", "zip with a folder"])
def test_categories_and_sessions(folder, kind):
    path = folder
    if kind != "folder":
        path = zipped(folder, "core50_128x128/" if "with" in kind else "")
        shutil.rmtree(folder)
    data = load(path)
    assert data.name == "core50_128x128" and data.class_names == CATEGORIES
    assert isinstance(data.train_x, ImageFiles)  # not in memory
    assert data.train_y.tolist() == [0, 0, 0, 0, 1, 1, 9, 9] * 2
    assert data.test_y.tolist() == [0, 0, 0, 0, 1, 1, 9, 9] * 2
    assert data.train_x.shape == (16, 6, 8, 3) and len(data.train_files) == 16
    for part, sessions in (("train", (1, 2)), ("test", (3, 10))):
        frames = [
            colour(s, number, frame)
            for s in sessions
            for number in (1, 5, 6, 50)
            for frame in range(FRAMES)
        ]
        assert np.array_equal(getattr(data, f"{part}_x"), frames)


def test_images_in_an_archive_may_go_to_other_processes(folder):
    images = load(zipped(folder)).train_x
    first = images[0]  # opens the archive
    assert np.array_equal(pickle.loads(pickle.dumps(images))[0], first)


def test_objects(folder):
    data = load(folder, label="object")
    assert data.class_names == OBJECTS and len(set(OBJECTS)) == 50
    assert data.train_y.tolist() == [0, 0, 4, 4, 5, 5, 49, 49] * 2
    assert (OBJECTS[4], OBJECTS[5], OBJECTS[49]) == (
        *("plug_adapter_5", "mobile_phone_1"),
        "remote_control_5",
    )


def test_a_stream_of_images_on_disk(folder):
    tasks = list(stream(load(folder), "3/1", batch_size=3))
    assert [task.classes for task in tasks] == [(0,), (1,), (9,)]
    for x, y in tasks[0].batches():
        assert set(x[:, 0, 0, 1].tolist()) <= {1, 5} and set(y.tolist()) == {0}


def test_a_test_part_need_not_be_there(folder):
    shutil.rmtree(folder / "s3")
    shutil.rmtree(folder / "s10")
    assert load(folder).test_x is None
    shutil.rmtree(folder / "s2")
    (folder / "s1").rename(folder / "s7")
    with pytest.raises(ValueError, match="expected sessions for training"):
        load(folder)


@pytest.mark.parametrize("name", ["s12/o1/a.png", "s1/o51/a.png", "s0/o1/a.png", "s1/o0/a.png"])
def test_other_sessions_and_objects_are_refused(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"")
    with pytest.raises(ValueError, match=f"sessions 1 to 11 and the objects 1 to 50, found {name}"):
        load(folder)


def test_mistakes_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match="expected category or object for CORe50, got 'kind'"):
        load(folder, label="kind")
    (tmp_path / "bad.zip").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"bad.zip is damaged or no .zip archive"):
        load(tmp_path / "bad.zip")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("photos/a.png", b"")
    with pytest.raises(ValueError, match=r"other.zip: expected CORe50's images as s1/o1"):
        load(tmp_path / "other.zip")


def test_a_damaged_image_is_named(folder):
    path = zipped(folder)
    content = path.read_bytes()
    where = content.index(b"IDAT")
    path.write_bytes(content[:where] + b"XXXX" + content[where + 4 :])
    with pytest.raises(ValueError, match=r"cannot read the image .*core50_128x128.zip/s3/o6"):
        np.asarray(load(path).test_x)


def test_a_folder_of_classes_is_no_core50(tmp_path):
    for name in ("s1", "s2"):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name / "o1.png")
    assert load(tmp_path).train_y.tolist() == ["s1", "s2"]
