"""Seconds of a weight update of one native server by part, and how long a streaming request waits for it.

    python benchmark/weight_update.py [--sizes 1M 25M 500M] [--dtypes bfloat16 float32] [--kinds disk collective]
        [--modes keep_cache keep interrupt] [--updates 5]
    python benchmark/weight_update.py --delta [--sizes 135M] [--lr 1e-6 1e-5] [--megabytes-per-s 20] [--updates 5]

The trainer's engine (float32 masters, one rank, on the CPU) publishes through the weight channels of a run and a fleet
to a server in another process, which streams one answer meanwhile, one token per event. `gather` and `cast` are the
passes over the engine's weights without and with a change of dtype; `transfer` is writing the folder, or the broadcasts
including the server's copies; `load` is the fleet's part of an update over the disk. `step_s` is the median wait
between two tokens. `longest_wait_s` is the longest one during an update, less the median before it. The stall is this
less the same figure of as many tokens without an update (`quiet_wait_s`). `swap_s` is the time in which the server's
engine could not start a step. `memcpy` copies the same bytes from one buffer to another in one thread. Figures are
medians over the updates. The last line is JSON.

`--delta` compares updates with `http` and with `delta` through a relay that limits the bytes per second. bfloat16
weights are published after each optimiser step with AdamW at the learning rate, from the seventh step on (AdamW changes
more numbers before), in turn with `delta` and, as another version, with `http`. Figures are medians over the rounds
after the first; in one of several the server computes the cache of the stream again (rollout.max_cache_age), for which
the canary waits. `bytes_ratio`: bytes of `delta` over those of `http`. `time_ratio`: the seconds of `http` over those
of `delta`. `full` and `delta` have the seconds by part: `gather_s`, the trainer's weights in their published form;
`compare_s`, the rest of the trainer until it calls the fleet (differences, checksums, writing); `pull_s`, the transfer
and the server's work until it has the version; `receive_s`, from there to the second copy of its weights; `install_s`;
`canary_s`, the probe and the rest of the fleet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from gpu_step import HALF_BILLION
from numpy.typing import NDArray
from transformers import Qwen2Config

from areal.api.batch import LossOutput, MicroBatch, TokenOutputs
from areal.api.config import GenerationHyperparameters, InferenceEngineConfig, OptimizerConfig, TrainEngineConfig
from areal.api.data import GenerationRequest, WeightUpdate
from areal.data.pack import rows_to_train_batch
from areal.engine.fsdp import FSDPEngine, build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.fleet.fleet import Fleet
from areal.fleet.native import NativeReplica
from areal.fleet.replica import AnswerForm, Chunks, PartChunk, PauseMode, Replica
from areal.system.discovery import FileRegistry
from areal.system.network import TOKEN_VARIABLE, Host
from areal.weights.collective import CollectiveChannel
from areal.weights.disk import DiskChannel, HttpChannel, HttpDeltaChannel

_COMMON: dict[str, Any] = {"tie_word_embeddings": True, "max_position_embeddings": 32768}
SIZES: dict[str, dict[str, Any]] = {
    "1M": _COMMON
    | {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 4, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 1024},
    "25M": _COMMON
    | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7, "num_attention_heads": 8}
    | {"num_key_value_heads": 2, "vocab_size": 8192},
    "135M": _COMMON
    | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "vocab_size": 49152},
    "500M": _COMMON | HALF_BILLION,
}
TOKEN = "benchmark-benchmark-benchmark"
PROMPT = [5, 6, 7, 8]
FIGURES = ("publish_s", "fleet_s", "swap_s", "step_s", "longest_wait_s", "quiet_wait_s")
TRAINED_TOKENS, STEPS_BEFORE = 64, 6
"""Of each of two sequences of a train step; steps before the first update."""
PARTS = ("gather_s", "compare_s", "pull_s", "receive_s", "install_s", "canary_s")
QUIET_TOKENS = 20
"""Tokens that must arrive before and after an update."""


class OneRank:
    """Implements `areal.api.engine.Ranks` for a single trainer rank."""

    rank, world_size = 0, 1

    def all_reduce(self, values: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return values

    def gather(self, content: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
        return iter(())


class TimedSource:
    """The engine. `seconds`: in which it made weights."""

    def __init__(self, engine: FSDPEngine) -> None:
        self._engine, self.seconds = engine, 0.0
        self.weight_specs = engine.weight_specs

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights, start_s = self._engine.named_weights(), time.perf_counter()
        for each in weights:
            self.seconds += time.perf_counter() - start_s
            yield each
            start_s = time.perf_counter()


class TimedReplica(NativeReplica):
    """Notes when tokens arrive, and the seconds of the parts of updates."""

    def __init__(self, name: str, address: str, form: AnswerForm, times: list[float], parts: dict[str, float]) -> None:
        super().__init__(name, address, TOKEN, form)
        self._times, self._parts = times, parts

    async def _pull_weights(self, update: WeightUpdate) -> None:
        await self._timed("pull_s", super()._pull_weights(update))

    async def prepare_weights(self, update: WeightUpdate, *, rank: int) -> None:
        await self._timed("prepare_s", super().prepare_weights(update, rank=rank))

    async def update_weights(self, update: WeightUpdate, *, rank: int, mode: PauseMode) -> None:
        await self._timed("install_s", super().update_weights(update, rank=rank, mode=mode))

    async def _timed(self, name: str, call: Coroutine[Any, Any, None]) -> None:
        start_s = time.perf_counter()
        await call
        self._parts[name] = time.perf_counter() - start_s

    async def generate(self, requests: Sequence[GenerationRequest]) -> Chunks:
        is_probe = requests[0].request_id.startswith("canary")
        async for number, chunk in super().generate(requests):
            if isinstance(chunk, PartChunk) and chunk.token_ids and not is_probe:
                self._times.append(time.perf_counter())
            yield number, chunk


class SlowRelay:
    """Passes connections on to a port of loopback; what that sends arrives at `bytes_per_s`, over all connections."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port, self.target = self._listening.getsockname()[1], 0
        threading.Thread(target=self._accept, daemon=True).start()

    def through(self, address: str) -> str:
        """The address of the same folder behind the relay."""
        parts = urlsplit(address)
        self.target = parts.port or 0
        return parts._replace(netloc=f"127.0.0.1:{self.port}").geturl()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.create_connection(("127.0.0.1", self.target))
            threading.Thread(target=self._copy, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, True), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, is_limited: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if is_limited:
                    with self._lock:
                        self._free_s = max(self._free_s, time.monotonic()) + len(data) / self._bytes_per_s
                        pause_s = self._free_s - time.monotonic()
                    time.sleep(max(0.0, pause_s))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


