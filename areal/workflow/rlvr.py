"""Owns the workflow of verifiable rewards: one prompt, several answers, each scored by a reward function.

Waits for: the inference engine, then the reward pool.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from areal.api.config import GenerationHyperparameters, RewardConfig
from areal.api.data import TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.workflow import RewardFn, RolloutWorkflow
from areal.data.chat import EncodedPrompt, encode_prompt
from areal.data.tokenizer import Tokenizer
from areal.workflow.generate import (
    answer_text,
    gather_or_cancel,
    generate,
    group_stats,
    new_group_id,
    request_settings,
    settings_for_length,
    single_turn_trajectory,
)
from areal.workflow.scoring import Scorer

InputIdsFn = Callable[[dict[str, Any], Tokenizer, bool], list[int]]
"""`f(row, tokenizer, enable_thinking) -> prompt token ids`."""


class RLVRWorkflow(RolloutWorkflow):
    """Asks for `gconfig.n_samples` answers to a row's prompt and scores each.

    The prompt is the row's `messages` through the chat template, or its `prompt` as plain text; `get_input_ids_fn`
    replaces that. `reward_fn` is a function defined at the top level of a file, a registered name, module:function
    or file.py:function; empty = the functions that `reward` names. `greedy_baseline` (ReMax, actor.adv_estimator=remax)
    draws one greedy answer more, whose reward the sampled ones are compared with; it is not trained on.
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        *,
        reward: RewardConfig | None = None,
        enable_thinking: bool = False,
        get_input_ids_fn: InputIdsFn | None = None,
        greedy_baseline: bool = False,
    ) -> None:
        self._scorer = Scorer(reward_fn, reward or RewardConfig())
        self._owns_scorer = True
        self._num_samples = gconfig.n_samples
        self._settings = request_settings(gconfig, tokenizer)
        self._tokenizer = tokenizer
        self._enable_thinking = enable_thinking
        self._get_input_ids_fn = get_input_ids_fn
        self._greedy_baseline = greedy_baseline

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        """One group of answers to row `data`."""
        prompt = self._prompt(data)
        prompt_ids = prompt.token_ids
        settings = settings_for_length(self._settings, len(prompt_ids), list(data))
        group_id = new_group_id()
        each = [settings] * self._num_samples
        if self._greedy_baseline:
            each.append(dataclasses.replace(settings, greedy=True))
        responses = await gather_or_cancel(
            [
                generate(engine, prompt_ids, settings, group_id=group_id, number=number)
                for number, settings in enumerate(each)
            ]
        )
        answers = [(answer_text(response, self._tokenizer), response.output_ids) for response in responses]
        scores = await self._scorer.score(prompt.text, prompt_ids, answers, data)
        greedy = scores.pop() if self._greedy_baseline else None
        baseline = None if greedy is None else greedy.reward
        trajectories = [
            single_turn_trajectory(response, prompt_ids, score.reward, baseline=baseline)
            for response, score in zip(responses, scores, strict=False)  # the greedy answer is left out
        ]
        stats = group_stats(trajectories, num_errors=sum(score.num_errors for score in scores))
        stats |= self._scorer.stats(data, scores, reward=stats["reward"])
        if greedy is not None:
            stats |= {"greedy_reward": greedy.reward, "greedy_reward_errors": float(greedy.num_errors)}
        filter_rewards = [score.filter_reward for score in scores]
        return TrajectoryGroup(trajectories=trajectories, stats=stats, filter_rewards=filter_rewards)

    def _prompt(self, row: dict[str, Any]) -> EncodedPrompt:
        if self._get_input_ids_fn is None:
            return encode_prompt(row, self._tokenizer, enable_thinking=self._enable_thinking)
        token_ids = self._get_input_ids_fn(row, self._tokenizer, self._enable_thinking)
        return EncodedPrompt(self._tokenizer.decode(token_ids), token_ids)

    def check_row(self, row: dict[str, Any]) -> None:
        """Raise InputError when no episode could be run on `row`: no prompt, no room for an answer, no reward."""
        self._scorer.check_row(row)
        settings_for_length(self._settings, len(self._prompt(row).token_ids), list(row))

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Raise InputError when the first row could not be run, or any row has no reward function."""
        self._scorer.check_rows(rows)
        super().check_rows(rows)

    def for_evaluation(self, gconfig: GenerationHyperparameters) -> RLVRWorkflow:
        """The same workflow and reward pool with other sampling settings, one sample a prompt."""
        clone = copy.copy(self)
        clone._owns_scorer = False
        clone._num_samples = 1
        clone._greedy_baseline = False
        clone._settings = request_settings(gconfig, self._tokenizer)
        return clone

    async def aclose(self) -> None:
        """End the reward pool. An evaluation workflow leaves it to the workflow it was made from."""
        if self._owns_scorer:
            await self._scorer.aclose()
