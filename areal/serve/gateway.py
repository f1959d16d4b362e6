"""The HTTP service: routes of the Tinker SDK 0.38 under /api/v1 for clients, and /trainer for the trainer ranks.

A client waits for a result in POST /retrieve_future, which is held until there is one, for at most `HOLD_S`. A request
is journalled before its number is answered, and its result before it is given out, so a repeated request of any client
or trainer, after the restart of any process, is computed once.
"""

import asyncio
import contextlib
import hashlib
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from areal.api.errors import ArealError, RequestError, ServerUnavailable
from areal.observe.log import get_logger
from areal.serve.journal import Event, Journal
from areal.serve.sampling import Sampling
from areal.serve.tenants import SAMPLER, TRAINING, Command, Model, NotFound, Operation, SavedWeights, Schedule, Tenants
from areal.serve.wire import PROTOBUF, address_of
from areal.system.durable import remove_folder
from areal.system.http_guard import RequestGuard, read_body
from areal.system.network import Host

_log = get_logger("serve")

TESTED = "0.38"
"""The version of the SDK whose requests are known."""
HOLD_S = 25.0
"""A request for a result is held for this time. The SDK gives up after 45 s, and asks again at once after an answer."""
POLL_S = 5.0
MAX_BODY_BYTES = 64 * 2**20
MAX_DELIVERIES = 3
"""A request that the trainer died of as often as this fails."""
API = "/api/v1"
Answer = Mapping[str, Any]


