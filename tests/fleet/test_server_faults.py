"""Real server processes that are killed or stopped: under load, and in the middle of a publication of each kind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from areal.api.config.rollout import InferenceEngineConfig
from areal.api.data import GenerationRequest
from areal.fleet.fleet import Fleet
from areal.fleet.native import NativeReplica
from areal.fleet.replica import AnswerForm, Chunks, PartChunk
from areal.fleet.replica_set import CHECK_TIMEOUT_INTERVALS
from areal.fleet.server_client import ServerClient
from areal.weights.collective import SETTLE_S, CollectiveChannel
from areal.weights.disk import DiskChannel
from tests.expect import serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer, FleetControl
from tests.fleet.fake_server import FleetKit
from tests.fleet.test_fleet_native import a_request, make_model
from tests.run_token import TOKEN

pytestmark = pytest.mark.slow

INTERVAL_S = 0.5
HUNG_S = (1 + CHECK_TIMEOUT_INTERVALS) * INTERVAL_S
"""The longest that anything waits for a server that does not answer."""
SLACK_S = 12.0
"""For a busy machine."""


class Servers:
    """Server processes, and a fleet over them that can strike one down at a chosen call."""

    def __init__(self, kit: FleetKit, folder: Path) -> None:
        self._kit = kit
        self._folder = folder
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.received: Counter[str] = Counter()
        """Tokens by the replica that sent them."""
        self.strike: Callable[[str, int], bool] = lambda path, count: False
        """Asked before server-1 is called: does it end here?"""
        self.signal = signal.SIGSTOP

    async def start(self, index: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "areal.inference.server", "--model-path", str(self._folder), "--device", "cpu"),
            *("--dtype", "float32", "--num-threads", "1", "--max-total-tokens", "16384"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(os.environ, OMP_NUM_THREADS="1"),
        )
        self.processes[index] = process
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 240)).decode().strip()
        record = json.dumps({"address": address, "pid": process.pid})
        self._kit.registry.add(f"servers/{index}", record, replace=True)

    async def fleet(self, model: str, **config: Any) -> Fleet:
        self._folder /= model
        await asyncio.gather(self.start(0), self.start(1))
        settings = {"health_check_interval_s": INTERVAL_S, "setup_timeout": 120.0} | config
        fleet = Fleet(self._kit.registry, 2, InferenceEngineConfig(**settings), lambda *args: Struck(self, *args))
        self._kit.fleets.append(fleet)
        await fleet.start()
        return fleet

    def hit(self, index: int = 1) -> None:
        self.processes[index].send_signal(self.signal)

    async def bring_back(self) -> None:
        """What the launcher does in the end: it wakes by itself, or is started anew."""
        if self.signal == signal.SIGSTOP:
            self.processes[1].send_signal(signal.SIGCONT)
        else:
            await self.processes[1].wait()
            await self.start(1)

    async def close(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


class Struck(NativeReplica):
    """A client that counts what it gets, and may strike its server before a call."""

    def __init__(self, servers: Servers, name: str, address: str, form: AnswerForm) -> None:
        super().__init__(name, address, TOKEN, form)
        self._servers = servers
        self._client = StrikingClient(servers, name, address)

    async def generate(self, requests: Sequence[GenerationRequest]) -> Chunks:
        async for number, chunk in super().generate(requests):
            if isinstance(chunk, PartChunk):
                self._servers.received[self.name] += len(chunk.token_ids)
            yield number, chunk

    async def num_generated(self) -> int:
        return (await self.load()).generated_tokens


class StrikingClient(ServerClient):
    """Strikes the server down before the call that is due."""

    def __init__(self, servers: Servers, name: str, address: str) -> None:
        super().__init__(name, address, token=TOKEN)
        self._servers = servers
        self._calls: Counter[str] = Counter()

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        self._calls[path] += 1
        servers = self._servers
        if self.name == "server-1" and servers.strike(path, self._calls[path]):
            servers.strike = lambda path, count: False
            servers.hit()
        return await super().post(path, body)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(folder / "small")
    big_model(0).save_pretrained(folder / "big")
    return folder


def big_model(seed: int) -> nn.Module:
    """Its embedding of 16 MiB does not fit into the buffers of a socket."""
    return make_model(seed, vocab_size=2**17)


@pytest.fixture
async def servers(native_kit: FleetKit, model_folder: Path) -> AsyncIterator[Servers]:
    made = Servers(native_kit, model_folder)
    yield made
    for fleet in native_kit.fleets:
        await fleet.close()
    await made.close()


def states(fleet: Fleet) -> list[str]:
    return [replica["state"] for replica in fleet.status()["replicas"]]


async def eventually(condition: Callable[[], object], limit_s: float = HUNG_S + SLACK_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
async def test_a_server_killed_under_load_loses_at_most_one_interval(servers: Servers, kind: signal.Signals) -> None:
    num, interval = 8, 8
    fleet = await servers.fleet("small", stream_interval=interval)
    whole = await fleet.agenerate(a_request("whole", 300, greedy=True))
    servers.signal = kind
    before = servers.received["server-1"]
    running = [asyncio.create_task(fleet.agenerate(a_request(f"r{i}", 300, greedy=True))) for i in range(num)]
    await eventually(lambda: servers.received["server-1"] >= before + 20 * num // 2)
    victim = fleet._replicas.slots[1].replica
    assert isinstance(victim, Struck)
    made = await victim.num_generated()
    servers.hit()
    struck_s = time.monotonic()
    await eventually(lambda: fleet.status()["replicas"][1]["running"] == 0)
    moved_s = time.monotonic() - struck_s
    assert moved_s < (HUNG_S if kind == signal.SIGSTOP else 0.0) + SLACK_S
    assert made - servers.received["server-1"] <= interval * num // 2
    responses = await asyncio.gather(*running)
    for response in responses:
        assert response.output_ids == whole.output_ids
        assert response.output_logprobs == pytest.approx(whole.output_logprobs, abs=2e-5)
    assert sum(response.replicas == ["server-1", "server-0"] for response in responses) == num // 2
    await servers.bring_back()
    await eventually(lambda: states(fleet) == ["serving", "serving"])


async def check_serving(fleet: Fleet, model: nn.Module, version: int, names: set[str]) -> None:
    """What is generated now is the model's, by these replicas."""
    responses = await asyncio.gather(*(fleet.agenerate(a_request(f"c{i}", 20)) for i in range(4)))
    assert {name for response in responses for name in response.replicas} == names
    for response in responses:
        assert response.output_versions == [version] * 20
        ids = torch.tensor([response.input_ids + response.output_ids])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0].float(), -1)
        expected = [scores[3 + i, token].item() for i, token in enumerate(response.output_ids)]
        assert response.output_logprobs == pytest.approx(expected, abs=1e-4)


