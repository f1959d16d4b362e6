"""Adapters of a model with images: vLLM gives the log-probabilities of the trainer, version by version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from areal.api.batch import LossOutput, MicroBatch, TokenOutputs, TrainBatch
from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.api.config.lora import LoRAConfig
from areal.data.pack import rows_to_train_batch
from areal.engine.fsdp_builder import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.system.run_images import RunImages
from areal.weights.disk import AdapterChannel
from tests.fake_ranks import FakeRanks
from tests.run_token import TOKEN
from tests.servers.real_server import Backend, RealServer
from tests.servers.server_kit import FleetControl, Kit, largest_gap
from tests.servers.vision_kit import EXACT, SIZES, TORCHVISION, Pair, answers, ask, images_of, write_model

pytestmark = pytest.mark.timeout(900)
RANK = 8
FLAGS = {"enable_lora": True, "max_lora_rank": RANK}


@pytest.fixture(
    scope="module",
    params=[pytest.param("vllm", marks=pytest.mark.vllm)],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    if not TORCHVISION:
        pytest.skip("AREAL_TEST_TORCHVISION names no folder with torchvision")
    return request.param


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"old": write_model(tmp_path_factory.mktemp("old"), 0)}


@pytest.fixture(scope="module")
def images(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RunImages:
    return images_of(models["old"], tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def server(backend: Backend, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREAL_SERVER_TOKEN", TOKEN)
        folder = tmp_path_factory.mktemp("adapters")
        server = RealServer(backend, models["old"], folder, name="adapters", flags=FLAGS, libraries=TORCHVISION)
        try:
            yield server.wait_ready(limit_s=800)
        finally:
            server.kill_all()


def batch_of(pairs: list[Pair]) -> TrainBatch:
    rows = [[*request.input_ids, *response.output_ids] for request, response in pairs]
    masks = [[0] * len(request.input_ids) + [1] * len(response.output_ids) for request, response in pairs]
    return rows_to_train_batch(rows, masks, [request.images for request, _ in pairs])


def loss(outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
    assert outputs.logprobs is not None
    return LossOutput(loss=-outputs.logprobs[micro.batch.loss_mask].sum(), metrics={})


async def test_adapters_of_the_language_model_answer_to_images_as_the_trainer_does(
    server: RealServer, kit: Kit, models: dict[str, Path], images: RunImages, tmp_path: Path
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
    asks = partial(ask, images, [3, 5, 4])
    fleet = await kit.fleet(server, vision=images)
    channel = AdapterChannel(engine.lora, FakeRanks(), FleetControl(fleet), tmp_path / "weights")  # type: ignore[arg-type]
    for version in (1, 2, 3):
        await asyncio.to_thread(channel.publish, version)
        pairs = await answers(fleet, [asks(f"{version} {len(sizes)}", *sizes) for sizes in SIZES], images)
        batch = batch_of(pairs)
        sampled = torch.tensor([each for _, response in pairs for each in response.output_logprobs])
        assert {each for _, response in pairs for each in response.output_versions} == {version}
        found = engine.forward(batch).logprobs
        assert found is not None
        trained = found[batch.loss_mask].tolist()
        assert largest_gap(sampled.tolist(), trained) < 2 * EXACT
        engine.forward_backward(batch, loss, denominator=float(batch.loss_mask.sum()))
        engine.optimizer_step()
        changed = engine.forward(batch).logprobs
        assert changed is not None
        assert largest_gap(trained, changed[batch.loss_mask].tolist()) > 1000 * EXACT
