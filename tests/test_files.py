"""Files written whole or not at all."""

import os
import stat
import tempfile
import threading
import time

import pytest
import safetensors.torch
import torch

from pecil.files import alone, check_writable, read_tensors, write_tensors, written_whole


@pytest.fixture
def target(tmp_path):
    return tmp_path / "note.txt"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_file_appears_at_the_end(target):
    with written_whole(target) as temporary:
        temporary.write_text("new")
        assert not target.exists()
        assert temporary.parent == target.parent and temporary.suffix == ".txt"
    assert target.read_text() == "new"
    assert names(target.parent) == ["note.txt"]


def test_only_one_makes_a_file(target):
    """Six look at once whether it is there, and make it slowly if it is not."""
    made, start = [], threading.Barrier(6)

    def make():
        start.wait()
        with alone(target):
            if not target.exists():
                time.sleep(0.05)
                target.write_text("made")
                made.append(True)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [True] and names(target.parent) == ["note.txt"]


def test_whoever_fails_leaves_the_making_to_others(target):
    for _ in range(2):
        with pytest.raises(OSError, match="disk full"), alone(target):
            raise OSError("disk full")
    assert names(target.parent) == []


def test_the_old_file_is_there_until_the_end(target):
    target.write_text("old")
    with written_whole(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert names(target.parent) == ["note.txt"]


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("before", ["old", None])
def test_a_failure_changes_nothing(before, failure, target):
    if before:
        target.write_text(before)
    with pytest.raises(type(failure)), written_whole(target) as temporary:
        temporary.write_text("ne")
        raise failure
    assert names(target.parent) == (["note.txt"] if before else [])
    assert not before or target.read_text() == before


def test_a_failing_rename_changes_nothing(target, monkeypatch):
    target.write_text("old")

    def refuse(*args):
        raise PermissionError("not here")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises(PermissionError), written_whole(target) as temporary:
        temporary.write_text("new")
    assert names(target.parent) == ["note.txt"]
    assert target.read_text() == "old"


def test_a_temporary_taken_away_is_an_error(target):
    target.write_text("old")
    with pytest.raises(FileNotFoundError), written_whole(target) as temporary:
        temporary.unlink()
    assert target.read_text() == "old"


@pytest.mark.parametrize("permissions", [0o600, 0o640, 0o664])
def test_permissions_are_kept(permissions, target):
    target.write_text("old")
    target.chmod(permissions)
    with written_whole(target) as temporary:
        temporary.write_text("new")
    assert mode(target) == permissions


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_new_file_has_the_usual_permissions(mask, target):
    before = os.umask(mask)
    try:
        with written_whole(target) as temporary:
            temporary.write_text("new")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert mode(target) == 0o666 & ~mask


def test_a_writer_may_replace_the_temporary(target):
    """Some libraries write a file of their own and rename it."""
    with written_whole(target) as temporary:
        other = temporary.with_name("other")
        other.write_text("new")
        other.replace(temporary)
    assert target.read_text() == "new"
    assert names(target.parent) == ["note.txt"]


def test_a_path_may_be_text(target):
    with written_whole(str(target)) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "new"


def test_a_missing_folder_is_named(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match="there is no folder .*missing"),
        written_whole(tmp_path / "missing" / "note.txt"),
    ):
        pytest.fail("nothing may be written")
    assert names(tmp_path) == []


def test_a_folder_is_not_replaced(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match="it is a folder"), written_whole(folder):
        pytest.fail("nothing may be written")
    assert names(tmp_path) == ["results"]


@pytest.mark.parametrize("before", ["old", None])
def test_a_link_stays_and_what_it_leads_to_is_written(before, tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "files").mkdir()
    link, target = tmp_path / "links" / "latest.txt", tmp_path / "files" / "first"
    if before:
        target.write_text(before)
    link.symlink_to("../files/first")
    with written_whole(link) as temporary:
        temporary.write_text("new")
        assert temporary.parent.samefile(target.parent) and temporary.suffix == ".txt"
    assert link.is_symlink() and not target.is_symlink()
    assert target.read_text() == "new"
    assert names(tmp_path / "links") + names(tmp_path / "files") == ["latest.txt", "first"]


@pytest.mark.parametrize("begin", [check_writable, lambda path: written_whole(path).__enter__()])
def test_what_is_no_file_is_refused(begin, tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(FileExistsError, match=f"{path}: it is a device or a pipe, not a file"):
            begin(path)
    assert pipe.is_fifo() and link.is_symlink()
    assert names(tmp_path) == ["link", "pipe"]


@pytest.mark.parametrize("begin", [check_writable, lambda path: written_whole(path).__enter__()])
def test_a_folder_that_takes_no_files_is_named(begin, target, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied", "/.note-3kqtviw6.txt")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(PermissionError) as refused:
        begin(target)
    told = f"cannot write {target}: no file can be made in {target.parent}: Permission denied"
    assert str(refused.value) == told


def test_looking_whether_a_file_can_be_written_changes_nothing(target):
    check_writable(target)
    assert names(target.parent) == []
    target.write_text("old")
    check_writable(str(target))
    assert names(target.parent) == ["note.txt"] and target.read_text() == "old"


def test_tensors_are_written_as_the_library_reads_them(tmp_path):
    path = tmp_path / "some.safetensors"
    tensors = {
        "half": torch.rand(2, 3).half(),
        "single": torch.rand(4),
        "double": torch.rand(1, 1, 2).double(),
        "whole": torch.arange(3),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "none": torch.empty(0, 3),
    }
    write_tensors(path, tensors, {"note": "größer"})
    theirs = safetensors.torch.load_file(path)
    mine, about = read_tensors(path.read_bytes())
    assert about == {"note": "größer"}
    for name, values in tensors.items():
        assert torch.equal(theirs[name], values) and theirs[name].dtype == values.dtype
        assert torch.equal(mine[name], values) and mine[name].dtype == values.dtype
    safetensors.torch.save_file({"a": torch.ones(3)}, path)
    assert read_tensors(path.read_bytes())[0]["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x02" + b"\0" * 7 + b"[]"])
def test_other_content_than_tensors_is_refused(content):
    with pytest.raises(ValueError, match="expected tensors in the safetensors format"):
        read_tensors(content)
