"""The name registry in an actor of a real Ray cluster on this machine."""

import os
import signal
import uuid

import psutil
import pytest

from areal.api.config import ClusterSpecConfig, NameResolveConfig, SFTConfig
from areal.system import ray_registry
from areal.system.discovery import registry_of
from areal.system.ray_registry import RayRegistry
from tests.cluster.nodes import RAY_OPTIONS, urgent_children, wait_for
from tests.expect import raises_code
from tests.system.registry_cases import RegistryCases

ray = pytest.importorskip("ray", reason="needs the package ray: pip install -e '.[ray]'")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ray_node():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_OPTIONS.items():
            patch.setenv(name, value)
        head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
        with urgent_children():
            made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def open_registry(ray_node):
    run, opened = f"e/{uuid.uuid4().hex}", []

    def open_registry(*, makes_actor=True, timeout_s=60.0):
        opened.append(RayRegistry(run, makes_actor=makes_actor, timeout_s=timeout_s))
        return opened[-1]

    yield open_registry
    for registry in opened:
        registry.close()


@pytest.fixture
def until():
    return wait_for


class TestRay(RegistryCases):
    pass


def test_a_run_sees_only_its_own_names(ray_node):
    names = ClusterSpecConfig(name_resolve=NameResolveConfig(type="ray"))
    first, second = (registry_of(SFTConfig(experiment_name="e", trial_name=name, cluster=names)) for name in "ab")
    first.add("controller", "first")
    assert second.get("controller") is None
    first.close()
    second.close()


def test_names_survive_the_death_of_the_actor_but_removed_ones_do_not_return(open_registry):
    server, launcher = open_registry(), open_registry()
    server.add("servers/0", "a")
    server.add("servers/1", "b")
    launcher.remove("servers/1")
    wait_for(lambda: list(server._own) == ["servers/0"])
    own = os.readlink("/proc/self/ns/pid")  # not that of a test on nodes at the same time
    [actor] = [
        process
        for process in psutil.process_iter()
        if "ray::NameActor" in "".join(safe_cmdline(process)) and os.readlink(f"/proc/{process.pid}/ns/pid") == own
    ]
    actor.send_signal(signal.SIGKILL)
    wait_for(lambda: launcher.list("servers") == {"servers/0": "a"})
    assert launcher.get("servers/1") is None


def test_without_the_actor_of_the_launcher_a_process_says_so_after_the_limit(open_registry):
    with raises_code("process.registry_silent"):
        open_registry(makes_actor=False, timeout_s=0.3).get("controller")


def test_an_actor_that_starts_slowly_is_not_given_up(open_registry, monkeypatch):
    """Ray ends an actor whose last handle is dropped."""
    monkeypatch.setattr(ray_registry, "_CALL_S", 0.1)
    registry = open_registry()
    registry.add("controller", "here")
    actor = registry._actor
    assert open_registry().get("controller") == "here"
    assert registry._actor is actor


def safe_cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
