"""The commands of Slurm, with scripts in their place."""

import os

import pytest

from areal.api.config import LauncherConfig
from areal.launcher.slurm_job import SlurmClient
from tests.expect import raises_code


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Puts a script in the place of a command."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def command(name, text):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    return command


@pytest.mark.parametrize(
    "text",
    ["Unable to contact slurm controller (connect failure)", "fatal: Could not establish a configuration source"],
)
def test_a_controller_that_does_not_answer_is_no_refusal(commands, tmp_path, caplog, text):
    for name in ("sbatch", "scontrol", "scancel", "sinfo"):
        commands(name, f'echo "{name}: error: {text}" >&2; exit 1')
    slurm = SlurmClient()
    for call in (
        lambda: slurm.submit(tmp_path / "job.sh", dict(os.environ), "one node"),
        lambda: slurm.look("7"),
        lambda: slurm.requeue("7"),
        slurm.kill_wait_s,
        lambda: slurm.excluded(LauncherConfig(nodelist="n1")),
    ):
        with raises_code("launch.slurm_silent"):
            call()
    slurm.cancel("7")  # only a warning: other things have to end too
    assert "7" in caplog.text


def test_a_refused_job_quotes_the_reason(commands, tmp_path):
    commands("sbatch", 'echo "sbatch: error: invalid partition specified: nope" >&2; exit 1')
    with raises_code("launch.slurm_refused") as error:
        SlurmClient().submit(tmp_path / "job.sh", dict(os.environ), "one node")
    assert "nope" in str(error.value)


@pytest.mark.parametrize(
    ("nodelist", "exclude", "excluded"),
    [
        ("", "", ""),
        ("", "n[2-9]", "n[2-9]"),
        ("n[1-3]", "", "m1,n4"),
        ("n[1-3],m1", "n2", "n2,n4"),
        ("n[1-4],m1", "", ""),
    ],
)
def test_a_list_of_nodes_excludes_the_other_nodes_of_all_partitions(commands, nodelist, exclude, excluded):
    commands("sinfo", 'case "$*" in *--all*--Node*) printf "n1\\nn2\\nn2\\nn3\\nn4\\nm1\\n";; *) exit 1;; esac')
    assert SlurmClient().excluded(LauncherConfig(nodelist=nodelist, exclude=exclude)) == excluded


@pytest.mark.parametrize(("nodelist", "exclude"), [("n1,nope", ""), ("n1", "n[1-2]")])
def test_a_list_of_nodes_that_chooses_none_is_refused(commands, nodelist, exclude):
    commands("sinfo", 'printf "n1\\nn2\\n"')
    with raises_code("launch.no_node_chosen", "launcher.nodelist"):
        SlurmClient().excluded(LauncherConfig(nodelist=nodelist, exclude=exclude))


def test_commands_that_are_not_installed_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises_code("launch.slurm_silent"):
        SlurmClient().look("7")
