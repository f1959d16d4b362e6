import re
import threading

import pytest

from areal.api.config import ClusterSpecConfig, NameResolveConfig, SFTConfig
from areal.api.errors import LaunchError, RequestError, ServerUnavailable
from areal.system.discovery import NameRegistry, registry_of


@pytest.fixture
def registry(tmp_path):
    return NameRegistry(tmp_path / "names")


def test_add_get_list_remove_clear(registry):
    assert registry.get("servers/0") is None
    assert registry.list("servers") == {}
    registry.add("servers/0", "0")
    registry.add("servers/1", "1")
    registry.add("serversx", "2")
    registry.add("ready/trainer-0", "3")
    assert registry.list("servers") == {"servers/0": "0", "servers/1": "1"}
    assert registry.list("servers/") == registry.list("servers")
    assert len(registry.list("")) == 4
    registry.remove("servers/0")
    registry.remove("servers/0")
    assert registry.get("servers/0") is None
    registry.clear()
    assert registry.list("") == {}


def test_taken_name_is_refused_unless_replaced(registry):
    registry.add("controller", "first")
    with pytest.raises(LaunchError, match=r"controller .*first") as error:
        registry.add("controller", "second")
    assert error.value.code == "process.name_taken"
    assert registry.get("controller") == "first"
    registry.add("controller", "second", replace=True)
    assert registry.get("controller") == "second"


@pytest.mark.parametrize("name", ["", "../x", "a//b", "/a", ".hidden", "a b"])
def test_names_cannot_leave_the_folder(registry, name):
    with pytest.raises(RequestError, match=re.escape(repr(name))) as error:
        registry.add(name, "x")
    assert error.value.code == "process.bad_name"


def test_wait_sees_a_name_that_comes_later(registry):
    timer = threading.Timer(0.1, registry.add, ("controller", "here"))
    timer.start()
    assert registry.wait("controller", 200) == "here"
    timer.join()


def test_wait_names_what_it_waited_for(registry):
    with pytest.raises(ServerUnavailable, match=r"ready/server-0 .* 0.1 s") as error:
        registry.wait("ready/server-0", 0.1)
    assert error.value.code == "process.not_registered"


def test_readers_never_see_half_a_value(registry):
    long = "x" * 100_000
    registry.add("a", long)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            registry.add("a", long, replace=True)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert {len(registry.get("a")) for _ in range(200)} == {100_000}
    finally:
        stop.set()
        writer.join()


def test_registry_of_a_run(tmp_path):
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
