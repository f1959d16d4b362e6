"""A trainer that publishes differences, or a server that takes them, as a process which ends at a chosen operation.

`python -m tests.faults.delta_process trainer|server KIND SEED` prints "ready" and answers each line of JSON with one.
KIND: http, disk, http-memory or disk-memory, where a server keeps what differences make in memory, as a native one
does; collective, or hosted, where the host of a foreign server receives. "kill_at": the number of the operation, from
the start of the command on, at which the process kills itself: on files or sockets, and with a broadcast a call of a
function of areal.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from areal.api.data import WeightSpec, WeightUpdate
from areal.api.errors import ArealError, RequestError, WeightSyncError
from areal.fleet.broadcasts import Broadcast, BroadcastReceiver
from areal.fleet.server_client import group_body
from areal.inference.weight_update import ServedWeights
from areal.system import folders
from areal.system.folders import FolderPuller
from areal.system.network import TOKEN_VARIABLE, Host
from areal.weights import weight_image
from areal.weights.collective import DeltaCollectiveChannel
from areal.weights.disk import DiskDeltaChannel, HttpDeltaChannel
from areal.weights.weight_files import WeightsChecksum
from tests.expect import serve
from tests.fake_ranks import FakeRanks
from tests.trainer.conftest import RankGroup

LIMIT_S = 60.0
BROADCAST = ("collective", "hosted")
COUNTED = ("open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "socket.connect")


class Model(nn.Module):
    """Some bfloat16 weights, of which 2% change by one unit in the last place from one version to the next."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = torch.Generator().manual_seed(seed)
        self.version = 0
        self.wide = nn.Parameter(self._random(300, 400), requires_grad=False)
        self.long = nn.Parameter(self._random(50_001), requires_grad=False)

    def advance(self, version: int) -> None:
        while self.version < version:
            self.version += 1
            for value in self.parameters():
                moved = torch.rand(value.shape, generator=self._draw) < 0.02
                value.data.view(torch.int16).add_(moved.to(torch.int16))

    def checksum(self) -> str:
        result = WeightsChecksum()
        for name, value in self.named_parameters():
            result.add(name, value)
        return result.hexdigest()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named_parameters()

    def weight_specs(self) -> list[WeightSpec]:
        return [
            WeightSpec(name=name, shape=[*value.shape], dtype="bfloat16") for name, value in self.named_parameters()
        ]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._draw).to(torch.bfloat16)


class Operations:
    """Counts the operations of this process and ends it at one of them."""

    def __init__(self, *, calls: bool = False) -> None:
        """`calls`: of functions of areal are counted too."""
        self.count, self.kill_at = 0, 0
        if calls:
            threading.setprofile(self._profile)
            sys.setprofile(self._profile)
        write = os.pwrite

        def counted_write(file: int, data: Any, offset: int) -> int:
            self.note()
            return write(file, data, offset)

        os.pwrite = counted_write
        sys.addaudithook(lambda event, _: self.note() if event in COUNTED else None)

    def start(self, kill_at: int) -> None:
        self.count, self.kill_at = 0, kill_at

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and "/areal/" in frame.f_code.co_filename:
            self.note()

    def note(self) -> None:
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Noted:
    """The controller: keeps the update for the answer. A collective one is printed; the next line of standard input
    tells which servers lack it, and whether all failed."""

    def __init__(self) -> None:
        self.update: WeightUpdate | None = None
        self.served = -1
        self.lacking: list[str] = []

    def start_update(self, update: WeightUpdate) -> None:
        self.update = update

    def live_replicas(self, version: int) -> list[str]:
        return self.lacking

    def publish(self, update: WeightUpdate) -> None:
        if update.is_folder:
            return
        if update.replicas:
            print(json.dumps({"update": asdict(update)}), flush=True)  # noqa: T201
            answer = json.loads(sys.stdin.readline())
            self.lacking = answer["lacking"]
            self.served = self.served if answer["all_failed"] else update.version
        if self.served != update.version:
            raise WeightSyncError("no server has it")


