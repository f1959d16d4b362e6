"""The state of the service with its journal: what clients and trainer ranks ask for, and how that changes it."""

import asyncio
import contextlib
import hashlib
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from areal.api.errors import RequestError
from areal.models.adapter_files import base_fingerprint
from areal.serve.journal import Event, Journal
from areal.serve.tenants import INFLIGHT, TRAINING, Command, Model, Operation, SavedWeights, Schedule, Tenants
from areal.system.durable import remove_folder

POLL_S = 5.0
"""A trainer rank that asks for a command is answered after this time."""
MAX_DELIVERIES = 3
"""A request of which the trainer died as often as this fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The base model, as clients see it."""

    name: str
    tokenizer: str
    """Folder or hub name of the tokenizer that clients load."""
    context_length: int
    max_rank: int
    max_resident: int
    """Adapters in the memory of the trainer; the others are on disk."""
    is_full: bool = False
    """All weights of the model are trained, without adapters. One model is resident."""


STATE, ADAPTER = "state", "adapter"
"""The parts of saved weights: what training continues from, and what servers load: an adapter in the format of peft, or
a whole checkpoint."""


def base_folder(folder: Path, model: Path) -> Path:
    """Where the weights of the checkpoint `model` are in both of these forms, before any training (--full)."""
    return folder / "base" / base_fingerprint(model)


def model_folder_name(model: str) -> str:
    """The name of the folder of a model, whose id has colons."""
    return model.replace(":", "-")


def weights_folder(folder: Path, path: str, seq: int) -> Path:
    """Where the weights are that request `seq` saved under a tinker:// path."""
    model, kind, name = path.removeprefix("tinker://").split("/")
    return folder / kind / model_folder_name(model) / name / f"{seq:08d}"


def snapshot_folder(folder: Path, model: str, seq: int) -> Path:
    """Where the state of a model after its request `seq` is."""
    return folder / "snapshots" / model_folder_name(model) / f"{seq:08d}"


def failure(message: str, category: str = "user") -> bytes:
    """The result of a failed request."""
    return orjson.dumps({"error": message, "category": category})


