"""`/generate` and `/generate_group` of the native server: from the tokens of sequences to HTTP answers.

A handler waits until the engine thread delivers the end of its sequence or, in a stream, new tokens. aiohttp cancels
the handler of a disconnected client, which aborts its sequence.
"""

import asyncio
import base64
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from aiohttp import web

from areal.api.errors import RequestError, ServerUnavailable
from areal.inference.engine import Detokenizer, Engine
from areal.inference.generate_body import BodyParser, Call
from areal.inference.json_answers import error_body, json_response, read_json
from areal.inference.request_parser import RequestLimits, shown
from areal.inference.sequence import FinishReason, Sequence
from areal.observe.spans import add_track

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

    def attach(self, engine: Engine, limits: RequestLimits, detokenizer: Detokenizer | None) -> None:
        """Set the engine that answers. Called once, before the first request."""
        self._engine = engine
        self.parser = BodyParser(limits, self._draw_seed, records_experts=engine.runner.records_experts)
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
        call = await self.parser.call(await read_json(request, self.parser.max_bytes), default_id)
        with self._submitted([call.sequence]):
            if call.sequence.stream_interval:
                return await self._stream(request, call)
            await self._change([call])
            return json_response(self._part(call, 0)[0])

    async def answer_group(self, request: web.Request) -> web.StreamResponse:
        """The handler of /generate_group: several samples of one prompt, each with a rid and perhaps a sampling_seed;
        or `prompts`, each with its samples and group_id.

        One JSON list with the answers in the order of the samples; in a stream, events which are lists of pairs
        (number of the sample, new tokens).
        """
        calls = await self.parser.calls(await read_json(request, self.parser.max_group_bytes))
        with self._submitted([call.sequence for call in calls]):
            if calls[0].sequence.stream_interval:
                return await self._stream_group(request, calls)
            while missing := [call for call in calls if call.sequence.finish is None]:
                await self._change(missing)
            return json_response([self._part_or_error(call, 0)[0] for call in calls])

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
                self._engine.submit(sequence)
            yield
        finally:
            ended_ns = time.perf_counter_ns()
            for sequence in sequences:
                del self._by_id[sequence.request_id]
                self._waiters.pop(sequence, None)
                if sequence.finish is None:
                    self._engine.abort(sequence, "the client disconnected")
                parts = [("queued", submitted_ns, sequence.started_ns or ended_ns)]
                parts += [("run", sequence.started_ns, ended_ns)] if sequence.started_ns else []
                add_track("request", sequence.request_id, submitted_ns, ended_ns, parts)

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


def _finish_json(finish: FinishReason, num_output: int) -> dict[str, Any]:
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": num_output}
    return {"type": finish.kind, "message": finish.message}
