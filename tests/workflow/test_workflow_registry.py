from dataclasses import replace

import pytest

from areal.api.config import GenerationHyperparameters, PPOActorConfig, PPOConfig, RewardConfig
from areal.api.data import Trajectory, TrajectoryGroup
from areal.api.errors import ConfigError
from areal.api.workflow import RolloutWorkflow
from areal.workflow.registry import build_workflow, mixed_rewards, resolve_accept_fn
from areal.workflow.rlvr import MultiTurnWorkflow, RLVRWorkflow
from tests.expect import raises_code


def config(**fields):
    return PPOConfig(experiment_name="e", trial_name="t", gconfig=GenerationHyperparameters(n_samples=2), **fields)


def problems_of(error):
    return [(problem.path, problem.code) for problem in error.value.problems]


def test_registered_workflows_are_built(tokenizer):
    assert isinstance(build_workflow(config(reward_fn="exact"), tokenizer), RLVRWorkflow)
    multi = config(reward_fn="exact", workflow="multi_turn", workflow_args={"max_turns": 2, "turn_discount": 0.9})
    assert isinstance(build_workflow(multi, tokenizer), MultiTurnWorkflow)


def test_functions_with_weights_take_the_place_of_the_short_form(tokenizer):
    weighted = RewardConfig(by_source={"a": {"exact": 1.0}})
    assert isinstance(build_workflow(config(reward=weighted), tokenizer), RLVRWorkflow)
    with pytest.raises(ConfigError) as error:
        build_workflow(config(reward=RewardConfig(by_source={"a": {"exactt": 1.0}})), tokenizer)
    assert problems_of(error) == [("reward.by_source.a", "config.bad_reference")]


def test_remax_generates_a_greedy_answer(tokenizer):
    remax = PPOActorConfig(adv_estimator="remax")
    assert build_workflow(config(reward_fn="exact", actor=remax), tokenizer)._greedy_baseline
    assert not build_workflow(config(reward_fn="exact"), tokenizer)._greedy_baseline
    turns = {"workflow": "multi_turn", "workflow_args": {"max_turns": 2, "turn_discount": 0.9}}
    build_workflow(config(reward_fn="exact", **turns), tokenizer)
    with pytest.raises(ConfigError) as error:
        build_workflow(config(reward_fn="exact", actor=remax, **turns), tokenizer)
    assert problems_of(error) == [("actor.adv_estimator", "workflow.missing_parameter")]
    with pytest.raises(ConfigError) as error:
        build_workflow(config(reward_fn="exact", workflow_args={"greedy_baseline": True}), tokenizer)
    assert problems_of(error) == [("workflow_args.greedy_baseline", "workflow.invalid_args")]


def test_own_workflow_gets_what_its_constructor_takes(tokenizer, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from areal.api.workflow import RolloutWorkflow\n"
        "class Own(RolloutWorkflow):\n"
        "    def __init__(self, gconfig, depth=1):\n"
        "        self.gconfig, self.depth = gconfig, depth\n"
        "    async def arun_episode(self, engine, data):\n"
        "        return None\n"
        "class Scores(RolloutWorkflow):\n"
        "    def __init__(self, reward_fn):\n"
        "        pass\n"
        "class Other:\n"
        "    pass\n"
    )
    workflow = build_workflow(config(workflow=f"{file}:Own", workflow_args={"depth": 3}), tokenizer)
    assert isinstance(workflow, RolloutWorkflow)
    assert (workflow.depth, workflow.gconfig.n_samples) == (3, 2)
    weighted = RewardConfig(fns={"exact": 1.0})
    with pytest.raises(ConfigError) as error:
        build_workflow(config(workflow=f"{file}:Scores", reward=weighted), tokenizer)
    assert problems_of(error) == [("reward.fns", "workflow.missing_parameter")]
    with raises_code("workflow.not_a_workflow"):
        build_workflow(config(workflow=f"{file}:Other"), tokenizer)


@pytest.mark.parametrize(
    ("fields", "path", "code"),
    [
        ({"reward_fn": ""}, "reward_fn", "reward.none_given"),
        ({"reward_fn": "exactt"}, "reward_fn", "config.bad_reference"),
        ({"workflow": "rlvrr"}, "workflow", "config.bad_reference"),
        ({"workflow_args": {"enable_thinkin": True}}, "workflow_args.enable_thinkin", "workflow.invalid_args"),
        ({"workflow_args": {"gconfig": 1}}, "workflow_args.gconfig", "workflow.invalid_args"),
        ({"workflow": "multi_turn"}, "workflow_args.max_turns", "workflow.invalid_args"),
    ],
)
def test_wrong_names_are_config_errors(fields, path, code, tokenizer):
    with pytest.raises(ConfigError) as error:
        build_workflow(config(**{"reward_fn": "exact"} | fields), tokenizer)
    assert problems_of(error)[0] == (path, code)


def group(*rewards):
    fields = {"token_ids": [1], "loss_mask": [1], "rollout_logprobs": [0.0], "output_versions": [0], "finished": True}
    return TrajectoryGroup(trajectories=[Trajectory(reward=reward, **fields) for reward in rewards])


def test_mixed_rewards_rejects_groups_with_equal_rewards():
    accept = resolve_accept_fn("mixed_rewards")
    assert accept is mixed_rewards
    assert accept(group(0.0, 1.0))
    assert not accept(group(1.0, 1.0))
    assert not accept(group(0.0))
    assert not accept(replace(group(0.0, 1.0), filter_rewards=[2.0, 2.0]))
    assert accept(replace(group(0.0, 0.0), filter_rewards=[2.0, 3.0]))
    assert resolve_accept_fn("") is None
    with pytest.raises(ConfigError) as error:
        resolve_accept_fn("mixed_reward")
    assert problems_of(error) == [("rollout.should_accept_fn", "config.bad_reference")]
