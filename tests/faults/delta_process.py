"""A trainer that publishes differences, or a server that takes them, as a process which ends at a chosen operation.

`python -m tests.faults.delta_process trainer|server SEED` answers each line of JSON with one. "kill_at": the number of
the operation on files or sockets, from the start of the command on, at which the process kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal.api.data import WeightSpec, WeightUpdate
from areal.inference.weight_update import ServedWeights
from areal.system import folders
from areal.system.folders import FolderPuller
from areal.system.network import TOKEN_VARIABLE, Host
from areal.weights.disk import HttpDeltaChannel
from areal.weights.weight_files import WeightsChecksum
from tests.fake_ranks import FakeRanks

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
        found = WeightsChecksum()
        for name, value in self.named_parameters():
            found.add(name, value)
        return found.hexdigest()

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

    def __init__(self) -> None:
        self.count, self.kill_at = 0, 0
        write = os.pwrite

        def counted_write(file: int, data: Any, offset: int) -> int:
            self.note()
            return write(file, data, offset)

        os.pwrite = counted_write
        sys.addaudithook(lambda event, _: self.note() if event in COUNTED else None)

    def start(self, kill_at: int) -> None:
        self.count, self.kill_at = 0, kill_at

    def note(self) -> None:
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Noted:
    """The controller: keeps the update for the answer."""

    def __init__(self) -> None:
        self.update: WeightUpdate | None = None

    def start_update(self, update: WeightUpdate) -> None:
        self.update = update

    def publish(self, update: WeightUpdate) -> None: ...


def train(seed: int) -> None:
    model, control, operations = Model(seed), Noted(), Operations()
    channel = HttpDeltaChannel(model, FakeRanks(), control, host=Host())  # type: ignore[arg-type]
    for line in sys.stdin:
        command = json.loads(line)
        model.advance(command["version"])
        operations.start(command["kill_at"])
        channel.publish(command["version"])
        channel.wait_served()
        assert control.update is not None
        answer = {"url": control.update.path, "deltas": control.update.deltas, "num_operations": operations.count}
        print(json.dumps(answer), flush=True)  # noqa: T201


def serve(seed: int) -> None:
    model, operations, copied = Model(seed), Operations(), list[int]()
    served, puller = ServedWeights(model), FolderPuller(os.environ[TOKEN_VARIABLE], {})
    run = folders._Transfer.run

    def noted(transfer: folders._Transfer, final: Path) -> None:
        run(transfer, final)
        copied.append(transfer.num_copied)

    folders._Transfer.run = noted
    for line in sys.stdin:
        command = json.loads(line)
        copied.clear()
        operations.start(command["kill_at"])
        pulled = puller.pull(command["url"], (), command["deltas"])
        served.receive_folder(pulled.path)
        served.check_complete("")
        served.install()
        answer = {"checksum": model.checksum(), "problem": pulled.problem, "num_operations": operations.count}
        print(json.dumps({**answer, "num_copied": sum(copied)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"trainer": train, "server": serve}[sys.argv[1]](int(sys.argv[2]))
