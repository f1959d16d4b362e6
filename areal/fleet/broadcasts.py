"""The host of a foreign server as a rank of the trainer's update group (actor.weight_update_mode=delta_xccl).

A process of its own receives, because the host does not import torch: `areal.weights.receiver`. It writes
the layout that `delta_disk` has on a shared disk, from which `FolderPuller` makes the version and verifies it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from areal.api.errors import RequestError, WeightSyncError
from areal.system.folders import (
    DELTA,
    DELTA_FILE,
    FOLDER_NAME,
    LIST,
    SHARED,
    FolderList,
    FolderPuller,
    LocalFolder,
    Pulled,
)
from areal.system.network import store_prefix
from areal.system.process import in_daemon_thread, tied_to_this_process

COMMAND = (sys.executable, "-m", "areal.weights.receiver")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRank:
    """One rank of an update group."""

    master_address: str
    master_port: int
    rank: int
    world_size: int
    group_name: str
    backend: str


@dataclass(frozen=True, slots=True)
class Broadcast:
    """What a host receives: see `published`, `listed` and `delta_bytes` of `areal.api.data.WeightUpdate`."""

    group: UpdateRank
    name: str
    listed: FolderList
    delta_bytes: dict[str, int]

    @classmethod
    def parse(cls, body: dict[str, Any], part: int) -> Self:
        """The broadcast for a part of a server. KeyError, TypeError or ValueError for a body of another form."""
        group = UpdateRank(
            master_address=str(body["master_address"]),
            master_port=int(body["master_port"]),
            rank=int(body["rank_offset"]) + part,
            world_size=int(body["world_size"]),
            group_name=str(body["group_name"]),
            backend=str(body["backend"]),
        )
        deltas = {str(base): int(size) for base, size in body["delta_bytes"].items()}
        made = cls(group, str(body["published"]), FolderList.from_bytes(str(body["listed"]).encode()), deltas)
        if not FOLDER_NAME.fullmatch(made.name) or made.listed.name(made.name.partition("-")[0]) != made.name:
            raise ValueError("the list of files is not that of the version")
        return made

    def files(self, folder: Path) -> dict[Path, int]:
        """The files to receive, in their order, and their sizes."""
        if not self.delta_bytes:
            return {folder / self.name / file.name: file.num_bytes for file in self.listed.files}
        sizes = enumerate(self.delta_bytes.values())
        return {folder / f"{DELTA}{number}" / DELTA_FILE: size for number, size in sizes}


class BroadcastReceiver:
    """Receives one version at a time."""

    def __init__(
        self, puller: FolderPuller, token: str, *, part: int, limit_s: float, command: Sequence[str] = COMMAND
    ) -> None:
        """`part`: number of this host among those of its server. `limit_s`: of each wait for the other ranks."""
        self.part = part
        self._puller, self._limit_s, self._command = puller, limit_s, command
        self._key = f"{store_prefix(token, 'received weights')[:24]}-{secrets.token_hex(4)}"
        self._local: LocalFolder | None = None
        self._num_calls = 0
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Make the folder for what is received, and start the process: an import of torch can take longer than the
        trainer waits for a rank."""
        self._local = await asyncio.to_thread(LocalFolder, self._key)
        self._process = await self._new_process()

    async def end(self) -> None:
        await self._end_process()
        if self._local is not None:
            await asyncio.to_thread(self._local.close)

    async def receive(self, broadcast: Broadcast) -> Pulled:
        """The folder of the version. RequestError when the differences do not make it: then whole weights are needed;
        WeightSyncError when the broadcast fails, and weights.not_written when everything was received but cannot be
        kept. A caller that is cancelled makes this rank leave the group."""
        async with self._lock:
            assert self._local is not None, "start was awaited"
            self._num_calls += 1  # the thread of a call before, which was cancelled, may still use its folder
            folder = self._local.path / str(self._num_calls)
            try:
                await self._ask({**asdict(broadcast.group), "timeout_s": self._limit_s}, broadcast.files(folder))
            except BaseException:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                raise
        making = in_daemon_thread(lambda: self._make(broadcast, folder), "make a version")
        # Not ended with the call: no rank waits for it any more, and the thread removes the folder.
        pulled = await asyncio.shield(asyncio.wrap_future(making))
        return replace(pulled, num_bytes=0)  # of those that were copied from a server

    async def _ask(self, group: dict[str, Any], files: dict[Path, int]) -> None:
        if self._process is None:
            try:
                self._process = await self._new_process()
            except OSError as error:
                message = f"the process that receives weights cannot be started: {error.strerror or error}"
                raise WeightSyncError(message, code="weights.transfer_failed") from error
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        request = {**group, "files": {str(path): size for path, size in files.items()}}
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # the end of its output tells the same
                await process.stdin.drain()
            line = await process.stdout.readline()
            if not line:
                message = f"the process that receives weights ended with exit code {await process.wait()}"
                raise WeightSyncError(message, code="weights.transfer_failed")
        except BaseException:
            await self._end_process()
            with contextlib.suppress(OSError):  # the next call tries again
                self._process = await self._new_process()
            raise
        if answer := json.loads(line):
            raise WeightSyncError(answer["error"], code=answer["code"])

    async def _new_process(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=tied_to_this_process(),
        )

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _make(self, broadcast: Broadcast, folder: Path) -> Pulled:
        """The version from what was received in `folder`, which is removed."""
        version, deltas = folder / broadcast.name, dict[str, str]()
        try:
            version.mkdir(parents=True, exist_ok=True)
            (version / LIST).write_bytes(broadcast.listed.to_bytes())
            for number, base in enumerate(broadcast.delta_bytes):
                received = folder / f"{DELTA}{number}"
                listed = FolderList.of(received)
                (received / LIST).write_bytes(listed.to_bytes())
                named = received.rename(folder / listed.name(received.name))
                deltas[base] = f"{SHARED}{named}"
            return self._puller.pull(f"{SHARED}{version}", (), deltas)
        except RequestError as error:
            raise RequestError(str(error), code="weights.bad_delta") from error
        except WeightSyncError as error:
            raise WeightSyncError(str(error), code="weights.not_written") from error
        except OSError as error:
            message = f"the weights in {folder} cannot be kept: {error.strerror or error}"
            raise WeightSyncError(message, code="weights.not_written") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
