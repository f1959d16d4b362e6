"""`python -m areal.launcher.ssh` on three nodes with real ssh servers."""

import json
from pathlib import Path

import psutil
import pytest

from tests.cluster.cluster_run import Cluster, cluster_run, foreign_sockets, write_config
from tests.cluster.nodes import wait_for

pytestmark = pytest.mark.timeout(900)
SILENCE = ("cluster.node_silence_s=6", "cluster.node_connect_s=120", "launcher.hang_s=60")


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def nodes(make_nodes):
    return make_nodes(3)


@pytest.fixture
def cluster(nodes, can_have_ssh, tmp_path):
    return Cluster(nodes, "ssh", tmp_path / "ssh")


@pytest.fixture
def make_run(cluster, data, tmp_path):
    """Starts the launcher on node1, with the controller, server-0 and rank 0. node2: server-1; node3: rank 1."""
    runs = []

    def make(*overrides):
        run = cluster_run(cluster, tmp_path, write_config(tmp_path, data), *SILENCE, *overrides)
        run.environ = {"HF_TOKEN": "hf_secret", "WANDB_API_KEY": "wandb_secret"}
        runs.append(run)
        run.start()
        return run

    yield make
    for run in runs:
        run.abandon()


def test_a_run_shows_no_secret_and_survives_the_loss_of_a_servers_and_of_a_trainers_node(
    make_run, nodes, cluster, data
):
    run = make_run("total_train_steps=16")
    run.wait_for_step(1)
    assert foreign_sockets(nodes) == []
    assert all(len(node.listening()) > 1 for node in nodes)
    token = (run.folder / "token").read_text()
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [text for text in commands if token in text or "hf_secret" in text or "wandb_secret" in text]
    environ = Path(f"/proc/{next(pid for pid in nodes[2].pids() if 'inference.server' in command(pid))}/environ")
    assert "HF_TOKEN=hf_secret" in environ.read_text().split("\0")
    nodes[2].power_off()
    run.wait_for_step(run.steps() + 3)
    nodes[2].power_on()
    cluster.prepare(nodes[2])
    assert "trainers continue from" not in run.log_path.read_text(), "the loss of a server restarts nothing else"
    nodes[3].power_off()
    run.wait_for_step(run.steps() + 3)
    nodes[3].power_on()
    cluster.prepare(nodes[3])
    run.prove(data)
    restarts = json.loads((run.folder / "summary.json").read_text())["restarts"]
    assert restarts.keys() >= {"server-1", "trainers"}
    assert "controller" not in restarts
    text = run.log_path.read_text()
    assert "launch.node_lost" in text or "is lost" in text


def test_a_pulled_cable_ends_the_processes_of_the_node_before_they_run_elsewhere(make_run, nodes, data):
    run = make_run("total_train_steps=12")
    run.wait_for_step(2)
    before = set(nodes[3].pids())
    nodes[3].cable("down")
    wait_for(lambda: "trainers continue from" in run.log_path.read_text(), 120.0)
    assert not [pid for pid in before & set(nodes[3].pids()) if "areal.trainer" in command(pid)]
    nodes[3].cable("up")
    run.prove(data, replays=False)
