"""Requests that a controller must refuse or survive: a hypothesis strategy, and the states of a run to send them in."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson
from hypothesis import strategies as st

WEIGHT = {"name": "w", "shape": [2], "dtype": "float32"}
VALID: dict[str, dict[str, Any]] = {
    "/attach": {"run_id": 0, "rank": 0, "world_size": 1, "dp_size": 1, "step": 0, "version": 0},
    "/batch": {"run_id": 0, "step": 0, "dp_rank": 0, "dp_size": 1},
    "/publish": {"run_id": 0, "update": {"version": 1, "kind": "disk", "path": "/nowhere"}},
    "/consumed": {"run_id": 0, "step": 0, "version": 1, "weights_checksum": ""},
    "/evaluate": {"run_id": 0, "step": 0, "mode": "greedy"},
    "/background": {"run_id": 0, "step": 0, "begins": False, "waits": False},
    "/committed": {"run_id": 0, "step": 0, "path": "/nowhere"},
    "/finish": {"run_id": 0, "steps": 0},
}
"""A body of the right types for each route."""


class Attack(NamedTuple):
    """One request. `path` holds the query, if any."""

    method: str
    path: str
    body: bytes


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


_NUMBERS = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([10_000_000, 2**31 - 1, 2**31, 2**63, -(2**63), 10**4000]),
    st.sampled_from([1.5, 1.0, 1e308, -0.0]),
)
_TEXTS = st.one_of(
    st.sampled_from(["", "/etc/passwd", "../x", "/", "\0", "\n", "é" * 3000, "greedy", "x" * 5000]), st.text(max_size=8)
)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_RAW = st.sampled_from(
    [
        b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"a":', nested(900), nested(100_000), b"9" * 5000, b"[1e999]",
        b'"\\ud800"',
    ]
)  # fmt: skip


def _dumped(value: Any) -> bytes:
    """JSON with integers of any size, which orjson does not write."""
    if isinstance(value, dict):
        return b"{" + b",".join(_dumped(str(key)) + b":" + _dumped(item) for key, item in value.items()) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(_dumped(item) for item in value) + b"]"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        sign, digits = ("-", -value) if value < 0 else ("", value)
        return (sign + "1" + "0" * 4000 if digits == 10**4000 else str(value)).encode()
    return orjson.dumps(value)


@st.composite
def _changed(draw: st.DrawFn, path: str, folder: str) -> bytes:
    """A valid body with a few fields replaced, removed or added."""
    body: dict[str, Any] = {**VALID[path]}
    if path == "/committed":
        body["path"] = f"{folder}/recover/step-000001"
    inner: dict[str, Any] = body
    if path == "/publish":
        body["update"] = inner = {**body["update"], "path": f"{folder}/weights/v000001"}
        if draw(st.booleans()):
            body["run_id"] = draw(st.integers(-1, 2))
    names = st.sampled_from([*inner, "run_id", "colour", "buckets", "replicas", "kind", "master_port"])
    for name in draw(st.lists(names, min_size=1, max_size=3)):
        match draw(st.sampled_from(["small", "any", "any", "remove"])):
            case "small":
                inner[name] = draw(st.integers(-1, 7))
            case "any":
                inner[name] = draw(st.just([[WEIGHT]]) | _VALUES)
            case _:
                inner.pop(name, None)
    return _dumped(body)


def attacks(folder: str) -> st.SearchStrategy[Attack]:
    """Requests to every route of a controller whose run folder is `folder`. Some of them are valid in some state."""
    path = st.sampled_from(sorted(VALID))
    changed = path.flatmap(lambda item: st.builds(Attack, st.just("POST"), st.just(item), _changed(item, folder)))
    raw = st.builds(Attack, st.just("POST"), path, _RAW)
    version = st.sampled_from(["", "1", "-1", "1.5", "%C2%B2", "%D9%A1", "9" * 5000, "0x1", "%00"])
    query = st.builds(lambda text: Attack("GET", f"/replicas?version={text}", b""), version)
    return st.one_of(changed, changed, raw, query)
