"""Encodes Python values for the messages between a sandboxed program and the assertion checker, as JSON.

Plain data (numbers, text, bytes, None, lists, tuples, sets, dicts, their subclasses, numpy values) arrives as plain
data. Any other object stays in its process and arrives as a number, so no message can carry code.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes longer than the rest of this file
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_LONG_INT_BITS = 10_000
"""Longer integers are sent in hexadecimal: Python refuses to read them as decimals."""


def encoded(value: Any, keep: Callable[[Any], int]) -> Any:
    """`value` as JSON data; `keep` stores an object that cannot be sent and returns its number."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if number.bit_length() < _LONG_INT_BITS else {"int": hex(number)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encoded(item, keep) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"tuple": [encoded(item, keep) for item in tuple.__iter__(value)]}
    if isinstance(value, (set, frozenset)):
        return {"frozenset" if isinstance(value, frozenset) else "set": [encoded(item, keep) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encoded(key, keep), encoded(item, keep)] for key, item in dict.items(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encoded(value.tolist(), keep)
    return {"object": keep(value)}


def decoded(data: Any, find: Callable[[int], Any]) -> Any:
    """The value that `encoded` turned into `data`; `find` returns the replacement for an object that was not sent.

    ValueError, TypeError or RecursionError for invalid data, which a foreign program may send.
    """
    if isinstance(data, list):
        return [decoded(item, find) for item in data]
    if not isinstance(data, dict):
        return data
    (kind, content), *more = data.items()
    if more:
        raise ValueError("a value with two kinds")
    if kind == "object":
        return find(int(content))
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return {decoded(key, find): decoded(item, find) for key, item in content}
    collections = {"tuple": tuple, "set": set, "frozenset": frozenset}
    if kind in collections:
        return collections[kind](decoded(item, find) for item in content)
    raise ValueError(f"unknown kind of value {kind!r}")


def plain_data(data: Any) -> Any:
    """The decoded value with the types of JSON only: tuples become lists, keys of dicts become text.

    ValueError for sets, objects and other types; otherwise the errors of `decoded`. Numbers are never hashed: a program
    could return a million numbers with the same hash, which would take hours.
    """
    if isinstance(data, list):
        return [plain_data(item) for item in data]
    if not isinstance(data, dict):
        return data
    (kind, content), *more = data.items()
    if more or kind not in ("tuple", "int", "dict"):
        raise ValueError("not plain data")
    if kind == "int":
        return int(content, 16)
    if kind == "tuple":
        return [plain_data(item) for item in content]
    return {_key(key): plain_data(item) for key, item in content}


def _key(data: Any) -> str:
    """A dict's key as text."""
    is_tuple = isinstance(data, dict) and list(data) == ["tuple"]
    return str(tuple(map(plain_data, data["tuple"])) if is_tuple else plain_data(data))


def call_question(function: str, args: list[Any]) -> dict[str, Any]:
    """The message that calls a function of a program. TypeError for arguments that are not plain data."""

    def never(value: Any) -> int:
        raise TypeError(f"an argument of a test is not plain data: {value!r:.100}")

    return {"op": "call", "target": function, "args": [encoded(value, never) for value in args], "kwargs": {}}
