"""An aiohttp application that listens on loopback."""

import contextlib

from aiohttp import web

from areal.observe.http_log import HttpLogger
from areal.rollout.controller_process import make_app
from areal.system.network import bind_socket, http_address
from tests.run_token import TOKEN


@contextlib.asynccontextmanager
async def listening(app, **options):
    """The address of `app`; `options` go to its runner."""
    bound = bind_socket()
    runner = web.AppRunner(app, shutdown_timeout=0.1, **options)
    await runner.setup()
    await web.SockSite(runner, bound).start()
    try:
        yield http_address(bound)
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def running(controller, *, token=TOKEN, **options):
    await controller.start()
    async with listening(make_app(controller, token=token, **options), logger=HttpLogger()) as address:
        yield address
    await controller.close()
