"""Several attempts in one dialogue: a wrong answer is followed by a user message, and the policy answers again."""

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from areal.api.config import GenerationHyperparameters, RewardConfig
from areal.api.data import GenerationResponse, Trajectory, TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import ConfigError, InputError
from areal.api.workflow import RewardFn
from areal.data.chat import EncodedPrompt, encode_prompt, tokens_between_turns
from areal.data.tokenizer import Tokenizer
from areal.workflow.generate import answer_text, gather_or_cancel, group_stats, new_request, settings_for_length
from areal.workflow.scored import ScoredWorkflow
from areal.workflow.scoring import Score

RETRY_MESSAGE = (
    "Your answer is either wrong or not in the required format. Read the question again and answer once more."
)


@dataclass(slots=True)
class _Dialogue:
    """A growing conversation. Tokens are only appended; an answer of the policy is never tokenised again."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    loss_mask: list[int] = field(default_factory=list[int])
    rollout_logprobs: list[float] = field(default_factory=list[float])
    output_versions: list[int] = field(default_factory=list[int])
    num_turns: int = 0
    finished: bool = False
    scores: list[Score] = field(default_factory=list[Score])
    """One per attempt."""
    discount: float = 1.0
    """Factor of the score of the last attempt."""

    def add_answer(self, response: GenerationResponse, text: str) -> None:
        size = len(response.output_ids)
        self.token_ids += response.output_ids
        self.loss_mask += [1] * size
        self.rollout_logprobs += response.output_logprobs
        self.output_versions += response.output_versions
        self.num_turns += 1
        self.finished = response.stop_reason == "stop"
        self.text += text

    def add_fixed(self, token_ids: list[int], text: str) -> None:
        """Append tokens that the policy did not generate; they are not trained on."""
        size = len(token_ids)
        self.token_ids += token_ids
        self.loss_mask += [0] * size
        self.rollout_logprobs += [0.0] * size
        self.output_versions += [-1] * size
        self.text += text

    def trajectory(self) -> Trajectory:
        return Trajectory(
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            rollout_logprobs=self.rollout_logprobs,
            output_versions=self.output_versions,
            reward=self.scores[-1].reward * self.discount,
            reward_parts={name: part * self.discount for name, part in self.scores[-1].parts.items()},
            finished=self.finished,
        )


class MultiTurnWorkflow(ScoredWorkflow):
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
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"workflow_args.max_turns={max_turns} must be at least 1", code="workflow.invalid_args")
        if not 0 < turn_discount <= 1:
            message = f"workflow_args.turn_discount={turn_discount} must be above 0 and at most 1"
            raise ConfigError(message, code="workflow.invalid_args")
        super().__init__(reward_fn, gconfig, tokenizer, reward=reward, enable_thinking=enable_thinking)
        self._max_turns = max_turns
        self._turn_discount = turn_discount
        self._between_turns = tokens_between_turns(tokenizer, retry_message, enable_thinking=enable_thinking)
        self._retry_text = tokenizer.decode(self._between_turns)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        """One group of dialogues on row `data`."""
        prompt = self._prompt(data)
        group_id = uuid4().hex
        dialogues = [_Dialogue() for _ in range(self._num_samples)]
        for dialogue in dialogues:
            dialogue.add_fixed(prompt.token_ids, prompt.text)
        await gather_or_cancel(
            [
                self._converse(engine, dialogue, data, group_id=group_id, first_number=index * self._max_turns)
                for index, dialogue in enumerate(dialogues)
            ]
        )
        trajectories = [dialogue.trajectory() for dialogue in dialogues]
        num_errors = sum(score.num_errors for dialogue in dialogues for score in dialogue.scores)
        stats = group_stats(trajectories, num_errors=num_errors)
        stats["num_turns"] = sum(dialogue.num_turns for dialogue in dialogues) / len(dialogues)
        stats |= self._scorer.stats(data, [dialogue.scores[-1] for dialogue in dialogues], reward=stats["reward"])
        filter_rewards = [dialogue.scores[-1].filter_reward * dialogue.discount for dialogue in dialogues]
        return TrajectoryGroup(trajectories=trajectories, stats=stats, filter_rewards=filter_rewards)

    async def _converse(
        self, engine: InferenceEngine, dialogue: _Dialogue, row: dict[str, Any], *, group_id: str, first_number: int
    ) -> None:
        """Run one dialogue to its end."""
        while True:
            # Copied, because the engine keeps the list of the request while the dialogue grows.
            context_ids, context_text = list(dialogue.token_ids), dialogue.text
            settings = settings_for_length(self._settings, len(context_ids), list(row))
            number = first_number + dialogue.num_turns
            response = await engine.agenerate(new_request(context_ids, settings, group_id=group_id, number=number))
            text = answer_text(response, self._tokenizer)
            dialogue.add_answer(response, text)
            scores = await self._scorer.score(context_text, context_ids, [(text, response.output_ids)], row)
            dialogue.scores += scores
            dialogue.discount = self._turn_discount ** (dialogue.num_turns - 1)
            if scores[0].filter_reward != 0 or dialogue.num_turns >= self._max_turns:
                return
            retry_ids = self._between_turns
            if len(dialogue.token_ids) + len(retry_ids) >= self._settings.max_tokens:
                return
            if retry_ids and response.output_ids[-1:] == retry_ids[:1]:  # the policy generated the end token
                retry_ids = retry_ids[1:]
            dialogue.add_fixed(retry_ids, self._retry_text)

    def _prompt(self, row: dict[str, Any]) -> EncodedPrompt:
        if "messages" not in row:
            raise InputError(
                f"the multi_turn workflow needs a column 'messages', but a row has only {sorted(row)}: use a "
                "train_dataset.map_fn that adds it",
                code="workflow.missing_column",
            )
        return encode_prompt(row, self._tokenizer, enable_thinking=self._enable_thinking)
