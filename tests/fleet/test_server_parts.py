"""The parts of a server over several machines find each other through the registry of the run."""

import json
import os
import signal
import socket

from areal.system.network import Host as NetHost
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
    given = [f"127.0.0.2:{meeting['port']}", "127.0.0.2", str(meeting["port"])]
    for host in (leader, follower):
        (server,) = [
            one for one in processes_of(paths) if one.ppid() == host.pid and "fake_foreign" in str(one.cmdline())
        ]
        assert server.cmdline()[-3:] == given
        assert server.environ()["VLLM_HOST_IP"] == ("127.0.0.2" if host is leader else "127.0.0.1")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("0.0.0.0", meeting["port"]))
        server.listen()  # as torch's store does, on all addresses
    assert follower.registry.list("servers").keys() == {"servers/4"}
    assert wait_until(follower.beat)
    for host in (leader, follower):
        os.kill(host.pid, signal.SIGTERM)
        assert host.wait_end() in (0, None) if host is follower else host.process.wait(timeout=200) == 0
