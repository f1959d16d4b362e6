"""The script and the resources of a Slurm job, and its allocations."""

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal.api.config import (
    BaseExperimentConfig,
    ClusterSpecConfig,
    GenerationHyperparameters,
    GRPOConfig,
    LauncherConfig,
    OptimizerConfig,
    PPOActorConfig,
    RecoverConfig,
    TrainDatasetConfig,
)
from areal.api.config.launcher import SlurmConfig
from areal.launcher.job import make_plan
from areal.launcher.slurm import TimeLimit, may_requeue
from areal.launcher.slurm_job import (
    Resources,
    component_script,
    components_of,
    gpu_hours,
    limit_s,
    machines_of,
    node_of,
    resources_of,
    run_script,
)
from areal.system.durable import seal_folder
from areal.system.network import Host
from areal.system.run_paths import RunPaths
from tests.launcher.fake_backend import planned_process

NEEDS = Resources(nodes=2, gpus=4, cpus=32, memory_mib=65536)


def config_of(*, recover="auto", **slurm):
    return BaseExperimentConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=TrainDatasetConfig(path="x.jsonl", batch_size=4),
        cluster=ClusterSpecConfig(n_nodes=2, n_gpus_per_node=4),
        recover=RecoverConfig(mode=recover, freq_steps=1),
        launcher=LauncherConfig(slurm=SlurmConfig(**slurm)),
    )


def directives_in(script):
    lines = [
        shlex.split(line.removeprefix("#SBATCH "))[0] for line in script.splitlines() if line.startswith("#SBATCH")
    ]
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


def directives(config, **options):
    folder = Path("/runs/e/t u/slurm")
    script = run_script(config, NEEDS, folder=folder, script=None, **({"exclude": ""} | options))
    return directives_in(script), script


def test_a_further_option_of_sbatch_may_have_spaces() -> None:
    result, _ = directives(config_of(sbatch_additional_args="'--begin=2027-01-01 10:00' --constraint=a100"))
    assert (result["--begin"], result["--constraint"]) == ("2027-01-01 10:00", "a100")


def test_the_script_names_everything_that_the_job_needs(tmp_path, monkeypatch) -> None:
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    result, script = directives(config_of(time_limit="12:00:00", partition="p", account="a", qos="q", reservation="r"))
    assert result["--nodes"] == "2"
    assert result["--gpus-per-node"] == "4"
    assert result["--cpus-per-task"] == "32"
    assert result["--mem"] == "65536M"
    assert result["--time"] == "12:00:00"
    assert [result[f"--{name}"] for name in ("partition", "account", "qos", "reservation")] == ["p", "a", "q", "r"]
    assert result["--signal"] == "B:USR1@120"
    assert "--requeue" in result
    assert "--no-kill" not in result  # with it Slurm also keeps a job whose first node, with the launcher, is lost
    assert result["--chdir"] == str(tmp_path / "a b")
    command = shlex.split(script.splitlines()[-1])
    inside = [sys.executable, "-m", "areal.launcher.slurm", "--inside"]
    assert command[:4] == ["exec", sys.executable, "-S", "-c"]
    assert command[5:] == [*inside, "--config", "/runs/e/t u/slurm/config.yaml"]


def test_a_signal_that_comes_while_the_launcher_starts_is_held_back_for_it() -> None:
    """Slurm may send it at once when the time limit is short."""
    script = directives(config_of())[1].splitlines()
    (place,) = [number for number, line in enumerate(script) if line.startswith("exec ")]
    words = shlex.split(script[place])[:5]
    launcher = (
        "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); got = []; "
        "signal.signal(signal.SIGUSR1, lambda *_: got.append(1)); "
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1]); print(got)"
    )
    held = "\n".join([*script[:place], shlex.join([*words[1:], sys.executable, "-c", launcher])])
    done = subprocess.run(["bash", "-c", held], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[1]\n"), done.stderr


def test_a_job_excludes_nodes_and_requests_none_by_name() -> None:
    config = dataclasses.replace(config_of(), launcher=LauncherConfig(nodelist="n[1-3]", exclude="n3"))
    result, _ = directives(config, exclude="n0,n3")
    assert (result["--exclude"], "--nodelist" in result) == ("n0,n3", False)
    assert "--exclude" not in directives(config_of())[0]


def test_a_run_that_does_not_recover_is_not_requeued() -> None:
    result, _ = directives(config_of(recover="disabled"))
    assert "--no-requeue" in result
    assert "--signal" not in result


def test_resources_are_those_of_the_fullest_node() -> None:
    processes = (
        dataclasses.replace(planned_process("server-0"), host=Host(node="node1"), gpus=("0", "1")),
        dataclasses.replace(planned_process("trainer-0"), host=Host(node="node2"), gpus=("0",)),
    )
    launcher = LauncherConfig(inference_server_cpus_per_gpu=3, inference_server_mem_per_gpu=100)
    result = resources_of(SimpleNamespace(processes=processes), dataclasses.replace(config_of(), launcher=launcher))
    assert (result.nodes, result.gpus, result.cpus) == (2, 4, 6)
    assert result.memory_mib == launcher.trainer_mem_per_gpu


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", None), ("30", 1800), ("2:30", 150), ("1:00:00", 3600), ("1-1", 90000), ("1-0:30", 88200), ("0-0:0:5", 5)],
)
def test_time_limits(text, seconds) -> None:
    assert limit_s(text) == seconds


