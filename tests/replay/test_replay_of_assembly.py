"""A replay of a run with epochs, filters, an adaptive bonus and a head start of the critic, from start and middle."""

import shutil

import pytest

from areal.replay import __main__ as command
from areal.replay.recorded import read_metrics
from areal.system.run_paths import RunPaths

pytestmark = pytest.mark.usefixtures("ranks_in_process")


@pytest.fixture
def run(recorded_with_epochs, tmp_path) -> RunPaths:
    """A copy of the recorded run."""
    shutil.copytree(recorded_with_epochs.folder, tmp_path / "run")
    return RunPaths(tmp_path / "run")


def replay(run: RunPaths, *words: str) -> int:
    return command.replay(command.read_command_line(["--run", str(run.root), "--name", "mine", *words]))


@pytest.mark.parametrize("first", [0, 2])
def test_a_replay_deals_and_adapts_alike(run, capsys, first):
    """From a checkpoint in the middle: the coefficient comes from it, the order of sequences from seed and step."""
    assert replay(run, "--from-checkpoint", str(first)) == 0
    assert f"equal: {4 - first} steps" in capsys.readouterr().out
    live, own = read_metrics(run.metrics), read_metrics(run.replays / "mine" / "metrics.jsonl")
    assert [live[step]["actor/update_skipped"] for step in (1, 2, 3, 4)] == [1, 0, 0, 0]
    assert all(live[step]["critic/optimizer_steps"] == 2 for step in live)
    assert live[4]["actor/entropy_coef"] > live[3]["actor/entropy_coef"] > live[2]["actor/entropy_coef"]
    names = [name for name in live[4] if name.split("/")[0] in ("actor", "critic", "filter")]
    assert {"actor/epoch_0/approx_kl", "actor/stopped_by_kl", "actor/positive_nll", "filter/kept_tokens"} <= set(names)
    for step, row in own.items():
        assert {name: row.get(name) for name in names} == {name: live[step].get(name) for name in names}


def test_another_number_of_epochs_is_another_path(run, capsys):
    assert replay(run, "actor.ppo_epochs=3", "critic.warmup_steps=0", "--until", "2") == 0
    own = read_metrics(run.replays / "mine" / "metrics.jsonl")
    assert own[1]["actor/update_skipped"] == 0
    assert "weights: different from step 1 on" in capsys.readouterr().out
