"""The controller process: listens, registers its name, and runs until the trainers finish or an error ends the run."""

import asyncio
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import orjson
import psutil
import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler

from areal.api.errors import ArealError, LedgerError, RequestError, ServerUnavailable, WeightSyncError
from areal.ledger.state import LedgerBehind
from areal.observe.http_log import HttpLogger
from areal.observe.log import get_logger
from areal.rollout.client import CONTROLLER
from areal.rollout.control_requests import (
    AttachRequest,
    BackgroundRequest,
    BatchRequest,
    CommittedRequest,
    CompareRequest,
    ConsumedRequest,
    EvaluationRequest,
    FinishRequest,
    OutOfOrder,
    PublishRequest,
    Request,
    ScoreRequest,
    TrainerRun,
    allowed_run,
    parse_request,
    parse_version,
)
from areal.rollout.controller import BatchUnavailable, Controller
from areal.rollout.share_codec import WeightsNeeded, encode_head
from areal.system.discovery import NameRegistry
from areal.system.durable import write_atomic
from areal.system.heartbeat import beating_loop, launched_heartbeat
from areal.system.http_guard import RequestGuard, guarded, read_body
from areal.system.network import Host, http_address, listen, required_token
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# The HTTP interface of the controller, for trainers and for monitoring.
#
#     GET  /health       GET /status
#     GET  /replicas?version=N                        200 {"live": [ids that an update to it must reach]} | 204
#     POST /attach       AttachRequest
#     POST /batch        BatchRequest                 200 see share_codec.py | 204 not ready, repeat the call | 410
# never
#                                                     409 rollout.weights_needed: publish the weights again first
#                                                     412 the ledger lost events that this trainer depends on
#     POST /publish      PublishRequest               200 every replica serves it, as /probe; with waits=false: the
# update
#                                                     has started, {} | 204 not ready, repeat it
#     GET  /probe?version=N                           200 {"version", "probe": the servers' answer to the canary, or
# null}
#     POST /compare      CompareRequest               200 {"differing": [names]} | 204 not ready, repeat the call
#     POST /score        ScoreRequest                 200 {"scores": of each row, or null}
#     POST /consumed     ConsumedRequest
#     POST /evaluate     EvaluationRequest            200 {"reward", "num", ...} | 204 and 409 as above
#     POST /background   BackgroundRequest            200 {"state", "results": by mode} | with waits=true: 204 as above
#     POST /committed    CommittedRequest
#     POST /finish       FinishRequest
#
# `areal.rollout.control_requests` has the fields, `areal.rollout.control_requests` the order of the calls. 400: the
# request is invalid in every state. 409: it is refused in the present state. 503: no server could be updated. A refused
# request changes nothing. Every call may be repeated; its work is done once. Errors answer {"error": one line, "code":
# as areal raised it}.

_log = get_logger(__name__)

POLL_S = 5.0
"""A long poll is answered with "not ready" after this time."""
MAX_BODY_BYTES = 64 * 2**20
"""A weight update lists every weight of a model."""


def make_app(
    controller: Controller, *, token: str, host: Host | None = None, poll_s: float = POLL_S
) -> web.Application:
    """The application. `token` and `host` (None = loopback): see `RequestGuard`."""
    guard = guarded(RequestGuard(token, host or Host()), _error)
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
            web.get("/probe", handlers.probe),
            web.post("/compare", handlers.compare),
            web.post("/score", handlers.score),
            web.post("/consumed", handlers.consumed),
            web.post("/evaluate", handlers.evaluate),
            web.post("/background", handlers.background),
            web.post("/committed", handlers.committed),
            web.post("/finish", handlers.finish),
        ]
    )
    return app


