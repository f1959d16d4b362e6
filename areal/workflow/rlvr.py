"""RL with verifiable rewards: one prompt, several answers, each scored by reward functions."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self
from uuid import uuid4

from areal.api.columns import packed_ids
from areal.api.config import GenerationHyperparameters, RewardConfig
from areal.api.data import TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import ConfigError, InputError
from areal.api.images import ImageRef
from areal.api.workflow import RewardFn
from areal.data.chat import EncodedPrompt, begun_once
from areal.data.images import PromptImages
from areal.data.tokenizer import Tokenizer
from areal.workflow.conversation import (
    Conversation,
    ConversationWorkflow,
    Episode,
    generate,
    score,
    tokens_after_answer,
)
from areal.workflow.scoring import (
    Score,
    ScoredWorkflow,
    group_stats,
    new_request,
    settings_for_length,
    settings_of_row,
    single_turn_rows,
)

# ----------------------------------------------------------------------------------------------------------------------
# Several attempts in one dialogue: a wrong answer is followed by a user message, and the policy answers again.

RETRY_MESSAGE = (
    "Your answer is either wrong or not in the required format. Read the question again and answer once more."
)


class MultiTurnWorkflow(ConversationWorkflow):
    """Up to `max_turns` attempts at the `messages` of a row. An attempt with reward 0 is followed by `retry_message`.

    With several reward functions, only those in `reward.filter_on` decide: an attempt is wrong if their part of the
    reward is 0, so a wrong answer with a reward for its format is tried again.
    The reward of a dialogue is that of its last attempt, multiplied by `turn_discount` for each earlier attempt. A
    dialogue is one trajectory; only generated tokens are trained on. A group has `gconfig.n_samples` dialogues.
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        max_turns: int,
        turn_discount: float,
        *,
        reward: RewardConfig | None = None,
        enable_thinking: bool = False,
        retry_message: str = RETRY_MESSAGE,
        images: PromptImages | None = None,
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"workflow_args.max_turns={max_turns} must be at least 1", code="workflow.invalid_args")
        if not 0 < turn_discount <= 1:
            message = f"workflow_args.turn_discount={turn_discount} must be above 0 and at most 1"
            raise ConfigError(message, code="workflow.invalid_args")
        super().__init__(reward_fn, gconfig, tokenizer, reward=reward, enable_thinking=enable_thinking, images=images)
        self._max_turns = max_turns
        self._turn_discount = turn_discount
        retry = {"role": "user", "content": retry_message}
        self._retry_ids = tokens_after_answer(tokenizer, [retry], enable_thinking=enable_thinking)

    async def converse(self, episode: Episode, conversation: Conversation) -> Score:
        for turn in range(self._max_turns):
            await generate(episode, conversation)
            scored = await score(episode, conversation)
            is_last = scored.filter_reward != 0 or turn + 1 == self._max_turns
            if is_last or not conversation.add_turn(self._retry_ids):
                return scored.scaled(self._turn_discount**turn)
        raise AssertionError("max_turns is at least 1")

    def prompt(self, row: dict[str, Any]) -> EncodedPrompt:
        if "messages" not in row:
            raise InputError(
                f"the multi_turn workflow needs a column 'messages', but a row has only {sorted(row)}: use a "
                "train_dataset.map_fn that adds it",
                code="workflow.missing_column",
            )
        return super().prompt(row)


InputIdsFn = Callable[[dict[str, Any], Tokenizer, bool], list[int]]
"""`f(row, tokenizer, enable_thinking) -> prompt token ids`."""


class RLVRWorkflow(ScoredWorkflow):
    """Generates `gconfig.n_samples` answers to the prompt of a row and scores each.

    The prompt is the column `messages`, rendered with the chat template, or the column `prompt` as plain text;
    `get_input_ids_fn` replaces both. `greedy_baseline` (ReMax, actor.adv_estimator=remax) generates one more answer
    greedily; its reward is the baseline of the others, and it is not trained on.
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
        super().__init__(reward_fn, gconfig, tokenizer, reward=reward, enable_thinking=enable_thinking)
        self._get_input_ids_fn = get_input_ids_fn
        self._greedy_baseline = greedy_baseline

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        prompt = self.prompt(data)
        images: Sequence[ImageRef] = ()
        if self.images is not None:
            images, data = await self.images.stored(prompt.images), self.images.without_images(data)
        prompt_ids = prompt.token_ids
        settings = settings_for_length(settings_of_row(self._settings, data), len(prompt_ids), list(data))
        group_id = uuid4().hex
        each = [settings] * self._num_samples
        if self._greedy_baseline:
            each.append(dataclasses.replace(settings, greedy=True))
        responses = await engine.agenerate_group(
            [
                new_request(prompt_ids, settings, group_id=group_id, number=number, images=images)
                for number, settings in enumerate(each)
            ]
        )
        decode = self.tokenizer.decode
        answers = [
            (decode([*response.output_ids], skip_special_tokens=True), response.output_ids) for response in responses
        ]
        scores = await self._scorer.score(prompt.text, prompt_ids, answers, data)
        greedy = scores.pop() if self._greedy_baseline else None
        baseline = None if greedy is None else greedy.reward
        trajectories = single_turn_rows(  # without the greedy answer, which is not trained on
            prompt_ids,
            responses,
            [score.reward for score in scores],
            reward_parts=[score.parts for score in scores],
            baseline=baseline,
            images=images,
        )
        stats = group_stats(trajectories, num_errors=sum(score.num_errors for score in scores))
        stats |= self._scorer.stats(data, scores, reward=stats["reward"])
        if greedy is not None:
            stats |= {"greedy_reward": greedy.reward, "greedy_reward_errors": float(greedy.num_errors)}
        filter_rewards = [score.filter_reward for score in scores]
        return TrajectoryGroup(trajectories=trajectories, stats=stats, filter_rewards=filter_rewards)

    def prompt(self, row: dict[str, Any]) -> EncodedPrompt:
        if self._get_input_ids_fn is None:
            return super().prompt(row)
        token_ids = begun_once(self.tokenizer, self._get_input_ids_fn(row, self.tokenizer, self.enable_thinking))
        return EncodedPrompt(self.tokenizer.decode(list(token_ids)), packed_ids(token_ids))

    def for_evaluation(self, gconfig: GenerationHyperparameters) -> Self:
        clone = super().for_evaluation(gconfig)
        clone._greedy_baseline = False
        return clone


class VisionRLVRWorkflow(RLVRWorkflow):
    """RLVR with the images of a row (docs/vision.md). Rows without images may be mixed in.

    Reward functions get all columns except that of the images.
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        images: PromptImages | None,
        *,
        reward: RewardConfig | None = None,
        enable_thinking: bool = False,
        greedy_baseline: bool = False,
    ) -> None:
        if images is None:
            text = "workflow=vision_rlvr: the model takes no images, or has no preprocessor_config.json"
            raise ConfigError(f"{text}; use workflow=rlvr for a model of text", code="model.image_processor")
        super().__init__(
            reward_fn,
            gconfig,
            tokenizer,
            reward=reward,
            enable_thinking=enable_thinking,
            greedy_baseline=greedy_baseline,
        )
        self.images = images
