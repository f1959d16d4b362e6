"""Alarms of a run: their file, a trainer that starts again, and the end of a run by an alarm."""

import dataclasses
import json

import pytest

from areal.api.config import (
    AlarmRuleConfig,
    AlarmsConfig,
    GenerationHyperparameters,
    GRPOConfig,
    PPOActorConfig,
    PPOCriticConfig,
    RecoverConfig,
    SFTConfig,
    TrainDatasetConfig,
)
from areal.api.metrics import Metric
from areal.observe.alarms import AlarmStop
from areal.observe.step_files import JsonlTracker
from areal.system.heartbeat import Beat, write_beats
from areal.system.run_paths import RunPaths
from areal.trainer.after_step import RunAlarms, chosen_alarms
from tests.trainer.test_after_step import LENGTH, make, no_hooks

HIGH = {"actor/grad_norm": 500.0}


def train(paths, first_step, rows, action="warn"):
    """One life of a trainer: its metrics and alarms until the last of `rows`."""
    rules = AlarmsConfig(action=action).chosen()
    tracker = JsonlTracker(paths.metrics, first_step=first_step)
    alarms = RunAlarms(rules, paths, first_step=first_step)
    result = []
    for step, row in enumerate(rows, start=first_step):
        tracker.log(step, row)
        result += [(alarm.step, alarm.name) for alarm in alarms.look(step, row)]
    tracker.close()
    alarms.close()
    return result


def recorded(paths):
    return [(line["step"], line["name"]) for line in map(json.loads, paths.alarms.read_text().splitlines())]


def test_a_streak_continues_after_a_recovery(tmp_path):
    paths = RunPaths(tmp_path)
    assert train(paths, 1, [HIGH, HIGH]) == []
    assert train(paths, 3, [HIGH, HIGH]) == [(3, "grad_norm")]
    assert recorded(paths) == [(3, "grad_norm")]


def test_no_alarm_before_the_checkpoint_is_repeated_and_later_ones_are_raised_again(tmp_path):
    paths = RunPaths(tmp_path)
    mismatch = {"batch/mismatch/k3": 50.0}
    assert train(paths, 1, [HIGH, HIGH, HIGH, HIGH | mismatch, HIGH | mismatch]) == [
        (3, "grad_norm"),
        (5, "logprob_k3"),
    ]
    assert train(paths, 5, [HIGH | mismatch, HIGH | mismatch]) == [(5, "logprob_k3")]  # of the checkpoint after step 4
    assert recorded(paths) == [(3, "grad_norm"), (5, "logprob_k3")]


def test_a_value_that_is_not_finite_is_no_value(tmp_path):
    paths = RunPaths(tmp_path)
    assert train(paths, 1, [HIGH, {"actor/grad_norm": float("nan")}, HIGH]) == []
    assert train(paths, 4, [HIGH]) == [(4, "grad_norm")]


def test_a_run_of_the_beginning_has_no_alarm_of_an_earlier_one(tmp_path):
    paths = RunPaths(tmp_path)
    train(paths, 1, [HIGH] * 3)
    assert train(paths, 1, [HIGH]) == []
    assert recorded(paths) == []


@pytest.mark.parametrize("mode", ["auto", "disabled"])
def test_an_alarm_ends_the_run_on_every_rank_after_a_recovery_checkpoint(toolbox, tmp_path, mode):
    group = toolbox.RankGroup(2)
    alarms = AlarmsConfig(rules=[AlarmRuleConfig(name="grad_norm", steps=2, action="stop")])
    recover = RecoverConfig(mode=mode, freq_steps=100)

    def rank_run(rank):
        after, *_ = make(group, rank, tmp_path, no_hooks(), alarms=alarms, recover=recover)
        assert not after(LENGTH.info(0), {"actor/grad_norm": Metric(500.0)}, {})
        with pytest.raises(AlarmStop) as error:
            after(LENGTH.info(1), {"actor/grad_norm": Metric(500.0)}, {})
        after.close()
        return error.value.code

    assert group.run(rank_run) == ["alarm.grad_norm"] * 2
    assert recorded(RunPaths(tmp_path)) == [(2, "grad_norm")]
    assert (tmp_path / "recover" / "step-000002").is_dir() == (mode == "auto")
    assert not (tmp_path / "checkpoints").exists()


def test_metrics_contain_the_memory_of_every_process(toolbox, tmp_path):
    beat = Beat(pid=1, beats=1, doing="x", for_s=0.0, step=None)
    beats = {"server-0": dataclasses.replace(beat, resident_bytes=3 * 2**29), "server-1": beat}
    write_beats(RunPaths(tmp_path).alive, beats)
    after, _, _, records = make(toolbox.RankGroup(1), 0, tmp_path, no_hooks())
    after(LENGTH.info(0), {}, {})
    result = {name: value for name, value in records.lines[0][1].items() if name.startswith("memory/")}
    assert result == {"memory/server-0": 1.5}


def test_groups_are_compared_only_where_the_advantages_need_them():
    def names(config):
        return {chosen.rule.name for chosen in chosen_alarms(config)}

    common = {
        "experiment_name": "e",
        "trial_name": "t",
        "train_dataset": TrainDatasetConfig(path="x.jsonl", batch_size=4),
    }
    actor = PPOActorConfig(path="m")
    assert "uniform_groups" in names(GRPOConfig(**common, actor=actor, gconfig=GenerationHyperparameters(n_samples=4)))
    assert "uniform_groups" not in names(GRPOConfig(**common, actor=actor))
    critic = PPOCriticConfig(path="m")
    several = GenerationHyperparameters(n_samples=4)
    assert "uniform_groups" not in names(GRPOConfig(**common, actor=actor, gconfig=several, critic=critic))
    assert "grad_norm" in names(SFTConfig(**common))
