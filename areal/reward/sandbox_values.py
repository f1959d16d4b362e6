"""Owns how Python values travel between a sandboxed program and its judge: as JSON, so that none can carry code.

Plain data (numbers, text, bytes, None, lists, tuples, sets, dicts, and what derives from them, numpy's too) arrives as
plain data; anything else stays where it is and arrives as the number of an object there.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself takes longer to load than the rest of this file
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_LONG_INT_BITS = 10_000
"""Longer whole numbers travel in hexadecimal: Python refuses to read them as decimals."""


def encoded(value: Any, keep: Callable[[Any], int]) -> Any:
    """`value` as JSON data; `keep` stores an object that cannot travel and returns its number."""
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
    """The value that JSON data stands for; `find` gives what to use for an object that did not travel.

    ValueError, TypeError or RecursionError when it is none: the data come from a foreign program.
    """
    if isinstance(data, list):
        return [decoded(item, find) for item in data]
    if not isinstance(data, dict):
        return data
    (kind, content), *more = data.items()
    if more:
        raise ValueError("a value of two kinds")
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
    raise ValueError(f"a value of the unknown kind {kind!r}")


def plain_data(data: Any) -> Any:
    """What encoded data stand for, as far as JSON could say it: tuples are lists, keys of dicts are text.

    ValueError for sets, objects and whatever else equals no JSON; the other errors of `decoded`. Nothing is put where
    it needs a number's hash: a program may return a million numbers of one hash, which would take hours.
    """
    if isinstance(data, list):
        return [plain_data(item) for item in data]
    if not isinstance(data, dict):
        return data
    (kind, content), *more = data.items()
    if more or kind not in ("tuple", "int", "dict"):
        raise ValueError("no plain data")
    if kind == "int":
        return int(content, 16)
    if kind == "tuple":
        return [plain_data(item) for item in content]
    return {_key(key): plain_data(item) for key, item in content}


def _key(data: Any) -> str:
    """How a key of a dict reads as text."""
    is_tuple = isinstance(data, dict) and list(data) == ["tuple"]
    return str(tuple(map(plain_data, data["tuple"])) if is_tuple else plain_data(data))