class FleetControl:
    """The trainer's line to a fleet in another thread. `start_s`: when the last update started; `seconds`: how long it
    took."""

    def __init__(self, fleet: Fleet, loop: asyncio.AbstractEventLoop, relay: SlowRelay | None = None) -> None:
        self._fleet, self._loop, self._relay = fleet, loop, relay
        self.seconds = self.start_s = 0.0
        self._running: Future[Any] | None = None

    def start_update(self, update: WeightUpdate) -> None:
        self.start_s = time.perf_counter()
        if (relay := self._relay) is not None:
            deltas = {base: relay.through(url) for base, url in update.deltas.items()}
            update = replace(update, path=relay.through(update.path), deltas=deltas)
        self._running = asyncio.run_coroutine_threadsafe(self._fleet.update_weights(update), self._loop)

    def publish(self, update: WeightUpdate) -> None:
        if self._running is None:
            self.start_update(update)
        running, self._running = self._running, None
        assert running is not None
        running.result(600)
        self.seconds = time.perf_counter() - self.start_s

    def live_replicas(self, version: int) -> list[str]:
        return self._fleet.live_replicas(version)


@dataclass
class Stream:
    """A fleet over one server with a request that never ends, in a thread with an event loop."""

    fleet: Fleet
    loop: asyncio.AbstractEventLoop
    times: list[float]
    parts: dict[str, float]
    address: str

    def swap_seconds(self) -> float:
        """In which the server exchanged weights, since its start."""
        asked = urllib.request.Request(f"{self.address}/server_info", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)["install_seconds_total"]

    def wait_for_tokens(self, count: int) -> None:
        seen, deadline = len(self.times), time.monotonic() + 300
        while len(self.times) < seen + count:
            if time.monotonic() > deadline:
                raise TimeoutError("the stream ended")
            time.sleep(0.001)


