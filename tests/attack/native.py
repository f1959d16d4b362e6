"""Malformed and extreme requests to each endpoint of the native server, as hypothesis strategies."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import urlsplit

import orjson
from hypothesis import strategies as st

from tests.run_token import BEARER

HEADERS = {**BEARER, "Content-Type": "application/json"}
FIELDS: dict[str, list[str]] = {
    "/generate": ["rid", "input_ids", "sampling_params", "return_logprob", "return_text", "stream", "group_id"],
    "/generate_group": ["samples", "prompts", "input_ids", "sampling_params", "return_logprob", "stream", "group_id"],
    "/abort_request": ["rid", "abort_all"],
    "/pause_generation": ["mode"],
    "/continue_generation": [],
    "/flush_cache": [],
    "/update_weights_from_disk": ["model_path", "weight_version", "flush_cache", "abort_all_requests", "update_id"],
    "/install_weights": ["weight_version", "mode", "update_id"],
    "/init_weights_update_group": [
        *("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
    ],
    "/update_weights_from_distributed": [
        "names", "dtypes", "shapes", "group_name", "weight_version", "load_format", "update_id",
    ],
    "/destroy_weights_update_group": ["group_name"],
}  # fmt: skip
"""Path -> fields."""
SAMPLING = [
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "sampling_seed", "num_prior_output_tokens", "stream_interval"),
]
_NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, 1, -1, 1e-38, 1e-45, 5e-324, 1e38, 1.7e308, 2**31, 2**53, 49, 50, 240]),
)
_TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(["x" * 5000, "a\0b", "../..", "/dev/zero", "/dev/stdin", "/"]))
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXTS, inner, max_size=3)),
    max_leaves=8,
)
_IDS = st.lists(st.integers(0, 49), min_size=1, max_size=20)
_PARAMS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 6)},
    optional={
        "min_new_tokens": st.integers(0, 6),
        "temperature": st.one_of(_NUMBERS, st.floats(0, 2)),
        "top_p": st.one_of(_NUMBERS, st.floats(0, 1)),
        "top_k": st.one_of(_NUMBERS, st.integers(-1, 60)),
        "frequency_penalty": st.one_of(_NUMBERS, st.floats(-2, 2)),
        "repetition_penalty": st.one_of(_NUMBERS, st.floats(0, 10)),
        "stop_token_ids": st.one_of(_IDS, st.just([*range(50)])),
        "ignore_eos": st.booleans(),
        "sampling_seed": st.integers(0, 2**63 - 1),
        "num_prior_output_tokens": st.integers(0, 3),
        "stream_interval": st.integers(1, 3),
    },
)
_GENERATE = st.fixed_dictionaries(
    {"input_ids": _IDS, "sampling_params": _PARAMS},
    optional={"stream": st.booleans(), "group_id": st.sampled_from(["", "g"]), "return_logprob": st.booleans()},
)
_GROUP = st.fixed_dictionaries(
    {
        "master_address": st.sampled_from(["10.0.0.1", "localhost", "0.0.0.0", "::", "2130706433", "a.example", ""]),
        "master_port": st.integers(1, 65535),
        "rank_offset": st.one_of(_NUMBERS, st.integers(1, 4)),
        "world_size": st.one_of(_NUMBERS, st.integers(2, 4)),
        "group_name": _TEXTS,
        "backend": st.one_of(_TEXTS, st.sampled_from(["gloo", "nccl"])),
    }
)
"""No address is that of a trainer: the server must connect to none."""


def bodies(path: str) -> st.SearchStrategy[bytes]:
    """Bodies of a POST to `path`: JSON objects with the right fields and any values, other JSON, and other bytes."""
    fields = st.dictionaries(st.sampled_from([*FIELDS[path], "unknown"]), _VALUES, max_size=6)
    objects: st.SearchStrategy[Any] = fields
    if path == "/generate":
        wrong = st.dictionaries(st.sampled_from(SAMPLING), _VALUES, max_size=4)
        objects = st.one_of(_GENERATE, fields, st.fixed_dictionaries({"input_ids": _IDS, "sampling_params": wrong}))
    if path == "/generate_group":
        sample = st.dictionaries(st.sampled_from(["rid", "sampling_seed", "unknown"]), _VALUES, max_size=3)
        right = st.fixed_dictionaries({"rid": _TEXTS}, optional={"sampling_seed": st.integers(0, 9)})
        samples = st.one_of(_VALUES, st.lists(st.one_of(right, sample), max_size=4))
        prompt = st.fixed_dictionaries({"input_ids": _IDS, "samples": samples}, optional={"group_id": _TEXTS})
        several = {"sampling_params": _PARAMS, "prompts": st.lists(st.one_of(prompt, _VALUES), max_size=4)}
        objects = st.one_of(fields, st.fixed_dictionaries(several, optional={"stream": st.booleans()}))
    if path == "/init_weights_update_group":
        objects = st.one_of(_GROUP, fields)
    deep = st.integers(1, 1500).map(lambda depth: b"[" * depth + b"]" * depth)
    nested = st.builds(
        lambda name, value: b'{"%s":%s}' % (name.encode(), value), st.sampled_from(FIELDS[path] or ["x"]), deep
    )
    return st.one_of(objects.map(orjson.dumps), _VALUES.map(orjson.dumps), nested, st.binary(max_size=30))


def send(address: str, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of the answer to one request."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.request(method, path, body, HEADERS)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def check_alive(address: str) -> None:
    """AssertionError unless the server generates a short answer with its first weights."""
    assert send(address, "POST", "/continue_generation", b"{}")[0] == 200
    status, answer = send(address, "POST", "/generate", b'{"input_ids":[3,4],"sampling_params":{"max_new_tokens":2}}')
    assert status == 200, answer
    assert orjson.loads(answer)["meta_info"]["weight_version"] == "0"
    assert send(address, "GET", "/health")[0] == 200
