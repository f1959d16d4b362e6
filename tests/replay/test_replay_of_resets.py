"""Replays of a run whose reference and KL coefficient change: the same path, from its start and from the middle."""

import shutil

import pytest

from areal.replay import __main__ as command
from areal.replay.recorded import read_metrics
from areal.system.run_paths import RunPaths
from tests.expect import raises_code

pytestmark = pytest.mark.usefixtures("ranks_in_process")


@pytest.fixture
def run(recorded_with_resets, tmp_path) -> RunPaths:
    """A copy of the recorded run."""
    shutil.copytree(recorded_with_resets.folder, tmp_path / "run")
    return RunPaths(tmp_path / "run")


def replay(run: RunPaths, *words: str) -> int:
    return command.replay(command.read_command_line(["--run", str(run.root), "--name", "mine", *words]))


def rows_of(run: RunPaths) -> tuple[dict, dict]:
    return read_metrics(run.metrics), read_metrics(run.replays / "mine" / "metrics.jsonl")


@pytest.mark.parametrize("first", [0, 2])
def test_a_replay_goes_through_the_same_references_and_coefficients(run, capsys, first):
    assert replay(run, "--from-checkpoint", str(first)) == 0
    assert f"equal: {4 - first} steps" in capsys.readouterr().out
    live, own = rows_of(run)
    assert len({row["actor/kl_coef"] for row in live.values()}) == 4
    assert [live[step]["ref/reset"] for step in (1, 2, 3, 4)] == [0, 1, 0, 1]
    for step, row in own.items():
        for name in ("actor/kl_coef", "ref/reset", "actor/kl_loss", "batch/ref_kl", "batch/ref_kl_full"):
            assert row[name] == live[step][name], (step, name)
    # right after a reset the policy is its own reference
    assert live[1]["batch/ref_kl"] < 1e-9
    assert live[3]["batch/ref_kl"] < 1e-9 < live[2]["batch/ref_kl"]


def test_a_replay_from_the_middle_without_the_reset_reference_would_differ(run, capsys):
    """What the checkpoint holds of the reference and the coefficient is needed."""
    recover = run.recover / "step-000002"
    assert (recover / "ref").is_dir()
    live = read_metrics(run.metrics)
    assert replay(run, "ref_reset_steps=3", "--until", "3") == 0
    own = rows_of(run)[1]
    assert own[3]["batch/ref_kl"] > 1e-6 > live[3]["batch/ref_kl"]
    assert "weights: different from step 3 on" in capsys.readouterr().out


def test_a_checkpoint_without_the_reference_does_not_fit_a_run_that_resets_it(recorded_with_all, tmp_path):
    shutil.copytree(recorded_with_all.folder, tmp_path / "run")
    run = RunPaths(tmp_path / "run")
    with raises_code("checkpoint.other_run", "['actor', 'critic'], not ['actor', 'critic', 'ref']"):
        replay(run, "ref_reset_steps=1", "--from-checkpoint", "2")
