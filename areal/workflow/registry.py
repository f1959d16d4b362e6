"""The registered workflows, and the construction of a workflow from a configuration."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from typing import Any

from areal.api.config import PPOConfig
from areal.api.errors import ConfigError
from areal.api.functions import WORKFLOWS, load_function, resolve_function
from areal.api.workflow import RolloutWorkflow
from areal.data.tokenizer import Tokenizer


def build_workflow(config: PPOConfig, tokenizer: Tokenizer) -> RolloutWorkflow:
    """The workflow of a configuration. Its constructor receives `workflow_args`, and those of reward_fn, gconfig,
    tokenizer, reward and greedy_baseline that it has a parameter for. Raises ConfigError."""
    made = load_function(resolve_function(config.workflow, WORKFLOWS, key="workflow"))
    parameters = inspect.signature(made).parameters
    given: dict[str, Any] = {
        "reward_fn": config.reward_fn,
        "gconfig": config.gconfig,
        "tokenizer": tokenizer,
        "reward": config.reward,
        "greedy_baseline": config.actor.adv_estimator == "remax",
    }
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if config.reward.names_functions and not takes_all and "reward" not in parameters:
        raise ConfigError(
            f"reward.fns and reward.by_source have no effect, because workflow={config.workflow} has no parameter "
            "`reward`: add it and pass it to areal.workflow.scoring.Scorer, or remove these options",
            code="workflow.missing_parameter",
        )
    if given["greedy_baseline"] and not takes_all and "greedy_baseline" not in parameters:
        raise ConfigError(
            f"actor.adv_estimator=remax needs a greedy answer, which workflow={config.workflow} does not generate: use "
            "workflow=rlvr, or add a parameter greedy_baseline to its constructor and set Trajectory.baseline",
            code="workflow.missing_parameter",
        )
    names_none = not config.reward_fn and not config.reward.names_functions
    if names_none and config.reward_model is not None:
        given["reward_fn"] = "none"  # the reward model scores the answers, in the trainer
    elif "reward_fn" in parameters and names_none:
        raise ConfigError(
            f"reward_fn is empty, but workflow={config.workflow} needs one: set it, e.g. to gsm8k, or set several "
            "functions with weights in reward.fns",
            code="reward.none_given",
        )
    for name in config.workflow_args:
        if name in given or (name not in parameters and not takes_all):
            allowed = [p for p in parameters if p not in given]
            near = get_close_matches(name, allowed, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"workflow_args.{name}: {config.workflow} has no such parameter; {hint}allowed: "
                f"{', '.join(allowed) or 'none'}",
                code="workflow.invalid_args",
            )
    for name, parameter in parameters.items():
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not variadic and name not in {*given, *config.workflow_args}:
            message = f"workflow={config.workflow} needs workflow_args.{name}: set it"
            raise ConfigError(message, code="workflow.invalid_args")
    arguments = {name: value for name, value in given.items() if takes_all or name in parameters}
    workflow = made(**arguments, **config.workflow_args)
    if not isinstance(workflow, RolloutWorkflow):
        message = f"workflow={config.workflow} is a {type(workflow).__name__}, not a RolloutWorkflow"
        raise ConfigError(message, code="workflow.not_a_workflow")
    return workflow
