"""Nodes try each other's ports before a run: real agents, each connected by a pipe."""

import pytest

from areal.api.errors import LaunchError
from areal.launcher import preflight as port_check
from areal.launcher.preflight import PortProbe, check_ports, unreachable
from areal.system.network import LOOPBACK, bind_socket
from tests.expect import raises_code
from tests.launcher.test_nodes import connections


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with connections(tmp_path_factory.mktemp("run")) as connect:
        yield {name: (connect(name), LOOPBACK) for name in ("node1", "node2", "node3")}


def test_nodes_that_reach_each_other_pass_and_their_ports_are_closed_again(nodes, monkeypatch):
    asked = []
    link, _ = nodes["node1"]
    send_reach = type(link).send_reach

    def send(self, targets, limit_s):
        asked.append((self.node, targets))
        return send_reach(self, targets, limit_s)

    monkeypatch.setattr(type(link), "send_reach", send)
    check_ports(nodes)
    assert {(node, target[0]) for node, targets in asked for target in targets} == {
        (item, other) for item in nodes for other in nodes if item != other
    }
    result = unreachable(asked[0][1], 1.0, lambda: None)
    assert "node2" in result
    assert "node3" in result


def test_a_node_whose_port_accepts_nothing_is_named(nodes, monkeypatch):
    with bind_socket() as closed:  # bound, not listening
        port = closed.getsockname()[1]
        link, _ = nodes["node2"]
        listen = type(link).open_port
        monkeypatch.setattr(
            type(link),
            "open_port",
            lambda self, address: port if address and self.node == "node2" else listen(self, address),
        )
        with pytest.raises(LaunchError) as error:
            check_ports(nodes)
    assert error.value.code == "launch.port_closed"
    assert "node2" in str(error.value)
    assert str(port) in str(error.value)


def test_an_address_of_another_machine_cannot_be_listened_on(nodes):
    with raises_code("process.cannot_listen"):
        check_ports({"node1": (nodes["node1"][0], "192.0.2.1")})


def test_a_port_that_does_not_answer_is_named_after_the_limit(monkeypatch):
    """The queue of connections is full: the system then drops requests, as many firewalls do."""
    monkeypatch.setattr(port_check, "BACKLOG", 0)
    probe, calls = PortProbe(), []
    targets = [("node2", LOOPBACK, probe.open_port(LOOPBACK))]
    assert unreachable(targets, 1.0, lambda: None) == ""
    result = unreachable(targets, 0.2, lambda: calls.append(1))
    assert "node2" in result
    assert calls
    assert probe.open_port("") == 0
