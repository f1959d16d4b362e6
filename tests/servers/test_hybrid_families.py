"""Models whose layers keep a state on the real servers: log-probabilities and weight updates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.expect import serve
from tests.servers.checkpoints import EOS, VOCAB_SIZE, Scorer, build_tokenizer
from tests.servers.real_server import RealServer
from tests.servers.server_kit import TOLERANCE, VLLM_ONLY, Kit, a_request, gap

FAMILIES: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,  # vLLM on the CPU takes no 32
        "linear_value_head_dim": 128,
    },
}
"""What the pinned build of vLLM serves on the CPU: docs/servers.md."""
IN_BF16 = {"qwen3_5_text": 0.1}
"""Families whose linear attention vLLM computes in bfloat16 alone on the CPU, and the largest difference from the
trainer's float32."""


def write_model(folder: Path, family: str, seed: int) -> Path:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "dtype": "float32",
    }
    layers = {} if family == "nemotron_h" else {"num_hidden_layers": 2}
    config = AutoConfig.for_model(family, **sizes | layers | FAMILIES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@VLLM_ONLY
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
async def test_log_probabilities_and_updates_of_models_with_states(backend, family: str, tmp_path: Path) -> None:
    old, new = (write_model(tmp_path / name, family, seed) for seed, name in enumerate(("old", "new")))
    flags = {"dtype": "bfloat16"} if family in IN_BF16 else {}
    server, allowed = RealServer(backend, old, tmp_path, name=family, flags=flags), IN_BF16.get(family, TOLERANCE)
    kit = Kit(backend, tmp_path, {"old": old})
    try:
        await asyncio.to_thread(server.wait_ready)
        fleet = await kit.fleet(server)
        scorers = [Scorer(old), Scorer(new)]
        assert gap(await fleet.agenerate(a_request(40)), scorers[0]) < allowed
        assert gap(await fleet.agenerate(a_request(40)), scorers[1]) > 4 * allowed
        disk, collective = (make(fleet, scorers[1]._engine) for make in (kit.disk, kit.collective))
        await asyncio.to_thread(serve, disk, 1)
        assert gap(await fleet.agenerate(a_request(40)), scorers[1]) < allowed
        collective._engine = scorers[0]._engine
        await asyncio.to_thread(serve, collective, 2)
        assert gap(await fleet.agenerate(a_request(40)), scorers[0]) < allowed
    finally:
        await kit.close()
        server.kill_all()
