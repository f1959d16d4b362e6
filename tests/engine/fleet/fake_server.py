"""A server that speaks the native dialect and makes known tokens, so that a whole answer can be checked exactly.

The token at position p (counted over prompt and output) is 1000 + p; its log-probability is -(p + version / 100).
It can be told to hold (stop making tokens), hang (answer nothing), fail, refuse, or die in the middle of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from areal.api.config.rollout import InferenceEngineConfig
from areal.engine.fleet import Fleet
from areal.engine.native import make_native_replica
from areal.system.discovery import FileNameRegistry
from areal.system.network import bind_socket, http_address


class FakeServer:
    def __init__(self, *, version: int = 0, hold_at: int | None = None, finish_at: int | None = None) -> None:
        self.version = version
        self.hold_at = hold_at
        """Requests stop here, counted in tokens of this part, until `release` or an abort."""
        self.finish_at = finish_at
        """Absolute position after which a "stop" is reported."""
        self.requests: list[dict[str, Any]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.num_cancelled = 0
        self.fail_generate: int | None = None
        """HTTP status for /generate."""
        self.empty_aborts = False
        self.fail_update: int | str | None = None
        """HTTP status for weight updates, or "hang" or "die"."""
        self.torn = False
        """An update stopped midway."""
        self.num_made: dict[str, int] = {}
        """Tokens by request id, sent or not."""
        self.num_held = 0
        """Requests that are held now."""
        self._left_group = asyncio.Event()
        self._released = asyncio.Event()
        self._abort_round = 0
        self._aborted = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._awake = asyncio.Event()
        self._awake.set()
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/get_model_info", self._info)
        for path in (
            "pause_generation",
            "continue_generation",
            "update_weights_from_disk",
            "init_weights_update_group",
            "update_weights_from_distributed",
            "destroy_weights_update_group",
        ):
            app.router.add_post("/" + path, self._control)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        bound = bind_socket(port=port)
        await web.SockSite(self._runner, bound).start()
        self.address = http_address(bound)

    def registration(self) -> str:
        return json.dumps({"address": self.address, "pid": uuid.uuid4().int % 2**31})

    async def die(self) -> None:
        """As kill -9: every connection is reset, nothing is finished."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        for protocol in list(runner.server.connections if runner.server else []):
            if protocol.transport is not None:
                protocol.transport.abort()
        await runner.cleanup()

    def hang(self) -> None:
        self._awake.clear()

    def wake(self) -> None:
        self._awake.set()

    def release(self) -> None:
        self.hold_at = None
        self._released.set()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    async def _health(self, request: web.Request) -> web.Response:
        await self._awake.wait()
        return web.Response(status=503 if self.torn else 200)

    async def _info(self, request: web.Request) -> web.Response:
        await self._awake.wait()
        return web.json_response({"weight_version": str(self.version), "vocab_size": 5000, "context_length": 4096})

    async def _control(self, request: web.Request) -> web.Response:
        await self._awake.wait()
        path, body = request.path[1:], await request.json()
        self.calls.append((path, body))
        if path == "pause_generation":
            self._running.clear()
            if body["mode"] == "abort":
                aborted, self._aborted = self._aborted, asyncio.Event()
                self._abort_round += 1
                aborted.set()
        elif path == "destroy_weights_update_group":
            left, self._left_group = self._left_group, asyncio.Event()
            left.set()
        elif path == "continue_generation":
            self._running.set()
        elif path.startswith("update_weights"):
            if self.fail_update == "hang":
                await self._left_group.wait()
                self.torn = True
                return _error(500, "the group was left")
            if self.fail_update == "die":
                await self.die()
            if isinstance(self.fail_update, int):
                self.torn = self.torn or self.fail_update >= 500
                return _error(self.fail_update, "cannot load these weights")
            if body["weight_version"] is not None:
                self.version = int(body["weight_version"])
                self.torn = False
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        await self._awake.wait()
        if self.fail_generate:
            return _error(self.fail_generate, "cannot generate this")
        if body["stream"]:
            response = web.StreamResponse()
            await response.prepare(request)
        try:
            versions: list[int] = []
            num_sent = 0
            interval = body["sampling_params"].get("stream_interval", 1)
            async for token_versions, reason in self._make(body):
                versions += token_versions
                self.num_made[body["rid"]] = len(versions)
                if body["stream"] and (reason or len(versions) == num_sent + interval):
                    event = self._answer(len(body["input_ids"]) + num_sent, versions[num_sent:], reason)
                    num_sent = len(versions)
                    with contextlib.suppress(ConnectionResetError):
                        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if body["stream"]:
            await response.write(b"data: [DONE]\n\n")
            return response
        return web.json_response(self._answer(len(body["input_ids"]), versions, reason))

    async def _make(self, body: dict[str, Any]) -> Any:
        """Yields (versions of the new tokens, finish reason or None)."""
        if self.empty_aborts:
            yield [], "abort"
            return
        await self._running.wait()  # a paused server lets new requests wait
        limit = body["sampling_params"]["max_new_tokens"]
        prompt = len(body["input_ids"])
        abort_round = self._abort_round
        for index in range(limit):
            if self._awake.is_set() is False:
                await self._awake.wait()
            if self.hold_at is not None and index >= self.hold_at:
                self.num_held += 1
                released = asyncio.create_task(self._released.wait())
                aborted = asyncio.create_task(self._aborted.wait())
                try:
                    await asyncio.wait({released, aborted}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self.num_held -= 1
                    released.cancel()
                    aborted.cancel()
            if self._abort_round != abort_round:
                yield [], "abort"
                return
            await self._running.wait()
            last = index == limit - 1
            stops = self.finish_at is not None and prompt + index + 1 >= self.finish_at
            yield [self.version], "stop" if stops else "length" if last else None
            if stops:
                return
            await asyncio.sleep(0)

    def _answer(self, start: int, versions: list[int], reason: str | None) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for index, version in enumerate(versions):
            if spans and spans[-1]["version"] == str(version):
                spans[-1]["end"] = index + 1
            else:
                spans.append({"version": str(version), "start": index, "end": index + 1})
        entries = [[-(start + i + v / 100), 1000 + start + i, None] for i, v in enumerate(versions)]
        return {
            "text": "",
            "output_ids": [entry[1] for entry in entries],
            "meta_info": {
                "id": "x",
                "finish_reason": {"type": reason} if reason else None,
                "output_token_logprobs": entries,
                "weight_version": str(self.version),
                "weight_versions": spans,
            },
        }


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


async def until(condition: Callable[[], object]) -> None:
    """Wait for a fact that no event announces."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


class FleetKit:
    """Starts fake servers and fleets over them."""

    def __init__(self, folder: Path) -> None:
        self.registry = FileNameRegistry(folder)
        self.servers: list[FakeServer] = []
        self.fleets: list[Fleet] = []

    async def server(self, index: int, **settings: Any) -> FakeServer:
        server = FakeServer(**settings)
        await server.start()
        self.registry.add(f"servers/{index}", server.registration(), replace=True)
        self.servers.append(server)
        return server

    async def fleet(self, num_servers: int, **config: Any) -> Fleet:
        settings = {"health_check_interval_s": 0.03, "setup_timeout": 5.0, "weight_update_timeout_s": 2.0}
        fleet = Fleet(self.registry, num_servers, InferenceEngineConfig(**(settings | config)), make_native_replica)
        self.fleets.append(fleet)
        await fleet.start()
        return fleet

    async def close(self) -> None:
        for fleet in self.fleets:
            await fleet.close()
        for server in self.servers:
            await server.die()
