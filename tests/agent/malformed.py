"""Malformed requests of every dialect: a valid body with one thing wrong."""

from __future__ import annotations

import copy
import random
from typing import Any, NamedTuple

import orjson

TOOL = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}], "name": "me"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": TOOL}}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    **{"max_tokens": 5, "max_completion_tokens": 6, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "n": 2, "seed": 1},
    **{"frequency_penalty": 0.5, "stop": ["x"], "stream": False, "stream_options": {"include_usage": True}},
    **{"logprobs": True, "top_logprobs": 0, "user": "u", "store": False, "parallel_tool_calls": True},
    **{"presence_penalty": 0.5},
}
COMPLETION = {
    **{"model": "m", "prompt": "2+2=", "max_tokens": 5, "temperature": 0.5, "top_p": 0.5, "n": 2, "seed": 1},
    **{"stop": ["x"], "stream": False, "logprobs": 0, "user": "u", "echo": False, "best_of": 1},
}
RESPONSE = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", "id": "f", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ],
    "instructions": "Be.",
    "tools": [{"type": "function", "name": "add", "description": "adds", "parameters": TOOL, "strict": True}],
    "tool_choice": {"type": "function", "name": "add"},
    **{"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.5, "stream": False, "include": [], "store": False},
    **{"parallel_tool_calls": True, "truncation": "disabled", "user": "u", "top_logprobs": 0},
}
MESSAGE = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be."}],
    "messages": [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "4", "is_error": False}]},
    ],
    "tools": [{"name": "add", "description": "adds", "input_schema": TOOL}],
    "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    **{"temperature": 0.5, "top_p": 0.5, "top_k": 3, "stop_sequences": ["x"], "stream": False, "service_tier": "auto"},
}
VALID: dict[str, dict[str, Any]] = {
    "/chat/completions": CHAT,
    "/completions": COMPLETION,
    "/responses": RESPONSE,
    "/messages": MESSAGE,
}
FREE = {"parameters", "input_schema", "metadata"}
"""Objects whose fields the server does not know."""
TEXT_OR_LIST = {"content", "output", "system", "stop", "prompt", "input"}
ODD = [5, -1, 2.5, 10**19, 1e308, "", "x", "\0", "é" * 50, True, False, [], {}, [[]], [{}], [None], {"x": 1}, "{", [5]]


class Malformed(NamedTuple):
    """A request body."""

    data: bytes
    is_wrong: bool
    """It must be refused."""
    param: str
    """The field that the refusal must name; empty: any."""


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every position in a body that the server reads."""
    result = [path] if path else []
    if path and (path[-1] in FREE or (path[-1] == "input" and isinstance(value, dict))):
        return result
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        result += paths(child, (*path, key))
    return result


def at(body: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        body = body[key]
    return body


def shown(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def malformed(rng: random.Random, valid: dict[str, Any]) -> Malformed:
    """`valid` with one thing wrong."""
    body = copy.deepcopy(valid)
    kind = rng.choice(["type", "type", "odd", "odd", "unknown", "unknown", "missing", "bytes", "deep"])
    places = paths(body)
    path = rng.choice(places)
    match kind:
        case "type":
            old = at(body, path)
            wrong = [value for value in (5, "x", [5], {"x": 1}, True) if not _is_same_kind(old, value, path)]
            at(body, path[:-1])[path[-1]] = rng.choice(wrong)
            return Malformed(orjson.dumps(body), True, "")
        case "odd":
            at(body, path[:-1])[path[-1]] = rng.choice(ODD)
            return Malformed(orjson.dumps(body), False, "")
        case "unknown":
            objects = [place for place in ((), *places) if isinstance(at(body, place), dict) and _is_known(place, body)]
            path = rng.choice(objects)
            at(body, path)["unknown_field"] = rng.choice([None, *ODD])
            return Malformed(orjson.dumps(body), True, shown((*path, "unknown_field")))
        case "missing":
            name = rng.choice([name for name in ("model", "messages", "prompt", "input", "max_tokens") if name in body])
            del body[name]
            is_wrong = name != "max_tokens" or valid is MESSAGE
            return Malformed(orjson.dumps(body), is_wrong, name if is_wrong else "")
        case "bytes":
            data = orjson.dumps(body)
            cut = rng.randrange(1, len(data))
            return Malformed(rng.choice([data[:cut], data[cut:], data + b"x", b"\xff" + data, b"[]", b"nul"]), True, "")
        case _:
            depth = rng.choice([100, 253, 300, 1000, 5000])
            deep = b'{"a":' * depth + b"1" + b"}" * depth
            data = orjson.dumps({**body, "unknown_field": "DEEP"}).replace(b'"DEEP"', deep)
            return Malformed(data, True, "")


def _is_known(path: tuple[Any, ...], body: Any) -> bool:
    """Whether the server knows the fields of the object at `path`."""
    return not path or not (path[-1] in FREE or (path[-1] == "input" and isinstance(at(body, path), dict)))


def _is_same_kind(old: Any, new: Any, path: tuple[Any, ...]) -> bool:
    """Whether `new` could be right where `old` is."""
    if path[-1] in TEXT_OR_LIST and "'reasoning_text'" not in str(old)[:40] and isinstance(new, str | list):
        return True
    if path[-1] == "tool_choice" or (isinstance(old, float) and isinstance(new, int)):
        return isinstance(new, str | dict)
    if old is None:
        return isinstance(new, str)
    return isinstance(new, type(old)) and isinstance(new, bool) == isinstance(old, bool)
