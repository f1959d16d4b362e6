"""`/generate` and `/generate_group` of the native server: from the tokens of sequences to HTTP answers.

A handler waits until the engine thread delivers the end of its sequence or, in a stream, new tokens. aiohttp cancels
the handler of a disconnected client, which aborts its sequence.
"""

import asyncio
import base64
import binascii
import hashlib
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import orjson
from aiohttp import web

from areal.api.data import PromptScoring
from areal.api.errors import InputError, RequestError, ServerUnavailable
from areal.api.images import ImageRef, VisionLayout, expanded
from areal.data.image_files import decode_png, grid_of
from areal.inference.adapters import LoadedAdapters
from areal.inference.engine import Detokenizer, Engine
from areal.inference.request_parser import (
    MAX_SAMPLES,
    GenerateBody,
    GenerateSettings,
    GroupBody,
    Prompt,
    RequestLimits,
    Sample,
    error_body,
    invalid,
    json_response,
    read_json,
    shown,
)
from areal.inference.scheduler import ALL_TOKENS, UNLIMITED, FinishReason, PlacedImage, SamplingParams, Sequence
from areal.inference.vision import placed_images
from areal.observe.spans import add_track

# ----------------------------------------------------------------------------------------------------------------------
# The field `image_data` of a request: PNG files as data URLs, in their final size.

_PREFIX = "data:image/png;base64,"


class ImageReader:
    """Decodes the images of requests, each of them once while a request needs it."""

    def __init__(self, layout: VisionLayout | None, context_length: int) -> None:
        """`layout`: None = the model takes no images."""
        self._layout = layout
        self._context_length = context_length
        self._decoded: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()

    @property
    def max_bytes(self) -> int:
        """Largest size of all images of a request in its body: base64 of PNG files that cannot be compressed."""
        if self._layout is None:
            return 0
        return self._context_length * (self._layout.patch_size * self._layout.merge_size) ** 2 * 5

    async def read(self, urls: list[str]) -> list[tuple[ImageRef, np.ndarray]]:
        """The images with their colours, uint8 [height, width, 3]. RequestError for what is none."""
        if not urls:
            return []
        if self._layout is None:
            raise RequestError("the served model takes no images: send no image_data", code="request.no_images")
        try:
            return await self._read(urls, self._layout)
        except InputError as error:
            raise RequestError(str(error), code=error.code) from error

    async def _read(self, urls: list[str], layout: VisionLayout) -> list[tuple[ImageRef, np.ndarray]]:
        files = [_file_of(url) for url in urls]
        images = [ImageRef(hashlib.sha256(png).hexdigest(), grid_of(png, layout)) for png in files]
        if (total := sum(map(layout.tokens_of, images))) >= self._context_length:
            text = f"the images take {total} tokens, and prompt and answer at most {self._context_length}"
            raise RequestError(text, code="request.too_long")
        result: list[tuple[ImageRef, np.ndarray]] = []
        for image, png in zip(images, files, strict=True):
            colours = self._decoded.get(image.sha256)
            if colours is None:
                colours = self._decoded[image.sha256] = await asyncio.to_thread(decode_png, png, layout)
            result.append((image, colours))
        return result


def _file_of(url: str) -> bytes:
    if not url.startswith(_PREFIX):
        raise RequestError(f"an item of image_data does not start with {_PREFIX}", code="request.invalid_field")
    try:
        return base64.b64decode(url[len(_PREFIX) :], validate=True)
    except binascii.Error as error:
        raise RequestError(f"an item of image_data is not base64: {error}", code="request.invalid_field") from error


# ----------------------------------------------------------------------------------------------------------------------
# From the body of `/generate` or `/generate_group` to the sequences of the engine.

