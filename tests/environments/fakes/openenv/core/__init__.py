"""The client: lines of JSON instead of a WebSocket."""

import asyncio
import json
from types import SimpleNamespace


class GenericEnvClient:
    def __init__(self, base_url):
        self._port = int(base_url.rpartition(":")[2])
        self._streams = None

    async def connect(self):
        self._streams = await asyncio.open_connection("127.0.0.1", self._port)

    async def _ask(self, kind, data):
        if self._streams is None:
            await self.connect()
        reader, writer = self._streams
        writer.write(json.dumps([kind, data]).encode() + b"\n")
        line = await reader.readline()
        if not line:
            raise ConnectionResetError("the server closed the session")
        answer = json.loads(line)
        if "code" in answer:
            raise RuntimeError(f"Server error: {answer['text']} (code: {answer['code']})")
        return answer

    async def state(self):
        return await self._ask("state", {})

    async def reset(self, **options):
        return SimpleNamespace(**await self._ask("reset", options))

    async def step(self, action):
        return SimpleNamespace(**await self._ask("step", action))

    async def disconnect(self):
        if self._streams is not None:
            self._streams[1].close()
