"""The cost of `areal serve`: four tenants at once against one after another, and the gateway alone with a fake fleet.

    python benchmark/serve.py [--rounds 5] [--steps 3] [--open 10000]

Tenants: a model of 24M parameters on the CPU in float32, each tenant with an adapter of rank 16, whose loop samples
groups of answers of unequal lengths, and calls forward_backward and optim_step. The ratio is the time of four loops one
after another by the time of the four at once, in the same service, in turn; the median of the rounds.

Gateway: CPU time per sample request (asample and retrieve_future) of a fleet that answers at once; memory per open
sample, and the time until an answer that is ready is received while all others are open: with one request that waits
for all, as the SDK does it, and "held", with a request for each. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
import numpy as np
import orjson
import psutil
import uvloop
from aiohttp import web

from areal.api.data import GenerationRequest, GenerationResponse
from areal.serve.gateway import API, Gateway, Keys, make_app
from areal.serve.sampling import AdapterPool, Sampling
from areal.serve.service import ServedModel, Service
from areal.serve.wire import Datum, LossRequest
from areal.system.heartbeat import read_beats
from areal.system.network import Host, http_address, listen

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.serve.messages import decode_sample, encode_loss_request  # noqa: E402

TENANTS, RANK, PROMPTS, SAMPLES, VOCABULARY = 4, 16, 4, 4, 512
KEY, TOKEN = "tml-benchmark", "benchmark"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write_model(folder: Path) -> None:
    """A random Qwen2 of 24M parameters, with a tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from areal.data.tiny_model import character_tokenizer

    torch.manual_seed(0)
    names = ["<pad>", "<eos>", "<unk>", *map(chr, range(0x4E00, 0x4E00 + VOCABULARY - 3))]
    tokenizer = character_tokenizer(names, context_length=1024)
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).float()
    log(f"parameters: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f}M")
    model.save_pretrained(folder)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, str]]:
    """Address and key of a service of the model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "areal", "serve", "--model", str(folder / "model"), "--name", "m", "--port", str(port),
        f"cluster.fileroot={folder}", "actor.dtype=float32", "native.dtype=float32",
    ]  # fmt: skip
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    keys = folder / "serve/model/serve/keys.json"
    try:
        while not keys.exists():
            if process.poll() is not None:
                sys.exit((folder / "output.txt").read_text())
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", json.loads(keys.read_bytes())["user"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


class Client:
    """Requests of one user."""

    def __init__(self, session: aiohttp.ClientSession, address: str, key: str) -> None:
        self._session, self._address, self._headers = session, address, {"X-API-Key": key}

    async def bytes(self, path: str, body: Any) -> bytes:
        """The answer, after any number of answers that say to ask again."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        url = f"{self._address}{API}/{path}"
        while True:
            try:
                async with self._session.post(url, data=data, headers=self._headers) as answer:
                    content = await answer.read()
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.1)
                continue
            if answer.status == 200 and not content.startswith(b'{"error'):
                return content
            if answer.status != 408:
                raise RuntimeError(f"{path}: {answer.status} {content[:300]!r}")

    async def ask(self, path: str, body: Any) -> dict[str, Any]:
        return orjson.loads(await self.bytes(path, body))

    async def result(self, asked: dict[str, Any]) -> bytes:
        return await self.bytes("retrieve_future", {"request_id": asked["request_id"]})


