"""The commands of Slurm, with scripts in their place."""

import os

import pytest

from areal.launcher.slurm_client import SlurmClient
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
    for name in ("sbatch", "scontrol", "scancel"):
        commands(name, f'echo "{name}: error: {text}" >&2; exit 1')
    slurm = SlurmClient()
    for call in (
        lambda: slurm.submit(tmp_path / "job.sh", dict(os.environ), "one node"),
        lambda: slurm.look("7"),
        lambda: slurm.requeue("7"),
        slurm.kill_wait_s,
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


def test_commands_that_are_not_installed_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises_code("launch.slurm_silent"):
        SlurmClient().look("7")
