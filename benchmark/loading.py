"""Seconds and memory that each trainer rank takes to load a checkpoint, for several meshes.

    python benchmark/loading.py [--mib 200] [--meshes d1,d2,t2,d2t2]

A random Llama in float32 is written once. Each rank reads only its part: `read_mib` is the part, `added_mib` the growth
of the resident memory from before the model is built to after. Prints one line of JSON for each mesh, of its slowest
and largest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from areal.api.allocation import AllocationMode
from areal.api.config import TrainEngineConfig
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh, local_part
from areal.system.discovery import FileRegistry
from areal.system.network import TOKEN_VARIABLE
from areal.system.process import ProcessContext

HIDDEN, MIB = 512, 2**20


def write_model(folder: Path, mib: int) -> None:
    """A checkpoint of about `mib` MiB."""
    block = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * 4 * HIDDEN
    layers = max(mib * MIB // 4 // block, 1)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=1024, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def load(folder: Path, mesh_text: str, rank: int) -> dict[str, float]:
    """What this rank took."""
    torch.set_num_threads(1)
    dims = AllocationMode.parse(f"fsdp:{mesh_text}").train[0].parallel
    context = ProcessContext(
        role="trainer", index=rank, world_size=dims.world_size, num_servers=0, run_id=0, run_dir=str(folder),
        num_threads=1, recover=False, device="cpu",
    )  # fmt: skip
    mesh = TrainerMesh.open(context, FileRegistry(folder / f"names-{mesh_text}"), dims=dims)
    process = psutil.Process()
    before, began = process.memory_info().rss, time.perf_counter()
    engine = build_fsdp_engine(
        TrainEngineConfig(path=str(folder), dtype="float32"), role="ref", total_steps=0, mesh=mesh, seed=0
    )
    seconds = time.perf_counter() - began
    added = process.memory_info().rss - before
    size = sum(local_part(weight).nbytes for _, weight in engine._model.named_tensors())
    mesh.barrier()
    mesh.close()
    return {"seconds": round(seconds, 3), "read_mib": round(size / MIB, 1), "added_mib": round(added / MIB, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=200)
    parser.add_argument("--meshes", default="d1,d2,t2,d2t2")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        print(json.dumps(load(args.folder, args.meshes, args.rank)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.mib)
        for mesh in args.meshes.split(","):
            world_size = AllocationMode.parse(f"fsdp:{mesh}").train[0].parallel.world_size
            command = [sys.executable, __file__, "--folder", folder, "--meshes", mesh]
            environment = os.environ | {TOKEN_VARIABLE: secrets.token_hex(16)}
            ranks = [
                subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE)
                for rank in range(world_size)
            ]
            outputs = [rank.communicate()[0] for rank in ranks]
            if any(rank.returncode for rank in ranks):
                sys.exit(f"{mesh}: a rank failed")
            figures = [json.loads(output.splitlines()[-1]) for output in outputs]
            print(
                json.dumps({"mesh": mesh, **{key: max(each[key] for each in figures) for key in figures[0]}}),
                flush=True,
            )


if __name__ == "__main__":
    main()
