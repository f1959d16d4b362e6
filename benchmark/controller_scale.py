"""CPU and memory cost of the controller by number of servers, and the lag of its loop under load.

    python benchmark/controller_scale.py [--small] [--only tokens requests episodes memory lag] [--folder DIR]

tokens    microseconds of CPU per 1,000 streamed tokens, at the default stream_interval: a server process for each
          dialect sends answers of 2,000 tokens on 1,024 connections, four on each one after another. With an event each
          16 ms that is 2 million tokens/s, more than the bar of 1.5 million (667 us), so that it shows what a core can
          take; a client that is late finds several events in one read. With one each 25 ms (1.3 million) nearly each
          event arrives alone: `us_per_1k_tokens_alone`. `core_share` is the part of a core that the client got at 16 ms
requests  microseconds of CPU per request of the fleet, without sockets, by number of servers and policy: 32 requests
          for each of 256 prompts of 512 tokens
episodes  microseconds of CPU per episode of the whole controller with its ledger, by number of servers
memory    bytes per token (tracemalloc) of 2,000 episodes of 4,000 tokens: the largest sum while their tokens arrive,
          while they wait for their rewards, and until the ledger has them
lag       10,000 episodes of 1,000 to 3,000 tokens in flight on 1,000 servers, 500,000 tokens/s in all, weight updates
          meanwhile, and batches of 1 GB for 8 ranks: how late a timer of the loop is, and the growth of the
          resident memory by a batch

CPU time is `time.process_time`, so other processes change it little. Lag is wall time and needs an idle machine: the
largest lag of a loop that does nothing in another process meanwhile is `idle_loop_lag_max_ms`, and the CPU time of the
longest callback, which the loop cannot divide, is `longest_callback_ms`. A largest lag above both has another cause:
a thread of the controller that computes, or many callbacks in one turn. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import uvloop

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from areal.api.columns import packed_ids  # noqa: E402
from areal.api.config import (  # noqa: E402
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    TrainDatasetConfig,
)
from areal.api.data import GenerationRequest, TrajectoryGroup, WeightUpdate  # noqa: E402
from areal.api.engine import InferenceEngine  # noqa: E402
from areal.api.workflow import RolloutWorkflow  # noqa: E402
from areal.data.chat import EncodedPrompt  # noqa: E402
from areal.data.prompt_stream import PromptStream  # noqa: E402
from areal.fleet.fleet import Answer, Fleet  # noqa: E402
from areal.fleet.native import NativeReplica  # noqa: E402
from areal.fleet.replica import (  # noqa: E402
    AnswerForm,
    PartChunk,
    Replica,
)
from areal.fleet.sglang import SGLangReplica  # noqa: E402
from areal.fleet.vllm import VLLMReplica  # noqa: E402
from areal.ledger.ledger import Ledger  # noqa: E402
from areal.rollout.controller import Controller  # noqa: E402
from areal.rollout.controller_process import collecting_cycles  # noqa: E402
from areal.rollout.share_codec import encode_head  # noqa: E402
from areal.workflow.conversation import Conversation  # noqa: E402
from benchmark.loop_timer import LoopTimer, TimedLoop, idle_loop  # noqa: E402
from benchmark.scale_servers import InProcessReplica, MemoryRegistry, listen  # noqa: E402

CLIENTS: dict[str, Callable[[str, str], Replica]] = {
    "native": NativeReplica,
    "sglang": SGLangReplica,
    "vllm": VLLMReplica,
}
PAUSES_S = {"us_per_1k_tokens": 0.016, "us_per_1k_tokens_alone": 0.025}
"""Mean time between two events of an answer."""
PARTS = ("tokens", "requests", "episodes", "memory", "lag")
POLICIES = ("least_loaded", "prefix_affinity")
DEFAULTS = InferenceEngineConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much each part measures."""

    servers: tuple[int, ...] = (10, 100, 1000)
    streams: int = 1024
    stream_tokens: int = 2000
    stream_answers: int = 4
    """On each connection, one after another."""
    groups: int = 256
    group_size: int = 32
    episodes: int = 8_000
    held_episodes: int = 2000
    held_tokens: int = 4000
    in_flight: int = 10_000
    answer_tokens: int = 2000
    batch_bytes: int = 10**9
    chunk_s: float = 0.64
    """Between two events of a stream, in the mean, with 32 tokens each."""
    batches: int = 2


