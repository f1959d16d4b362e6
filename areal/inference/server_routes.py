"""The HTTP interface of the native server: SGLang's dialect, plus the version of every token.

Handlers run in the asyncio thread. A control handler waits until the engine thread has run its command.
"""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from areal.api.errors import ArealError, RequestError
from areal.inference.engine import PAUSE_MODES, Detokenizer, Engine
from areal.inference.generate_route import GenerateRoute
from areal.inference.json_answers import (
    MAX_CONTROL_BYTES,
    TOO_LARGE,
    error_response,
    json_response,
    ok,
    read_json,
)
from areal.inference.request_parser import RequestLimits, bool_field, check_fields, shown, text_field
from areal.inference.weight_routes import WeightRoutes
from areal.observe.log import get_logger
from areal.system.folder_puller import FolderPuller
from areal.system.folder_server import PULLED_WEIGHTS, folder_routes
from areal.system.http_guard import RequestGuard, guarded

_LOG = get_logger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServerApp:
    """Routes of one server."""

    def __init__(
        self, *, model_path: str, draw_seed: Callable[[], int], guard: RequestGuard, puller: FolderPuller
    ) -> None:
        self.model_path = model_path
        self._puller = puller
        self._guard = guard
        self.generate = GenerateRoute(draw_seed)

    def attach(self, engine: Engine, limits: RequestLimits, detokenizer: Detokenizer | None) -> None:
        """Set the engine. Called once, before `application`."""
        self._engine = engine
        self._limits = limits
        self.generate.attach(engine, limits, detokenizer)
        self._weights = WeightRoutes(engine, self._puller)

    def application(self) -> web.Application:
        """The aiohttp application with all routes."""
        largest = max(MAX_CONTROL_BYTES, self.generate.parser.max_group_bytes)
        application = web.Application(
            middlewares=[guarded(self._guard, error_response), _errors_as_json], client_max_size=largest
        )
        posts: dict[str, Handler] = {
            "/generate": self.generate.answer,
            "/generate_group": self.generate.answer_group,
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
            application.router.add_post(path, handler)
        for path, handler in gets.items():
            application.router.add_get(path, handler)
        application.add_routes(folder_routes(self._puller.offered, PULLED_WEIGHTS, error_response))
        return application

    # ---- control

    async def _run(self, command: Callable[[], None]) -> None:
        """Run a command in the engine thread between two steps."""
        await asyncio.shield(asyncio.wrap_future(self._engine.call(command)))

    async def _abort_request(self, request: web.Request) -> web.StreamResponse:
        body = check_fields(await read_json(request), {"rid", "abort_all"})
        if bool_field(body, "abort_all", False):
            await self._run(self._engine.abort_all)
            return ok()
        self.generate.abort(text_field(body, "rid"))
        return ok()

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        mode = text_field(check_fields(await read_json(request), {"mode"}), "mode", "abort")
        if mode not in PAUSE_MODES:
            message = f"mode must be one of {', '.join(PAUSE_MODES)}, got {shown(mode)}"
            raise RequestError(message, code="request.invalid_field")
        await self._run(lambda: self._engine.pause(mode))
        return ok()

    async def _continue(self, request: web.Request) -> web.StreamResponse:
        check_fields(await read_json(request), set())
        await self._run(self._engine.resume)
        return ok()

    async def _flush_cache(self, request: web.Request) -> web.StreamResponse:
        check_fields(await read_json(request), set())
        await self._run(self._engine.scheduler.retract_all)  # running requests compute their keys and values again
        return ok()

    # ---- observation

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self._engine.is_stuck:
            message = f"the engine thread has completed no step for {self._engine.stuck_s:.0f} s"
            return error_response(500, message, "request.engine_failed")
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
            "install_seconds_total": round(counters.install_s, 6),
        }


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(413 if error.code == TOO_LARGE else 400, str(error), error.code)
    except ArealError as error:
        _LOG.error("%s failed: %s", request.path, error)
        return error_response(500, str(error), error.code)
