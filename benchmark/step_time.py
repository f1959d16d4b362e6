"""Measures a decode step of the native engine or a train step on a CPU, beside what the memory and the cores allow.

    python benchmark/step_time.py [--cases 1:bfloat16 64:bfloat16 train:bfloat16] [--versus f2b4580a] [--rounds 5]

The default model has the shape of SmolLM2-135M and random weights; prompts have 66 tokens. A step's time is the CPU
time of the engine's thread, the median of the steps. A case `train:DTYPE` is a step of AdamW over sequences of 40 to
220 tokens, 1,024 in all. With --versus the code of another commit is measured in turn, in new processes. `read` is the
time to read the weights once with one thread, `matmul` that of the multiplications of all rows at the measured peak.
The last line is JSON: milliseconds by case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from other_tree import compared

_STEPS = 10
SMOLLM2_SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def build_checkpoint(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SMOLLM2_SHAPE, dtype="bfloat16"))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def measured(path: Path, case: str, threads: int) -> dict[str, float]:
    """Milliseconds of a step, and those of reading the weights and of the multiplications alone, in this process."""
    import torch

    from areal.api.config import NativeServerConfig

    try:
        from areal.inference.engine import build_engine
        from areal.inference.scheduler import SamplingParams, Sequence
    except ImportError:  # commits before 29 November 2026 have them in modules of their own
        from areal.inference.engine_builder import build_engine  # pyright: ignore
        from areal.inference.sequence import SamplingParams, Sequence  # pyright: ignore

    torch.set_num_threads(threads)
    count, dtype, *quantization = case.split(":")
    rows = int(count)
    options: dict[str, Any] = {"quantization": quantization[0]} if quantization else {}  # no option of older commits
    config = NativeServerConfig(dtype=dtype, max_running_requests=rows, context_length=512, **options)
    engine = build_engine(config, path, "cpu", deliver=lambda *_: None, on_failure=lambda _: None)
    generator = torch.Generator().manual_seed(0)
    for seed in range(rows):
        prompt = torch.randint(3, 1000, (66,), generator=generator).tolist()
        params = SamplingParams(max_new_tokens=400)
        engine.scheduler.add(Sequence(request_id=str(seed), token_ids=prompt, num_prompt=66, params=params, seed=seed))
    while engine.scheduler.waiting or any(sequence.num_output < 3 for sequence in engine.scheduler.running):
        engine.step()
    weights = sum(weight.numel() for weight in engine.runner.model.parameters())
    memory = torch.ones(weights * engine.runner.dtype.itemsize // 4)
    square = torch.ones(2048, 2048, dtype=engine.runner.dtype)
    product_ms = _median_ms(lambda: square @ square, 3)
    return {
        f"step_{case}": _median_ms(engine.step, _STEPS),
        f"read_{case}": _median_ms(memory.amax, 3),
        f"matmul_{case}": product_ms * rows * weights / 2048**3,
    }


def trained(path: Path, case: str, threads: int) -> dict[str, float]:
    """Milliseconds of a train step of the FSDP engine on one rank."""
    import torch

    from areal.api.batch import LossOutput
    from areal.api.config import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
    from areal.data.pack import rows_to_train_batch
    from areal.engine.build import TRAIN_ENGINES
    from areal.engine.mesh import TrainerMesh

    torch.set_num_threads(threads)
    spec = MicroBatchSpec(max_tokens_per_mb=1024)
    config = TrainEngineConfig(path=str(path), mb_spec=spec, dtype=case.split(":")[1], optimizer=OptimizerConfig())
    mesh = TrainerMesh(0, 1, torch.device("cpu"))
    engine = TRAIN_ENGINES["fsdp"](config, role="actor", total_steps=_STEPS, mesh=mesh, seed=0)
    generator = torch.Generator().manual_seed(0)
    lengths = [220, 40, 150, 60, 180, 80, 120, 100, 74]
    rows = [torch.randint(3, 1000, (length,), generator=generator).tolist() for length in lengths]
    batch = rows_to_train_batch(rows, [[0, *[1] * (length - 1)] for length in lengths])

    def loss(outputs: Any, micro: Any) -> LossOutput:
        return LossOutput(loss=-outputs.logprobs[micro.batch.loss_mask].sum(), metrics={})

    def step() -> None:
        engine.forward_backward(batch, loss, denominator=float(sum(lengths)))
        engine.optimizer_step()

    return {f"step_{case}": _median_ms(step, 3)}


def _median_ms(call, count: int) -> float:
    call()
    times: list[float] = []
    for _ in range(count):
        began = time.process_time()
        call()
        times.append((time.process_time() - began) * 1000)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, help="checkpoint (default: random weights in SmolLM2's shape)")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["1:bfloat16", "64:bfloat16", "16:float32"],
        help="ROWS:DTYPE[:QUANTIZATION] or train:DTYPE",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--versus", metavar="REV", help="a commit, measured in turn with this tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", action="store_true", help="one round in this process, as JSON only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model_path or build_checkpoint(Path(folder))
        words = ["--one", "--model-path", str(path), "--threads", str(args.threads), "--cases"]
        if args.one:
            result: dict[str, Any] = {}
            for case in args.cases:
                result |= (trained if case.startswith("train:") else measured)(path, case, args.threads)
        else:
            result = compared("step_time.py", [*words, *args.cases], args.versus, args.rounds)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
