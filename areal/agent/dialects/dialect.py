"""What every dialect offers: parse a body, write a reply, its stream of events, and a refusal."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

from areal.agent.turns import TurnAnswer, TurnRefused, TurnRequest

# Reads the fields of a JSON object one by one: each is checked, and one that nobody reads is refused by its name.

Json = dict[str, Any]
MAX_NAME = 512
MAX_ITEMS = 20_000  # Of a list. Together with the limit of the body it bounds the time to read a request.
Kind = Literal["text", "flag", "number", "object", "list"]
_KINDS: dict[Kind, tuple[type, ...]] = {
    "text": (str,),
    "flag": (bool,),
    "number": (int, float),
    "object": (dict,),
    "list": (list,),
}


@dataclass(frozen=True, slots=True)
class FieldTable:
    """The fields of a dialect's body, as docs/agent_http.md shows them. Any other field is refused as unknown."""

    read: Mapping[str, str]  # Name -> what it does and its limits.
    ignored: Mapping[str, tuple[Kind, str]]  # Accepted without an effect on the answer: name -> (type, why).
    only: Mapping[str, tuple[tuple[Any, ...], str]]
    """Accepted with these values only, which change nothing: name -> (values, why others are refused)."""
    foreign: Mapping[str, str] = field(default_factory=dict[str, str])
    """Fields of other servers, and values that `only` lacks: agent.foreign_fields decides: name -> why no effect."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Known to the dialect and refused with any value but null: name -> why."""

    def knows(self, name: str) -> bool:
        return any(name in names for names in (self.ignored, self.only, self.foreign, self.refused))


def invalid(path: str, problem: str) -> TurnRefused:
    return TurnRefused(f"{path}: {problem}", code="agent.invalid_field", status=400, param=path)


def unsupported(path: str, problem: str) -> TurnRefused:
    return TurnRefused(f"{path}: {problem}", code="agent.unsupported_field", status=400, param=path)


