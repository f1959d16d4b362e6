"""Compares the native engine with transformers' `generate` on one checkpoint: tokens per second by concurrency.

    python benchmark/inference_throughput.py [--threads 1] [--dtype float32] [--repeats 3]

Both get the same prompts and the same answer lengths, first equal lengths, then log-normal ones. `generate` runs static
batches, each until its longest answer is complete; the engine runs the same number of requests at a time and starts the
next when one ends. Only requested tokens count. The engine also reports log-probabilities, `generate` does not. The two
alternate, and the best of the repeats counts. The last line is JSON. With --questions FILE (JSON lines with `question`,
and a --model-path with a tokenizer) the engine is compared with itself: native.speculation=group against none, greedy
answers to the questions, which from the second repeat on are those of an earlier epoch, and sampled ones to random
tokens, where nothing repeats. For the steps alone see step_time.py, which also measures another commit.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from areal.api.config import NativeServerConfig
from areal.inference.engine import Engine, build_engine
from areal.inference.scheduler import SamplingParams, Sequence

Clock = Callable[[], float]
CONCURRENCY = (1, 16, 64, 256)


@dataclass(frozen=True)
class Job:
    """Prompts of equal length and how many tokens to generate for each."""

    prompts: list[list[int]]
    lengths: list[int]


def build_checkpoint(folder: Path, context: int = 1024) -> Path:
    """A random Qwen3 of 1M parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_job(kind: str, concurrency: int, args: argparse.Namespace) -> Job:
    rng = random.Random(concurrency)
    count = concurrency * args.rounds
    prompts = [[rng.randrange(1, 1000) for _ in range(args.prompt_tokens)] for _ in range(count)]
    if kind == "equal":
        return Job(prompts, [args.new_tokens] * count)
    # The median is a quarter of the longest: a few answers are much longer than the others.
    lengths = [int(rng.lognormvariate(0.0, 0.8) * args.new_tokens / 2) for _ in range(count)]
    return Job(prompts, [max(4, min(4 * args.new_tokens, length)) for length in lengths])


@torch.inference_mode()
def run_generate(model: PreTrainedModel, job: Job, concurrency: int, clock: Clock) -> float:
    """Seconds that `generate` takes for a job in static batches."""
    began_s = clock()
    for start in range(0, len(job.prompts), concurrency):
        batch = torch.tensor(job.prompts[start : start + concurrency], device=model.device)
        longest = max(job.lengths[start : start + concurrency])
        model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=longest,
            min_new_tokens=None,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    return clock() - began_s


class EngineRunner:
    """The engine in its thread, as in a server, without HTTP."""

    def __init__(self, path: Path, dtype: str, concurrency: int, device: str, speculation: str = "none") -> None:
        config = NativeServerConfig(dtype=dtype, max_running_requests=concurrency, speculation=speculation)
        self._left = 0
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self._engine: Engine = build_engine(config, path, device, deliver=self._deliver, on_failure=self._fail)
        self._engine.start()

    def _deliver(self, finished: list[Sequence], progressed: list[Sequence]) -> None:
        self._left -= len(finished)
        if self._left == 0:
            self._done.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._done.set()

    def run(self, job: Job, clock: Clock, temperature: float = 1.0) -> float:
        """Seconds from the first submission to the last answer."""
        self._left = len(job.prompts)
        self._done.clear()
        began_s = clock()
        for index, (prompt, length) in enumerate(zip(job.prompts, job.lengths, strict=True)):
            params = SamplingParams(max_new_tokens=length, temperature=temperature)
            self._engine.submit(
                Sequence(
                    request_id=str(index), token_ids=list(prompt), num_prompt=len(prompt), params=params, seed=index
                )
            )
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        return clock() - began_s

    def close(self) -> None:
        self._engine.stop()


def measure(path: Path, model: PreTrainedModel, concurrency: int, kind: str, args: argparse.Namespace) -> list[float]:
    """Tokens per second of engine and `generate`, best of the repeats."""
    job = make_job(kind, concurrency, args)
    runner = EngineRunner(path, args.dtype, concurrency, args.device)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    runner.run(Job(job.prompts[:concurrency], [4] * concurrency), clock)
    engine_s: list[float] = []
    generate_s: list[float] = []
    for _ in range(args.repeats):
        engine_s.append(runner.run(job, clock))
        generate_s.append(run_generate(model, job, concurrency, clock))
    runner.close()
    return [sum(job.lengths) / min(engine_s), sum(job.lengths) / min(generate_s)]


def measure_drafts(path: Path, args: argparse.Namespace) -> dict[str, float]:
    """Tokens per second with drafts, relative to those without, by kind of answers and concurrency; medians."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    questions = [json.loads(line)["question"] for line in args.questions.open()]
    ratios: dict[str, float] = {}
    for concurrency in args.concurrency:
        count = concurrency * args.rounds
        asked = [
            tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in questions[:count]
        ]
        jobs = {"repeating": (Job([encoded["input_ids"] for encoded in asked], [args.new_tokens] * count), 0.0)}
        jobs["other"] = make_job("equal", concurrency, args), 1.0
        runners = [EngineRunner(path, args.dtype, concurrency, args.device, kind) for kind in ("group", "none")]
        for runner in runners:
            runner.run(Job(jobs["other"][0].prompts[:1], [4]), clock)
        for kind, (job, temperature) in jobs.items():
            speedups: list[float] = []
            for _ in range(args.repeats):
                drafted_s, plain_s = (runner.run(job, clock, temperature) for runner in runners)
                speedups.append(plain_s / drafted_s)
            ratios[f"{kind}_{concurrency}"] = round(statistics.median(speedups), 2)
            print(
                f"{kind:<12}{concurrency:>12}{ratios[f'{kind}_{concurrency}']:>8.2f}",
                [round(speedup, 2) for speedup in speedups],
            )
        for runner in runners:
            runner.close()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, help="checkpoint (default: a random one of 1M parameters)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64, help="length of the equal answers")
    parser.add_argument("--rounds", type=int, default=3, help="batches per measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: this process's CPU time, for a busy machine"
    )
    parser.add_argument("--questions", type=Path, help="JSON lines: measure native.speculation=group")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if args.questions:
        print(json.dumps({"ratio_of_drafts": measure_drafts(args.model_path, args)}))
        return
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = args.model_path or build_checkpoint(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype).eval().to(args.device)
        print(f"{'answers':<12}{'concurrency':>12}{'engine tok/s':>14}{'generate tok/s':>16}{'ratio':>8}")
        for kind in ("equal", "long-tailed"):
            for concurrency in args.concurrency:
                ours, theirs = measure(path, model, concurrency, kind, args)
                results.setdefault(kind, {})[str(concurrency)] = [ours, theirs]
                print(f"{kind:<12}{concurrency:>12}{ours:>14,.0f}{theirs:>16,.0f}{ours / theirs:>8.2f}")
                sys.stdout.flush()
    ratios = {kind: {key: round(a / b, 3) for key, (a, b) in rows.items()} for kind, rows in results.items()}
    speeds = {kind: {key: round(a) for key, (a, _) in rows.items()} for kind, rows in results.items()}
    print(
        json.dumps(
            {
                "ratio_to_generate": ratios["long-tailed"],
                "ratio_to_generate_equal_lengths": ratios["equal"],
                "tokens_per_s": speeds["long-tailed"],
                "tokens_per_s_equal_lengths": speeds["equal"],
                "dtype": args.dtype,
                "threads": args.threads,
                "clock": args.clock,
            }
        )
    )


if __name__ == "__main__":
    main()
