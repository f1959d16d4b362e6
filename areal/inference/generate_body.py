"""From the body of `/generate` or `/generate_group` to the sequences of the engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from areal.api.errors import InputError, RequestError
from areal.api.images import ImageRef, VisionLayout, expanded
from areal.inference.image_reader import ImageReader
from areal.inference.request_parser import (
    RequestLimits,
    bool_field,
    check_fields,
    int_field,
    parse_sampling_params,
    parse_stream_interval,
    text_field,
    token_ids_field,
)
from areal.inference.sequence import PlacedImage, SamplingParams, Sequence
from areal.inference.vision import placed_images

_MAX_SEED = 2**63 - 1
_FIXED_BODY_BYTES = 1 << 19
"""Maximum size of a body without its token ids: more than all stop strings take as JSON escapes."""
_BYTES_PER_ID = 24
GENERATE_FIELDS = frozenset(
    {"rid", "input_ids", "image_data", "sampling_params", "return_logprob", "return_text", "stream", "group_id"}
    | {"return_routed_experts", "routed_experts_start_len"}
)
_PROMPT_FIELDS = frozenset({"input_ids", "group_id", "samples"})
GROUP_FIELDS = GENERATE_FIELDS - {"rid"} | {"samples", "prompts"}
_MAX_SAMPLES = 4096
_SAMPLE_BYTES = 256
_MAX_PROMPTS = 256
_PROMPTS_BYTES = 1 << 19
"""Maximum size of the prompts of a group, beyond that of one."""
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams) if field.init) | {
    *("ignore_eos", "sampling_seed", "num_prior_output_tokens", "stream_interval")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One sample of a valid body."""

    sequence: Sequence
    with_logprobs: bool
    with_text: bool
    """Off by default, because decoding takes most of the time of a short request."""

    def has_event(self, start: int) -> bool:
        """Whether the event of a stream with the tokens from `start` on is due."""
        sequence = self.sequence
        interval = sequence.stream_interval
        return sequence.finish is not None or len(sequence.logprobs) // interval > start // interval


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The fields of a body that apply to all its samples."""

    sampling: Mapping[str, Any]
    params: SamplingParams
    seed: int | None
    stream_interval: int
    with_logprobs: bool
    with_text: bool
    with_experts: bool


class BodyParser:
    """Validates bodies and makes a `Call` for each sample. RequestError for an invalid body."""

    def __init__(self, limits: RequestLimits, draw_seed: Callable[[], int], *, records_experts: bool) -> None:
        """`draw_seed`: gives the seed of a sample without one. `records_experts`: the engine knows the chosen experts
        of tokens."""
        self._limits = limits
        self._draw_seed = draw_seed
        self._records_experts = records_experts
        self._images = ImageReader(limits.layout, limits.context_length)
        ids_bytes = _BYTES_PER_ID * (limits.context_length + limits.vocab_size)
        self.max_bytes = _FIXED_BODY_BYTES + ids_bytes + self._images.max_bytes
        """Maximum size of the body of /generate."""
        self.max_group_bytes = self.max_bytes + _MAX_SAMPLES * _SAMPLE_BYTES + _PROMPTS_BYTES

    async def call(self, body: Any, default_id: str) -> Call:
        """The call of a body of /generate. `default_id`: the request id when the body has none."""
        body = check_fields(body, GENERATE_FIELDS)
        images = await self._images.read(body["image_data"]) if "image_data" in body else []
        samples: list[tuple[str, int | None]] = [(text_field(body, "rid", default_id) or default_id, None)]
        return self._calls(self._settings(body), body, images, samples)[0]

    async def calls(self, body: Any) -> list[Call]:
        """The calls of a body of /generate_group, in the order of the samples."""
        body = check_fields(body, GROUP_FIELDS)
        given = [(one, _samples(one)) for one in _prompts(body)]
        if sum(len(samples) for _, samples in given) > _MAX_SAMPLES:
            message = f"the prompts must have at most {_MAX_SAMPLES} samples together"
            raise RequestError(message, code="request.invalid_field")
        images = await self._images.read(body["image_data"]) if "image_data" in body else []
        settings = self._settings(body)
        return [call for one, samples in given for call in self._calls(settings, one, images, samples)]

    def _settings(self, body: Mapping[str, Any]) -> _Settings:
        sampling = check_fields(body.get("sampling_params") or {}, _SAMPLING_FIELDS, "sampling_params")
        is_streaming = bool_field(body, "stream", False)
        with_text = bool_field(body, "return_text", False)
        if with_text and (is_streaming or not self._limits.has_tokenizer):
            message = "return_text needs a tokenizer in the folder of the model, and excludes stream"
            raise RequestError(message, code="request.no_tokenizer")
        with_experts = bool_field(body, "return_routed_experts", False)
        if with_experts and not self._records_experts:
            message = "return_routed_experts needs a server of a run with actor.router_replay: true"
            raise RequestError(message, code="request.invalid_field")
        return _Settings(
            sampling=sampling,
            params=parse_sampling_params(sampling, self._limits),
            seed=_seed(sampling),
            stream_interval=parse_stream_interval(sampling, is_streaming),
            with_logprobs=bool_field(body, "return_logprob", False),
            with_text=with_text,
            with_experts=with_experts,
        )

    def _calls(
        self,
        settings: _Settings,
        body: Mapping[str, Any],
        images: list[tuple[ImageRef, np.ndarray]],
        samples: list[tuple[str, int | None]],
    ) -> list[Call]:
        """One call for each sample (id, seed) of the prompt in `body`."""
        limits, params = self._limits, settings.params
        context = limits.context_length
        input_ids = token_ids_field(body, "input_ids", limits.vocab_size, max_count=context - 1)
        if not input_ids:
            raise RequestError("input_ids must have at least one token", code="request.invalid_field")
        placed: tuple[PlacedImage, ...] = ()
        if limits.layout is not None:
            input_ids, placed = _with_images(input_ids, images, limits.layout)
        num_prompt = len(input_ids)
        if num_prompt + params.max_new_tokens > context:
            raise RequestError(
                f"prompt ({num_prompt} tokens) and max_new_tokens ({params.max_new_tokens}) exceed the context length "
                f"of {context}: request at most {context - num_prompt} new tokens",
                code="request.too_long",
            )
        start = int_field(body, "routed_experts_start_len", 0, 0, num_prompt)
        num_prior_output = int_field(settings.sampling, "num_prior_output_tokens", 0, 0, num_prompt)
        group_id = text_field(body, "group_id", "")
        calls: list[Call] = []
        for request_id, seed in samples:
            seed = settings.seed if seed is None else seed
            sequence = Sequence(
                experts_start=start if settings.with_experts else None,
                request_id=request_id,
                token_ids=input_ids.copy(),
                num_prompt=num_prompt,
                images=placed,
                params=params,
                seed=self._draw_seed() if seed is None else seed,
                num_prior_output=num_prior_output,
                group_id=group_id,
                stream_interval=settings.stream_interval,
            )
            calls.append(Call(sequence=sequence, with_logprobs=settings.with_logprobs, with_text=settings.with_text))
        return calls


def _seed(sampling: Mapping[str, Any]) -> int | None:
    has_seed = sampling.get("sampling_seed") is not None
    return int_field(sampling, "sampling_seed", None, 0, _MAX_SEED) if has_seed else None


def _prompts(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """One body for each prompt of a group."""
    if "prompts" not in body:
        return [body]
    prompts = body["prompts"]
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= _MAX_PROMPTS:
        raise RequestError(f"prompts must be a list of 1 to {_MAX_PROMPTS} objects", code="request.invalid_field")
    if both := body.keys() & (_PROMPT_FIELDS | {"image_data"}):
        message = f"a group has either prompts or {', '.join(sorted(both))}"
        raise RequestError(message, code="request.invalid_field")
    return [{**body, **check_fields(prompt, _PROMPT_FIELDS, "a prompt")} for prompt in prompts]


def _samples(body: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """(id, seed) of each sample of a group."""
    samples = body.get("samples")
    if not isinstance(samples, list) or not 1 <= len(samples) <= _MAX_SAMPLES:
        raise RequestError(f"samples must be a list of 1 to {_MAX_SAMPLES} objects", code="request.invalid_field")
    checked = [check_fields(sample, {"rid", "sampling_seed"}, "a sample") for sample in samples]
    return [(text_field(sample, "rid"), _seed(sample)) for sample in checked]


def _with_images(
    input_ids: list[int], images: list[tuple[ImageRef, np.ndarray]], layout: VisionLayout
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """The expanded ids, and where the images are in them. RequestError for another number of placeholders."""
    if layout.image_token_id not in input_ids and not images:
        return input_ids, ()
    try:
        input_ids = expanded(input_ids, [image for image, _ in images], layout)
    except InputError as error:
        raise RequestError(str(error), code=error.code) from error
    return input_ids, placed_images(input_ids, images, layout)
