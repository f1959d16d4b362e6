"""The nodes that the other tests of this folder run on."""

import os
import subprocess
import sys

import psutil

from areal.system.process import is_alive
from tests.cluster.nodes import NETWORK, wait_for

SERVES = "import socket, sys\nwith socket.create_server((sys.argv[1], 80)) as server:\n  while True: server.accept()"
CONNECTS = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()"


def serve(node):
    node.popen([sys.executable, "-c", SERVES, node.address])
    wait_for(lambda: (node.address, 80) in node.listening())


def connects(node, other, port=80):
    return node.run([sys.executable, "-c", CONNECTS, other, str(port)]).returncode == 0


def test_a_node_has_a_name_an_address_and_processes_of_its_own(make_nodes):
    nodes = make_nodes(2)
    assert nodes[2].run(["hostname"]).stdout.strip() == "node2"
    serve(nodes[2])
    assert connects(nodes[1], "node2")
    assert not connects(nodes[1], nodes[1].address)
    assert not connects(nodes[2], "127.0.0.1")
    assert len(nodes[2].pids()) == 1
    assert nodes[1].pids() == []


def test_files_are_shared_but_not_shared_memory(make_nodes, tmp_path):
    private = tmp_path / "private"
    nodes = make_nodes(2, private=(str(private),))
    nodes[1].run(["touch", "shared", "/dev/shm/own", str(private / "own")], cwd=tmp_path)
    assert nodes[2].run(["ls"], cwd=tmp_path).stdout.split() == ["private", "shared"]
    assert nodes[2].run(["ls", "/dev/shm", str(private)]).stdout.split() == ["/dev/shm:", f"{private}:"]


def test_nodes_that_are_cut_lose_each_other_and_no_other(make_nodes):
    nodes = make_nodes(3)
    serve(nodes[2])
    nodes.cut(1, 2)
    assert not connects(nodes[1], "node2")
    assert connects(nodes[3], "node2")
    nodes.heal(1, 2)
    assert connects(nodes[1], "node2")


def test_a_pulled_cable_leaves_the_processes(make_nodes):
    nodes = make_nodes(2)
    serve(nodes[2])
    nodes[2].cable("down")
    assert not connects(nodes[1], "node2")
    assert len(nodes[2].pids()) == 1
    nodes[2].cable("up")
    wait_for(lambda: connects(nodes[1], "node2"))


def test_a_node_without_power_comes_back_empty_and_reachable(make_nodes):
    nodes = make_nodes(2)
    serve(nodes[2])
    pids = nodes[2].pids()
    nodes[2].power_off()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not nodes[2].is_on
    nodes[2].power_on()
    assert nodes[2].pids() == []
    serve(nodes[2])
    wait_for(lambda: connects(nodes[1], "node2"))


def test_everything_ends_with_the_owner_that_is_killed(can_have_nodes):
    argv = [sys.executable, "-m", "tests.cluster.nodes", "2", "--", "sh", "-c", "echo up; sleep 7654"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout.readline() == "up\n"
            made = psutil.Process(owner.pid).children(recursive=True)
        finally:
            owner.kill()
    assert len(made) >= 7  # a bridge, two nodes of three processes
    wait_for(lambda: not any(map(is_alive, made)))


def test_an_ssh_server_answers_on_the_address_of_its_node(make_nodes, ssh):
    nodes = make_nodes(2)
    host, _, port = ssh.serve(nodes[2]).partition(":")
    assert host == f"{NETWORK}.2"
    options = [word for option in (*ssh.options, "BatchMode=yes") for word in ("-o", option)]
    result = nodes[1].run(["ssh", *options, "-p", port, host, "hostname"], env=os.environ)
    assert (result.returncode, result.stdout.strip()) == (0, "node2")
