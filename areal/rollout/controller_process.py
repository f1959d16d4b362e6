"""The controller process: listens, registers its name, and runs until the trainers finish or an error ends the run."""

import asyncio
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import orjson
import psutil
import uvloop
from aiohttp import web

from areal.observe.http_log import HttpLogger
from areal.observe.log import get_logger
from areal.rollout.client import CONTROLLER
from areal.rollout.controller import Controller
from areal.rollout.controller_routes import make_app
from areal.system.discovery import NameRegistry
from areal.system.durable import write_atomic
from areal.system.heartbeat import beating_loop, launched_heartbeat
from areal.system.network import Host, http_address, listen, required_token
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths

_log = get_logger(__name__)
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
    """Of this process."""
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
    controller: Controller,
    bound: socket.socket,
    registry: NameRegistry,
    *,
    host: Host,
    token: str,
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
