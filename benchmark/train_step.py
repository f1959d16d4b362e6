"""Tokens per second and peak memory of a rank for each mesh and option of the FSDP engine, and a prediction.

    python benchmark/train_step.py [--tokens 1024] [--steps 3] [--only d2,t2,checkpointed] [--tiny]

A random Llama of 25M parameters on the CPU: ranks are processes of this machine that exchange over gloo. The prediction
for a mesh is

    compute of a rank + waits + exchanges + copies

Each term is measured in the processes of the ranks, all at once, without the engine of the mesh: `compute_s` is a train
step of one process with the tokens and the part of the model that a rank has; `wait_s` what the same step takes longer
when the processes meet where the ranks of the mesh exchange, because one is the slower one in one layer and another in
the next, less the cost of meeting; `exchange_s` the sum over the collective operations of a step, each timed alone with
buffers of its size; `copy_s` the bytes that FSDP copies from weights to these buffers and back, and context ranks
between orders of heads and tokens, at the speed of a copy of that size to newly allocated memory. The last three are
`predicted_communication_s`; what a step took besides the first is `communication_s`. Ranks have the memory settings of
the launcher.

Prints one line of JSON for each row; --help lists the options of each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from areal.api.allocation import AllocationMode, ModelAllocation, ParallelDims
from areal.api.batch import LossOutput, MicroBatch, TokenOutputs
from areal.api.config import FSDPEngineConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.config.lora import LoRAConfig
from areal.api.engine import TrainEngine
from areal.data.balance import balanced_parts
from areal.data.pack import rows_to_train_batch
from areal.data.split import take
from areal.engine.build import TRAIN_ENGINES
from areal.engine.fsdp import FSDPEngine
from areal.engine.mesh import TrainerMesh
from areal.launcher.job import MALLOC
from areal.system.file_registry import FileRegistry
from areal.system.network import TOKEN_VARIABLE
from areal.system.process import ProcessContext

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark.meetings import meet, meetings, seconds_of_meeting

SHAPE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
}  # fmt: skip
TINY = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 128}


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


@dataclass(frozen=True)
class Work:
    """What a process computes in a step, and how often."""

    tokens: int
    """Of all data ranks."""
    sequences: int
    max_tokens: int
    """Of a micro-batch."""
    steps: int


def measure(folder: Path, rank: int, name: str, work: Work) -> dict[str, float]:
    """What this rank found: seconds of the fastest step, by the clock and of CPU, MiB at most, terms of the prediction.

    `folder` has the model, and in `part` the part of it that a tensor rank has.
    """
    torch.set_num_threads(1)
    case, trainer, began = CASES[name], _trainer(name), time.perf_counter()
    dims = trainer.parallel
    context = ProcessContext(
        role="trainer", index=rank, world_size=dims.world_size, num_servers=0, run_id=0, run_dir=str(folder),
        num_threads=1, recover=False, device="cpu",
    )  # fmt: skip
    mesh = TrainerMesh.open(context, FileRegistry(folder / "names"), dims=dims)
    engine = _engine(folder, case, work, mesh)
    found = {"start_s": time.perf_counter() - began}
    found |= _fastest(engine, mesh, mesh, work)
    found |= {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if dims.world_size > 1 and trainer.backend == "fsdp":
        del engine
        found |= _prediction(folder, case, work, mesh)
    mesh.close()
    return found


def _engine(folder: Path, case: Case, work: Work, mesh: TrainerMesh) -> TrainEngine:
    options: dict[str, Any] = {"dtype": "float32", "optimizer": OptimizerConfig()} | case.options
    options |= {"init_from_scratch": "lora" not in case.options}
    options["fsdp"] = FSDPEngineConfig(**options.get("fsdp", {}), shard_size=case.shard_size)
    spec = MicroBatchSpec(max_tokens_per_mb=work.max_tokens)
    config = TrainEngineConfig(path=str(folder), mb_spec=spec, **options)
    backend = "megatron" if case.mesh.startswith("megatron") else "fsdp"
    return TRAIN_ENGINES[backend](config, role="actor", total_steps=work.steps, mesh=mesh, seed=0)


def _fastest(engine: TrainEngine, mesh: TrainerMesh, every: TrainerMesh, work: Work) -> dict[str, float]:
    """Seconds of the fastest passes and of the fastest update. `every`: the ranks that begin each step together."""
    vocabulary = next(spec.shape[0] for spec in engine.weight_specs())
    length = work.tokens // work.sequences
    rows = [[(7 * place + row) % vocabulary for place in range(length)] for row in range(work.sequences)]
    batch = rows_to_train_batch(rows, [[0, *[1] * (len(row) - 1)] for row in rows])
    mine = take(batch, balanced_parts(batch.sequence_lengths, mesh.dp_size)[mesh.dp_rank])
    found: list[tuple[float, float, float, float]] = []
    norm = 0.0
    for _ in range(work.steps):
        every.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        engine.forward_backward(mine, _loss, denominator=float(work.tokens))
        passed = time.perf_counter()
        metrics = engine.optimizer_step()
        ended = time.perf_counter()
        norm = norm or metrics["grad_norm"].value
        found.append((ended - began, passed - began, ended - passed, time.process_time() - cpu_began))
    names = ("seconds", "passes_s", "update_s", "cpu_seconds")
    return dict(zip(names, map(min, zip(*found, strict=True)), strict=True)) | {"first_grad_norm": norm}


def _prediction(folder: Path, case: Case, work: Work, mesh: TrainerMesh) -> dict[str, float]:
    """The terms of the prediction, measured while all ranks do the same."""
    dims = mesh.dims
    share = dims.dp * dims.cp
    own = Work(work.tokens // share, work.sequences // share, work.max_tokens // dims.cp, work.steps)
    alone = TrainerMesh(0, 1, mesh.device)
    engine = _engine(folder / "part", Case(), own, alone)
    assert isinstance(engine, FSDPEngine)
    base = _fastest(engine, alone, mesh, own)
    shards = case.shard_size or share
    passes = max(own.tokens // own.max_tokens, 1)
    times = sum(meet(engine._model, meeting, mesh, passes) for meeting in meetings(case.shard_size or share, dims))
    wait = _fastest(engine, alone, mesh, own)["passes_s"] - base["passes_s"] - times * seconds_of_meeting(mesh)
    compute = base["passes_s"] + base["update_s"] / shards
    sent, copied, exchange_s, copy_s = 0.0, 0.0, 0.0, 0.0
    for exchange in exchanges(json.loads((folder / "config.json").read_text()), case, dims, work):
        one, copies = seconds_of(exchange, mesh)
        exchange_s += exchange.count * one
        copy_s += exchange.count * copies
        sent += exchange.count * exchange.sent
        copied += exchange.count * exchange.copied
    return {
        "compute_s": compute,
        "wait_s": wait,
        "exchange_s": exchange_s,
        "copy_s": copy_s,
        "predicted_s": compute + wait + exchange_s + copy_s,
        "sent_mib": sent / 2**20,
        "copied_mib": copied / 2**20,
    }


@dataclass(frozen=True)
class Exchange:
    """A collective operation of a step."""

    kind: str
    nbytes: int
    """Of the largest buffer of a rank."""
    count: int
    ranks: int
    copied: int = 0
    """Bytes that a rank copies before and after it."""

    @property
    def sent(self) -> float:
        """Bytes that a rank sends at least."""
        return (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1) / self.ranks * self.nbytes


def exchanges(config: dict[str, Any], case: Case, dims: ParallelDims, work: Work) -> list[Exchange]:
    """Of a step of float32 on two ranks."""
    width, layers, hidden = 4, config["num_hidden_layers"], config["hidden_size"]
    sharing = dims.dp * dims.cp
    own_tokens = work.tokens // sharing
    passes = max(work.tokens // dims.dp // work.max_tokens, 1)
    shards, heads, keys = case.shard_size or sharing, config["num_attention_heads"], config["num_key_value_heads"]
    attention = 2 * hidden * (heads + keys) * config["head_dim"]
    block = (attention + 3 * hidden * config["intermediate_size"]) * width // dims.tp
    head = config["vocab_size"] * hidden * width // dims.tp  # embedding and output head, which are tied
    found = [Exchange("all_reduce", 64, 3, dims.world_size)]  # micro-batches, and two of the optimiser
    fsdp = case.options.get("fsdp", {})
    keeps = fsdp.get("reshard_after_forward") is False
    reductions = passes if fsdp.get("gradient_sync") == "every" else 1
    if shards > 1:
        for size, count, gathers in ((block, layers, 1 if keeps else 2), (head, 1, 1)):
            found.append(Exchange("all_gather", size, passes * gathers * count, shards, size + size // shards))
            found.append(Exchange("reduce_scatter", size, reductions * count, shards, size))
    else:  # FSDP copies gradients to a buffer and back, as if it reduced them
        found += [Exchange("copy", size, count, 1, 2 * size) for size, count in ((block, layers), (head, 1))]
    if (copies := sharing // shards) > 1:
        found += [Exchange("all_reduce", block // shards, reductions * layers, copies)]
        found += [Exchange("all_reduce", head // shards, reductions, copies)]
    states = own_tokens // passes * hidden * width
    if dims.tp > 1:  # two sums forward and two backward in a layer; of the embedding, and of the head's gradient
        found.append(Exchange("all_reduce", states, passes * (4 * layers + 2), dims.tp))
        found.append(Exchange("all_reduce", own_tokens // passes * width, passes * 4, dims.tp))
    if dims.cp > 1:  # queries, keys and values, then the outputs of attention; the same backward
        for size in (states * (heads + 2 * keys) // heads, states):
            found.append(Exchange("all_to_all", size, passes * 2 * layers, dims.cp, 2 * size))
        found.append(Exchange("all_gather", own_tokens * dims.cp // passes * width, passes * 2, dims.cp))
    return found


def seconds_of(exchange: Exchange, mesh: TrainerMesh) -> tuple[float, float]:
    """Of a collective operation over all ranks, all of which begin together, and of a rank's copies before and after
    it, to memory that is allocated for each, as FSDP does on a CPU: medians."""
    count = exchange.nbytes // 4
    whole, part = torch.ones(count), torch.ones(count // mesh.world_size)
    other = torch.empty_like(whole)
    actions: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "copy": lambda: None,
    }
    found: list[tuple[float, float]] = []
    for _ in range(9):
        mesh.barrier()
        began = time.perf_counter()
        actions[exchange.kind]()
        ended = time.perf_counter()
        torch.empty_like(whole).copy_(whole)
        found.append((ended - began, time.perf_counter() - ended))
    operation, copy = (statistics.median(each) for each in zip(*found, strict=True))
    return operation, copy * exchange.copied / exchange.nbytes


def run_case(name: str, shape: dict[str, Any], tokens: int, sequences: int, steps: int) -> dict[str, float]:
    """The slowest rank's figures."""
    world_size = _trainer(name).parallel.world_size
    with tempfile.TemporaryDirectory() as folder:
        rest: dict[str, Any] = {"tie_word_embeddings": True, "max_position_embeddings": max(2048, tokens)}
        model = LlamaConfig(**shape, **rest)
        (LlamaForCausalLM(model) if "lora" in CASES[name].options else model).save_pretrained(folder)
        split = {"num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"}
        tensor_ranks = _trainer(name).parallel.tp
        own = {key: value // tensor_ranks if key in split else value for key, value in shape.items()}
        LlamaConfig(**own, **rest).save_pretrained(Path(folder) / "part")
        command = [sys.executable, __file__, "--folder", folder, "--tokens", str(tokens), "--steps", str(steps)]
        command += ["--sequences", str(sequences)]
        environment = os.environ | MALLOC | {TOKEN_VARIABLE: secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
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
        limit = max(args.tokens // min(args.sequences, 2), 256)
        work = Work(args.tokens, args.sequences, limit, args.steps)
        print(json.dumps(measure(args.folder, args.rank, args.only, work)))
        return
    shape = TINY if args.tiny else SHAPE
    head_dim = shape["head_dim"]
    attention = 2 * shape["hidden_size"] * (shape["num_attention_heads"] + shape["num_key_value_heads"]) * head_dim
    block = attention + 3 * shape["hidden_size"] * shape["intermediate_size"]
    parameters = shape["num_hidden_layers"] * block + shape["vocab_size"] * shape["hidden_size"]
    cpu = Path("/proc/cpuinfo")
    has = set(cpu.read_text().split()) & {"avx512_bf16", "amx_bf16"} if cpu.exists() else set[str]()
    print(json.dumps({"parameters": parameters, "instructions_for_bfloat16": sorted(has), "load": os.getloadavg()[0]}))
    for name in args.only.split(","):
        found = run_case(name, shape, args.tokens, args.sequences, args.steps)
        row: dict[str, Any] = {"case": name, "tokens_per_s": args.tokens / found["seconds"], **found}
        if "predicted_s" in found:
            row |= {
                "communication_s": found["seconds"] - found["compute_s"],
                "predicted_communication_s": found["wait_s"] + found["exchange_s"] + found["copy_s"],
                "measured_over_predicted": found["seconds"] / found["predicted_s"],
            }
        print(
            json.dumps({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}),
            flush=True,
        )


if __name__ == "__main__":
    main()
