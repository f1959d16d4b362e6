"""The base of the adapters, and `workflow: reasoning_gym`, over a fake package."""

import asyncio
import json
import os
import signal

import psutil
import pytest

from areal.api.config import TrainDatasetConfig
from areal.api.errors import AgentFailed, ConfigError
from areal.api.workflow import EPISODE_ID
from areal.data.dataset import load_rows
from areal.environments.curriculum import Curriculum, CurriculumRule
from areal.environments.reasoning_gym import ReasoningGymWorkflow
from tests.environments.environment_kit import build, policy, trained_text

pytestmark = pytest.mark.usefixtures("in_fakes")
ROW = {"env": "sums", "config": {}, "seed": 3, "index": 1}


@pytest.mark.parametrize(
    ("env", "answer", "reward", "parts"),
    [
        ("sums", "4 + 5 is <answer>9</answer>", 1.0, {"extracted": 1}),
        ("sums", "<answer>8</answer>", 0.1, {"extracted": 1}),
        ("sums", "9", 0.0, {"extracted": 0}),
        ("raising", "<answer>nine</answer>", 0.0, {"extracted": 1, "score_raised": 1}),
    ],
)
async def test_an_answer_is_extracted_and_scored_by_the_package(make, env, answer, reward, parts) -> None:
    group = await make(ReasoningGymWorkflow).arun_episode(policy(lambda _: answer), ROW | {"env": env})
    assert [trajectory.reward for trajectory in group.trajectories] == [reward]
    assert {name: group.stats[f"reward/{name}"] for name in parts} == parts
    assert trained_text(group.trajectories[0]) == f"{answer}<|im_end|>"


async def test_an_episode_whose_worker_dies_runs_again_and_later_ones_use_a_new_worker(make) -> None:
    workflow, gate = make(ReasoningGymWorkflow), asyncio.Event()
    engine = policy(lambda _: "<answer>9</answer>")
    engine._gate = gate
    episode = asyncio.create_task(workflow.arun_episode(engine, dict(ROW)))
    await engine.arrived.wait()
    first = workflow.worker.pid
    os.kill(first, signal.SIGKILL)
    gate.set()
    group = await episode
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0]
    assert workflow.worker.pid != first


async def test_an_episode_that_is_cancelled_does_not_stop_the_start_of_the_worker(make) -> None:
    workflow = make(ReasoningGymWorkflow)
    waiters = [asyncio.create_task(workflow.worker.facts()) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    assert await waiters[1] == await waiters[2]
    assert waiters[0].cancelled()


async def test_an_episode_whose_worker_dies_twice_has_no_reward(make) -> None:
    workflow = make(ReasoningGymWorkflow)

    def kill(_):
        os.kill(workflow.worker.pid, signal.SIGKILL)
        return "<answer>9</answer>"

    with pytest.raises(AgentFailed) as failed:
        await workflow.arun_episode(policy(kill), dict(ROW))
    assert failed.value.counted_as == "agent_error: EnvironmentDied"


@pytest.mark.parametrize(
    ("options", "row", "code", "text"),
    [
        ({"python": "/no/such/python"}, ROW, "env.not_found", "/no/such/python"),
        ({}, ROW | {"env": "sum"}, "env.not_found", "near it: sums"),
    ],
)
def test_what_is_missing_is_one_line_before_the_start(options, row, code, text) -> None:
    workflow = build(ReasoningGymWorkflow, **options)
    with pytest.raises(ConfigError) as error:
        workflow.check_rows([row])
    assert error.value.code == code
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"-m pip install reasoning-gym==0\.1\.25") as error:
        build(ReasoningGymWorkflow).check_rows([ROW])
    assert error.value.code == "env.not_found"


async def test_the_worker_ends_with_the_end_of_its_channel(make) -> None:
    workflow = make(ReasoningGymWorkflow)
    await workflow.worker.facts()
    worker = psutil.Process(workflow.worker.pid)
    workflow.worker._live.process._streams[1].transport.abort()
    assert await asyncio.to_thread(worker.wait, 20) is not None or not worker.is_running()


def test_rows_come_from_the_specification_of_a_dataset() -> None:
    config = TrainDatasetConfig(path=["env:sums?size=3&seed=5&terms=4", "env:raising?size=1"], weights=[3, 1])
    rows = load_rows(config, default_split="train")
    assert [row for row in rows if row["env"] == "sums"][2] == {
        "env": "sums", "config": {"terms": 4}, "seed": 5, "size": 3, "index": 2
    }  # fmt: skip


async def test_the_level_follows_the_success_rate_and_is_that_of_the_first_start(make, monkeypatch, tmp_path) -> None:
    workflow = make(ReasoningGymWorkflow, curriculum={"target": 0.5, "groups": 2})
    workflow._curriculum = Curriculum(workflow._rule, tmp_path / "levels.jsonl")
    right = policy(lambda text: f"<answer>{sum(map(int, text.split(chr(10))[0].split(' + ')))}</answer>")
    asked = []
    for episode in range(7):
        EPISODE_ID.set(episode)
        group = await workflow.arun_episode(right, dict(ROW))
        messages = json.loads(group.record)["sessions"][0]["messages"]
        asked.append(messages[0]["content"].split("\n")[0].count("+") + 1)
    assert asked == [2, 2, 3, 3, 5, 5, 5]
    again = Curriculum(workflow._rule, tmp_path / "levels.jsonl")  # as after a kill
    assert [again.begin(episode, "sums", 2) for episode in (0, 2, 4, 7)] == [0, 1, 2, 2]


def test_a_curriculum_falls_below_half_of_its_target_and_ignores_groups_of_another_level() -> None:
    levels = Curriculum(CurriculumRule(target=0.5, groups=2, start=1), None)
    levels.end(0, "sums", 0, 1.0, 2)
    levels.end(1, "sums", 1, 0.0, 2)
    assert levels.begin(2, "sums", 2) == 1
    levels.end(2, "sums", 1, 0.25, 2)
    levels.end(2, "sums", 1, 0.0, 2)  # the same episode after a restart
    assert levels.begin(3, "sums", 2) == 0


def test_a_first_level_above_the_top_becomes_the_top_and_falls_from_there(tmp_path) -> None:
    file = tmp_path / "levels.jsonl"
    levels = Curriculum(CurriculumRule(target=0.5, groups=1, start=5), file)
    assert levels.begin(0, "sums", 2) == 2
    levels.end(0, "sums", 2, 0.0, 2)
    assert levels.begin(1, "sums", 2) == 1
    levels.close()
    assert Curriculum(CurriculumRule(target=0.5, groups=1, start=5), file).begin(2, "sums", 2) == 1


@pytest.mark.parametrize(("env", "top"), [("sums", 2), ("few", 1), ("gap", 0), ("nothing", None), ("raising", None)])
async def test_the_top_is_the_highest_level_up_to_which_the_dataset_accepts_all(make, env, top) -> None:
    assert await make(ReasoningGymWorkflow).worker.call("max_level", {"row": ROW | {"env": env}}, limit_s=20) == top


def test_the_last_row_of_an_environment_is_tried_before_the_start() -> None:
    with pytest.raises(ConfigError) as error:
        build(ReasoningGymWorkflow).check_rows([ROW, ROW, ROW | {"config": {"terms": "many"}}])
    assert error.value.code == "env.failed"