def test_gpu_hours() -> None:
    assert gpu_hours([NEEDS], "30") == 4.0
    assert gpu_hours([NEEDS, dataclasses.replace(NEEDS, nodes=1)], "30") == 6.0
    assert gpu_hours([NEEDS], "") is None


def test_commands_of_a_node(monkeypatch) -> None:
    monkeypatch.setenv("FOLDER", "/work")
    plain = LauncherConfig(
        slurm=SlurmConfig(srun_additional_args="--chdir $FOLDER", additional_bash_cmds=["ulimit -n"])
    )
    command = node_of("node2", "node2", plain, role=None, cpus=5, environ={}).command
    assert command[0] == "srun"
    assert {"--overlap", "--nodelist=node2", "--cpus-per-task=5", "/work"} <= set(command)
    assert command[-3:-1] == ("bash", "-c")
    assert "ulimit -n" in command[-1].splitlines()


@pytest.mark.parametrize(("kind", "word"), [("apptainer", "apptainer"), ("pyxis", "--container-image=i.sif")])
def test_an_image_and_its_mounts_are_in_the_command_of_a_node(kind, word) -> None:
    options = LauncherConfig(slurm=SlurmConfig(trainer_image="i.sif", container_type=kind, mount="/a:/b"))
    command = node_of("node2", "node2", options, role=None, cpus=5, environ={}).command
    assert word in command
    assert "/a:/b" in " ".join(command)
    assert command[-1] == "areal.launcher.node_agent"


@pytest.mark.parametrize(("role", "image"), [("server", "s.sif"), ("trainer", "t.sif"), ("controller", "t.sif")])
def test_the_agent_of_a_separate_job_starts_in_the_image_of_its_role(role, image) -> None:
    slurm = SlurmConfig(trainer_image="t.sif", inference_server_image="s.sif", separate_jobs=True)
    assert not list(slurm.problems())
    options = LauncherConfig(slurm=slurm)
    environ = {"SLURM_JOB_ID": "1", "SLURM_CONF": "/c", "HOME": "/h"}
    node = node_of("server-0", "node2", options, role=role, cpus=5, environ=environ, job="7")
    assert node.command[:4] == ("env", "--unset=SLURM_JOB_ID", "srun", "--jobid=7")
    assert image in node.command
    assert (node.name, node.address, node.role) == ("server-0", "node2", role)


def components(allocation, gpus_per_node):
    return GRPOConfig(
        experiment_name="e",
        trial_name="t",
        allocation_mode=allocation,
        train_dataset=TrainDatasetConfig(path="x", batch_size=12),
        gconfig=GenerationHyperparameters(n_samples=4),
        actor=PPOActorConfig(path="org/model", optimizer=OptimizerConfig()),
        cluster=ClusterSpecConfig(n_nodes=2, n_gpus_per_node=gpus_per_node),
        launcher=LauncherConfig(slurm=SlurmConfig(separate_jobs=True)),
    )


def test_separate_jobs_request_what_their_component_needs() -> None:
    config = components("sglang:d2t2+fsdp:d12", 8)
    result = {item.name: item.needs for item in components_of(config)}
    assert {name: (needs.nodes, needs.gpus, needs.cpus) for name, needs in result.items()} == {
        "controller": (1, 0, 1), "server-0": (1, 2, 8), "server-1": (1, 2, 8), "trainers": (2, 6, 24)
    }  # fmt: skip
    assert resources_of(SimpleNamespace(processes=()), config) == result["controller"]
    machines = machines_of(config)
    assert [(machine.host.node, len(machine.gpus)) for machine in machines] == [
        ("controller", 0), ("server-0", 2), ("server-1", 2), ("trainers-0", 6), ("trainers-1", 6)
    ]  # fmt: skip


