"""Owns how a workflow scores answers: one reward function, one pool, and what a reward that failed means.

Waits for: the reward pool. The pool is started by the first answer, since workflow objects are made in processes
that never score anything (trainer ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal.api.config import RewardConfig
from areal.api.errors import RewardError
from areal.api.functions import FunctionRef
from areal.api.workflow import RewardFn
from areal.observe.log import get_logger
from areal.reward.pool import RewardPool
from areal.reward.registry import resolve_reward_fn
from areal.reward.result import RewardResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The rewards of several answers to one prompt."""

    rewards: list[float]
    num_errors: int
    """Answers that got 0.0 because their reward failed."""


class Scorer:
    """Scores answers with one reward function under one configuration. Shared by a workflow and its evaluations."""

    def __init__(self, reward_fn: RewardFn | str, config: RewardConfig) -> None:
        self._function: FunctionRef = resolve_reward_fn(reward_fn)
        self._config = config
        self._pool: RewardPool | None = None
        self._errors_logged: set[str] = set()

    async def score(
        self, prompt: str, prompt_ids: list[int], answers: Sequence[tuple[str, list[int]]], row: dict[str, Any]
    ) -> Scores:
        """The rewards of `answers` (text, ids). RewardError when one failed and reward.on_error=fail."""
        if self._pool is None:
            self._pool = RewardPool(self._config)
        fail_fast = self._config.on_error == "fail"
        results = await self._pool.score_many(self._function, prompt, prompt_ids, answers, row, fail_fast=fail_fast)
        failed = [result for result in results if result.status != "ok"]
        if failed:
            self._complain(failed[0])
        return Scores(rewards=[result.value for result in results], num_errors=len(failed))

    def _complain(self, result: RewardResult) -> None:
        text = f"reward function {self._function} {result.message}"
        if self._config.on_error == "fail":
            raise RewardError(f"{text}: mend it, or set reward.on_error=zero to score such answers 0")
        if result.status not in self._errors_logged:
            self._errors_logged.add(result.status)
            get_logger(__name__).warning("%s; scored 0, and so will others like it", text)

    async def aclose(self) -> None:
        """End the pool's processes."""
        if self._pool is not None:
            await self._pool.aclose()
