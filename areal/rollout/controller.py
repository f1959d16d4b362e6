"""Owns one run's rollouts: puts gate, executor, ledger, batches, evaluations and the fleet together.

Everything happens on one event loop. Nothing polls: episodes end, trainers ask, weights arrive, and each of these
events calls what it may unblock. `ended` is what the process waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from areal.api.config import PPOConfig
from areal.api.data import WeightUpdate
from areal.api.engine import InferenceFleet
from areal.api.errors import ArealError, RequestError
from areal.api.workflow import AcceptFn, RolloutWorkflow
from areal.observe.log import get_logger
from areal.rollout.batch_maker import BatchMaker
from areal.rollout.evaluation import Evaluations
from areal.rollout.executor import Executor
from areal.rollout.gate import GateLimits
from areal.rollout.ledger import Ledger
from areal.rollout.ledger_state import BATCHED, CONSUMED, FAILED, REJECTED
from areal.rollout.producer_stats import ProducerStats
from areal.rollout.prompts import PromptStream

_log = get_logger(__name__)


class BatchUnavailable(RequestError):
    """There is no such batch and there will be none (HTTP 410)."""


class WeightsLost(RequestError):
    """The servers came back without the current weights: publish them again, then ask again (HTTP 409)."""


class Controller:
    """The rollout side of a run. Built anew from its ledger after a death, it goes on where that says."""

    def __init__(
        self,
        config: PPOConfig,
        *,
        fleet: InferenceFleet,
        workflow: RolloutWorkflow,
        rows: PromptStream[dict[str, Any]],
        ledger: Ledger,
        total_steps: int,
        eval_rows: Sequence[dict[str, Any]] | None = None,
        eval_workflows: Mapping[str, RolloutWorkflow] | None = None,
        accept: AcceptFn | None = None,
    ) -> None:
        size, options = config.train_dataset.batch_size, config.rollout
        self._fleet = fleet
        self._workflows = list({id(found): found for found in [workflow, *(eval_workflows or {}).values()]}.values())
        self._rows = rows
        self._ledger = ledger
        self._total_steps = total_steps
        self._failure: Exception | None = None
        self._started, self._ended, self._told = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._publishing: tuple[WeightUpdate, asyncio.Task[None]] | None = None
        self._is_attached = False  # known where the trainer stands now, not only where it stood in this ledger
        self._has_met_trainer = False
        self._going_on: asyncio.Task[None] | None = None
        self._producer = ProducerStats()
        self._batches = BatchMaker(
            ledger,
            batch_size=size,
            max_staleness=options.max_head_offpolicyness,
            on_stale=options.on_stale,
            producer=self._producer,
            on_fatal=self.fail,
        )
        self._executor = Executor(
            limits=GateLimits(
                batch_size=size,
                max_concurrent=config.max_concurrent_rollouts,
                max_staleness=options.max_head_offpolicyness,
                total_episodes=total_steps * size,
            ),
            engine=fleet,
            workflow=workflow,
            rows=rows,
            ledger=ledger,
            accept=accept,
            on_stale=options.on_stale,
            check_format=options.check_trajectory_format,
            trace=options.enable_rollout_tracing,
            producer=self._producer,
            on_accepted=self._batches.poke,
            on_fatal=self.fail,
        )
        self._evaluations = Evaluations(
            engine=fleet,
            workflows=eval_workflows or {},
            rows=eval_rows or [],
            max_concurrent=config.max_concurrent_rollouts,
            count_tokens=self._producer.count_tokens,
        )

    async def start(self) -> None:
        """Begin writing the ledger and wait for the fleet. Episodes start once a trainer has attached."""
        self._ledger.start(self.fail)
        self._ledger.started(self._rows, total_steps=self._total_steps)
        await self._fleet.start()
        self._started.set()
        self._open()

    def _go_on(self) -> None:
        """A trainer asks that attached to a predecessor of this process: go on where the ledger says that it stands.

        Not before it asks: a trainer that starts anew attaches, perhaps at an earlier step, and until then nothing
        may run at, or be loaded from, a version that it is yet to make.
        """
        if not self._has_met_trainer and self._ledger.state.trained_steps is not None:
            self._has_met_trainer = True
            self._going_on = asyncio.create_task(self._go_on_unattached(), name="go-on")

    async def _go_on_unattached(self) -> None:
        try:
            await self._started.wait()
            await self._restore_weights()
            self._is_attached = True
            self._open()
        except Exception as error:  # noqa: BLE001 - a background task: the run must hear of it, and ends
            self.fail(error)

    async def _restore_weights(self) -> None:
        """Bring the fleet back to the ledger's version where the files for that still exist.

        Where they do not, no episode starts until the trainer publishes.
        """
        state, last = self._ledger.state, self._ledger.state.last_publication
        if last is None or last["version"] != state.version or self._fleet.version == state.version:
            return
        if last["kind"] == "disk":
            _log.info("bringing the servers back to policy version %d from %s", state.version, last["path"])
            try:
                await self._fleet.update_weights(WeightUpdate(version=state.version, kind="disk", path=last["path"]))
            except ArealError as error:
                _log.warning("the servers could not go back to version %d: %s", state.version, error)

    def _open(self) -> None:
        """Admit episodes while a trainer is there and the fleet holds the version that the ledger counts with."""
        state, executor = self._ledger.state, self._executor
        is_over = self._failure is not None or self._ended.is_set()
        executor.is_open = not is_over and self._is_attached and self._fleet.version == state.version
        if executor.is_open:
            executor.admit()

    def fail(self, error: Exception) -> None:
        """End the run with `error`. Trainers that ask for a batch are told first."""
        if self._failure is None:
            self._failure = error
            self._executor.is_open = False
            self._batches.release()
            self._ended.set()

    async def ended(self, *, tell_s: float = 5.0) -> None:
        """Return when the trainers have finished; raise when the run cannot go on, once a trainer has heard of it."""
        await self._ended.wait()
        if self._failure is not None:
            if self._ledger.state.trained_steps is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._told.wait(), tell_s)
            raise self._failure

    def _require_alive(self) -> None:
        if self._failure is not None:
            self._told.set()
            raise BatchUnavailable(f"the rollout controller stopped: {self._failure}")

    async def attach(self, *, rank: int, world_size: int, dp_size: int, step: int, version: int) -> None:
        """A trainer rank says where it starts. The first one opens the gate."""
        self._require_alive()
        self._has_met_trainer = True
        _log.info("trainer rank %d of %d attached at step %d, policy version %d", rank, world_size, step, version)
        if rank == 0 or self._ledger.state.trained_steps is None:
            self._ledger.attached(step=step, version=version)
            self._is_attached = True
            await self._ledger.durable()
        self._open()
        self._batches.poke()

    async def next_batch(self, step: int, dp_rank: int, dp_size: int, *, timeout_s: float) -> bytes | None:
        """A rank's share of batch `step`; None = not yet, ask again. BatchUnavailable when it will never come."""
        self._require_alive()
        if not 0 <= dp_rank < dp_size:
            raise RequestError(f"dp_rank={dp_rank} is not below dp_size={dp_size}")
        if step >= self._total_steps:
            raise BatchUnavailable(f"step {step} is past the end of the run: it has {self._total_steps} steps")
        self._go_on()
        blob = await self._batches.get(step, dp_rank, dp_size, timeout_s=timeout_s)
        if blob is None:
            self._require_alive()
            if self._fleet.status().get("needs_publication"):
                raise WeightsLost(f"no server holds policy version {self._ledger.state.version}")
        return blob

    async def publish(self, update: WeightUpdate, *, timeout_s: float) -> bool:
        """Bring the fleet to a new version; True when done, False = not yet, ask again. Repeated calls join."""
        self._require_alive()
        if self._publishing is not None and self._publishing[0] != update:
            await asyncio.wait([self._publishing[1]], timeout=timeout_s)
            if not self._publishing[1].done():
                return False
        if self._publishing is None or self._publishing[0] != update:
            task = asyncio.create_task(self._publish(update), name=f"publish-{update.version}")
            self._publishing = (update, task)
        task = self._publishing[1]
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            return False
        if task.exception() is not None:
            self._publishing = None  # the trainer may try again
        task.result()
        return True

    async def _publish(self, update: WeightUpdate) -> None:
        await self._fleet.update_weights(update)
        self._ledger.published(version=update.version, kind=update.kind, path=update.path)
        await self._ledger.durable()  # the trainer goes on from the answer: a successor of this process must know
        self._executor.drop_stale()
        self._open()

    def live_replicas(self, version: int) -> list[str]:
        """Ids of the replicas that an update to `version` must reach."""
        return self._fleet.live_replicas(version)

    async def consumed(self, step: int, version: int, weights_checksum: str = "") -> None:
        """The trainer has trained on batch `step` and published `version`."""
        self._ledger.consumed(step=step, version=version, weights=weights_checksum)
        await self._ledger.durable()
        self._executor.admit()
        self._batches.poke()

    async def evaluate(self, step: int, mode: str, *, timeout_s: float) -> dict[str, float] | None:
        """Result of the evaluation after `step` train steps; None = not yet, ask again."""
        self._require_alive()
        self._go_on()
        if self._going_on is not None:
            await asyncio.wait([self._going_on], timeout=timeout_s)
            if not self._going_on.done():
                return None  # under the trainer's weights or not at all
        result = await self._evaluations.get(step, mode, timeout_s=timeout_s)
        if result is None:
            self._require_alive()
        return result

    async def committed(self, step: int, path: str) -> None:
        """A recovery checkpoint after `step` train steps is complete."""
        self._ledger.committed(step=step, path=path)
        await self._ledger.durable()

    def finish(self) -> None:
        """The trainers are done: `ended` returns."""
        self._ended.set()

    async def close(self) -> None:
        """Stop episodes and evaluations, flush the ledger, release workflows and the fleet."""
        self._ended.set()
        self._batches.release()
        await self._executor.close()
        await self._evaluations.close()
        if self._going_on is not None:
            self._going_on.cancel()
            await asyncio.gather(self._going_on, return_exceptions=True)
        if self._publishing is not None:
            self._publishing[1].cancel()
            await asyncio.gather(self._publishing[1], return_exceptions=True)
        try:
            await self._ledger.close()
        finally:
            for workflow in self._workflows:
                await workflow.aclose()
            await self._fleet.close()

    def status(self) -> dict[str, Any]:
        """Where the run stands, JSON-ready."""
        state, last = self._ledger.state, self._batches.last
        stats = last.stats if last else {}
        return {
            "step": state.trained_steps or 0,
            "total_steps": self._total_steps,
            "version": state.version,
            "admitted": state.num_admitted,
            "accepted": state.num_accepted,
            "running": len(state.running),
            "waiting": len(state.waiting),
            "rejected": state.counts[REJECTED],
            "failed": state.counts[FAILED],
            "batched": state.counts[BATCHED],
            "consumed": state.counts[CONSUMED],
            "staleness_mean": stats.get("staleness_mean"),
            "staleness_max": stats.get("staleness_max"),
            "reward_mean": stats.get("reward"),
            "generated_tokens": self._producer.generated_tokens,
            "tokens_per_s": self._producer.tokens_per_s(asyncio.get_running_loop().time()),
            "replicas": self._fleet.status(),
            "waiting_for": self.waiting_for(),
        }

    def waiting_for(self) -> str:
        """One sentence on who waits for what."""
        state = self._ledger.state
        if self._failure is not None:
            return f"the end of the run: {self._failure}"
        if self._publishing is not None and not self._publishing[1].done():
            return f"the servers to take policy version {self._publishing[0].version}"
        if not self._is_attached:
            return "a trainer to attach" if self._going_on is None else "the servers to hold the trainer's version"
        if self._evaluations.active:
            return f"the evaluation: {self._evaluations.active}" + self._no_server()
        if self._fleet.version != state.version:
            return f"policy version {state.version}: the servers hold version {self._fleet.version}"
        closed = self._executor.why_closed()
        step = self._batches.wanted_step
        if step is not None:
            enough = f"{len(state.waiting)} of {self._rows.batch_size} episodes accepted, {len(state.running)} running"
            return (
                f"batch {step}: {enough}" + (f"; no more start because {closed}" if closed else "") + self._no_server()
            )
        return "the trainer" + (f"; no episode starts because {closed}" if closed else "")

    def _no_server(self) -> str:
        """Why no request can be answered; empty while some replica serves."""
        cause: str = self._fleet.status().get("waiting_for", "")
        return f"; requests wait for {cause}" if cause else ""
