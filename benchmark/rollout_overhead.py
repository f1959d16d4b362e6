"""CPU time of the rollout controller per episode, with ledger, compared with a plain asyncio worker pool.

    python benchmark/rollout_overhead.py [--in-flight 64 256 1024 4096] [--episodes 20000] [--versus REV]

An episode yields once to the loop, so that all episodes run at the same time, and returns one short trajectory. The
controller admits it, writes its events and payload to a ledger on disk (fsynced in groups), composes and encodes
batches and serves them to a trainer in the same process. CPU time is that of the whole process with the ledger's
writer thread and fsyncs: these are a fixed cost per batch (about three fsyncs), so small batches cost more per
episode. `--tokens` makes longer episodes. With `--versus` each round runs another commit and this tree in turn, and
the medians of the rounds are printed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from areal.api.config import GRPOConfig, InferenceEngineConfig, TrainDatasetConfig
from areal.api.data import (
    CanaryReport,
    GenerationRequest,
    GenerationResponse,
    ProbeScore,
    ProbeTokens,
    Trajectory,
    TrajectoryGroup,
    WeightUpdate,
)
from areal.api.engine import InferenceEngine
from areal.api.workflow import RolloutWorkflow
from areal.data.prompt_stream import PromptStream
from areal.ledger.audit import audit
from areal.ledger.ledger import Ledger
from areal.rollout.controller import Controller
from areal.rollout.controller_process import collecting_cycles

ROOT = Path(__file__).resolve().parents[1]


class NoFleet:
    """A fleet that has only a version. No properties: what they call would count as calls of the controller."""

    vocab_size = 1000

    def __init__(self) -> None:
        self.version = 0

    def pin(self) -> None:
        return None

    async def score(self, rows: Sequence[Any], *, version: int, top_k: int, limit_s: float) -> None:
        return None

    async def keep_policy(self, parent: Path) -> Path:
        raise NotImplementedError("no-op episodes play against nobody")

    def older_policy(self, folder: Path) -> contextlib.AbstractAsyncContextManager[None]:
        raise NotImplementedError("no-op episodes play against nobody")

    async def start(self) -> None:
        return None

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        raise NotImplementedError("no-op episodes generate nothing")

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Any, None]:
        raise NotImplementedError("no-op episodes generate nothing")

    async def agenerate_group(self, requests: Sequence[GenerationRequest]) -> list[GenerationResponse]:
        raise NotImplementedError("no-op episodes generate nothing")

    async def update_weights(self, update: WeightUpdate) -> None:
        self.version = update.version

    def live_replicas(self, version: int) -> list[str]:
        return []

    def probe_tokens(self, version: int) -> ProbeTokens | None:
        return None

    async def compare(self, score: ProbeScore) -> CanaryReport | None:
        return None

    def status(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        return None


class NoOpWorkflow(RolloutWorkflow):
    """Yields once and returns a ready-made trajectory of the current version."""

    def __init__(self, num_tokens: int = 16) -> None:
        self._num_tokens = num_tokens
        self._made: dict[int, TrajectoryGroup] = {}

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup | None:
        await asyncio.sleep(0)
        version = engine.version
        if version not in self._made:
            half = self._num_tokens // 2
            self._made[version] = TrajectoryGroup(
                trajectories=[
                    Trajectory(
                        token_ids=[number % 1000 for number in range(2 * half)],
                        loss_mask=[0] * half + [1] * half,
                        rollout_logprobs=[0.0] * half + [-0.5] * half,
                        output_versions=[-1] * half + [version] * half,
                        reward=1.0,
                        finished=True,
                    )
                ]
            )
        return self._made[version]


async def run_controller(in_flight: int, batch_size: int, num_steps: int, folder: Path, num_tokens: int = 16) -> float:
    """CPU seconds of a complete run of num_steps batches."""
    config = GRPOConfig(
        experiment_name="benchmark",
        trial_name="rollout_overhead",
        allocation_mode="native:d1+fsdp:d1",
        train_dataset=TrainDatasetConfig(path="none", batch_size=batch_size),
        rollout=InferenceEngineConfig(
            max_concurrent_rollouts=in_flight, max_head_offpolicyness=max(0, in_flight // batch_size - 1)
        ),
    )
    controller = Controller(
        config,
        fleet=NoFleet(),
        workflow=NoOpWorkflow(num_tokens),
        rows=PromptStream([{"index": index} for index in range(4096)], seed=1, batch_size=batch_size),
        ledger=Ledger.open(folder),
        total_steps=num_steps,
    )
    began_s = time.process_time()
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    for step in range(num_steps):
        blob = await controller.next_batch(step, timeout_s=60.0)
        assert blob is not None
        await controller.weights.publish(WeightUpdate(version=step + 1, kind="disk", path="none"), timeout_s=60.0)
        await controller.consumed(step, step + 1)
    controller.finish()
    await controller.close()
    return time.process_time() - began_s


async def run_pool(in_flight: int, num_episodes: int) -> float:
    """CPU seconds of `in_flight` plain asyncio workers running the same episodes and keeping the results."""
    workflow, fleet, results = NoOpWorkflow(), NoFleet(), list[TrajectoryGroup | None]()
    numbers = iter(range(num_episodes))

    async def work() -> None:
        for number in numbers:
            results.append(await workflow.arun_episode(fleet, {"index": number}))

    began_s = time.process_time()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    assert len(results) == num_episodes
    return time.process_time() - began_s


def measure(in_flight: int, args: argparse.Namespace) -> tuple[float, float]:
    """Best of `repeats`: microseconds per episode of the controller and of the pool."""
    num_steps = max(8, args.episodes // args.batch_size)
    num_episodes = num_steps * args.batch_size
    ours, pool = list[float](), list[float]()
    for _ in range(args.repeats):
        with (
            tempfile.TemporaryDirectory(dir=args.folder) as name,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            running = run_controller(in_flight, args.batch_size, num_steps, Path(name), args.tokens)
            ours.append(runner.run(collecting_cycles(running)))
            pool.append(runner.run(collecting_cycles(run_pool(in_flight, num_episodes))))
            report = audit(Path(name), check_payloads=False)
            assert report.is_clean, report
            assert report.counts["consumed"] == num_episodes, report
    return min(ours) / num_episodes * 1e6, min(pool) / num_episodes * 1e6


def compare(args: argparse.Namespace) -> None:
    """Runs this script with the package of `--versus` and of this tree in turn, the better of two runs in each round:
    the first one imports."""
    with tempfile.TemporaryDirectory() as name:
        other = Path(name) / "tree"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", other, args.versus], check=True)
        try:
            rounds = [[_values(tree, args) for tree in (other, ROOT)] for _ in range(args.repeats)]
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", other], check=True)
    result: dict[str, dict[str, float]] = {}
    print(f"{'in flight':>10} {args.versus:>12} {'this tree':>10} {'ratio':>6}")
    for level in map(str, args.in_flight):
        before, now = (median(times[place][level] for times in rounds) for place in (0, 1))
        result[level] = {"before_us": before, "us": now, "ratio": round(now / before, 3)}
        print(f"{level:>10} {before:>12.1f} {now:>10.1f} {now / before:>6.2f}")
    print(json.dumps({"versus": args.versus, "in_flight": result, "rounds": rounds}))


def _values(tree: Path, args: argparse.Namespace) -> dict[str, float]:
    options = ["--episodes", args.episodes, "--batch-size", args.batch_size, "--tokens", args.tokens, "--repeats", 2]
    command = [sys.executable, __file__, *options, "--in-flight", *args.in_flight]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run([*map(str, command)], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["us_per_episode"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--episodes", type=int, default=20_000, help="episodes per measurement")
    parser.add_argument("--batch-size", type=int, default=256, help="episodes per train batch")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of which the best counts")
    parser.add_argument("--folder", default=None, help="where the ledgers are written; default: the temporary folder")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of an episode")
    parser.add_argument("--versus", default="", help="a commit to compare with; repeats are rounds")
    args = parser.parse_args()
    if args.versus:
        compare(args)
        return
    us_per_episode: dict[str, float] = {}
    ratio_to_asyncio: dict[str, float] = {}
    print(f"{'in flight':>10} {'controller us':>14} {'asyncio us':>11} {'ratio':>6}")
    for in_flight in args.in_flight:
        ours, pool = measure(in_flight, args)
        us_per_episode[str(in_flight)] = round(ours, 2)
        ratio_to_asyncio[str(in_flight)] = round(ours / pool, 2)
        print(f"{in_flight:>10} {ours:>14.1f} {pool:>11.1f} {ours / pool:>6.1f}", flush=True)
    print(json.dumps({"us_per_episode": us_per_episode, "ratio_to_asyncio": ratio_to_asyncio}))


if __name__ == "__main__":
    main()
