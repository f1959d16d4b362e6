"""Four ranks that load one checkpoint and report the memory that this adds. Run by `test_sharded_load.py`."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh, local_part

RANKS = 4


def write_model(folder: Path, *, hidden: int, layers: int, vocabulary: int) -> None:
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _status_bytes(key: str) -> int:
    """A line of this process's status in Linux: VmRSS = resident now, VmHWM = the peak since the last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def on_ranks(mesh: TrainerMesh, folder: Path) -> dict[str, int]:
    added: dict[str, int] = {}
    for name, from_scratch in (("small", False), ("large", False), ("large", True)):  # small: imports and allocators
        config = TrainEngineConfig(
            path=str(folder / name), dtype="float32", optimizer=OptimizerConfig(), init_from_scratch=from_scratch
        )
        before = _status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        engine = build_fsdp_engine(config, role="actor", total_steps=1, mesh=mesh, seed=3)
        kind = f"{name}-{'scratch' if from_scratch else 'read'}"
        added[kind] = _status_bytes("VmHWM") - before
        own = {key: local_part(value).clone() for key, value in engine._model.named_tensors()}
        save_file(own, folder / f"{kind}-{mesh.rank}")
        del engine, own
    return added