def train(kind: str, seed: int) -> None:
    """Ranks are threads: killed together, as a launcher ends them."""
    model, control, operations = Model(seed), Noted(), Operations(calls=kind.partition("-")[0] in BROADCAST)

    def channel_of(rank: int) -> Any:
        common: tuple[Any, ...] = (model, FakeRanks(rank, group if group.size > 1 else None), control)
        if kind.startswith("http"):
            return HttpDeltaChannel(*common, host=Host())
        if kind.startswith("disk"):
            return DiskDeltaChannel(*common, Path(os.environ["TMPDIR"]).parent / "shared", host=Host())
        return DeltaCollectiveChannel(*common, bucket_bytes=0, backend="gloo", timeout_s=LIMIT_S)

    group = RankGroup(2 if kind.endswith("ranks") else 1)
    channels = group.run(channel_of)
    for line in sys.stdin:
        command = json.loads(line)
        model.advance(command["version"])
        control.lacking = command.get("replicas", [])
        operations.start(command["kill_at"])
        group.run(lambda rank: serve(channels[rank], command["version"]))  # noqa: B023 - it ends before the next command
        update = control.update or WeightUpdate(version=command["version"], kind="collective")
        answer = {"url": update.path, "deltas": update.deltas, "num_operations": operations.count}
        answer["bytes"] = channels[0].metrics()["update_weights/bytes"].value
        print(json.dumps(answer), flush=True)  # noqa: T201


def receive(seed: int) -> None:
    """A server that takes broadcasts."""
    model, operations = Model(seed), Operations(calls=True)
    served = ServedWeights(model)
    for line in sys.stdin:
        command = json.loads(line)
        update = TypeAdapter(WeightUpdate).validate_python(command["update"])
        operations.start(command["kill_at"])
        answer: dict[str, Any] = {}
        try:
            if served.group_name != update.group_name:
                where = update.master_address, update.master_port, command["rank"], update.world_size
                served.join(*where, update.group_name, update.backend, LIMIT_S)
            served.receive_published(update.buckets[0], update.published, update.delta_bytes)
            served.check_complete("")
            served.install()
            answer = {"checksum": model.checksum()}
        except ArealError as error:
            served.leave()
            answer = {"error": error.code, "message": str(error)}
        print(json.dumps({**answer, "num_operations": operations.count}), flush=True)  # noqa: T201


async def host(seed: int) -> None:
    """The host of a foreign server, and what the server does with the folder."""
    model, operations, token = Model(seed), Operations(calls=True), os.environ[TOKEN_VARIABLE]
    served, receiver = ServedWeights(model), BroadcastReceiver(FolderPuller(token, {}), token, part=0, limit_s=LIMIT_S)
    await receiver.start()
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        update, rank = TypeAdapter(WeightUpdate).validate_python(command["update"]), command["rank"]
        fields = {"published": update.published, "listed": update.listed, "delta_bytes": update.delta_bytes}
        operations.start(command["kill_at"])
        answer: dict[str, Any] = {}
        try:
            pulled = await receiver.receive(Broadcast.parse(group_body(update, rank) | fields, receiver.part))
            served.receive_folder(pulled.path)
            served.check_complete("")
            served.install()
            answer = {"checksum": model.checksum()}
        except ArealError as error:
            answer = {"error": error.code, "message": str(error)}
        print(json.dumps({**answer, "num_operations": operations.count}), flush=True)  # noqa: T201


def pull(seed: int, *, in_memory: bool) -> None:
    model, operations, copied = Model(seed), Operations(), list[int]()
    served, puller = ServedWeights(model), FolderPuller(os.environ[TOKEN_VARIABLE], {}, in_memory=in_memory)
    run = folders._Transfer.run

    def noted(transfer: folders._Transfer, final: Path) -> None:
        run(transfer, final)
        copied.append(transfer.num_copied)

    folders._Transfer.run = noted
    for line in sys.stdin:
        command = json.loads(line)
        copied.clear()
        operations.start(command["kill_at"])
        try:
            pulled = puller.pull(command["url"], (), command["deltas"])
        except RequestError as error:
            answer = {"error": error.code, "message": str(error), "num_operations": operations.count}
            print(json.dumps(answer), flush=True)  # noqa: T201
            continue
        with puller.reading(pulled.path) as contents:
            if contents is None:
                served.receive_folder(pulled.path)
            else:
                served.receive_contents(contents)
        served.check_complete("")
        served.install()
        answer = {"checksum": model.checksum(), "problem": pulled.problem, "num_operations": operations.count}
        print(json.dumps({**answer, "num_copied": sum(copied)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, role, kind, seed = sys.argv
    if kind.endswith("ranks"):
        weight_image.PUBLISHED_FILE_BYTES = 1  # each rank has one of the two weights
    print("ready", flush=True)  # noqa: T201
    if role == "trainer":
        train(kind, int(seed))
    elif kind.startswith("collective"):
        receive(int(seed))
    elif kind.startswith("hosted"):
        asyncio.run(host(int(seed)))
    else:
        pull(int(seed), in_memory=kind.endswith("memory"))
