"""Validates the fields of HTTP bodies: names, types and ranges. Raises RequestError for anything else."""

import math
import random
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from areal.api.errors import RequestError
from areal.api.images import VisionLayout
from areal.inference.scheduler import ALL_TOKENS, SamplingParams
from areal.system.http_guard import read_body

# ----------------------------------------------------------------------------------------------------------------------
# JSON bodies of the HTTP requests and answers of the native server.

TOO_LARGE = "request.too_large"
MAX_CONTROL_BYTES = 1 << 24
"""Maximum size of a control request. A bucket of a weight update names its weights, about 100 bytes each."""
_JSON_HEADERS = {"Content-Type": "application/json"}


async def read_json(request: web.Request, max_bytes: int = MAX_CONTROL_BYTES) -> Any:
    """The parsed body; an empty body is an empty object. RequestError unless it is JSON of at most `max_bytes`."""
    length = request.content_length or 0
    data = b"" if length > max_bytes else await read_body(request)
    if max(length, len(data)) > max_bytes:
        raise RequestError(f"the body is longer than {max_bytes} bytes", code=TOO_LARGE)
    try:
        return orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}", code="request.not_json") from error


def ok() -> web.Response:
    return json_response({"success": True})


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, headers=_JSON_HEADERS)


def error_body(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message}, "code": code}


def error_response(status: int, message: str, code: str) -> web.Response:
    return json_response(error_body(message, code), status)


_MAX_STOP_STRINGS = 64
_MAX_STOP_LENGTH = 256
"""Characters of a stop string. Each new token is compared with this length of text."""
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6
_MIN_REPETITION, _MAX_REPETITION = 1e-3, 1e3
"""Limits within which logits of up to 1e29 stay finite in float32, in which the sampler computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of the served model."""

    vocab_size: int
    context_length: int
    """Maximum tokens of prompt and answer together."""
    default_stop_ids: frozenset[int]
    """End tokens of the model."""
    has_tokenizer: bool
    layout: VisionLayout | None = None
    """The image layout of a model that takes images."""


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="request.invalid_field")


def check_fields(body: Any, known: frozenset[str] | set[str], where: str = "the request") -> Mapping[str, Any]:
    """The body, which may only have known fields."""
    if not isinstance(body, dict):
        raise _invalid(f"{where} must be a JSON object")
    unknown = sorted(set(body) - known)
    if unknown:
        raise _invalid(f"{where} has unknown fields: {shown(unknown)}; allowed: {', '.join(sorted(known))}")
    return body


