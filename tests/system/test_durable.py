import errno
import io
import json
import os
import shutil
import zlib

import pytest

from areal.system import durable
from areal.system.durable import (
    COMPLETE,
    append_whole,
    damage_of,
    finish_interrupted_writes,
    is_complete,
    publish_folder,
    remove_folder,
    remove_unfinished,
    seal_folder,
    write_atomic,
    writing_folder,
)


def test_write_atomic_replaces_whole_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "a.json"
    write_atomic(path, b"old content that is longer")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_write_atomic_failure_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_atomic(path, b"old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as error:  # noqa: PT011
        write_atomic(path, b"new")
    assert error.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_two_writers_of_one_file_have_different_temporary_files(tmp_path, monkeypatch):
    path, sync = tmp_path / "a", os.fsync

    def while_another_writes(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        write_atomic(path, b"theirs")  # as on another node, where a process has the same pid
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", while_another_writes)
    write_atomic(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert os.listdir(tmp_path) == ["a"]


def _filled(folder, text):
    (folder / "sub").mkdir(parents=True)
    (folder / "model.bin").write_bytes(text)
    (folder / "sub" / "x").write_bytes(b"1")
    return folder


def test_published_folder_is_complete_until_a_size_changes_or_a_file_goes(tmp_path):
    final = tmp_path / "v1"
    temporary = _filled(tmp_path / "tmp", b"abc")
    assert not is_complete(temporary)
    publish_folder(temporary, final)
    assert is_complete(final)
    assert not temporary.exists()
    sums = {"model.bin": zlib.crc32(b"abc"), "sub/x": zlib.crc32(b"1")}
    assert json.loads((final / COMPLETE).read_text()) == {"files": {"model.bin": 3, "sub/x": 1}, "crc32": sums}
    (final / "model.bin").write_bytes(b"ab")
    assert not is_complete(final)
    assert damage_of(final) == "model.bin has 2 bytes instead of 3"
    (final / "model.bin").write_bytes(b"abc")
    (final / "sub" / "x").unlink()
    assert not is_complete(final)
    assert "No such file" in damage_of(final)


def test_a_flipped_bit_is_found_when_its_part_is_read(tmp_path):
    final = tmp_path / "v1"
    content = os.urandom(3 * 2**20 + 5)
    publish_folder(_filled(tmp_path / "tmp", content), final)
    assert damage_of(final) == ""
    flipped = bytearray(content)
    flipped[2 * 2**20 + 7] ^= 16
    (final / "model.bin").write_bytes(flipped)
    assert is_complete(final)  # the cheap test reads nothing
    assert damage_of(final, part=0, parts=2) == "model.bin has changed since it was written (its checksum differs)"
    assert damage_of(final, part=1, parts=2) == ""


def test_a_marker_without_checksums_counts_as_complete(tmp_path):
    final = _filled(tmp_path / "v1", b"abc")
    (final / COMPLETE).write_text(json.dumps({"files": {"model.bin": 3, "sub/x": 1}}))
    assert is_complete(final)
    assert damage_of(final) == ""


def test_a_folder_can_be_completed_without_checksums(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "checksum_of", lambda path: pytest.fail(f"{path} was read"))
    publish_folder(_filled(tmp_path / "tmp", b"abc"), tmp_path / "v1", sum_up=False)
    assert is_complete(tmp_path / "v1")
    assert damage_of(tmp_path / "v1") == ""
    synced = []
    monkeypatch.setattr(durable, "fsync_path", synced.append)
    publish_folder(_filled(tmp_path / "tmp", b"abc"), tmp_path / "v2", sum_up=False, sync=False)
    assert (is_complete(tmp_path / "v2"), synced) == (True, [tmp_path])
    (tmp_path / "v1" / "model.bin").write_bytes(b"ab")
    assert damage_of(tmp_path / "v1") == "model.bin has 2 bytes instead of 3"


def test_checksums_computed_during_the_write_need_no_read(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(durable, "checksum_of", lambda path: read.append(path.name) or 7)
    outer = tmp_path / "outer"
    outer.mkdir()
    publish_folder(_filled(tmp_path / "tmp", b"abc"), outer / "inner")
    (outer / "state.json").write_bytes(b"{}")
    (outer / "large").write_bytes(b"large")
    assert read == ["model.bin", "x"]
    seal_folder(outer, {outer / "large": 5})
    assert read == ["model.bin", "x", COMPLETE, "state.json"]
    sums = json.loads((outer / COMPLETE).read_text())["crc32"]
    assert sums == {"inner/COMPLETE": 7, "inner/model.bin": 7, "inner/sub/x": 7, "large": 5, "state.json": 7}


@pytest.mark.parametrize("marker", [b"", b"{", b"[]", b"{}", b'{"files": 3}'])
def test_damaged_marker_is_not_complete(tmp_path, marker):
    (tmp_path / COMPLETE).write_bytes(marker)
    assert not is_complete(tmp_path)
    assert "marker cannot be read" in damage_of(tmp_path)


def test_publishing_again_replaces_the_folder(tmp_path):
    final = tmp_path / "v1"
    publish_folder(_filled(tmp_path / "t1", b"old"), final)
    publish_folder(_filled(tmp_path / "t2", b"newer"), final)
    assert (final / "model.bin").read_bytes() == b"newer"
    assert os.listdir(tmp_path) == ["v1"]


def test_files_of_a_killed_writer_are_completed_or_removed(tmp_path, monkeypatch):
    publish_folder(_filled(tmp_path / "t1", b"old"), tmp_path / "v1")
    publish_folder(_filled(tmp_path / "t1", b"other"), tmp_path / "v2")
    replace = os.replace

    def killed_between(source, target):
        if str(target).endswith("v1"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed_between)
    with pytest.raises(KeyboardInterrupt):
        publish_folder(_filled(writing_folder(tmp_path / "v1"), b"new"), tmp_path / "v1")
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(shutil, "rmtree", lambda folder, ignore_errors: None)
    remove_folder(tmp_path / "v2")
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == [".v1.old", ".v1.writing", ".v2.removed"]
    (tmp_path / ".mine").mkdir()
    finish_interrupted_writes(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".mine", "v1"]
    assert (tmp_path / "v1" / "model.bin").read_bytes() == b"old"


class NearlyFull(io.FileIO):
    """Takes a few bytes at a time, and none when its disk is full."""

    free = 10

    def write(self, data):
        if not self.free:
            raise OSError(28, "No space left on device")
        size = super().write(bytes(data)[: min(self.free, 4)])
        self.free -= size
        return size


def test_a_line_is_appended_completely_or_not_at_all(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"first\n")
    with NearlyFull(path, "a") as file:
        append_whole(file, b"second\n")
        with pytest.raises(OSError) as error:  # noqa: PT011
            append_whole(file, b"third\n")
        assert error.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"first\nsecond\n"


# What an NFS client does that a local file system does not. Real clients on nodes: tests/cluster/test_nfs.py.


def test_a_rename_that_succeeded_and_whose_answer_was_lost_is_no_error(tmp_path, monkeypatch):
    replace = os.replace

    def repeated(source, target):
        replace(source, target)
        raise FileNotFoundError(errno.ENOENT, "the second request finds no source", str(source))

    monkeypatch.setattr(os, "replace", repeated)
    write_atomic(tmp_path / "file", b"new")
    for content in (b"first", b"second"):
        publish_folder(_filled(writing_folder(tmp_path / "v1"), content), tmp_path / "v1")
        assert (tmp_path / "v1" / "model.bin").read_bytes() == content
        assert damage_of(tmp_path / "v1") == ""
    replace(tmp_path / "v1", tmp_path / ".v1.old")
    finish_interrupted_writes(tmp_path)
    assert damage_of(tmp_path / "v1") == ""
    remove_folder(tmp_path / "v1")
    assert os.listdir(tmp_path) == ["file"]


def test_a_rename_that_failed_is_an_error(tmp_path, monkeypatch):
    def fails(source, target):
        raise FileNotFoundError(errno.ENOENT, "gone", str(source))

    publish_folder(_filled(tmp_path / "t1", b"old"), tmp_path / "v1")
    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "file", b"new")
    with pytest.raises(FileNotFoundError):
        publish_folder(_filled(writing_folder(tmp_path / "v1"), b"new"), tmp_path / "v1")
    with pytest.raises(FileNotFoundError):
        remove_folder(tmp_path / "v1")
    monkeypatch.undo()
    assert (tmp_path / "v1" / "model.bin").read_bytes() == b"old"
    assert not (tmp_path / "file").exists()


def test_attempts_of_one_folder_have_different_names_and_are_removed_together(tmp_path):
    final, other = tmp_path / "step-1", writing_folder(tmp_path / "step-10", "a")
    attempts = [writing_folder(final), writing_folder(final, "a"), writing_folder(final, "b")]
    assert len(set(attempts)) == 3
    for folder in (final, other, *attempts):
        _filled(folder, b"x")
    remove_unfinished(final)
    assert sorted(tmp_path.iterdir()) == sorted((final, other))
