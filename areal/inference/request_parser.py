"""Owns what a request may say: the fields of the HTTP bodies, their types and ranges. RequestError for all else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from areal.api.errors import RequestError
from areal.inference.sequence import ALL_TOKENS, SamplingParams, Sequence

_GENERATE_FIELDS = frozenset(
    {"rid", "input_ids", "sampling_params", "return_logprob", "return_text", "stream", "group_id"}
)
_MAX_SEED = 2**63 - 1
_MAX_STOP_STRINGS = 64
_MAX_KNOWN_PARAMS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What the served model can take."""

    vocab_size: int
    context_length: int
    """Most tokens of prompt and answer together."""
    default_stop_ids: frozenset[int]
    """End tokens of the model."""
    has_tokenizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A valid /generate body."""

    sequence: Sequence
    with_logprobs: bool
    with_text: bool
    """Asked for, since decoding costs more than all else a short request does."""

    @property
    def is_streaming(self) -> bool:
        return self.sequence.stream_interval > 0


def check_fields(body: Any, known: frozenset[str] | set[str], where: str = "the request") -> Mapping[str, Any]:
    """The body as a mapping that has no other fields than the known ones."""
    if not isinstance(body, dict):
        raise RequestError(f"{where} must be a JSON object")
    unknown = sorted(set(body) - known)
    if unknown:
        raise RequestError(f"{where} has unknown fields: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return body


def text_field(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A string field; without a default it must be there."""
    value = body.get(name, default)
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, got {_shown(value)}")
    return value


