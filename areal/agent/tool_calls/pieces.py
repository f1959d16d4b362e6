"""The pieces that an answer is made of, and the rules by which text becomes a call. No function here raises."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import orjson


class Call(NamedTuple):
    """A valid call."""

    name: str
    arguments: str
    """JSON text of an object."""
    call_id: str = ""
    """The id that the answer itself contains; empty: none."""


class Broken(NamedTuple):
    """A call that cannot be read, as its text."""

    text: str


class Thought(NamedTuple):
    """Reasoning."""

    text: str


Piece = str | Call | Broken | Thought
"""A str is text for the reader."""
Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> its parameters: name -> JSON schema."""
Parser = Callable[[str, Schemas], list[Piece]]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_WHOLE = json.JSONDecoder(parse_constant=lambda name: _not_json(name))


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parsed_json(text: str) -> Any:
    """The JSON value of a text; None when it is not JSON (or null)."""
    try:
        return _WHOLE.decode(text)
    except (ValueError, RecursionError):
        return None


def leading_json(text: str, start: int) -> tuple[Any, int]:
    """(the JSON value at `start`, the index after it); (None, start) when there is none."""
    try:
        return _WHOLE.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def checked_call(name: Any, arguments: Any, *, source: str, call_id: str = "") -> Call | Broken:
    """A call, unless its name or its arguments cannot be sent to a client. `source`: its text in the answer."""
    if isinstance(arguments, str):
        arguments = parsed_json(arguments) if arguments.strip() else {}
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
        return Broken(source)
    try:
        text = json.dumps(arguments, ensure_ascii=False)
        orjson.dumps(orjson.loads(text))  # replies are written by orjson, which refuses lone surrogates and deep values
    except (ValueError, TypeError, RecursionError):
        return Broken(source)
    return Call(name, text, call_id)


def json_call(value: Any, *, source: str) -> Call | Broken:
    """A call from an object with `name` and `arguments` (or `parameters`)."""
    if not isinstance(value, dict):
        return Broken(source)
    arguments = value.get("arguments", value.get("parameters"))
    call_id = value.get("id")
    call_id = call_id if isinstance(call_id, str) and _NAME.fullmatch(call_id) else ""
    return checked_call(value.get("name"), {} if arguments is None else arguments, source=source, call_id=call_id)


class Block(NamedTuple):
    """Text between two markers."""

    inner: str
    source: str
    """With its markers."""


def blocks(text: str, start: str, end: str) -> Iterator[str | Block]:
    """The text outside of the markers, and the blocks between them. The last block may lack its end marker."""
    position = 0
    while (first := text.find(start, position)) >= 0:
        yield text[position:first]
        last = text.find(end, first + len(start))
        position = len(text) if last < 0 else last + len(end)
        yield Block(text[first + len(start) : len(text) if last < 0 else last], text[first:position])
    yield text[position:]


def typed_value(text: str, schema: Any) -> Any:
    """The value of an argument that is written as plain text: by its schema, else JSON where it is JSON.

    A value of the wrong type stays text: the tool reports it, and the policy reads the report.
    """
    kinds = schema.get("type") if isinstance(schema, dict) else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds and not (len(kinds) > 1 and text.strip() == "null"):
        return text
    found = parsed_json(text.strip())
    if found is None and text.strip() != "null":
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
    return found
