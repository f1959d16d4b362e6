"""Scores the answers of a workflow with the reward functions of the row's source.

The reward pool starts at the first answer, because trainer ranks also create workflows and score nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal.api.config import RewardConfig
from areal.api.config.reward import CODE_STARTS_S, CODE_TESTS_S
from areal.api.errors import InputError, RewardError
from areal.api.functions import FunctionRef
from areal.api.gather import gather_or_cancel
from areal.api.workflow import RewardFn
from areal.observe.log import get_logger
from areal.observe.spans import span
from areal.reward.pool import RewardPool, RewardResult
from areal.reward.sandbox_backends import log_reach
from areal.reward.table import REWARD_FUNCTIONS, RewardTable, WeightedReward, reward_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of the reward functions for one answer."""

    reward: float
    """The sum of weight x score over the functions of the row's source."""
    filter_reward: float
    """The same sum over the functions in reward.filter_on; the reward when that is empty."""
    num_errors: int
    """Failed calls, which count 0 (reward.on_error=zero)."""
    parts: dict[str, float]
    """The score of each function without weight (not in the short form), and its further results as name/key."""
    metrics: Mapping[str, float]
    """The same, also of a scaled score."""

    def scaled(self, factor: float) -> Score:
        """With rewards and parts times `factor`, for example a discount over turns. The metrics stay."""
        parts = {name: part * factor for name, part in self.parts.items()}
        return replace(self, reward=self.reward * factor, filter_reward=self.filter_reward * factor, parts=parts)


class Scorer:
    """Scores answers under one configuration. Shared by a workflow and its evaluations.

    `reward_fn` is the short form: one function of weight 1. Empty: the functions in `config`.
    """

    def __init__(self, reward_fn: RewardFn | str, config: RewardConfig) -> None:
        self._table: RewardTable = reward_table(reward_fn, config)
        self._config = config
        self._pool: RewardPool | None = None
        self._errors_logged: set[tuple[FunctionRef, str]] = set()
        tables = (self._table.default, *self._table.by_source.values())
        self._runs_programs = any(term.function == REWARD_FUNCTIONS["code"] for terms in tables for term in terms)
        self._is_sandbox_checked = False

    def check_row(self, row: Mapping[str, Any]) -> None:
        """InputError when `row` has no reward function, or reward.timeout_s is too short for its tests."""
        terms = self._table.of(row)
        if self._config.on_error == "fail" and any(term.function == REWARD_FUNCTIONS["code"] for term in terms):
            tests_s, limit_s = row.get("total_time_limit_s"), self._config.timeout_s
            tests_s = CODE_TESTS_S if tests_s is None else tests_s
            if isinstance(tests_s, int | float) and tests_s + CODE_STARTS_S > limit_s:
                raise InputError(
                    f"reward.timeout_s={limit_s:g} is shorter than the tests of a row ({tests_s:g} s, column "
                    f"total_time_limit_s) and their start ({CODE_STARTS_S:g} s), so the episode fails with "
                    "reward.on_error=fail: increase reward.timeout_s, lower that column, or set reward.on_error=zero",
                    code="workflow.reward_timeout",
                )

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """InputError with the index of the first row whose source has no reward function.

        Also checks and describes the sandbox, if the reward runs programs: ConfigError or RewardError.
        """
        if self._runs_programs and not self._is_sandbox_checked:
            log_reach(self._config.sandbox)
            self._is_sandbox_checked = True
        if self._table.by_source:
            for index, row in enumerate(rows):
                try:
                    self._table.of(row)
                except InputError as error:
                    message = f"row {index} of a dataset cannot be scored: {error}"
                    raise InputError(message, code=error.code) from None

    async def score(
        self, prompt: str, prompt_ids: Sequence[int], answers: Sequence[tuple[str, Sequence[int]]], row: dict[str, Any]
    ) -> list[Score]:
        """The scores of `answers` (text, token ids), in order.

        Raises RewardError when a call failed and reward.on_error=fail, and InputError when the source of the row has
        no reward function.
        """
        if self._pool is None:
            self._pool = RewardPool(self._config, is_sandbox_checked=self._is_sandbox_checked)
        pool, fail_fast = self._pool, self._config.on_error == "fail"
        terms = self._table.of(row)

        async def results_of(term: WeightedReward) -> list[RewardResult]:
            results = await pool.score_many(term.function, prompt, prompt_ids, answers, row, fail_fast=fail_fast)
            for result in results:
                if result.status != "ok":
                    self._handle_failure(term.function, result)
            return results

        with span("reward"):
            columns = await gather_or_cancel([results_of(term) for term in terms])
        return [self._score(terms, results) for results in zip(*columns, strict=True)]

    def _score(self, terms: Sequence[WeightedReward], results: Sequence[RewardResult]) -> Score:
        """Combine the results of all functions for one answer; failed ones have the value 0."""
        reward = filter_reward = 0.0
        num_errors = 0
        parts: dict[str, float] = {}
        for term, result in zip(terms, results, strict=True):
            part = term.weight * result.value
            reward += part
            filter_reward += part if term.counts_for_filter else 0.0
            num_errors += result.status != "ok"
            if self._table.is_weighted:
                parts[term.metric] = result.value
            parts |= {f"{term.metric}/{name}": value for name, value in (result.metrics or {}).items()}
        return Score(reward=reward, filter_reward=filter_reward, num_errors=num_errors, parts=parts, metrics=parts)

    def stats(self, row: Mapping[str, Any], scores: Sequence[Score], *, reward: float) -> dict[str, float]:
        """Mean of each metric over the scores that have it, and the `reward` of the group under its source."""
        found: dict[str, list[float]] = {}
        for score in scores:
            for name, value in score.metrics.items():
                found.setdefault(f"reward/{name}", []).append(value)
        stats = {name: sum(values) / len(values) for name, values in found.items()}
        source = self._table.source(row)
        return stats | {f"reward_by_source/{source}": reward} if source else stats

    def _handle_failure(self, function: FunctionRef, result: RewardResult) -> None:
        text = f"reward function {function} {result.message}"
        if result.status == "unusable":  # the function fails for every answer
            raise RewardError(f"{text}: fix this function", code="workflow.reward_failed")
        if self._config.on_error == "fail":
            message = f"{text}: fix this function, or set reward.on_error=zero to count failed calls as 0"
            raise RewardError(message, code="workflow.reward_failed")
        if (function, result.status) not in self._errors_logged:
            self._errors_logged.add((function, result.status))
            get_logger(__name__).warning("%s; this call and later failures like it count as 0", text)

    async def aclose(self) -> None:
        """Stop the processes of the reward pool."""
        if self._pool is not None:
            await self._pool.aclose()
