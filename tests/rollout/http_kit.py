"""An aiohttp application that listens on loopback."""

import contextlib

from aiohttp import web

from areal.system.network import bind_socket, http_address


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
