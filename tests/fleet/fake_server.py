"""A server that makes known tokens, so that a whole answer can be checked exactly; its dialect is a subclass's.

The token at position p (counted over prompt and output) is 1000 + p; its log-probability is -(p + version / 100).
It can be told to hold (stop making tokens), hang (answer nothing), fail, refuse, or die in the middle of an answer.
What the servers of all dialects must have in common is said in conftest.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from aiohttp import web

from areal.api.config.rollout import InferenceEngineConfig
from areal.api.data import WeightUpdate
from areal.data.image_files import RunImages
from areal.fleet.fleet import Fleet
from areal.fleet.replica import AnswerForm, Replica
from areal.system.discovery import FileRegistry
from areal.system.durable import seal_folder
from areal.system.network import bind_socket, http_address
from areal.weights.weight_files import write_weights


class Refused(Exception):
    """The server answers with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a generation request asked for, in nobody's dialect."""

    request_id: str
    input_ids: list[int]
    max_new_tokens: int
    min_new_tokens: int
    stream: bool
    body: dict[str, Any]
    """As it was sent."""


class FakeServer(ABC):
    """The behaviour that all dialects share."""

    dialect: ClassVar[str]
    can_abandon: ClassVar[bool] = True
    """Whether a server that waits for a bucket can be told to stop waiting; else the trainer's end does."""
    takes_min_new_tokens: ClassVar[bool] = True
    """Whether the real server can be asked for a least number of tokens."""
    midway_status: ClassVar[int] = 500
    """Status of an update that fails when weights have been touched."""

    def __init__(self, *, version: int = 0, hold_at: int | None = None, finish_at: int | None = None) -> None:
        self.version = version
        self.hold_at = hold_at
        """Requests stop here, counted in tokens of this part, until `release` or an abort."""
        self.finish_at = finish_at
        """Absolute position after which a "stop" is reported."""
        self.requests: list[Asked] = []
        """Without the probes."""
        self.probes: list[Asked] = []
        """Requests of the weight canary."""
        self.adapter_versions: dict[str, int] = {}
        self.lag = 0
        """The next adapter is loaded as one of this many versions before."""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        """The acts below that were asked for: pause, resume, load, join, leave, receive, commit."""
        self.num_cancelled = 0
        self.fail_generate: int | None = None
        """HTTP status for generation."""
        self.empty_aborts = False
        self.fail_update: str = ""
        """How a weight update goes wrong: refuse (before anything changed), midway, hang or die."""
        self.fail_load = False
        """Does not tell its load."""
        self.torn = False
        """An update stopped midway."""
        self.keeps_cache = False
        """The last update left the keys and values of the old weights in the cache."""
        self.num_made: dict[str, int] = {}
        """Tokens by request id, sent or not."""
        self.num_held = 0
        """Requests that are held now."""
        self.num_running = 0
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

    # For a dialect to implement

    @staticmethod
    @abstractmethod
    def client(name: str, address: str, form: AnswerForm | None = None) -> Replica:
        """The adapter under test."""

    @abstractmethod
    def routes(self) -> Iterable[web.RouteDef]:
        """Handlers that read the dialect's JSON, call the acts below, and answer in the dialect's JSON."""

    @abstractmethod
    def error(self, status: int, message: str) -> web.Response:
        """How the server says that it will not or cannot."""

    # What handlers call. Each may raise Refused, which the app turns into `error`.

    async def answers(self) -> None:
        """Every handler waits here first: a server that hangs answers nothing."""
        await self._awake.wait()

    def pause(self, mode: str) -> None:
        """abort: running requests return what they have. retract: they stay. New ones wait inside the server."""
        self.calls.append(("pause", {"mode": mode}))
        self._running.clear()
        self.interrupt(mode)

    def interrupt(self, mode: str) -> None:
        """What happens to running requests at a pause, or when weights are exchanged between two steps."""
        if mode == "abort":
            aborted, self._aborted = self._aborted, asyncio.Event()
            self._abort_round += 1
            aborted.set()

    def resume(self) -> None:
        self.calls.append(("resume", {}))
        self._running.set()

    async def load(self, path: str) -> None:
        """Read a folder; `commit` follows."""
        self.calls.append(("load", {"path": path}))
        await self._take_in()
        if not (Path(path) / "model.safetensors").exists():
            raise Refused(400, f"{path} holds no weights")

    def join(self, *, group_name: str, rank: int, world_size: int) -> None:
        self.calls.append(("join", {"group_name": group_name, "rank": rank, "world_size": world_size}))

    def leave(self, group_name: str) -> None:
        """Leave the update group; a `receive` that waits in it fails."""
        self.calls.append(("leave", {"group_name": group_name}))
        left, self._left_group = self._left_group, asyncio.Event()
        left.set()

    async def receive(self) -> None:
        """One bucket over the group; `commit` follows the last."""
        self.calls.append(("receive", {}))
        await self._take_in()

    def commit(self, version: int) -> None:
        """From here on its weights are this version."""
        self.calls.append(("commit", {"version": version}))
        self.version = version
        self.torn = False

    @contextlib.asynccontextmanager
    async def running(self, asked: Asked) -> AsyncIterator[None]:
        """Around the whole handling of a generation request."""
        (self.probes if asked.request_id.startswith("canary-") else self.requests).append(asked)
        await self._awake.wait()
        if self.fail_generate:
            raise Refused(self.fail_generate, "cannot generate this")
        self.num_running += 1
        try:
            yield
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    async def make(self, asked: Asked) -> AsyncIterator[tuple[int | None, str | None]]:
        """The tokens of an answer, one by one: (version of the token or None for no token, finish reason)."""
        if self.empty_aborts:
            yield None, "abort"
            return
        await self._running.wait()  # a paused server lets new requests wait
        abort_round = self._abort_round
        self.num_made[asked.request_id] = 0
        for index in range(asked.max_new_tokens):
            await self._awake.wait()
            if self.hold_at is not None and index >= self.hold_at:
                await self._held()
            if self._abort_round != abort_round:
                yield None, "abort"
                return
            await self._running.wait()
            last = index == asked.max_new_tokens - 1
            stops = self.finish_at is not None and len(asked.input_ids) + index + 1 >= self.finish_at
            self.num_made[asked.request_id] += 1
            yield self.version_of(asked), "stop" if stops else "length" if last else None
            if stops:
                return
            await asyncio.sleep(0)

    def version_of(self, asked: Asked) -> int:
        """That of the adapter which the request names, if there is one."""
        name = asked.body.get("lora_path") or asked.body.get("model") or ""
        return self.adapter_versions.get(name, self.version)

    def keep_adapter(self, name: str) -> None:
        """An adapter was loaded: its tokens have the version in its name."""
        result = re.match(r"adapter-v(\d+)", name)
        self.adapter_versions[name] = max(int(result[1]) - self.lag, 0) if result else self.version
        self.lag = 0

    @property
    def generated_tokens(self) -> int:
        return sum(self.num_made.values())

    async def _held(self) -> None:
        self.num_held += 1
        released = asyncio.create_task(self._released.wait())
        aborted = asyncio.create_task(self._aborted.wait())
        try:
            await asyncio.wait({released, aborted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.num_held -= 1
            released.cancel()
            aborted.cancel()

    async def _take_in(self) -> None:
        if self.fail_update == "hang":
            await self._left_group.wait()
            self.torn = True
            raise Refused(self.midway_status, "the group was left")
        if self.fail_update == "die":
            await self.die()
        if self.fail_update == "midway":
            self.torn = True
            raise Refused(self.midway_status, "cannot load these weights")
        if self.fail_update == "refuse":
            raise Refused(400, "cannot load these weights")

    # For tests

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**30, middlewares=[self._refusals])
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        bound = bind_socket(port=port)
        await web.SockSite(self._runner, bound).start()
        self.address = http_address(bound)

    @web.middleware
    async def _refusals(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as refused:
            return self.error(refused.status, refused.message)

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

    def acts(self) -> list[str]:
        return [name for name, _ in self.calls]

    def details(self, act: str) -> list[dict[str, Any]]:
        return [details for name, details in self.calls if name == act]


def tokens(start: int, versions: list[int]) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of tokens from position `start` on."""
    places = range(start, start + len(versions))
    return [1000 + p for p in places], [-(p + v / 100) for p, v in zip(places, versions, strict=True)]


def spans(versions: list[int]) -> list[dict[str, Any]]:
    """The form in which both real servers tell versions."""
    result: list[dict[str, Any]] = []
    for index, version in enumerate(versions):
        if result and result[-1]["version"] == str(version):
            result[-1]["end"] = index + 1
        else:
            result.append({"version": str(version), "start": index, "end": index + 1})
    return result


async def until(condition: Callable[[], object]) -> None:
    """Wait for a fact that no event announces."""
    async with asyncio.timeout(200):
        while not condition():
            await asyncio.sleep(0.002)


class FleetKit:
    """Starts fake servers of one dialect and fleets over them."""

    def __init__(self, folder: Path, server_class: type[FakeServer]) -> None:
        self.registry = FileRegistry(folder / "names")
        self.servers: list[Any] = []
        self.fleets: list[Fleet] = []
        self.server_class = server_class
        self._folder = folder

    @property
    def dialect(self) -> str:
        return self.server_class.dialect

    async def server(self, index: int, **settings: Any) -> Any:
        server = self.server_class(**settings)
        await server.start()
        self.registry.add(f"servers/{index}", server.registration(), replace=True)
        self.servers.append(server)
        return server

    async def fleet(
        self,
        num_servers: int,
        *,
        abandoned: range = range(0),
        vision: RunImages | None = None,
        dtype: str = "float32",
        **config: Any,
    ) -> Fleet:
        settings: dict[str, Any] = {
            "health_check_interval_s": 0.03,
            "setup_timeout": 200.0,
            "weight_update_timeout_s": 100.0,
        } | config
        fleet = Fleet(
            self.registry,
            num_servers,
            InferenceEngineConfig(**settings),
            self.server_class.client,
            abandoned=abandoned,
            dtype=dtype,
            vision=vision,
        )
        self.fleets.append(fleet)
        await fleet.start()
        return fleet

    def disk(self, version: int) -> WeightUpdate:
        """An update from a folder that holds a whole checkpoint."""
        folder = self._folder / "weights" / f"v{version:06d}"
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
            write_weights(folder, [("weight", torch.full((2,), float(version)))])
            seal_folder(folder)
        return WeightUpdate(version=version, kind="disk", path=str(folder))

    async def close(self) -> None:
        for fleet in self.fleets:
            await fleet.close()
        for server in self.servers:
            await server.die()
