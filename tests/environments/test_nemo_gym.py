"""`workflow: nemo_gym` over a fake package."""

import json
import sys

import pytest

from areal.api.errors import AgentFailed, ConfigError
from areal.environments.workflow import NemoGymWorkflow
from tests.agent.policies import ScriptedEngine
from tests.environments.environment_kit import build, trained_text

pytestmark = pytest.mark.usefixtures("in_fakes")
TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("add", "fail")]
ASKED = {"input": [{"role": "developer", "content": "count"}, {"role": "user", "content": "add"}], "tools": TOOLS}
ROW = {"responses_create_params": ASKED, "initial": 1, "expected": 5}


def call(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def scripted(*answers):
    """An engine that gives these answers one after another."""
    left = list(answers)
    return ScriptedEngine(lambda _: left.pop(0))


def last_tool_message(engine) -> str:
    """What the last tool said, as the last request has it."""
    prompt = engine._tokenizer.decode(list(engine.requests[-1].input_ids))
    return prompt.rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0]


async def test_tools_of_one_session_change_its_state_and_the_server_verifies_it(make) -> None:
    engine = scripted(call("add", number=2), call("add", number=2), "done")
    group = await make(NemoGymWorkflow, env="counting").arun_episode(engine, dict(ROW))
    assert [trajectory.reward for trajectory in group.trajectories] == [1.25]  # with the bonus of its YAML file
    assert (group.stats["reward/items"], group.stats["reward/cut"]) == (5.0, 0.0)
    assert json.loads(last_tool_message(engine)) == {"count": 5}
    assert trained_text(group.trajectories[0]).endswith("done<|im_end|>")


async def test_episodes_at_the_same_time_have_cookies_of_their_own(make) -> None:
    workflow = make(NemoGymWorkflow, env="counting", args={"config": {"bonus": 0.0}}, n_samples=4)
    engine = ScriptedEngine(lambda prompt: "done" if "<|im_start|>tool" in prompt else call("add", number=4))
    group = await workflow.arun_episode(engine, dict(ROW))
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0] * 4


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (call("verify"), '{"error": "there is no tool verify"}'),
        (call("seed_session", initial=5), '{"error": "there is no tool seed_session"}'),
        (call("fail"), "Internal Server Error"),
    ],
)
async def test_a_wrong_call_is_told_to_the_policy(make, answer, text) -> None:
    engine = scripted(answer, "done")
    group = await make(NemoGymWorkflow, env="counting").arun_episode(engine, dict(ROW))
    assert last_tool_message(engine) == text
    assert [trajectory.reward for trajectory in group.trajectories] == [0.25]


async def test_what_is_no_valid_measurement_has_no_reward(make) -> None:
    group = await make(NemoGymWorkflow, env="counting").arun_episode(scripted("done"), ROW | {"mask": True})
    assert (group.trajectories, group.rejected) == ([], "no_reward")


async def test_a_server_that_does_not_answer_is_no_reward(make) -> None:
    with pytest.raises(AgentFailed, match="/verify answered 404") as failed:
        await make(NemoGymWorkflow, env="counting").arun_episode(scripted("broken"), dict(ROW))
    assert failed.value.counted_as == "agent_error: ServerRefused"


async def test_a_dialogue_that_the_budget_ends_is_verified(make) -> None:
    engine = scripted(call("add", number=4), call("add", number=4))
    group = await make(NemoGymWorkflow, env="counting", agent={"max_turns": 1}).arun_episode(engine, dict(ROW))
    assert [trajectory.reward for trajectory in group.trajectories] == [1.25]
    assert len(engine.requests) == 1


async def test_a_row_without_a_task_is_an_example_of_the_server(make) -> None:
    group = await make(NemoGymWorkflow, env="counting").arun_episode(scripted("done"), {"seed": 7, "index": 2})
    assert [trajectory.reward for trajectory in group.trajectories] == [1.25]


async def test_steps_have_their_rewards_and_their_tool_outputs(make) -> None:
    engine = scripted(call("add", number=1), "end")
    group = await make(NemoGymWorkflow, env="stepping").arun_episode(engine, dict(ROW))
    assert [trajectory.reward for trajectory in group.trajectories] == [1.5]
    assert last_tool_message(engine) == "told"


@pytest.mark.parametrize(
    ("env", "row", "text"),
    [
        ("none", ROW, "no resources server"),
        ("needing", ROW, "needs the module no_such_module"),
        ("counting", ROW | {"env": "stepping"}, "names the server 'stepping', and workflow_args.env is 'counting'"),
        ("counting", ROW | {"config": {"bonus": 100}}, "has the config bonus"),
        ("stepping", {"seed": 0, "index": 0}, "rows need the column responses_create_params"),
    ],
)
def test_what_is_missing_is_one_line_before_the_start(env, row, text) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        build(NemoGymWorkflow, env=env).check_rows([row])
    assert error.value.code == "env.not_found"
    assert "\n" not in str(error.value)


def test_an_old_python_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)  # without the fake package
    text = "needs Python 3.13.14" if sys.version_info < (3, 13) else "pip install nemo-gym"
    with pytest.raises(ConfigError, match=text) as error:
        build(NemoGymWorkflow, env="counting").check_rows([ROW])
    assert error.value.code == "env.not_found"
