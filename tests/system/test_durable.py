import json
import os

import pytest

from areal.api.errors import InputError
from areal.system.durable import COMPLETE, is_complete, publish_folder, require_complete, write_atomic


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
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def _filled(folder, text):
    (folder / "sub").mkdir(parents=True)
    (folder / "model.bin").write_bytes(text)
    (folder / "sub" / "x").write_bytes(b"1")
    return folder


def test_published_folder_is_complete_until_a_file_changes_or_goes(tmp_path):
    final = tmp_path / "v1"
    temporary = _filled(tmp_path / "tmp", b"abc")
    assert not is_complete(temporary)
    publish_folder(temporary, final)
    assert is_complete(final)
    assert not temporary.exists()
    assert json.loads((final / COMPLETE).read_text()) == {"files": {"model.bin": 3, "sub/x": 1}}
    (final / "model.bin").write_bytes(b"ab")
    assert not is_complete(final)
    (final / "model.bin").write_bytes(b"abd")
    (final / "sub" / "x").unlink()
    with pytest.raises(InputError, match="not a complete folder"):
        require_complete(final)


@pytest.mark.parametrize("marker", [b"", b"{", b"[]", b"{}", b'{"files": 3}'])
def test_damaged_marker_is_not_complete(tmp_path, marker):
    (tmp_path / COMPLETE).write_bytes(marker)
    assert not is_complete(tmp_path)


def test_publishing_again_replaces_the_folder(tmp_path):
    final = tmp_path / "v1"
    publish_folder(_filled(tmp_path / "t1", b"old"), final)
    publish_folder(_filled(tmp_path / "t2", b"newer"), final)
    assert (final / "model.bin").read_bytes() == b"newer"
    assert os.listdir(tmp_path) == ["v1"]
