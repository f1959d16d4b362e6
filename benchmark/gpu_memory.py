"""Planned memory of one trainer rank of 8, 64 and 512, and on a GPU the peak of a real step of such a rank.

    python benchmark/gpu_memory.py [--device cuda]

Shapes of 7B and 32B, 8k and 32k tokens per micro-batch, with and without checkpointing: a table of
`areal.launcher.memory_plan`, on any machine. With --device cuda, a step of a 0.5B shape is measured on one rank, and
one rank of each row whose plan fits the card: its process group is torch's `fake` one, whose collectives return at
once, so the memory is real and the numbers are not. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_step import HALF_BILLION, one_step
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config

from areal.api.allocation import ParallelDims
from areal.api.config import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.errors import TrainingDiverged
from areal.launcher.memory_plan import rank_memory
from areal.models.model_shape import ModelShape

SHAPES = {
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip


def planned(folder: Path, device: torch.device) -> list[dict[str, object]]:
    """The table; on a GPU with the measured peaks."""
    rows: list[dict[str, object]] = []
    for name, sizes in SHAPES.items():
        Qwen2Config.from_dict(sizes).save_pretrained(folder / name)
        shape = ModelShape.read(str(folder / name))
        assert shape is not None
        for ranks, tokens, checkpointing in itertools.product((8, 64, 512), (8192, 32768), (False, True)):
            config = TrainEngineConfig(path=name, optimizer=OptimizerConfig(), gradient_checkpointing=checkpointing)
            memory = rank_memory(
                [(config, shape)], dims=ParallelDims(dp=ranks), tokens=tokens, on_gpu=True, bucket_bytes=2**30
            )
            row: dict[str, object] = {"model": name, "ranks": ranks, "tokens": tokens, "checkpointing": checkpointing}
            rows.append(row | {"gib": round(memory.peak / 2**30, 1)})
            if device.type == "cuda" and memory.peak < 0.9 * torch.cuda.mem_get_info(device)[1]:
                peak = fake_rank_peak(folder / name, device, ranks=ranks, tokens=tokens, checkpointing=checkpointing)
                rows[-1]["measured_gib"] = round(peak / 2**30, 1)
            print(
                f"{name:>5} {ranks:>5} ranks {tokens:>7} tokens, "
                f"checkpointing {checkpointing!s:>5}: {rows[-1]['gib']} GiB"
            )
    return rows


def fake_rank_peak(path: Path, device: torch.device, *, ranks: int, tokens: int, checkpointing: bool) -> int:
    """Bytes on a GPU at the peak of a step of rank 0 of `ranks` trainer ranks; 0 on the CPU."""
    config = TrainEngineConfig(
        path=str(path), optimizer=OptimizerConfig(), gradient_checkpointing=checkpointing, init_from_scratch=True,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=tokens),
    )  # fmt: skip
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with contextlib.suppress(TrainingDiverged):  # what the other ranks would send is undefined
            one_step(config, device, tokens=tokens, repeats=1, ranks=ranks)
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    finally:
        dist.destroy_process_group()


def measured(folder: Path, device: torch.device) -> dict[str, float]:
    Qwen2Config.from_dict(HALF_BILLION).save_pretrained(folder / "half")
    shape = ModelShape.read(str(folder / "half"))
    assert shape is not None
    config = TrainEngineConfig(
        path=str(folder / "half"), optimizer=OptimizerConfig(), gradient_checkpointing=True, init_from_scratch=True,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=8192),
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats(device)
    one_step(config, device, tokens=8192, repeats=2)
    peak = torch.cuda.max_memory_allocated(device)
    plan = rank_memory([(config, shape)], dims=ParallelDims(), tokens=8192, on_gpu=True).peak
    return {"measured_gib": peak / 2**30, "planned_gib": plan / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        rows = planned(Path(folder), device)
        step = measured(Path(folder), device) if device.type == "cuda" else None
    print(json.dumps({"rows": rows, "step": step}))


if __name__ == "__main__":
    main()
