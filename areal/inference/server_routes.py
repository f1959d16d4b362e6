"""Owns the HTTP interface of the native server: SGLang's dialect, plus the version of every token.

Runs in the asyncio thread. A /generate handler waits until the engine's thread delivers: the end of its sequence or,
when streaming, news of it. A handler whose client has gone is cancelled by aiohttp and aborts its sequence.
"""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from areal.api.errors import ArealError, RequestError, ServerUnavailable
from areal.inference.engine import PAUSE_MODES, Detokenizer, Engine
from areal.inference.json_answers import error_response, json_response, ok, read_json
from areal.inference.request_parser import (
    GenerateCall,
    GenerateParser,
    RequestLimits,
    bool_field,
    check_fields,
    text_field,
)
from areal.inference.sequence import FinishReason, Sequence
from areal.inference.weight_routes import WeightRoutes
from areal.observe.log import get_logger

_LOG = get_logger(__name__)
_MAX_BODY_BYTES = 1 << 28
_EVENT_STREAM = "text/event-stream"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServerApp:
    """Routes of one server. `deliver` is what the engine calls from its thread."""

    def __init__(self, *, model_path: str, draw_seed: Callable[[], int], token: str = "") -> None:
        self.model_path = model_path
        self._draw_seed = draw_seed
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[Sequence, asyncio.Future[None]] = {}
        self._by_id: dict[str, Sequence] = {}
        self._id_prefix = uuid.uuid4().hex[:12]
        self._num_requests = 0

    def attach(self, engine: Engine, limits: RequestLimits, detokenizer: Detokenizer | None) -> None:
        """Name the engine that answers. Called once, before `routes`."""
        self._engine = engine
        self._limits = limits
        self._parser = GenerateParser(limits, self._draw_seed)
        self._detokenizer = detokenizer
        self._weights = WeightRoutes(engine)

    def deliver(self, finished: list[Sequence], progressed: list[Sequence]) -> None:
        """Called in the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._wake, finished, progressed)
        except RuntimeError:
            if not self._loop.is_closed():  # after the end of the loop nobody waits any more
                raise

    def _wake(self, finished: list[Sequence], progressed: list[Sequence]) -> None:
        for sequences in (finished, progressed):
            for sequence in sequences:
                waiter = self._waiters.get(sequence)
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)

    def fail_waiting(self, cause: BaseException) -> None:
        """The engine is dead: answer 500 to all who wait for it."""
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(ServerUnavailable(f"the engine failed: {cause}"))

    def application(self) -> web.Application:
        """The aiohttp application with all routes."""
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        posts: dict[str, Handler] = {
            "/generate": self._generate,
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush_cache,
            **self._weights.posts(),
        }
        gets: dict[str, Handler] = {
            "/health": self._health,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/metrics": self._metrics,
        }
        for path, handler in posts.items():
            application.router.add_post(path, self._guarded(handler))
        for path, handler in gets.items():
            application.router.add_get(path, self._guarded(handler))
        return application

    def _guarded(self, handler: Handler) -> Handler:
        """Check the token and answer errors in one line of JSON."""
        expected = f"Bearer {self._token}".encode()

        async def run(request: web.Request) -> web.StreamResponse:
            if self._token and not hmac.compare_digest(request.headers.get("Authorization", "").encode(), expected):
                return error_response(401, "this server wants `Authorization: Bearer TOKEN`")
            try:
                return await handler(request)
            except RequestError as error:
                return error_response(400, str(error))
            except ArealError as error:
                _LOG.error("%s failed: %s", request.path, error)
                return error_response(500, str(error))

        return run

    # ---- generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self._num_requests += 1
        default_id = f"{self._id_prefix}{self._num_requests:012d}"
        call = self._parser.parse(await read_json(request), default_id)
        sequence = call.sequence
        if sequence.request_id in self._by_id:
            raise RequestError(f"rid {sequence.request_id!r} is in use by a running request: give each its own")
        self._by_id[sequence.request_id] = sequence
        try:
            waiter = self._waiters[sequence] = self._loop.create_future()
            self._engine.submit(sequence)
            if call.is_streaming:
                return await self._stream(request, call, waiter)
            await waiter
            return json_response(self._part(call, 0)[0])
        finally:
            del self._by_id[sequence.request_id]
            self._waiters.pop(sequence, None)
            if sequence.finish is None:
                self._engine.abort(sequence, "the client has gone")

    async def _stream(
        self, request: web.Request, call: GenerateCall, waiter: asyncio.Future[None]
    ) -> web.StreamResponse:
        """An event per `stream_interval` tokens, with all there is. A short answer is one event and one write."""
        response: web.StreamResponse | None = None
        start = 0
        while True:
            await waiter
            waiter = self._waiters[call.sequence] = self._loop.create_future()
            part, start = self._part(call, start)
            event = b"data: " + orjson.dumps(part) + b"\n\n"
            is_last = part["meta_info"]["finish_reason"] is not None
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

    def _part(self, call: GenerateCall, start: int) -> tuple[dict[str, Any], int]:
        """The answer's tokens from `start` on as JSON, and where they end."""
        sequence = call.sequence
        finish = sequence.finish  # read before the tokens: once it is there they are complete
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
        if call.with_logprobs:
            logprobs = sequence.logprobs[start:end]
            meta["output_token_logprobs"] = [
                (logprob, token, None) for logprob, token in zip(logprobs, token_ids, strict=True)
            ]
        part: dict[str, Any] = {"output_ids": token_ids, "meta_info": meta}
        if call.with_text and self._detokenizer:
            part["text"] = self._detokenizer.decode(token_ids)
        return part, end

    # ---- control

    async def _run(self, command: Callable[[], None]) -> None:
        """Run a command in the engine's thread between two steps."""
        await asyncio.shield(asyncio.wrap_future(self._engine.call(command)))

    async def _abort_request(self, request: web.Request) -> web.StreamResponse:
        body = check_fields(await read_json(request), {"rid", "abort_all"})
        if bool_field(body, "abort_all", False):
            await self._run(self._engine.abort_all)
            return ok()
        request_id = text_field(body, "rid")
        sequence = self._by_id.get(request_id)
        if sequence is not None:  # one that has just ended is no error: the two cross on the way
            self._engine.abort(sequence, "abort_request was called")
        return ok()

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        wanted = text_field(check_fields(await read_json(request), {"mode"}), "mode", "abort")
        mode = PAUSE_MODES.get(wanted)
        if mode is None:
            raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {wanted!r}")
        await self._run(lambda: self._engine.pause(mode))
        return ok()

    async def _continue(self, request: web.Request) -> web.StreamResponse:
        check_fields(await read_json(request), set())
        await self._run(self._engine.resume)
        return ok()

    async def _flush_cache(self, request: web.Request) -> web.StreamResponse:
        check_fields(await read_json(request), set())
        await self._run(self._engine.flush_cache)
        return ok()

    # ---- observation

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self._engine.is_stuck:
            return error_response(500, f"the engine's thread has made no step for {self._engine.stuck_s:.0f} s")
        if self._engine.has_partial_weights:
            return error_response(503, "a weight update is under way or has failed half-way: send a complete one")
        return ok()

    async def _model_info(self, request: web.Request) -> web.StreamResponse:
        return json_response(
            {
                "model_path": self.model_path,
                "weight_version": self._engine.version,
                "vocab_size": self._limits.vocab_size,
                "context_length": self._limits.context_length,
                "is_generation": True,
            }
        )

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        return json_response(
            {**self._figures(), "weight_version": self._engine.version, "is_paused": self._engine.is_paused}
        )

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        lines: list[str] = []
        for name, value in self._figures().items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE areal_{name} {kind}", f"areal_{name} {value}"]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    def _figures(self) -> dict[str, float]:
        scheduler, counters = self._engine.scheduler, self._engine.counters
        return {
            "running_requests": len(scheduler.running),
            "queued_requests": len(scheduler.waiting),
            "kv_tokens_used": scheduler.num_used_tokens,
            "kv_tokens_capacity": scheduler.num_capacity_tokens,
            "generated_tokens_total": counters.generated_tokens,
            "computed_tokens_total": counters.computed_tokens,
            "shared_prompt_tokens_total": scheduler.num_shared_tokens,
            "finished_requests_total": counters.finished,
            "aborted_requests_total": counters.aborted,
            "preemptions_total": scheduler.num_preemptions,
            "steps_total": counters.steps,
            "busy_seconds_total": round(counters.busy_s, 6),
        }


def _finish_json(finish: FinishReason, num_output: int) -> dict[str, Any]:
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": num_output}
    return {"type": finish.kind, "message": finish.message}
