"""The nodes of `areal.launcher.ssh`."""

import pytest

from areal.launcher import ssh
from tests.expect import raises_code

WORDS = ["--hosts", "root@node1,node2:2222,node3", "--config", "examples/quickstart/sft.yaml"]


@pytest.mark.parametrize(
    ("override", "names"),
    [("launcher.nodelist=node[1-2]", ["node1", "node2"]), ("launcher.exclude=node2", ["node1", "node3"])],
)
def test_the_hosts_are_those_that_the_options_choose(monkeypatch, override, names):
    used = []
    monkeypatch.setattr(ssh, "NodeCluster", lambda nodes, config: used.extend(node.name for node in nodes))
    monkeypatch.setattr(ssh, "launch", lambda request, cluster: 0)
    assert ssh.run_command([*WORDS, override]) == 0
    assert used == names


def test_a_list_without_any_of_the_hosts_is_refused():
    with raises_code("launch.no_node_chosen"):
        ssh.run_command([*WORDS, "launcher.nodelist=other"])
