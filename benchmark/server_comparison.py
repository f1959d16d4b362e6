"""Compares native, vLLM and SGLang servers on one checkpoint and the same requests, through areal's own adapters.

    python benchmark/server_comparison.py [--servers native vllm sglang] [--python vllm=PYTHON sglang=PYTHON]

Each server is started as the launcher starts it, alone, and gets the same prompts and the same answer lengths
(log-normal, without early ends), streamed as in a run, with a fixed number of requests at a time. Figures are medians
of the repeats: tokens per second, seconds to the first tokens, CPU seconds of all processes of the server per 1000
tokens. Ratios are to the native server measured in the same run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from areal.api.config import GenerationHyperparameters, PPOConfig
from areal.api.config.load import load_config
from areal.api.data import GenerationRequest
from areal.fleet.replica import AnswerForm, PartChunk, Replica
from areal.fleet.server_backend import backend_named, prepended, replica_factory

ROOT = Path(__file__).resolve().parent.parent
SGLANG_STUBS = ROOT / "tests" / "servers" / "environments" / "sglang_cpu"
STREAM_INTERVAL = 32
READY_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts and how many tokens to generate for each."""

    prompts: list[list[int]]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one job on one server."""

    tokens_per_s: float
    ttft_s: float
    cpu_s_per_1000: float


def build_checkpoint(folder: Path) -> Path:
    """A random Qwen2 of 1M parameters with a tokenizer, which the servers require."""
    torch.manual_seed(0)
    subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart" / "prepare.py"), str(folder), "--seed", "0"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    source = folder / "model"
    config = Qwen2Config.from_pretrained(source)
    config.update(
        {
            "vocab_size": 1024,
            "hidden_size": 128,
            "intermediate_size": 448,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "layer_types": None,
            "max_window_layers": 4,
        }
    )
    transformers_logging.disable_progress_bar()
    Qwen2ForCausalLM(Qwen2Config(**config.to_dict())).float().save_pretrained(source)
    return source


def make_job(concurrency: int, args: argparse.Namespace) -> Job:
    """The median is a quarter of the longest: a few answers are much longer than the others."""
    rng = random.Random(concurrency)
    count = concurrency * args.rounds
    prompts = [[rng.randrange(5, 1000) for _ in range(args.prompt_tokens)] for _ in range(count)]
    lengths = [int(rng.lognormvariate(0.0, 0.8) * args.new_tokens / 2) for _ in range(count)]
    return Job(prompts, [max(4, min(4 * args.new_tokens, length)) for length in lengths])


def server_process(backend: str, model: Path, args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Command and environment of one server; it prints its address when it is ready."""
    most = max(args.concurrency)
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    if backend == "native":
        argv = [sys.executable, "-m", "areal.inference.server", f"--model-path={model}", "--dtype=float32"]
        room = f"--max-total-tokens={most * 512}"
        return [*argv, "--device=cpu", f"--num-threads={args.threads}", f"--max-running-requests={most}", room], env
    sizes = {"sglang": ("max_running_requests", "max_total_tokens"), "vllm": ("max_num_seqs", "")}[backend]
    flags = {sizes[0]: most} | ({sizes[1]: most * 512} if sizes[1] else {})
    python = dict(pair.split("=", 1) for pair in args.python)
    written = {
        "experiment_name": "benchmark",
        "trial_name": "servers",
        "allocation_mode": f"{backend}:d1+fsdp:d1",
        "server_python": str(python.get(backend, ROOT / f".venv-{backend}" / "bin" / "python")),
        "actor": {"path": str(model), "dtype": "float32", "optimizer": {"lr": 1e-5}},
        "gconfig": {"max_new_tokens": 512},
        "train_dataset": {"path": "none", "batch_size": 1},
        backend: flags,
    }
    file = args.logs / f"{backend}.yaml"
    file.write_text(json.dumps(written))  # JSON is YAML
    config = load_config(["--config", str(file)], PPOConfig)
    command = backend_named(backend).command(config, False)
    first = command.env.get("PYTHONPATH", str(SGLANG_STUBS))
    env |= command.env | {"PYTHONPATH": prepended(os.environ, "PYTHONPATH", first)}
    return [sys.executable, "-m", "areal.fleet.server_host", "--backend", backend, "--", *command.argv], env