def text_field(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A string field, required unless it has a default."""
    value = body.get(name, default)
    if not isinstance(value, str):
        raise _invalid(f"{name} must be a string, got {shown(value)}")
    return value


def bool_field(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise _invalid(f"{name} must be true or false, got {shown(value)}")
    return value


def int_field(body: Mapping[str, Any], name: str, default: int | None, low: int, high: int | None = None) -> int:
    """An integer in [low, high], required unless it has a default."""
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise _invalid(f"{name} must be an integer {limits}, got {shown(value)}")
    return value


def _float_field(
    body: Mapping[str, Any], name: str, default: float, is_valid: Callable[[float], bool], rule: str
) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not is_valid(value):
        raise _invalid(f"{name} must be a number {rule}, got {shown(value)}")
    return float(value)


def token_ids_field(body: Mapping[str, Any], name: str, vocab_size: int, *, max_count: int) -> list[int]:
    """A list of at most `max_count` token ids, each within the vocabulary."""
    ids = body.get(name)
    if isinstance(ids, list) and len(ids) > max_count:  # before the ids are read, which takes long for many
        message = f"{name} has {len(ids)} token ids, at most {max_count} are possible with this model"
        raise RequestError(message, code="request.too_long")
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise _invalid(f"{name} must be a list of integers")
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise _invalid(f"{name} has {wrong}, which is outside the vocabulary (0 to {vocab_size - 1})")
    return ids


def parse_sampling_params(body: Mapping[str, Any], limits: RequestLimits) -> SamplingParams:
    """Validated sampling settings, with the defaults of SGLang."""
    max_new_tokens = int_field(body, "max_new_tokens", 128, 1)
    min_new_tokens = int_field(body, "min_new_tokens", 0, 0)
    if min_new_tokens > max_new_tokens:
        raise _invalid(f"min_new_tokens ({min_new_tokens}) exceeds max_new_tokens ({max_new_tokens})")
    top_k = int_field(body, "top_k", ALL_TOKENS, ALL_TOKENS)
    if top_k == 0:
        raise _invalid("top_k must be -1 (all tokens) or at least 1, got 0")
    vocab_size = limits.vocab_size
    given_ids = body.get("stop_token_ids")
    given_ids = token_ids_field(body, "stop_token_ids", vocab_size, max_count=vocab_size) if given_ids else []
    ignore_eos = bool_field(body, "ignore_eos", False)
    stop_ids = frozenset() if ignore_eos else limits.default_stop_ids.union(given_ids)
    if min_new_tokens and len(stop_ids) == vocab_size:
        raise _invalid(f"stop_token_ids has every token, which leaves none for min_new_tokens={min_new_tokens}")
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=_float_field(
            body,
            "temperature",
            1.0,
            lambda x: x == 0 or _MIN_TEMPERATURE <= x <= _MAX_TEMPERATURE,
            f"from {_MIN_TEMPERATURE:g} to {_MAX_TEMPERATURE:g}, or 0 for the most likely token",
        ),
        top_p=_float_field(body, "top_p", 1.0, lambda x: 0 < x <= 1, "above 0 and up to 1"),
        top_k=ALL_TOKENS if top_k >= vocab_size else top_k,
        frequency_penalty=_float_field(body, "frequency_penalty", 0.0, lambda x: -2 <= x <= 2, "from -2 to 2"),
        repetition_penalty=_float_field(
            body,
            "repetition_penalty",
            1.0,
            lambda x: _MIN_REPETITION <= x <= _MAX_REPETITION,
            f"from {_MIN_REPETITION:g} to {_MAX_REPETITION:g}",
        ),
        stop=_stop_strings(body.get("stop"), limits),
        stop_token_ids=stop_ids,
    )


def parse_stream_interval(sampling: Mapping[str, Any], is_streaming: bool) -> int:
    """Tokens per event of a stream (default 1); 0 without streaming."""
    if "stream_interval" not in sampling:
        return 1 if is_streaming else 0
    interval = int_field(sampling, "stream_interval", None, 1)
    if not is_streaming:
        raise _invalid(f"stream_interval={interval} needs a stream: set stream to true, or remove it")
    return interval


def _stop_strings(value: Any, limits: RequestLimits) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or any(not isinstance(string, str) or not string for string in strings):
        raise _invalid(f"stop must be a list of non-empty strings, got {shown(value)}")
    if len(strings) > _MAX_STOP_STRINGS:
        raise _invalid(f"stop has {len(strings)} strings; at most {_MAX_STOP_STRINGS} are allowed")
    if longest := next((string for string in strings if len(string) > _MAX_STOP_LENGTH), ""):
        message = f"stop has a string of {len(longest)} characters; at most {_MAX_STOP_LENGTH} are allowed"
        raise _invalid(message)
    if strings and not limits.has_tokenizer:
        message = "stop strings need a tokenizer, but the folder of the model has none: use stop_token_ids"
        raise RequestError(message, code="request.no_tokenizer")
    return tuple(strings)


def seed_source(base: int) -> Callable[[], int]:
    """A source of seeds for requests without one, reproducible in the order of the requests."""
    random_numbers = random.Random(base)
    return lambda: random_numbers.getrandbits(63)


def shown(value: Any) -> str:
    """`value` in at most about 60 characters, in constant time; it may be deeply nested."""
    text = reprlib.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