class _Handlers:
    def __init__(self, controller: Controller, poll_s: float) -> None:
        self._controller = controller
        self._poll_s = poll_s
        self._run: TrainerRun | None = None

    async def _allowed(self, kind: type[Request], request: web.Request) -> Request:
        """The parsed request, once the state of the run allows it. Nothing may wait between this and the change."""
        asked = parse_request(kind, await read_body(request))
        controller = self._controller
        self._run = allowed_run(asked, self._run, controller.state, controller.shape)
        return asked

    async def health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def status(self, request: web.Request) -> web.Response:
        return _json(self._controller.status())

    async def replicas(self, request: web.Request) -> web.Response:
        version = parse_version(request.query.get("version", ""))
        live = await self._controller.live_replicas(version, timeout_s=self._poll_s)
        return web.Response(status=204) if live is None else _json({"live": live})

    async def attach(self, request: web.Request) -> web.Response:
        before = self._run
        asked = await self._allowed(AttachRequest, request)
        try:
            await self._controller.attach(
                rank=asked.rank,
                world_size=asked.world_size,
                dp_size=asked.dp_size,
                step=asked.step,
                version=asked.version,
            )
        except ArealError:
            self._run = before
            raise
        return _json({})

    async def batch(self, request: web.Request) -> web.StreamResponse:
        asked = await self._allowed(BatchRequest, request)
        record = await self._controller.next_batch(asked.step, timeout_s=self._poll_s)
        if record is None:
            return web.Response(status=204)
        if not asked.with_payloads:
            return web.Response(body=encode_head(record), content_type="application/octet-stream")
        batches = self._controller.batches
        part = await batches.part(record, asked.dp_rank, asked.dp_size)
        head = encode_head(record, part)
        answer = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        answer.content_length = len(head) + sum(record.payloads[index][2] for index in part.indices)
        await answer.prepare(request)
        await answer.write(head)
        for index in part.indices:
            await answer.write(await batches.payload(record, index))
        await answer.write_eof()
        return answer

    async def publish(self, request: web.Request) -> web.Response:
        self._controller.require_running()
        asked = await self._allowed(PublishRequest, request)
        update, weights = asked.update, self._controller.weights
        if not asked.waits:
            return _json({}) if await weights.start(update, timeout_s=self._poll_s) else web.Response(status=204)
        done = await weights.publish(update, timeout_s=self._poll_s)
        return self._probe_of(update.version) if done else web.Response(status=204)

    async def probe(self, request: web.Request) -> web.Response:
        return self._probe_of(parse_version(request.query.get("version", "")))

    def _probe_of(self, version: int) -> web.Response:
        probe = self._controller.weights.probe_tokens(version)
        return _json({"version": version, "probe": None if probe is None else asdict(probe)})

    async def compare(self, request: web.Request) -> web.Response:
        self._controller.require_running()
        score = (await self._allowed(CompareRequest, request)).score
        differing = await self._controller.weights.compare(score, timeout_s=self._poll_s)
        return web.Response(status=204) if differing is None else _json({"differing": differing})

    async def score(self, request: web.Request) -> web.Response:
        asked = await self._allowed(ScoreRequest, request)
        weights = self._controller.weights
        scores = await weights.score(asked.rows, version=asked.version, top_k=asked.top_k, limit_s=2 * self._poll_s)
        return _json({"scores": scores})

    async def consumed(self, request: web.Request) -> web.Response:
        asked = await self._allowed(ConsumedRequest, request)
        await self._controller.consumed(asked.step, asked.version, asked.weights_checksum, ess=asked.ess)
        return _json({})

    async def evaluate(self, request: web.Request) -> web.Response:
        asked = await self._allowed(EvaluationRequest, request)
        result = await self._controller.evaluate(asked.step, asked.mode, timeout_s=self._poll_s)
        return web.Response(status=204) if result is None else _json(result)

    async def background(self, request: web.Request) -> web.Response:
        asked = await self._allowed(BackgroundRequest, request)
        limit_s = self._poll_s if asked.waits else 0.0
        evaluation = await self._controller.background_evaluation(asked.step, begins=asked.begins, timeout_s=limit_s)
        is_early = asked.waits and evaluation.state == "running"
        return web.Response(status=204) if is_early else _json(evaluation._asdict())

    async def committed(self, request: web.Request) -> web.Response:
        asked = await self._allowed(CommittedRequest, request)
        await self._controller.committed(asked.step, asked.path)
        return _json({})

    async def finish(self, request: web.Request) -> web.Response:
        await self._allowed(FinishRequest, request)
        self._controller.finish()
        return _json({})


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _error(status: int, message: str, code: str) -> web.Response:
    return _json({"error": message, "code": code}, status)


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
            case WeightsNeeded() | OutOfOrder():
                status = 409
            case RequestError():
                status = 400
            case ServerUnavailable() | WeightSyncError():
                status = 503
            case _:
                status = 500
        return _error(status, str(error), error.code)
    except web.HTTPException:
        raise
    except Exception as error:  # noqa: BLE001 - one request: the process and the other trainers continue
        _log.exception("%s failed", request.path)
        return _error(500, f"{type(error).__name__}: {error}", ArealError.code)


Result = TypeVar("Result")

GROWTH_BYTES = 2**30
YOUNG_S = 0.25
"""Seconds between the first two passes over young objects."""
MAX_YOUNG_S = 1.0
"""Maximum interval of these passes, in seconds."""
YOUNG_PASSES = 20
"""Passes over young objects between two looks at the memory of the process."""
SHORT_PASS_S = 0.01
"""The interval doubles while passes take less than this."""


