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
from areal.api.errors import RequestError
from areal.api.workflow import AcceptFn, RolloutWorkflow
from areal.data.prompt_stream import PromptStream
from areal.ledger.ledger import Ledger
from areal.ledger.state import BATCHED, CONSUMED, FAILED, REJECTED
from areal.observe.log import get_logger
from areal.rollout.batch_maker import BatchMaker
from areal.rollout.evaluation import Evaluations
from areal.rollout.executor import Executor
from areal.rollout.fleet_version import Publications
from areal.rollout.gate import GateLimits
from areal.rollout.producer_stats import ProducerStats
from areal.rollout.waiting import replicas_behind, requests_waiting

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
        self._ended, self._told = asyncio.Event(), asyncio.Event()
        self._publications = Publications(fleet, ledger, on_change=self._on_publication)
        self._is_attached = self._has_met_trainer = False
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
            options=options,
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
            ledger=ledger,
        )

    async def start(self) -> None:
        """Begin writing the ledger and wait for the fleet. Episodes start once a trainer has attached."""
        self._ledger.start(self.fail)
        self._ledger.started(self._rows, total_steps=self._total_steps)
        await self._fleet.start()
        self._publications.begin()
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
            await self._publications.restore()
            self._is_attached = True
            self._open()
        except Exception as error:  # noqa: BLE001 - a background task: the run must hear of it, and ends
            self.fail(error)

    def _open(self) -> None:
        """Admit episodes while a trainer is there and the fleet holds the version that the ledger counts with.

        While the trainer makes versions again that were published before, nothing is admitted and running episodes
        wait with their next request: no policy that went back makes a token to train on.
        """
        state, executor = self._ledger.state, self._executor
        is_over = self._failure is not None or self._ended.is_set()
        executor.hold_requests(self._catches_up)
        may_start = self._knows_trainer and self._fleet.version == state.version and not self._catches_up
        executor.is_open = may_start and not is_over
        if executor.is_open:
            executor.admit()

    @property
    def _knows_trainer(self) -> bool:
        """Where the trainer stands now, and not only where it stood when a predecessor of this process wrote it down.

        One that starts anew publishes before it attaches, if it holds other weights than the servers start with.
        """
        has_published = self._publications.has_published and self._ledger.state.trained_steps is not None
        return self._is_attached or has_published

    @property
    def _catches_up(self) -> bool:
        return self._publications.lowest_version < self._ledger.state.highest_version

    def _on_publication(self) -> None:
        if self._publications.publishing is not None:  # one that goes back would answer the rows that are left
            self._evaluations.cancel_beyond(self._publications.publishing)
        self._executor.drop_stale()
        self._open()

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
            if version < self._ledger.state.highest_version and not self._ledger.state.batches:
                self._executor.begin_again()  # what runs waits for a version that no recorded batch leads to
            self._ledger.attached(step=step, version=version)
            self._is_attached = True
            self._batches.release(beyond=step)
            await self._ledger.durable()
        self._open()
        self._batches.poke()

    async def next_batch(self, step: int, dp_rank: int, dp_size: int, *, timeout_s: float) -> bytes | None:
        """A rank's share of batch `step`; None = not yet, ask again.

        BatchUnavailable when it will never come, WeightsLost when it waits for the trainer to publish again.
        """
        self._require_alive()
        if not 0 <= dp_rank < dp_size:
            raise RequestError(f"dp_rank={dp_rank} is not below dp_size={dp_size}")
        if step >= self._total_steps:
            raise BatchUnavailable(f"step {step} is past the end of the run: it has {self._total_steps} steps")
        self._go_on()
        if step not in self._ledger.state.batches:
            self._require_weights()
        blob = await self._batches.get(step, dp_rank, dp_size, timeout_s=timeout_s)
        if blob is None:
            self._require_alive()
            self._require_weights()
        return blob

    def _require_weights(self) -> None:
        """Only the trainers can bring a replica weights that came over a collective, or whose folder is gone."""
        if self._knows_trainer and self._publications.needs_trainer:
            raise WeightsLost(f"a server waits for policy version {self._ledger.state.version}")

    async def publish(self, update: WeightUpdate, *, timeout_s: float) -> bool:
        """Bring the fleet to a new version; True when done, False = not yet, ask again. Repeated calls join."""
        self._require_alive()
        return await self._publications.publish(update, timeout_s=timeout_s)

    async def live_replicas(self, version: int, *, timeout_s: float) -> list[str] | None:
        """Ids of the replicas that an update to `version` must reach; None = the fleet is not ready, ask again.

        An empty list: no replica lacks it, or none lives. An update to nobody then tells which: it is served, or fails.
        """
        self._require_alive()
        if not await self._publications.fleet_is_ready(timeout_s):
            return None
        return self._fleet.live_replicas(version)

    async def consumed(self, step: int, version: int, weights_checksum: str = "") -> None:
        """The trainer has trained on batch `step` and published `version`."""
        self._ledger.consumed(step=step, version=version, weights=weights_checksum)
        await self._ledger.durable()
        self._go_on()
        self._executor.admit()
        self._batches.poke()

    async def evaluate(self, step: int, mode: str, *, timeout_s: float) -> dict[str, float] | None:
        """Result of the evaluation after `step` train steps; None = not yet, ask again.

        It runs under the trainer's weights or not at all: WeightsLost when these must be published again first.
        """
        self._require_alive()
        self._evaluations.check(mode)
        if (step, mode) not in self._ledger.state.evaluations:
            self._go_on()
            if not await self._publications.fleet_is_ready(timeout_s):
                return None
            if self._going_on is not None:
                await asyncio.wait([self._going_on], timeout=timeout_s)
                if not self._going_on.done():
                    return None
            self._require_weights()
        result = await self._evaluations.get(step, mode, timeout_s=timeout_s)
        if result is None:
            self._require_alive()
            self._require_weights()
        return result

    async def committed(self, step: int, path: str) -> None:
        """A recovery checkpoint after `step` train steps is complete."""
        self._ledger.committed(step=step, path=path)
        await self._ledger.durable()
        self._go_on()

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
        await self._publications.close()
        try:
            await self._ledger.close()
        finally:
            for workflow in self._workflows:
                await workflow.aclose()
            await self._fleet.close()

    def status(self) -> dict[str, Any]:
        """Where the run stands, JSON-ready."""
        state, last, now_s = self._ledger.state, self._batches.last, asyncio.get_running_loop().time()
        stats, since_s = last.stats if last else {}, self._waiting_since_s()
        return {
            "step": state.trained_steps or 0,
            "total_steps": self._total_steps,
            "version": state.version,
            "highest_version": state.highest_version,
            "catching_up": self._catches_up,
            "publishing": self._publications.publishing,
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
            "tokens_per_s": self._producer.tokens_per_s(now_s),
            "replicas": self._fleet.status(),
            "waiting_for": self.waiting_for(),
            "asked_for": self._asked_for(),
            "shut_because": self._why_shut(),
            "waiting_since_s": None if since_s is None else now_s - since_s,
        }

    def waiting_for(self) -> str:
        """One sentence on who waits for whom: what is asked for, why the gate is shut, what is wrong with servers."""
        fleet, version = self._fleet.status(), self._publications.publishing
        if version is None:
            version = self._ledger.state.version
        shut = self._why_shut()
        parts = [self._asked_for(), shut and f"no episode starts because {shut}"]
        if self._failure is None and self._knows_trainer:
            parts += [replicas_behind(fleet, version), requests_waiting(fleet)]
        return "; ".join(part for part in parts if part)

    def _asked_for(self) -> str:
        state, publications = self._ledger.state, self._publications
        if self._failure is not None:
            return f"the end of the run: {self._failure}"
        if publications.publishing is not None:
            return f"the servers to take policy version {publications.publishing}"
        if self._going_on is not None and not self._going_on.done():
            return f"the servers to hold the trainer's policy version {state.version}"
        if self._evaluations.active:
            return f"the evaluation: {self._evaluations.active}"
        step = self._batches.wanted_step
        if step is not None:
            enough = f"{len(state.waiting)} of {self._rows.batch_size} episodes accepted, {len(state.running)} running"
            return f"batch {step}: {enough}"
        return "the trainer" if self._knows_trainer else "a trainer to attach"

    def _why_shut(self) -> str:
        """Why no episode may start; empty while one may."""
        state = self._ledger.state
        if self._failure is not None or not self._knows_trainer:
            return ""
        if self._catches_up:
            return f"the trainer catches up: version {self._publications.lowest_version} of {state.highest_version}"
        if self._fleet.version != state.version and self._publications.publishing is None:
            return f"the servers hold policy version {self._fleet.version}, not {state.version}"
        return self._executor.why_closed()

    def _waiting_since_s(self) -> float | None:
        """Loop time at which what is asked for was first asked for, where it is known."""
        if self._publications.publishing is not None:
            return self._publications.since_s
        if self._evaluations.active:
            return self._evaluations.since_s
        step = self._batches.wanted_step
        return None if step is None else self._batches.waiting_since_s(step)
