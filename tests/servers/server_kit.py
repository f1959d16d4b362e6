"""What the tests here share: fleets over real servers, a trainer of given weights, and requests."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from areal.api.config.rollout import GenerationHyperparameters, InferenceEngineConfig
from areal.api.data import GenerationRequest, GenerationResponse
from areal.data.image_files import RunImages
from areal.fleet.fleet import Fleet
from areal.fleet.replica import AnswerForm, Replica
from areal.fleet.server_backend import replica_factory
from areal.system.discovery import FileRegistry
from areal.system.network import Host
from areal.weights.collective import CollectiveChannel
from areal.weights.disk import DiskChannel, HttpChannel
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer, FleetControl
from tests.servers.checkpoints import Scorer, token_id
from tests.servers.real_server import Backend, RealServer

TOLERANCE = 1e-4
VLLM_ONLY = pytest.mark.parametrize(
    "backend", [pytest.param("vllm", marks=pytest.mark.vllm)], indirect=True, scope="session"
)
SGLANG_ONLY = pytest.mark.parametrize(
    "backend", [pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True, scope="session"
)
PROMPT = [token_id(character) for character in "sort: 73915="]


class Kit:
    """Makes fleets over running servers, and channels into them."""

    def __init__(self, backend: Backend, folder: Path, models: dict[str, Path]) -> None:
        self.backend: Backend = backend
        self.models = models
        self._folder = folder
        self._registry = FileRegistry(folder / f"names-{uuid.uuid4().hex[:6]}")
        self._closing: list[Fleet | Replica] = []
        self._channels: list[CollectiveChannel | HttpChannel] = []

    def register(self, index: int, server: RealServer) -> None:
        """Make a server known under a place in the fleet."""
        record = json.dumps({"address": server.address, "pid": server.process.pid})
        self._registry.add(f"servers/{index}", record, replace=True)

    async def fleet(self, *servers: RealServer, vision: RunImages | None = None, **config: Any) -> Fleet:
        for index, server in enumerate(servers):
            self.register(index, server)
        settings = {"stream_interval": 8, "setup_timeout": 60.0, "health_check_interval_s": 0.5} | config
        factory = replica_factory(self.backend)
        fleet = Fleet(self._registry, len(servers), InferenceEngineConfig(**settings), factory, vision=vision)
        self._closing.append(fleet)
        await fleet.start()
        return fleet

    def replica(self, server: RealServer) -> Replica:
        """A client of one server, without a fleet."""
        made = replica_factory(self.backend)("server-0", server.address, AnswerForm())
        self._closing.append(made)
        return made

    def disk(self, fleet: Fleet, trainer: FixedTrainer) -> DiskChannel:
        control, folder = FleetControl(fleet), self._folder / "weights"
        return DiskChannel(trainer, FakeRanks(), control, folder, model_folder=self.models["old"])  # type: ignore[arg-type]

    def http(self, fleet: Fleet, trainer: FixedTrainer) -> HttpChannel:
        """The servers need gateways, with the token of this process."""
        made = HttpChannel(
            trainer,  # type: ignore[arg-type]
            FakeRanks(),
            FleetControl(fleet),
            host=Host(),
            model_folder=self.models["old"],
        )
        self._channels.append(made)
        return made

    def collective(self, fleet: Fleet, trainer: FixedTrainer, *, ranks_per_replica: int = 1) -> CollectiveChannel:
        """Buckets so small that there are several."""
        made = CollectiveChannel(
            trainer,  # type: ignore[arg-type]
            FakeRanks(),
            FleetControl(fleet),
            bucket_bytes=2**16,
            backend="gloo",
            ranks_per_replica=ranks_per_replica,
            timeout_s=60.0,
        )
        self._channels.append(made)
        return made

    async def close(self) -> None:
        for channel in self._channels:
            await asyncio.to_thread(channel.close)
        for item in self._closing:
            await item.close()


class SpareServer:
    """A second server, of a run with another temperature and with LoRA adapters; tests may kill it."""

    temperature = 0.7
    _FLAGS: ClassVar[dict[Backend, dict[str, Any]]] = {
        "vllm": {"enable_lora": True, "max_lora_rank": 8},
        "sglang": {
            "enable_lora": True,
            "max_lora_rank": 8,
            "lora_target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"],
        },
    }

    def __init__(self, backend: Backend, model: Path, folder: Path) -> None:
        self._backend: Backend = backend
        self._model = model
        self._folder = folder
        self._server: RealServer | None = None

    async def running(self) -> RealServer:
        """One that runs, with the weights and the version that the last test left, or those of a fresh start."""
        if self._server is None or not self._server.is_alive:
            self.kill_all()
            flags = self._FLAGS[self._backend]
            self._server = RealServer(
                self._backend, self._model, self._folder, flags=flags, temperature=self.temperature, name="spare"
            )
            await asyncio.to_thread(self._server.wait_ready)
        return self._server

    def kill_all(self) -> None:
        if self._server is not None:
            self._server.kill_all()


def a_request(
    num_tokens: int, *, prompt: list[int] = PROMPT, seed: int | None = None, **changes: Any
) -> GenerationRequest:
    """`changes` are those of gconfig; without any, `num_tokens` tokens come whatever they are."""
    settings: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": True} | changes
    return GenerationRequest(
        request_id=uuid.uuid4().hex, input_ids=prompt, gconfig=GenerationHyperparameters(**settings), seed=seed
    )


def gap(response: GenerationResponse, scorer: Scorer) -> float:
    """The largest difference between the server's log-probabilities and the trainer's."""
    return largest_gap(response.output_logprobs, scorer.logprobs(response.input_ids, response.output_ids))


def largest_gap(first: list[float], second: list[float]) -> float:
    assert len(first) == len(second) > 0
    return (torch.tensor(first) - torch.tensor(second)).abs().max().item()


async def eventually(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Wait for a fact that no event announces."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


async def tokens_made(fleet: Fleet, num_tokens: int) -> None:
    """Looks at every turn of the loop: the answers are short, and timers stand still when the machine is busy."""
    async with asyncio.timeout(60):
        while fleet.status()["generated_tokens"] < num_tokens:
            await asyncio.sleep(0)