@contextlib.contextmanager
def running_server(backend: str, model: Path, args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Address and process group of a server that is ready; all its processes are ended afterwards."""
    argv, env = server_process(backend, model, args)
    log = args.logs / f"{backend}.log"
    began_s = time.monotonic()
    with (
        open(log, "w") as errors,
        subprocess.Popen(argv, env=env, stdout=errors, stderr=subprocess.STDOUT, process_group=0) as process,
    ):
        try:
            yield wait_for_address(backend, process, log, began_s), process.pid
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for_address(backend: str, process: subprocess.Popen[bytes], log: Path, began_s: float) -> str:
    """Wait until the server prints its address."""
    while time.monotonic() < began_s + READY_LIMIT_S:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("http://"):
                print(f"{backend}: ready after {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
                return line.strip()
        if process.poll() is not None:
            break
        time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
    sys.exit(f"the {backend} server did not get ready (log: {log}):\n{tail}")


def group_cpu_s(group: int) -> float:
    """CPU seconds of all running processes of a group."""
    total = 0.0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group:
                times = process.cpu_times()
                total += times.user + times.system
    return total


async def run_job(replica: Replica, job: Job, concurrency: int, group: int) -> Figures:
    """Run all requests of a job, `concurrency` at a time."""
    room = asyncio.Semaphore(concurrency)
    firsts: list[float] = []

    async def request(index: int) -> None:
        length = job.lengths[index]
        first: float | None = None
        num_tokens, reason = 0, None

        async with room:
            began = time.perf_counter()
            part = GenerationRequest(
                request_id=uuid.uuid4().hex,
                input_ids=job.prompts[index],
                gconfig=GenerationHyperparameters(max_new_tokens=length, ignore_eos=True),
            )
            async for _, chunk in replica.generate([part]):
                assert isinstance(chunk, PartChunk)
                reason = chunk.finish_reason
                num_tokens += len(chunk.token_ids)
                first = first or time.perf_counter() - began
        if num_tokens != length or first is None:
            raise RuntimeError(f"requested {length} tokens, got {num_tokens} with stop reason {reason}")
        firsts.append(first)

    before_s, began_s = group_cpu_s(group), time.perf_counter()
    await asyncio.gather(*(request(index) for index in range(len(job.prompts))))
    wall_s, cpu_s, tokens = time.perf_counter() - began_s, group_cpu_s(group) - before_s, sum(job.lengths)
    return Figures(tokens / wall_s, median(firsts), 1000 * cpu_s / tokens)


async def measure(backend: str, address: str, group: int, args: argparse.Namespace) -> dict[int, Figures]:
    """The medians at each concurrency, after a first run that only warms the server up."""
    replica = replica_factory(backend)(backend, address, AnswerForm(stream_interval=STREAM_INTERVAL))
    await replica.info()
    figures: dict[int, Figures] = {}
    for concurrency in args.concurrency:
        job = make_job(concurrency, args)
        await run_job(replica, Job(job.prompts[:concurrency], [4] * concurrency), concurrency, group)
        runs = [await run_job(replica, job, concurrency, group) for _ in range(args.repeats)]
        figures[concurrency] = Figures(
            median(run.tokens_per_s for run in runs),
            median(run.ttft_s for run in runs),
            median(run.cpu_s_per_1000 for run in runs),
        )
    await replica.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", default=["native", "vllm", "sglang"])
    parser.add_argument(
        "--python", nargs="*", default=[], help="BACKEND=INTERPRETER of its environment (default: .venv-BACKEND)"
    )
    parser.add_argument("--model-path", type=Path, help="checkpoint (default: a random one of 1M parameters)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads that each server computes with")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64, help="the longest answer has four times as many")
    parser.add_argument("--rounds", type=int, default=3, help="requests per place in flight")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    results: dict[str, dict[int, Figures]] = {}
    with tempfile.TemporaryDirectory() as folder:
        args.logs = Path(folder)
        model = args.model_path or build_checkpoint(Path(folder) / "data")
        for backend in args.servers:
            with running_server(backend, model, args) as (address, group):
                results[backend] = asyncio.run(measure(backend, address, group, args))
    base = results.get("native", next(iter(results.values())))
    print(f"{'server':<8}{'in flight':>10}{'tokens/s':>10}{'ratio':>7}{'first tokens s':>16}{'CPU s / 1000':>14}")
    for backend, rows in results.items():
        for concurrency, row in rows.items():
            ratio = row.tokens_per_s / base[concurrency].tokens_per_s
            print(
                f"{backend:<8}{concurrency:>10}{row.tokens_per_s:>10,.0f}{ratio:>7.2f}{row.ttft_s:>16.3f}"
                f"{row.cpu_s_per_1000:>14.2f}"
            )
    ratios = {
        backend: {key: round(row.tokens_per_s / base[key].tokens_per_s, 3) for key, row in rows.items()}
        for backend, rows in results.items()
    }
    speeds = {backend: {key: round(row.tokens_per_s) for key, row in rows.items()} for backend, rows in results.items()}
    print(json.dumps({"ratio": ratios, "tokens_per_s": speeds, "threads": args.threads, "rounds": args.rounds}))


if __name__ == "__main__":
    main()
