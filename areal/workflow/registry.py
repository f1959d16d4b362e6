"""Owns the names of workflows, and how a configuration becomes a workflow object."""

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
    """The workflow a configuration names. It gets reward_fn, gconfig, tokenizer, reward and greedy_baseline if its
    constructor takes them, and `workflow_args`."""
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
            f"reward.fns and reward.by_source name functions, but workflow={config.workflow} takes no argument "
            "`reward`, so nothing would run them: let it take one and give it to areal.workflow.scoring.Scorer, or "
            "remove them"
        )
    if given["greedy_baseline"] and not takes_all and "greedy_baseline" not in parameters:
        raise ConfigError(
            f"actor.adv_estimator=remax compares answers with a greedy one, and workflow={config.workflow} draws none: "
            "use workflow=rlvr, or let its constructor take greedy_baseline and set Trajectory.baseline"
        )
    names_none = not config.reward_fn and not config.reward.names_functions
    if names_none and config.reward_model is not None:
        given["reward_fn"] = "none"  # the reward model scores, in the trainer
    elif "reward_fn" in parameters and names_none:
        raise ConfigError(
            f"reward_fn is empty, and workflow={config.workflow} scores answers: name one, e.g. gsm8k, or several with "
            "weights in reward.fns"
        )
    for name in config.workflow_args:
        if name in given or (name not in parameters and not takes_all):
            allowed = [p for p in parameters if p not in given]
            near = get_close_matches(name, allowed, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"workflow_args.{name}: {config.workflow} takes no such argument from here; {hint}it takes "
                f"{', '.join(allowed) or 'none'}"
            )
    for name, parameter in parameters.items():
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not variadic and name not in {*given, *config.workflow_args}:
            raise ConfigError(f"workflow={config.workflow} needs workflow_args.{name}: give it")
    arguments = {name: value for name, value in given.items() if takes_all or name in parameters}
    workflow = made(**arguments, **config.workflow_args)
    if not isinstance(workflow, RolloutWorkflow):
        raise ConfigError(f"workflow={config.workflow} makes a {type(workflow).__name__}, not a RolloutWorkflow")
    return workflow
