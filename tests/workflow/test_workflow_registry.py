from dataclasses import replace

import pytest

from areal.api.config import GenerationHyperparameters, PPOActorConfig, PPOConfig, RewardConfig
from areal.api.data import TrajectoryGroup
from areal.api.errors import ConfigError
from areal.api.registry import load_function, parse_function_path
from areal.api.workflow import CONSTRUCTOR_ARGUMENTS, RolloutWorkflow, constructor_parameters
from areal.ledger.payload import TokenLimits
from areal.rollout.executor import Rejected, verdict_on
from areal.workflow.registry import build_workflow, mixed_rewards, resolve_accept_fn
from areal.workflow.rlvr import MultiTurnWorkflow, RLVRWorkflow
from tests.expect import raises_code
from tests.test_docs import ROOT, blocks, write_files
from tests.workflow.conftest import ScriptedEngine


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


VARIADIC = """
from areal import ConversationWorkflow, RLVRWorkflow, RolloutWorkflow
from areal.workflow.rlvr import MultiTurnWorkflow

class Passes(RLVRWorkflow):
    def __init__(self, *args, patience=1, **kw):
        super().__init__(*args, **kw)
        self.patience = patience

class Again(Passes):
    def __init__(self, *args, **kw):
        super().__init__(*args, patience=7, **kw)

class OwnReward(RLVRWorkflow):
    def __init__(self, *args, **kw):
        super().__init__("exact", *args, **kw)

class Turns(MultiTurnWorkflow):
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)

class Talks(ConversationWorkflow):
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)

    async def converse(self, episode, conversation):
        return 0.0

class Takes(RolloutWorkflow):
    def __init__(self, **kw):
        self.given = set(kw)

    async def arun_episode(self, engine, data): ...
"""


def test_a_constructor_with_variable_arguments_gets_what_its_base_takes(tokenizer, tmp_path):
    file = tmp_path / "variadic.py"
    file.write_text(VARIADIC)

    def built(name, reward_fn="exact", **arguments):
        return build_workflow(
            config(workflow=f"{file}:{name}", reward_fn=reward_fn, workflow_args=arguments), tokenizer
        )

    def refused(name, **fields):
        with pytest.raises(ConfigError) as error:
            built(name, **fields)
        return problems_of(error)

    assert (built("Passes").patience, built("Passes", patience=3).patience, built("Again").patience) == (1, 3, 7)
    assert built("Passes", enable_thinking=True).enable_thinking
    assert isinstance(built("OwnReward", reward_fn=""), RLVRWorkflow)
    assert built("Talks").tokenizer is tokenizer
    assert built("Takes", depth=1).given == {*CONSTRUCTOR_ARGUMENTS, "depth"}
    assert refused("Passes", patiense=3) == [("workflow_args.patiense", "workflow.invalid_args")]
    assert refused("Passes", reward_fn="") == [("reward_fn", "reward.none_given")]
    assert refused("Turns", turn_discount=0.9) == [("workflow_args.max_turns", "workflow.invalid_args")]


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


def test_mixed_rewards_rejects_groups_with_equal_rewards():
    accept = resolve_accept_fn("mixed_rewards")
    assert accept is mixed_rewards
    for rewards, is_accepted in (([0.0, 1.0], True), ([1.0, 1.0], False), ([0.0], False)):
        assert accept(TrajectoryGroup(trajectories=[], filter_rewards=rewards)) is is_accepted
    assert resolve_accept_fn("") is None
    with pytest.raises(ConfigError) as error:
        resolve_accept_fn("mixed_reward")
    assert problems_of(error) == [("rollout.should_accept_fn", "config.bad_reference")]


async def test_the_direct_workflow_and_the_constructor_of_the_page_work(tokenizer, tmp_path):
    write_files("docs/workflows.md", tmp_path)
    (patient,) = [text for text in blocks(ROOT / "docs/workflows.md", "python") if "class Patient" in text]
    (tmp_path / "patient.py").write_text("from areal import ConversationWorkflow\n" + patient)
    path = f"{tmp_path}/patient.py:Patient"
    loaded = load_function(parse_function_path(path, key="workflow"))
    arguments = constructor_parameters(loaded)
    assert {"patience", "reward_fn", "gconfig", "tokenizer"} <= arguments.keys()
    direct = build_workflow(config(workflow=f"{tmp_path}/my/direct.py:Shortest"), tokenizer)
    engine = ScriptedEngine(["12345<e>", "1<e>"])
    accept = resolve_accept_fn(f"{tmp_path}/my/direct.py:wide")
    group = await direct.arun_episode(engine, {"prompt": "6*7="})
    limits = TokenLimits(vocab_size=2**16, newest_version=7, strict=True)
    assert not isinstance(verdict_on(0, group, accept=accept, limits=limits), Rejected)
    equal = replace(group, trajectories=[group.trajectories[0]] * 2)
    assert isinstance(verdict_on(0, equal, accept=accept, limits=limits), Rejected)
    assert [trajectory.reward for trajectory in group.trajectories] == [-6.0, -2.0]
    assert direct.for_evaluation(GenerationHyperparameters(n_samples=1)).gconfig.n_samples == 1
