"""The command that starts the agent of a node."""

import contextlib
import subprocess

import pytest

from areal.api.config.launcher import SlurmConfig
from areal.api.errors import ConfigError
from areal.launcher import local, ray, slurm, ssh
from areal.launcher.node_link import agent_command, check_containers, image_of
from tests.expect import raises_code

CONFIG = ["--config", "examples/quickstart/sft.yaml", "launcher.slurm.trainer_image=t.sif"]


def test_commands_before_the_agent_do_not_touch_its_messages(tmp_path):
    """Messages of the launcher are the agent's input, and its output are messages for the launcher."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$WORD"\nexec cat')
    program.chmod(0o755)
    slurm = SlurmConfig(additional_bash_cmds=["echo noise", "cat", "export WORD=set"])
    done = subprocess.run(agent_command(slurm, None, str(program)), input=b"message", capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"set\nmessage", b"noise\n")


@pytest.mark.parametrize(("role", "image"), [("server", "s.sif"), ("trainer", "t.sif"), (None, "t.sif")])
def test_the_image_of_a_role(role, image):
    slurm = SlurmConfig(trainer_image="t.sif", inference_server_image="s.sif", separate_jobs=True)
    assert image_of(slurm, role) == image
    assert image in agent_command(slurm, role)


def test_no_container_although_an_image_is_named():
    slurm = SlurmConfig(trainer_image="t.sif", container_type="none")
    assert image_of(slurm, None) == ""
    assert agent_command(slurm, None) == agent_command(SlurmConfig(), None)


def test_ssh_starts_the_agents_in_the_container(monkeypatch):
    used = []
    monkeypatch.setattr(ssh, "NodeCluster", lambda nodes, config: used.extend(nodes))
    monkeypatch.setattr(ssh, "launch", lambda request, cluster: 0)
    mount = "launcher.slurm.mount=/a:/b"
    assert ssh.run_command(["--hosts", "node1", "--python", "/env/python", *CONFIG, mount]) == 0
    assert "apptainer exec --nv --bind /a:/b t.sif /env/python -m " in used[0].command[-1]


@pytest.mark.parametrize(("launcher", "hosts"), [(ssh, ["--hosts", "node1"]), (ray, [])])
def test_a_container_of_srun_is_refused_by_the_other_launchers(launcher, hosts):
    with raises_code("config.unsupported", "launcher.slurm.container_type"):
        launcher.run_command([*hosts, *CONFIG, "launcher.slurm.container_type=pyxis"])


@pytest.mark.parametrize(
    ("launcher", "words"), [(ssh, ["--hosts", "node1", "launcher.slurm.separate_jobs=true"]), (slurm, ["--dry-run"])]
)
def test_two_images_are_refused_where_one_agent_starts_all_roles(launcher, words):
    with raises_code("config.conflict", "launcher.slurm.inference_server_image"):
        launcher.run_command([*CONFIG, *words, "launcher.slurm.inference_server_image=s.sif"])


@pytest.mark.parametrize(
    "options",
    [
        {"has_srun": False, "has_shared_agents": False},  # Ray: an actor for each process
        {"has_srun": True, "has_shared_agents": False},  # Slurm with separate jobs
    ],
)
def test_two_images_where_each_role_has_its_own_agents(options):
    config = SlurmConfig(trainer_image="t.sif", inference_server_image="s.sif")
    assert list(config.problems()) == []
    check_containers(config, **options)


@pytest.mark.parametrize("chosen", ["auto", "slurm"])
def test_the_notice_is_about_the_launcher_that_runs(capsys, chosen):
    with contextlib.suppress(ConfigError):  # the model of the example may be missing
        local.run_command([*CONFIG, f"launcher.type={chosen}", "--dry-run"])
    assert "launcher.slurm.trainer_image" in capsys.readouterr().err
