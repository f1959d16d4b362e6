"""What Ray reserves for the processes of a plan, and which of its nodes a run uses. Without Ray."""

import dataclasses
from types import SimpleNamespace

from areal.api.config import LauncherConfig
from areal.launcher.placement import Machine
from areal.launcher.ray import demands, living_nodes, send_token
from areal.system.network import Host
from tests.launcher.fake_backend import planned_process

MIB = 2**20


def planned(name, node, gpus=(), threads=1):
    return dataclasses.replace(planned_process(name), host=Host(node=node), gpus=gpus, num_threads=threads)


def test_processes_with_gpus_reserve_their_threads_and_memory():
    plan = SimpleNamespace(
        processes=(
            planned("controller", "a"),
            planned("server-0", "a", ("0", "1"), 4),  # of each of its two workers
            planned("trainer-0", "b", ("0",), 4),
            planned("trainer-1", "b", ("1",), 4),
        )
    )
    machines = [
        Machine(cores=16, memory_bytes=900 * MIB, host=Host(node="a")),
        Machine(cores=4, memory_bytes=300 * MIB, host=Host(node="b")),
    ]
    options = LauncherConfig(inference_server_mem_per_gpu=400, trainer_mem_per_gpu=600)
    result = {item.name: resources for item, resources in demands(plan, machines, options)}
    assert result["controller"] == {"CPU": 1.0}
    assert result["server-0"] == {"CPU": 8.0, "GPU": 2.0, "memory": 800.0 * MIB}
    half = {"CPU": 2.0, "GPU": 1.0, "memory": 150.0 * MIB}  # the node has less than both ranks want
    assert result["trainer-0"] == result["trainer-1"] == half


def test_a_run_uses_the_chosen_nodes_of_ray():
    def node(name, address, **more):
        has = {"CPU": 4.0, "memory": 9.0}
        return {"Alive": True, "NodeID": name, "NodeManagerHostname": name, "NodeManagerAddress": address} | {
            "Resources": has | more
        }

    ray = SimpleNamespace(nodes=lambda: [node(f"n{index}", f"10.0.0.{index}") for index in range(1, 5)])
    assert list(living_nodes(ray)) == ["n1", "n2", "n3", "n4"]
    assert list(living_nodes(ray, "n[1-3]", "10.0.0.2")) == ["n1", "n3"]
    assert [machine.memory_bytes for machine in living_nodes(ray, "n4").values()] == [9]


def test_a_token_of_the_user_is_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for environ, has_file, mode in [
        ({}, False, None),
        ({}, True, "token"),
        ({"RAY_AUTH_TOKEN_PATH": "x"}, False, "token"),
        ({"RAY_AUTH_MODE": "disabled"}, True, "disabled"),
    ]:
        (tmp_path / ".ray").mkdir(exist_ok=True)
        (tmp_path / ".ray" / "auth_token").unlink(missing_ok=True)
        if has_file:
            (tmp_path / ".ray" / "auth_token").write_text("secret")
        send_token(environ)
        assert environ.get("RAY_AUTH_MODE") == mode