class Service:
    """The state of the service with its journal: what routes and trainer ranks ask for and change."""

    def __init__(
        self,
        folder: Path,
        *,
        model_name: str,
        tokenizer: str,
        context_length: int,
        max_rank: int,
        max_resident: int,
        sampling: Sampling,
    ) -> None:
        """`folder`: of journal and weights. `model_name`: what clients call the base model, `tokenizer`: whose tokens
        they send. Made in the running loop."""
        self.folder, self.model_name, self.tokenizer = folder, model_name, tokenizer
        self.context_length, self.max_rank = context_length, max_rank
        self.journal, events = Journal.open(folder / "journal")
        self.tenants = Tenants()
        for event in events:
            self.tenants.apply(event)
        self.schedule = Schedule(self.tenants, max_resident=max_resident)
        self.schedule.reset()
        self.sampling = sampling
        self._changed = asyncio.Condition()
        self._id = uuid.uuid4().hex[:12]
        self.run_id = -1
        self._number, self._command = 0, None
        self._body = b""

    def __repr__(self) -> str:
        return f"Service({self.folder})"

    async def record(self, event: Event, body: bytes | None = None) -> None:
        """Journal an event, then change the state by it and wake who waits for that."""
        await self.journal.append(event, body)
        self.tenants.apply(event)
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, is_true: Callable[[], bool], limit_s: float) -> bool:
        """Whether `is_true()` within `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(is_true)
        return is_true()

    # Requests of clients.

    async def accept(self, model: str, seq: int, kind: str, arguments: Answer, body: bytes | None = None) -> str:
        """Journal a request and return its id. A repetition gets the same id; RequestError for another content."""
        content = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS) + (body or b"")
        digest = hashlib.sha256(kind.encode() + content).hexdigest()
        known = self.tenants.models[model].operations.get(seq)
        if known is None:
            event = {"event": "request", "model": model, "seq": seq, "kind": kind, "arguments": arguments}
            await self.record(event | {"digest": digest}, body)
            known = self.tenants.models[model].operations[seq]
        if known.digest != digest:
            text = f"request {seq} of {model} exists with another content: use the next seq_id"
            raise RequestError(text, code="request.duplicate_id")
        return known.request_id

    def result_of(self, operation: Operation) -> bytes:
        assert operation.result is not None
        return self.journal.read(operation.result)

    # Commands for the trainer.

    async def command(self, run_id: int, epoch: str, number: int) -> tuple[dict[str, Any], bytes] | None:
        """Command `number` of the trainer that started for the `run_id`-th time; None = there is none yet.

        All ranks get the same commands. The first answer to new ranks, and after a restart of this gateway, is that
        they begin again.
        """
        if run_id > self.run_id:
            self.run_id, self._number, self._command = run_id, 0, None
            self.schedule.reset()
        own = f"{self._id}:{self.run_id}"
        if epoch != own:
            return {"kind": "reset", "epoch": own}, b""
        if number == self._number + 1 and self._command is None:
            if not await self.wait(self._has_command, POLL_S):
                return None
        if number != self._number or self._command is None:
            return None
        command = self._command
        head = {"kind": command.kind, "model": command.model, "seq": command.seq, "arguments": command.arguments}
        return head | {"folder": str(self.folder), "number": number}, self._body

    def _has_command(self) -> bool:
        """Choose the next command, unless there is one."""
        if self._command is not None:
            return True
        while (command := self.schedule.next()) is not None and command.kind == "skip":
            self.schedule.done(command)
        if command is None:
            return False
        operation = command.operation
        if operation is not None:
            operation.deliveries += 1
        self._command, self._number = command, self._number + 1
        self._body = b"" if command.body is None else self.journal.read(command.body)
        return True

    def refusal(self, command: Command) -> str:
        """Why a request fails without the trainer; empty when the trainer computes it."""
        model, operation = self.tenants.models[command.model], command.operation
        if operation is None:
            return ""
        if operation.kind == "step" and model.failed_loss is not None:
            return f"the gradients of request {model.failed_loss} failed: nothing was updated"
        if operation.deliveries > MAX_DELIVERIES:
            return f"the trainer died {MAX_DELIVERIES} times of this request"
        return ""

    async def finish(self, run_id: int, number: int, *, error: str, result: bytes) -> None:
        """The trainer has executed its command. A late or repeated report changes nothing."""
        command = self._command
        if command is None or (run_id, number) != (self.run_id, self._number):
            return
        model, operation = self.tenants.models[command.model], command.operation
        if command.kind == "snapshot" and not error:
            await self._keep_snapshot(model, command.seq)
        if operation is not None:
            if not error and operation.kind in ("save", "export"):
                await self._keep_weights(model, operation)
                result = await self._saved_answer(model, operation)
            elif not error and operation.kind in ("create", "load"):
                result = orjson.dumps({"type": "create_model", "model_id": model.id, "path": operation.arguments.get("path")})
            body = failure(error) if error else result
            event = {"event": "result", "model": model.id, "seq": operation.seq, "ok": not error}
            await self.record(event, body)
        self.schedule.done(command)
        self._command = None if error else self.schedule.snapshot_after(command)
        if self._command is not None:
            self._number, self._body = self._number + 1, b""
        async with self._changed:
            self._changed.notify_all()

    async def _keep_snapshot(self, model: Model, seq: int) -> None:
        before = model.snapshot
        await self.record({"event": "snapshot", "model": model.id, "seq": seq})
        if before is not None and before != seq:
            await asyncio.to_thread(remove_folder, self.snapshot_folder(model.id, before))

    def snapshot_folder(self, model: str, seq: int) -> Path:
        return self.folder / "snapshots" / file_name(model) / f"{seq:08d}"

    async def _keep_weights(self, model: Model, operation: Operation) -> None:
        arguments = operation.arguments
        kind = TRAINING if operation.kind == "save" else SAMPLER
        ttl, at = arguments.get("ttl_seconds"), time.time()
        event = {"event": "saved", "model": model.id, "kind": kind, "name": arguments["name"], "at": at}
        event |= {"settings": model.settings, "expires_at": None if ttl is None else at + ttl}
        await self.record(event | {"user_metadata": arguments.get("user_metadata")})

    async def _saved_answer(self, model: Model, operation: Operation) -> bytes:
        kind = TRAINING if operation.kind == "save" else SAMPLER
        path = f"tinker://{model.id}/{kind}/{operation.arguments['name']}"
        if "sampler" not in operation.arguments:
            return orjson.dumps({"type": f"save_{kind}", "path": path})
        sampler = operation.arguments["sampler"]
        await self.record({"event": "sampler", "id": sampler, "session": model.session, "path": path})
        return orjson.dumps({"type": "save_weights_for_sampler", "sampling_session_id": sampler, "path": None})

    def weights_folder(self, saved: SavedWeights) -> Path:
        return weights_folder(self.folder, saved.path)


def file_name(model: str) -> str:
    """The name of the folder of a model, whose id has colons."""
    return model.replace(":", "-")


def weights_folder(folder: Path, path: str) -> Path:
    """The folder of a tinker:// path."""
    model, kind, name = path.removeprefix("tinker://").split("/")
    return folder / kind / file_name(model) / name


def failure(message: str, category: str = "user") -> bytes:
    """The result of a failed request."""
    return orjson.dumps({"error": message, "category": category})


def date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class TrainerRoutes:
    """`POST /trainer/command` and `/trainer/result`, with the run's token."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def command(self, request: web.Request) -> web.Response:
        asked = orjson.loads(await read_body(request))
        service = self._service
        found = await service.command(asked["run_id"], asked["epoch"], asked["number"])
        if found is None:
            return web.Response(status=204)
        head = orjson.dumps(found[0])
        return web.Response(body=len(head).to_bytes(4) + head + found[1], content_type="application/octet-stream")

    async def result(self, request: web.Request) -> web.Response:
        query = request.query
        body = await read_body(request)
        error = request.headers.get("X-Error", "")
        run_id, number = int(query["run_id"]), int(query["number"])
        await self._service.finish(run_id, number, error=orjson.loads(error) if error else "", result=body)
        return web.Response(status=204)


def asked_for(operation: Operation) -> bool:
    """Whether its result is a message of protobuf."""
    return operation.kind == "loss" and operation.is_ok


__all__ = ["API", "HOLD_S", "PROTOBUF", "NotFound", "Service", "TrainerRoutes", "address_of", "asdict", "hmac", "Host"]
