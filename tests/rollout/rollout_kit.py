"""Fakes of the rollout tests: a fleet, a workflow whose episodes follow a script, a loop under virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
from areal.api.engine import InferenceEngine, InferenceFleet
from areal.api.errors import LedgerError
from areal.api.workflow import RolloutWorkflow
from areal.data.prompt_stream import PromptStream
from areal.ledger.event_files import recover_folder
from areal.ledger.ledger import GroupWriter, Ledger
from areal.ledger.payload import payload_head
from areal.ledger.state import Event
from areal.rollout.controller import Controller
from areal.rollout.share_codec import encode_head
from areal.rollout.train_batches import share_parts


class FakeFleet(InferenceFleet):
    """Makes one token per `token_s`; a token bears the version at the moment it is made.

    Like the real fleet's, an answer waits where it would go on under an older version than it began with.
    """

    version = 0

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.updates: list[WeightUpdate] = []
        self.probe: ProbeTokens | None = None

    async def start(self) -> None:
        return None

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        versions: list[int] = []
        began_with = self.version
        while len(versions) < request.gconfig.max_new_tokens:
            await asyncio.sleep(request.gconfig.temperature)  # seconds per token, in these tests
            if self.version >= max([began_with, *versions[-1:]]):
                versions.append(self.version)
        return GenerationResponse(
            request_id=request.request_id,
            input_ids=request.input_ids,
            output_ids=list(range(len(versions))),
            output_logprobs=[-0.5] * len(versions),
            output_versions=versions,
            stop_reason="stop",
            replicas=["server-0"],
        )

    async def update_weights(self, update: WeightUpdate) -> None:
        self.updates.append(update)
        self.version = update.version

    def probe_tokens(self, version: int) -> ProbeTokens | None:
        return self.probe

    async def compare(self, score: ProbeScore) -> CanaryReport | None:
        return None

    def live_replicas(self, version: int) -> list[str]:
        return ["server-0"]

    def status(self) -> dict[str, Any]:
        return {"replicas": []}

    async def close(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Script:
    """What one episode does."""

    outcome: Literal["accept", "reject", "fail", "nan"] = "accept"
    num_tokens: int = 2
    token_s: float = 0.01
    num_trajectories: int = 1


class ScriptedWorkflow(RolloutWorkflow):
    """Plays the script of a row; the reward is the row's index."""

    def __init__(self, script_of: Callable[[int], Script] = lambda index: Script()) -> None:
        self.script_of = script_of
        self.seen: list[int] = []

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup | None:
        from areal.api.config import GenerationHyperparameters

        index: int = data["index"]
        self.seen.append(index)
        script = self.script_of(index)
        settings = GenerationHyperparameters(max_new_tokens=script.num_tokens, temperature=max(script.token_s, 1e-9))
        request = GenerationRequest(request_id=f"{index:08d}", input_ids=[index], gconfig=settings)
        response = await engine.agenerate(request)
        if script.outcome == "reject":
            return None
        if script.outcome == "fail":
            raise ValueError(f"row {index} is broken")
        trajectory = Trajectory(
            token_ids=[index, *response.output_ids],
            loss_mask=[0] + [1] * len(response.output_ids),
            rollout_logprobs=[0.0, *response.output_logprobs],
            output_versions=[-1, *response.output_versions],
            reward=float("nan") if script.outcome == "nan" else float(index),
            finished=True,
        )
        return TrajectoryGroup(trajectories=[trajectory] * script.num_trajectories, stats={"num_turns": 1.0})


def make_config(
    *,
    batch_size: int = 4,
    max_staleness: int = 1,
    on_stale: str = "train",
    max_concurrent: int | None = None,
    queue_size: int | None = None,
    dynamic_bs: bool = False,
    check_format: bool = True,
    rejections: int | None = None,
    dp_size: int = 1,
    traces: bool = False,
) -> GRPOConfig:
    return GRPOConfig(
        allocation_mode=f"native:d1+fsdp:d{dp_size}",
        experiment_name="test",
        trial_name="rollout",
        train_dataset=TrainDatasetConfig(path="none", batch_size=batch_size),
        rollout=InferenceEngineConfig(
            max_head_offpolicyness=max_staleness,
            on_stale=on_stale,
            max_concurrent_rollouts=max_concurrent,
            queue_size=queue_size,
            dynamic_bs=dynamic_bs,
            check_trajectory_format=check_format,
            max_rejected_per_step=rejections,
            enable_rollout_tracing=traces,
        ),
    )


def make_controller(
    ledger: Ledger,
    *,
    config: GRPOConfig | None = None,
    workflow: RolloutWorkflow | None = None,
    fleet: FakeFleet | None = None,
    num_rows: int = 40,
    total_steps: int = 6,
    **options: Any,
) -> Controller:
    config = config or make_config()
    return Controller(
        config,
        fleet=fleet or FakeFleet(),
        workflow=workflow or ScriptedWorkflow(),
        rows=PromptStream(
            [{"index": index} for index in range(num_rows)], seed=1, batch_size=config.train_dataset.batch_size
        ),
        ledger=ledger,
        total_steps=total_steps,
        **options,
    )


