"""The launcher as a job of a real Ray cluster, submitted on a machine that is not one of its nodes."""

import subprocess
import sys

import pytest

from tests.cluster.cluster_run import left_behind, write_config
from tests.cluster.nodes import ray_command, start_ray, wait_for
from tests.faults.driver import ROOT
from tests.faults.ledger_proof import check_episodes, raw_events

pytest.importorskip("ray", reason="needs the package ray: pip install -e '.[ray]'")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]
LIMIT_S = 600.0


class Jobs:
    """Jobs of one configuration in a cluster of two nodes; the third machine submits them."""

    def __init__(self, nodes, config):
        self.nodes = nodes
        self._launcher = [sys.executable, "-m", "areal.launcher.ray", "--config", str(config)]
        self._launcher += ["cluster.n_nodes=2", "cluster.node_connect_s=120", "recover.freq_steps=100"]

    def ray(self, verb, *words):
        address = f"--address=http://{self.nodes[1].address}:8265"
        return self.nodes[3].run(ray_command("job", verb, address, *words), cwd="/", timeout_s=LIMIT_S)

    def submit(self, name, *overrides, flags=()):
        """Submit a job named `name`; without --no-wait it is followed to its end."""
        return self.ray("submit", f"--submission-id={name}", *flags, "--", *self._launcher, *overrides)

    def status(self, name):
        return self.ray("status", name).stdout


@pytest.fixture
def jobs(make_nodes, data, tmp_path):
    nodes = make_nodes(3, private=("/tmp/ray",))
    start_ray(nodes[1], dashboard=True)
    start_ray(nodes[2], nodes[1])
    return Jobs(nodes, write_config(tmp_path, data))


def test_a_job_that_is_stopped_saves_leaves_nothing_and_is_continued_by_the_next_one(jobs, tmp_path):
    ledger = tmp_path / "faults" / "run" / "ledger"

    def steps():
        return sum(event["event"] == "consumed" for event in raw_events(ledger)) if ledger.exists() else 0

    saves = '{"env_vars": {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": "320"}}'
    flags = ("--no-wait", f"--runtime-env-json={saves}")
    submitted = jobs.submit("first", "total_train_steps=2000", flags=flags)
    assert submitted.returncode == 0, submitted.stderr
    wait_for(lambda: steps() >= 3 or "failed" in jobs.status("first"), LIMIT_S)
    assert "RUNNING" in jobs.status("first"), jobs.ray("logs", "first").stdout
    assert jobs.ray("stop", "first").returncode == 0
    assert "was stopped" in jobs.status("first")
    wait_for(lambda: left_behind(jobs.nodes) == [])
    assert [event["step"] for event in raw_events(ledger) if event["event"] == "committed"] == [steps()]

    followed = jobs.submit("second", f"total_train_steps={steps() + 3}")
    assert followed.returncode == 0, followed.stdout
    assert "succeeded" in jobs.status("second")
    wait_for(lambda: left_behind(jobs.nodes) == [])
    events = raw_events(ledger)
    assert [event["step"] for event in events if event["event"] == "attached" and event["step"]] != []
    assert check_episodes(events).problems == []
    folder = ledger.parent
    audit = subprocess.run([sys.executable, "-m", "areal", "audit", str(folder)], cwd=ROOT, capture_output=True)
    assert audit.returncode == 0, audit.stdout


def test_a_job_that_fails_says_why(jobs):
    failed = jobs.submit("wrong", "cluster.n_nodes=9", "cluster.node_connect_s=1")
    assert failed.returncode == 1
    assert "[launch.ray_too_small]" in failed.stdout
    assert "failed" in jobs.status("wrong")
    wait_for(lambda: left_behind(jobs.nodes) == [])