SMALL = Size(
    servers=(2, 4), streams=2, stream_tokens=64, stream_answers=1, groups=4, group_size=4, episodes=32,
    held_episodes=4, held_tokens=64, in_flight=16, answer_tokens=32, batch_bytes=8 * 700, batches=1, chunk_s=0.01,
)  # fmt: skip


def run(main: Coroutine[Any, Any, Any], new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.Loop) -> Any:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(collecting_cycles(main))  # as in the controller's process


def request(
    number: int, max_new_tokens: int, *, input_ids: Any = (1, 2, 3, 4), group_id: str = ""
) -> GenerationRequest:
    settings = GenerationHyperparameters(max_new_tokens=max_new_tokens, max_tokens=1 << 20, ignore_eos=True)
    return GenerationRequest(
        request_id=f"{number:032d}-000000", input_ids=packed_ids(input_ids), gconfig=settings, group_id=group_id
    )


# Tokens


@asynccontextmanager
async def server_port(dialect: str, pause_s: float, *, own_process: bool) -> AsyncIterator[int]:
    """The port of a server that streams."""
    if not own_process:
        server = await listen(dialect, pause_s)
        yield server.sockets[0].getsockname()[1]
        server.close()
        return
    script = str(Path(__file__).with_name("scale_servers.py"))
    argv = [sys.executable, script, dialect, str(pause_s)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()


async def stream_us(dialect: str, size: Size, pause_s: float) -> tuple[float, float]:
    """Microseconds of CPU per 1,000 tokens, and the share of a core that was used."""
    async with server_port(dialect, pause_s, own_process=size is not SMALL) as port:
        replica = CLIENTS[dialect]("server-0", f"http://127.0.0.1:{port}")

        async def stream(number: int, count: int) -> int:
            for _ in range(count):
                asked = request(number, size.stream_tokens, input_ids=[number, 2, 3, 4])  # no group: a stream for each
                answer = Answer(asked, AnswerForm(stream_interval=DEFAULTS.stream_interval))
                async for _, chunk in replica.generate([answer.next_part("server-0")]):
                    assert isinstance(chunk, PartChunk)
                    answer.add(chunk)
                assert len(answer.response().output_ids) == size.stream_tokens
            return count * size.stream_tokens

        await asyncio.gather(*(stream(number, 1) for number in range(size.streams)))  # connections, the server's events
        began_s, used_s = time.perf_counter(), time.process_time()
        counts = await asyncio.gather(*(stream(number, size.stream_answers) for number in range(size.streams)))
        took_s, used_s = time.perf_counter() - began_s, time.process_time() - used_s
        await replica.close()
    print(f"{dialect}: {sum(counts) / took_s / 1e6:.2f} million tokens/s, {used_s / took_s:.2f} cores", file=sys.stderr)
    return used_s / sum(counts) * 1e9, used_s / took_s


# Requests


def fleet_of(num_servers: int, policy: str, *, chunk_tokens: int, chunk_s: float, check_s: float = 3600.0) -> Fleet:
    config = InferenceEngineConfig(schedule_policy=policy, health_check_interval_s=check_s, canary="off")

    def factory(name: str, address: str, form: AnswerForm) -> Replica:
        return InProcessReplica(name, chunk_tokens=chunk_tokens, chunk_s=chunk_s)

    return Fleet(MemoryRegistry(num_servers), num_servers, config, factory)


async def request_us(num_servers: int, policy: str, size: Size) -> float:
    """Microseconds of CPU per request."""
    fleet = fleet_of(num_servers, policy, chunk_tokens=32, chunk_s=0.0)
    await fleet.start()
    prompts = [packed_ids([*range(number, number + 512)]) for number in range(size.groups)]

    async def group(number: int) -> None:
        # without a group id each request is routed by itself: the costliest case
        for sample in range(size.group_size):
            await fleet.agenerate(request(number * size.group_size + sample, 32, input_ids=prompts[number]))

    began_s = time.process_time()
    await asyncio.gather(*(group(number) for number in range(size.groups)))
    used_s = time.process_time() - began_s
    await fleet.close()
    return used_s / (size.groups * size.group_size) * 1e6


# Episodes


class NoTokenizer:
    """Text is no part of what is measured, except that an episode holds one character per token."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(map(str, range(10)))[:1] * len(token_ids)


@dataclass
class OneAnswer(RolloutWorkflow):
    """One answer to a short prompt, with a random wait for its reward."""

    num_tokens: int
    reward: Callable[[], Coroutine[Any, Any, None]] | None = None
    varies: bool = False
    """Half to one and a half times `num_tokens`."""
    tokenizer: Any = field(default_factory=NoTokenizer)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        prompt = EncodedPrompt("prompt", packed_ids(range(1000, 1064)))
        conversation = Conversation(self.tokenizer, prompt)
        num_tokens = random.randint(self.num_tokens // 2, self.num_tokens * 3 // 2) if self.varies else self.num_tokens
        asked = request(0, num_tokens, input_ids=conversation.token_ids, group_id=uuid4().hex)
        conversation.add_answer(await engine.agenerate(asked))
        if self.reward is not None:
            await self.reward()
        return TrajectoryGroup(trajectories=[conversation.to_trajectory(1.0)], stats={"num_turns": 1.0})


def controller_of(
    fleet: Fleet, workflow: RolloutWorkflow, folder: Path, *, batch_size: int, in_flight: int, steps: int
) -> Controller:
    config = GRPOConfig(
        experiment_name="benchmark",
        trial_name="controller_scale",
        allocation_mode="native:d1+fsdp:d1",
        train_dataset=TrainDatasetConfig(path="none", batch_size=batch_size),
        rollout=InferenceEngineConfig(
            max_concurrent_rollouts=in_flight, max_head_offpolicyness=max(1, -(-in_flight // batch_size)), canary="off"
        ),
    )
    rows = PromptStream([{"index": index} for index in range(max(4096, batch_size))], seed=1, batch_size=batch_size)
    return Controller(config, fleet=fleet, workflow=workflow, rows=rows, ledger=Ledger.open(folder), total_steps=steps)


async def train(
    controller: Controller, steps: int, *, ranks: int = 1, on_batch: Callable[[], None] = lambda: None
) -> None:
    """A trainer that only asks for its batches, and publishes versions."""
    await controller.attach(rank=0, world_size=ranks, dp_size=ranks, step=0, version=0)
    for step in range(steps):
        while (record := await controller.next_batch(step, timeout_s=60.0)) is None:
            pass
        for rank in range(ranks):
            await asyncio.sleep(0)  # each rank sends a request
            encode_head(record)  # a rank that reads the ledger itself
            if rank == 0:  # and one that cannot
                part = await controller.batches.part(record, rank, ranks)
                for index in part.indices:
                    await controller.batches.payload(record, index)
        on_batch()
        update = WeightUpdate(version=step + 1, kind="disk", path="none")
        while not await controller.weights.publish(update, timeout_s=60.0):
            pass
        await controller.consumed(step, step + 1)


async def close(controller: Controller, fleet: Fleet) -> None:
    """Cancels all episodes in flight, in one turn of the loop: after what is measured."""
    controller.finish()
    await controller.close()
    await fleet.close()


async def episode_us(num_servers: int, size: Size, folder: Path) -> float:
    """Microseconds of CPU per episode."""
    fleet = fleet_of(num_servers, "least_loaded", chunk_tokens=32, chunk_s=0.0)
    batch_size = size.episodes // 2
    steps = size.episodes // batch_size
    controller = controller_of(
        fleet, OneAnswer(32), folder, batch_size=batch_size, in_flight=min(size.in_flight, batch_size), steps=steps
    )
    await controller.start()
    began_s = time.process_time()
    await train(controller, steps)
    used_s = time.process_time() - began_s
    await close(controller, fleet)
    return used_s / (steps * batch_size) * 1e6


# Memory


async def held_bytes(size: Size, folder: Path) -> float:
    """Largest number of traced bytes per token, from the first token until the ledger has written the episodes."""
    count, num_tokens = size.held_episodes, size.held_tokens
    release, arrived = asyncio.Event(), asyncio.Event()
    waiting = 0

    async def reward() -> None:
        nonlocal waiting
        waiting += 1
        if waiting == count:
            arrived.set()
        await release.wait()

    fleet = fleet_of(8, "least_loaded", chunk_tokens=32, chunk_s=0.0)
    controller = controller_of(fleet, OneAnswer(num_tokens, reward), folder, batch_size=count, in_flight=count, steps=1)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    await controller.start()
    training = asyncio.create_task(train(controller, 1), name="trainer")
    await asyncio.wait({training, asyncio.create_task(arrived.wait())}, return_when=asyncio.FIRST_COMPLETED)
    streaming = tracemalloc.get_traced_memory()
    release.set()
    await training
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    await close(controller, fleet)
    total = count * num_tokens
    print(
        f"bytes per token: {(streaming[1] - before) / total:.1f} at most while streaming, "
        f"{(streaming[0] - before) / total:.1f} while waiting for rewards, {(peak - before) / total:.1f} at most",
        file=sys.stderr,
    )
    return (peak - before) / total


# Lag


async def lag_of(size: Size, folder: Path) -> dict[str, float]:
    """The lag of the loop, of an idle loop at the same time, and the longest callback."""
    batch_size = max(4, size.batch_bytes // (13 * (size.answer_tokens + 64)))
    fleet = fleet_of(size.servers[-1], "least_loaded", chunk_tokens=32, chunk_s=size.chunk_s, check_s=1.0)
    controller = controller_of(
        fleet, OneAnswer(size.answer_tokens, varies=True), folder, batch_size=batch_size, in_flight=size.in_flight,
        steps=size.batches,
    )  # fmt: skip
    timer, process, loop = LoopTimer(), psutil.Process(), asyncio.get_running_loop()
    assert isinstance(loop, TimedLoop)
    used: list[int] = []
    await controller.start()
    with idle_loop() as idle_ms:
        watching = asyncio.create_task(timer.watch(), name="loop timer")
        await train(controller, size.batches, ranks=8, on_batch=lambda: used.append(process.memory_info().rss))
        watching.cancel()
    await close(controller, fleet)
    growth = max(0, used[-1] - used[0]) / 1e6
    print(
        f"lag: {timer.at(0.5):.1f} ms median; longest callback: {loop.longest}; resident memory "
        f"{used[-1] / 1e6:.0f} MB, {growth:.0f} MB more than at the first batch of {size.batch_bytes / 1e6:.0f} MB",
        file=sys.stderr,
    )
    lag = {"loop_lag_p99_ms": timer.at(0.99), "loop_lag_max_ms": max(timer.late_ms)}
    return lag | {"idle_loop_lag_max_ms": idle_ms[1], "longest_callback_ms": loop.longest_ms}


def measure(size: Size, parts: tuple[str, ...], base: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if "requests" in parts:
        result["us_per_request"] = {
            policy: {str(servers): run(request_us(servers, policy, size)) for servers in size.servers}
            for policy in POLICIES
        }
    if "episodes" in parts:
        result["us_per_episode"] = {
            str(servers): run(episode_us(servers, size, base / f"episodes-{servers}")) for servers in size.servers
        }
    if "tokens" in parts:
        for name, pause_s in PAUSES_S.items():
            streamed = {dialect: run(stream_us(dialect, size, pause_s)) for dialect in CLIENTS}
            result[name] = {dialect: us for dialect, (us, _) in streamed.items()}
            result.setdefault("core_share", {dialect: share for dialect, (_, share) in streamed.items()})
    if "memory" in parts:
        result["bytes_per_token"] = run(held_bytes(size, base / "memory"))
    if "lag" in parts:
        result |= run(lag_of(size, base / "lag"), TimedLoop)
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="every part in a second, for a test")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--folder", type=Path, default=None, help="where the ledgers are written")
    args = parser.parse_args(argv)
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        print(json.dumps(measure(SMALL if args.small else Size(), tuple(args.only), Path(name))))


if __name__ == "__main__":
    main()
