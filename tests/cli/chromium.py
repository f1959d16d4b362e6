"""A headless Chromium for tests of pages, driven over its DevTools protocol."""

import asyncio
import base64
import itertools
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_WAIT_S = 60.0
_FLAGS = ("headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking")
_POLL = """new Promise(done => {
  const look = () => { const found = (%s); if (found) done(found); else setTimeout(look, 20); };
  look();
})"""
_HEIGHT = """new Promise(done => requestAnimationFrame(() => requestAnimationFrame(
  () => done(document.documentElement.scrollHeight))))"""


class Tab:
    """One tab, with the errors that its console has shown."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.errors: list[str] = []
        self._is_loaded = False

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(_WAIT_S):
            while True:
                result = json.loads(await self._socket.receive_str())
                if result.get("id") == number:
                    assert "error" not in result, result
                    return result["result"]
                self._note(result)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        self._is_loaded = self._is_loaded or event["method"] == "Page.loadEventFired"
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(json.dumps(params["entry"]))
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(json.dumps(params["args"]))

    async def open(self, url: str) -> None:
        """Show a page, and wait until it is loaded."""
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(_WAIT_S):
            while not self._is_loaded:
                self._note(json.loads(await self._socket.receive_str()))

    async def value(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The first value of the expression that counts as true."""
        return await self.value(_POLL % expression)

    async def picture(self, path: Path, *, width: int, dark: bool) -> None:
        """A screenshot of the whole page."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        height = 900
        for _ in range(2):  # the height of the page depends on its width
            screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            await self.call("Emulation.setDeviceMetricsOverride", **screen)
            height = await self.value(_HEIGHT)
        result = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(result["data"]))


@asynccontextmanager
async def open_tab(profile: Path) -> AsyncIterator[Tab]:
    assert PROGRAM is not None
    command = (PROGRAM, *(f"--{flag}" for flag in _FLAGS), "--remote-debugging-port=0", f"--user-data-dir={profile}")
    pipes = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, **pipes)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(_WAIT_S):
            while not (line := await process.stderr.readline()).startswith(b"DevTools listening on "):
                assert line, "chromium has ended"
        drain = asyncio.create_task(process.stderr.read())
        port = line.split(b":")[2].split(b"/")[0].decode()
        async with aiohttp.ClientSession() as client:
            async with client.get(f"http://127.0.0.1:{port}/json") as answer:
                (target,) = [item for item in await answer.json() if item["type"] == "page"]
            async with client.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                yield tab
    finally:
        process.terminate()
        await process.wait()
    await drain


if __name__ == "__main__":
    if PROGRAM is None:
        sys.stderr.write("test-web: there is no chromium: apt-get install chromium\n")
        sys.exit(2)
