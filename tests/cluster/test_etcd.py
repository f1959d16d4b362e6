"""Names in etcd while the network of one node is cut: they expire, come back, and never exist twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Node, Nodes, wait_for

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]
LEASE_S = 3
PROCESS = """
import json, sys
from areal.api.errors import ArealError
from areal.system.discovery import EtcdRegistry
registry = EtcdRegistry(sys.argv[1], "e/t", lease_s=float(sys.argv[2]), timeout_s=2.0)
for line in sys.stdin:
    call, *words = json.loads(line)
    try:
        answer = {"result": getattr(registry, call)(*words)}
    except ArealError as error:
        answer = {"code": error.code}
    print(json.dumps(answer), flush=True)
"""


class Process:
    """A process of a run on a node, with its client of etcd."""

    def __init__(self, node: Node, address: str) -> None:
        argv = [sys.executable, "-c", PROCESS, address, str(LEASE_S)]
        self.popen = node.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *call: str) -> Any:
        """The result of a method of the registry; raises the code of its error as KeyError."""
        self.popen.stdin.write(json.dumps(call) + "\n")
        self.popen.stdin.flush()
        answer = json.loads(self.popen.stdout.readline())
        if "code" in answer:
            raise KeyError(answer["code"])
        return answer["result"]

    def names(self) -> dict[str, str]:
        return self.ask("list", "servers")


@pytest.fixture
def processes(make_nodes: Callable[..., Nodes], tmp_path: Path) -> tuple[Nodes, Process, Process]:
    """etcd on node1, and a process on node2 and on node3."""
    nodes = make_nodes(3)
    url = f"http://{nodes[1].address}:2379"
    with (tmp_path / "etcd.log").open("wb") as log:
        listen = ["--listen-client-urls", url, "--advertise-client-urls", url]
        argv = ["etcd", "--data-dir", str(tmp_path / "data"), *listen, "--heartbeat-interval", "100"]
        etcd = nodes[1].popen(argv, stdout=log, stderr=log)
    wait_for(lambda: (nodes[1].address, 2379) in nodes[1].listening() and etcd.poll() is None)
    return nodes, Process(nodes[2], url), Process(nodes[3], url)


def test_a_cut_off_process_expires_and_comes_back_without_doubles(processes: tuple[Nodes, Process, Process]) -> None:
    nodes, cut_off, other = processes
    cut_off.ask("add", "servers/0", "of node2")
    cut_off.ask("add", "servers/1", "of node2")
    other.ask("add", "servers/2", "of node3")
    for process in (cut_off, other):
        assert wait_for(lambda process=process: len(process.names()) == 3)
    nodes.cut(1, 2)
    wait_for(lambda: other.names() == {"servers/2": "of node3"})  # by the end of the lease, not by an event of the node
    assert len(cut_off.names()) == 3, "a node that was cut off uses the names that it knows"
    with pytest.raises(KeyError, match=r"process\.registry_silent"):
        cut_off.ask("add", "servers/3", "of node2")
    other.ask("add", "servers/1", "of node3")  # a new process takes one of the names
    nodes.heal(1, 2)
    expected = {"servers/0": "of node2", "servers/1": "of node3", "servers/2": "of node3"}
    for process in (other, cut_off):
        wait_for(lambda process=process: {name: process.names().get(name) for name in expected} == expected)
        assert set(process.names()) <= {*expected, "servers/3"}
    with pytest.raises(KeyError, match=r"process\.name_taken"):
        other.ask("add", "servers/0", "of node3")
