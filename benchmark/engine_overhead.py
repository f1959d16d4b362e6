"""Measures what a decode step of the native engine costs beside the model: plan, block tables, sampling, appending.

    python benchmark/engine_overhead.py [--rows 64 256] [--context 4096] [--versus f2b4580a] [--rounds 5]

The engine decodes with graphs, as on a GPU, but the replay of a graph does nothing, so that all time is that of the
engine's thread. The vocabulary has 64 tokens. All requests have one prompt, whose blocks they share. With --versus the
same file measures the code of another commit, in turn with this one, each round in new processes; the median of the
rounds counts. The last line is JSON: milliseconds per step by rows x context, and the ratios of the other commit.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from other_tree import compared

_STEPS = 64


def measured(rows: int, context: int, device: str) -> float:
    """Milliseconds of a decode step of `rows` requests after `context` tokens, in this process."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from areal.inference import decode_graph, model_runner
    from areal.inference.engine import Engine

    try:
        from areal.inference.model_runner import use_paged_attention
        from areal.inference.scheduler import BlockPool, SamplingParams, Scheduler, Sequence
    except ImportError:  # commits before 28 November 2026 have them in modules of their own
        from areal.inference.cache import BlockPool  # pyright: ignore
        from areal.inference.sequence import SamplingParams, Sequence  # pyright: ignore
        from areal.inference.served_model import use_paged_attention  # pyright: ignore

        from areal.inference.scheduler import Scheduler

    def kernel(queries: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.zeros_like(queries)

    def capture(compute):
        logits = compute()
        return lambda: None, logits

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model_runner.find_kernel = lambda *_, **__: kernel
    model_runner.capture_of = lambda device: capture
    decode_graph.DecodeGraphs.trial_error = lambda self, *_: 0.0  # pyright: ignore
    config = Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=2 * context, dtype="float32",
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config).eval()
    model.to(device)
    use_paged_attention(model)
    runner = model_runner.ModelRunner(model)
    block_size = model_runner.BLOCK_SIZE
    num_blocks = context // block_size + rows * (2 * _STEPS // block_size + 3)
    runner.allocate_cache(num_blocks)
    scheduler = Scheduler(BlockPool(num_blocks, block_size), max_running=rows, max_prefill_tokens=2048)
    engine = Engine(runner, scheduler, version="0", deliver=lambda *_: None, on_failure=lambda _: None)
    for seed in range(rows):
        params = SamplingParams(max_new_tokens=2 * context)
        prompt = [1] * context
        request = Sequence(
            request_id=str(seed), token_ids=prompt, num_prompt=context, params=params, seed=seed, group_id="all"
        )
        scheduler.add(request)
    while len(scheduler.running) < rows or any(sequence.num_output < 3 for sequence in scheduler.running):
        engine.step()
    began = time.thread_time()
    for _ in range(_STEPS):
        engine.step()
    return (time.thread_time() - began) / _STEPS * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--versus", metavar="REV", help="a commit, measured in turn with this tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", action="store_true", help="one round in this process, as JSON only")
    args = parser.parse_args()
    if args.one:
        print(
            json.dumps(
                {f"{rows}x{size}": measured(rows, size, args.device) for size in args.context for rows in args.rows}
            )
        )
        return
    words = ["--one", "--device", args.device, "--rows", *map(str, args.rows), "--context", *map(str, args.context)]
    print(json.dumps(compared("engine_overhead.py", words, args.versus, args.rounds)))


if __name__ == "__main__":
    main()
