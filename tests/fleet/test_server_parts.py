"""The parts of a server over several machines find each other through the registry of the run."""

import asyncio
import json
import os
import signal
import sys

import psutil
import pytest

from areal.api.errors import ServerUnavailable
from areal.fleet import server_host as server_parts
from areal.fleet.server_host import first_part, is_part, meeting_point
from areal.system.discovery import FileRegistry
from areal.system.network import Host as NetHost
from areal.system.network import bind_socket
from tests.fleet.foreign_host import Host, host_argv, processes_of, run_paths, wait_until


def test_all_parts_of_a_server_get_the_port_that_part_0_reserved(tmp_path, monkeypatch):
    """A part without requests is ready once its process runs; it listens nowhere for the run."""
    paths = run_paths(tmp_path)
    words = ("{first}", "{first_address}", "{first_port}")
    at = NetHost(bind="127.0.0.2", advertise="127.0.0.2", node="a")
    follower = Host(paths, host_argv(paths, *words), part=1, num_parts=2)
    leader = Host(paths, host_argv(paths, *words), part=0, num_parts=2, host=at)
    wait_until(lambda: follower.registry.get("ready/server-4-part-1"))
    leader.wait_ready()
    meeting = json.loads(leader.registry.get("parts/4"))
    assert meeting["address"] == "127.0.0.2"
    inputs = [f"127.0.0.2:{meeting['port']}", "127.0.0.2", str(meeting["port"])]
    for host in (leader, follower):
        (server,) = [
            item for item in processes_of(paths) if item.ppid() == host.pid and "fake_foreign" in str(item.cmdline())
        ]
        assert server.cmdline()[-3:] == inputs
        assert server.environ()["VLLM_HOST_IP"] == ("127.0.0.2" if host is leader else "127.0.0.1")
        assert server.environ()["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    listening = {
        connection.laddr
        for connection in psutil.Process(leader.pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert ("127.0.0.2", meeting["port"]) in listening
    assert all(at.ip.startswith("127.") for at in listening)
    assert follower.registry.list("servers").keys() == {"servers/4"}
    assert wait_until(follower.beat)
    for host in (leader, follower):
        os.kill(host.pid, signal.SIGTERM)
        assert host.wait_end() in (0, None) if host is follower else host.process.wait(timeout=200) == 0


ECHO = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    for _ in range(2):
        client, _ = server.accept()
        client.sendall(client.recv(100).upper())
        client.close()
"""


async def test_only_machines_of_its_parts_reach_the_store(caplog):
    """The connection is relayed to the store in a child process on loopback; another one is closed without a byte."""
    allowed, asked = [], []

    def may_join(peer):
        asked.append(peer)
        return allowed.pop()

    bound = bind_socket()
    async with meeting_point(bound, may_join, (sys.executable, "-S", "-c", ECHO)):
        for answer in (True, False, True):
            allowed.append(answer)
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            writer.write(b"key")
            assert await reader.read() == (b"KEY" if answer else b"")
            writer.close()
    assert asked == ["127.0.0.1"] * 3
    ours = [record.levelname for record in caplog.records if record.name == server_parts.__name__]
    assert ours == ["WARNING"]


def _silent_registry(peer):
    raise ServerUnavailable("etcd does not answer", code="process.registry_silent")


@pytest.mark.parametrize("may_join", [lambda peer: True, _silent_registry])
async def test_a_store_that_does_not_start_and_a_silent_registry_are_reported(caplog, may_join):
    bound = bind_socket()
    async with meeting_point(bound, may_join, (sys.executable, "-S", "-c", "")):
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        assert await reader.read() == b""
        writer.close()
    assert [(record.levelname, record.name) for record in caplog.records] == [("ERROR", server_parts.__name__)]


SILENT = (sys.executable, "-S", "-c", "import time; time.sleep(99)")


def _silent_stores():
    return [child for child in psutil.Process().children() if child.cmdline() == list(SILENT)]


async def test_a_store_that_still_starts_ends_with_its_host():
    bound = bind_socket()
    async with asyncio.timeout(20):
        async with meeting_point(bound, lambda peer: True, SILENT):
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            while not _silent_stores():
                await asyncio.sleep(0.01)
        assert await reader.read() == b""
    writer.close()
    assert not _silent_stores()


async def test_a_store_that_prints_no_port_is_given_up(caplog, monkeypatch):
    monkeypatch.setattr(server_parts, "STORE_START_S", 0.05)
    bound = bind_socket()
    async with meeting_point(bound, lambda peer: True, SILENT):
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        assert await reader.read() == b""
        assert not _silent_stores()
        writer.close()
    assert [(record.levelname, record.name) for record in caplog.records] == [("ERROR", server_parts.__name__)]


def test_the_machines_of_a_server_are_those_that_its_parts_registered(tmp_path):
    registry, first = FileRegistry(tmp_path), NetHost(bind="10.0.0.1", advertise="10.0.0.1", node="a")
    registry.add("parts/3", json.dumps({"address": "10.0.0.1", "port": 1}))
    other = NetHost(bind="10.0.0.2", advertise="10.0.0.2", node="b")
    assert first_part(registry, 3, 1, other, None, 1.0) == ("10.0.0.1", 1)
    result = [is_part(registry, 3, 2, first, peer) for peer in ("10.0.0.1", "10.0.0.2", "127.0.0.1", "10.0.0.3")]
    assert result == [True, True, True, False]
