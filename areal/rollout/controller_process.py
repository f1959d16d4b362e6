"""The controller process: listens, registers its name, and runs until the trainers finish or an error ends the run."""

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

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

GROWTH_BYTES = 2**30
YOUNG_OBJECTS = 200_000
"""After this number of new objects a pass looks at them."""
_LOOK_S = 5.0


def run_serving(make_controller: Callable[[], Controller], host: Host, registry: NameRegistry) -> None:
    """Run a controller on a new event loop. Returns when the trainers finish; raises the error that ends the run.

    After SIGTERM or SIGINT the process closes everything and then ends by that signal: its launcher takes an exit with
    0 for the end of training.
    """
    collect_rarely()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stopped_by = runner.run(serve_made(make_controller, host, registry))
    if stopped_by is not None:
        sys.stdout.flush()
        signal.signal(stopped_by, signal.SIG_DFL)
        signal.raise_signal(stopped_by)


def collect_rarely() -> None:
    """Let the cycle collector look at new objects only: a controller creates many records and almost no cycles.

    A pass stops the event loop for 0.06 to 0.15 us for each object: 30 ms for YOUNG_OBJECTS, a second for all of
    10,000 episodes. `collect_after_growth` bounds the memory of cycles that live longer.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10**9, 10**9)


async def collect_after_growth(resident_bytes: Callable[[], int]) -> None:
    """Collect cycles each time that the process has grown by GROWTH_BYTES. Runs until it is cancelled."""
    before = resident_bytes()
    while True:
        await asyncio.sleep(_LOOK_S)
        if resident_bytes() - before > GROWTH_BYTES:
            gc.collect()
            before = resident_bytes()


async def serve_made(
    make_controller: Callable[[], Controller], host: Host, registry: NameRegistry
) -> signal.Signals | None:
    """Make a controller in the running loop and serve it on `host`, protected by the run's token. Result as `serve`."""
    token = required_token("the rollout controller")
    controller = make_controller()
    process = psutil.Process()
    collecting = asyncio.create_task(collect_after_growth(lambda: process.memory_info().rss), name="collect cycles")
    try:
        async with beating_loop(launched_heartbeat(), controller.waiting_for):
            return await serve(controller, listen(host, token), registry, host=host, token=token)
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
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