class Tenant:
    """The loop of one tenant."""

    def __init__(self, client: Client, model: str, seed: int) -> None:
        self._client, self.model, self._seq, self._sample = client, model, 0, 0
        self._draw = random.Random(seed)

    @classmethod
    async def new(cls, client: Client, seed: int) -> Tenant:
        session = (await client.ask("create_session", {}))["session_id"]
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "m",
            "lora_config": {"rank": RANK, "seed": seed},
        }
        asked = await client.ask("create_model", body)
        return cls(client, orjson.loads(await client.result(asked))["model_id"], seed)

    def _address(self) -> dict[str, Any]:
        self._seq += 1
        return {"model_id": self.model, "seq_id": self._seq}

    async def step(self) -> None:
        """Sample, forward_backward, optim_step."""
        address = self._address()
        saved = await self._client.ask("save_weights_for_sampler", address | {"sampling_session_seq_id": self._seq})
        sampler = orjson.loads(await self._client.result(saved))["sampling_session_id"]
        data = [
            datum for group in await asyncio.gather(*[self._group(sampler) for _ in range(PROMPTS)]) for datum in group
        ]
        request = LossRequest(data=data, loss_fn="importance_sampling")
        loss = await self._client.ask("forward_backward", encode_loss_request(request, **self._address()))
        step = await self._client.ask("optim_step", self._address() | {"adam_params": {"learning_rate": 1e-4}})
        await self._client.result(loss)
        await self._client.result(step)

    async def _group(self, sampler: str) -> list[Datum]:
        prompt = [self._draw.randrange(3, VOCABULARY) for _ in range(self._draw.randrange(16, 64))]
        self._sample += 1
        length = min(256, 16 + int(self._draw.lognormvariate(3.5, 0.8)))
        body = {"sampling_session_id": sampler, "seq_id": self._sample, "num_samples": SAMPLES}
        body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]}}
        body |= {"sampling_params": {"max_tokens": length, "stop": []}}
        answers = decode_sample(await self._client.result(await self._client.ask("asample", body)))
        return [self._datum(prompt, list(answer.token_ids), list(answer.logprobs)) for answer in answers]

    def _datum(self, prompt: list[int], answer: list[int], logprobs: list[float]) -> Datum:
        tokens, before = np.array(prompt + answer), len(prompt) - 1
        columns = {"logprobs": logprobs, "advantages": [self._draw.choice((-1.0, 1.0))] * len(answer)}
        inputs = {name: np.array([0.0] * before + values, np.float32) for name, values in columns.items()}
        return Datum(tokens=tokens[:-1], inputs={"target_tokens": tokens[1:], **inputs})


def cpu_seconds(run: Path) -> dict[str, float]:
    """CPU time of the server and the trainer so far."""
    times = {name: psutil.Process(beat.pid).cpu_times() for name, beat in read_beats(run / "alive.json").items()}
    return {name: used.user + used.system for name, used in times.items() if name != "controller"}


