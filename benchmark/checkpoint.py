"""Seconds that training waits for a recovery checkpoint, with recover.async_save and without.

    python benchmark/checkpoint.py [--layers 6 44] [--repeats 3]

Random Llamas in float32 with AdamW (6 layers: 25M parameters, 44: 127M) on one rank. Ratios are to a copy of the same
bytes in memory. Prints one line of JSON for each size.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig

from areal.api.config import OptimizerConfig, RecoverConfig, TrainEngineConfig
from areal.engine.fsdp import FSDPEngine, build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.trainer.recover import RecoverPoint, RecoverStore

SHAPE = {
    "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 8192,
}  # fmt: skip


def make_engine(folder: Path, layers: int, mesh: TrainerMesh) -> tuple[FSDPEngine, int]:
    """An engine with optimiser state, and the bytes of its checkpoint."""
    LlamaConfig.from_dict(SHAPE | {"num_hidden_layers": layers}).save_pretrained(folder)
    config = TrainEngineConfig(path=str(folder), dtype="float32", optimizer=OptimizerConfig(), init_from_scratch=True)
    engine = build_fsdp_engine(config, role="actor", total_steps=9, mesh=mesh, seed=0)
    for weight in engine._changing().values():  # a step without a pass
        weight.grad = torch.zeros_like(weight)
    engine.optimizer_step()
    return engine, sum(piece.values.nbytes for piece in engine.stage(copies=False).pieces.values())


def seconds_of_copy(num_bytes: int) -> float:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def measure(layers: int, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder, mesh = Path(name), TrainerMesh.open(None)
        engine, num_bytes = make_engine(folder, layers, mesh)
        store = RecoverStore(folder / "recover", RecoverConfig(), {"actor": engine}, mesh)
        seconds: dict[str, list[float]] = {
            name: [] for name in ("copy", "sync", "first_async", "async", "async_written")
        }
        for step in range(2 * repeats + 1):
            waits = step < repeats
            point = RecoverPoint(step=step, cadence_s={}, elapsed_s=0.0, goal_reached={})
            began = time.perf_counter()
            store.save(point, waits=waits)
            waited = time.perf_counter() - began
            store.finish()
            seconds["sync" if waits else "first_async" if step == repeats else "async"].append(waited)
            seconds["async_written"] += [] if waits else [time.perf_counter() - began]
        store.close()
        seconds["copy"] = [seconds_of_copy(num_bytes) for _ in range(repeats)]
        mesh.close()
    medians = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    ratios = {f"{name}_per_copy": medians[f"{name}_s"] / medians["copy_s"] for name in ("sync", "async")}
    facts = {"layers": layers, "parameters": num_bytes // 12, "bytes": num_bytes}
    return facts | {name: round(value, 4) for name, value in (medians | ratios).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 44])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    for layers in arguments.layers:
        print(json.dumps(measure(layers, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()
