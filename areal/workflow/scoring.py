"""Scores the answers of a workflow with the reward functions of the row's source.

The reward pool starts at the first answer, because trainer ranks also create workflows and score nothing.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from areal.api.columns import ROUTED_EXPERTS, ColumnSpec, Packed, RoutedExperts, Runs, to_array, to_runs, total
from areal.api.config import GenerationHyperparameters, RewardConfig
from areal.api.config.rollout import CODE_STARTS_S, CODE_TESTS_S
from areal.api.data import BASELINE, TEMPERATURES, GenerationRequest, GenerationResponse, Trajectory, reward_columns
from areal.api.errors import InputError, RewardError
from areal.api.images import ImageRef
from areal.api.metrics import gather_or_cancel
from areal.api.registry import FunctionRef, registered
from areal.api.workflow import RewardFn, RolloutWorkflow
from areal.data.chat import EncodedPrompt, encode_prompt
from areal.data.chat_template import stop_token_ids
from areal.data.images import PromptImages
from areal.data.row_check import require_prompts
from areal.data.tokenizer import Tokenizer
from areal.observe.log import get_logger
from areal.observe.spans import span
from areal.reward.pool import RewardPool, RewardResult
from areal.reward.sandbox import log_reach
from areal.reward.table import RewardTable, WeightedReward, reward_table

# Functions that the workflows share: sampling settings, requests, statistics.


def request_settings(
    gconfig: GenerationHyperparameters, tokenizer: Tokenizer, *, ends: Iterable[int] = ()
) -> GenerationHyperparameters:
    """The sampling settings of one request: one sample; the eos and pad tokens of the tokenizer, the ends of its chat
    template and `ends` also end an answer."""
    end_ids = [token for token in (tokenizer.eos_token_id, tokenizer.pad_token_id) if token is not None]
    end_ids += sorted(stop_token_ids(tokenizer))
    return replace(gconfig, n_samples=1, stop_token_ids=list(dict.fromkeys([*gconfig.stop_token_ids, *end_ids, *ends])))


def settings_for_length(
    settings: GenerationHyperparameters, num_prompt_tokens: int, columns: Sequence[str]
) -> GenerationHyperparameters:
    """Settings whose max_new_tokens fits into `max_tokens`. Raises InputError when the prompt leaves no room."""
    room = settings.max_tokens - num_prompt_tokens
    if room < 1:
        raise InputError(
            f"a prompt has {num_prompt_tokens} tokens, so gconfig.max_tokens={settings.max_tokens} leaves no room for "
            f"an answer (row with columns {sorted(columns)}): increase it, or drop long rows with "
            "train_dataset.max_length",
            code="workflow.prompt_too_long",
        )
    if room >= settings.max_new_tokens:
        return settings
    return replace(settings, max_new_tokens=room, min_new_tokens=min(settings.min_new_tokens, room))


def settings_of_row(settings: GenerationHyperparameters, row: Mapping[str, Any]) -> GenerationHyperparameters:
    """Settings with the temperature of the row, if it has one (gconfig.temperature_key). InputError for a bad one."""
    key = settings.temperature_key
    value = row.get(key) if key else None
    if value is None or settings.greedy:
        return settings
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-6 <= value <= 1e6:
        message = f"gconfig.temperature_key: a row's {key} is {value!r}, which is no number from 1e-6 to 1e6"
        raise InputError(message, code="data.invalid_column")
    return replace(settings, temperature=float(value))


def new_request(
    input_ids: Sequence[int],
    settings: GenerationHyperparameters,
    *,
    group_id: str,
    number: int,
    images: Sequence[ImageRef] = (),
) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{group_id}-{number:06d}", input_ids=input_ids, gconfig=settings, group_id=group_id, images=images
    )


def single_turn_rows(
    prompt_ids: Sequence[int],
    responses: Sequence[GenerationResponse],
    rewards: Sequence[float],
    *,
    reward_parts: Sequence[dict[str, float]] | None = None,
    baseline: float | None = None,
    images: Sequence[ImageRef] = (),
) -> list[Trajectory]:
    """The training samples of answers to one prompt, one for each reward. Further responses are left out.

    `Conversation.to_trajectory` makes the same rows, and takes several times as long for short answers.
    """
    prompt, size = to_array("i", prompt_ids), len(prompt_ids)
    no_logprobs = array("f", bytes(4 * size))
    shared: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Runs[int], Runs[int]]] = {}
    """Masks and versions by the versions of an answer. Rows of one group share them."""
    rows: list[Trajectory] = []
    for number, (response, reward) in enumerate(zip(responses, rewards, strict=False)):
        versions, count = to_runs(response.output_versions), len(response.output_ids)
        key = versions.values, versions.ends
        if key not in shared:
            shared[key] = Runs(((0, size), (1, count))), Runs(((-1, size), *versions.runs))
        columns: dict[ColumnSpec, Any] = {} if reward_parts is None else {**reward_columns(reward_parts[number])}
        if baseline is not None:
            columns[BASELINE] = baseline
        if response.temperature is not None:
            columns[TEMPERATURES] = Runs(((math.nan, size), (response.temperature, count)))
        if response.routed_experts is not None:
            columns[ROUTED_EXPERTS] = _with_last(response.routed_experts).array
        rows.append(
            Trajectory(
                token_ids=Packed(prompt + to_array("i", response.output_ids)),
                loss_mask=shared[key][0],
                rollout_logprobs=Packed(no_logprobs + to_array("f", response.output_logprobs)),
                output_versions=shared[key][1],
                reward=reward,
                finished=response.stop_reason == "stop",
                images=images,
                columns=columns,
            )
        )
    return rows


def _with_last(experts: RoutedExperts) -> RoutedExperts:
    """The experts of an answer, and unknown ones for its last token, which was never an input."""
    return RoutedExperts.joined([experts, RoutedExperts.unknown(experts.shape, 1)])


def group_stats(trajectories: Sequence[Trajectory], *, num_errors: int) -> dict[str, float]:
    size = len(trajectories)
    return {
        "reward": sum(t.reward for t in trajectories) / size,
        "reward_errors": float(num_errors),
        "output_tokens": sum(total(t.loss_mask) for t in trajectories) / size,
        "finished": sum(t.finished for t in trajectories) / size,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    reward: float  # The sum of weight x score over the functions of the row's source.
    filter_reward: float  # The same sum over the functions in reward.filter_on; the reward when that is empty.
    num_errors: int  # Failed calls, which count 0 (reward.on_error=zero).
    parts: dict[str, float]
    """The score of each function without weight (not in the short form), and its further results as name/key."""
    metrics: Mapping[str, float]  # The same, also of a scaled score.

    def scaled(self, factor: float) -> Score:
        """The score with rewards and parts times `factor`, for example a discount over turns. The metrics stay."""
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
        self._code = registered("rewards", "code").target
        self._runs_programs = any(
            term.function == registered("rewards", "code").target for terms in tables for term in terms
        )
        self._is_sandbox_checked = False

    def check_row(self, row: Mapping[str, Any]) -> None:
        """InputError when `row` has no reward function, or reward.timeout_s is too short for its tests."""
        terms = self._table.of(row)
        if self._config.on_error == "fail" and any(
            term.function == registered("rewards", "code").target for term in terms
        ):
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
        values_by_name: dict[str, list[float]] = {}
        for score in scores:
            for name, value in score.metrics.items():
                values_by_name.setdefault(f"reward/{name}", []).append(value)
        stats = {name: sum(values) / len(values) for name, values in values_by_name.items()}
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

    def waits_for(self) -> str:
        """The calls that wait in the pool, when they bound a run."""
        return "" if self._pool is None else self._pool.waits_for()

    async def aclose(self) -> None:
        if self._pool is not None:
            await self._pool.aclose()


# The base of the built-in workflows: a prompt from the row, sampling settings, and one shared scorer.


class ScoredWorkflow(RolloutWorkflow):
    """A workflow that scores its answers with reward functions.

    `reward_fn` is a top-level function, a registered name, module:function or file.py:function; empty = the functions
    in `reward`.
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        *,
        reward: RewardConfig | None = None,
        enable_thinking: bool = False,
        images: PromptImages | None = None,
    ) -> None:
        """`images`: of a policy that takes them."""
        self._scorer = Scorer(reward_fn, reward or RewardConfig())
        self._owns_scorer = True
        self._num_samples = gconfig.n_samples
        self._settings = request_settings(gconfig, tokenizer)
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking
        self.images = images

    def prompt(self, row: dict[str, Any]) -> EncodedPrompt:
        """The first tokens of the answers to `row`."""
        return encode_prompt(row, self.tokenizer, enable_thinking=self.enable_thinking, images=self.images)

    def check_row(self, row: dict[str, Any]) -> None:
        """InputError when `row` has no prompt, no room for an answer, or no reward function."""
        self._scorer.check_row(row)
        settings_for_length(settings_of_row(self._settings, row), len(self.prompt(row).token_ids), list(row))

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """InputError when the first row cannot be run, or any row has no usable prompt or no reward function."""
        require_prompts(rows)
        self._scorer.check_rows(rows)
        super().check_rows(rows)

    def for_evaluation(self, gconfig: GenerationHyperparameters) -> Self:
        """The same workflow with other sampling settings and one sample per prompt. It shares the scorer."""
        clone = copy.copy(self)
        clone._owns_scorer = False
        clone._num_samples = 1
        clone._settings = request_settings(gconfig, self.tokenizer)
        return clone

    def waits_for(self) -> str:
        """The reward calls that bound its episodes."""
        return self._scorer.waits_for()

    async def aclose(self) -> None:
        """Stop the reward pool, unless this workflow was made by `for_evaluation`."""
        if self._owns_scorer:
            await self._scorer.aclose()
