"""The Slurm launcher on a real Slurm with three nodes: the run completes, or ends in one line with nothing left."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal.launcher.slurm_job import facts_of, meaning_of
from tests.cluster.nodes import Nodes
from tests.cluster.slurm_cluster import SlurmCluster, missing

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 240.0


def wait_for(condition: Callable[[], Any], what: str, limit_s: float = _LIMIT_S) -> Any:
    deadline = time.monotonic() + limit_s
    while not (result := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return result


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The quickstart's rows and its model, before any training."""
    folder = tmp_path_factory.mktemp("data")
    command = [sys.executable, "examples/quickstart/prepare.py", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


class Run:
    """Commands of the launcher for one run folder."""

    def __init__(self, slurm: SlurmCluster, data: Path, root: Path) -> None:
        self.slurm = slurm
        self.folder = root / "quickstart" / "grpo"
        self._root = root
        self._data = data

    def launch(self, *words: str) -> "subprocess.Popen[str]":
        """Start the launcher on the first node, for a run of few short steps that recovers."""
        options = {
            "cluster.fileroot": self._root,
            "cluster.n_nodes": 3,
            "train_dataset.path": self._data / "train.jsonl",
            "valid_dataset.path": self._data / "held_out.jsonl",
            "train_dataset.batch_size": 4,
            "gconfig.n_samples": 2,
            "actor.path": self._data / "model",
            "rollout.should_accept_fn": "''",
            "evaluator.eval_before_train": "false",
            "evaluator.freq_steps": 10000,
            "evaluator.stop_at": "{}",
            "recover.mode": "auto",
            "recover.freq_steps": 2,
            "launcher.trainer_mem_per_gpu": 1000,
            "launcher.inference_server_mem_per_gpu": 1000,
            "launcher.stop_grace_s": 3,
            "launcher.slurm.time_limit": 30,
        }
        inputs = {word.partition("=")[0] for word in words}
        overrides = [f"{name}={value}" for name, value in options.items() if name not in inputs]
        return self.command("--config", "examples/quickstart/grpo.yaml", *overrides, *words)

    def command(self, *words: str) -> "subprocess.Popen[str]":
        argv = [sys.executable, "-m", "areal.launcher.slurm", *words]
        return self.slurm.popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @property
    def job(self) -> str:
        path = self.folder / "slurm" / "job.json"
        return json.loads(path.read_text())["job"] if path.exists() else ""

    @property
    def step(self) -> int:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def facts(self):
        return facts_of(self.slurm.command("scontrol", "show", "job", "--oneliner", self.job).stdout)

    def await_step(self, step: int) -> None:
        wait_for(lambda: self.step >= step, f"step {step}")

    def assert_clean(self) -> None:
        """The conservation equation of the ledger holds, and Slurm has no job."""
        audit = [sys.executable, "-m", "areal.ledger", "audit", str(self.folder)]
        done = subprocess.run(audit, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for(lambda: not self.slurm.queue(), "an empty queue")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[SlurmCluster]:
    assert not (problem := missing()), problem
    with Nodes(3) as nodes:
        yield SlurmCluster(nodes, tmp_path_factory.mktemp("slurm") / "cluster")


@pytest.fixture
def run(slurm: SlurmCluster, data: Path, tmp_path: Path) -> Iterator[Run]:
    made = Run(slurm, data, tmp_path)
    yield made
    slurm.command("scancel", "--user=root")
    wait_for(lambda: not slurm.queue(), "an empty queue")


@pytest.fixture
def other(slurm: SlurmCluster, data: Path, tmp_path: Path, run: Run) -> Run:
    """A second run at the same time, without recovery."""
    return Run(slurm, data, tmp_path / "other")


def _of_the_command(entered: "subprocess.Popen[str]") -> psutil.Process:
    """The process of a command on a node; its parent is the one that entered the node."""
    (command,) = psutil.Process(entered.pid).children()
    return command


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, errors = process.communicate(timeout=_LIMIT_S)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("override", "word"),
    [("launcher.trainer_mem_per_gpu=999999", "configuration"), ("cluster.n_nodes=7", "PartitionConfig"),
     ("launcher.slurm.time_limit=5-0", "Partition"), ("launcher.stop_grace_s=15", "KillWait")],
)  # fmt: skip
def test_a_job_that_cannot_start_ends_in_one_line(run: Run, override: str, word: str) -> None:
    status, errors = ended(run.launch(override))
    assert status == 2, errors
    (line,) = [line for line in errors.splitlines() if "error" in line]
    assert word in line
    wait_for(lambda: not run.slurm.queue(), "an empty queue")


def test_a_run_on_three_nodes_is_left_followed_again_and_completes(run: Run) -> None:
    leaves = run.launch("--detach", "total_train_steps=6")
    output, _ = leaves.communicate(timeout=_LIMIT_S)
    assert (leaves.returncode, output.strip()) == (0, run.job)
    second = run.launch()
    assert ended(second)[0] == 2  # the first job has not ended
    status, errors = ended(run.command("--attach", str(run.folder)))
    assert status == 0, errors
    assert run.step == 6
    plan = json.loads((run.folder / "plan.json").read_text())
    assert len({process["host"]["node"] for process in plan["processes"]}) > 1
    assert not any(process["host"]["advertise"].startswith("127.") for process in plan["processes"])
    run.assert_clean()


def test_the_time_limit_of_slurm_does_not_end_the_run_that_recovers(run: Run, other: Run) -> None:
    """Slurm itself sends the signal, 40 to 70 s after the start. scancel ends the run."""
    # With one minute, the shortest limit, Slurm may send it at once: it looks every 30 s, and 30 s ahead.
    limit = ("launcher.slurm.time_limit=2", "total_train_steps=100000")
    follower = run.launch(*limit, "launcher.slurm.signal_s=50")
    without = other.launch(*limit, "recover.mode=disabled", "cluster.n_nodes=1")
    wait_for(lambda: run.facts().restarts >= 1 if run.job else False, "a requeue")
    step = run.step
    run.await_step(step + 1)
    run.slurm.command("scancel", run.job)
    assert ended(follower)[0] == 130
    status, errors = ended(without)
    assert status == 1, errors
    assert "TIMEOUT" in errors.splitlines()[-1]
    run.assert_clean()


@pytest.mark.parametrize("lost", ["node2", "node3"])
def test_a_lost_node_requeues_the_run_that_recovers(run: Run, other: Run, slurm: SlurmCluster, lost: str) -> None:
    """The launcher runs on node2. Processes of node3 start elsewhere until Slurm notices, and puts the job back.

    A run without recovery ends with its launcher's node.
    """
    words = ("cluster.n_nodes=2", "launcher.slurm.sbatch_additional_args=--exclude=node1", "cluster.node_silence_s=2")
    follower = run.launch("total_train_steps=100000", *words)
    run.await_step(1)
    without = other.launch("total_train_steps=100000", "recover.mode=disabled", *words) if lost == "node2" else None
    wait_for(lambda: without is None or other.step >= 1, "a step of the other run")
    run.await_step(4)
    slurm.nodes[int(lost[-1])].power_off()
    wait_for(lambda: meaning_of(run.facts()).phase == "pending", "a requeue")
    slurm.power_on(slurm.nodes[int(lost[-1])])
    step = run.step
    run.await_step(step + 3)
    assert run.facts().restarts == 1
    _of_the_command(follower).send_signal(signal.SIGINT)  # as scancel
    assert ended(follower)[0] == 130
    if without is not None:
        status, errors = ended(without)
        assert status == 1, errors
        assert "NODE_FAIL" in errors.splitlines()[-1]
    run.assert_clean()
    wait_for(lambda: set(slurm.states().values()) == {"idle"}, "idle nodes")


def test_separate_jobs_run_a_component_each_and_a_lost_server_gets_a_new_one(run: Run, slurm: SlurmCluster) -> None:
    def jobs() -> dict[str, str]:
        return json.loads((run.folder / "slurm" / "jobs.json").read_text())

    words = ("launcher.slurm.separate_jobs=true", "total_train_steps=100000", "cluster.node_silence_s=3")
    follower = run.launch(*words, "allocation_mode=native:d2+fsdp:d2", "launcher.nodelist=node[2-3]")
    run.await_step(3)
    before = jobs()
    assert list(before) == ["server-0", "server-1", "trainers"]
    assert len(slurm.queue().splitlines()) == 4
    assert set(slurm.command("squeue", "--noheader", "--format=%N").stdout.split()) == {"node2", "node3"}
    ready = run.folder / "names" / "ready" / "server-1.json"
    ready_ns = ready.stat().st_mtime_ns
    slurm.command("scancel", before["server-1"])
    wait_for(lambda: ready.exists() and ready.stat().st_mtime_ns > ready_ns, "server-1 in its new job")
    assert {name for name, job in jobs().items() if job != before[name]} == {"server-1"}
    run.await_step(run.step + 3)
    _of_the_command(follower).send_signal(signal.SIGINT)
    status, errors = ended(follower)
    assert status == 130, errors
    run.assert_clean()


def test_the_jobs_of_components_end_when_the_job_of_the_launcher_is_killed(run: Run, slurm: SlurmCluster) -> None:
    follower = run.launch("launcher.slurm.separate_jobs=true", "recover.mode=disabled")
    run.await_step(1)
    inside = [
        item
        for item in psutil.process_iter()
        if "--inside" in (words := _words_of(item)) and str(run.folder) in words[-1]
    ]
    for process in inside:
        process.kill()
    assert ended(follower)[0] == 1
    run.assert_clean()


def test_a_sweep_is_an_array_whose_runs_are_followed_together(run: Run, slurm: SlurmCluster) -> None:
    words = ("--sweep", "seed=1,2", "--parallel", "1", "total_train_steps=2", "cluster.n_nodes=1")
    status, errors = ended(run.launch(*words))
    assert status == 0, errors
    for index in (0, 1):
        member = run.folder.with_name(f"grpo_{index}")
        assert json.loads((member / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
        assert f"seed: {index + 1}\n" in (member / "config.yaml").read_text()
        assert ended(run.command("--attach", str(member)))[0] == 0
    assert ended(run.command("--attach", str(run.folder)))[0] == 0
    wait_for(lambda: not slurm.queue(), "an empty queue")


def test_a_run_survives_the_signal_before_the_limit_and_a_job_of_higher_priority(run: Run, slurm: SlurmCluster) -> None:
    follower = run.launch("total_train_steps=100", "recover.freq_steps=1000")
    run.await_step(3)
    slurm.command("scancel", "--signal=USR1", "--batch", run.job)
    wait_for(lambda: run.facts().restarts == 1, "a requeue")
    assert [path.name for path in (run.folder / "recover").glob("step-*")]
    step = run.step
    run.await_step(step + 1)
    words = ("--parsable", "-p", "urgent", "-N3", "--exclusive", "--wrap", "sleep 5", "-o", "/dev/null")
    urgent = slurm.command("sbatch", *words)
    wait_for(lambda: run.facts().restarts >= 2, f"a requeue after job {urgent.stdout}")
    status, errors = ended(follower)
    assert status == 0, errors
    assert run.step == 100
    run.assert_clean()


@pytest.mark.skipif(not Path("/sys/fs/cgroup/memory").is_dir(), reason="needs control groups of version 1 for memory")
def test_a_process_that_exceeds_the_memory_of_its_job_is_named(data: Path, tmp_path: Path) -> None:
    with Nodes(1) as nodes:
        slurm = SlurmCluster(nodes, tmp_path / "cluster", limits_memory=True)
        run = Run(slurm, data, tmp_path / "runs")
        options = ("recover.mode=disabled", "recover.retries=0", "total_train_steps=1000")
        memory = "launcher.slurm.sbatch_additional_args=--mem=600M"
        status, errors = ended(run.launch("cluster.n_nodes=1", memory, *options))
        assert status == 1, errors
        assert "launch.out_of_memory" in errors
        wait_for(lambda: not slurm.queue(), "an empty queue")
