"""Interfaces that users implement: workflows, reward functions and filters of groups."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any

from areal.api.config import PPOConfig
from areal.api.data import TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import ConfigError, ConfigProblem

RewardFn = Callable[..., float | Mapping[str, Any]]
"""`f(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row) -> float`.

A module-level function; the columns of the dataset row are keyword arguments. It can return a mapping instead (verl's
form): `score` is the reward, other numbers become metrics, other values are ignored.
"""

AcceptFn = Callable[[TrajectoryGroup], bool]
"""Called after scoring: whether a group is trained on. False rejects the episode and releases its capacity."""


EPISODE_ID: ContextVar[int | None] = ContextVar("EPISODE_ID", default=None)
"""The number of the running episode in the ledger; an episode that runs again has the same. None in evaluations."""


class RolloutWorkflow(ABC):
    """Generates and scores a group of trajectories for one dataset row. One instance runs many episodes at once."""

    has_time_limit = False
    """Its episodes end after a time limit of their own, so rollout.episode_timeout_s does not apply."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup | None:
        """Run one episode on row `data`. None rejects the episode; an exception fails only this episode."""

    def check_row(self, row: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Raise InputError if no episode can run on `row`. `check_rows` calls it with the first row."""

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Raise InputError if episodes cannot run on a dataset. Called before any process starts."""
        for row in rows[:1]:
            self.check_row(row)

    def needs_adapters(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Whether episodes on a dataset ask for older policies, which servers hold only if they get adapters alone."""
        return False

    def notice(self) -> str:
        """A line that is printed before a run starts; empty: none."""
        return ""

    def waits_for(self) -> str:
        """What its episodes wait for besides servers, as part of a sentence; empty: nothing that bounds them."""
        return ""

    async def aclose(self) -> None:  # noqa: B027 - optional
        """Release the resources of the workflow (worker pools, sandboxes). The controller calls it once."""

    def for_evaluation(self, gconfig: Any) -> RolloutWorkflow:
        """The same workflow with other sampling settings (`GenerationHyperparameters`), one answer per prompt."""
        problem = f"{type(self).__name__} does not support evaluation: define for_evaluation(gconfig)"
        message = f"{problem}, pass an eval_workflow to PPOTrainer.train, or remove valid_dataset"
        raise ConfigError(message, code="workflow.no_evaluation")


CONSTRUCTOR_ARGUMENTS = ("reward_fn", "gconfig", "tokenizer", "reward", "greedy_baseline", "agent_config", "images")
"""What the constructor of a workflow receives, if it has a parameter of this name, in addition to `workflow_args`."""


def constructor_parameters(made: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function or constructor by name, with those of the base classes that its `**kw` reaches.

    The latter count as optional, because the constructor may fill them in. `**kw` itself is left if no base ends it.
    """
    kinds, rest = inspect.Parameter, list[inspect.Parameter]()
    bases = made.__mro__[:-1] if isinstance(made, type) else ()
    constructors = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)]
    if not constructors:
        return dict(inspect.signature(made).parameters)
    by_name: dict[str, inspect.Parameter] = {}
    for place, constructor in enumerate(constructors):
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
                by_name.setdefault(parameter.name, parameter.replace(default=...) if place else parameter)
        if not (rest := [parameter for parameter in parameters if parameter.kind is kinds.VAR_KEYWORD]):
            return by_name
    return by_name | {parameter.name: parameter for parameter in rest}


def missing_argument(config: PPOConfig, name: str) -> ConfigProblem:
    """The problem that the constructor of the workflow requires an argument that the configuration does not give."""
    if name == "reward_fn":
        text = f"is empty, but workflow={config.workflow} needs one: set it, e.g. to gsm8k, or set reward.fns"
        return ConfigProblem(name, text, "reward.none_given")
    text = f"is required: {config.workflow} has a parameter of this name without a default"
    return ConfigProblem(f"workflow_args.{name}", text, "workflow.invalid_args")


def constructor_problems(config: PPOConfig, parameters: Mapping[str, inspect.Parameter]) -> Iterator[ConfigProblem]:
    """What a configuration requires of its workflow and the constructor with these parameters cannot do."""
    kinds, name = inspect.Parameter, f"workflow={config.workflow}"
    takes_all = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    names_functions = config.reward.names_functions
    if names_functions and not takes_all and "reward" not in parameters:
        text = f"has no effect, because {name} has no parameter `reward`: add it and pass it to a Scorer"
        yield ConfigProblem("reward.fns", text, "workflow.missing_parameter")
    if config.actor.base_recipe.baseline == "greedy" and not takes_all and "greedy_baseline" not in parameters:
        text = f"remax needs a greedy answer, which {name} does not generate: use workflow=rlvr"
        yield ConfigProblem("actor.adv_estimator", text, "workflow.missing_parameter")
    needs_function = "reward_fn" in parameters and parameters["reward_fn"].default is kinds.empty
    if needs_function and not config.reward_fn and not names_functions and config.reward_model is None:
        yield missing_argument(config, "reward_fn")
    allowed = [parameter for parameter in parameters if parameter not in CONSTRUCTOR_ARGUMENTS]
    for argument in config.workflow_args:
        if argument in CONSTRUCTOR_ARGUMENTS or (argument not in parameters and not takes_all):
            near = get_close_matches(argument, allowed, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            text = f"{config.workflow} has no such parameter; {hint}allowed: {', '.join(allowed) or 'none'}"
            yield ConfigProblem(f"workflow_args.{argument}", text, "workflow.invalid_args")
    for argument in allowed:
        parameter = parameters[argument]
        variadic = parameter.kind in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
        if parameter.default is kinds.empty and not variadic and argument not in config.workflow_args:
            yield missing_argument(config, argument)
