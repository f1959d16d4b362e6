"""What every dialect offers: parse a body, write a reply, its stream of events, and a refusal."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

from areal.agent.turns import TurnAnswer, TurnRefused, TurnRequest

# Reads the fields of a JSON object one by one: each is checked, and one that nobody reads is refused by its name.

Json = dict[str, Any]
MAX_NAME = 512
MAX_ITEMS = 20_000  # The longest list. Together with the limit of the body it bounds the time to read a request.
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
        tables = (self.ignored, self.only, self.foreign, self.refused, NEUTRAL, METADATA)
        return any(name in names for names in tables)


_SAMPLER, _TEXT = "the policy is sampled by temperature, top_p and top_k alone", "the text of an answer is fixed"
_GRAMMAR, _PROMPT = "answers are not constrained: use response_format", "the chat template makes the prompt"
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("min_p", "min_tokens", "min_new_tokens"), ((0,), _SAMPLER)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), ((0,), _SAMPLER)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p"), ((1,), _SAMPLER)),
    "top_k": ((-1, 0), _SAMPLER), "logit_bias": (({}, []), _SAMPLER),
    **dict.fromkeys(("ignore_eos", "use_beam_search"), ((False,), _SAMPLER)),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors"), (([],), _SAMPLER)),
    "required_prefix_token_ids": (([],), "the policy chooses all its tokens"),
    "stop_token_ids": (([],), "stop with texts"), "stop_regex": (([],), "stop with texts"),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), ((True,), _TEXT)),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim", "return_tokens_as_token_ids"), ((False,), _TEXT)),
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), ((True,), _TEXT)),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex",
                     "ebnf", "json_schema"), ((), _GRAMMAR)),
    "add_generation_prompt": ((True,), _PROMPT),
    **dict.fromkeys(("continue_final_message", "add_special_tokens", "echo"), ((False,), _PROMPT)),
    **dict.fromkeys(("chat_template", "truncate_prompt_tokens"), ((), _PROMPT)), "documents": (([],), _PROMPT),
    **dict.fromkeys(("mm_processor_kwargs", "vllm_xargs", "kv_transfer_params"), (({},), "is not supported")),
    "prompt_logprobs": ((), "the prompt is not scored"),
    "return_token_ids": ((False,), "has an effect for chat completions and completions only"),
    **dict.fromkeys(("return_hidden_states", "return_routed_experts"), ((False,), "is not returned")),
}  # fmt: skip
"""Fields of inference servers: name -> (values without effect, why another is refused). Every dialect has them; its own
table goes first."""
METADATA: Mapping[str, Kind] = {
    "session_id": "text", "request_id": "text", "rid": "text", "cache_salt": "text", "priority": "number",
}  # fmt: skip
"""Accepted by every dialect without an effect."""
REPLAYED: Mapping[str, Kind] = dict.fromkeys(
    ("prompt_token_ids", "token_ids", "generation_token_ids", "generation_log_probs"), "list"
)
"""What inference servers add to an answer, in messages and items that come back: the session knows its tokens."""


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
        values = self._typed(field_name, "list") or []
        if len(values) > MAX_ITEMS:
            raise invalid(self.name(field_name), f"must have at most {MAX_ITEMS} items")
        return values

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
        if table is not None and table.knows(field_name):
            kind = table.ignored[field_name][0] if field_name in table.ignored else METADATA.get(field_name)
            only = table.only.get(field_name) or NEUTRAL.get(field_name)
            if kind is not None:
                if not isinstance(value, _KINDS[kind]):
                    raise invalid(path, f"must be of type {kind}")
            elif only and any(
                value == accepted and isinstance(value, bool) == isinstance(accepted, bool) for accepted in only[0]
            ):
                return
            elif field_name in table.foreign:
                self.foreign[field_name] = table.foreign[field_name]
            else:
                raise unsupported(path, table.refused[field_name] if only is None else only[1])
        else:
            message = f"{path[:200]}: this server does not know this field"
            raise TurnRefused(message, code="agent.unknown_field", status=400, param=path[:200])


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    turn: TurnRequest
    model: str  # Echoed in the reply. Every name means the policy.
    stream: bool = False
    include_usage: bool = False  # Whether the last event of OpenAI's streams has the usage.
    logprobs: bool = False
    token_ids: bool = False  # The reply has the ids of the prompt and of the answers, as vLLM sends them.
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
