"""Replays of runs with more than an actor, from start and middle: the same path, or another one where an option was
changed."""

import shutil

import pytest

from areal.replay import __main__ as command
from areal.replay.recorded import read_metrics
from areal.system.run_paths import RunPaths
from tests.expect import raises_code

pytestmark = pytest.mark.usefixtures("ranks_in_process")
RESET = ("actor/kl_coef", "ref/reset", "actor/kl_loss", "batch/ref_kl", "batch/ref_kl_full")
SCORED = ("reward_model/score", "teacher/kl", "actor/teacher_loss", "batch/reward")
ASSEMBLED = {"actor/epoch_0/approx_kl", "actor/stopped_by_kl", "actor/positive_nll", "filter/kept_tokens"}


@pytest.fixture
def copied(request, tmp_path):
    """A copy of a recorded run, and of the reward model that it began with."""

    def copy(name: str) -> RunPaths:
        recorded, paths = request.getfixturevalue(name), RunPaths(tmp_path / "run")
        shutil.copytree(recorded.folder, paths.root)
        scorer = recorded.folder.parent / "reward_model"
        if scorer.is_dir():
            shutil.copytree(scorer, tmp_path / "reward_model")
            text = paths.config.read_text()
            paths.config.write_text(text.replace(f"path: {scorer}", f"path: {tmp_path}/reward_model"))
        return paths

    return copy


def replay(run: RunPaths, *words: str) -> tuple[dict, dict]:
    """The metrics of the run and of its replay."""
    assert command.replay(command.read_command_line(["--run", str(run.root), "--name", "mine", *words])) == 0
    return read_metrics(run.metrics), read_metrics(run.replays / "mine" / "metrics.jsonl")


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", ["recorded_with_epochs", "recorded_with_resets", "recorded_with_roles"])
def test_a_replay_goes_through_the_same_states(copied, capsys, name, first):
    """From a checkpoint in the middle: coefficients and references come from it, the order of sequences from the
    seed."""
    live, ours = replay(copied(name), "--from-checkpoint", str(first))
    assert f"equal: {4 - first} steps" in capsys.readouterr().out
    names = {"recorded_with_resets": RESET, "recorded_with_roles": SCORED}.get(name)
    names = names or [key for key in live[4] if key.split("/")[0] in ("actor", "critic", "filter")]
    for step, row in ours.items():
        assert {key: row.get(key) for key in names} == {key: live[step].get(key) for key in names}
    if name == "recorded_with_roles":
        assert live[4]["teacher/kl"] > 0
    elif name == "recorded_with_resets":
        assert len({row["actor/kl_coef"] for row in live.values()}) == 4
        assert [live[step]["ref/reset"] for step in (1, 2, 3, 4)] == [0, 1, 0, 1]
        # right after a reset the policy is its own reference
        assert live[1]["batch/ref_kl"] < 1e-9
        assert live[3]["batch/ref_kl"] < 1e-9 < live[2]["batch/ref_kl"]
    else:
        assert set(names) >= ASSEMBLED
        assert [live[step]["actor/update_skipped"] for step in (1, 2, 3, 4)] == [1, 0, 0, 0]
        assert all(live[step]["critic/optimizer_steps"] == 2 for step in live)
        assert live[4]["actor/entropy_coef"] > live[3]["actor/entropy_coef"] > live[2]["actor/entropy_coef"]


@pytest.mark.parametrize(
    ("name", "words", "step"),
    [
        ("recorded_with_epochs", ["actor.ppo_epochs=3", "critic.warmup_steps=0", "--until", "2"], 1),
        ("recorded_with_resets", ["ref_reset_steps=3", "--until", "3"], 3),
        ("recorded_with_roles", ["reward_model.weight=2", "--until", "1"], 1),
    ],
)
def test_another_option_is_another_path(copied, capsys, name, words, step):
    """Of the references: what the checkpoint holds of the reference and the coefficient is needed."""
    live, ours = replay(run := copied(name), *words)
    assert f"weights: different from step {step} on" in capsys.readouterr().out
    if name == "recorded_with_epochs":
        assert ours[1]["actor/update_skipped"] == 0
    if name == "recorded_with_resets":
        assert (run.recover / "step-000002" / "ref").is_dir()
        assert ours[3]["batch/ref_kl"] > 1e-6 > live[3]["batch/ref_kl"]


def test_a_checkpoint_without_the_reference_does_not_fit_a_run_that_resets_it(copied):
    with raises_code("checkpoint.other_run", "['actor', 'critic'], not ['actor', 'critic', 'ref']"):
        replay(copied("recorded_with_all"), "ref_reset_steps=1", "--from-checkpoint", "2")


def test_another_reward_model_in_its_place_is_noticed(copied):
    run = copied("recorded_with_roles")
    weights = run.root.parent / "reward_model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with raises_code("replay.other_weights", "reward_model"):
        replay(run)
