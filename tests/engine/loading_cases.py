"""Four ranks that load one checkpoint and report the memory that this adds. Run by `test_sharded_load.py`."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh, local_part
from areal.system.file_registry import FileRegistry
from areal.system.process import ProcessContext

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


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    context = ProcessContext(
        role="trainer", index=rank, world_size=RANKS, num_servers=0, run_id=0, run_dir=str(folder), num_threads=1,
        recover=False, device="cpu",
    )  # fmt: skip
    mesh = TrainerMesh.open(context, FileRegistry(folder / "names"), timeout_s=200)
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
        save_file(own, folder / f"{kind}-{rank}")
        del engine, own
    (folder / f"added-{rank}.json").write_text(json.dumps(added))
    mesh.close()


if __name__ == "areal_loading":
    run_rank(globals()["RANK"], Path(globals()["FOLDER"]))
