"""Hosts of foreign servers receive the differences of `delta_xccl` and give their servers folders of the versions."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from torch import nn

from areal.api.data import WeightUpdate
from areal.api.errors import WeightSyncError
from areal.fleet import broadcasts, weight_updater
from areal.fleet.broadcasts import Broadcast, BroadcastReceiver
from areal.fleet.fleet import Fleet
from areal.fleet.replica import AnswerForm, Replica
from areal.fleet.server_client import group_body
from areal.fleet.server_host import gateway
from areal.fleet.sglang import SGLangReplica
from areal.fleet.vllm import VLLMReplica
from areal.system.folders import SHARED, FolderPuller, Pulled
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


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The TMPDIR of the hosts."""
    folder = tmp_path / "machine"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(params=[HostedSGLang, HostedVLLM], ids=lambda fake: fake.dialect)
async def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HostedKit]:
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
    command, running = list(broadcasts.COMMAND), list[psutil.Process]()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            running += [child] if child.cmdline() == command else []
    return running


async def test_the_servers_load_what_their_hosts_receive(hosts: HostedKit, machine: Path) -> None:
    """A server that joins gets whole weights with the others; one over two machines gets them on both."""
    first = await hosts.server(0, num_parts=2)
    fleet = await hosts.fleet(1, health_check_interval_s=0.3)  # a late check would be a reason for whole weights
    model = large_model()
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
    assert [replica["failed_deltas"] for replica in fleet.status()["replicas"]] == [0, 0]
    assert not list(machine.glob("areal-*/*/*/delta_*")), "what was received is removed"
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


@pytest.mark.parametrize("is_there", [True, False], ids=["damaged", "absent"])
async def test_a_host_whose_version_before_is_damaged_or_absent_gets_whole_weights(
    hosts: HostedKit, is_there: bool
) -> None:
    server = await hosts.server(0)
    fleet, model = await hosts.fleet(1), large_model()
    channel = channel_to(fleet, model)
    await asyncio.to_thread(serve, channel, 1)
    path = Path(loaded(server)) / "model.safetensors"
    if is_there:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        shutil.rmtree(path.parent)
    step(model)
    await asyncio.to_thread(serve, channel, 2)
    assert_has(server, model, 2)
    assert channel.metrics()["update_weights/share_of_full"].value == 1.0
    assert [replica["failed_deltas"] for replica in fleet.status()["replicas"]] == [1]
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