def bool_field(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {_shown(value)}")
    return value


def int_field(body: Mapping[str, Any], name: str, default: int | None, low: int, high: int | None = None) -> int:
    """A whole number within [low, high]; without a default it must be there."""
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be a whole number, {limits}, got {_shown(value)}")
    return value


def _float_field(
    body: Mapping[str, Any], name: str, default: float, is_valid: Callable[[float], bool], rule: str
) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not is_valid(value):
        raise RequestError(f"{name} must be a number {rule}, got {_shown(value)}")
    return float(value)


class GenerateParser:
    """Turns /generate bodies into sequences."""

    def __init__(self, limits: RequestLimits, draw_seed: Callable[[], int]) -> None:
        self._limits = limits
        self._draw_seed = draw_seed
        self._known_params: dict[bytes, SamplingParams] = {}

    def parse(self, body: Any, request_id: str) -> GenerateCall:
        """A valid call, or RequestError. `request_id` is for requests that bring none."""
        limits = self._limits
        body = check_fields(body, _GENERATE_FIELDS)
        input_ids = token_ids_field(body, "input_ids", limits.vocab_size)
        if not input_ids:
            raise RequestError("input_ids must hold at least one token")
        sampling = dict(check_fields(body.get("sampling_params") or {}, _SAMPLING_FIELDS, "sampling_params"))
        is_streaming = bool_field(body, "stream", False)
        stream_interval = _stream_interval(sampling, is_streaming)
        seed, num_prior = self._own_fields(sampling, len(input_ids))
        params = self._params(sampling)
        num_prompt, context = len(input_ids), limits.context_length
        if num_prompt >= context:
            raise RequestError(
                f"the prompt has {num_prompt} tokens and leaves no room for an answer: the context length is {context}"
            )
        if num_prompt + params.max_new_tokens > context:
            raise RequestError(
                f"prompt ({num_prompt} tokens) and max_new_tokens ({params.max_new_tokens}) exceed the context length "
                f"of {context}: ask for at most {context - num_prompt} new tokens"
            )
        with_text = bool_field(body, "return_text", False)
        if with_text and (is_streaming or not limits.has_tokenizer):
            raise RequestError("return_text needs a tokenizer in the model's folder, and does not go with stream")
        sequence = Sequence(
            request_id=text_field(body, "rid", request_id) or request_id,
            token_ids=input_ids,
            num_prompt=num_prompt,
            params=params,
            seed=seed,
            num_prior_output=num_prior,
            group_id=text_field(body, "group_id", ""),
            stream_interval=stream_interval,
        )
        return GenerateCall(
            sequence=sequence,
            with_logprobs=bool_field(body, "return_logprob", False),
            with_text=with_text,
        )

    def _own_fields(self, sampling: dict[str, Any], num_prompt: int) -> tuple[int, int]:
        """Take out what differs from request to request: the seed and the number of prior output tokens."""
        seed = sampling.pop("sampling_seed", None)
        if seed is None:
            seed = self._draw_seed()
        else:
            seed = int_field({"sampling_seed": seed}, "sampling_seed", None, 0, _MAX_SEED)
        num_prior = int_field(sampling, "num_prior_output_tokens", 0, 0, num_prompt)
        sampling.pop("num_prior_output_tokens", None)
        return seed, num_prior

    def _params(self, sampling: dict[str, Any]) -> SamplingParams:
        """Parse the settings, or take those of an equal earlier request: a run has few different ones."""
        key = orjson.dumps(sampling)
        params = self._known_params.get(key)
        if params is None:
            params = parse_sampling_params(sampling, self._limits)
            if len(self._known_params) >= _MAX_KNOWN_PARAMS:
                self._known_params.clear()
            self._known_params[key] = params
        return params


def token_ids_field(body: Mapping[str, Any], name: str, vocab_size: int) -> list[int]:
    """A list of token ids, each within the vocabulary."""
    ids = body.get(name)
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise RequestError(f"{name} must be a list of whole numbers")
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise RequestError(f"{name} holds {wrong}, outside of the vocabulary (0 to {vocab_size - 1})")
    return ids


_SAMPLING_FIELDS = frozenset(
    {
        "max_new_tokens",
        "min_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "stop_token_ids",
        "frequency_penalty",
        "repetition_penalty",
        "ignore_eos",
        "sampling_seed",
        "num_prior_output_tokens",
        "stream_interval",
    }
)


def parse_sampling_params(body: Mapping[str, Any], limits: RequestLimits) -> SamplingParams:
    """Validated sampling settings; what is not said has SGLang's default."""
    max_new_tokens = int_field(body, "max_new_tokens", 128, 1)
    min_new_tokens = int_field(body, "min_new_tokens", 0, 0)
    if min_new_tokens > max_new_tokens:
        raise RequestError(f"min_new_tokens ({min_new_tokens}) exceeds max_new_tokens ({max_new_tokens})")
    top_k = int_field(body, "top_k", ALL_TOKENS, ALL_TOKENS)
    if top_k == 0:
        raise RequestError("top_k must be -1 (all tokens) or at least 1, got 0")
    stop_ids = token_ids_field(body, "stop_token_ids", limits.vocab_size) if body.get("stop_token_ids") else []
    ignore_eos = bool_field(body, "ignore_eos", False)
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=_float_field(body, "temperature", 1.0, lambda x: x >= 0, "of at least 0"),
        top_p=_float_field(body, "top_p", 1.0, lambda x: 0 < x <= 1, "above 0 and up to 1"),
        top_k=ALL_TOKENS if top_k >= limits.vocab_size else top_k,
        frequency_penalty=_float_field(body, "frequency_penalty", 0.0, lambda x: -2 <= x <= 2, "from -2 to 2"),
        repetition_penalty=_float_field(body, "repetition_penalty", 1.0, lambda x: x > 0, "above 0"),
        stop=_stop_strings(body.get("stop"), limits),
        stop_token_ids=frozenset() if ignore_eos else limits.default_stop_ids.union(stop_ids),
    )


def _stream_interval(sampling: dict[str, Any], is_streaming: bool) -> int:
    """Take out the tokens per event of a stream, one unless said; 0 for an answer in one piece."""
    if "stream_interval" not in sampling:
        return 1 if is_streaming else 0
    interval = int_field(sampling, "stream_interval", None, 1)
    del sampling["stream_interval"]
    if not is_streaming:
        raise RequestError(f"stream_interval={interval} is for streams: set stream to true, or leave it out")
    return interval


def _stop_strings(value: Any, limits: RequestLimits) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or any(not isinstance(one, str) or not one for one in strings):
        raise RequestError(f"stop must be a list of non-empty strings, got {_shown(value)}")
    if len(strings) > _MAX_STOP_STRINGS:
        raise RequestError(f"stop holds {len(strings)} strings; at most {_MAX_STOP_STRINGS} are allowed")
    if strings and not limits.has_tokenizer:
        raise RequestError("stop strings need a tokenizer, and the model's folder has none: use stop_token_ids")
    return tuple(strings)


def seed_source(base: int) -> Callable[[], int]:
    """Draws seeds for requests without one, reproducible in order of arrival."""
    random_numbers = random.Random(base)
    return lambda: random_numbers.getrandbits(63)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
