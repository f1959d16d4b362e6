"""Alarms about episodes come when an episode ends, also before the first train step."""

import asyncio
import json
from dataclasses import replace

import pytest

from areal.api.config import AlarmRuleConfig, AlarmsConfig
from areal.observe.alarms import AlarmStop
from areal.rollout.executor import WINDOW_BATCHES, EpisodeAlarms, ProducerStopped
from tests.rollout import rollout_kit


class Watched:
    """Alarms of a run with batches of one episode."""

    def __init__(self, path, *, batch_size=1, **rules):
        self.invalid, self.stopped, self.path, self.now_s = {}, [], path, 0.0
        config = AlarmsConfig(rules=[AlarmRuleConfig(name=name, action=action) for name, action in rules.items()])
        self.alarms = EpisodeAlarms(
            config.chosen(),
            path,
            batch_size=batch_size,
            steps_done=lambda: 0,
            invalid_answers=lambda: self.invalid,
            on_stop=self.stopped.append,
        )

    def end(self, *signs, times=1, detail="episode 1: cause"):
        for _ in range(times):
            self.now_s += 10.0
            self.alarms.ended(signs, detail, self.now_s)
        return self.names()

    def names(self):
        return [line["name"] for line in self.lines()]

    def lines(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


@pytest.mark.parametrize("name", ["failed_episodes", "agent_errors", "missing_rewards"])
def test_a_share_counts_from_the_third_episode_on(tmp_path, name):
    watched = Watched(tmp_path / "alarms.jsonl")
    watched.end(times=2)
    assert watched.end(name, times=2) == []
    assert watched.end(name) == [name]
    assert watched.end(name, times=5) == [name]
    (line,) = watched.lines()
    assert (line["step"], line["value"], line["code"]) == (0, 0.6, f"alarm.{name}")
    assert "episode 1: cause" in line["causes"]


def test_two_percent_of_the_newest_batches_raise_nothing(tmp_path):
    watched = Watched(tmp_path / "alarms.jsonl", batch_size=10)
    assert 10 * WINDOW_BATCHES == 200
    watched.end(times=200)
    assert watched.end("failed_episodes", times=4) == []  # 4 of 200
    assert watched.end(times=200) == []
    assert watched.end("failed_episodes", times=4) == []  # the first ones left the window
    assert watched.end("failed_episodes") == ["failed_episodes"]


def test_an_alarm_comes_again_only_after_as_many_episodes_as_it_looks_at(tmp_path):
    watched = Watched(tmp_path / "alarms.jsonl")
    assert watched.end("failed_episodes", times=3) == ["failed_episodes"]
    watched.end(times=WINDOW_BATCHES - 3)
    assert watched.end("failed_episodes", times=3) == ["failed_episodes"]  # within the limit only for a moment
    watched.end(times=WINDOW_BATCHES)
    assert watched.end("failed_episodes", times=3) == ["failed_episodes"] * 2


def test_three_invalid_answers_of_a_server_name_it(tmp_path):
    watched = Watched(tmp_path / "alarms.jsonl")
    watched.invalid = {"server-0": 0, "server-1": 2}
    assert watched.end() == []
    watched.invalid["server-1"] = 3
    assert watched.end() == ["invalid_numbers"]
    assert "server-1 sent 3" in watched.lines()[0]["causes"]
    assert "server-0" not in watched.lines()[0]["causes"]


def test_an_alarm_that_stops_gives_its_error(tmp_path):
    watched = Watched(tmp_path / "alarms.jsonl", stuck_episodes="stop", failed_episodes="off")
    assert watched.end("stuck_episodes", "failed_episodes", times=4) == ["stuck_episodes"]
    assert [(type(error), error.code) for error in watched.stopped] == [(AlarmStop, "alarm.stuck_episodes")]


async def test_an_alarm_ends_a_run_before_its_first_step(tmp_path):
    class Workflow(rollout_kit.ScriptedWorkflow):
        async def arun_episode(self, engine, data):
            group = await super().arun_episode(engine, data)
            subject = replace(group.trajectories[0], loss_mask=[0, 7, 1] if data["index"] % 2 else [0, 1, 1])
            return replace(group, trajectories=[subject])

    alarms = AlarmsConfig(rules=[AlarmRuleConfig(name="invalid_numbers", action="stop")])
    config = replace(rollout_kit.make_config(batch_size=8, check_format=False), alarms=alarms)
    ledger, path = rollout_kit.memory_ledger(), tmp_path / "alarms.jsonl"
    controller = rollout_kit.make_controller(ledger, config=config, workflow=Workflow(), alarms_path=path)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    with pytest.raises((AlarmStop, ProducerStopped)) as error:
        await asyncio.wait_for(controller.ended(report_s=0.0), 60.0)
    await controller.close()
    assert error.value.code == "alarm.invalid_numbers"
    line = json.loads(path.read_text().splitlines()[-1])
    assert (line["step"], line["name"], line["value"]) == (0, "invalid_numbers", 3.0)
    assert "Workflow, episode" in line["causes"]
