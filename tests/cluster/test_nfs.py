"""Runs whose shared folder each node sees as an NFS client does: `tests.cluster.nfs_folder`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.cluster_run import Cluster, cluster_run, write_config
from tests.cluster.nfs_folder import missing
from tests.cluster.nodes import Node, wait_for
from tests.faults.driver import ROOT

pytestmark = pytest.mark.timeout(900)


def mounts(node: Node, folder: Path) -> None:
    """The node sees the folder as an NFS client from now on."""
    node.popen([sys.executable, "-m", "tests.cluster.nfs_folder", str(folder)], cwd=ROOT, stdin=subprocess.DEVNULL)
    wait_for(lambda: node.run(["mountpoint", "-q", str(folder)]).returncode == 0)


@pytest.fixture(scope="module", autouse=True)
def can_mount() -> None:
    if problem := missing():
        pytest.fail(problem)


def test_the_folder_behaves_as_that_of_an_nfs_client(make_nodes, tmp_path):
    """What the other test relies on: else it would prove nothing."""
    nodes = make_nodes(2)
    for node in nodes:
        mounts(node, tmp_path)

    def python(node: int, source: str) -> str:
        done = nodes[node].run([sys.executable, "-S", "-c", f"import os, time; {source}"], cwd=tmp_path)
        return done.stdout.strip() + done.stderr.strip()

    (tmp_path / "old").write_text("old")
    writer = nodes[1].popen(
        [sys.executable, "-S", "-c", "f = open('new', 'wb', 0); f.write(b'x'); print(flush=True); input(); f.close()"],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    writer.stdout.readline()
    assert python(2, "print(os.path.getsize('new'))") == "0", "written, and not closed"
    writer.communicate("\n")
    assert python(2, "print(os.path.getsize('new'))") == "1"
    replaces = "g = open('old', 'rb', 0); print(flush=True); input(); print(g.read())"
    stale = nodes[2].popen(
        [sys.executable, "-S", "-c", replaces],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    stale.stdout.readline()
    python(1, "open('more', 'w').close(); os.replace('more', 'old')")
    assert "Stale file handle" in stale.communicate("\n")[1]


LOOKS = """
import os, sys, time
while True:
    for name in ("recover", "recover/next", "checkpoints", "checkpoints/actor", "weights"):
        os.path.exists(f"{sys.argv[1]}/{name}")
    time.sleep(0.1)
"""


def test_a_run_loses_nothing_in_a_folder_of_an_nfs_server(make_nodes, can_have_ssh, data, tmp_path):
    """Ledger, checkpoints, weights, payloads, names and logs; a trainer, a server and the controller are killed.

    Each node remembers that folders do not exist which another node makes a moment later.
    """
    nodes = make_nodes(2)
    cluster = Cluster(nodes, "ssh", tmp_path / "ssh")
    config = write_config(tmp_path, data)
    shared = tmp_path / "faults"
    shared.mkdir(exist_ok=True)
    for node in nodes:
        mounts(node, shared)
    options = ("cluster.node_silence_s=10", "total_train_steps=8", "saver.freq_steps=4")
    run = cluster_run(cluster, tmp_path, config, *options)
    for node in nodes:
        node.popen([sys.executable, "-S", "-c", LOOKS, str(run.folder)], cwd="/", stdin=subprocess.DEVNULL)
    try:
        run.start()
        run.wait_for_step(2)
        run.kill(["trainer-1", "server-1"])
        run.wait_for_step(run.steps() + 2)
        run.kill(["controller"])
        run.prove(data)
    finally:
        run.abandon()
    assert [path.name for path in sorted((run.folder / "checkpoints" / "actor").iterdir())] == [
        "step-000004",
        "step-000008",
    ]
    assert not [path for path in shared.rglob(".*") if path.suffix in (".tmp", ".writing", ".old", ".removed")]