class Service:
    """Made in the running loop. Its owner awaits `journal.run`."""

    def __init__(self, folder: Path, served: ServedModel, *, world_size: int) -> None:
        """`folder`: of the journal and all weights. `world_size`: trainer ranks."""
        self.folder, self.served = folder, served
        self.tenants = Tenants()
        self.journal = Journal(folder / "journal", self.tenants)
        self._schedule = Schedule(self.tenants, max_resident=served.max_resident)
        self._schedule.reset()
        self._world_size = world_size
        self._changed = asyncio.Condition()
        self._arriving: dict[str, asyncio.Task[None]] = {}
        """What is being recorded for requests that may be repeated meanwhile."""
        self._choosing = asyncio.Lock()
        self._id = uuid.uuid4().hex[:12]
        self._run_id = -1
        self._number = 0
        self._command: Command | None = None
        self._body = b""
        self._reported: set[int] = set()  # The ranks that have executed the command.
        self._result = b"", False
        self.is_sampled: Callable[[Path], bool] = lambda _adapter: False
        """Whether samples need the adapter in a folder. Who samples sets it."""

    def describe(self) -> str:
        """What the service does, for the heartbeat."""
        models = self.tenants.models.values()
        slots = f"{sum(model.is_resident for model in models)} of {self.served.max_resident} slots taken"
        if self._command is None:
            return f"serves {len(models)} models; {slots}"
        return f"{slots}; {self._command.kind} {self._command.seq} of {self._command.model}"

    async def record(self, event: Event, body: bytes | None = None) -> None:
        """Journal an event, which changes the state, and wake who waits for that."""
        await self.journal.append(event, body)
        await self._notify()

    async def record_once(self, key: str, event: Event, body: bytes | None = None) -> None:
        """Record an event for `key`, which the caller has not seen recorded. Simultaneous calls record one of them."""
        if key not in self._arriving:
            self._arriving[key] = asyncio.create_task(self.record(event, body), name=f"record {key}")
        try:
            await asyncio.shield(self._arriving[key])
        finally:
            self._arriving.pop(key, None)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, is_true: Callable[[], bool], limit_s: float) -> bool:
        """Whether `is_true()` within `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(is_true)
        return is_true()

    async def accept(
        self, model: str, seq: int, kind: str, arguments: Mapping[str, Any], body: bytes | None = None
    ) -> str:
        """Journal a request of a client and return its id. A repeated one gets the same id; RequestError when `seq`
        was used for another content, or has no room now."""
        content = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS) + (body or b"")
        digest = hashlib.sha256(kind.encode() + content).hexdigest()
        operations = self.tenants.models[model].operations
        if seq not in operations:
            self.tenants.models[model].check_known(seq)
            self.tenants.models[model].check_room(seq)
            event = {"event": "request", "model": model, "seq": seq, "kind": kind, "arguments": dict(arguments)}
            await self.record_once(f"{model}:{seq}", event | {"digest": digest}, body)
        if operations[seq].digest != digest:
            text = f"request {seq} of {model} exists with another content: use the next seq_id"
            raise RequestError(text, code="request.duplicate_id")
        return operations[seq].request_id

    # ------------------------------------------------------------------------------------------------------------------
    # The trainer ranks: all get the same commands, one after another.

    async def command(self, run_id: int, epoch: str, number: int) -> tuple[dict[str, Any], bytes] | None:
        """Command `number` for a rank of the `run_id`-th start of the trainer, with its body; None = not yet.

        New ranks, and all ranks after a restart of this process, are first told to begin again, under a new `epoch`.
        """
        if run_id > self._run_id:
            self._run_id, self._number, self._command = run_id, 0, None
            self._schedule.reset()
        if epoch != self._epoch:
            return {"kind": "reset", "epoch": self._epoch}, b""
        if number == self._number + 1:
            await self._choose()
        if number != self._number or self._command is None:
            await self.wait(lambda: self._may_answer(number), POLL_S)
            return None
        command = self._command
        return {
            "kind": command.kind, "model": command.model, "seq": command.seq, "arguments": dict(command.arguments),
        }, self._body  # fmt: skip

    @property
    def _epoch(self) -> str:
        return f"{self._id}:{self._run_id}"

    def _may_answer(self, number: int) -> bool:
        """Whether a rank that asks for command `number` should ask again."""
        if self._command is None:
            return any(model.is_runnable for model in self.tenants.models.values())
        return number == self._number

    async def _choose(self) -> None:
        """Choose the next command, once the one before is done. Requests that fail without the trainer get a result."""
        async with self._choosing:
            while self._command is None and (command := self._schedule.next()) is not None:
                operation = command.operation
                problem = self.tenants.models[command.model].problem
                if operation is not None and operation.deliveries >= MAX_DELIVERIES:
                    problem = f"the trainer died {MAX_DELIVERIES} times of this request"
                if command.kind == "skip":
                    self._schedule.done(command)
                elif operation is not None and problem:
                    await self._finish(operation, failure(problem, "server"), ok=False)
                elif operation is not None and (text := self._refusal(operation)):
                    await self._finish(operation, failure(text), ok=False)
                else:
                    if operation is not None:
                        operation.deliveries += 1
                    self._set(command)

    def _set(self, command: Command) -> None:
        self._command, self._number, self._reported = command, self._number + 1, set()
        self._body = b"" if command.body is None else self.journal.read(command.body)

    def _refusal(self, operation: Operation) -> str:
        """Why a request fails without the trainer; empty when the trainer computes it."""
        model = self.tenants.models[operation.model]
        if operation.kind == "invalid":
            return operation.arguments["error"]
        if operation.kind == "step" and model.failed_loss is not None:
            return f"the gradients of request {model.failed_loss} failed: nothing was updated"
        return ""

    async def finish(self, epoch: str, number: int, rank: int, *, result: bytes, failed: bool) -> None:
        """A rank has executed command `number`. Repeated and late reports change nothing; the report of the last rank
        ends the command, with the result of rank 0."""
        command = self._command
        if command is None or (epoch, number) != (self._epoch, self._number) or rank in self._reported:
            return
        self._reported.add(rank)
        if rank == 0:
            self._result = result, failed
        if len(self._reported) < self._world_size:
            return
        body, is_error = self._result
        error = str(orjson.loads(body)["error"]) if is_error else ""
        model, operation = self.tenants.models[command.model], command.operation
        self._schedule.done(command, error=error)
        if command.kind == "load" and not is_error:
            # The answer comes with the snapshot: a restart must not read the path again.
            self._set(Command(kind="snapshot", model=model.id, seq=command.seq, operation=operation))
            return await self._notify()
        if operation is not None:
            if not is_error and operation.kind in ("save", "export"):
                body = await self._keep_weights(model, operation)
            elif not is_error and operation.kind in ("create", "load"):
                body = orjson.dumps({"model_id": model.id, "path": operation.arguments.get("path")})
            if is_error and command.kind == "snapshot":
                model.rewind()  # the load that it belongs to fails
            await self._finish(operation, body, ok=not is_error)
        elif command.kind == "snapshot" and not is_error and model.snapshot != command.seq:
            await self._record_of(model, {"event": "snapshot", "model": model.id, "seq": command.seq})
        self._command = None  # not before the result is recorded: the next command may depend on it
        if not is_error and (due := self._schedule.snapshot_after(command)) is not None:
            self._set(due)
        await self._notify()

    async def _finish(self, operation: Operation, body: bytes, *, ok: bool) -> None:
        event = {"event": "result", "model": operation.model, "seq": operation.seq, "ok": ok}
        await self._record_of(self.tenants.models[operation.model], event, body)

    async def _record_of(self, model: Model, event: Event, body: bytes | None = None) -> None:
        """Record an event, and remove the snapshot that it replaces."""
        before = model.snapshot
        await self.record(event, body)
        folder = snapshot_folder(self.folder, model.id, before or 0)
        if before not in (None, model.snapshot) and folder.exists():
            await asyncio.to_thread(remove_folder, folder)

    async def _keep_weights(self, model: Model, operation: Operation) -> bytes:
        """Record the weights that the trainer wrote, and the sampler that was asked for. Returns the answer."""
        arguments = operation.arguments
        kind = TRAINING if operation.kind == "save" else arguments["where"]
        ttl_s, at = arguments.get("ttl_seconds"), time.time()
        path = f"tinker://{model.id}/{kind}/{arguments['name']}"
        event = {"event": "saved", "model": model.id, "kind": kind, "name": arguments["name"], "at": at}
        event |= {"settings": model.settings, "seq": operation.seq, "expires_at": None if ttl_s is None else at + ttl_s}
        event |= {"num_steps": model.num_steps}
        await self.record(event | {"user_metadata": arguments.get("user_metadata")})
        if "sampler" not in arguments:
            return orjson.dumps({"path": path})
        sampler = {"event": "sampler", "id": arguments["sampler"], "session": model.session, "path": path}
        is_inflight = arguments["name"] == INFLIGHT
        await self.record(sampler | {"seq": None if is_inflight else operation.seq})
        if is_inflight:  # those that are still sampled leave after a later save
            folders = sorted(weights_folder(self.folder, path, 0).parent.iterdir())
            for folder in folders[:-2]:
                if not self.is_sampled(folder / ADAPTER):
                    await asyncio.to_thread(remove_folder, folder)
        return orjson.dumps({"sampling_session_id": arguments["sampler"]})

    async def change(self, saved: SavedWeights, **changes: Any) -> None:
        """Record saved weights with other values."""
        await self.record({"event": "saved", **asdict(replace(saved, **changes))})

    async def delete(self, saved: SavedWeights) -> None:
        """Delete saved weights. Samplers that use them get errors from now on."""
        await self.record({"event": "deleted", "path": saved.path})
        folder = weights_folder(self.folder, saved.path, saved.seq).parent
        if folder.exists():
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def delete_expired(self) -> None:
        """Delete saved weights whose time is over."""
        now = time.time()
        for saved in [saved for saved in self.tenants.saved.values() if not self.tenants.is_saved(saved.path, now)]:
            await self.delete(saved)