def run_serving(make_controller: Callable[[], Controller], host: Host, registry: NameRegistry) -> None:
    """Run a controller on a new event loop. Returns when the trainers finish; raises the error that ends the run.

    After SIGTERM or SIGINT the process closes everything and then ends by that signal: its launcher takes an exit with
    0 for the end of training.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stopped_by = runner.run(serve_made(make_controller, host, registry))
    if stopped_by is not None:
        sys.stdout.flush()
        signal.signal(stopped_by, signal.SIG_DFL)
        signal.raise_signal(stopped_by)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss


async def collecting_cycles(work: Awaitable[Result], resident_bytes: Callable[[], int] = resident_bytes) -> Result:
    """Await `work`, and run the cycle collector at fixed times meanwhile instead of after a number of new objects.

    A controller creates many records and almost no cycles. The interpreter subtracts objects that end from those that
    are new, so under a steady load one of its passes looks at more than a million objects and stops the event loop for
    a second. A pass each YOUNG_S to MAX_YOUNG_S looks at what was created since the pass before. Cycles that live
    longer are collected each time that the process has grown by GROWTH_BYTES.
    """
    gc.freeze()
    gc.disable()
    passes = asyncio.create_task(_collect(resident_bytes), name="collect cycles")
    try:
        return await work
    finally:
        passes.cancel()
        await asyncio.gather(passes, return_exceptions=True)
        gc.enable()
        gc.unfreeze()


async def _collect(resident_bytes: Callable[[], int]) -> None:
    """The passes, until it is cancelled."""
    before, pause_s = resident_bytes(), YOUNG_S
    while True:
        for _ in range(YOUNG_PASSES):
            await asyncio.sleep(pause_s)
            began_s = time.perf_counter()
            gc.collect(0)
            pause_s = next_pause_s(pause_s, time.perf_counter() - began_s)
        if resident_bytes() - before > GROWTH_BYTES:
            gc.collect()
            before = resident_bytes()


def next_pause_s(pause_s: float, pass_s: float) -> float:
    """Seconds until the next pass over young objects, after one that took `pass_s`.

    With a longer interval a pass visits more objects, but all passes together visit fewer, because more objects have
    ended before their first pass. A pass stops the event loop, so the interval grows only while passes are short.
    """
    return min(2 * pause_s, MAX_YOUNG_S) if pass_s < SHORT_PASS_S else max(pause_s / 2, YOUNG_S)


async def serve_made(
    make_controller: Callable[[], Controller], host: Host, registry: NameRegistry
) -> signal.Signals | None:
    """Make a controller in the running loop and serve it on `host`, protected by the run's token. Result as `serve`."""
    token = required_token("the rollout controller")
    controller = make_controller()
    try:
        async with beating_loop(launched_heartbeat(), controller.waiting_for):
            serving = serve(controller, listen(host, token), registry, host=host, token=token)
            return await collecting_cycles(serving)
    finally:
        _write_episodes(controller)


def _write_episodes(controller: Controller) -> None:
    """Leave the numbers of episodes for the summary of the launcher, if there is one."""
    context = ProcessContext.from_env()
    if context is None:
        return
    try:
        write_atomic(RunPaths(Path(context.run_dir)).episodes, orjson.dumps(controller.episodes()))
    except OSError as error:
        _log.warning("the numbers of episodes were not written: %s", error)


async def serve(
    controller: Controller, bound: socket.socket, registry: NameRegistry, *, host: Host, token: str
) -> signal.Signals | None:
    """Serve on the listening socket `bound`.

    Registers as `controller` and, once the fleet is healthy, as `ready/controller`. Waits for
    /finish of the trainers, for an error (raised once a trainer received it), or for SIGTERM or SIGINT. Returns the
    signal that came before the trainers had finished; None = they have finished.
    """
    loop = asyncio.get_running_loop()
    stopped_by: signal.Signals | None = None

    def stop(number: signal.Signals) -> None:
        nonlocal stopped_by
        if not controller.is_over:
            stopped_by = number
            controller.finish()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    app = make_app(controller, token=token, host=host)
    http_log = HttpLogger()
    runner = web.AppRunner(app, access_log=None, logger=http_log, auto_decompress=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
        value = {"address": http_address(bound, host.advertise), "pid": os.getpid()}
        registry.add(CONTROLLER, orjson.dumps(value).decode(), replace=True)
        starting = asyncio.ensure_future(controller.start())
        ended = asyncio.ensure_future(controller.ended())
        await asyncio.wait([starting, ended], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        else:
            starting.result()
            registry.add("ready/controller", orjson.dumps({"pid": os.getpid()}).decode(), replace=True)
            _log.info("ready at %s", value["address"])
        await ended
        _log.info("the trainers have finished" if stopped_by is None else f"stopped by {stopped_by.name}")
        return stopped_by
    except Exception as error:
        _log.error("the run ends with an error: %s: %s", type(error).__name__, error)
        raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        await controller.close()
        await runner.cleanup()
        http_log.close()