@contextlib.contextmanager
def running_server(model: Path, dtype: str, logs: Path) -> Iterator[str]:
    """The address of a native server with one thread."""
    argv = [sys.executable, "-m", "areal.inference.server", f"--model-path={model}", f"--dtype={dtype}"]
    argv += ["--device=cpu", "--num-threads=1", "--max-running-requests=4", "--max-total-tokens=32768"]
    env = os.environ | {TOKEN_VARIABLE: TOKEN}
    with (
        open(logs / "server.log", "w") as errors,
        subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            if not address:
                sys.exit(f"the server did not start:\n{(logs / 'server.log').read_text()[-2000:]}")
            yield address
        finally:
            process.terminate()


@contextlib.contextmanager
def streaming(address: str, folder: Path, mode: str, dtype: str) -> Iterator[Stream]:
    """A fleet that streams one answer from the server."""
    loop, times, parts = asyncio.new_event_loop(), list[float](), dict[str, float]()
    thread = threading.Thread(target=loop.run_forever, name="fleet", daemon=True)
    thread.start()

    def on_loop(call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, loop)

    registry = FileRegistry(folder / "names")
    registry.add("servers/0", json.dumps({"address": address, "pid": 1}), replace=True)

    def connect(name: str, where: str, form: AnswerForm) -> Replica:
        return TimedReplica(name, where, form, times, parts)

    config = InferenceEngineConfig(weight_update=mode, stream_interval=1)
    fleet = Fleet(registry, 1, config, connect, dtype=dtype)
    on_loop(fleet.start()).result(60)
    gconfig = GenerationHyperparameters(max_new_tokens=30_000, max_tokens=32_000, ignore_eos=True)
    request = GenerationRequest(request_id="r", input_ids=PROMPT, gconfig=gconfig)
    running = on_loop(fleet.agenerate(request))
    try:
        yield Stream(fleet, loop, times, parts, address)
    finally:
        running.cancel()
        on_loop(fleet.close()).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def seconds_of(call: Any, repeats: int = 3) -> float:
    """The median of `repeats` calls after a first one."""
    times: list[float] = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return median(times[1:])


def memcpy_seconds(num_bytes: int) -> float:
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    return seconds_of(lambda: target.copy_(source), repeats=7)


def measure(
    engine: FSDPEngine,
    stream: Stream,
    kind: str,
    folder: Path,
    updates: int,
    first: int,
) -> dict[str, float]:
    """Medians over `updates` publications; the first one, which connects and allocates, is not counted."""
    control, source = FleetControl(stream.fleet, stream.loop), TimedSource(engine)
    if kind == "disk":
        channel: Any = DiskChannel(source, OneRank(), control, folder / "weights", model_folder=folder / "model")  # type: ignore[arg-type]
    else:
        channel = CollectiveChannel(source, OneRank(), control, bucket_bytes=2**28, backend="gloo")  # type: ignore[arg-type]
    rows, num_tokens = list[dict[str, float]](), QUIET_TOKENS
    for index in range(updates + 1):
        row, num_tokens = one_update(channel, control, source, stream, first + index, num_tokens)
        rows.append(row)
    channel.close()
    return medians(rows[1:])


def one_update(
    channel: Any, control: FleetControl, source: TimedSource, stream: Stream, version: int, num_tokens: int
) -> tuple[dict[str, float], int]:
    """The figures of one publication, before which `num_tokens` are awaited; and the tokens that arrived meanwhile."""
    stream.wait_for_tokens(num_tokens)
    quiet, usual = longest_wait(stream.times[-num_tokens:])
    swapped_s, gathered_s = stream.swap_seconds(), source.seconds
    mark, start_s = len(stream.times), time.perf_counter()
    channel.publish(version)
    channel.wait_served()
    total_s = time.perf_counter() - start_s
    stream.wait_for_tokens(3)
    during = stream.times[mark - 1 :]
    waits = (longest_wait(during)[0] - usual, quiet - usual)
    figures = (total_s, control.seconds, stream.swap_seconds() - swapped_s, usual, *waits)
    row = dict(zip(FIGURES, figures, strict=True))
    row |= {name.rpartition("/")[2]: metric.value for name, metric in channel.metrics().items()}
    gather_s, parts = source.seconds - gathered_s, stream.parts
    pull_s, prepare_s = parts.get("pull_s", 0.0), parts["prepare_s"]
    row |= {"gather_s": gather_s, "compare_s": control.start_s - start_s - gather_s, "pull_s": pull_s}
    row |= {"receive_s": prepare_s - pull_s, "install_s": parts["install_s"]}
    row["canary_s"] = control.seconds - prepare_s - parts["install_s"]
    return row, max(QUIET_TOKENS, len(during))


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(row[name] for row in rows) for name in rows[0]}


