"""Interfaces that users implement: workflows, reward functions and filters of groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal.api.data import TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import ConfigError

RewardFn = Callable[..., float | Mapping[str, Any]]
"""`f(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row) -> float`.

A module-level function; the columns of the dataset row are keyword arguments. It can return a mapping instead (verl's
form): `score` is the reward, other numbers become metrics, other values are ignored.
"""

AcceptFn = Callable[[TrajectoryGroup], bool]
"""Called after scoring: whether a group is trained on. False rejects the episode and releases its capacity."""


class RolloutWorkflow(ABC):
    """Generates and scores a group of trajectories for one dataset row. One instance runs many episodes at once."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup | None:
        """Run one episode on row `data`. None rejects the episode; an exception fails only this episode."""

    def check_row(self, row: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Raise InputError if no episode can run on `row`. `check_rows` calls it with the first row."""

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Raise InputError if episodes cannot run on a dataset. Called before any process starts."""
        for row in rows[:1]:
            self.check_row(row)

    async def aclose(self) -> None:  # noqa: B027 - optional
        """Release the resources of the workflow (worker pools, sandboxes). The controller calls it once."""

    def for_evaluation(self, gconfig: Any) -> RolloutWorkflow:
        """The same workflow with other sampling settings (`GenerationHyperparameters`), one answer per prompt."""
        problem = f"{type(self).__name__} does not support evaluation: define for_evaluation(gconfig)"
        message = f"{problem}, pass an eval_workflow to PPOTrainer.train, or remove valid_dataset"
        raise ConfigError(message, code="workflow.no_evaluation")