FAULTS = {
    "stopped before the swap": ("collective", "/install_weights", 1, signal.SIGSTOP),
    "killed before the swap": ("collective", "/install_weights", 1, signal.SIGKILL),
    "stopped before it joins": ("collective", "/init_weights_update_group", 1, signal.SIGSTOP),
    "stopped between buckets": ("collective", "/update_weights_from_distributed", 2, signal.SIGSTOP),
    "killed between buckets": ("collective", "/update_weights_from_distributed", 2, signal.SIGKILL),
    "stopped before the folder": ("disk", "/update_weights_from_disk", 1, signal.SIGSTOP),
    "killed before the folder": ("disk", "/update_weights_from_disk", 1, signal.SIGKILL),
}


@pytest.mark.parametrize(("kind", "path", "count", "number"), FAULTS.values(), ids=FAULTS)
async def test_a_server_killed_during_an_update_does_not_delay_others(
    servers: Servers, tmp_path: Path, kind: str, path: str, count: int, number: signal.Signals
) -> None:
    fleet = await servers.fleet("big", weight_update_timeout_s=120.0, schedule_policy="round_robin")
    engine, control = FixedTrainer(big_model(1)), FleetControl(fleet)
    channel: DiskChannel | CollectiveChannel
    if kind == "disk":
        channel = DiskChannel(engine, FakeRanks(), control, tmp_path / "weights")  # type: ignore[arg-type]
    else:
        channel = CollectiveChannel(engine, FakeRanks(), control, bucket_bytes=2**20, backend="gloo")  # type: ignore[arg-type]
    servers.signal = number
    servers.strike = lambda called, num: called == path and num == count
    running = asyncio.create_task(fleet.agenerate(a_request("r", 300)))
    await eventually(lambda: servers.received.total() >= 32)
    started = time.monotonic()
    await asyncio.to_thread(serve, channel, 1)
    elapsed = time.monotonic() - started
    assert elapsed < HUNG_S + SETTLE_S + SLACK_S
    await check_serving(fleet, engine.model, 1, {"server-0"})
    engine.model = big_model(2)
    await asyncio.to_thread(serve, channel, 2)
    await check_serving(fleet, engine.model, 2, {"server-0"})
    await servers.bring_back()
    if kind == "collective":
        await eventually(lambda: fleet.status()["needs_weights"], 60)
        await asyncio.to_thread(serve, channel, 2)
    await eventually(lambda: states(fleet) == ["serving", "serving"], 60)
    await check_serving(fleet, engine.model, 2, {"server-0", "server-1"})
    engine.model = big_model(3)
    await asyncio.to_thread(serve, channel, 3)
    await check_serving(fleet, engine.model, 3, {"server-0", "server-1"})
    response = await running
    assert len(response.output_ids) == 300
    assert response.output_versions == sorted(response.output_versions)
    channel.close()
