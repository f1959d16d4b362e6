"""Compares synchronous and asynchronous RL: the same code with rollout.max_head_offpolicyness = 0 and above. A few
answers are much longer than the others.

    python benchmark/async_speedup.py            generation and training simulated by time (a minute)
    python benchmark/async_speedup.py --real     the whole system on a tiny model: native server, FSDP engine (minutes)

Simulated: the real controller (gate, executor, ledger on disk, batches) serves over HTTP; a trainer thread takes its
batches through the real client. Only two parts are waiting times: a token takes --token-ms on one of --seats places of
the servers, and a train step takes --train-s. Lengths are drawn from a log-normal distribution (--sigma), with the same
sequence for every row of the table. A weight update pauses generation for --publish-s; running answers then continue.
Prints one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from aiohttp import web

from areal.api.config import GenerationHyperparameters, GRPOConfig, InferenceEngineConfig, TrainDatasetConfig
from areal.api.data import GenerationRequest, GenerationResponse, ProbeScore, Trajectory, TrajectoryGroup, WeightUpdate
from areal.api.engine import InferenceEngine, InferenceFleet
from areal.api.metrics import gather_or_cancel
from areal.api.workflow import RolloutWorkflow
from areal.data.prompt_stream import PromptStream
from areal.ledger.ledger import Ledger
from areal.rollout.client import RolloutClient
from areal.rollout.controller import Controller
from areal.rollout.controller_process import make_app
from areal.system.network import bind_socket, http_address

MAX_TOKENS = 4096
TOKEN = "benchmark"
PROMPT = [1, 2, 3, 4]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Figures of one row of the table."""

    eta: int
    seconds: float
    staleness_mean: float
    staleness_max: float
    seats_busy: float
    trainer_busy: float
    num_tokens: int


