"""Adapters that the trainer publishes alone: real servers give its log-probabilities, version by version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from areal.api.batch import LossOutput, MicroBatch, TokenOutputs
from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.api.config.train import LoRAConfig
from areal.data.pack import rows_to_train_batch
from areal.engine.fsdp import FSDPEngine, build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.weights.disk import AdapterChannel
from tests.expect import serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FleetControl
from tests.servers.server_kit import PROMPT, TOLERANCE, Kit, SpareServer, a_request, largest_gap

pytestmark = pytest.mark.timeout(600)
LORA = LoRAConfig(rank=4, alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"], init="pissa")
"""Published with twice the rank, 8."""


def trained_more(engine: FSDPEngine, seed: int) -> None:
    """One large step on random tokens."""
    rows = torch.randint(4, 30, (4, 20), generator=torch.Generator().manual_seed(seed)).tolist()
    batch = rows_to_train_batch(rows, [[0] + [1] * 19 for _ in rows])

    def loss(outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        assert outputs.logprobs is not None
        return LossOutput(loss=-outputs.logprobs.sum(), metrics={})

    engine.forward_backward(batch, loss, denominator=76.0)
    engine.optimizer_step()


def logprobs_of(engine: FSDPEngine, output: list[int]) -> list[float]:
    row = PROMPT + output
    outputs = engine.forward(rows_to_train_batch([row], [[0] + [1] * (len(row) - 1)]))
    assert outputs.logprobs is not None
    return outputs.logprobs[len(PROMPT) - 1 : len(row) - 1].tolist()


async def test_each_version_gives_the_log_probabilities_of_the_trainer(
    kit: Kit, spare: SpareServer, tmp_path: Path
) -> None:
    config = TrainEngineConfig(
        path=str(kit.models["old"]), dtype="float32", temperature=spare.temperature, lora=LORA,
        optimizer=OptimizerConfig(lr=3e-2),
    )  # fmt: skip
    engine = build_fsdp_engine(config, role="actor", total_steps=9, mesh=TrainerMesh.open(None), seed=0)
    fleet = await kit.fleet(await spare.running())
    channel = AdapterChannel(engine.lora, FakeRanks(), FleetControl(fleet), tmp_path / "weights")  # type: ignore[arg-type]
    first = fleet.version
    before: list[float] = []
    for version in range(first + 1, first + 4):
        await asyncio.to_thread(serve, channel, version)
        requests = [a_request(30, temperature=spare.temperature) for _ in range(3)]
        for response in await asyncio.gather(*map(fleet.agenerate, requests)):
            assert set(response.output_versions) == {version}
            expected = logprobs_of(engine, response.output_ids)
            assert largest_gap(response.output_logprobs, expected) < TOLERANCE
            before = response.output_logprobs
        trained_more(engine, version)
        assert largest_gap(before, logprobs_of(engine, response.output_ids)) > 100 * TOLERANCE