_FIXED_BODY_BYTES = 1 << 19
"""Maximum size of a body without its token ids: more than all stop strings take as JSON escapes."""
_BYTES_PER_ID = 24
_SAMPLE_BYTES = 256
_PROMPTS_BYTES = 1 << 19
"""Maximum size of the prompts of a group, beyond that of one."""
_MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One sample of a valid body."""

    sequence: Sequence
    adapter: str
    with_logprobs: bool
    with_text: bool

    def has_event(self, start: int) -> bool:
        """Whether the event of a stream with the tokens from `start` on is due."""
        sequence = self.sequence
        interval = sequence.stream_interval
        return sequence.finish is not None or len(sequence.logprobs) // interval > start // interval


class BodyParser:
    """Checks bodies against the served model and makes a `Call` for each sample. RequestError for an invalid body."""

    def __init__(
        self, limits: RequestLimits, adapters: LoadedAdapters, draw_seed: Callable[[], int], *, records_experts: bool
    ) -> None:
        """`draw_seed`: gives the seed of a sample without one. `records_experts`: the engine knows the chosen experts
        of tokens."""
        self._limits, self._adapters = limits, adapters
        self._draw_seed = draw_seed
        self._records_experts = records_experts
        self._images = ImageReader(limits.layout, limits.context_length)
        ids_bytes = _BYTES_PER_ID * (limits.context_length + limits.vocab_size)
        self.max_bytes = _FIXED_BODY_BYTES + ids_bytes + self._images.max_bytes
        """Maximum size of the body of /generate."""
        self.max_group_bytes = self.max_bytes + MAX_SAMPLES * _SAMPLE_BYTES + _PROMPTS_BYTES

    async def calls(self, body: GenerateSettings, prompts: list[Prompt]) -> list[Call]:
        """The calls of a body, in the order of the samples."""
        limits, common = self._limits, self._params(body)
        if sum(len(prompt.samples) for prompt in prompts) > MAX_SAMPLES:
            raise invalid(f"the prompts must have at most {MAX_SAMPLES} samples together")
        if body.image_data and len(prompts) > 1:
            raise invalid("image_data is of one prompt, and there are several")
        if body.return_text and (body.stream or not limits.has_tokenizer):
            message = "return_text needs a tokenizer in the folder of the model, and excludes stream"
            raise RequestError(message, code="request.no_tokenizer")
        if body.return_routed_experts and not self._records_experts:
            raise invalid("return_routed_experts needs a server of a run with actor.router_replay: true")
        images = await self._images.read(body.image_data)
        adapter = self._adapters.number_of(body.lora_path)
        calls: list[Call] = []
        for prompt in prompts:
            params = common
            input_ids, placed = self._prompt_ids(prompt, images, params)
            if max(body.routed_experts_start_len, params.num_prior_output_tokens) > len(input_ids):
                names = "routed_experts_start_len and num_prior_output_tokens"
                raise invalid(f"{names} must be at most {len(input_ids)}, the tokens of the prompt")
            scoring = self._scoring(body, input_ids)
            if params.max_new_tokens == UNLIMITED:
                params = replace(params, max_new_tokens=limits.context_length - len(input_ids))
            for sample in prompt.samples:
                seed = params.sampling_seed if sample.sampling_seed is None else sample.sampling_seed
                sequence = Sequence(
                    experts_start=body.routed_experts_start_len if body.return_routed_experts else None,
                    request_id=sample.rid,
                    token_ids=input_ids.copy(),
                    num_prompt=len(input_ids),
                    images=placed,
                    scoring=scoring,
                    params=params,
                    seed=self._draw_seed() if seed is None else seed,
                    num_prior_output=params.num_prior_output_tokens,
                    group_id=prompt.group_id,
                    adapter=adapter,
                    stream_interval=(params.stream_interval or 1) if body.stream else 0,
                )
                flags = {"with_logprobs": body.return_logprob, "with_text": body.return_text}
                calls.append(Call(sequence=sequence, adapter=body.lora_path, **flags))
        return calls

    def _scoring(self, body: GenerateSettings, input_ids: list[int]) -> PromptScoring | None:
        first, targets = body.logprob_start_len, body.prompt_targets
        if first < 0:
            if body.top_logprobs_num or body.prompt_draws or targets:
                raise invalid("top_logprobs_num, prompt_draws and prompt_targets need logprob_start_len")
            return None
        if first > len(input_ids) or len(targets) >= len(input_ids):
            message = f"logprob_start_len={first} and {len(targets)} rows of prompt_targets exceed the prompt"
            raise invalid(f"{message} of {len(input_ids)} tokens")
        for row in targets:
            self._check_ids("prompt_targets", [token for token in row if token != -1])
        top_k, num_draws = body.top_logprobs_num, body.prompt_draws
        return PromptScoring(first=max(first, 1), top_k=top_k, num_draws=num_draws, targets=targets)

    def _params(self, body: GenerateSettings) -> SamplingParams:
        """The sampling parameters with the end tokens of the model."""
        params, limits = body.sampling_params, self._limits
        if params.min_new_tokens > params.max_new_tokens:
            raise invalid(f"min_new_tokens ({params.min_new_tokens}) exceeds max_new_tokens ({params.max_new_tokens})")
        if 0 < params.temperature < _MIN_TEMPERATURE:
            raise invalid(f"temperature must be 0 or at least {_MIN_TEMPERATURE:g}, got {params.temperature:g}")
        if params.top_k == 0:
            raise invalid("top_k must be -1 (all tokens) or at least 1, got 0")
        if params.stream_interval is not None and not body.stream:
            raise invalid(f"stream_interval={params.stream_interval} needs a stream: set stream to true, or remove it")
        if params.stop and not limits.has_tokenizer:
            message = "stop strings need a tokenizer, but the folder of the model has none: use stop_token_ids"
            raise RequestError(message, code="request.no_tokenizer")
        self._check_ids("stop_token_ids", params.stop_token_ids)
        defaults = frozenset[int]() if params.only_stops else limits.default_stop_ids
        stop_ids = frozenset[int]() if params.ignore_eos else defaults | params.stop_token_ids
        if params.min_new_tokens and len(stop_ids) == limits.vocab_size:
            raise invalid(f"stop_token_ids has every token: none is left for min_new_tokens={params.min_new_tokens}")
        top_k = ALL_TOKENS if params.top_k >= limits.vocab_size else params.top_k
        if (stop_ids, top_k) == (params.stop_token_ids, params.top_k):
            return params
        return replace(params, stop_token_ids=stop_ids, top_k=top_k)

    def _prompt_ids(
        self, prompt: Prompt, images: list[tuple[ImageRef, np.ndarray]], params: SamplingParams
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """The expanded ids of a prompt, and where its images are in them."""
        input_ids, context = prompt.input_ids, self._limits.context_length
        if not input_ids:
            raise invalid("input_ids must have at least one token")
        if len(input_ids) >= context:
            message = f"input_ids has {len(input_ids)} token ids, at most {context - 1} are possible with this model"
            raise RequestError(message, code="request.too_long")
        self._check_ids("input_ids", input_ids)
        placed: tuple[PlacedImage, ...] = ()
        if self._limits.layout is not None:
            input_ids, placed = _with_images(input_ids, images, self._limits.layout)
        if params.max_new_tokens != UNLIMITED and len(input_ids) + params.max_new_tokens > context:
            raise RequestError(
                f"prompt ({len(input_ids)} tokens) and max_new_tokens ({params.max_new_tokens}) exceed the context "
                f"length of {context}: request at most {context - len(input_ids)} new tokens",
                code="request.too_long",
            )
        return input_ids, placed

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self._limits.vocab_size):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise invalid(f"{name} has {wrong}, which is outside the vocabulary (0 to {self._limits.vocab_size - 1})")


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


_EVENT_STREAM = "text/event-stream"


class GenerateRoute:
    """Answers generation requests. The engine thread calls `deliver`."""

    def __init__(self, draw_seed: Callable[[], int]) -> None:
        self._draw_seed = draw_seed
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[Sequence, asyncio.Future[None]] = {}
        self._by_id: dict[str, Sequence] = {}
        self._id_prefix = uuid.uuid4().hex[:12]
        self._num_requests = 0
        self._failure: BaseException | None = None

    def attach(
        self, engine: Engine, limits: RequestLimits, adapters: LoadedAdapters, detokenizer: Detokenizer | None
    ) -> None:
        """Set the engine that answers. Called once, before the first request."""
        self._engine, self._adapters = engine, adapters
        self.parser = BodyParser(limits, adapters, self._draw_seed, records_experts=engine.runner.records_experts)
        self._detokenizer = detokenizer

    def deliver(self, finished: list[Sequence], progressed: list[Sequence]) -> None:
        """Called in the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._wake, finished, progressed)
        except RuntimeError:
            if not self._loop.is_closed():  # a closed loop has no waiting handlers
                raise

    def _wake(self, finished: list[Sequence], progressed: list[Sequence]) -> None:
        for sequences in (finished, progressed):
            for sequence in sequences:
                waiter = self._waiters.get(sequence)
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)

    def fail_waiting(self, cause: BaseException) -> None:
        """The engine failed: answer 500 to all waiting requests."""
        self._failure = cause
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(None)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The handler of /generate: parses the body, queues a sequence, and answers from its tokens."""
        self._num_requests += 1
        default_id = f"{self._id_prefix}{self._num_requests:012d}"
        body = await read_json(request, GenerateBody, self.parser.max_bytes)
        sample = Sample(rid=body.rid or default_id)
        prompt = Prompt(input_ids=body.input_ids, group_id=body.group_id, samples=[sample])
        [call] = await self.parser.calls(body, [prompt])
        with self._submitted([call.sequence]):
            if call.sequence.stream_interval:
                return await self._stream(request, call)
            await self._change([call])
            return json_response(self._part(call, 0)[0])

    async def answer_group(self, request: web.Request) -> web.StreamResponse:
        """The handler of /generate_group: prompts, each with its samples and group_id.

        One JSON list with the answers in the order of the samples; in a stream, events which are lists of pairs
        (number of the sample, new tokens).
        """
        body = await read_json(request, GroupBody, self.parser.max_group_bytes)
        calls = await self.parser.calls(body, body.prompts)
        with self._submitted([call.sequence for call in calls]):
            if calls[0].sequence.stream_interval:
                return await self._stream_group(request, calls)
            await self._ended(calls)
            return json_response([self._part_or_error(call, 0)[0] for call in calls])

    async def computed(self, settings: GenerateSettings, prompts: list[Prompt]) -> list[Sequence]:
        """The sequences of all samples, without HTTP, once they have ended. ServerUnavailable when one failed."""
        calls = await self.parser.calls(settings, prompts)
        with self._submitted([call.sequence for call in calls]):
            await self._ended(calls)
            for call in calls:
                self._part(call, 0)
        return [call.sequence for call in calls]

    async def _ended(self, calls: list[Call]) -> None:
        for call in calls:  # one after another: each is looked at once, however many deliveries there are
            while call.sequence.finish is None:
                await self._change([call])

    @contextmanager
    def _submitted(self, sequences: list[Sequence]) -> Iterator[None]:
        """Let the engine compute sequences; those that have not ended when the block ends are aborted."""
        for number, sequence in enumerate(sequences):
            if sequence.request_id in self._by_id:
                for earlier in sequences[:number]:
                    del self._by_id[earlier.request_id]
                message = f"rid {shown(sequence.request_id)} is in use by a running request: use a unique rid"
                raise RequestError(message, code="request.duplicate_id")
            self._by_id[sequence.request_id] = sequence
        submitted_ns = time.perf_counter_ns()
        try:
            for sequence in sequences:
                self._adapters.use(sequence.adapter, +1)
                self._engine.submit(sequence)
            yield
        finally:
            ended_ns = time.perf_counter_ns()
            for sequence in sequences:
                del self._by_id[sequence.request_id]
                self._waiters.pop(sequence, None)
                if sequence.finish is None:
                    self._engine.abort(sequence, "the client disconnected")
                self._adapters.use(sequence.adapter, -1)
                parts = [("queued", submitted_ns, sequence.started_ns or ended_ns)]
                parts += [("run", sequence.started_ns, ended_ns)] if sequence.started_ns else []
                sizes = {
                    "prompt": sequence.num_prompt,
                    "cached": sequence.num_cached,
                    "tokens": len(sequence.logprobs),
                    "scored": len(sequence.scores.logprobs),
                }
                add_track("request", sequence.request_id, submitted_ns, ended_ns, parts, sizes)

    async def _change(self, calls: list[Call]) -> None:
        """Wait until the engine delivers one of these sequences; ServerUnavailable when it has failed.

        The caller has looked at them since its last await, so that no delivery is missed.
        """
        waiter: asyncio.Future[None] = self._loop.create_future()
        for call in calls:
            self._waiters[call.sequence] = waiter
        if self._failure is None:
            await waiter
        if self._failure is not None:
            raise ServerUnavailable(f"the engine failed: {self._failure}", code="request.engine_failed")

    async def _stream(self, request: web.Request, call: Call) -> web.StreamResponse:
        """One event per `stream_interval` tokens, with all new tokens. A short answer is one event and one write."""
        response: web.StreamResponse | None = None
        start = 0
        while True:
            try:
                while not call.has_event(start):
                    await self._change([call])
                part, start = self._part(call, start)
            except ServerUnavailable as error:
                if response is None:
                    raise
                part = error_body(str(error), error.code)  # the last event, since the status is already sent
            event = b"data: " + orjson.dumps(part) + b"\n\n"
            is_last = "error" in part or part["meta_info"]["finish_reason"] is not None
            if is_last:
                event += b"data: [DONE]\n\n"
                if response is None:
                    return web.Response(body=event, content_type=_EVENT_STREAM)
            if response is None:
                response = web.StreamResponse(headers={"Content-Type": _EVENT_STREAM})
                await response.prepare(request)
            await response.write(event)
            if is_last:
                await response.write_eof()
                return response

    async def _stream_group(self, request: web.Request, calls: list[Call]) -> web.StreamResponse:
        """One event for all samples that have `stream_interval` new tokens or have ended."""
        response = web.StreamResponse(headers={"Content-Type": _EVENT_STREAM})
        await response.prepare(request)
        starts = dict.fromkeys(range(len(calls)), 0)
        while starts:
            parts: list[tuple[int, dict[str, Any]]] = []
            for number, start in list(starts.items()):
                if calls[number].has_event(start):
                    part, starts[number] = self._part_or_error(calls[number], start)
                    parts.append((number, part))
                    if "error" in part or part["meta_info"]["finish_reason"] is not None:
                        del starts[number]
            if not parts:
                try:
                    await self._change([calls[number] for number in starts])
                    continue
                except ServerUnavailable as error:
                    parts = [(number, error_body(str(error), error.code)) for number in starts]
                    starts = {}
            await response.write(b"data: " + orjson.dumps(parts) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _part_or_error(self, call: Call, start: int) -> tuple[dict[str, Any], int]:
        try:
            return self._part(call, start)
        except ServerUnavailable as error:
            return error_body(str(error), error.code), start

    def _part(self, call: Call, start: int) -> tuple[dict[str, Any], int]:
        """The tokens of the answer from `start` on as JSON, and the index of their end.

        ServerUnavailable when the engine ended the sequence with an error.
        """
        sequence = call.sequence
        finish = sequence.finish  # read before the tokens: when it is set, they are complete
        if finish is not None and finish.kind == "error":
            raise ServerUnavailable(finish.message, code="request.not_finite")
        end = len(sequence.logprobs)
        token_ids = sequence.token_ids[sequence.num_prompt + start : sequence.num_prompt + end]
        spans = sequence.version_spans(start, end)
        starts = sequence.version_starts
        meta: dict[str, Any] = {
            "id": sequence.request_id,
            "finish_reason": None if finish is None else _finish_json(finish, end),
            "prompt_tokens": sequence.num_prompt,
            "completion_tokens": end,
            "cached_tokens": sequence.num_cached,
            "weight_version": starts[-1][1] if starts else self._engine.version,
            "weight_versions": [{"version": version, "start": low, "end": high} for version, low, high in spans],
        }
        if finish is not None and sequence.scoring is not None and sequence.scores_from >= sequence.num_prompt:
            meta |= _scores_json(sequence)
        if call.adapter:
            meta["lora_path"] = call.adapter
        if finish is not None and sequence.experts_start is not None:
            meta["routed_experts"] = base64.b64encode(b"".join(sequence.experts)).decode()
        if call.with_logprobs:
            logprobs = sequence.logprobs[start:end]
            meta["output_token_logprobs"] = [
                (logprob, token, None) for logprob, token in zip(logprobs, token_ids, strict=True)
            ]
        part: dict[str, Any] = {"output_ids": token_ids, "meta_info": meta}
        if call.with_text and self._detokenizer:
            part["text"] = self._detokenizer.decode(token_ids)
        return part, end

    def abort(self, request_id: str) -> None:
        """End a request with its tokens so far. No effect when it has already ended."""
        if (sequence := self._by_id.get(request_id)) is not None:
            self._engine.abort(sequence, "abort_request was called")


def _scores_json(sequence: Sequence) -> dict[str, Any]:
    """The scores of a prompt, as lists of (log-probability, token, null); null for a log-probability that is NaN."""
    scores, ids = sequence.scores, sequence.token_ids
    body: dict[str, Any] = {
        "input_token_logprobs": [(logprob, ids[i], None) for i, logprob in enumerate(scores.logprobs)]
    }
    for name, places in (("top", scores.top), ("draw", scores.draws)):
        if places:
            body[f"input_{name}_logprobs"] = [[(value, token, None) for token, value in place] for place in places]
    return body | ({"input_target_logprobs": scores.targets} if scores.targets else {})


def _finish_json(finish: FinishReason, num_output: int) -> dict[str, Any]:
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": num_output}
    return {"type": finish.kind, "message": finish.message}
