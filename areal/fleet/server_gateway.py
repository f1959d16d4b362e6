"""The gateway of a foreign server: an HTTP server that requires the run's token and passes requests on.

SGLang and vLLM protect only a part of their routes by a key. On a host that other machines can reach, such a server
listens on loopback, and its gateway on the host's address. A gateway also copies weights to this machine, and lets the
gateways of the other parts of its server do the same on theirs.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from areal.api.errors import ArealError, RequestError, WeightSyncError
from areal.observe.http_log import HttpLogger
from areal.system.folder_puller import FolderPuller
from areal.system.folder_server import PULLED_WEIGHTS, folder_routes
from areal.system.http_guard import RequestGuard, guarded, read_body
from areal.system.network import Host, http_address, listen
from areal.system.threads import in_daemon_thread

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
"""Headers of one connection (RFC 9110, section 7.6.1)."""
_NOT_PASSED_ON = _HOP_BY_HOP | {"host", "authorization", "content-length"}


@asynccontextmanager
async def gateway(
    host: Host, token: str, server: str, parts: Callable[[], list[str]] = list[str]
) -> AsyncIterator[str]:
    """Serve on `host` while the block runs; yields the address. Other requests with `token` go to `server`, an address.

    `parts` returns the gateways of the other parts of a server over several machines; it may block.

    An answer is passed on while it arrives. When the client leaves, the request to the server is aborted; when the
    server breaks off an answer, so does the gateway.
    """
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session:
        app = web.Application(middlewares=[guarded(RequestGuard(token, host), _error)], client_max_size=0)
        puller = FolderPuller(token)
        app.router.add_post("/pull_weights", _pulls(puller, session, token, parts))
        app.add_routes(folder_routes(puller.offered, PULLED_WEIGHTS, _error))
        app.router.add_route("*", "/{path:.*}", _passes_on(session, server))
        http_log = HttpLogger()
        runner = web.AppRunner(app, access_log=None, logger=http_log, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        bound = listen(host, token)
        await web.SockSite(runner, bound).start()
        try:
            yield http_address(bound, host.advertise)
        finally:
            await runner.cleanup()
            puller.close()
            http_log.close()


def _error(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": code}}, status=status)


def _pulls(puller: FolderPuller, session: aiohttp.ClientSession, token: str, parts: Callable[[], list[str]]) -> Handler:
    headers = {"Authorization": f"Bearer {token}"}

    async def pull_by(part: str, body: dict[str, Any]) -> str:
        async with session.post(f"{part}/pull_weights", json=body, headers=headers) as answer:
            found = await answer.json()
            if answer.status == 200:
                return str(found["path"])
            kind = RequestError if answer.status == 400 else WeightSyncError
            raise kind(found["error"]["message"], code=found["error"]["code"])

    async def pull(request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await read_body(request))
            body = {"url": str(body["url"]), "mirrors": [str(mirror) for mirror in body.get("mirrors", ())]}
            others = await asyncio.to_thread(parts)
            own = asyncio.wrap_future(in_daemon_thread(lambda: puller.pull(**body), "pull weights"))
            folder, *elsewhere = await asyncio.gather(own, *(pull_by(part, body) for part in others))
            if different := set(elsewhere) - {str(folder)}:
                text = f"the parts of this server keep weights in {folder} and {', '.join(different)}: set one TMPDIR"
                raise WeightSyncError(text, code="weights.pull_failed")
        except aiohttp.ClientError as error:
            return _error(500, f"another part of this server does not answer: {error}", "weights.pull_failed")
        except ArealError as error:
            return _error(400 if isinstance(error, RequestError) else 500, str(error), error.code)
        except (ValueError, KeyError, TypeError, AttributeError):
            return _error(400, "the body is not an object with a field url", "weights.invalid_request")
        return web.json_response({"path": str(folder)})

    return pull


def _passes_on(session: aiohttp.ClientSession, server: str) -> Handler:
    async def pass_on(request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_PASSED_ON}
        try:
            body = await read_body(request) if request.can_read_body else None
        except RequestError as error:
            return _error(400, str(error), error.code)
        try:
            found = await session.request(
                request.method, f"{server}{request.raw_path}", headers=headers, data=body, allow_redirects=False
            )
        except aiohttp.ClientConnectionError as error:
            return web.json_response({"error": {"message": f"the server does not answer: {error}"}}, status=502)
        async with found:
            passed = {name: value for name, value in found.headers.items() if name.lower() not in _HOP_BY_HOP}
            answer = web.StreamResponse(status=found.status, reason=found.reason, headers=passed)
            await answer.prepare(request)
            try:
                async for piece in found.content.iter_any():
                    await answer.write(piece)
            except (aiohttp.ClientError, asyncio.IncompleteReadError):
                if request.transport is not None:
                    request.transport.abort()
                return answer
            await answer.write_eof()
            return answer

    return pass_on