async def answer(controller: Controller, step: int, dp_rank: int = 0, dp_size: int = 1) -> bytes | None:
    """What the controller sends a rank that cannot read the ledger. Without a thread, for virtual time."""
    record = await controller.next_batch(step, timeout_s=1e6)
    if record is None:
        return None
    read = controller.batches._ledger.payload
    payloads = [read(*item) for item in zip(record.episode_ids, record.payloads, strict=True)]
    part = share_parts([payload_head(payload) for payload in payloads], dp_size)[dp_rank]
    return encode_head(record, part) + b"".join(payloads[index] for index in part.indices)


async def train(controller: Controller, steps: range, *, step_s: float = 0.0, dp_size: int = 1) -> list[list[bytes]]:
    """A trainer: every share of every batch, then new weights. Returns the blobs by step."""
    blobs: list[list[bytes]] = []
    for step in steps:
        shares = [await answer(controller, step, rank, dp_size) for rank in range(dp_size)]
        assert None not in shares
        blobs.append([share for share in shares if share is not None])
        await asyncio.sleep(step_s)
        update = WeightUpdate(version=step + 1, kind="disk", path=f"v{step + 1}")
        assert await controller.weights.start(update, timeout_s=1e6)
        await controller.consumed(step, step + 1)
        await controller.weights.publish(update, timeout_s=1e6)
    return blobs


class Killed(BaseException):
    """The process died here: nothing after this point happens."""


class MemoryLog:
    """An EventLog that keeps everything in memory."""

    def __init__(self, on_append: Callable[[Event], None] | None = None) -> None:
        self.events: list[Event] = []
        self.payloads: list[bytes] = []
        self._on_append = on_append

    def start(self, on_failure: Callable[[LedgerError], None]) -> None:
        return None

    def append(self, event: Event) -> None:
        self.events.append(event)
        if self._on_append is not None:
            self._on_append(event)

    def append_payload(self, data: bytes) -> tuple[int, int, int]:
        self.payloads.append(data)
        return (0, len(self.payloads) - 1, len(data))

    def keep(self, episode_id: int, attempt: int, data: bytes) -> None:
        return None

    async def durable(self) -> None:
        return None

    async def close(self) -> None:
        return None


def memory_ledger(on_append: Callable[[Event], None] | None = None) -> Ledger:
    """A ledger in memory. `on_append` is called after each event."""
    log = MemoryLog(on_append)
    return Ledger(log, read_payload=lambda where: log.payloads[where[1]])


class FileLog:
    """An EventLog on real files without a thread, for virtual time. `moment(name)` is called at each point at which a
    process may die, and raises Killed to let it die there: what is not in the files by then is lost."""

    LINGER_S = 0.05

    def __init__(self, folder: Path, moment: Callable[[str], None] = lambda name: None) -> None:
        result = recover_folder(folder)
        self.state = result.state
        self._moment = moment
        self._segment, self._size = result.next_number, 0
        self._writer = GroupWriter(folder, result.next_number, after=result.end, open_file=self._open, keep_rejected=3)
        self._events: list[Event] = []
        self._payloads: list[tuple[int, bytes]] = []
        self._kept: list[tuple[int, int, bytes]] = []
        self._timer: asyncio.TimerHandle | None = None

    def _open(self, path: Path) -> _UnsyncedFile:
        return _UnsyncedFile(path, self._moment)

    def start(self, on_failure: Callable[[LedgerError], None]) -> None:
        return None

    def append(self, event: Event) -> None:
        self._moment(f"before {event['event']}")
        self._events.append(event)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.LINGER_S, self._write)

    def append_payload(self, data: bytes) -> tuple[int, int, int]:
        where = (self._segment, self._size, len(data))
        self._size += len(data)
        self._payloads.append((self._segment, data))
        return where

    def keep(self, episode_id: int, attempt: int, data: bytes) -> None:
        self._kept.append((episode_id, attempt, data))

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._events:
            events, payloads, kept = self._events, self._payloads, self._kept
            self._events, self._payloads, self._kept = [], [], []
            with contextlib.suppress(Killed):
                self._writer.write(events, payloads, kept)
                self._moment("written")

    async def durable(self) -> None:
        self._write()
        await asyncio.sleep(0)
        self._moment("durable")

    async def close(self) -> None:
        self._write()
        self._writer.close()


class _UnsyncedFile:
    """An append-only file; dying in the middle of a write leaves half of it."""

    def __init__(self, path: Path, moment: Callable[[str], None]) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        self._moment = moment

    def write(self, data: bytes) -> None:
        self._file.write(data[: len(data) // 2])
        self._moment("writing")
        self._file.write(data[len(data) // 2 :])

    def sync(self) -> None:
        return None

    def cut(self, size: int) -> None:
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: the time until the next timer passes at once."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("deadlock: nothing is left that could ever happen")
        self._jump(max(0.0, timeout))
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on which sleeping takes no time; a wait that nothing can end is an error."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self._advance))

    def _advance(self, seconds: float) -> None:
        self._now_s += seconds

    def time(self) -> float:
        return self._now_s


def run_virtual(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