async def test_a_server_loads_the_version_although_another_one_fails(
    hosts: HostedKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that load a folder do not wait for each other."""
    monkeypatch.setattr(weight_updater, "GROUP_GRACE_S", 0.0)
    refuses, slow = await hosts.server(0), await hosts.server(1)
    fleet, model, goes_on = await hosts.fleet(2), large_model(), asyncio.Event()
    load, answers, num_answers = slow.load, refuses.answers, 0

    async def slow_load(path: str) -> None:
        await goes_on.wait()
        await load(path)

    async def counted() -> None:
        nonlocal num_answers
        num_answers += 1
        await answers()

    monkeypatch.setattr(slow, "load", slow_load)
    monkeypatch.setattr(refuses, "answers", counted)
    refuses.fail_update = "refuse"
    channel = channel_to(fleet, model)
    update = asyncio.create_task(asyncio.to_thread(serve, channel, 1))
    await until(lambda: [replica["state"] for replica in fleet.status()["replicas"]] == ["stale", "updating"])
    before = num_answers
    await until(lambda: num_answers >= before + 5)
    goes_on.set()
    await update
    assert_has(slow, model, 1)
    assert (channel._attempts, slow.acts().count("load")) == (1, 1)
    channel.close()


async def test_when_a_host_cannot_write_the_others_get_the_version(
    hosts: HostedKit, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_updater, "GROUP_GRACE_S", 0.0)
    for index in range(2):
        await hosts.server(index)
    fleet, model = await hosts.fleet(2), large_model()
    channel = channel_to(fleet, model)
    full = next(machine.glob("areal-*/*/"))
    (full / "1").write_text("a file where the folder of the first call would be")
    await asyncio.to_thread(serve, channel, 1)
    assert channel._attempts == 1
    assert sorted(server.version for server in hosts.servers) == [0, 1]
    (full / "1").unlink()
    step(model)
    await asyncio.to_thread(serve, channel, 2)
    for server in hosts.servers:
        assert_has(server, model, 2)
    channel.close()


async def receiver_of(source: str) -> BroadcastReceiver:
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


def test_a_version_whose_name_leaves_the_folder_is_refused() -> None:
    listed = b'{"block_bytes": 4, "files": []}'
    name = broadcasts.FolderList.from_bytes(listed).name("../../escaped/7")
    update = WeightUpdate(version=7, kind="collective", replicas=["a"])
    body = {"published": name, "listed": listed.decode(), "delta_bytes": {}}
    with pytest.raises(ValueError, match="the list of files is not that of the version"):
        Broadcast.parse(body | group_body(update, 1), 2)


async def test_a_receiver_that_ends_is_an_error_and_the_next_one_starts() -> None:
    receiver = await receiver_of("import sys; sys.stdin.readline()")
    with raises_code("weights.transfer_failed"):
        await receiver.receive(a_broadcast())
    with raises_code("weights.transfer_failed"):
        await receiver.receive(a_broadcast())
    await receiver.end()


async def test_a_caller_that_is_cancelled_ends_the_receiver() -> None:
    receiver = await receiver_of("import time; time.sleep(600)")
    process = receiver._process
    waiting = asyncio.create_task(receiver.receive(a_broadcast()))
    await until(receiver._lock.locked)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert process is not None
    assert process.returncode == -signal.SIGKILL
    await receiver.end()


async def test_an_error_of_the_receiver_is_passed_on() -> None:
    answer = '{"error": "no group", "code": "weights.transfer_failed"}'
    receiver = await receiver_of(f"input(); print({answer!r}, flush=True); input()")
    with pytest.raises(WeightSyncError, match="no group"):
        await receiver.receive(a_broadcast())
    await receiver.end()


async def test_a_receiver_that_could_not_be_started_is_started_for_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver = await receiver_of("input()")
    command = receiver._command
    monkeypatch.setattr(receiver, "_command", ("/dev/null/no-command",))
    with pytest.raises(WeightSyncError, match="ended with exit code 0"):
        await receiver.receive(a_broadcast())
    with pytest.raises(WeightSyncError, match="cannot be started"):
        await receiver.receive(a_broadcast())
    monkeypatch.setattr(receiver, "_command", command)
    with pytest.raises(WeightSyncError, match="ended with exit code 0"):
        await receiver.receive(a_broadcast())
    await receiver.end()


WRITES = """
import json, pathlib
while True:
    for path, size in json.loads(input())["files"].items():
        pathlib.Path(path).parent.mkdir(parents=True)
        pathlib.Path(path).write_bytes(bytes(size))
    print("{}", flush=True)
"""


async def test_a_call_that_is_cancelled_while_it_makes_the_version_does_not_disturb_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver = await receiver_of(WRITES)
    folders, goes_on = list[Path](), threading.Event()

    def pull(url: str, mirrors: tuple[()], deltas: dict[str, str]) -> Pulled:
        folders.append(Path(url.removeprefix(SHARED)))
        if len(folders) == 1:
            goes_on.wait(60)
        return Pulled(folders[-1], "", 0)

    monkeypatch.setattr(receiver._puller, "pull", pull)
    making = asyncio.create_task(receiver.receive(a_broadcast()))
    await until(lambda: len(folders) == 1)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    pulled = await receiver.receive(a_broadcast())
    assert (folders[0] / "model.safetensors").read_bytes() == bytes(3)
    assert (pulled.path, pulled.path.exists()) == (folders[1], False)
    goes_on.set()
    await until(lambda: not folders[0].exists())
    await receiver.end()
