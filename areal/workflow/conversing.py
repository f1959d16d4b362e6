"""The base of workflows that hold conversations, and the functions that such a workflow calls."""

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from areal.agent.images import DialogueImages
from areal.api.config import GenerationHyperparameters, RewardConfig
from areal.api.data import Trajectory, TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import RewardError
from areal.api.gather import gather_or_cancel
from areal.api.images import ImageRef
from areal.api.workflow import RewardFn
from areal.data.chat import EncodedPrompt, encode_prompt
from areal.data.images import PromptImages
from areal.data.tokenizer import Tokenizer
from areal.workflow.conversation import Conversation
from areal.workflow.sampling import group_stats, new_request, settings_for_length, settings_of_row
from areal.workflow.scored import ScoredWorkflow
from areal.workflow.scoring import Score, Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What `generate` and `score` need: one row with its servers. All conversations of a group share it."""

    engine: InferenceEngine
    row: dict[str, Any]
    settings: GenerationHyperparameters
    """Sampling settings of each request."""
    scorer: Scorer
    group_id: str = field(default_factory=lambda: uuid4().hex)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of the requests."""
    errors: list[int] = field(default_factory=list[int])
    """Failed calls of reward functions, of each `score`."""


def chat_prompt(
    messages: dict[str, Any] | list[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    tools: list[dict[str, Any]] | None = None,
    enable_thinking: bool = False,
    images: PromptImages | None = None,
) -> EncodedPrompt:
    """The text and tokens of a prompt: of a list of messages, or of a row with `messages` or `prompt`.

    `tools`: JSON schemas that the chat template shows to the model, for example `[tool_schema(add)]`. `images`: those
    of a `ConversationWorkflow`, for a row with images.
    """
    row = messages if isinstance(messages, dict) else {"messages": messages}
    return encode_prompt(row, tokenizer, enable_thinking=enable_thinking, tools=tools, images=images)


async def generate(
    episode: Episode, conversation: Conversation, settings: GenerationHyperparameters | None = None
) -> str:
    """Let the policy answer, append its tokens, and return their text without special tokens.

    `settings`: other sampling settings, for example `dataclasses.replace(episode.settings, stop=["</call>"])`.
    InputError when gconfig.max_tokens leaves no room for an answer.
    """
    context_ids, images = conversation.request_ids()
    settings = settings_for_length(settings or episode.settings, len(context_ids), list(episode.row))
    request = new_request(context_ids, settings, group_id=episode.group_id, number=next(episode.numbers))
    return conversation.add_answer(await episode.engine.agenerate(replace(request, images=images)))


async def score(episode: Episode, conversation: Conversation) -> Score:
    """The result of the reward functions for the last answer; their prompt is everything before it.

    RewardError when a call failed and reward.on_error=fail.
    """
    answer = conversation.last_answer
    context = conversation.context_of(answer)
    texts = [(answer.text, answer.token_ids)]
    (found,) = await episode.scorer.score(context.text, context.token_ids, texts, episode.row)
    episode.errors.append(found.num_errors)
    return found


class ConversationWorkflow(ScoredWorkflow):
    """A workflow whose episode is `gconfig.n_samples` conversations on one row, at the same time.

    A subclass writes `converse`, and `prompt` where the prompt is not the column `messages` or `prompt` of the row.
    A row and the results of tools may have images (docs/vision.md); reward functions get no column of them.
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
        super().__init__(reward_fn, gconfig, tokenizer, reward=reward, enable_thinking=enable_thinking)
        self.images = images

    @abstractmethod
    async def converse(self, episode: Episode, conversation: Conversation) -> Score | float:
        """Hold one conversation, which begins with the prompt, and return its reward.

        The reward is the result of `score`, or a number.
        """

    def prompt(self, row: dict[str, Any]) -> EncodedPrompt:
        """The first tokens of the conversations on `row`."""
        return chat_prompt(row, self.tokenizer, enable_thinking=self.enable_thinking, images=self.images)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        """One group of conversations on row `data`."""
        prompt = self.prompt(data)
        data = data if self.images is None else self.images.without_images(data)
        episode = Episode(engine=engine, row=data, settings=settings_of_row(self._settings, data), scorer=self._scorer)
        refs = () if self.images is None else await self.images.stored(prompt.images)
        conversations = [self._conversation(prompt, refs) for _ in range(self._num_samples)]
        found = await gather_or_cancel([self.converse(episode, one) for one in conversations])
        scores = [_checked(one) for one in found]
        trajectories: list[Trajectory] = [
            conversation.to_trajectory(one.reward, reward_parts=one.parts)
            for conversation, one in zip(conversations, scores, strict=True)
        ]
        stats = group_stats(trajectories, num_errors=sum(episode.errors))
        stats["num_turns"] = sum(len(conversation.answers) for conversation in conversations) / len(conversations)
        stats |= self._scorer.stats(data, scores, reward=stats["reward"])
        return TrajectoryGroup(
            trajectories=trajectories, stats=stats, filter_rewards=[one.filter_reward for one in scores]
        )

    def _conversation(self, prompt: EncodedPrompt, refs: Sequence[ImageRef]) -> Conversation:
        images = None if self.images is None else DialogueImages(self.images.run)
        if images is not None:
            prompt = EncodedPrompt(prompt.text, images.of_prompt(prompt.token_ids, refs))
        return Conversation(
            self.tokenizer,
            prompt,
            max_tokens=self._settings.max_tokens,
            enable_thinking=self.enable_thinking,
            images=images,
        )


def _checked(reward: object) -> Score:
    """The result of `converse` as a Score. RewardError when it is no number."""
    if isinstance(reward, Score):
        return reward
    if not isinstance(reward, int | float):
        message = f"converse returned {reward!r}: return the result of score(...), or a number"
        raise RewardError(message, code="workflow.wrong_reward")
    return Score(reward=float(reward), filter_reward=float(reward), num_errors=0, parts={}, metrics={})
