"""The HTTP interface of the controller, for trainers and for monitoring.

    GET  /health       GET /status
    GET  /replicas?version=N                        200 {"live": [ids that an update to it must reach]} | 204
    POST /attach       {rank, world_size, dp_size, step, version}
    POST /batch        {step, dp_rank, dp_size}     200 safetensors blob | 204 not ready, repeat the call | 410 never
                                                    409 a server lacks the weights: publish them again first
                                                    412 the ledger lost events that this trainer depends on
    POST /publish      a WeightUpdate               200 every replica serves it | 204 not ready, repeat the call
    POST /consumed     {step, version, weights_checksum}
    POST /evaluate     {step, mode}                 200 {"reward", "num", ...} | 204 and 409 as above
    POST /committed    {step, path}
    POST /finish       {}

Every call may be repeated; its work is done once. Errors answer {"error": one line, "code": see docs/errors.md}.
"""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from areal.api.errors import ArealError, LedgerError, RequestError
from areal.ledger.state import LedgerBehind
from areal.observe.log import get_logger
from areal.rollout.controller import BatchUnavailable, Controller
from areal.rollout.share_codec import WeightsNeeded, decode_update
from areal.system.http_guard import RequestGuard
from areal.system.network import Host

_log = get_logger(__name__)

POLL_S = 5.0
"""A long poll is answered with "not ready" after this time."""
MAX_BODY_BYTES = 64 * 2**20
"""A weight update lists every weight of a model."""


def make_app(
    controller: Controller, *, token: str, host: Host | None = None, poll_s: float = POLL_S
) -> web.Application:
    """The application. `token` and `host` (None = loopback): see `RequestGuard`."""
    guard = _guarded(RequestGuard(token, host or Host()))
    app = web.Application(middlewares=[guard, _errors_as_json], client_max_size=MAX_BODY_BYTES)
    handlers = _Handlers(controller, poll_s)
    app.add_routes(
        [
            web.get("/health", handlers.health),
            web.get("/status", handlers.status),
            web.get("/replicas", handlers.replicas),
            web.post("/attach", handlers.attach),
            web.post("/batch", handlers.batch),
            web.post("/publish", handlers.publish),
            web.post("/consumed", handlers.consumed),
            web.post("/evaluate", handlers.evaluate),
            web.post("/committed", handlers.committed),
            web.post("/finish", handlers.finish),
        ]
    )
    return app


class _Handlers:
    def __init__(self, controller: Controller, poll_s: float) -> None:
        self._controller = controller
        self._poll_s = poll_s

    async def health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def status(self, request: web.Request) -> web.Response:
        return _json(self._controller.status())

    async def replicas(self, request: web.Request) -> web.Response:
        version = request.query.get("version", "")
        if not version.isdecimal():
            message = f"version is {version!r}, expected a number: GET /replicas?version=N"
            raise RequestError(message, code="request.invalid_field")
        live = await self._controller.live_replicas(int(version), timeout_s=self._poll_s)
        return web.Response(status=204) if live is None else _json({"live": live})

    async def attach(self, request: web.Request) -> web.Response:
        body = await _fields(request, rank=int, world_size=int, dp_size=int, step=int, version=int)
        await self._controller.attach(**body)
        return _json({})

    async def batch(self, request: web.Request) -> web.Response:
        body = await _fields(request, step=int, dp_rank=int, dp_size=int)
        blob = await self._controller.next_batch(**body, timeout_s=self._poll_s)
        if blob is None:
            return web.Response(status=204)
        return web.Response(body=blob, content_type="application/octet-stream")

    async def publish(self, request: web.Request) -> web.Response:
        update = decode_update(await _object(request))
        done = await self._controller.publish(update, timeout_s=self._poll_s)
        return _json({"version": update.version}) if done else web.Response(status=204)

    async def consumed(self, request: web.Request) -> web.Response:
        await self._controller.consumed(**await _fields(request, step=int, version=int, weights_checksum=str))
        return _json({})

    async def evaluate(self, request: web.Request) -> web.Response:
        body = await _fields(request, step=int, mode=str)
        result = await self._controller.evaluate(**body, timeout_s=self._poll_s)
        return web.Response(status=204) if result is None else _json(result)

    async def committed(self, request: web.Request) -> web.Response:
        await self._controller.committed(**await _fields(request, step=int, path=str))
        return _json({})

    async def finish(self, request: web.Request) -> web.Response:
        await _fields(request)
        self._controller.finish()
        return _json({})


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


async def _object(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}", code="request.not_json") from error
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object", code="request.not_json")
    return body  # pyright: ignore[reportUnknownVariableType] - JSON


async def _fields(request: web.Request, **kinds: type) -> dict[str, Any]:
    """The body, which must hold exactly these fields of these types."""
    body = await _object(request)
    if set(body) != set(kinds):
        message = f"the body has the fields {sorted(body)}, expected {sorted(kinds)}"
        raise RequestError(message, code="request.invalid_field")
    for name, kind in kinds.items():
        if type(body[name]) is not kind:
            message = f"{name} is {body[name]!r}, expected {kind.__name__}"
            raise RequestError(message, code="request.invalid_field")
    return body


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ArealError as error:
        match error:
            case LedgerBehind():
                status = 412  # the trainer must go back to an earlier checkpoint
            case BatchUnavailable() | LedgerError():
                status = 410  # a repeated call cannot succeed
            case WeightsNeeded():
                status = 409
            case RequestError():
                status = 400
            case _:
                status = 500
        return _json({"error": str(error), "code": error.code}, status=status)
    except web.HTTPException:
        raise
    except Exception as error:  # noqa: BLE001 - one request: the process and the other trainers continue
        _log.exception("%s failed", request.path)
        return _json({"error": f"{type(error).__name__}: {error}", "code": ArealError.code}, status=500)


def _guarded(guard: RequestGuard) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if refusal := guard.refusal(request.headers, has_body=request.can_read_body):
            return _json({"error": refusal.message, "code": refusal.code}, status=refusal.status)
        return await handler(request)

    return check
