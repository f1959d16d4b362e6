"""Processes in the actors of a real Ray cluster of several nodes on this machine."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from areal.api.config.launcher import ClusterSpecConfig, LauncherConfig, SlurmConfig
from areal.launcher.ray import RayCluster
from areal.system.process import TRANSIENT_EXIT, ProcessContext
from areal.system.run_paths import RunPaths
from tests.cluster.cluster_run import left_behind
from tests.cluster.nodes import RAY_OPTIONS, start_ray, urgent_children, wait_for
from tests.expect import raises_code
from tests.launcher.fake_apptainer import path_with_apptainer
from tests.launcher.fake_backend import plan_of, planned_process

ray = pytest.importorskip("ray", reason="needs the package ray: pip install -e '.[ray]'")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent.parent
SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
IGNORES = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


@pytest.fixture
def ray_cluster(monkeypatch):
    """Two nodes with 4 CPUs each; the second also has 2 GPUs, which exist in Ray only."""
    for name, value in RAY_OPTIONS.items():
        monkeypatch.setenv(name, value)
    head = {"num_cpus": 4, "num_gpus": 0, "include_dashboard": False}
    with urgent_children():
        made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        with urgent_children():
            made.add_node(num_cpus=4, num_gpus=2)
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


class Run:
    """A backend for some programs, and what a test asks of it."""

    def __init__(self, folder, *, connect_s=120.0, slurm=None):
        self.folder = folder
        options = LauncherConfig(slurm=slurm or SlurmConfig())
        self.cluster = RayCluster(ClusterSpecConfig(n_nodes=2, node_connect_s=connect_s, node_silence_s=8.0), options)
        self.machines = self.cluster.machines()

    def planned(self, name, source, *, machine=0, gpus=()):
        subject = planned_process(name, run_dir=self.folder)
        host = self.machines[machine].host
        env = dataclasses.replace(ProcessContext.from_env(subject.env), host=host).to_env()
        env |= {"AREAL_TRAINER_ADDRESSES": "", "OMP_NUM_THREADS": "3"}
        argv = (sys.executable, "-c", source)
        return dataclasses.replace(subject, argv=argv, host=host, env=env, gpus=gpus)

    def open(self, *processes):
        self.backend = self.cluster.backend(
            plan_of(processes, self.folder), RunPaths(self.folder), {"SECRET_WORD": "hello"}
        )
        return self.backend


@pytest.fixture
def run(ray_cluster, tmp_path):
    made = Run(tmp_path)
    yield made
    made.cluster.close()


def ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_processes_in_actors_behave_as_local_ones(run, tmp_path):
    assert [(machine.cores, machine.gpus) for machine in run.machines] == [(4, ("0", "1")), (4, ())]
    assert len({machine.host.node for machine in run.machines}) == 2
    shows = "import os, sys; print(*(os.environ[name] for name in ('SECRET_WORD', 'OMP_NUM_THREADS'))); sys.exit(7)"
    on_gpu = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    exits, sleeps = run.planned("server-0", shows), run.planned("server-1", SLEEPS, machine=1)
    stubborn, gpu = run.planned("server-2", IGNORES), run.planned("server-3", on_gpu, gpus=("1",))
    backend = run.open(exits, sleeps, stubborn, gpu)
    assert len(ray.util.placement_group_table()) == 1
    assert list(tmp_path.iterdir()) == []

    pids = [backend.start(planned) for planned in (exits, sleeps, stubborn, gpu)]
    assert wait_for(lambda: backend.poll("server-0")) == 7
    assert backend.last_lines("server-0").lines == ["hello 3"]
    assert wait_for(lambda: backend.poll("server-3") is not None)
    assert backend.last_lines("server-3").lines[-1] in ("0", "1")
    wait_for(lambda: backend.last_lines("server-2").lines == ["up"])

    backend.signal("server-1", signal.SIGKILL)
    assert wait_for(lambda: backend.poll("server-1")) == -signal.SIGKILL
    backend.start(sleeps)
    assert backend.poll("server-1") is None
    backend.stop(["server-1", "server-2", "never-started"], 0.3, hurry=lambda: False)
    assert backend.poll("server-1") == -signal.SIGTERM
    assert backend.poll("server-2") == -signal.SIGKILL
    assert all(ended(pid) for pid in pids)


@pytest.fixture
def apptainer(monkeypatch, tmp_path):
    """Before the cluster starts, whose nodes find the program."""
    monkeypatch.setenv("PATH", path_with_apptainer(tmp_path / "bin"))


def test_an_agent_in_a_container_ends_with_its_actor(apptainer, ray_cluster, tmp_path):
    """Its process sees the GPUs that Ray chose for the actor, and starts again in the image."""
    run = Run(tmp_path, slurm=SlurmConfig(trainer_image="i.sif", mount="/a:/b"))
    try:
        source = f"import os; print(os.environ['IMAGE'], os.environ['CUDA_VISIBLE_DEVICES'], flush=True); {SLEEPS}"
        planned = run.planned("server-0", source, gpus=("0",))
        backend = run.open(planned)
        pid = backend.start(planned)
        shown = wait_for(lambda: backend.last_lines("server-0").lines[:1])
        assert shown in (["i.sif 0"], ["i.sif 1"])
        agent = psutil.Process(pid).parent()
        actor = agent.parent()
        assert "areal.launcher.node_agent" in agent.cmdline()
        actor.kill()
        assert wait_for(lambda: backend.poll("server-0")) == TRANSIENT_EXIT
        wait_for(lambda: ended(pid) and ended(agent.pid))
        backend.start(planned)
        assert wait_for(lambda: backend.last_lines("server-0").lines[:1]) == shown
    finally:
        run.cluster.close()


def test_an_image_that_cannot_be_started_is_one_clear_error(apptainer, ray_cluster, tmp_path):
    run = Run(tmp_path, slurm=SlurmConfig(trainer_image="absent.sif", mount="/a:/b"))
    try:
        with raises_code("launch.node_unreachable") as error:
            run.open(run.planned("server-0", SLEEPS))
        assert "could not open image absent.sif" in str(error.value)
    finally:
        run.cluster.close()


def test_a_killed_actor_ends_its_process_which_starts_again_on_the_same_node(run):
    planned = run.planned("server-0", SLEEPS)
    backend = run.open(planned)
    pid = backend.start(planned)
    psutil.Process(pid).parent().kill()
    assert wait_for(lambda: backend.poll("server-0")) == TRANSIENT_EXIT
    assert "launch.node_lost" in backend.last_lines("server-0").lines[-1]
    wait_for(lambda: ended(pid))
    backend.start(planned)
    assert backend.poll("server-0") is None
    assert wait_for(lambda: backend.last_lines("server-0").lines) == ["up"]


def test_a_process_of_a_lost_node_starts_again_on_another_one(run, ray_cluster):
    shows_host = f"import os; print(os.environ['AREAL_PROCESS'], flush=True); {SLEEPS}"
    processes = [run.planned(f"server-{index}", shows_host, machine=index) for index in (0, 1)]
    backend = run.open(*processes)
    for planned in processes:
        backend.start(planned)
    head = ray_cluster.head_node.node_id
    worker = next(node for node in ray_cluster.list_all_nodes() if node.node_id != head)
    ray_cluster.remove_node(worker, allow_graceful=False)
    lost, kept = ("server-0", "server-1")  # the node with GPUs is the first machine
    assert wait_for(lambda: backend.poll(lost)) == TRANSIENT_EXIT
    assert run.machines[0].host.node in backend.last_lines(lost).lines[-1]
    wait_for(lambda: backend.start(processes[0]) and backend.poll(lost) is None)
    context = json.loads(wait_for(lambda: backend.last_lines(lost).lines)[0])
    assert context["host"]["advertise"] == run.machines[1].host.advertise
    assert run.machines[1].host.node.startswith(context["host"]["node"])  # a name needs no suffix when it is unique
    assert backend.poll(kept) is None


def test_resources_that_others_use_are_one_clear_error(ray_cluster, tmp_path):
    run = Run(tmp_path, connect_s=2.0)
    try:
        taken = ray.util.placement_group([{"CPU": 4}, {"CPU": 4}])
        assert taken.wait(30)
        with raises_code("launch.ray_busy"):
            run.open(run.planned("server-0", SLEEPS))
    finally:
        run.cluster.close()


@pytest.fixture
def three(make_nodes):
    nodes = make_nodes(3, private=("/tmp/ray",))
    start_ray(nodes[1])
    for number in (2, 3):
        start_ray(nodes[number], nodes[1])
    return nodes


def launched(node, fileroot, *overrides, **options):
    argv = (sys.executable, "-m", "areal.launcher.ray", "--config", "examples/quickstart/grpo.yaml")
    words = (f"cluster.fileroot={fileroot}", "cluster.n_nodes=3", "allocation_mode=native:d2+fsdp:d2", *overrides)
    return node.popen([*argv, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


@pytest.mark.timeout(1500)
def test_a_run_on_three_nodes_survives_a_killed_actor_a_lost_node_and_a_killed_raylet(three, tmp_path):
    """The replacement of the lost node does not share the run folder, and is not used after the loss of the raylet."""
    quick = [sys.executable, "-m", "areal.launcher.local", "--config", "examples/quickstart/sft.yaml"]
    subprocess.run(
        [sys.executable, "examples/quickstart/prepare.py", str(tmp_path / "quickstart/data")], cwd=ROOT, check=True
    )
    subprocess.run([*quick, f"cluster.fileroot={tmp_path}"], cwd=ROOT, check=True, capture_output=True)
    options = ("recover.mode=auto", "recover.freq_steps=1", "total_train_steps=12", "cluster.node_silence_s=6")
    options += ("cluster.node_connect_s=90",)
    launcher = launched(three[1], tmp_path, *options)
    metrics = tmp_path / "quickstart/grpo/metrics.jsonl"

    def steps():
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return max((row["step"] for row in rows), default=0)

    wait_for(lambda: steps() >= 1 or launcher.poll() is not None, 400)
    process_on(three[2], "ray::AgentActor").kill()
    wait_for(lambda: steps() >= 4 or launcher.poll() is not None, 400)
    three[3].power_off()
    wait_for(lambda: steps() >= 7 or launcher.poll() is not None, 400)
    three[3].power_on()
    three[3].run(["mount", "-t", "tmpfs", "none", str(tmp_path)])
    start_ray(three[3], three[1])
    process_on(three[2], "/raylet/raylet").kill()
    output = launcher.communicate(timeout=400)[0]
    assert launcher.returncode == 0, output
    assert "launch.folder_not_shared" in output
    assert steps() == 12
    audit = subprocess.run(
        [sys.executable, "-m", "areal", "audit", str(tmp_path / "quickstart/grpo")], capture_output=True, text=True
    )
    assert audit.returncode == 0, audit.stdout
    assert left_behind(three) == []


def process_on(node, word):
    """The first process of a node whose program is named so."""
    return next(psutil.Process(pid) for pid in node.pids() if word in (cmdline(pid) or [""])[0])


def cmdline(pid):
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return []
