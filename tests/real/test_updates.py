"""New weights of a pretrained model in the middle of its answers, over each path: every token has its policy's version
and log-probability."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.api.config import TrainEngineConfig
from areal.api.config.train import LoRAConfig
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.weights.disk import AdapterChannel
from tests.expect import serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer, FleetControl
from tests.real.conftest import Reference
from tests.servers.real_server import RealServer
from tests.servers.server_kit import Kit, a_request, largest_gap, tokens_made

TOLERANCE = 1e-4
NUM_TOKENS = 96
NUM_PROMPTS = 3


@pytest.fixture(scope="module")
def changed(model_folder: Path) -> Reference:
    """The model after a training that moved every weight matrix."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 2:
                value += 0.05 * value.std() * torch.randn(value.shape, generator=generator)
    return Reference(model)


@pytest.fixture(scope="module")
def adapted(model_folder: Path) -> tuple[Any, Reference]:
    """A trainer's adapters with values that change the log-probabilities, and transformers with their product added."""
    lora = LoRAConfig(rank=8, alpha=16)
    config = TrainEngineConfig(path=str(model_folder), dtype="float32", lora=lora)
    engine = build_fsdp_engine(config, role="actor", total_steps=1, mesh=TrainerMesh.open(None), seed=0)
    assert engine.lora is not None
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, layer in engine.lora.adapters.layers.items():
            layer.lora_B.normal_(std=0.02, generator=generator)
            model.get_submodule(name).weight += 2.0 * layer.lora_B @ layer.lora_A
    return engine.lora, Reference(model)


@pytest.mark.parametrize("path", ["disk", "http", "collective", "adapter"])
async def test_an_answer_is_split_exactly_where_the_weights_change(
    path: str,
    server: RealServer,
    kit: Kit,
    prompts: list[list[int]],
    reference: Reference,
    changed: Reference,
    adapted: tuple[Any, Reference],
    tmp_path: Path,
) -> None:
    fleet = await kit.fleet(server)
    version, trainer = fleet.version + 1, FixedTrainer(reference.model)
    await asyncio.to_thread(serve, kit.disk(fleet, trainer), version)
    if path == "adapter":
        adapter, new = adapted
        channel: Any = AdapterChannel(adapter, FakeRanks(), FleetControl(fleet), tmp_path / "adapters")  # type: ignore[arg-type]
    else:
        trainer.model, new = changed.model, changed
        channel = {"disk": kit.disk, "http": kit.http, "collective": kit.collective}[path](fleet, trainer)
    made = fleet.status()["generated_tokens"]
    requests = [a_request(NUM_TOKENS, prompt=prompt, seed=1) for prompt in prompts[:NUM_PROMPTS]]
    running = [asyncio.create_task(fleet.agenerate(request)) for request in requests]
    await tokens_made(fleet, made + 8 * NUM_PROMPTS)
    await asyncio.to_thread(serve, channel, version + 1)
    for answer in await asyncio.gather(*running):
        split = answer.output_versions.count(version)
        assert answer.output_versions == [version] * split + [version + 1] * (NUM_TOKENS - split)
        assert 0 < split < NUM_TOKENS
        before, after = (item.of_answer(answer.input_ids, answer.output_ids) for item in (reference, new))
        assert largest_gap(answer.output_logprobs, before[:split] + after[split:]) < TOLERANCE
        assert largest_gap(before[split:], after[split:]) > 100 * TOLERANCE