def longest_wait(times: list[float]) -> tuple[float, float]:
    """The longest and the median time between two tokens, in seconds."""
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return max(gaps), median(gaps)


def one_model(size: str, dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model."""
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        Qwen2Config(**SIZES[size]).save_pretrained(folder / "config")
        config = TrainEngineConfig(
            path=str(folder / "config"), dtype=dtype, optimizer=OptimizerConfig(), init_from_scratch=True
        )
        mesh = TrainerMesh(0, 1, torch.device("cpu"))
        engine = build_fsdp_engine(config, role="actor", total_steps=1, mesh=mesh, seed=0)
        engine.save(folder / "model", with_optimizer=False)
        num_bytes = sum(value.nbytes for _, value in engine.named_weights())
        gather = seconds_of(lambda: [None for _ in engine.named_weights(stored=True)])
        cast = seconds_of(lambda: [None for _ in engine.named_weights()]) - gather
        memcpy = memcpy_seconds(num_bytes)
        rows: list[dict[str, Any]] = []
        with running_server(folder / "model", dtype, folder) as address:
            version = 1
            for mode in args.modes:
                for kind in args.kinds:
                    with streaming(address, folder, mode, dtype) as stream:
                        figures = measure(engine, stream, kind, folder, args.updates, version)
                    version += args.updates + 1
                    load = figures["fleet_s"] if kind == "disk" else 0.0
                    row = {"size": size, "dtype": dtype, "kind": kind, "mode": mode, "megabytes": num_bytes / 1e6}
                    row |= {"memcpy_s": memcpy, "gather_s": gather, "cast_s": max(cast, 0.0)}
                    row |= {"transfer_s": max(figures["publish_s"] - load - gather - cast, 0.0), "load_s": load}
                    stall = max(figures["longest_wait_s"] - figures["quiet_wait_s"], 0.0)
                    row |= {
                        **figures,
                        "stall_s": stall,
                        "stall_over_memcpy": stall / memcpy,
                        "swap_over_memcpy": figures["swap_s"] / memcpy,
                    }
                    rows.append(rounded(row))
                    print(json.dumps(rows[-1]), flush=True)
        return rows


def _loss(outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
    assert outputs.logprobs is not None
    return LossOutput(loss=-outputs.logprobs[micro.batch.loss_mask].sum(), metrics={})


def with_deltas(size: str, rates: list[float], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each learning rate; whole weights are measured with the first one, in turn with differences."""
    rows: list[dict[str, Any]] = []
    results: dict[str, list[dict[str, float]]] = {"full": [], "delta": []}
    for rate in rates:
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            folder = Path(name)
            Qwen2Config(**SIZES[size]).save_pretrained(folder / "config")
            optimizer = OptimizerConfig(lr=rate, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
            config = TrainEngineConfig(
                path=str(folder / "config"), dtype="bfloat16", optimizer=optimizer, init_from_scratch=True
            )
            mesh = TrainerMesh(0, 1, torch.device("cpu"))
            engine = build_fsdp_engine(config, role="actor", total_steps=100, mesh=mesh, seed=0)
            engine.save(folder / "model", with_optimizer=False)
            draw = torch.Generator().manual_seed(1)

            def train(engine: FSDPEngine = engine, draw: torch.Generator = draw) -> None:
                ids = torch.randint(SIZES[size]["vocab_size"], (2, TRAINED_TOKENS), generator=draw).tolist()
                batch = rows_to_train_batch(ids, [[0, *[1] * (TRAINED_TOKENS - 1)] for _ in ids])
                engine.forward_backward(batch, _loss, denominator=2.0 * TRAINED_TOKENS)
                engine.optimizer_step()

            for step in range(STEPS_BEFORE):
                train()
                print(f"lr {rate:g}, step {step + 1} of {STEPS_BEFORE} before the updates", file=sys.stderr)
            kinds = ("delta",) if results["full"] else ("delta", "full")
            results["delta"] = []
            with (
                running_server(folder / "model", "bfloat16", folder) as address,
                streaming(address, folder, "keep_cache", "bfloat16") as stream,
                contextlib.ExitStack() as stack,
            ):
                source, channels, num_tokens = TimedSource(engine), dict[str, Any](), QUIET_TOKENS
                for kind in kinds:
                    channel_class = HttpDeltaChannel if kind == "delta" else HttpChannel
                    control = FleetControl(stream.fleet, stream.loop, SlowRelay(args.megabytes_per_s * 1e6))
                    model = folder / "model"
                    channel: Any = channel_class(source, OneRank(), control, host=Host(), model_folder=model)  # type: ignore[arg-type]
                    stack.callback(channel.close)
                    channels[kind] = channel, control
                version = 0
                # One kind after the other: after whole weights a server reads them from the disk for a difference.
                for kind, (channel, control) in channels.items():
                    for number in range(args.updates + 1):
                        train()
                        version += 1
                        result, num_tokens = one_update(channel, control, source, stream, version, num_tokens)
                        seconds = f"{result['publish_s']:.3g} s"
                        print(f"lr {rate:g}, {kind}, update {number} of {args.updates}: {seconds}", file=sys.stderr)
                        if number:
                            results[kind].append(result)
        full, delta = medians(results["full"]), medians(results["delta"])
        stalls = [max(row["longest_wait_s"] - row["quiet_wait_s"], 0.0) for row in (full, delta)]
        row: dict[str, Any] = {"size": size, "lr": rate, "full_s": full["publish_s"], "delta_s": delta["publish_s"]}
        row |= {"time_ratio": full["publish_s"] / delta["publish_s"], "bytes_ratio": delta["share_of_full"]}
        row |= {"full_stall_s": stalls[0], "delta_stall_s": stalls[1]}
        row |= {"full": rounded({name: full[name] for name in PARTS})}
        row |= {"delta": rounded({name: delta[name] for name in PARTS})}
        row["delta_rounds_s"] = [float(f"{each['publish_s']:.3g}") for each in results["delta"]]
        rows.append(rounded(row))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), help="default: 1M 25M 500M; 135M with --delta")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--kinds", nargs="+", choices=("disk", "collective"), default=["disk", "collective"])
    parser.add_argument("--modes", nargs="+", choices=("keep_cache", "keep", "interrupt"), default=["keep_cache"])
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where weights are written (default: the temporary folder)")
    parser.add_argument("--delta", action="store_true", help="compare the modes http and delta")
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-6, 1e-5], help="learning rates, with --delta")
    parser.add_argument("--megabytes-per-s", type=float, default=20.0, help="rate of the relay, with --delta")
    args = parser.parse_args()
    os.environ[TOKEN_VARIABLE] = TOKEN
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)  # the thread that notes tokens must not wait for the one that publishes
    sizes = args.sizes or (["135M"] if args.delta else ["1M", "25M", "500M"])
    if args.delta:
        print(json.dumps({"delta": [row for size in sizes for row in with_deltas(size, args.lr, args)]}))
        return
    rows = [row for size in sizes for dtype in args.dtypes for row in one_model(size, dtype, args)]
    names = [" ".join((row["size"], row["dtype"], row["kind"], row["mode"])) for row in rows]
    ratios = ("stall_over_memcpy", "swap_over_memcpy")
    print(json.dumps({ratio: {name: row[ratio] for name, row in zip(names, rows, strict=True)} for ratio in ratios}))


if __name__ == "__main__":
    main()
