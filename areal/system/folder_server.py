"""Serves folders of this machine over HTTP, from a thread, to clients that have the run's token.

The address of a folder ends with the checksum of its list of files, so a client that got the address from a trusted
process can verify every byte.
"""

import asyncio
from concurrent.futures import Future
from pathlib import Path

from aiohttp import web

from areal.system.folder_list import FolderList, sum_of
from areal.system.http_guard import RequestGuard, guarded
from areal.system.network import BACKLOG, Host, http_address, listen
from areal.system.threads import in_daemon_thread

_START_S = 30.0


class FolderServer:
    """GET /NAME is the list of a folder, GET /NAME/K its file number K; ranges of bytes can be requested."""

    def __init__(self, host: Host, token: str) -> None:
        self._bound = listen(host, token)
        self.address = http_address(self._bound, host.advertise)
        self._guard = RequestGuard(token, host)
        self._offered: dict[str, tuple[Path, FolderList, bytes]] = {}
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
        still_there = {name: entry for name, entry in self._offered.items() if entry[0].is_dir()}
        self._offered = still_there | {name: (folder, listed, data)}
        return f"{self.address}/{name}"

    def close(self) -> None:
        """Stop at once; running transfers break off. May be repeated."""
        if not self._thread.done():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.result(_START_S)

    async def _serve(self, started: Future[None]) -> None:
        app = web.Application(middlewares=[guarded(self._guard, _error)])
        app.router.add_get("/{name}", self._list)
        app.router.add_get("/{name}/{index}", self._file)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, self._bound, backlog=BACKLOG).start()
        started.set_result(None)
        try:
            await self._stopped.wait()
        finally:
            await runner.cleanup()

    async def _list(self, request: web.Request) -> web.StreamResponse:
        entry = self._offered.get(request.match_info["name"])
        if entry is None or not entry[0].is_dir():
            return _error(404, "this folder is not served any more", "weights.not_served")
        return web.Response(body=entry[2], content_type="application/json")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        entry, index = self._offered.get(request.match_info["name"]), request.match_info["index"]
        if entry is None or not index.isdecimal() or int(index) >= len(entry[1].files):
            return _error(404, "this file is not served", "weights.not_served")
        path = entry[0] / entry[1].files[int(index)].name
        if not path.is_file():
            return _error(404, "this folder is not served any more", "weights.not_served")
        return web.FileResponse(path)


def _error(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message}, "code": code}, status=status)