async def measure_tenants(address: str, key: str, run: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds, and CPU seconds of server and trainer, of the loops one after another and at once, for each round.

    The ratio is at most the CPU time of both one after another by that of the busier one at once.
    """
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, address, key)
        tenants = [await Tenant.new(client, seed) for seed in range(TENANTS)]
        alone, together = list[float](), list[float]()
        cpu_alone, cpu_together = list[dict[str, float]](), list[dict[str, float]]()

        async def measured(works: Sequence[Sequence[Tenant]], wall: list[float], cpu: list[dict[str, float]]) -> None:
            began, before = time.monotonic(), cpu_seconds(run)
            for work in works:
                await asyncio.gather(*[loop(tenant) for tenant in work])
            wall.append(time.monotonic() - began)
            cpu.append({name: spent - before[name] for name, spent in cpu_seconds(run).items()})

        async def loop(tenant: Tenant) -> None:
            for _ in range(args.steps):
                await tenant.step()

        for tenant in tenants:
            await tenant.step()
        for number in range(args.rounds):
            states = [tenant._draw.getstate() for tenant in tenants]
            await measured([[tenant] for tenant in tenants], alone, cpu_alone)
            for tenant, state in zip(tenants, states, strict=True):  # the same prompts and lengths again
                tenant._draw.setstate(state)
            await measured([tenants], together, cpu_together)
            log(f"round {number}: one after another {alone[-1]:.2f} s, at once {together[-1]:.2f} s")
    ratios = [first / second for first, second in zip(alone, together, strict=True)]
    return {
        "tenants_ratio": round(median(ratios), 3),
        "alone_s": round(median(alone), 2),
        "at_once_s": round(median(together), 2),
        "cpu_s_alone": {name: round(median(used[name] for used in cpu_alone), 2) for name in cpu_alone[0]},
        "cpu_s_at_once": {name: round(median(used[name] for used in cpu_together), 2) for name in cpu_alone[0]},
        "ratio_limit": round(median(map(_limit, cpu_alone, cpu_together)), 3),
    }


def _limit(alone: dict[str, float], at_once: dict[str, float]) -> float:
    return sum(alone.values()) / max(at_once.values())


class FakeFleet:
    """Answers at once, or when `may_answer` is set."""

    @dataclass
    class Limits:
        context_length: int = 4096

    def __init__(self) -> None:
        self.limits = self.Limits()
        self.may_answer = asyncio.Event()
        self.free: set[str] = set()
        self.ready_at: dict[str, float] = {}
        self.chosen: dict[str, asyncio.Future[None]] = {}

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        if not self.may_answer.is_set():
            self.chosen[request.group_id] = asyncio.get_running_loop().create_future()
            await self.chosen[request.group_id]
            self.ready_at[request.group_id] = time.perf_counter()
        return GenerationResponse(
            request_id=request.request_id, input_ids=request.input_ids, output_ids=[5] * 32,
            output_logprobs=[-0.5] * 32, output_versions=[0] * 32, stop_reason="length",
        )  # fmt: skip


@contextlib.asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[tuple[str, FakeFleet]]:
    """The address of a gateway with a fake fleet, in this process."""
    shape = ServedModel(name="m", tokenizer="t", context_length=4096, max_rank=32, max_resident=4)
    service, fleet = Service(folder, shape, world_size=1), FakeFleet()
    pool = AdapterPool(fleet, 4)  # pyright: ignore[reportArgumentType]
    sampling = Sampling(fleet, pool, context_length=shape.context_length)  # pyright: ignore[reportArgumentType]
    sampling.has_started.set()
    keys = Keys({"user": KEY})
    app = make_app(Gateway(service, sampling, keys), keys, token=TOKEN, host=Host())
    runner = web.AppRunner(app, access_log=None, auto_decompress=False)
    await runner.setup()
    bound = listen(Host(), TOKEN)
    await web.SockSite(runner, bound, backlog=4096).start()
    journal = asyncio.create_task(service.journal.run())
    try:
        yield http_address(bound), fleet
    finally:
        await sampling.close()
        await runner.cleanup()
        journal.cancel()
        await asyncio.gather(journal, return_exceptions=True)


async def serve_gateway(folder: Path) -> None:
    """A process with the gateway: prints its address, then obeys lines of standard input."""
    async with gateway(folder) as (address, fleet):
        print(address, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            word, *names = line.split()
            if word == "answer":
                fleet.may_answer.set()
            elif word == "hold":
                fleet.may_answer.clear()
            elif word == "ready":
                for name in names:
                    fleet.chosen[name].set_result(None)
                print("{}", flush=True)
                continue
            gc.collect()
            facts = {
                "cpu_s": time.process_time(),
                "rss": psutil.Process().memory_info().rss,
                "ready_at": fleet.ready_at,
            }
            print(json.dumps(facts), flush=True)


class GatewayProcess:
    """The gateway in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, __file__, "--gateway", str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def tell(self, *words: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def sample_body(sampler: str, number: int) -> dict[str, Any]:
    body = {"sampling_session_id": sampler, "seq_id": number, "num_samples": 1}
    body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [7] * 128}]}}
    return body | {"sampling_params": {"max_tokens": 32}}


