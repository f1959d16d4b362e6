"""Evaluations in which answers have no reward: the result, its counts, and who uses it."""

import asyncio
from dataclasses import replace

import pytest

from areal.api.config import EvaluatorConfig
from areal.api.errors import AgentFailed, ServerUnavailable
from areal.api.metrics import evaluations_of, result_text, unscored_text
from areal.rollout.evaluation import EvaluationFailed, HeldOutOptions
from tests.rollout import rollout_kit

ROWS = 12


class Misses(rollout_kit.ScriptedWorkflow):
    """Of twelve rows the first ones fail as `causes` says; the others have reward 1."""

    def __init__(self, *causes):
        super().__init__()
        self.causes = causes

    async def arun_episode(self, engine, data):
        group = await super().arun_episode(engine, data)
        match dict(enumerate(self.causes)).get(data["index"]):
            case "agent":
                raise AgentFailed("KeyError: x", "KeyError")
            case "timeout":
                return replace(group, rejected="agent_timeout")
            case "none":
                return None
            case "server":
                raise ServerUnavailable("no server", code="fleet.no_live_replica")
            case "workflow":
                raise KeyError("answer")
        return replace(group, trajectories=[replace(group.trajectories[0], reward=1.0)])


def evaluated(missing_reward, *causes, num_samples=1):
    async def main():
        options = HeldOutOptions(missing_reward=missing_reward, num_samples=num_samples)
        controller = rollout_kit.make_controller(
            rollout_kit.memory_ledger(),
            eval_sets={"": [{"index": index} for index in range(ROWS)]},
            eval_workflows={"sampled": Misses(*causes)},
            eval_options=options,
        )
        await controller.start()
        await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        result = await controller.evaluate(0, "sampled", timeout_s=1e6)
        await controller.close()
        return result

    return rollout_kit.run_virtual(asyncio.wait_for(main(), 1e6))


AGENT = ("agent", "timeout", "none")
OURS = ("agent", "server", "workflow")


@pytest.mark.parametrize(
    ("missing_reward", "causes", "reward", "missing", "failed"),
    [
        ("zero", (), 1.0, 0, 0),
        ("zero", AGENT, 0.75, 3, 0),
        ("zero", OURS, None, 3, 2),
        ("leave_out", AGENT, 1.0, 3, 0),
        ("leave_out", OURS, 1.0, 3, 2),
        ("refuse", (), 1.0, 0, 0),
        ("refuse", AGENT, None, 3, 0),
        ("refuse", OURS, None, 3, 2),
        ("zero", ("agent",) * ROWS, 0.0, ROWS, 0),
    ],
)
def test_what_answers_without_a_reward_count(missing_reward, causes, reward, missing, failed):
    result = evaluated(missing_reward, *causes)
    assert result.get("reward") == reward
    assert (result["missing"], result["failed"], result["answers"]) == (missing, failed, ROWS)
    assert result["num"] == ROWS - missing
    assert result.get("reward_scored") == (1.0 if 0 < missing < ROWS else None)


def test_several_answers_to_a_row_count_as_wrong_without_a_reward():
    zero = evaluated("zero", *AGENT, num_samples=2)
    assert (zero["mean@2"], zero["pass@1"], zero["pass@2"]) == (0.75, 0.75, 0.75)
    refused = evaluated("refuse", *AGENT, num_samples=2)
    assert not {"reward", "mean@2", "pass@1", "pass@2"} & refused.keys()


@pytest.mark.parametrize("missing_reward", ["leave_out", "refuse"])
def test_an_evaluation_without_any_reward_is_an_error_where_zero_is_no_result(missing_reward):
    with pytest.raises(EvaluationFailed):
        evaluated(missing_reward, *("agent",) * ROWS)


def test_a_result_is_shown_with_its_count():
    values = {"eval/greedy/reward": 0.18, "eval/greedy/missing": 41.0, "eval/greedy/answers": 128.0}
    assert evaluations_of(values) == ["eval/greedy"]
    assert result_text(values, "eval/greedy") == "0.180, 41 of 128 without a reward"
    assert (
        result_text({"eval/greedy/reward": 0.18, "eval/greedy/reward/stderr": 0.0341}, "eval/greedy") == "0.180 ±0.034"
    )
    refused = {"eval/greedy/reward_scored": 0.265, "eval/greedy/missing": 41.0, "eval/greedy/answers": 128.0}
    assert result_text(refused, "eval/greedy") == "no result (0.265 over the others), 41 of 128 without a reward"
    whole = {"eval/greedy/reward": 0.5, "eval/greedy/missing": 0.0, "eval/greedy/answers": 128.0}
    assert (result_text(whole, "eval/greedy"), unscored_text(whole, "eval/greedy")) == ("0.500", "")


def test_a_result_that_does_not_exist_reaches_no_goal():
    config = EvaluatorConfig(stop_at={"greedy": 0.2}, modes=["greedy"])
    assert not config.goals_reached({})
