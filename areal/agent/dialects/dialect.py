"""What every dialect offers: parse a body, write a reply, its stream of events, and a refusal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from areal.agent.turns import TurnAnswer, TurnRefused, TurnRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A parsed request: the turn, and how its answers are to be written."""

    turn: TurnRequest
    model: str
    """Echoed in the reply. Every name means the policy."""
    stream: bool = False
    include_usage: bool = False
    """Of a stream of OpenAI's chat or completions dialect."""
    logprobs: bool = False
    repeated: dict[str, Any] | None = None
    """Fields of the request that the reply of the responses dialect repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a reply contains besides the answers."""

    created_s: int
    """Unix time."""
    token_text: Callable[[int], str]
    """Text of a token id, for log-probabilities."""


DONE = b"data: [DONE]\n\n"


def data_event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """An event whose name is the `type` of its value."""
    return b"event: " + value["type"].encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def openai_error(refused: TurnRefused) -> dict[str, Any]:
    """A refusal in OpenAI's format; `code` is that of docs/errors.md."""
    kind = _OPENAI_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


def openai_error_event(refused: TurnRefused) -> bytes:
    return data_event(openai_error(refused))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The functions of one dialect. Those that parse raise TurnRefused."""

    name: str
    parse: Callable[[dict[str, Any]], Asked]
    reply: Callable[[Asked, Sequence[TurnAnswer], Sent], dict[str, Any]]
    events: Callable[[Asked, Sequence[TurnAnswer], Sent], list[bytes]]
    """The whole stream, server-sent events in their order."""
    error: Callable[[TurnRefused], dict[str, Any]] = openai_error
    error_event: Callable[[TurnRefused], bytes] = openai_error_event
    """A refusal after the head of a stream was sent."""
    keep_alive: bytes = b": keep-alive\n\n"
    """What is sent while a stream waits for its answers: a comment, which every client of server-sent events skips."""
