"""Servers that join and are lost during a run on three nodes: by command, by SIGKILL, and with their node."""

import itertools
import json

import pytest

from tests.cluster.cluster_run import LIMIT_S, Cluster, cluster_run, require, write_config
from tests.faults.ledger_proof import raw_events

FEW = pytest.param(4, marks=pytest.mark.timeout(1800))
MANY = pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
OPTIONS = ("cluster.node_silence_s=3", "recover.retries=50", "launcher.hang_s=60", "evaluator.freq_steps=null")


class Elastic:
    """A run, and what a test does to its servers."""

    def __init__(self, run, keeps=()):
        self.run = run
        self.keeps = keeps
        """A node with these processes does not lose power."""
        self.joins = []
        """(name of the server, version published when it joined, version that it held then)."""
        self.losses = []

    def join(self):
        """Add a server by command; returns when it serves."""
        name = self.run.attach("--add-replica").split()[0]
        self._has_joined(name)
        return name

    def _has_joined(self, name):
        result = {}

        def serves():
            status = self.run.status() or {}
            slots = (status.get("replicas") or {}).get("replicas") or []
            # A restarted server has the name of the one before it until the fleet has seen the new one.
            result.update({slot["name"]: (slot, status["replicas"]["version"]) for slot in slots})
            return name in result and result[name][0]["state"] == "serving" and self.run.all_ready([name])

        assert self.run.wait_for(serves, LIMIT_S, poll_s=0.1), self.run.tail(self.run.log_path, 30)
        slot, version = result[name]
        self.joins.append((name, version, slot["version"]))

    def leave(self, name):
        self.run.attach("--remove-replica", name)
        self.losses.append(f"{name} is removed")

    def kill(self, name):
        """SIGKILL; the server starts again and joins."""
        pid = self.run.kill([name])[name]
        self.losses.append(f"{name} is killed")
        assert self.run.wait_for(lambda: self.run.pids().get(name, pid) != pid, LIMIT_S, poll_s=0.1)
        self._has_joined(name)

    def lose_node(self, name):
        """The node of the server loses power; the server starts on another node, and the node comes back."""
        node = self.run.node_of(name)
        if node in self.run.nodes_of("launcher", *self.keeps):
            self.kill(name)
            return
        assert name in self.run.cut_power([node])
        self.losses.append(f"{name} and {node} are lost")
        assert self.run.wait_for(lambda: name in self.run.pids(), LIMIT_S, poll_s=0.1), "it moves to another node"
        self._has_joined(name)
        assert self.run.wait_for(lambda: self.run.all_ready(["trainer-0", "trainer-1"]), LIMIT_S, poll_s=0.1)
        self.run.restore()


@pytest.fixture(
    params=["ssh", pytest.param("ray", marks=pytest.mark.ray), pytest.param("slurm", marks=pytest.mark.slurm)]
)
def elastic(request, make_nodes, data, tmp_path):
    """With Slurm each server has a separate job, and a node for it."""
    launcher, keeps, options = request.param, (), OPTIONS
    require(launcher)
    if launcher == "slurm":
        keeps, options = ("trainer-0",), (*OPTIONS, "launcher.slurm.separate_jobs=true")
    cluster = Cluster(make_nodes(7 if launcher == "slurm" else 3, private=("/tmp/ray",)), launcher, tmp_path / "files")
    made = Elastic(cluster_run(cluster, tmp_path, write_config(tmp_path, data), *options), keeps)
    yield made
    made.run.abandon()


@pytest.mark.parametrize("count", [FEW, MANY])
def test_servers_join_and_are_lost_and_nothing_else_is(elastic, data, count):
    run, arguments = elastic.run, elastic.run.arguments
    run.arguments = [*arguments, "total_train_steps=2000"]
    run.start()
    run.wait_for_step(1)
    for turn in itertools.count():
        if len(elastic.losses) >= count:
            break
        name = elastic.join()
        if turn % 3 == 1:
            elastic.kill(name)
        elif turn % 3 == 2:
            elastic.lose_node(name)
        if len(elastic.losses) < count:
            elastic.leave(name)
        run.wait_for_step(run.steps() + 1)
    assert len(elastic.joins) >= count
    print(elastic.losses)  # noqa: T201 - shown by pytest -s
    late = [(name, published, held) for name, published, held in elastic.joins if held < published]
    assert late == [], "a server serves only with the newest weights"
    run.terminate(["launcher"])
    run.arguments = [*arguments, f"total_train_steps={run.steps() + 3}"]
    run.start()
    # A replay takes as long as the run, and does not depend on the launcher.
    run.prove(data, replays=count < 10 and run.cluster.launcher == "ssh")
    served = {name for event in raw_events(run.folder / "ledger") for name in event.get("replicas", ())}
    assert served >= {name for name, _, _ in elastic.joins}
    assert json.loads((run.folder / "summary.json").read_text())["exit_codes"]