class Fields:
    """The fields of one object. null is the same as an absent field."""

    def __init__(self, value: Any, path: str = "") -> None:
        """`path`: name of the object in errors; empty for the body."""
        if not isinstance(value, dict):
            raise invalid(path or "body", "must be a JSON object")
        self._left: Json = dict(value)
        self.foreign: dict[str, str] = {}  # Fields that `finish` has met, with why they have no effect.
        self.path = path

    def name(self, field_name: str) -> str:
        return f"{self.path}.{field_name}" if self.path else field_name

    def names(self) -> list[str]:
        return list(self._left)

    def take(self, field_name: str) -> Any:
        return self._left.pop(field_name, None)

    def _typed(self, field_name: str, kind: Kind) -> Any:
        value = self.take(field_name)
        if value is None:
            return None
        if not isinstance(value, _KINDS[kind]) or (kind == "number" and isinstance(value, bool)):
            raise invalid(self.name(field_name), f"must be a {kind}" if kind != "object" else "must be an object")
        return value

    def text(self, field_name: str) -> str | None:
        return self._typed(field_name, "text")

    def required_text(self, field_name: str) -> str:
        """A name: short, because replies and errors repeat it."""
        value = self.text(field_name)
        if not value or len(value) > MAX_NAME:
            raise invalid(self.name(field_name), f"is required: a text of 1 to {MAX_NAME} characters")
        return value

    def flag(self, field_name: str, *, default: bool = False) -> bool:
        value = self._typed(field_name, "flag")
        return default if value is None else value

    def integer(self, field_name: str, low: int, high: int) -> int | None:
        value = self._typed(field_name, "number")
        if value is None:
            return None
        if not isinstance(value, int) or not low <= value <= high:
            raise invalid(self.name(field_name), f"must be an integer from {low} to {high}")
        return value

    def number(self, field_name: str, low: float, high: float) -> float | None:
        value = self._typed(field_name, "number")
        if value is None:
            return None
        if not low <= value <= high:
            raise invalid(self.name(field_name), f"must be from {low:g} to {high:g}")
        return float(value)

    def choice(self, field_name: str, values: Collection[str]) -> str | None:
        value = self.text(field_name)
        if value is not None and value not in values:
            raise invalid(self.name(field_name), f"must be one of {', '.join(sorted(values))}")
        return value

    def items(self, field_name: str) -> list[Any]:
        found = self._typed(field_name, "list") or []
        if len(found) > MAX_ITEMS:
            raise invalid(self.name(field_name), f"must have at most {MAX_ITEMS} items")
        return found

    def object(self, field_name: str) -> Json | None:
        return self._typed(field_name, "object")

    def fields(self, field_name: str) -> "Fields | None":
        """The fields of an object in this one; None when it is absent."""
        value = self.take(field_name)
        return None if value is None else Fields(value, self.name(field_name))

    def skip(self, **kinds: Kind) -> None:
        """Accept fields without an effect, each of its type: what an SDK sends back or adds to every object."""
        for field_name, kind in kinds.items():
            self._typed(field_name, kind)

    def finish(self, table: FieldTable | None = None) -> None:
        """Refuse every field that was not read and that `table` does not accept."""
        for field_name, value in self._left.items():
            if value is not None or table is None or not table.knows(field_name):
                self._check_unread(field_name, value, table)
        self._left = {}

    def _check_unread(self, field_name: str, value: Any, table: FieldTable | None) -> None:
        path = self.name(field_name)
        if table is not None and (kept := table.ignored.get(field_name)):
            if not isinstance(value, _KINDS[kept[0]]):
                raise invalid(path, f"must be of type {kept[0]}")
        elif table is not None and any(
            type(value) is type(one) and value == one for one in table.only.get(field_name, ((), ""))[0]
        ):
            return
        elif table is not None and field_name in table.foreign:
            self.foreign[field_name] = table.foreign[field_name]
        elif table is not None and (only := table.only.get(field_name)):
            raise unsupported(path, only[1])
        elif table is not None and field_name in table.refused:
            raise unsupported(path, table.refused[field_name])
        else:
            message = f"{path[:200]}: this server does not know this field"
            raise TurnRefused(message, code="agent.unknown_field", status=400, param=path[:200])


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    turn: TurnRequest
    model: str  # Echoed in the reply. Every name means the policy.
    stream: bool = False
    include_usage: bool = False  # Of a stream of OpenAI's chat or completions dialect.
    logprobs: bool = False
    foreign: Mapping[str, str] = field(default_factory=dict[str, str])  # Fields without effect here, and why.
    repeated: dict[str, Any] | None = None  # Fields of the request that the reply of the responses dialect repeats.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a reply contains besides the answers."""

    created_s: int  # Unix time.
    token_text: Callable[[int], str]  # Text of a token id, for log-probabilities.


class Growth:
    """What is new of an answer since it was read last."""

    def __init__(self) -> None:
        self.has_begun = False
        self._text = self._reasoning = self._tokens = 0

    def of(self, answer: TurnAnswer) -> TurnAnswer | None:
        """The answer with its new text, reasoning and tokens only; None: nothing of it is sent now."""
        start = self._tokens
        text, reasoning = answer.text[self._text :], answer.reasoning[self._reasoning :]
        if not text and not reasoning and answer.finish_reason is None:
            return None
        self._text, self._reasoning, self._tokens = len(answer.text), len(answer.reasoning), len(answer.token_ids)
        self.has_begun = True
        ids, logprobs = answer.token_ids[start:], answer.logprobs[start:]
        return replace(answer, text=text, reasoning=reasoning, token_ids=ids, logprobs=logprobs)


DONE = b"data: [DONE]\n\n"


def data_event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    return b"event: " + value["type"].encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def openai_error(refused: TurnRefused) -> dict[str, Any]:
    """A refusal in OpenAI's format; `code` as areal raised it."""
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
    stream: Callable[[Asked, Sent], Callable[[Sequence[TurnAnswer]], list[bytes]]]
    """A function of the answers, called when they have grown and when they are whole, that returns the next events."""
    error: Callable[[TurnRefused], dict[str, Any]] = openai_error
    error_event: Callable[[TurnRefused], bytes] = openai_error_event  # A refusal after the head of a stream was sent.
    keep_alive: bytes = b": keep-alive\n\n"
    """What is sent while a stream waits for its answers: a comment, which every client of server-sent events skips."""
