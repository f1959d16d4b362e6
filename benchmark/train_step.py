"""Tokens per second and peak memory of a rank for each mesh and option of the FSDP engine, and a prediction.

    python benchmark/train_step.py [--tokens 1024] [--steps 3] [--only d2,t2,checkpointed] [--tiny]

A random Llama of 25M parameters on the CPU: ranks are processes of this machine that exchange over gloo. First the
speed of one rank and the bandwidth and latency of the ranks' exchanges are measured; the prediction for a mesh is

    compute of one rank x its share + bytes that it sends / bandwidth + exchanges x latency

The last two terms are `predicted_communication_s`; what a step took besides the first is `communication_s`.

Prints one line of JSON for each row; --help lists the options of each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from areal.api.allocation import AllocationMode, ModelAllocation, ParallelDims
from areal.api.batch import LossOutput, MicroBatch, TokenOutputs
from areal.api.config import FSDPEngineConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.config.lora import LoRAConfig
from areal.data.balance import balanced_parts
from areal.data.pack import rows_to_train_batch
from areal.data.split import take
from areal.engine.build import TRAIN_ENGINES
from areal.engine.mesh import TrainerMesh
from areal.system.file_registry import FileRegistry
from areal.system.network import TOKEN_VARIABLE
from areal.system.process import ProcessContext

SHAPE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8192,
}  # fmt: skip
TINY = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}


@dataclass(frozen=True)
class Case:
    mesh: str = "d1"
    shard_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "d1": Case(),
    "bf16": Case(options={"dtype": "bfloat16"}),
    "checkpointed": Case(options={"gradient_checkpointing": True}),
    "selective": Case(options={"gradient_checkpointing": True, "checkpointing": "selective"}),
    "offload": Case(options={"fsdp": {"offload_params": True}}),
    "offload_optimizer": Case(options={"fsdp": {"offload_optimizer": True}}),
    "compiled": Case(options={"compile": True}),
    "lora": Case(options={"lora": LoRAConfig(rank=16)}),
    "adam_bf16": Case(options={"optimizer": OptimizerConfig(type="adam_bf16")}),
    "adam_8bit": Case(options={"optimizer": OptimizerConfig(type="adam_8bit")}),
    "d2": Case("d2"),
    "d2_every": Case("d2", options={"fsdp": {"gradient_sync": "every"}}),
    "d2_gathered_once": Case("d2", options={"fsdp": {"reshard_after_forward": False}}),
    "d2_prefetch": Case("d2", options={"fsdp": {"prefetch_blocks": 1}}),
    "t2": Case("t2"),
    "c2": Case("c2"),
    "hsdp2x1": Case("d2", shard_size=1),
    **{f"megatron_{mesh}": Case(f"megatron:{mesh}") for mesh in ("d1", "d2", "t2", "p2", "c2")},
}
"""Two ranks each, because the machine of the bars has two cores."""


def _trainer(name: str) -> ModelAllocation:
    mesh = CASES[name].mesh
    return AllocationMode.parse(mesh if ":" in mesh else f"fsdp:{mesh}").train[0]


def _loss(outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
    assert outputs.logprobs is not None
    return LossOutput(loss=-outputs.logprobs[micro.batch.loss_mask].sum(), metrics={})


def measure(folder: Path, rank: int, name: str, tokens: int, sequences: int, steps: int) -> dict[str, float]:
    """What this rank found: seconds of the fastest step, by the clock and of CPU, MiB at most, costs of exchanges."""
    torch.set_num_threads(1)
    case, trainer, began = CASES[name], _trainer(name), time.perf_counter()
    dims = trainer.parallel
    context = ProcessContext(
        role="trainer", index=rank, world_size=dims.world_size, num_servers=0, run_id=0, run_dir=str(folder),
        num_threads=1, recover=False, device="cpu",
    )  # fmt: skip
    mesh = TrainerMesh.open(context, FileRegistry(folder / "names"), dims=dims)
    options: dict[str, Any] = {"dtype": "float32", "optimizer": OptimizerConfig()} | case.options
    options |= {"init_from_scratch": "lora" not in case.options}
    options["fsdp"] = FSDPEngineConfig(**options.get("fsdp", {}), shard_size=case.shard_size)
    config = TrainEngineConfig(
        path=str(folder), mb_spec=MicroBatchSpec(max_tokens_per_mb=max(tokens // min(sequences, 2), 256)), **options,
    )  # fmt: skip
    engine = TRAIN_ENGINES[trainer.backend](config, role="actor", total_steps=steps, mesh=mesh, seed=0)
    start_s = time.perf_counter() - began
    vocabulary = next(spec.shape[0] for spec in engine.weight_specs())
    rows = [[(7 * place + row) % vocabulary for place in range(tokens // sequences)] for row in range(sequences)]
    batch = rows_to_train_batch(rows, [[0, *[1] * (len(row) - 1)] for row in rows])
    mine = take(batch, balanced_parts(batch.sequence_lengths, mesh.dp_size)[mesh.dp_rank])
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    for _ in range(steps):
        mesh.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        engine.forward_backward(mine, _loss, denominator=float(tokens))
        engine.optimizer_step()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    found = {"seconds": min(seconds), "cpu_seconds": min(cpu_seconds), "start_s": start_s}
    found |= {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if dims.world_size > 1:
        found |= exchange_costs(mesh)
    mesh.close()
    return found


def exchange_costs(mesh: TrainerMesh) -> dict[str, float]:
    """Bytes per second that a rank sends in a large all-reduce, and the seconds of a small one."""
    costs: dict[str, float] = {}
    for name, count in (("latency_s", 1), ("bytes_per_s", 2**22)):
        values, best = torch.zeros(count), float("inf")
        for _ in range(5):
            mesh.barrier()
            began = time.perf_counter()
            mesh.all_reduce(values)
            best = min(best, time.perf_counter() - began)
        sent = 2 * (mesh.world_size - 1) / mesh.world_size * values.nbytes
        costs[name] = best if name == "latency_s" else sent / best
    return costs


def communication(shape: dict[str, Any], name: str, tokens: int, parameters: int) -> tuple[float, int]:
    """Bytes that a rank sends in a step of float32 with two micro-batches, and the number of its exchanges."""
    case = CASES[name]
    dims: ParallelDims = AllocationMode.parse(f"fsdp:{case.mesh}").train[0].parallel
    sharing, passes, width = dims.dp * dims.cp, max(2 // dims.dp, 1), 4
    shards = case.shard_size or sharing
    layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
    fsdp = case.options.get("fsdp", {})
    weights = parameters / dims.tp * width
    gathers = passes * (1 if fsdp.get("reshard_after_forward") is False else 2)
    reductions = passes if fsdp.get("gradient_sync") == "every" else 1
    sent = weights * (shards - 1) / shards * (gathers + reductions)
    copies = sharing // shards
    sent += 2 * weights / shards * (copies - 1) / copies * reductions
    count = (layers + 1) * ((gathers + reductions) * (shards > 1) + reductions * (copies > 1))
    own = tokens / dims.dp / dims.cp
    if dims.tp > 1:  # two sums of the hidden states forward and two backward in a layer, two at the ends
        sums = 4 * layers + 2
        sent += sums * 2 * (dims.tp - 1) / dims.tp * own * hidden * width
        count += passes * (sums + 4)
    if dims.cp > 1:  # queries, keys, values and outputs, forward and backward
        heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
        sent += layers * 2 * (dims.cp - 1) / dims.cp * own * heads * hidden / shape["num_attention_heads"] * width
        count += passes * 4 * layers
    return sent, count


def run_case(name: str, shape: dict[str, Any], tokens: int, sequences: int, steps: int) -> dict[str, float]:
    """The slowest rank's figures."""
    world_size = _trainer(name).parallel.world_size
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaConfig(**shape, tie_word_embeddings=True, max_position_embeddings=max(2048, tokens))
        (LlamaForCausalLM(model) if "lora" in CASES[name].options else model).save_pretrained(folder)
        command = [sys.executable, __file__, "--folder", folder, "--tokens", str(tokens), "--steps", str(steps)]
        command += ["--sequences", str(sequences)]
        environment = os.environ | {TOKEN_VARIABLE: secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, "--only", name, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE)
            for rank in range(world_size)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{name}: a rank failed")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {key: max(each[key] for each in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a train step over all ranks")
    parser.add_argument("--sequences", type=int, default=8, help="rows that have these tokens: %(default)s")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", default=",".join(CASES), help="names of rows: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="a small model, to test this script")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        print(json.dumps(measure(args.folder, args.rank, args.only, args.tokens, args.sequences, args.steps)))
        return
    shape = TINY if args.tiny else SHAPE
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    attention = 2 * shape["hidden_size"] * (shape["hidden_size"] + shape["num_key_value_heads"] * head_dim)
    block = attention + 3 * shape["hidden_size"] * shape["intermediate_size"]
    parameters = shape["num_hidden_layers"] * block + shape["vocab_size"] * shape["hidden_size"]
    cpu = Path("/proc/cpuinfo")
    has = set(cpu.read_text().split()) & {"avx512_bf16", "amx_bf16"} if cpu.exists() else set[str]()
    print(json.dumps({"parameters": parameters, "instructions_for_bfloat16": sorted(has), "load": os.getloadavg()[0]}))
    alone: float | None = None
    for name in args.only.split(","):
        found = run_case(name, shape, args.tokens, args.sequences, args.steps)
        alone = found["seconds"] if name == "d1" else alone
        row: dict[str, Any] = {"case": name, "tokens_per_s": args.tokens / found["seconds"], **found}
        if alone is not None and "bytes_per_s" in found and _trainer(name).backend == "fsdp":
            world_size = _trainer(name).parallel.world_size
            sent, exchanges = communication(shape, name, args.tokens, parameters)
            cost = sent / found["bytes_per_s"] + exchanges * found["latency_s"]
            row |= {
                "predicted_s": alone / world_size + cost,
                "predicted_communication_s": cost,
                "communication_s": found["seconds"] - alone / world_size,
                "sent_mib": sent / 2**20,
            }
        print(
            json.dumps({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}),
            flush=True,
        )


if __name__ == "__main__":
    main()
