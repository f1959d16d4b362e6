"""The tokens of one dialogue. They are only appended, and what the policy generated is never encoded again."""

import asyncio
import itertools
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from areal.agent.images import DialogueImages, parts_of
from areal.agent.tool_calls import (
    AnswerStyle,
    Broken,
    Call,
    Piece,
    Tool,
    answer_call,
    answer_pieces,
    style_of,
    tool_schema,
)
from areal.agent.transcript import TokenTree, path_to, row_of, tokens_to, with_images
from areal.api.config import GenerationHyperparameters
from areal.api.data import GenerationResponse, Trajectory, TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import InputError, RewardError
from areal.api.images import ImageRef
from areal.api.metrics import gather_or_cancel
from areal.data.chat import EncodedPrompt, encode_prompt
from areal.data.chat_template import TemplateScenario, dialogue_template
from areal.data.images import PromptImages
from areal.data.tokenizer import Tokenizer
from areal.observe.step_files import log_metric
from areal.workflow.scoring import (
    Score,
    ScoredWorkflow,
    Scorer,
    group_stats,
    new_request,
    settings_for_length,
    settings_of_row,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of the policy."""

    text: str  # It has no special tokens.
    token_ids: Sequence[int]  # Including a generated end token.
    position: int  # Number of tokens of the conversation before it.
    finished: bool  # False if a length limit cut it.


_HISTORY = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})


def tokens_after_answer(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], *, enable_thinking: bool = False
) -> list[int]:
    """Tokens between an answer and the next one: the end token of the answer, `messages`, the header of the next one.

    They are those of sessions of agents, with a placeholder as the history, so that real answers are never tokenised
    again. InputError when the chat template supports no further turns.
    """
    template = dialogue_template(tokenizer, TemplateScenario(enable_thinking=enable_thinking))
    return template.after(_HISTORY, messages)


class Conversation:
    """One branch of the tree of tokens that the transcript of a session has, and the text of it.

    A token is *fixed* (given from outside, not trained on) or *generated* (by the policy, trained on). The tokens
    of a request are a prefix of those of every later request of the same conversation.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: EncodedPrompt | None = None,
        *,
        max_tokens: int | None = None,
        enable_thinking: bool = False,
        images: DialogueImages | None = None,
    ) -> None:
        """`prompt`: the first fixed tokens. `max_tokens`: limit of all tokens together; None = none. `images`: those of
        the dialogue; `token_ids` and `prompt` then have their places in the form of `DialogueImages`."""
        self._images = images
        self.tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._enable_thinking = enable_thinking
        self._tree = TokenTree()
        self._end = self._tree.root
        self._texts: list[tuple[int, str]] = []  # with the number of tokens before each
        self._answers: list[Answer] = []
        if prompt is not None:
            self._add_fixed(prompt.token_ids, prompt.text)

    @property
    def token_ids(self) -> Sequence[int]:
        return tokens_to(self._end)

    @property
    def text(self) -> str:
        """Fixed tokens with, answers without their special tokens."""
        return "".join(text for _, text in self._texts)

    @property
    def answers(self) -> Sequence[Answer]:
        return self._answers

    @property
    def last_answer(self) -> Answer:
        """InputError when there is none."""
        if not self._answers:
            message = "this conversation has no answer yet: call generate(episode, conversation) first"
            raise InputError(message, code="workflow.no_answer")
        return self._answers[-1]

    def context_of(self, answer: Answer) -> EncodedPrompt:
        """Everything before an answer: what the policy answered."""
        text = "".join(text for position, text in self._texts if position < answer.position)
        return EncodedPrompt(text, self._shown(self.token_ids[: answer.position]))

    def add_answer(self, response: GenerationResponse) -> str:
        text = self.tokenizer.decode(list(response.output_ids), skip_special_tokens=True)
        position, finished = self._end.end, response.stop_reason == "stop"
        self._texts.append((position, text))
        self._end = self._tree.add_generated(
            self._end,
            str(len(self._answers)),
            response.output_ids,
            response.output_logprobs,
            response.output_versions,
            temperature=response.temperature,
            experts=response.routed_experts,
        )
        self._answers.append(Answer(text=text, token_ids=response.output_ids, position=position, finished=finished))
        return text

    async def stored(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose images are stored. `add_messages` stores them too, but blocks meanwhile."""
        return messages if self._images is None else list(await asyncio.to_thread(self._images.stored, messages))

    def add_messages(self, messages: list[dict[str, Any]]) -> bool:
        """Append messages after an answer, for example results of tools, and the header of the next answer.

        They are rendered with the chat template; the rest is as in `add_turn`. Image parts of their content have a
        data URL; InputError for an unusable image, and for one without `images`.
        """
        token_ids = self._rendered(messages)
        return self.add_turn(token_ids)

    def _rendered(self, messages: list[dict[str, Any]]) -> list[int]:
        if self._images is not None:
            messages = list(self._images.stored(messages))
        elif any(part.get("type") == "image" for message in messages for part in parts_of(message)):
            text = "the messages have images, and the policy takes text only"
            raise InputError(text, code="agent.multimodal")
        token_ids = tokens_after_answer(self.tokenizer, messages, enable_thinking=self._enable_thinking)
        return token_ids if self._images is None else self._images.placed(token_ids, messages)

    def request_ids(self) -> tuple[Sequence[int], Sequence[ImageRef]]:
        """The context of the next answer as a request has it: `token_ids`, and the images in them."""
        return (self.token_ids, []) if self._images is None else self._images.plain(self.token_ids)

    def add_turn(self, token_ids: Sequence[int]) -> bool:
        """Append the tokens of a chat template between two answers, as `tokens_after_answer` returns them.

        They begin with the end token of the answer before, which is left out when the policy generated it.
        Returns False and appends nothing when `max_tokens` would leave no room for another answer.
        """
        if not self._has_room(token_ids):
            return False
        if self._end.is_generated and self._end.token_ids[-1:] == token_ids[:1]:
            token_ids = token_ids[1:]
        written = token_ids if self._images is None else self._images.written(token_ids)
        self._add_fixed(token_ids, self.tokenizer.decode(list(written)))
        return True

    def _shown(self, token_ids: Sequence[int]) -> Sequence[int]:
        return token_ids if self._images is None else self._images.plain(token_ids)[0]

    def add_text(self, text: str) -> bool:
        """Append plain text, encoded without special tokens. False, and no change, as in `add_turn`."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not self._has_room(token_ids):
            return False
        self._add_fixed(token_ids, text)
        return True

    def to_trajectory(
        self, reward: float, *, reward_parts: dict[str, float] | None = None, baseline: float | None = None
    ) -> Trajectory:
        """The conversation as a training sample. `baseline`: reward of a greedy answer, if there is one."""
        row = row_of(
            path_to(self._end),
            reward=reward,
            finished=self.last_answer.finished,
            reward_parts=reward_parts,
            baseline=baseline,
        )
        return with_images(row, self._images)

    def _has_room(self, token_ids: Sequence[int]) -> bool:
        return self._max_tokens is None or self._end.end + len(token_ids) < self._max_tokens

    def _add_fixed(self, token_ids: Sequence[int], text: str) -> None:
        self._texts.append((self._end.end, text))
        self._end = self._tree.add_fixed(self._end, token_ids)


# The base of workflows that hold conversations, and the functions that such a workflow calls.


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What `generate` and `score` need: one row with its servers. All conversations of a group share it."""

    engine: InferenceEngine
    row: dict[str, Any]
    settings: GenerationHyperparameters  # Sampling settings of each request.
    scorer: Scorer
    group_id: str = field(default_factory=lambda: uuid4().hex)
    numbers: Iterator[int] = field(default_factory=itertools.count)  # Numbers of the requests.
    errors: list[int] = field(default_factory=list[int])  # Failed calls of reward functions, of each `score`.


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
    (score,) = await episode.scorer.score(context.text, context.token_ids, texts, episode.row)
    episode.errors.append(score.num_errors)
    return score


class ConversationWorkflow(ScoredWorkflow):
    """A workflow whose episode is `gconfig.n_samples` conversations on one row, at the same time.

    A subclass writes `converse`, and `prompt` where the prompt is not the column `messages` or `prompt` of the row.
    A row and the results of tools may have images (docs/vision.md); reward functions get no column of them.
    """

    @abstractmethod
    async def converse(self, episode: Episode, conversation: Conversation) -> Score | float:
        """Hold one conversation, which begins with the prompt, and return its reward.

        The reward is the result of `score`, or a number.
        """

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        prompt = self.prompt(data)
        data = data if self.images is None else self.images.without_images(data)
        episode = Episode(engine=engine, row=data, settings=settings_of_row(self._settings, data), scorer=self._scorer)
        refs = () if self.images is None else await self.images.stored(prompt.images)
        conversations = [self._conversation(prompt, refs) for _ in range(self._num_samples)]
        returned = await gather_or_cancel([self.converse(episode, conversation) for conversation in conversations])
        scores = [_checked(score) for score in returned]
        trajectories: list[Trajectory] = [
            conversation.to_trajectory(score.reward, reward_parts=score.parts)
            for conversation, score in zip(conversations, scores, strict=True)
        ]
        stats = group_stats(trajectories, num_errors=sum(episode.errors))
        stats["num_turns"] = sum(len(conversation.answers) for conversation in conversations) / len(conversations)
        stats |= self._scorer.stats(data, scores, reward=stats["reward"])
        return TrajectoryGroup(
            trajectories=trajectories, stats=stats, filter_rewards=[score.filter_reward for score in scores]
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
    if isinstance(reward, Score):
        return reward
    if not isinstance(reward, int | float):
        message = f"converse returned {reward!r}: return the result of score(...), or a number"
        raise RewardError(message, code="workflow.wrong_reward")
    return Score(reward=float(reward), filter_reward=float(reward), num_errors=0, parts={}, metrics={})


# ----------------------------------------------------------------------------------------------------------------------
# Tools of a workflow: calls in the text of an answer, and the loop around them.


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    problem: str = ""  # Why it cannot be executed; empty when it can.


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen) in an answer, and
    not in its reasoning, which begins with `<think>`."""
    style = AnswerStyle(name="hermes", reasoning=("<think>", "</think>"), special_tokens=None)
    return _calls(answer_pieces(text, style, tools=[{"function": {"name": ""}}]), style)


def _calls(pieces: Sequence[Piece], style: AnswerStyle) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for piece in pieces:
        if isinstance(piece, Call):
            calls.append(ToolCall(name=piece.name, arguments=json.loads(piece.arguments)))
        elif isinstance(piece, Broken):
            problem = 'a call must be {"name": ..., "arguments": {...}}' if style.name == "hermes" else "malformed call"
            calls.append(ToolCall(name="", problem=problem))
    return calls


def _calls_of_last(episode: Episode, conversation: Conversation, tools: Sequence[Tool]) -> list[ToolCall]:
    """The calls of the last answer, in the style of the chat template, as a session of an agent reads them."""
    tokenizer, answer = conversation.tokenizer, conversation.last_answer
    style = style_of("auto", tokenizer.chat_template)
    style = style_of("hermes", tokenizer.chat_template) if style.name == "none" else style
    ids = list(answer.token_ids)
    if ids and ids[-1] in episode.settings.stop_token_ids:
        ids.pop()
    return _calls(
        answer_pieces(
            tokenizer.decode(ids),
            style,
            tools=[tool_schema(tool) for tool in tools],
            in_reasoning=style.opens_reasoning(conversation.context_of(answer).text[-64:]),
            is_cut=not answer.finished,
        ),
        style,
    )


async def call_tool(call: ToolCall, tools: Sequence[Tool], *, timeout_s: float = 30.0) -> str | list[dict[str, Any]]:
    """The result of one call as text, or as parts where it has images. A call that fails gives `error: ...`, which the
    model reads like any result.

    Reports the metric tool_errors (0 or 1), whose mean is per call.
    """
    return await answer_call(call.name, call.arguments, call.problem, tools, timeout_s=timeout_s)


async def use_tools(
    episode: Episode,
    conversation: Conversation,
    tools: Sequence[Tool],
    *,
    max_turns: int = 8,
    parse: Callable[[str], list[ToolCall]] | None = None,
    timeout_s: float = 30.0,
) -> str:
    """Let the policy answer until it calls no tool, at most `max_turns` times. Returns the text of the last answer.

    `parse`: finds the calls in the text of an answer; None = in the style of the chat template, Hermes without one.
    The calls of one answer run at the same time; each result is a message of the role `tool`. The loop also ends when
    gconfig.max_tokens leaves no room for another answer. Reports the metrics tool_calls (of the conversation) and
    tool_errors (share of the calls).
    """
    text, num_calls = "", 0
    for turn in range(max_turns):
        text = await generate(episode, conversation)
        calls = _calls_of_last(episode, conversation, tools) if parse is None else parse(text)
        if not calls or turn + 1 == max_turns:
            break
        num_calls += len(calls)
        results = await asyncio.gather(*(call_tool(call, tools, timeout_s=timeout_s) for call in calls))
        messages = [
            {"role": "tool", "name": call.name, "content": result} for call, result in zip(calls, results, strict=True)
        ]
        if not conversation.add_messages(await conversation.stored(messages)):
            break
    log_metric("tool_calls", num_calls)
    return text
