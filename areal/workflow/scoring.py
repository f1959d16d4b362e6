"""Owns how a workflow scores answers: the functions of a row's source, one pool, and what a failed call means.

Waits for: the reward pool. The pool is started by the first answer, since workflow objects are made in processes
that never score anything (trainer ranks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.api.config import RewardConfig
from areal.api.config.reward import CODE_STARTS_S, CODE_TESTS_S
from areal.api.errors import InputError, RewardError
from areal.api.functions import FunctionRef
from areal.api.workflow import RewardFn
from areal.observe.log import get_logger
from areal.reward.pool import RewardPool, RewardResult
from areal.reward.table import REWARD_FUNCTIONS, RewardTable, WeightedReward, reward_table
from areal.workflow.generate import gather_or_cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the reward functions say about one answer."""

    reward: float
    """The sum of weight x score over the functions of the row's source."""
    filter_reward: float
    """The same sum over those in reward.filter_on; the reward itself when that is empty."""
    num_errors: int
    """Calls that failed and count 0 (reward.on_error=zero)."""
    metrics: Mapping[str, float]
    """By function name its score without weight (not in the short form), by name/key what else it returned."""


class Scorer:
    """Scores answers under one configuration. Shared by a workflow and its evaluations.

    `reward_fn` is the short form, one function of weight 1; empty = what `config` names.
    """

    def __init__(self, reward_fn: RewardFn | str, config: RewardConfig) -> None:
        self._table: RewardTable = reward_table(reward_fn, config)
        self._config = config
        self._pool: RewardPool | None = None
        self._errors_logged: set[tuple[FunctionRef, str]] = set()

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise InputError when no reward function is given for the source of `row`, or `code` has too little time."""
        terms = self._table.of(row)
        if self._config.on_error == "fail" and any(term.function == REWARD_FUNCTIONS["code"] for term in terms):
            tests_s, limit_s = row.get("total_time_limit_s"), self._config.timeout_s
            tests_s = CODE_TESTS_S if tests_s is None else tests_s
            if isinstance(tests_s, int | float) and tests_s + CODE_STARTS_S > limit_s:
                raise InputError(
                    f"the tests of a row may take {tests_s:g} s (total_time_limit_s) and starting them "
                    f"{CODE_STARTS_S:g} s, but reward.timeout_s={limit_s:g} ends the call before, and with "
                    "reward.on_error=fail the episode: raise it, lower that column, or set reward.on_error=zero"
                )

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Raise InputError, with its index, for the first row whose source has no reward function."""
        if self._table.by_source:
            for index, row in enumerate(rows):
                try:
                    self._table.of(row)
                except InputError as error:
                    raise InputError(f"row {index} of a dataset cannot be scored: {error}") from None

    async def score(
        self, prompt: str, prompt_ids: list[int], answers: Sequence[tuple[str, list[int]]], row: dict[str, Any]
    ) -> list[Score]:
        """The scores of `answers` (text, ids), in their order.

        RewardError, naming the function, when a call failed and reward.on_error=fail; InputError when the row's
        source has no reward function.
        """
        if self._pool is None:
            self._pool = RewardPool(self._config)
        pool, fail_fast = self._pool, self._config.on_error == "fail"
        terms = self._table.of(row)

        async def results_of(term: WeightedReward) -> list[RewardResult]:
            results = await pool.score_many(term.function, prompt, prompt_ids, answers, row, fail_fast=fail_fast)
            for result in results:
                if result.status != "ok":
                    self._complain(term.function, result)
            return results

        if len(terms) == 1:  # the usual case pays for no task
            columns = [await results_of(terms[0])]
        else:
            columns = await gather_or_cancel([results_of(term) for term in terms])
        return [self._score(terms, results) for results in zip(*columns, strict=True)]

    def _score(self, terms: Sequence[WeightedReward], results: Sequence[RewardResult]) -> Score:
        """Put the results of all functions on one answer together; those that failed hold 0."""
        reward = filter_reward = 0.0
        num_errors = 0
        metrics: dict[str, float] = {}
        for term, result in zip(terms, results, strict=True):
            part = term.weight * result.value
            reward += part
            filter_reward += part if term.counts_for_filter else 0.0
            num_errors += result.status != "ok"
            if self._table.is_weighted:
                metrics[term.metric] = result.value
            if result.metrics:
                metrics |= {f"{term.metric}/{name}": value for name, value in result.metrics.items()}
        return Score(reward=reward, filter_reward=filter_reward, num_errors=num_errors, metrics=metrics)

    def stats(self, row: Mapping[str, Any], scores: Sequence[Score], *, reward: float) -> dict[str, float]:
        """Means over `scores`, of each metric over those that have it; `reward`, that of the group, by source."""
        found: dict[str, list[float]] = {}
        for score in scores:
            for name, value in score.metrics.items():
                found.setdefault(f"reward/{name}", []).append(value)
        stats = {name: sum(values) / len(values) for name, values in found.items()}
        source = self._table.source(row)
        return stats | {f"reward_by_source/{source}": reward} if source else stats

    def _complain(self, function: FunctionRef, result: RewardResult) -> None:
        text = f"reward function {function} {result.message}"
        if result.status == "unusable":  # no answer of any row could be scored: nothing to count 0
            raise RewardError(f"{text}: mend it")
        if self._config.on_error == "fail":
            raise RewardError(f"{text}: mend it, or set reward.on_error=zero to count such calls 0")
        if (function, result.status) not in self._errors_logged:
            self._errors_logged.add((function, result.status))
            get_logger(__name__).warning("%s; counted 0, and so will others like it", text)

    async def aclose(self) -> None:
        """End the pool's processes."""
        if self._pool is not None:
            await self._pool.aclose()
