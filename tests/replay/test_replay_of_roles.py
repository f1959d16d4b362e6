"""A replay of a run with a teacher and a reward model, from start and middle."""

import shutil

import pytest

from areal.replay import __main__ as command
from areal.replay.recorded import read_metrics
from areal.system.run_paths import RunPaths
from tests.expect import raises_code

pytestmark = pytest.mark.usefixtures("ranks_in_process")


@pytest.fixture
def run(recorded_with_roles, tmp_path) -> RunPaths:
    """A copy of the recorded run, and of the models that it began with."""
    shutil.copytree(recorded_with_roles.folder, tmp_path / "run")
    shutil.copytree(recorded_with_roles.folder.parent / "reward_model", tmp_path / "reward_model")
    paths = RunPaths(tmp_path / "run")
    text = paths.config.read_text()
    paths.config.write_text(
        text.replace(f"path: {recorded_with_roles.folder.parent}/reward_model", f"path: {tmp_path}/reward_model")
    )
    return paths


def replay(run: RunPaths, *words: str) -> int:
    return command.replay(command.read_command_line(["--run", str(run.root), "--name", "mine", *words]))


@pytest.mark.parametrize("first", [0, 2])
def test_a_replay_scores_and_imitates_alike(run, capsys, first):
    assert replay(run, "--from-checkpoint", str(first)) == 0
    assert f"equal: {4 - first} steps" in capsys.readouterr().out
    live, own = read_metrics(run.metrics), read_metrics(run.replays / "mine" / "metrics.jsonl")
    assert live[4]["teacher/kl"] > 0
    for step, row in own.items():
        for name in ("reward_model/score", "teacher/kl", "actor/teacher_loss", "batch/reward"):
            assert row[name] == live[step][name]


def test_another_reward_model_in_its_place_is_noticed(run):
    weights = run.root.parent / "reward_model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with raises_code("replay.other_weights", "reward_model"):
        replay(run)


def test_another_weight_of_the_score_is_another_path(run, capsys):
    assert replay(run, "reward_model.weight=2", "--until", "1") == 0
    assert "weights: different from step 1 on" in capsys.readouterr().out
