"""Owns what users write: a workflow that makes one episode, and a reward function that scores one answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal.api.data import TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import ConfigError

RewardFn = Callable[..., float | Mapping[str, Any]]
"""`f(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row) -> float`.

A plain function at module level; the columns of the dataset row arrive as keywords. It may return a mapping instead
(verl's form): `score` is the reward, other numbers become metrics, what is no number is left out.
"""

AcceptFn = Callable[[TrajectoryGroup], bool]
"""Decides after scoring whether a group is trained on; False rejects the episode and gives its room back."""


class RolloutWorkflow(ABC):
    """Turns one dataset row into a scored group of trajectories. One instance runs many episodes at once."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup | None:
        """Run one episode on row `data`. None rejects it; an exception fails it, and only it."""

    def check_row(self, row: dict[str, Any]) -> None:  # noqa: B027 - a workflow may have nothing to check
        """Raise InputError when no episode can be run on `row`. Called by `check_rows` on the first one."""

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Raise InputError when episodes cannot be run on a dataset. Called before anything starts."""
        for row in rows[:1]:
            self.check_row(row)

    async def aclose(self) -> None:  # noqa: B027 - most workflows own nothing
        """Release what the workflow owns (worker pools, sandboxes). Called once, by the controller."""

    def for_evaluation(self, gconfig: Any) -> RolloutWorkflow:
        """The same workflow with other sampling settings (`GenerationHyperparameters`), one sample a prompt."""
        raise ConfigError(
            f"{type(self).__name__} does not support evaluation: define its for_evaluation(gconfig), give "
            "PPOTrainer.train an eval_workflow that does, or remove valid_dataset"
        )
