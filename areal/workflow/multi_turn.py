"""Several attempts in one dialogue: a wrong answer is followed by a user message, and the policy answers again."""

from typing import Any

from areal.api.config import GenerationHyperparameters, RewardConfig
from areal.api.errors import ConfigError, InputError
from areal.api.workflow import RewardFn
from areal.data.chat import EncodedPrompt
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
from areal.workflow.scoring import Score

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
            found = await score(episode, conversation)
            is_last = found.filter_reward != 0 or turn + 1 == self._max_turns
            if is_last or not conversation.add_turn(self._retry_ids):
                return found.scaled(self._turn_discount**turn)
        raise AssertionError("max_turns is at least 1")

    def prompt(self, row: dict[str, Any]) -> EncodedPrompt:
        if "messages" not in row:
            raise InputError(
                f"the multi_turn workflow needs a column 'messages', but a row has only {sorted(row)}: use a "
                "train_dataset.map_fn that adds it",
                code="workflow.missing_column",
            )
        return super().prompt(row)