@pytest.mark.parametrize(("allocation", "gpus"), [("sglang:d2t2+fsdp:d12", 8), ("native:d2+fsdp:d2", 0)])
def test_each_process_is_placed_in_the_job_of_its_component(allocation, gpus) -> None:
    plan = make_plan(components(allocation, gpus), machines_of(components(allocation, gpus)))
    for process in plan.processes:
        expected = process.name if process.role != "trainer" else "trainers"
        assert process.host.node.startswith(expected)


def test_the_cores_of_this_machine_do_not_limit_the_processes_of_a_job() -> None:
    config = components("sglang:d2t2+fsdp:d12", 8)
    plan = make_plan(config, machines_of(config))
    assert {process.num_threads for process in plan.processes if process.role != "controller"} == {4}
    assert plan.warning == ""


def test_the_job_of_a_component_watches_the_job_of_the_launcher() -> None:
    config = components("sglang:d2t2+fsdp:d12", 8)
    trainers = components_of(config)[-1]
    script = component_script(config, trainers, folder=Path("/runs/slurm"), main_job="7", exclude="n1,n2")
    result = directives_in(script)
    assert (result["--nodes"], result["--gpus-per-node"], result["--mem"]) == ("2", "6", f"{6 * 32768}M")
    assert "--no-requeue" in result
    assert (result["--exclude"], "--nodelist" in result) == ("n1,n2", False)
    assert "--jobs=7 " in script


def test_a_sweep_is_an_array_of_jobs_with_a_configuration_each() -> None:
    result, script = directives(config_of(), runs=[Path("/runs/a 0"), Path("/runs/a 1")], at_once=1)
    assert result["--array"] == "0-1%1"
    assert result["--output"].endswith("job-%A_%a.log")
    commands = script.replace("exec ", "printf '%s\\n' ")
    for index in (0, 1):
        done = subprocess.run(
            ["bash", "-c", commands],
            env={"SLURM_ARRAY_TASK_ID": str(index)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines()[-2:] == ["--config", f"/runs/a {index}/slurm/config.yaml"]


def test_a_wrong_time_limit_is_refused() -> None:
    assert [path for path, _ in SlurmConfig(time_limit="tomorrow").problems()] == ["time_limit"]
    assert not list(SlurmConfig(time_limit="2-00:00:00").problems())


def test_when_a_job_is_requeued() -> None:
    assert may_requeue(config_of(), has_progress=True, restarts=99)
    assert may_requeue(config_of(), has_progress=False, restarts=2)
    assert not may_requeue(config_of(), has_progress=False, restarts=3)
    assert not may_requeue(config_of(recover="disabled"), has_progress=True, restarts=0)


def checkpoint(paths, step) -> None:
    folder = paths.recover / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    seal_folder(folder)


def test_the_signal_saves_before_the_run_ends(tmp_path) -> None:
    paths, ended, said = RunPaths(tmp_path), threading.Event(), []
    limit = TimeLimit(paths, save_limit_s=60.0, end=ended.set, say=said.append)
    with limit.watched():
        os.kill(os.getpid(), signal.SIGUSR1)
        while not paths.checkpoint_request.exists():
            assert not ended.wait(0.01)
        checkpoint(paths, 4)
        assert ended.wait(60.0)
    assert limit.was_announced
    assert any("step-000004" in text for text in said)


def test_the_run_ends_without_a_checkpoint_when_the_time_is_over(tmp_path) -> None:
    ended = threading.Event()
    limit = TimeLimit(RunPaths(tmp_path), save_limit_s=0.0, end=ended.set, say=lambda text: None)
    with limit.watched():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ended.wait(60.0)


@pytest.mark.parametrize("announced", [True, False])
def test_a_run_that_ends_by_itself_is_not_ended_again(tmp_path, announced) -> None:
    ended, said = threading.Event(), threading.Event()
    limit = TimeLimit(RunPaths(tmp_path), save_limit_s=600.0, end=ended.set, say=lambda text: said.set())
    with limit.watched():
        if announced:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert said.wait(60.0)
    assert limit.was_announced is announced
    assert not ended.is_set()
