"""Adapters of a model with images: servers give the log-probabilities of the trainer, version by version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.batch import LossOutput, MicroBatch, TokenOutputs, TrainBatch
from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.api.config.train import LoRAConfig
from areal.data.image_files import RunImages
from areal.data.pack import rows_to_train_batch
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.fleet.sglang import SGLANG
from areal.fleet.vllm import VLLM
from areal.weights.disk import AdapterChannel
from tests.expect import serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FleetControl
from tests.servers.real_server import Backend, RealServer
from tests.servers.server_kit import Kit, largest_gap
from tests.servers.vision.kit import EXACT, SIZES, Ask, Pair, answers, serves

pytestmark = pytest.mark.timeout(900)
RANK = 8


@pytest.fixture(scope="module")
def flags(backend: Backend) -> dict[str, Any]:
    """As the launcher sets them for a run that publishes adapters of all-linear."""
    ours = {"lora_target_modules": ["all"]} if backend == "sglang" else {}
    return {"enable_lora": True, "max_lora_rank": RANK, **ours}


def batch_of(pairs: list[Pair]) -> TrainBatch:
    rows = [[*request.input_ids, *response.output_ids] for request, response in pairs]
    masks = [[0] * len(request.input_ids) + [1] * len(response.output_ids) for request, response in pairs]
    return rows_to_train_batch(rows, masks, [request.images for request, _ in pairs])


def loss(outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
    assert outputs.logprobs is not None
    return LossOutput(loss=-outputs.logprobs[micro.batch.loss_mask].sum(), metrics={})


@serves(*((item.name, family) for item in (VLLM, SGLANG) for family in item.image_families))
async def test_adapters_of_the_language_model_answer_to_images_as_the_trainer_does(
    server: RealServer, kit: Kit, asks: Ask, models: dict[str, Path], images: RunImages, tmp_path: Path
) -> None:
    """all-linear: the language model. Each version after a large step on the answers to the one before."""
    config = TrainEngineConfig(
        path=str(models["old"]),
        dtype="float32",
        lora=LoRAConfig(rank=RANK, alpha=16),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    engine = build_fsdp_engine(
        config, role="actor", total_steps=9, mesh=TrainerMesh.open(None), seed=0, images=images.store
    )
    fleet = await kit.fleet(server, vision=images)
    channel = AdapterChannel(engine.lora, FakeRanks(), FleetControl(fleet), tmp_path / "weights")  # type: ignore[arg-type]
    for version in (1, 2, 3):
        await asyncio.to_thread(serve, channel, version)
        pairs = await answers(fleet, [asks(f"{version} {len(sizes)}", *sizes) for sizes in SIZES], images)
        batch = batch_of(pairs)
        sampled = torch.tensor([each for _, response in pairs for each in response.output_logprobs])
        assert {each for _, response in pairs for each in response.output_versions} == {version}
        result = engine.forward(batch).logprobs
        assert result is not None
        trained = result[batch.loss_mask].tolist()
        assert largest_gap(sampled.tolist(), trained) < 2 * EXACT
        engine.forward_backward(batch, loss, denominator=float(batch.loss_mask.sum()))
        engine.optimizer_step()
        changed = engine.forward(batch).logprobs
        assert changed is not None
        assert largest_gap(trained, changed[batch.loss_mask].tolist()) > 1000 * EXACT
