"""Hosts of foreign servers receive the differences of `delta_xccl` and give their servers folders of the versions."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from torch import nn

from areal.api.data import WeightUpdate
from areal.api.errors import WeightSyncError
from areal.fleet import broadcasts
from areal.fleet.broadcasts import Broadcast, BroadcastReceiver
from areal.fleet.fleet import Fleet
from areal.fleet.replica import AnswerForm, Replica
from areal.fleet.server_client import group_body
from areal.fleet.server_host import gateway
from areal.fleet.sglang import SGLangReplica
from areal.fleet.vllm import VLLMReplica
from areal.system.folders import FolderPuller
from areal.system.network import Host
from areal.weights.collective import DeltaCollectiveChannel
from tests.expect import raises_code, serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer, FleetControl
from tests.fleet.fake_server import FakeServer, FleetKit, until
from tests.fleet.fake_sglang import FakeSGLang
from tests.fleet.fake_vllm import FakeVLLM
from tests.run_token import TOKEN
from tests.weights.test_delta_channel import large_model, step


class HostedVLLM(FakeVLLM):
    @staticmethod
    def client(name: str, address: str, form: AnswerForm | None = None) -> Replica:
        return VLLMReplica(name, address, TOKEN, form)


class HostedSGLang(FakeSGLang):
    @staticmethod
    def client(name: str, address: str, form: AnswerForm | None = None) -> Replica:
        return SGLangReplica(name, address, TOKEN, form)


class HostedKit(FleetKit):
    """Fake servers behind the gateways of their hosts, which receive. All are on one machine."""

    def __init__(self, folder: Path, server_class: type[FakeServer]) -> None:
        super().__init__(folder, server_class)
        self.stack = contextlib.AsyncExitStack()

    async def server(self, index: int, *, num_parts: int = 1, **settings: Any) -> Any:
        server = await super().server(index, **settings)
        others = [await self._gateway("http://127.0.0.1:9", part) for part in range(1, num_parts)]
        server.address = await self._gateway(server.address, 0, others)
        self.registry.add(f"servers/{index}", server.registration(), replace=True)
        return server

    async def _gateway(self, server: str, part: int, others: list[str] | None = None) -> str:
        made = gateway(Host(), TOKEN, server, lambda: others or [], part=part, receive_limit_s=60.0)
        return await self.stack.enter_async_context(made)

    async def close(self) -> None:
        await super().close()
        await self.stack.aclose()


@pytest.fixture(params=[HostedSGLang, HostedVLLM], ids=lambda fake: fake.dialect)
async def hosts(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HostedKit]:
    (tmp_path / "machine").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "machine"))
    made = HostedKit(tmp_path, request.param)
    yield made
    await made.close()


def channel_to(fleet: Fleet, model: nn.Module, *, ranks: int = 1) -> DeltaCollectiveChannel:
    return DeltaCollectiveChannel(
        FixedTrainer(model),
        FakeRanks(),
        FleetControl(fleet),
        bucket_bytes=0,
        backend="gloo",
        ranks_per_replica=ranks,
        timeout_s=60.0,
    )


def loaded(server: Any) -> str:
    """The folder that a server has loaded last."""
    return server.details("load")[-1]["path"]


def assert_has(server: Any, model: nn.Module, version: int) -> None:
    assert server.version == version
    assert {name: value.tolist() for name, value in load_file(Path(loaded(server)) / "model.safetensors").items()} == {
        name: value.tolist() for name, value in model.named_parameters()
    }


def receivers() -> list[psutil.Process]:
    command = list(broadcasts.COMMAND)
    return [child for child in psutil.Process().children() if child.cmdline() == command]


async def test_the_servers_load_what_their_hosts_receive(hosts: HostedKit) -> None:
    """A server that joins gets whole weights with the others; one over two machines gets them on both."""
    first = await hosts.server(0, num_parts=2)
    fleet, model = await hosts.fleet(1), large_model()
    channel, shares = channel_to(fleet, model, ranks=2), list[float]()
    late = None
    for version in range(1, 6):
        if version == 4:
            late = await hosts.server(1, num_parts=2)
            await until(lambda: len(fleet.live_replicas(4)) == 2)
        step(model)
        await asyncio.to_thread(serve, channel, version)
        shares.append(channel.metrics()["update_weights/share_of_full"].value)
        for server in hosts.servers:
            assert_has(server, model, version)
    assert [share < 0.05 for share in shares] == [False, True, True, False, True]
    assert late is not None
    assert loaded(first) == loaded(late), "the servers of a machine share one copy"
    assert not {"join", "receive"} & {*first.acts(), *late.acts()}, "the servers take no part in the broadcast"
    assert [one["failed_deltas"] for one in fleet.status()["replicas"]] == [0, 0]
    assert not list((Path(tempfile.gettempdir())).glob("areal-*/*/delta_*")), "what was received is removed"
    channel.close()


async def test_after_the_end_of_a_receiver_the_trainer_forms_another_group(hosts: HostedKit) -> None:
    server = await hosts.server(0)
    fleet, model = await hosts.fleet(1), large_model()
    channel = channel_to(fleet, model)
    await asyncio.to_thread(serve, channel, 1)
    (victim,) = receivers()
    victim.kill()
    step(model)
    await asyncio.to_thread(serve, channel, 2)
    assert_has(server, model, 2)
    step(model)
    await asyncio.to_thread(serve, channel, 3)
    assert_has(server, model, 3)
    assert channel.metrics()["update_weights/share_of_full"].value < 0.05
    channel.close()


async def test_a_host_without_the_version_before_gets_whole_weights(hosts: HostedKit) -> None:
    server = await hosts.server(0)
    fleet, model = await hosts.fleet(1), large_model()
    channel = channel_to(fleet, model)
    await asyncio.to_thread(serve, channel, 1)
    path = Path(loaded(server)) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    step(model)
    await asyncio.to_thread(serve, channel, 2)
    assert_has(server, model, 2)
    assert channel.metrics()["update_weights/share_of_full"].value == 1.0
    assert [one["failed_deltas"] for one in fleet.status()["replicas"]] == [1]
    channel.close()


async def test_when_a_server_of_the_group_dies_the_others_get_the_version(hosts: HostedKit) -> None:
    """Its host does not join; the wait of the other host is ended, and its server continues to serve."""
    alive, dying = await hosts.server(0), await hosts.server(1)
    fleet, model = await hosts.fleet(2), large_model()
    channel = channel_to(fleet, model)
    await asyncio.to_thread(serve, channel, 1)
    for process in receivers():
        process.send_signal(signal.SIGSTOP)
    step(model)
    update = asyncio.create_task(asyncio.to_thread(serve, channel, 2))
    await until(lambda: fleet.status()["updating_to"] == 2)
    await dying.die()
    await until(lambda: len(fleet.live_replicas(2)) == 1)
    for process in receivers():
        process.send_signal(signal.SIGCONT)
    await update
    assert_has(alive, model, 2)
    channel.close()


async def receiver_of(tmp_path: Path, source: str) -> BroadcastReceiver:
    made = BroadcastReceiver(
        FolderPuller(TOKEN, {}), TOKEN, part=0, limit_s=9.0, command=(sys.executable, "-S", "-c", source)
    )
    await made.start()
    return made


def a_broadcast() -> Broadcast:
    listed = b'{"block_bytes": 4, "files": [{"name": "model.safetensors", "num_bytes": 3, "sums": [1]}]}'
    parsed = broadcasts.FolderList.from_bytes(listed)
    update = WeightUpdate(
        version=7, kind="collective", published=parsed.name("7"), listed=listed.decode(), replicas=["a"]
    )
    body = {"published": update.published, "listed": update.listed, "delta_bytes": {}}
    return Broadcast.parse(body | group_body(update, 1), 2)


def test_each_part_of_a_server_has_a_rank() -> None:
    assert a_broadcast().group.rank == 3


async def test_a_receiver_that_ends_is_an_error_and_the_next_one_starts(tmp_path: Path) -> None:
    receiver = await receiver_of(tmp_path, "import sys; sys.stdin.readline()")
    with raises_code("weights.transfer_failed"):
        await receiver.receive(a_broadcast())
    with raises_code("weights.transfer_failed"):
        await receiver.receive(a_broadcast())
    await receiver.end()


async def test_a_caller_that_is_cancelled_ends_the_receiver(tmp_path: Path) -> None:
    receiver = await receiver_of(tmp_path, "import time; time.sleep(600)")
    process = receiver._process
    waiting = asyncio.create_task(receiver.receive(a_broadcast()))
    await until(receiver._lock.locked)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert process is not None
    assert process.returncode == -signal.SIGKILL
    await receiver.end()


async def test_an_error_of_the_receiver_is_passed_on(tmp_path: Path) -> None:
    answer = '{"error": "no group", "code": "weights.transfer_failed"}'
    receiver = await receiver_of(tmp_path, f"input(); print({answer!r}, flush=True); input()")
    with pytest.raises(WeightSyncError, match="no group"):
        await receiver.receive(a_broadcast())
    await receiver.end()
