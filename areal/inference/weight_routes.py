"""HTTP routes for weight updates: from a folder, which may be copied first, or from the trainer's broadcast group.

The engine generates while weights are received. An update without a version is only received; /install_weights makes
the weights current that were received with the same `update_id`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from areal.api.data import MAX_REPLICAS, WeightSpec
from areal.api.errors import RequestError
from areal.inference.engine import PAUSE_MODES, Engine
from areal.inference.json_answers import json_response, ok, read_json
from areal.inference.request_parser import bool_field, check_fields, int_field, shown, text_field
from areal.observe.spans import track
from areal.system.folder_puller import FolderPuller
from areal.system.threads import in_daemon_thread

_FROM_DISK = frozenset({"model_path", "weight_version", "flush_cache", "abort_all_requests", "update_id"})
_INIT_GROUP = frozenset({"master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"})
_DISTRIBUTED = frozenset(
    {"names", "dtypes", "shapes", "group_name", "flush_cache", "weight_version", "load_format", "update_id"}
)
JOIN_TIMEOUT_S = 120.0
_in_thread = partial(in_daemon_thread, name="weight-update")


class WeightRoutes:
    """Weight updates of one server, one at a time. A client that disconnects does not interrupt one."""

    def __init__(self, engine: Engine, puller: FolderPuller) -> None:
        self._engine = engine
        self._puller = puller
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    def posts(self) -> dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]:
        return {
            "/pull_weights": self._pull,
            "/update_weights_from_disk": self._update_from_disk,
            "/init_weights_update_group": self._init_group,
            "/update_weights_from_distributed": self._update_from_distributed,
            "/install_weights": self._install,
            "/destroy_weights_update_group": self._destroy_group,
        }

    async def _pull(self, request: web.Request) -> web.StreamResponse:
        body = check_fields(await read_json(request), {"url", "mirrors"})
        url, mirrors = text_field(body, "url"), body.get("mirrors", [])
        if not isinstance(mirrors, list) or any(not isinstance(mirror, str) for mirror in mirrors):
            raise RequestError("mirrors must be a list of addresses", code="weights.invalid_request")
        folder = await asyncio.wrap_future(in_daemon_thread(lambda: self._puller.pull(url, mirrors), "pull weights"))
        return json_response({"path": str(folder)})

    async def _update_from_disk(self, request: web.Request) -> web.StreamResponse:
        body = check_fields(await read_json(request), _FROM_DISK)
        folder = Path(text_field(body, "model_path"))
        mode = "abort" if bool_field(body, "abort_all_requests", False) else _cache_mode(body)
        await self._receive(lambda: self._engine.weights.receive_folder(folder), body, mode)
        return ok()

    async def _receive(self, receive: Callable[[], None], body: Mapping[str, Any], mode: str) -> None:
        """Receive weights while the engine computes, and install them if the body has their version."""
        update_id = text_field(body, "update_id", "")
        version = None if body.get("weight_version") is None else text_field(body, "weight_version")

        def update() -> None:
            self._engine.weights.start(update_id)
            receive()
            if version is not None:
                self._engine.call(partial(self._engine.install_weights, version, mode, update_id)).result()

        await self._one_at_a_time(_in_thread, update)

    async def _install(self, request: web.Request) -> web.StreamResponse:
        body = check_fields(await read_json(request), {"weight_version", "mode", "update_id"})
        version, mode, update_id = (text_field(body, name) for name in ("weight_version", "mode", "update_id"))
        if mode not in PAUSE_MODES:
            message = f"mode must be one of {', '.join(PAUSE_MODES)}, got {shown(mode)}"
            raise RequestError(message, code="request.invalid_field")
        await self._one_at_a_time(self._engine.call, partial(self._engine.install_weights, version, mode, update_id))
        return ok()

    async def _init_group(self, request: web.Request) -> web.StreamResponse:
        body = check_fields(await read_json(request), _INIT_GROUP)
        arguments = (
            text_field(body, "master_address"),
            int_field(body, "master_port", None, 1, 65535),
            int_field(body, "rank_offset", None, 1, MAX_REPLICAS),
            int_field(body, "world_size", None, 2, 1 + MAX_REPLICAS),  # a native server is one rank
            text_field(body, "group_name"),
            text_field(body, "backend", "nccl"),
            JOIN_TIMEOUT_S,
        )
        # Joining changes no weight, so the engine continues meanwhile.
        await self._one_at_a_time(_in_thread, lambda: self._engine.weights.join(*arguments))
        return ok()

    async def _update_from_distributed(self, request: web.Request) -> web.StreamResponse:
        body = check_fields(await read_json(request), _DISTRIBUTED)
        if body.get("load_format") != "flattened_bucket":
            message = 'load_format must be "flattened_bucket": one broadcast for all names of a request'
            raise RequestError(message, code="weights.invalid_request")
        specs = _specs(body)
        self._check_group(text_field(body, "group_name"))
        await self._receive(lambda: self._engine.weights.receive(specs), body, _cache_mode(body))
        return ok()

    async def _destroy_group(self, request: web.Request) -> web.StreamResponse:
        body = check_fields(await read_json(request), {"group_name"})
        self._check_group(text_field(body, "group_name"))
        # Without the lock: leaving also ends a receive that waits for a dead trainer.
        await asyncio.wrap_future(_in_thread(self._engine.weights.leave))
        return ok()

    async def _one_at_a_time(
        self, submit: Callable[[Callable[[], None]], Future[None]], command: Callable[[], None]
    ) -> None:
        """Run `command` with `submit` when all earlier ones are done."""

        async def run() -> None:
            async with self._lock:
                with track("weight command", "weights"):
                    await asyncio.wrap_future(submit(command))

        task = asyncio.create_task(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    def _check_group(self, name: str) -> None:
        if not name or name != self._engine.weights.group_name:
            here = self._engine.weights.group_name or "none"
            message = f"this server is not in the update group {name!r} (it is in {here})"
            raise RequestError(message, code="weights.no_group")


def _cache_mode(body: Mapping[str, Any]) -> str:
    return "retract" if bool_field(body, "flush_cache", True) else "in_place"


def _specs(body: Mapping[str, Any]) -> list[WeightSpec]:
    names, dtypes, shapes = (body.get(field) for field in ("names", "dtypes", "shapes"))
    if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
        problem = "must be lists"
    elif not names or not len(names) == len(dtypes) == len(shapes):
        problem = f"have {len(names)}, {len(dtypes)} and {len(shapes)} items: the counts must be equal, and not 0"
    elif any(not isinstance(text, str) for text in [*names, *dtypes]):
        problem = "must contain strings, strings and lists of sizes"
    elif any(not isinstance(one, list) or any(type(size) is not int or size < 0 for size in one) for one in shapes):
        problem = "must contain strings, strings and lists of integers >= 0"
    else:
        return [
            WeightSpec(name=name, dtype=dtype.removeprefix("torch."), shape=shape)
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
    raise RequestError(f"names, dtypes and shapes {problem}", code="weights.invalid_request")
