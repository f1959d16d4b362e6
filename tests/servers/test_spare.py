"""What needs other flags than the shared server has: another temperature, LoRA adapters, memory that is given up."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from areal.api.data import GenerationRequest, GenerationResponse
from areal.api.errors import RequestError
from areal.fleet.fleet import Fleet
from tests.expect import serve
from tests.fixed_trainer import FixedTrainer
from tests.servers.checkpoints import Scorer, build_model
from tests.servers.server_kit import PROMPT, TOLERANCE, Kit, SpareServer, a_request, largest_gap

pytestmark = pytest.mark.timeout(600)
RANK, ALPHA = 4, 8
TARGETS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),  # SGLang asks for it where there is q_proj
    "mlp.down_proj": (64, 128),
}
"""Adapted in the last layer, with their shapes."""


@pytest.fixture
def old_cool(models) -> Scorer:
    return Scorer(models["old"], SpareServer.temperature)


async def test_sampling_at_another_temperature(kit: Kit, spare: SpareServer, old_cool: Scorer) -> None:
    fleet = await kit.fleet(await spare.running())
    await asyncio.to_thread(serve, kit.disk(fleet, FixedTrainer(build_model(1))), fleet.version + 1)
    requests = [a_request(60, prompt=PROMPT[i:], temperature=SpareServer.temperature) for i in range(6)]
    for response in await asyncio.gather(*map(fleet.agenerate, requests)):
        expected = old_cool.logprobs(response.input_ids, response.output_ids)
        assert largest_gap(response.output_logprobs, expected) < TOLERANCE


def write_adapter(folder: Path, merged: Path, seed: int) -> None:
    """An adapter in PEFT's format, and the old model with the adapter added into its weights."""
    generator = torch.Generator().manual_seed(seed)
    model, tensors = build_model(1), {}
    for target, (rows, columns) in TARGETS.items():
        first = torch.randn(RANK, columns, generator=generator) * 0.2
        second = torch.randn(rows, RANK, generator=generator) * 0.2
        place = f"model.layers.1.{target}"
        tensors |= {f"base_model.model.{place}.lora_A.weight": first, f"base_model.model.{place}.lora_B.weight": second}
        model.get_submodule(place).weight.data += ALPHA / RANK * second @ first
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    modules = [target.split(".")[1] for target in TARGETS]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "bias": "none"}
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": "old", "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(merged)


async def together(fleet: Fleet, requests: list[GenerationRequest]) -> list[GenerationResponse]:
    return await asyncio.gather(*map(fleet.agenerate, requests))


async def test_adapters_by_versioned_name(kit: Kit, spare: SpareServer, old_cool: Scorer, tmp_path: Path) -> None:
    """Two versions of one adapter and the base model in one batch; one that is gone is refused, or loaded anew.

    vLLM's CPU kernels take "no adapter" in a batch with adapters for the last adapter, so the base model goes alone.
    """
    server = await spare.running()
    fleet, replica = await kit.fleet(server), kit.replica(server)
    await asyncio.to_thread(serve, kit.disk(fleet, FixedTrainer(build_model(1))), fleet.version + 1)
    scorers = {"": old_cool}
    for version in (1, 2):
        name = f"policy-v{version}"
        write_adapter(tmp_path / name, tmp_path / f"{name}-merged", seed=version)
        await replica.load_adapter(name, str(tmp_path / name))
        scorers[name] = Scorer(tmp_path / f"{name}-merged", SpareServer.temperature)
    requests = [
        dataclasses.replace(a_request(40, temperature=SpareServer.temperature), adapter=name) for name in [*scorers] * 2
    ]
    batches = [requests] if kit.backend == "sglang" else [[r for r in requests if r.adapter], [requests[0]]]
    pairs = [(r, answer) for batch in batches for r, answer in zip(batch, await together(fleet, batch), strict=True)]
    for request, response in pairs:
        gaps = {
            name: largest_gap(response.output_logprobs, scorer.logprobs(PROMPT, response.output_ids))
            for name, scorer in scorers.items()
        }
        assert [name for name, item in gaps.items() if item < TOLERANCE] == [request.adapter]
    await replica.unload_adapter("policy-v1")
    if kit.backend == "sglang":  # it remembers the folder
        again = await fleet.agenerate(requests[1])
        assert largest_gap(again.output_logprobs, scorers["policy-v1"].logprobs(PROMPT, again.output_ids)) < TOLERANCE
    else:
        with pytest.raises(RequestError):
            await fleet.agenerate(requests[1])
    assert len((await fleet.agenerate(requests[2])).output_ids) == 40
