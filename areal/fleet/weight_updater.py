"""Weight updates of a fleet: of all replicas together, or of those that lack the served version alone.

`WeightUpdater.update` waits for pauses and updates, each under a time limit. For a replica that dies or hangs it waits
until the health check fails (`CHECK_TIMEOUT_INTERVALS`), and for the others of its group `GROUP_GRACE_S` more.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal.api.config.rollout import InferenceEngineConfig
from areal.api.data import CanaryReport, WeightUpdate
from areal.api.errors import ArealError, RequestError, ServerUnavailable, WeightSyncError
from areal.fleet.canary_check import CanaryCheck
from areal.fleet.replica import PauseMode, Replica
from areal.fleet.replica_set import CHECK_TIMEOUT_INTERVALS, ReplicaSet
from areal.fleet.replica_states import Event, Slot, State, Weights, reported
from areal.observe.log import get_logger
from areal.system.durable import is_complete
from areal.system.folder_server import PULLED_WEIGHTS
from areal.system.run_images import RunImages

log = get_logger(__name__)

PAUSE_TIMEOUT_S = 30.0
"""A replica that does not pause or resume within this time is disconnected."""
PAUSE_MODES: dict[str, PauseMode] = {"interrupt": "abort", "keep": "retract", "keep_cache": "in_place"}
"""By rollout.weight_update."""
MAX_MIRRORS = 3
"""Servers that one server asks for weights before it asks the trainer."""
GROUP_GRACE_S = 1.0
"""Time that the other replicas of an update group get after one failed: the collective seldom completes then."""


class WeightUpdater:
    """Gives replicas new weights, one update at a time."""

    def __init__(
        self,
        replicas: ReplicaSet,
        config: InferenceEngineConfig,
        *,
        seed: int,
        dtype: str,
        vision: RunImages | None = None,
    ) -> None:
        self._replicas = replicas
        self._config = config
        self._lock = asyncio.Lock()
        self._target: WeightUpdate | None = None
        """The update that made the target version; None before the first."""
        self.updating_to: int | None = None
        """The version that is being installed."""
        self._mode: PauseMode = PAUSE_MODES[config.weight_update]
        self.canary = CanaryCheck(replicas, seed=seed, dtype=dtype, vision=vision, install_again=self._install_again)
        replicas.update_stale = self._update_stale

    async def update(self, update: WeightUpdate) -> CanaryReport | None:
        """Update every healthy replica to `update.version`. WeightSyncError when none reached it.

        A replica that fails is disconnected and does not delay the others. After an error the fleet serves the version
        before, as far as replicas still have it. When the version is served already, only replicas that lack it take
        part, the others continue to generate, and a failure is not an error.
        """
        async with self._lock:
            # Every adapter folder is new, also of the version that the servers have from their start.
            is_other = update.kind == "adapter" and (self._target is None or self._target.path != update.path)
            if update.version == self._replicas.target_version and self._replicas.serving and not is_other:
                await self._supplement(update)
            elif update.kind == "collective" and not update.replicas:
                text = f"version {update.version} is not served: {self._replicas.describe()}"
                raise WeightSyncError(text, code="fleet.no_live_replica")
            else:
                await self._switch(update)
        log.info("version %d is served by %d replicas", update.version, len(self._replicas.serving))
        return self.canary.report(update.version)

    def needs_weights(self) -> bool:
        """Whether a live replica waits for weights that only the trainer can send.

        A replica that failed to install the current version waits for the next one, unless none serves.
        """
        replicas = self._replicas
        by_folder = self._target is not None and self._target.is_folder
        if self.updating_to is not None or not replicas.has_started or by_folder:
            return False
        may_wait = bool(replicas.serving)
        return any(
            slot.state is State.STALE and not (may_wait and slot.failed_version == replicas.target_version)
            for slot in replicas.slots
        )

    def _set_target(self, version: int, update: WeightUpdate | None) -> None:
        """From now on replicas serve `version`; `update` is how a replica with other weights gets it."""
        self._target = update
        self._replicas.set_target(version)

    async def _switch(self, update: WeightUpdate) -> None:
        """Update the whole fleet from its version to the update's. WeightSyncError when no replica reached it."""
        self.updating_to = update.version
        self._replicas.announce()
        before = self._replicas.target_version, self._target
        try:
            members = await self._members(update)
            slots, errors = await self._prepare(members, update)
            _check_failures(update, members, errors, may_load=update.kind in ("disk", "adapter"))
            self._replicas.is_switching = True
            self._replicas.announce()
            async with self._paused(slots):
                errors += await self._update(slots, update)
                _check_failures(update, members, errors, may_load=update.is_folder)
                self.canary.forget()
                self._set_target(update.version, update)  # before any of them generates a token
            try:
                await self.canary.run()
                differs = update.kind == "collective" and any(slot.weights is Weights.DIFFERS for slot in slots)
                if differs and not self._replicas.serving:  # only the trainer can send the weights a second time
                    text = f"no replica serves version {update.version}: {self._replicas.describe()}"
                    raise WeightSyncError(text, code="fleet.update_failed")
                await self._wait_until_served(update)
            except WeightSyncError:
                self._set_target(*before)  # no token of the version exists, and none may after this error
                raise
        finally:
            self.updating_to, self._replicas.is_switching = None, False
            self._replicas.announce()

    async def _supplement(self, update: WeightUpdate) -> None:
        """Give the served version to the replicas that lack it. Failures are logged."""
        if update.is_folder:
            self._set_target(update.version, update)  # the watch of each stale replica loads the folder
            return
        serving = {slot.incarnation for slot in self._replicas.serving}
        if serving.issuperset(update.replicas):
            return
        self.updating_to = update.version
        try:
            members = await self._members(update)
            slots, _ = await self._prepare(members, update)
            async with self._paused(slots):
                await self._update(slots, update)
            await self.canary.run()
            for slot in members:
                if slot.state is not State.SERVING and slot.weights is not Weights.DIFFERS:
                    slot.failed_version = update.version
        except WeightSyncError as error:
            log.warning("the replicas that lack a version continue without it: %s", error)
        finally:
            self.updating_to = None
            self._replicas.announce()

    async def _members(self, update: WeightUpdate) -> list[Slot]:
        """The replicas that take part, in order of rank for a collective."""
        lateness = self._replicas.lateness
        deadline_s = lateness.now_s + CHECK_TIMEOUT_INTERVALS * self._config.health_check_interval_s
        while any(slot.state is State.SUSPECT for slot in self._replicas.slots) and lateness.now_s < deadline_s:
            await self._replicas.wait_for_change(deadline_s - lateness.now_s)
        ready = [slot for slot in self._replicas.slots if slot.state in (State.SERVING, State.STALE)]
        if update.is_folder:
            return ready
        by_id = {slot.incarnation: slot for slot in ready}
        if missing := [name for name in update.replicas if name not in by_id]:
            text = f"version {update.version}: {', '.join(missing)} cannot take part: {self._replicas.describe()}"
            raise WeightSyncError(text, code="fleet.replica_lost")
        return [by_id[name] for name in update.replicas]

    @contextlib.asynccontextmanager
    async def _paused(self, slots: list[Slot], *, always_abort: bool = False) -> AsyncIterator[None]:
        """These replicas generate no token inside the block, except those that can exchange weights between steps."""
        must_pause = always_abort or self._config.pause_grace_period > 0
        paused = [(s, s.replica) for s in slots if s.replica and (must_pause or not s.replica.has_second_copy)]
        mode: PauseMode = "abort" if always_abort else self._mode
        try:
            await asyncio.gather(*(self._control(slot, replica.pause(mode), "pause") for slot, replica in paused))
            if self._config.pause_grace_period:
                await asyncio.sleep(self._config.pause_grace_period)
            yield
        finally:  # a connection made meanwhile is resumed by its first health check
            current = [(slot, replica) for slot, replica in paused if slot.replica is replica]
            await asyncio.gather(*(self._control(slot, replica.resume(), "resume") for slot, replica in current))

    async def _control(self, slot: Slot, call: Coroutine[Any, Any, None], what: str) -> None:
        try:
            async with self._replicas.lateness.timeout(PAUSE_TIMEOUT_S):
                await call
        except (ArealError, TimeoutError) as error:
            reason = f"did not {what}: {error or f'no answer in {PAUSE_TIMEOUT_S:g} s'}"
            await self._replicas.disconnect(slot, Event.REMOVED, reason)

    async def _update(self, slots: list[Slot], update: WeightUpdate) -> list[ArealError]:
        """All at the same time, as a collective requires. One error for each replica that failed."""
        if update.kind == "collective" and any(slot.replica is None for slot in slots):
            text = f"version {update.version} lost a replica: {self._replicas.describe()}"
            raise WeightSyncError(text, code="fleet.replica_lost")
        calls = [self._update_one(slot, update, rank=rank) for slot, rank in self._with_ranks(slots, update)]
        errors = await self._together(slots, calls, update)
        return [error for error in errors if error is not None]

    def _with_ranks(self, slots: list[Slot], update: WeightUpdate) -> list[tuple[Slot, int]]:
        """With the first rank of each in the update group."""
        ranks = {name: 1 + index * update.ranks_per_replica for index, name in enumerate(update.replicas)}
        return [(slot, ranks.get(slot.incarnation, 0)) for slot in slots]

    async def _together(
        self, slots: list[Slot], calls: Sequence[Coroutine[Any, Any, None]], update: WeightUpdate
    ) -> list[ArealError | None]:
        """Run one call for each replica at the same time. The error of each, in order."""
        tasks = [asyncio.create_task(call, name=f"update {slot.name}") for slot, call in zip(slots, calls, strict=True)]
        if not tasks:
            return []
        try:
            if update.kind == "collective":
                await self._leave_broken_group(slots, tasks)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        errors: list[ArealError | None] = []
        for slot, outcome in zip(slots, outcomes, strict=True):
            if isinstance(outcome, ArealError):
                log.warning("%s did not install version %d: %s", slot.name, update.version, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            errors.append(outcome)
        return errors

    async def _leave_broken_group(self, slots: list[Slot], tasks: list[asyncio.Task[None]]) -> None:
        """Wait until all tasks are done. When one fails, the others end their wait for it; one that does not is
        disconnected and connected again at once."""
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        await self._within_grace(asyncio.wait(tasks))
        waiting = [slot.replica for slot, task in zip(slots, tasks, strict=True) if not task.done() and slot.replica]
        if waiting:
            await asyncio.gather(*(self._within_grace(replica.abandon_update()) for replica in waiting))
            await self._within_grace(asyncio.wait(tasks))
        for slot, task in zip(slots, tasks, strict=True):
            if not task.done():
                await self._replicas.disconnect(slot, Event.REMOVED, "another replica of its update group failed")
                slot.wake.set()

    async def _within_grace(self, call: Coroutine[Any, Any, object]) -> None:
        """Await `call` for at most GROUP_GRACE_S, whether or not it succeeds."""
        with contextlib.suppress(ArealError, TimeoutError):
            async with self._replicas.lateness.timeout(GROUP_GRACE_S):
                await call

    async def _prepare(self, members: list[Slot], update: WeightUpdate) -> tuple[list[Slot], list[ArealError]]:
        """The part of an update during which replicas generate. Returns those that are ready, and the errors of the
        others, which keep their weights. Nothing happens here for a collective with a replica that has no second copy:
        it receives in the pause, and all members of a group receive at the same time."""
        if update.kind == "collective" and any(s.replica and not s.replica.has_second_copy for s in members):
            return members, []

        async def prepare(slot: Slot, rank: int) -> None:
            if slot.replica is None:
                raise ServerUnavailable(f"{slot.name} is {slot.state}: {slot.reason}", code="fleet.replica_lost")
            try:
                async with self._replicas.lateness.timeout(self._config.weight_update_timeout_s):
                    await slot.replica.prepare_weights(update, rank=rank)
            except TimeoutError as error:
                text = f"{slot.name}: no weights after {self._config.weight_update_timeout_s:g} s"
                raise ServerUnavailable(text, code="fleet.update_failed") from error

        calls = [prepare(slot, rank) for slot, rank in self._with_ranks(members, update)]
        errors = await self._together(members, calls, update)
        ready = [slot for slot, error in zip(members, errors, strict=True) if error is None]
        return ready, [error for error in errors if error is not None]

    async def _wait_until_served(self, update: WeightUpdate) -> None:
        """When all replicas died during the update, those that are restarted can still load a folder."""
        lateness = self._replicas.lateness
        deadline_s = lateness.now_s + self._config.weight_update_timeout_s
        while not self._replicas.serving:
            if lateness.now_s >= deadline_s:
                text = f"no replica installed version {update.version}: {self._replicas.describe()}"
                raise WeightSyncError(text, code="fleet.update_failed")
            await self._replicas.wait_for_change(deadline_s - lateness.now_s)

    async def _update_one(self, slot: Slot, update: WeightUpdate, *, rank: int) -> None:
        """Give one replica the weights of an update. On failure it is stale or absent, and the error is raised."""
        replica = slot.replica
        if replica is None:
            raise ServerUnavailable(f"{slot.name} is {slot.state}: {slot.reason}", code="fleet.replica_lost")
        self._replicas.apply(slot, Event.UPDATE_STARTED, f"installs version {update.version}")
        try:
            async with self._replicas.lateness.timeout(self._config.weight_update_timeout_s):
                await replica.update_weights(self._with_mirrors(update, slot), rank=rank, mode=self._mode)
        except RequestError as error:
            if update.kind == "collective" and not replica.has_second_copy:
                await self._failed_midway(slot, replica, str(error))
            elif slot.replica is replica:  # a folder is checked before the first copy
                self._replicas.apply(slot, Event.UPDATE_REFUSED, str(error))
            raise
        except (ServerUnavailable, TimeoutError) as error:
            reason = str(error) or f"no weights after {self._config.weight_update_timeout_s:g} s"
            await self._failed_midway(slot, replica, reason)
            raise ServerUnavailable(f"{slot.name}: {reason}", code="fleet.update_failed") from error
        if slot.replica is not replica:
            text = f"{slot.name} was replaced during the update to version {update.version}"
            raise ServerUnavailable(text, code="fleet.replica_lost")
        slot.version = update.version
        slot.weights = Weights.UNCHECKED if self._config.canary == "on" else Weights.VALID
        self._replicas.apply(slot, Event.UPDATE_DONE)

    def _with_mirrors(self, update: WeightUpdate, joiner: Slot) -> WeightUpdate:
        """An http update with the servers that have the version already, in random order: the trainer may be busy or
        away when a server joins late."""
        if update.kind != "http":
            return update
        others = [slot for slot in self._replicas.serving if slot is not joiner and slot.version == update.version]
        name = update.path.rpartition("/")[2]
        mirrors = [f"{slot.address}{PULLED_WEIGHTS}/{name}" for slot in random.sample(others, len(others))]
        return replace(update, mirrors=mirrors[:MAX_MIRRORS])

    async def _install_again(self, slots: list[Slot]) -> None:
        """Requests leave replicas that differ from the others. Those that differ for the first time get the folder of
        the target version again; an update without a folder must come from the trainer."""
        update = self._target
        again = [slot for slot in slots if slot.weights is Weights.DIFFERS]
        async with self._paused(slots, always_abort=True):
            if update is not None and update.is_folder:
                calls = (self._update_one(slot, update, rank=0) for slot in again)
                for outcome in await asyncio.gather(*calls, return_exceptions=True):
                    if isinstance(outcome, ArealError):
                        log.warning("a second update to version %d failed: %s", update.version, outcome)
                    elif isinstance(outcome, BaseException):
                        raise outcome

    async def _failed_midway(self, slot: Slot, replica: Replica, reason: str) -> None:
        """Its requests must not continue with a mixture of weights, so they are dropped with the connections."""
        slot.weights = reported(slot.weights, False)
        if slot.replica is replica:
            await self._replicas.disconnect(slot, Event.UPDATE_FAILED, f"weight update failed: {reason}")

    async def _update_stale(self, slot: Slot) -> None:
        """Give a stale replica the target weights without the trainer: only a folder can be read a second time."""
        update, before = self._target, slot.reason
        if slot.version == self._replicas.target_version:
            if slot.weights is Weights.UNCHECKED:
                await self.canary.run()
                return
            if slot.weights is Weights.REJECTED or (slot.weights is Weights.DIFFERS and self.canary.is_running):
                return
        is_replaced = self.updating_to not in (None, self._replicas.target_version)  # it gets the next version already
        if update is None or not update.is_folder or is_replaced:
            return
        try:
            await self._update_one(slot, update, rank=0)
        except ArealError as error:
            if slot.reason != before:  # otherwise the same error was logged before
                log.warning("%s could not be updated to version %d: %s", slot.name, update.version, error)
            if self._target is update and await _is_missing(update, error):
                self._target = None  # the trainer must publish the version again
        else:
            slot.wake.set()  # the target may have changed during the update
            await self.canary.run()


def _check_failures(update: WeightUpdate, members: list[Slot], errors: list[ArealError], *, may_load: bool) -> None:
    """WeightSyncError when all members failed. `may_load`: the servers that replace those that died can load the
    folder, so only refusals count."""
    may_load = may_load and not any(isinstance(error, RequestError) for error in errors)
    if errors and len(errors) == len(members) and not may_load:
        reasons = "; ".join(dict.fromkeys(str(error) for error in errors))
        text = f"no replica installed version {update.version}: {reasons}"
        raise WeightSyncError(text, code="fleet.update_failed")


async def _is_missing(update: WeightUpdate, error: ArealError) -> bool:
    """Whether the folder of an update that failed does not exist any more."""
    if update.kind == "http":
        return error.code == "weights.not_served"
    return isinstance(error, RequestError) and not await asyncio.to_thread(is_complete, Path(update.path))
