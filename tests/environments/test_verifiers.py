"""`workflow: verifiers` over a fake package."""

import pytest

from areal.api.errors import AgentFailed, ConfigError
from areal.environments.workflow import VerifiersWorkflow
from tests.environments.environment_kit import build, policy, trained_text

pytestmark = pytest.mark.usefixtures("in_fakes")
ROW = {"env": "adding", "config": {}, "seed": 0, "index": 0}


@pytest.mark.parametrize(("answer", "reward"), [("4", 2.0), ("5", 0.0)])
async def test_the_reward_is_weighted_by_the_package_and_has_its_parts(make, answer, reward) -> None:
    engine = policy(lambda _: answer)
    group = await make(VerifiersWorkflow).arun_episode(engine, ROW | {"config": {"system": "add"}})
    assert [trajectory.reward for trajectory in group.trajectories] == [reward]
    assert (group.stats["reward/right"], group.stats["reward/length"]) == (reward, 1.0)
    assert "reward/later" not in group.stats  # it was not scored
    assert trained_text(group.trajectories[0]) == f"{answer}<|im_end|>"


@pytest.mark.parametrize(("task", "reason"), [(1, "agent_timeout"), (2, "no_turns")])
async def test_an_episode_that_failed_or_asked_nothing_has_no_reward(make, task, reason) -> None:
    group = await make(VerifiersWorkflow).arun_episode(policy(lambda _: "4"), ROW | {"index": task})
    assert (group.trajectories, group.rejected) == ([], reason)


async def test_an_error_of_the_package_is_that_of_the_agent(make) -> None:
    def fail(_):
        raise RuntimeError("no server")

    with pytest.raises(AgentFailed, match="InternalServerError") as failed:
        await make(VerifiersWorkflow).arun_episode(policy(fail), dict(ROW))
    assert failed.value.counted_as == "agent_error: HarnessError"


async def test_an_episode_whose_tool_server_has_died_runs_again_with_new_ones(make, tmp_path) -> None:
    workflow, closed = make(VerifiersWorkflow), tmp_path / "closed.txt"
    with pytest.raises(AgentFailed, match="OldApi"):  # another environment cannot be opened
        await workflow.arun_episode(policy(lambda _: "4"), ROW | {"env": "of_the_old_api"})
    row = ROW | {"config": {"has_dead_tool": True, "closed": str(closed)}}
    group = await workflow.arun_episode(policy(lambda _: "4"), row)
    assert [trajectory.reward for trajectory in group.trajectories] == [2.0]
    assert closed.read_text() == "closed\n"  # the environment of the dead server, not the new one


async def test_a_task_that_blocks_its_worker_ends_it(make, monkeypatch) -> None:
    monkeypatch.setattr("areal.environments.workflow._CLOSE_LIMIT_S", 0.2)
    monkeypatch.setattr("areal.system.worker_process._GRACE_S", 0.2)
    workflow = make(VerifiersWorkflow, agent={"timeout_s": 5.0})
    await workflow.arun_episode(policy(lambda _: "4"), dict(ROW))
    first = workflow.worker.pid
    group = await workflow.arun_episode(policy(lambda _: "4"), ROW | {"index": 3})
    assert group.rejected == "agent_timeout"
    group = await workflow.arun_episode(policy(lambda _: "4"), dict(ROW))
    assert [trajectory.reward for trajectory in group.trajectories] == [2.0]
    assert workflow.worker.pid != first


async def test_a_request_beyond_the_budget_is_scored_as_the_budget_says(make) -> None:
    row = ROW | {"config": {"system": "long " * 9000}}
    group = await make(VerifiersWorkflow, agent={"budget_reward": "none"}).arun_episode(policy(lambda _: "4"), row)
    assert (group.trajectories, group.rejected) == ([], "turn_budget")


@pytest.mark.parametrize(
    ("row", "code", "text"),
    [
        ({"env": "of_the_old_api"}, "env.old_api", "written for the API 0.1"),
        ({"env": "addding"}, "env.not_found", "pip install addding"),
        ({"env": "needing"}, "env.not_found", "needing needs the module no_such_module"),
        ({"env": "no/adding.py"}, "env.not_found", "no file no/adding.py"),
        ({"index": 4}, "env.not_found", "has 4 tasks"),
        ({"env": "judged"}, "env.not_found", "judged has agent, judge"),
    ],
)
def test_what_cannot_run_is_one_line_before_the_start(row, code, text) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        build(VerifiersWorkflow).check_rows([ROW | row])
    assert error.value.code == code
    assert "\n" not in str(error.value)


async def test_agents_with_a_client_of_their_own_are_not_the_policy(make) -> None:
    workflow = make(VerifiersWorkflow, args={"judge": {"client": {"base_url": "http://127.0.0.1:9/v1"}}})
    group = await workflow.arun_episode(policy(lambda _: "4"), ROW | {"env": "judged"})
    assert [trajectory.reward for trajectory in group.trajectories] == [2.0]
