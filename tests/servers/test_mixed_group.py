"""A real server and native servers in one update group: all get the same weights. A native server that is killed or
stopped between two buckets delays the others only until it is removed, also the one that gets its buckets from it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from areal.api.config.rollout import InferenceEngineConfig
from areal.fleet.fleet import Fleet
from areal.fleet.native import NativeReplica
from areal.fleet.replica import AnswerForm, Replica
from areal.fleet.server_backend import replica_factory
from areal.fleet.server_client import ServerClient
from areal.system.discovery import FileRegistry
from areal.weights.collective import CollectiveChannel
from tests.expect import serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer, FleetControl
from tests.run_token import TOKEN
from tests.servers.checkpoints import Scorer, build_model
from tests.servers.real_server import RealServer
from tests.servers.server_kit import TOLERANCE, Kit, a_request, eventually, gap

REAL = "server-2"
"""Rank 3. Its buckets come from rank 2 (server-1), because gloo broadcasts along a tree."""
STRUCK = "server-1"


class Mixed:
    """Two native servers and the real one, and a fleet over them."""

    def __init__(self, kit: Kit, real: RealServer, folder: Path) -> None:
        self._kit = kit
        self._real = real
        self._registry = FileRegistry(folder / "names")
        self.fleet: Fleet | None = None
        self.natives: list[asyncio.subprocess.Process] = []
        self.buckets_before_strike: int | None = None
        self.signal = signal.SIGKILL

    async def start(self) -> Fleet:
        await asyncio.gather(self._start_native(0), self._start_native(1))
        self._register(2, self._real.address, self._real.process.pid)
        config = InferenceEngineConfig(
            setup_timeout=60.0, health_check_interval_s=0.5, weight_update_timeout_s=200.0, stream_interval=8
        )
        self.fleet = Fleet(self._registry, 3, config, self._replica)
        await self.fleet.start()
        return self.fleet

    async def _start_native(self, index: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "areal.inference.server", "--model-path", str(self._kit.models["old"])),
            *("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--max-total-tokens", "4096"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(os.environ, OMP_NUM_THREADS="1"),
        )
        self.natives.append(process)
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 200)).decode().strip()
        self._register(index, address, process.pid)

    def _register(self, index: int, address: str, pid: int) -> None:
        record = json.dumps({"address": address, "pid": pid})
        self._registry.add(f"servers/{index}", record, replace=True)

    def _replica(self, name: str, address: str, form: AnswerForm) -> Replica:
        if name == REAL:
            return replica_factory(self._kit.backend)(name, address, form)
        made = NativeReplica(name, address, TOKEN, form)
        if name == STRUCK:
            made._client = Striking(self, name, address)
        return made

    def strike(self) -> None:
        """Send the signal to STRUCK. Its name is that of the second record, which either server may have written."""
        pid = json.loads(self._registry.get("servers/1"))["pid"]
        os.kill(pid, self.signal)

    async def close(self) -> None:
        if self.fleet is not None:
            await self.fleet.close()
        for process in self.natives:
            if process.returncode is None:
                process.kill()
            await process.wait()


class Striking(ServerClient):
    """Sends the signal to its server before the request for a bucket."""

    def __init__(self, mixed: Mixed, name: str, address: str) -> None:
        super().__init__(name, address, token=TOKEN)
        self._mixed = mixed

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        mixed = self._mixed
        if path == "/update_weights_from_distributed" and mixed.buckets_before_strike is not None:
            mixed.buckets_before_strike -= 1
            if mixed.buckets_before_strike < 0:
                mixed.buckets_before_strike = None
                mixed.strike()
        return await super().post(path, body)


@pytest.fixture
async def mixed(kit: Kit, server: RealServer, tmp_path: Path) -> AsyncIterator[Mixed]:
    made = Mixed(kit, server, tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


async def check(fleet: Fleet, scorer: Scorer, version: int, names: set[str]) -> None:
    """Exactly these servers answer, with this version and the scorer's log-probabilities."""
    result: set[str] = set()
    for _ in range(4):
        for response in await asyncio.gather(*(fleet.agenerate(a_request(20)) for _ in range(4))):
            assert response.output_versions == [version] * 20
            assert gap(response, scorer) < TOLERANCE
            result.update(response.replicas)
    assert result == names


def state_of(fleet: Fleet, name: str) -> str:
    return next(replica["state"] for replica in fleet.status()["replicas"] if replica["name"] == name)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_server_that_dies_between_buckets_delays_the_others_until_it_is_removed(
    mixed: Mixed, old: Scorer, new: Scorer, number: signal.Signals
) -> None:
    assert mixed.fleet is not None
    fleet, trainer = mixed.fleet, FixedTrainer(build_model(2))
    channel = CollectiveChannel(
        trainer, FakeRanks(), FleetControl(fleet), bucket_bytes=2**16, backend="gloo", timeout_s=60.0
    )  # type: ignore[arg-type]
    await asyncio.to_thread(serve, channel, 1)
    await check(fleet, new, 1, {"server-0", STRUCK, REAL})
    mixed.signal, mixed.buckets_before_strike = number, 1
    trainer.model = build_model(1)
    await asyncio.wait_for(asyncio.to_thread(serve, channel, 2), 100)
    await eventually(lambda: state_of(fleet, STRUCK) == "absent")
    mixed.signal = signal.SIGKILL  # as the launcher does after the heartbeat's time limit
    if number == signal.SIGSTOP:
        mixed.strike()
    await eventually(lambda: state_of(fleet, REAL) in ("stale", "serving"))
    trainer.model = build_model(2)
    await asyncio.wait_for(asyncio.to_thread(serve, channel, 3), 100)
    await eventually(lambda: state_of(fleet, REAL) == "serving" or fleet.status()["needs_weights"])
    if state_of(fleet, REAL) != "serving":
        await asyncio.wait_for(asyncio.to_thread(serve, channel, 3), 100)
    await check(fleet, new, 3, {"server-0", REAL})
    await asyncio.to_thread(channel.close)