async def measure_gateway(folder: Path, num_open: int) -> dict[str, Any]:
    """The gateway in another process; this one is its client."""
    process = GatewayProcess(folder)
    timeout = aiohttp.ClientTimeout(total=None)
    try:
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            client = Client(http, process.address, KEY)
            session = (await client.ask("create_session", {}))["session_id"]
            body = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "m"}
            sampler = (await client.ask("create_sampling_session", body))["sampling_session_id"]
            before = process.tell("answer")["cpu_s"]
            count = 4000
            for start in range(0, count, 100):
                numbers = range(start, start + 100)
                asked = await asyncio.gather(
                    *[client.ask("asample", sample_body(sampler, number)) for number in numbers]
                )
                await asyncio.gather(*[client.result(future) for future in asked])
            cpu_us = (process.tell("hold")["cpu_s"] - before) / count * 1e6
            facts = await measure_open(client, process, sampler, range(count, count + num_open), held=False)
            facts |= await measure_open(
                client, process, sampler, range(count + num_open, count + 2 * num_open), held=True
            )
    finally:
        process.process.kill()
    return {"gateway_cpu_us_per_sample": round(cpu_us), "open_samples": num_open, **facts}


async def measure_open(
    client: Client, process: GatewayProcess, sampler: str, numbers: range, *, held: bool
) -> dict[str, float]:
    """Samples that are open at once. `held`: each has a request of its own that waits; else one request waits for all,
    as the SDK does it."""
    memory = process.tell("hold")["rss"]
    received: dict[str, float] = {}
    ids: list[str] = []

    async def ask(number: int) -> None:
        asked = await client.ask("asample", sample_body(sampler, number))
        ids.append(asked["request_id"])
        if held:
            await client.result(asked)
            received[asked["request_id"]] = time.perf_counter()

    async def poll() -> None:
        body: dict[str, Any] = {"target": {"sampling_session_id": sampler}, "prev_cursor": 0}
        while True:
            answer = await client.ask("retrieve_futures", body)
            body |= {"prev_cursor": answer["cursor"], "retrieved_request_ids": []}
            for completion in answer["completions"]:
                if (name := completion["request_id"]) in ids:
                    await client.result(completion)
                    received[name] = time.perf_counter()
                    body["retrieved_request_ids"].append(name)

    tasks = [] if held else [asyncio.create_task(poll())]
    for start in range(0, len(numbers), 500):
        tasks += [asyncio.create_task(ask(number)) for number in numbers[start : start + 500]]
        while len(ids) < min(start + 500, len(numbers)):
            await asyncio.sleep(0.01)
    await asyncio.sleep(2.0)
    per_open = (process.tell("hold")["rss"] - memory) / len(numbers)
    chosen = random.Random(0).sample(ids, min(1000, len(ids) // 2))
    for name in chosen:
        await asyncio.to_thread(process.tell, "ready", name)
        while name not in received:
            await asyncio.sleep(0.001)
    ready_at = process.tell("hold")["ready_at"]
    delays = [(received[name] - ready_at[name]) * 1e3 for name in chosen]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    suffix = "_held" if held else ""
    return {
        f"kb_per_open_sample{suffix}": round(per_open / 1000, 1),
        f"ready_p50_ms{suffix}": round(median(delays), 2),
        f"ready_p99_ms{suffix}": round(quantiles(delays, n=100)[98], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of each tenant in a round")
    parser.add_argument("--open", type=int, default=10_000, help="samples that are open at once")
    parser.add_argument("--only", choices=["tenants", "gateway"], help="one part")
    parser.add_argument("--gateway", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if args.gateway is not None:
        uvloop.run(serve_gateway(args.gateway))
        return
    facts: dict[str, Any] = {"cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.only != "tenants":
            facts |= asyncio.run(measure_gateway(folder / "gateway", args.open))
            log(json.dumps(facts))
        if args.only != "gateway":
            write_model(folder / "model")
            with served(folder) as (address, key):
                facts |= asyncio.run(measure_tenants(address, key, folder / "serve/model", args))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
