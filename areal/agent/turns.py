"""One turn of a session, independent of the HTTP dialect that it arrives in: request, answer, refusal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from areal.api.errors import ArealError

Message = dict[str, Any]
"""A chat message in OpenAI's form, as chat templates take it: role, content, tool_calls, tool_call_id, name,
reasoning_content. Content is text, None, or a list of parts if it has images: {"type": "text", "text": ...} and
{"type": "image", ...}, the latter with the data URL `url`, or `sha256` and `grid` once it is stored."""
FinishReason = Literal["stop", "length", "tool_calls"]
BUDGET_CODES = frozenset({"agent.turn_budget", "agent.token_budget", "agent.prompt_too_long"})
"""Refusals after which the policy has used what it may: the session is over, and is scored as it is."""
END_CODES = BUDGET_CODES | {"agent.time_budget"}  # Refusals after which every further turn is refused too.


@dataclass(frozen=True, slots=True)
class ToolCall:
    call_id: (
        str  # areal's own id, unique in the session: clients take a call whose id they know for a call that is done.
    )
    name: str
    arguments: str  # JSON text of an object.
    model_id: str = ""  # The id in the text of the answer; empty: none.


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSettings:
    """Sampling settings that a client asks for. None: the setting of the run."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    messages: tuple[Message, ...] = ()  # Empty only when `prompt` is set.
    prompt: str | tuple[int, ...] | None = None  # A plain prompt of the completions dialect: text or token ids.
    tools: tuple[dict[str, Any], ...] = ()  # Schemas in OpenAI's form: {"type": "function", "function": {...}}.
    tool_choice: str = "auto"  # auto, none, required, or the name of a tool.
    prefill: str = ""  # Text that the answer begins with; it is part of the prompt.
    answer_schema: dict[str, Any] | None = None  # JSON schema of an answer without tool calls; None: any text.
    num_answers: int = 1
    settings: TurnSettings = field(default_factory=TurnSettings)
    shows_prompt: bool = False  # The answers have `prompt_ids`.
    num_bytes: int = 0  # The size of the request as JSON.
    fingerprint: str = ""  # SHA-256 of the dialect and the canonical body; equal for a request and its retry.
    retry_count: int = 0
    """`x-stainless-retry-count` of the SDKs: above 0, an equal fingerprint is answered from the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAnswer:
    turn_id: str
    text: str  # It has no reasoning, tool calls or special tokens.
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason | None  # None: it is still generated, and has what is certain of it.
    num_prompt_tokens: int
    token_ids: Sequence[int]  # Generated tokens, with a generated end token.
    logprobs: Sequence[float]
    num_cached_tokens: int = 0  # Tokens of the prompt that the cache had.
    prompt_ids: Sequence[int] = ()  # Tokens of the prompt, where the request wants them.


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_message(content: str | None, reasoning: str | None, calls: Sequence[dict[str, Any]]) -> Message:
    """A message of the assistant, as every dialect delivers an answer and reads it back."""
    message: Message = {"role": "assistant", "content": content or None}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | {"tool_calls": list(calls)} if calls else message


def answer_message(answer: TurnAnswer) -> Message:
    calls = [function_call(call.call_id, call.name, call.arguments) for call in answer.tool_calls]
    return assistant_message(answer.text, answer.reasoning, calls)


def with_call_ids(message: Message, ids: Mapping[str, str]) -> Message:
    """A message with other ids of tool calls, in the calls or in their result; ids that `ids` lacks stay."""
    if calls := message.get("tool_calls"):
        return message | {"tool_calls": [{**call, "id": ids.get(call["id"], call["id"])} for call in calls]}
    if (call_id := message.get("tool_call_id", "")) in ids:
        return message | {"tool_call_id": ids[call_id]}
    return message


class TurnRefused(ArealError):
    """A request that gets no answer. Each dialect writes it in its own error format."""

    def __init__(
        self, message: str, *, code: str, status: int, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        """`status`: HTTP status. `param`: the field of the request that is wrong."""
        super().__init__(message, code=code)
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s


class TurnStream(Protocol):
    """A turn as one client reads it."""

    is_whole: bool
    """Whether `grown` has returned the whole answers."""

    async def grown(self, limit_s: float) -> tuple[TurnAnswer, ...]:
        """The answers when they have grown, and at the latest after `limit_s`; none before generation starts.

        Their text and reasoning begin with those of the call before. Raises TurnRefused."""
        ...

    def leave(self, *, cancels: bool) -> None:
        """The client does not read any more. `cancels`: the turn ends if it has no other reader."""
        ...


class SessionTurns(Protocol):
    """A session as a dialect sees it."""

    async def answer(self, request: TurnRequest) -> tuple[TurnAnswer, ...]:
        """`request.num_answers` answers. Raises TurnRefused."""
        ...

    def stream(self, request: TurnRequest) -> "TurnStream":
        """The same answers while they are generated. Raises TurnRefused."""
        ...

    async def count_tokens(self, request: TurnRequest) -> int:
        """Tokens of the prompt of a request, without a turn. Raises TurnRefused."""
        ...

    def delivered(self, answers: Sequence[TurnAnswer]) -> None:
        """All of a reply with these answers was handed to the connection of the client."""