class SimulatedFleet(InferenceFleet):
    """Servers with a number of seats; every seat generates a token in token_s. Weights change between two tokens."""

    newest = 0

    @property
    def version(self) -> int:
        return self.newest

    def __init__(self, args: argparse.Namespace, lengths: np.ndarray) -> None:
        self.num_tokens = 0
        self.busy_s = 0.0
        self._token_s = args.token_ms / 1000
        self._publish_s = args.publish_s
        self._seats = asyncio.Semaphore(args.seats)
        self._lengths = lengths
        self._paused_s = 0.0
        """Sum of all pauses: a running answer is delayed by those during its time."""

    async def start(self) -> None:
        return None

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Any, None]:
        raise NotImplementedError("no workflow here streams")

    async def agenerate_group(self, requests: Sequence[GenerationRequest]) -> list[GenerationResponse]:
        return await gather_or_cancel([self.agenerate(request) for request in requests])

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        row, sample = (int(part) for part in request.request_id.split("-"))
        length = int(self._lengths[(row * 64 + sample) % len(self._lengths)])
        async with self._seats:
            began_s, paused_s, version = time.monotonic(), self._paused_s, self.version
            left_s = length * self._token_s
            while left_s > 0:
                await asyncio.sleep(left_s)
                left_s, paused_s = self._paused_s - paused_s, self._paused_s
            self.busy_s += time.monotonic() - began_s
        self.num_tokens += length
        return GenerationResponse(
            request_id=request.request_id,
            input_ids=request.input_ids,
            output_ids=[5] * length,
            output_logprobs=[-1.0] * length,
            output_versions=[version] * length,  # some tokens may be newer
            stop_reason="stop",
        )

    async def update_weights(self, update: WeightUpdate) -> None:
        await asyncio.sleep(self._publish_s)
        self._paused_s += self._publish_s
        self.newest = update.version

    def probe_tokens(self, version: int) -> None:
        return None

    async def compare(self, score: ProbeScore) -> None:
        return None

    def live_replicas(self, version: int) -> list[str]:
        return []

    def status(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        return None


class GroupWorkflow(RolloutWorkflow):
    """One group of answers a row; they are not scored."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._gconfig = GenerationHyperparameters(max_new_tokens=MAX_TOKENS)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        responses = await asyncio.gather(
            *(
                engine.agenerate(
                    GenerationRequest(request_id=f"{data['row']:06d}-{i:03d}", input_ids=PROMPT, gconfig=self._gconfig)
                )
                for i in range(self._group_size)
            )
        )
        return TrajectoryGroup(trajectories=[_trajectory(response) for response in responses])


def _trajectory(response: GenerationResponse) -> Trajectory:
    prompt, output = len(response.input_ids), len(response.output_ids)
    return Trajectory(
        token_ids=[*response.input_ids, *response.output_ids],
        loss_mask=[0] * prompt + [1] * output,
        rollout_logprobs=[*[0.0] * prompt, *response.output_logprobs],
        output_versions=[*[-1] * prompt, *response.output_versions],
        reward=0.0,
        finished=True,
    )


def draw_lengths(args: argparse.Namespace) -> np.ndarray:
    """Log-normal: the mean is --mean-tokens, the standard deviation of the logarithm --sigma."""
    draw = np.random.default_rng(args.seed).lognormal(0.0, args.sigma, size=64 * 4096)
    lengths = draw * args.mean_tokens / np.exp(args.sigma**2 / 2)
    return np.clip(lengths, 1, MAX_TOKENS).astype(int)


class Trainer(threading.Thread):
    """Requests batches like a trainer rank, and sleeps instead of computing."""

    def __init__(self, address: str, folder: str, args: argparse.Namespace) -> None:
        """`folder`: where the weights would be, below the run folder."""
        super().__init__(name="trainer", daemon=True)
        self._client = RolloutClient(address, token=TOKEN)
        self._folder = folder
        self._args = args
        self.seconds = 0.0
        self.staleness: list[float] = []
        self.staleness_max = 0.0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._train()
        except Exception as error:  # noqa: BLE001 - shown by the thread that waits
            self.error = error

    def _train(self) -> None:
        client = self._client
        client.attach(rank=0, world_size=1, dp_rank=0, dp_size=1, step=0, version=0)
        began_s = time.monotonic()
        for step in range(self._args.steps):
            share = client.next_batch(step)
            self.staleness.append(share.stats["staleness_mean"])
            self.staleness_max = max(self.staleness_max, share.stats["staleness_max"])
            time.sleep(self._args.train_s)
            client.publish(WeightUpdate(version=step + 1, kind="disk", path=self._folder))
            client.consumed(step, step + 1)
        self.seconds = time.monotonic() - began_s
        client.finish(self._args.steps)


async def simulate(eta: int, args: argparse.Namespace, lengths: np.ndarray, folder: Path) -> Run:
    """One complete run with maximum staleness `eta`."""
    config = GRPOConfig(
        experiment_name="benchmark",
        trial_name="async_speedup",
        allocation_mode="native:d1+fsdp:d1",
        train_dataset=TrainDatasetConfig(path="none", batch_size=args.batch_size),
        rollout=InferenceEngineConfig(max_head_offpolicyness=eta),
    )
    fleet = SimulatedFleet(args, lengths)
    controller = Controller(
        config,
        fleet=fleet,
        workflow=GroupWorkflow(args.group_size),
        rows=PromptStream([{"row": row} for row in range(4096)], seed=args.seed, batch_size=args.batch_size),
        ledger=Ledger.open(folder),
        total_steps=args.steps,
    )
    await controller.start()
    runner = web.AppRunner(make_app(controller, token=TOKEN), shutdown_timeout=1.0)
    await runner.setup()
    bound = bind_socket()
    await web.SockSite(runner, bound).start()
    trainer = Trainer(http_address(bound), str(controller.shape.folder / "weights"), args)
    trainer.start()
    while trainer.is_alive():
        await asyncio.sleep(0.05)
    await controller.close()
    await runner.cleanup()
    if trainer.error is not None:
        raise trainer.error
    return Run(
        eta=eta,
        seconds=trainer.seconds,
        staleness_mean=float(np.mean(trainer.staleness)),
        staleness_max=trainer.staleness_max,
        seats_busy=fleet.busy_s / (trainer.seconds * args.seats),
        trainer_busy=args.steps * args.train_s / trainer.seconds,
        num_tokens=fleet.num_tokens,
    )


def run_simulated(args: argparse.Namespace) -> None:
    lengths = draw_lengths(args)
    print(
        "Generation and training are SIMULATED BY TIME; controller, ledger, batches and HTTP are real.\n"
        f"{args.steps} steps of {args.batch_size} episodes x {args.group_size} answers; answer tokens: mean "
        f"{lengths.mean():.0f}, median {np.median(lengths):.0f}, p99 {np.percentile(lengths, 99):.0f}, max "
        f"{lengths.max()}; {args.seats} seats at {args.token_ms} ms a token, train step {args.train_s} s, publication "
        f"{args.publish_s} s\n"
    )
    print(
        f"{'eta':>4} {'seconds':>8} {'s/step':>7} {'speedup':>8} {'seats busy':>11} {'trainer busy':>13} "
        f"{'staleness mean':>15} {'max':>4}"
    )
    runs: list[Run] = []
    for eta in args.eta:
        with (
            tempfile.TemporaryDirectory() as folder,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            run = runner.run(simulate(eta, args, lengths, Path(folder)))
        runs.append(run)
        print(
            f"{eta:>4} {run.seconds:>8.2f} {run.seconds / args.steps:>7.3f} {runs[0].seconds / run.seconds:>7.2f}x "
            f"{run.seats_busy:>10.0%} {run.trainer_busy:>12.0%} {run.staleness_mean:>15.2f} {run.staleness_max:>4.0f}",
            flush=True,
        )
    best = runs[-1]
    print(
        json.dumps(
            {
                "speedup": round(runs[0].seconds / best.seconds, 3),
                "mode": "simulated by time",
                "eta": best.eta,
                "seconds_sync": round(runs[0].seconds, 2),
                "seconds_async": round(best.seconds, 2),
                "staleness_mean": round(best.staleness_mean, 2),
                "staleness_max": best.staleness_max,
            }
        )
    )


def run_real(args: argparse.Namespace) -> None:
    """Both rows with the local launcher on the quickstart's configuration, from the same checkpoint."""
    print(f"{args.config}: {args.steps} steps each, whole system, this machine ({os.cpu_count()} cores)\n")
    print(f"{'eta':>4} {'s/step':>7} {'speedup':>8} {'staleness mean':>15}")
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for eta in args.eta:
            trial = f"eta{eta}"
            command = [
                *(sys.executable, "-m", "areal", "run", "--config", args.config),
                *(f"trial_name={trial}", "experiment_name=async_speedup", f"total_train_steps={args.steps}"),
                *(f"cluster.fileroot={folder}", f"rollout.max_head_offpolicyness={eta}", *args.override),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=sys.stderr)
            text = (Path(folder) / "async_speedup" / trial / "metrics.jsonl").read_text()
            lines = [line for line in map(json.loads, text.splitlines()) if "seconds/step" in line]
            # Without the first step, which fills the pipeline and compiles, in both rows.
            per_step = (lines[-1]["time"] - lines[0]["time"]) / (len(lines) - 1)
            staleness = [value for line in lines if (value := line.get("rollout/staleness_mean")) is not None]
            seconds.append(per_step)
            mean = f"{np.mean(staleness):.2f}" if staleness else "-"
            print(f"{eta:>4} {per_step:>7.3f} {seconds[0] / per_step:>7.2f}x {mean:>15}", flush=True)
    result = {"speedup": round(seconds[0] / seconds[-1], 3), "mode": "real", "eta": args.eta[-1]}
    print(json.dumps(result | {"seconds_per_step": [round(value, 4) for value in seconds]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="run the whole system instead of simulating")
    parser.add_argument("--eta", type=int, nargs="+", default=None, help="rollout.max_head_offpolicyness of each row")
    parser.add_argument("--steps", type=int, default=30, help="train steps of a run")
    parser.add_argument("--seed", type=int, default=1)
    simulated = parser.add_argument_group("simulated")
    simulated.add_argument("--batch-size", type=int, default=16, help="episodes per train step")
    simulated.add_argument("--group-size", type=int, default=8, help="answers per episode")
    simulated.add_argument("--seats", type=int, default=128, help="answers generated at once")
    simulated.add_argument("--mean-tokens", type=float, default=400.0)
    simulated.add_argument("--sigma", type=float, default=1.0, help="spread of the logarithm of lengths; 0 = all equal")
    simulated.add_argument("--token-ms", type=float, default=0.25, help="milliseconds of a token")
    simulated.add_argument("--train-s", type=float, default=0.15, help="seconds of a train step")
    simulated.add_argument("--publish-s", type=float, default=0.01, help="seconds of a weight update")
    real = parser.add_argument_group("real")
    real.add_argument("--config", default="examples/quickstart/grpo.yaml")
    real.add_argument("override", nargs="*", help="more key=value for the launcher, e.g. actor.path=CHECKPOINT")
    args = parser.parse_args()
    args.eta = args.eta or ([0, 4] if args.real else [0, 1, 2, 4])
    if args.real:
        run_real(args)
    else:
        run_simulated(args)


if __name__ == "__main__":
    main()
