import errno
import os
from pathlib import Path

import pytest

from areal.api.config import ClusterSpecConfig, NameResolveConfig, SFTConfig
from areal.system import discovery
from areal.system.discovery import FileRegistry, registry_of
from tests.expect import raises_code
from tests.system.registry_cases import RegistryCases


class TestFiles(RegistryCases):
    @pytest.fixture
    def open_registry(self, tmp_path):
        return lambda: FileRegistry(tmp_path / "names")

    @pytest.fixture
    def until(self):
        def once(condition):
            assert condition()  # files on one machine: the change is there

        return once


def test_a_run_has_its_files_in_the_run_folder_or_below_the_given_root(tmp_path):
    cluster = ClusterSpecConfig(fileroot=str(tmp_path))
    config = SFTConfig(experiment_name="e", trial_name="t", cluster=cluster)
    registry_of(config).add("x", "1")
    assert (tmp_path / "e" / "t" / "names" / "x.json").read_text() == "1"
    elsewhere = NameResolveConfig(nfs_record_root=str(tmp_path / "nfs"))
    config = SFTConfig(
        experiment_name="e", trial_name="t", cluster=ClusterSpecConfig(fileroot=str(tmp_path), name_resolve=elsewhere)
    )
    registry_of(config).add("x", "2")
    assert (tmp_path / "nfs" / "e" / "t" / "x.json").read_text() == "2"


@pytest.mark.parametrize("kind", ["etcd", "etcd3"])
def test_a_missing_etcd_client_is_named(monkeypatch, kind):
    monkeypatch.setitem(__import__("sys").modules, "etcd3gw", None)
    cluster = ClusterSpecConfig(name_resolve=NameResolveConfig(type=kind))
    with raises_code("launch.package_missing", "cluster.name_resolve.type", "etcd3gw", ".[etcd]"):
        registry_of(SFTConfig(experiment_name="e", trial_name="t", cluster=cluster))


# What an NFS client does that a local file system does not.


@pytest.fixture
def registry(tmp_path):
    return FileRegistry(tmp_path / "names")


@pytest.mark.parametrize("replace", [False, True])
def test_a_lost_answer_to_a_link_or_rename_that_succeeded_is_a_success(registry, monkeypatch, replace):
    """The client repeats the request, which then fails: the name exists, or the temporary file does not."""
    name, code = ("replace", errno.ENOENT) if replace else ("link", errno.EEXIST)
    original = getattr(os, name)

    def twice(source, target):
        original(source, target)
        raise OSError(code, os.strerror(code), str(target))

    monkeypatch.setattr(os, name, twice)
    registry.add("controller", "here", replace=replace)
    assert registry.get("controller") == "here"
    assert [path.name for path in (registry._folder).iterdir()] == ["controller.json"]


def test_a_rename_whose_file_is_gone_is_an_error(registry, monkeypatch):
    registry.add("controller", "old")

    def fail(source, target):
        raise FileNotFoundError(errno.ENOENT, "gone", str(source))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(FileNotFoundError):
        registry.add("controller", "new", replace=True)
    assert registry.get("controller") == "old"


def test_a_file_replaced_during_the_read_is_read_again(registry, monkeypatch):
    registry.add("servers/0", "new")
    original, failures = Path.read_text, [errno.ESTALE, errno.ESTALE]

    def read(path, *args, **options):
        if failures:
            raise OSError(failures.pop(), "stale file handle", str(path))
        return original(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read)
    assert registry.get("servers/0") == "new"
    failures += [errno.ESTALE] * 2
    assert registry.list("servers") == {"servers/0": "new"}


def test_a_remembered_absence_ends_when_the_folder_is_opened(registry, monkeypatch):
    registry.add("servers/0", "new")
    original_read, original_open, is_fresh = Path.read_text, os.open, []

    def read(path, *args, **options):
        if not is_fresh:
            raise FileNotFoundError(errno.ENOENT, "remembered", str(path))
        return original_read(path, *args, **options)

    def open_folder(path, flags, *args, **options):
        if flags & os.O_DIRECTORY:
            is_fresh.append(True)
        return original_open(path, flags, *args, **options)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "open", open_folder)
    assert registry.get("servers/0") == "new"


def test_a_name_that_vanishes_after_the_listing_is_left_out(registry, monkeypatch):
    registry.add("servers/0", "a")
    registry.add("servers/1", "b")
    original = Path.rglob

    def listed(path, pattern):
        result = list(original(path, pattern))
        registry.remove("servers/0")
        return result

    monkeypatch.setattr(Path, "rglob", listed)
    assert registry.list("servers") == {"servers/1": "b"}


def test_a_folder_that_has_not_changed_is_not_read_again(tmp_path, monkeypatch):
    now_s, reads = [0.0], []
    monkeypatch.setattr(discovery.time, "monotonic", lambda: now_s[0])
    read = discovery._read
    monkeypatch.setattr(discovery, "_read", lambda path: reads.append(path.name) or read(path))
    registry, writer = FileRegistry(tmp_path), FileRegistry(tmp_path)
    assert registry.list("servers") == {}
    writer.add("servers/0", "a")

    def listed():
        reads.clear()
        return registry.list("servers"), len(reads)

    for at_s in (10.0, 11.0, 12.5):  # the time of the folder says little before two seconds
        now_s[0] = at_s
        assert listed() == ({"servers/0": "a"}, 1)
    now_s[0] = 13.0
    assert listed() == ({"servers/0": "a"}, 0)
    writer.add("servers/0", "b", replace=True)
    assert listed()[0] == {"servers/0": "b"}
    now_s[0] = 20.0
    listed()
    assert listed() == ({"servers/0": "b"}, 0)
    writer.remove("servers/0")
    assert listed() == ({}, 0)


def test_names_in_a_folder_within_a_folder_are_seen(tmp_path, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(discovery.time, "monotonic", lambda: now_s[0])
    registry = FileRegistry(tmp_path)
    registry.add("trainer/store/0", "a")
    for now_s[0] in (1.0, 5.0, 9.0):
        assert registry.list("trainer") == {"trainer/store/0": "a"}
    registry.add("trainer/store/1", "b")
    assert len(registry.list("trainer")) == 2
