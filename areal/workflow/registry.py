"""The construction of a workflow from a configuration."""

import inspect
from collections.abc import Sequence
from typing import Any

from areal.api.config import PPOConfig
from areal.api.config.validate import raise_problems
from areal.api.data import TrajectoryGroup
from areal.api.errors import ConfigError
from areal.api.registry import ACCEPT_CALL, load_function, resolve_function
from areal.api.workflow import (
    CONSTRUCTOR_ARGUMENTS,
    AcceptFn,
    RolloutWorkflow,
    constructor_parameters,
    constructor_problems,
    missing_argument,
)
from areal.data.images import PromptImages
from areal.data.tokenizer import Tokenizer

# ----------------------------------------------------------------------------------------------------------------------
# Filters that decide after scoring whether a group is trained on.


def mixed_rewards(group: TrajectoryGroup) -> bool:
    """False when all answers have the same score: the advantages within such a group are zero.

    The scores are the rewards, or their part from the functions in reward.filter_on.
    """
    return min(group.filter_rewards) < max(group.filter_rewards)


def resolve_accept_fn(name: str) -> AcceptFn | None:
    """The filter of rollout.should_accept_fn, a registered name or the path of a function; None when empty."""
    if not name:
        return None
    return load_function(resolve_function(name, "filters", key="rollout.should_accept_fn"), ACCEPT_CALL)


def check_adapters(config: PPOConfig, workflow: RolloutWorkflow, rows: Sequence[dict[str, Any]]) -> None:
    """ConfigError when episodes on these rows ask for older policies, and the servers get whole weights.

    `config`: after `areal.launcher.job.with_adapters`.
    """
    if not config.publishes_adapters and workflow.needs_adapters(rows):
        text = f"workflow={config.workflow}: an older policy is held as an adapter, and the servers get whole weights"
        raise ConfigError(f"{text}: {config.how_to_publish_adapters}", code="config.missing_requirement")


def build_workflow(config: PPOConfig, tokenizer: Tokenizer) -> RolloutWorkflow:
    """The workflow of a configuration. Its constructor receives `workflow_args` and those of `CONSTRUCTOR_ARGUMENTS`
    that it has a parameter for. Raises ConfigError."""
    made = load_function(resolve_function(config.workflow, "workflows", key="workflow"))
    parameters = constructor_parameters(made)
    raise_problems(list(constructor_problems(config, parameters)))
    names_none = not config.reward_fn and not config.reward.names_functions
    offered: dict[str, Any] = {
        "reward_fn": "none" if names_none and config.reward_model is not None else config.reward_fn,
        "gconfig": config.gconfig,
        "tokenizer": tokenizer,
        "reward": config.reward,
        "greedy_baseline": config.actor.base_recipe.baseline == "greedy",
        "agent_config": config.agent,
        "images": PromptImages.of(config, tokenizer) if "images" in parameters else None,
    }
    assert set(offered) <= set(CONSTRUCTOR_ARGUMENTS)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    arguments = {name: value for name, value in offered.items() if takes_all or name in parameters}
    has_default = "reward_fn" in parameters and parameters["reward_fn"].default is not inspect.Parameter.empty
    if has_default and not offered["reward_fn"] and not config.reward.names_functions:
        del arguments["reward_fn"]
    try:
        workflow = made(**arguments, **config.workflow_args)
    except TypeError as error:  # a base class may require what the constructor does not name
        absent = [name for name in parameters if name not in {**arguments, **config.workflow_args}]
        raise_problems([missing_argument(config, name) for name in absent if f"'{name}'" in str(error)])
        raise
    if not isinstance(workflow, RolloutWorkflow):
        message = f"workflow={config.workflow} is a {type(workflow).__name__}, not a RolloutWorkflow"
        raise ConfigError(message, code="workflow.not_a_workflow")
    return workflow
