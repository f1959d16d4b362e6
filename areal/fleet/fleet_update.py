"""Owns the publication of new weights to the replicas of a fleet: all together, or those that lack a version alone.

`update_weights` waits for pauses and updates, each under a time limit; for a replica that died or hangs no longer than
until its health check finds out (`CHECK_TIMEOUT_INTERVALS`), and for the others of its group RALLY_S more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from areal.api.config.rollout import InferenceEngineConfig
from areal.api.data import WeightUpdate
from areal.api.errors import ArealError, RequestError, WeightSyncError
from areal.fleet.replica import Replica
from areal.fleet.replica_set import CHECK_TIMEOUT_INTERVALS, ReplicaSet
from areal.fleet.slot import Slot
from areal.observe.log import get_logger

log = get_logger(__name__)

PAUSE_TIMEOUT_S = 30.0
"""A replica that does not pause or resume within this is taken out."""
RALLY_S = 1.0
"""What the others of an update group may still take after one of them failed: a group with a hole seldom completes."""


class Publisher:
    """Brings replicas to new weights, one publication at a time."""

    def __init__(self, replicas: ReplicaSet, config: InferenceEngineConfig) -> None:
        self._replicas = replicas
        self._config = config
        self._lock = asyncio.Lock()
        self.publishing: int | None = None
        """What is being published."""
        self.is_switching = False
        """The whole fleet is being brought to another version: no request may be sent meanwhile."""

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `Fleet.update_weights`."""
        async with self._lock:
            if update.version == self._replicas.target_version and self._replicas.serving:
                await self._supplement(update)
            elif update.kind == "collective" and not update.replicas:
                raise WeightSyncError(f"version {update.version} is not served: {self._replicas.describe()}")
            else:
                await self._switch(update)
        log.info("version %d is served by %d replicas", update.version, len(self._replicas.serving))

    def needs_publication(self) -> bool:
        """Whether a live replica waits for weights that only the trainer can bring.

        One that failed to take in the current version waits for the next one, unless none serves.
        """
        replicas = self._replicas
        by_folder = replicas.target is not None and replicas.target.kind == "disk"
        if self.publishing is not None or not replicas.has_started or by_folder:
            return False
        may_wait = bool(replicas.serving)
        return any(
            slot.state == "stale" and not (may_wait and slot.given_up_version == replicas.target_version)
            for slot in replicas.slots
        )

    async def _switch(self, update: WeightUpdate) -> None:
        """From whatever is served now to the update, all together. WeightSyncError when none got there."""
        self.publishing, self.is_switching = update.version, True
        before = self._replicas.target_version, self._replicas.target
        try:
            slots = await self._members(update)
            async with self._paused(slots):
                errors = await self._update(slots, update)
                refused = any(isinstance(error, RequestError) for error in errors)
                if len(errors) == len(slots) and (update.kind == "collective" or refused):
                    reasons = "; ".join(dict.fromkeys(str(error) for error in errors))
                    raise WeightSyncError(f"no replica took in version {update.version}: {reasons}")
                self._replicas.set_target(update.version, update)  # before any of them makes a token again
            try:
                await self._wait_until_served(update)
            except WeightSyncError:
                self._replicas.set_target(*before)  # nobody made a token of it, and after this error nobody may
                raise
        finally:
            self.publishing, self.is_switching = None, False
            self._replicas.announce()

    async def _supplement(self, update: WeightUpdate) -> None:
        """The version is served: bring it to those that lack it, undisturbed the others. Failures are no error."""
        if update.kind == "disk":
            self._replicas.set_target(update.version, update)  # each watch refits its own replica
            return
        serving = {slot.incarnation for slot in self._replicas.serving}
        if serving.issuperset(update.replicas):
            return
        self.publishing = update.version
        try:
            slots = await self._members(update)
            async with self._paused(slots):
                await self._update(slots, update)
            for slot in slots:
                if slot.state != "serving":
                    slot.given_up_version = update.version
        except WeightSyncError as error:
            log.warning("the replicas that lack a version go on without it: %s", error)
        finally:
            self.publishing = None
            self._replicas.announce()

    async def _members(self, update: WeightUpdate) -> list[Slot]:
        """The replicas that take part, in order of rank for a collective."""
        limit = CHECK_TIMEOUT_INTERVALS * self._config.health_check_interval_s
        deadline = time.monotonic() + limit
        while any(slot.state == "suspect" for slot in self._replicas.slots) and time.monotonic() < deadline:
            await self._replicas.wait_for_change(deadline - time.monotonic())
        ready = [slot for slot in self._replicas.slots if slot.state in ("serving", "stale")]
        if update.kind == "disk":
            return ready
        by_id = {slot.incarnation: slot for slot in ready}
        if gone := [name for name in update.replicas if name not in by_id]:
            raise WeightSyncError(
                f"version {update.version}: {', '.join(gone)} cannot take part in the update group: "
                f"{self._replicas.describe()}"
            )
        return [by_id[name] for name in update.replicas]

    @contextlib.asynccontextmanager
    async def _paused(self, slots: list[Slot]) -> AsyncIterator[None]:
        """These replicas make no token inside."""
        paused = [(slot, slot.replica) for slot in slots if slot.replica is not None]
        mode = "abort" if self._config.weight_update == "interrupt" else "retract"
        try:
            await asyncio.gather(*(self._control(slot, replica.pause(mode), "pause") for slot, replica in paused))
            if self._config.pause_grace_period:
                await asyncio.sleep(self._config.pause_grace_period)
            yield
        finally:  # a connection made meanwhile is resumed by its first health check
            await asyncio.gather(*(self._resume(slot, replica) for slot, replica in paused if slot.replica is replica))

    async def _resume(self, slot: Slot, replica: Replica) -> None:
        await self._control(slot, replica.resume(), "resume")

    async def _control(self, slot: Slot, call: Coroutine[Any, Any, None], what: str) -> None:
        try:
            async with asyncio.timeout(PAUSE_TIMEOUT_S):
                await call
        except (ArealError, TimeoutError) as error:
            await self._replicas.take_out(slot, f"did not {what}: {error or f'no answer in {PAUSE_TIMEOUT_S:g} s'}")

    async def _update(self, slots: list[Slot], update: WeightUpdate) -> list[ArealError]:
        """All at once, as a collective needs it. An error for each replica that did not get there."""
        if update.kind == "collective" and any(slot.replica is None for slot in slots):
            raise WeightSyncError(f"version {update.version} lost a replica: {self._replicas.describe()}")
        tasks: list[asyncio.Task[None]] = []
        for index, slot in enumerate(slots):
            bringing = self._replicas.update(slot, update, rank=1 + index * update.ranks_per_replica)
            tasks.append(asyncio.create_task(bringing, name=f"update {slot.name}"))
        try:
            if update.kind == "collective":
                await self._part_with_a_broken_group(slots, tasks)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        errors: list[ArealError] = []
        for slot, outcome in zip(slots, outcomes, strict=True):
            if isinstance(outcome, ArealError):
                log.warning("%s did not take in version %d: %s", slot.name, update.version, outcome)
                errors.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        return errors

    async def _part_with_a_broken_group(self, slots: list[Slot], tasks: list[asyncio.Task[None]]) -> None:
        """Until all are done. When one fails, those that then wait for it are told to stop waiting; one that does not
        is dropped, to be met anew at once."""
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=RALLY_S)
        waiting = [slot for slot, task in zip(slots, tasks, strict=True) if task in pending]
        if waiting:
            await asyncio.gather(*(self._abandon(slot.replica) for slot in waiting if slot.replica))
            _, pending = await asyncio.wait(pending, timeout=RALLY_S)
        for slot, task in zip(slots, tasks, strict=True):
            if task in pending:
                await self._replicas.take_out(slot, "another replica of its update group failed")
                slot.wake.set()

    async def _abandon(self, replica: Replica) -> None:
        with contextlib.suppress(ArealError, TimeoutError):
            async with asyncio.timeout(RALLY_S):
                await replica.abandon_update()

    async def _wait_until_served(self, update: WeightUpdate) -> None:
        """When all replicas died over it, a folder can still be loaded by those that come back."""
        deadline = time.monotonic() + self._config.weight_update_timeout_s
        while not self._replicas.serving:
            if time.monotonic() >= deadline:
                raise WeightSyncError(f"no replica took in version {update.version}: {self._replicas.describe()}")
            await self._replicas.wait_for_change(deadline - time.monotonic())
