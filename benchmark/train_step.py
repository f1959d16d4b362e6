"""Tokens per second and peak memory of a rank for each mesh and option of the FSDP engine, and a prediction.

    python benchmark/train_step.py [--tokens 1024] [--steps 3] [--only d2,t2,checkpointed] [--tiny]

A random Llama of 25M parameters on the CPU: ranks are processes of this machine that exchange over gloo. For a mesh
it prints what communication costs, as measured and as predicted.

Measured, `communication_s`: what a step takes longer than one of the same engine on the same mesh with process groups
that exchange nothing, but give a rank its own numbers (`free_step_s`). The processes compute the same in both.

Predicted, `predicted_communication_s`, without the engine of the mesh:

    waits + exchanges

`exchange_s` is the sum over the collective operations of a step, each timed alone with one reading of its result and
buffers of its size that no cache has, less the time of the same in the groups that exchange nothing. `wait_s` is what a
step of one process with the tokens and the part of the model of a rank takes longer when the processes meet where the
ranks of the mesh exchange, because one is the slower one in one layer and another in the next, less the cost of
meeting. Ranks have the memory settings of the launcher.

The speed of a machine changes from one minute to the next by as much as communication costs. Hence a round takes each
kind of step and each operation once, in turn in one order and in the opposite one; both sides of a comparison are
differences within a round. Seconds are of the slowest rank, medians over rounds; `ratio_at_least` and `ratio_at_most`
contain 90% of the ratios of rounds that are drawn again at random.

With --tree: seconds of a step of one process over the answers of `tree_shapes.json`, whose turns fork (`branches`: the
different ones of each turn), its CPU seconds, MiB that the step adds, and CPU seconds of a step over rows that share
nothing. --versus measures another commit in turn, and prints the ratios and what contains 90% of them. With --states N:
CPU seconds of a step of a Qwen3.5 of 24M parameters over N of these answers as a tree, and over separate rows, in turn;
their ratio, and what contains 90% of the ratios.

`packed_qwen3_5` compares a packed row of a Qwen3.5 of log-normal lengths with the padded batch in transformers.

Prints one line of JSON for each row; --help lists the options of each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from other_tree import compared, interval, median_ratio
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3_5TextConfig

from areal.api.allocation import AllocationMode, ModelAllocation
from areal.api.batch import LossOutput, MicroBatch, TokenOutputs, TrainBatch
from areal.api.config import FSDPEngineConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.config.train import LoRAConfig
from areal.api.engine import TrainEngine
from areal.data.balance import balanced_parts
from areal.data.pack import rows_to_train_batch, take
from areal.engine.build import TRAIN_ENGINES
from areal.engine.fsdp import FSDPEngine
from areal.engine.mesh import TrainerMesh
from areal.launcher.job import MALLOC
from areal.system.discovery import FileRegistry
from areal.system.network import TOKEN_VARIABLE
from areal.system.process import ProcessContext

sys.path.append(str(Path(__file__).resolve().parents[1]))  # after the tree that --versus measures

from benchmark.communication import FreeMesh, exchanges, seconds_of, seconds_of_meeting
from benchmark.meetings import meet, meetings

SHAPE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
}  # fmt: skip
WARM_UP = 3
"""Rounds of steps after which the heap has its size: until then page faults take up to 0.2 s of a step."""
PACKED = "packed_qwen3_5"
"""The row of a model whose layers keep a state, at uneven lengths."""
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
    figures = {"start_s": time.perf_counter() - began}
    figures |= _fastest(engine, mesh, work)
    figures |= {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if dims.world_size > 1 and trainer.backend == "fsdp":
        figures |= _communication(folder, case, work, mesh, engine)
    mesh.close()
    return figures


def _engine(folder: Path, case: Case, work: Work, mesh: TrainerMesh) -> TrainEngine:
    options: dict[str, Any] = {"dtype": "float32", "optimizer": OptimizerConfig()} | case.options
    options |= {"init_from_scratch": "lora" not in case.options}
    options["fsdp"] = FSDPEngineConfig(**options.get("fsdp", {}), shard_size=case.shard_size)
    spec = MicroBatchSpec(max_tokens_per_mb=work.max_tokens)
    config = TrainEngineConfig(path=str(folder), mb_spec=spec, **options)
    backend = "megatron" if case.mesh.startswith("megatron") else "fsdp"
    return TRAIN_ENGINES[backend](config, role="actor", total_steps=work.steps, mesh=mesh, seed=0)


def _batch(engine: TrainEngine, mesh: TrainerMesh, work: Work) -> TrainBatch:
    """The share of this data rank."""
    vocabulary = next(spec.shape[0] for spec in engine.weight_specs())
    length = work.tokens // work.sequences
    rows = [[(7 * place + row) % vocabulary for place in range(length)] for row in range(work.sequences)]
    batch = rows_to_train_batch(rows, [[0, *[1] * (len(row) - 1)] for row in rows])
    return take(batch, balanced_parts(batch.sequence_lengths, mesh.dp_size)[mesh.dp_rank])


def _step(engine: TrainEngine, batch: TrainBatch, work: Work) -> dict[str, float]:
    """Seconds of a train step and of its parts."""
    began, cpu_began = time.perf_counter(), time.process_time()
    engine.forward_backward(batch, _loss, denominator=float(work.tokens))
    passed = time.perf_counter()
    metrics = engine.optimizer_step()
    ended = time.perf_counter()
    if not math.isfinite(metrics["grad_norm"].value):
        sys.exit("a step with numbers that are not finite takes other times")
    seconds = {"seconds": ended - began, "passes_s": passed - began, "update_s": ended - passed}
    return seconds | {"cpu_seconds": time.process_time() - cpu_began, "grad_norm": metrics["grad_norm"].value}


def _fastest(engine: TrainEngine, mesh: TrainerMesh, work: Work) -> dict[str, float]:
    """Of the fastest step and the fastest parts, and the first gradient norm."""
    steps_done: list[dict[str, float]] = []
    batch = _batch(engine, mesh, work)
    for _ in range(work.steps):
        mesh.barrier()
        steps_done.append(_step(engine, batch, work))
    fastest = {key: min(step[key] for step in steps_done) for key in steps_done[0] if key != "grad_norm"}
    return fastest | {"first_grad_norm": steps_done[0]["grad_norm"]}


def _communication(folder: Path, case: Case, work: Work, mesh: TrainerMesh, engine: TrainEngine) -> dict[str, float]:
    """Communication as measured and as predicted, from steps of four engines in the processes of the ranks."""
    dims, free = mesh.dims, FreeMesh(mesh)
    alone, share = TrainerMesh(0, 1, mesh.device), dims.dp * dims.cp
    share_of_rank = Work(work.tokens // share, work.sequences // share, work.max_tokens // dims.cp, work.steps)
    passes = max(share_of_rank.tokens // share_of_rank.max_tokens, 1)
    part, meeting = (_engine(folder / "part", Case(), share_of_rank, alone) for _ in range(2))
    assert isinstance(meeting, FSDPEngine)
    times = sum(meet(meeting._model, each, mesh, passes) for each in meetings(case.shard_size or share, dims))
    fsdp = FSDPEngineConfig(**case.options.get("fsdp", {}), shard_size=case.shard_size)
    config, tokens = json.loads((folder / "config.json").read_text()), share_of_rank.tokens // passes
    operations = exchanges(config, dims, fsdp, tokens=tokens, passes=passes)
    medians = _rounds(
        {
            "step": _steps(engine, mesh, work),
            "free_step": _steps(_engine(folder, case, work, free), free, work),
            "part": _steps(part, alone, share_of_rank),
            "meeting": _steps(meeting, alone, share_of_rank),
            "meetings": lambda: times * seconds_of_meeting(mesh),
            "exchange": lambda: sum(each.count * seconds_of(each, mesh, free) for each in operations),
        },
        mesh,
        work.steps,
    )
    communication = medians["step"] - medians["free_step"]
    waits = medians["meeting"] - medians["part"] - medians["meetings"]
    predicted = waits + medians["exchange"]
    drawn = torch.randint(work.steps, (10_000, work.steps), generator=torch.Generator().manual_seed(0))
    ratios = communication[drawn].quantile(0.5, 1) / predicted[drawn].quantile(0.5, 1)
    terms = medians | {"communication": communication, "wait": waits, "predicted_communication": predicted}
    return {
        **{f"{name}_s": seconds.quantile(0.5).item() for name, seconds in terms.items()},
        "communication_over_predicted": (communication.quantile(0.5) / predicted.quantile(0.5)).item(),
        "ratio_at_least": ratios.quantile(0.05).item(),
        "ratio_at_most": ratios.quantile(0.95).item(),
        "sent_mib": sum(each.count * each.sent for each in operations) / 2**20,
    }


def _steps(engine: TrainEngine, mesh: TrainerMesh, work: Work) -> Callable[[], float]:
    """A step of the engine, and its seconds."""
    batch = _batch(engine, mesh, work)
    return lambda: _step(engine, batch, work)["seconds"]


def _rounds(timed: dict[str, Callable[[], float]], mesh: TrainerMesh, number: int) -> dict[str, Tensor]:
    """Seconds [rounds] of the slowest rank. A round takes each once, in the order opposite to the round before."""
    medians: dict[str, list[float]] = {name: [] for name in timed}
    order = list(timed)
    for done in range(-WARM_UP, number):
        for name in order:
            mesh.barrier()
            seconds = torch.tensor(timed[name](), dtype=torch.float64)
            slowest = mesh.all_reduce(seconds, op="max").item()
            if done >= 0:
                medians[name].append(slowest)
        order.reverse()
    return {name: torch.tensor(seconds, dtype=torch.float64) for name, seconds in medians.items()}


def run_case(name: str, shape: dict[str, Any], tokens: int, sequences: int, steps: int) -> dict[str, float]:
    """The slowest rank's figures."""
    world_size = _trainer(name).parallel.world_size
    with tempfile.TemporaryDirectory() as folder:
        rest: dict[str, Any] = {"tie_word_embeddings": True, "max_position_embeddings": max(2048, tokens)}
        model = LlamaConfig(**shape, **rest)
        (LlamaForCausalLM(model) if "lora" in CASES[name].options else model).save_pretrained(folder)
        split = {"num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"}
        tensor_ranks = _trainer(name).parallel.tp
        sizes = {key: value // tensor_ranks if key in split else value for key, value in shape.items()}
        LlamaConfig(**sizes, **rest).save_pretrained(Path(folder) / "part")
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
    figures = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {key: max(each[key] for each in figures) for key in figures[0]}


def uneven_lengths(sequences: int, tokens: int) -> list[int]:
    """Log-normal, as those of answers: most are short, and one is several times the mean."""
    draws = torch.randn(sequences, generator=torch.Generator().manual_seed(0)).exp()
    return (draws * (tokens / draws.sum())).clamp(min=2).int().tolist()


def qwen3_5(longest: int, *, tiny: bool) -> Qwen3_5TextConfig:
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    shape = (TINY | {"num_hidden_layers": 3}) if tiny else SHAPE
    size = shape["head_dim"]
    linear = {"linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": size}
    linear |= {"linear_value_head_dim": size, "layer_types": kinds * (shape["num_hidden_layers"] // 3)}
    return Qwen3_5TextConfig(**shape, **linear, tie_word_embeddings=True, max_position_embeddings=longest)


def run_packed(*, tiny: bool, sequences: int, tokens: int, rounds: int) -> dict[str, float]:
    """CPU seconds of the passes of a Qwen3.5 over a packed row in areal, and over the padded batch in transformers, in
    turn in one process; and the largest difference of their gradients."""
    torch.set_num_threads(1)
    lengths = uneven_lengths(sequences, tokens)
    model_config = qwen3_5(max(lengths), tiny=tiny)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config).train()
    vocabulary = model_config.vocab_size
    rows = [[(7 * place + row) % vocabulary for place in range(size)] for row, size in enumerate(lengths)]
    batch = rows_to_train_batch(rows, [[0, *[1] * (len(row) - 1)] for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    seen = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = TrainEngineConfig(path=folder, dtype="float32", optimizer=OptimizerConfig())
        engine = TRAIN_ENGINES["fsdp"](config, role="actor", total_steps=1, mesh=TrainerMesh.open(None), seed=0)
    assert isinstance(engine, FSDPEngine)

    def packed() -> None:
        engine._model.zero_grad()
        engine.forward_backward(batch, _loss, denominator=1.0)

    def padded() -> None:
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=seen.long(), use_cache=False).logits[:, :-1].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        (-chosen[seen[:, 1:]].sum()).backward()

    times: list[tuple[float, float]] = []
    for _ in range(rounds + 1):  # the first one warms up
        began = time.process_time()
        packed()
        middle = time.process_time()
        padded()
        times.append((middle - began, time.process_time() - middle))
    parameters = dict(engine._model.model.named_parameters())
    gaps = [
        (parameters[name].grad - weight.grad).norm() / weight.grad.norm()
        for name, weight in model.named_parameters()
        if weight.grad is not None and parameters[name].grad is not None
    ]
    seconds = [median(column) for column in zip(*times[1:], strict=True)]
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "tokens": sum(lengths),
        "padded_tokens": ids.numel(),
        "packed_cpu_s": seconds[0],
        "padded_cpu_s": seconds[1],
        "padded_over_packed": median(two / packed for packed, two in times[1:]),
        "gradient_difference": max(gaps).item(),
    }


FORKED = SHAPE | {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
"""The model of --tree, with fewer layers."""


def forked_rows(shape: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """The answers of `tree_shapes.json`, and which of their tokens are trained on."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> list[int]:
        return torch.randint(3, FORKED["vocab_size"], (count,), generator=generator).tolist()

    answers, trained = shape["answers"], shape["trained_tokens"]
    prompt, mask = drawn(shape["prompt_tokens"]), [0] * (shape["turn_tokens"] - trained) + [1] * trained
    turns = [[drawn(shape["turn_tokens"]) for _ in range(branches)] for branches in shape["branches"]]
    rows = [prompt + [token for turn in turns for token in turn[i * len(turn) // answers]] for i in range(answers)]
    return rows, [[0] * len(prompt) + mask * len(turns) for _ in rows]


def run_states(*, tiny: bool, number: int, rounds: int) -> dict[str, object]:
    """CPU seconds of a step of a Qwen3.5 over some answers of `tree_shapes.json`, as a tree and as separate rows."""
    torch.set_num_threads(1)
    shape = json.loads((Path(__file__).parent / "tree_shapes.json").read_text())
    if not 1 <= number <= shape["answers"]:
        sys.exit(f"--states {number}: tree_shapes.json has {shape['answers']} answers: use 1 to {shape['answers']}")
    if tiny:
        shape |= {"prompt_tokens": 20, "turn_tokens": 8, "trained_tokens": 5}
    rows, masks = ([each[place * len(each) // number] for place in range(number)] for each in forked_rows(shape))
    timed: dict[str, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = qwen3_5(len(rows[0]), tiny=tiny)
        model.save_pretrained(folder)
        batch = rows_to_train_batch([[token % model.vocab_size for token in row] for row in rows], masks)
        work = Work(len(batch.input_ids), len(rows), 0, rounds)
        for kind, name in (("tree", "tree"), ("off", "rows")):
            config = TrainEngineConfig(
                path=folder, init_from_scratch=True, dtype="float32", optimizer=OptimizerConfig(), shared_prefixes=kind
            )
            engine = TRAIN_ENGINES["fsdp"](
                config, role="actor", total_steps=rounds + 1, mesh=TrainerMesh.open(None), seed=0
            )
            _step(engine, take(batch, [0]), work)
            timed[name] = lambda engine=engine: _step(engine, batch, work)["cpu_seconds"]
    pairs = [(timed["rows"](), timed["tree"]()) for _ in range(rounds)]
    seconds = [median(column) for column in zip(*pairs, strict=True)]
    return {
        "answers": number,
        "tokens": len(batch.input_ids),
        "rows_cpu_s": seconds[0],
        "tree_cpu_s": seconds[1],
        "rows_over_tree": median_ratio(pairs),
        "rows_over_tree_within": interval(pairs),
    }


def run_tree(*, tiny: bool, dtype: str) -> dict[str, float]:
    torch.set_num_threads(1)
    shape = json.loads((Path(__file__).parent / "tree_shapes.json").read_text())
    if tiny:
        shape |= {"prompt_tokens": 20, "turn_tokens": 8, "trained_tokens": 5, "flat_tokens": 16}
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = (TINY if tiny else FORKED | {"num_hidden_layers": 4}) | {"tie_word_embeddings": True}
        LlamaConfig(**sizes).save_pretrained(folder)
        config = TrainEngineConfig(path=folder, init_from_scratch=True, dtype=dtype, optimizer=OptimizerConfig())
        engine = TRAIN_ENGINES["fsdp"](config, role="actor", total_steps=9, mesh=TrainerMesh.open(None), seed=0)
    vocabulary = (TINY if tiny else FORKED)["vocab_size"]
    rows, masks = forked_rows(shape)
    forked = rows_to_train_batch([[token % vocabulary for token in row] for row in rows], masks)
    flat = [
        [(7 * place + row) % vocabulary for place in range(shape["flat_tokens"])] for row in range(shape["flat_rows"])
    ]
    flat_batch = rows_to_train_batch(flat, [[0, *[1] * (len(row) - 1)] for row in flat])
    work = Work(len(forked.input_ids), len(rows), 0, 1)
    _step(engine, take(flat_batch, [0]), work)  # the optimiser's state, and what is made once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    of_tree = _step(engine, forked, work)
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    each = [_step(engine, flat_batch, work)["cpu_seconds"] for _ in range(3)]
    return {
        "tree_s": of_tree["seconds"],
        "tree_cpu_s": of_tree["cpu_seconds"],
        "tree_added_mib": added,
        "flat_cpu_s": min(each),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a train step over all ranks")
    parser.add_argument("--sequences", type=int, default=8, help="rows that have these tokens: %(default)s")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", default=",".join([*CASES, PACKED]), help="names of rows: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="a small model, to test this script")
    parser.add_argument("--tree", action="store_true", help="a step over answers that share turns")
    parser.add_argument("--states", type=int, metavar="N", help="N answers as a tree and as rows, of a Qwen3.5")
    parser.add_argument("--dtype", default="float32", help="of --tree: %(default)s")
    parser.add_argument("--versus", metavar="REV", help="with --tree: a commit, measured in turn with this tree")
    parser.add_argument("--rounds", type=int, default=5, help="of --versus and --states")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.states is not None:
        print(json.dumps(run_states(tiny=args.tiny, number=args.states, rounds=args.rounds)))
        return
    if args.tree:
        words = ["--tree", "--one", "--dtype", args.dtype, *(["--tiny"] if args.tiny else [])]
        runs_here = args.one or args.versus is None
        figures = run_tree(tiny=args.tiny, dtype=args.dtype) if runs_here else None
        print(json.dumps(figures or compared("train_step.py", words, args.versus, args.rounds)))
        return
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
        if name == PACKED:
            row = run_packed(tiny=args.tiny, sequences=4 * args.sequences, tokens=4 * args.tokens, rounds=args.steps)
            print(json.dumps({"case": name} | {key: round(value, 6) for key, value in row.items()}), flush=True)
            continue
        measured = run_case(name, shape, args.tokens, args.sequences, args.steps)
        row: dict[str, Any] = {"case": name, "tokens_per_s": args.tokens / measured["seconds"], **measured}
        print(
            json.dumps({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}),
            flush=True,
        )


if __name__ == "__main__":
    main()
