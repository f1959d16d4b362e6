"""Serves folders of this machine over HTTP, from a thread, to clients that have the run's token.

The address of a folder ends with the checksum of its list of files, so a client that got the address from a trusted
process can verify every byte.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from areal.system.folder_list import FolderList, sum_of
from areal.system.http_guard import RequestGuard, guarded
from areal.system.network import BACKLOG, Host, http_address, listen
from areal.system.threads import in_daemon_thread

PULLED_WEIGHTS = "/pulled_weights"
"""Below this path a server offers the folders that it has pulled, to servers that start later."""
_START_S = 30.0


@dataclass(frozen=True, slots=True)
class OfferedFolder:
    path: Path
    listed: FolderList
    list_bytes: bytes


def folder_routes(
    find: Callable[[str], OfferedFolder | None], prefix: str, error: Callable[[int, str, str], web.Response]
) -> list[web.RouteDef]:
    """GET PREFIX/NAME is the list of a folder, GET PREFIX/NAME/K its file number K; ranges of bytes can be requested.

    `find`: the folder of a name. `error(status, message, code)` makes the answer when there is none.
    """

    async def send_list(request: web.Request) -> web.StreamResponse:
        found = find(request.match_info["name"])
        if found is None or not found.path.is_dir():
            return error(404, "this folder is not served, or not any more", "weights.not_served")
        return web.Response(body=found.list_bytes, content_type="application/json")

    async def send_file(request: web.Request) -> web.StreamResponse:
        found, index = find(request.match_info["name"]), request.match_info["index"]
        if found is None or not index.isdecimal() or int(index) >= len(found.listed.files):
            return error(404, "this file is not served", "weights.not_served")
        path = found.path / found.listed.files[int(index)].name
        if not path.is_file():
            return error(404, "this folder is not served any more", "weights.not_served")
        return web.FileResponse(path)

    return [web.get(f"{prefix}/{{name}}", send_list), web.get(f"{prefix}/{{name}}/{{index}}", send_file)]


class FolderServer:
    """Serves `folder_routes` on a separate port."""

    def __init__(self, host: Host, token: str) -> None:
        self._bound = listen(host, token)
        self.address = http_address(self._bound, host.advertise)
        self._guard = RequestGuard(token, host)
        self._offered: dict[str, OfferedFolder] = {}
        """By name in the address. Replaced, never changed: the thread reads it."""
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        started: Future[None] = Future()
        self._thread = in_daemon_thread(lambda: self._loop.run_until_complete(self._serve(started)), "folder server")
        started.result(_START_S)

    def offer(self, folder: Path) -> str:
        """Serve a folder as it is now, until it is deleted; returns its address."""
        listed = FolderList.of(folder)
        data = listed.to_bytes()
        name = f"{folder.name}-{sum_of(data)}"
        still_there = {name: entry for name, entry in self._offered.items() if entry.path.is_dir()}
        self._offered = still_there | {name: OfferedFolder(folder, listed, data)}
        return f"{self.address}/{name}"

    def close(self) -> None:
        """Stop at once; running transfers break off. May be repeated."""
        if not self._thread.done():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.result(_START_S)

    async def _serve(self, started: Future[None]) -> None:
        app = web.Application(middlewares=[guarded(self._guard, _error)])
        app.add_routes(folder_routes(lambda name: self._offered.get(name), "", _error))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, self._bound, backlog=BACKLOG).start()
        started.set_result(None)
        try:
            await self._stopped.wait()
        finally:
            await runner.cleanup()


def _error(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message}, "code": code}, status=status)
