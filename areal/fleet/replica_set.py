"""Owns which replicas there are, how they are, and which of them may serve: those well and at the target version.

One task follows the registry: a name that appears gets a slot, one that vanishes loses it. One asks every replica how
busy it is, for whoever looks at the fleet: nothing else waits for that, nothing follows from it. One watch task per
slot waits for its interval or a wake-up (a failed request, the end of a publication); it takes a replica out when it
does not answer, takes it in when it does, and refits one that holds other weights than the target's. No watch waits
for another replica.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from pathlib import Path

from areal.api.config.rollout import InferenceEngineConfig
from areal.api.data import WeightUpdate
from areal.api.errors import ArealError, RequestError, ServerUnavailable
from areal.fleet.replica import Replica, ReplicaFactory, ReplicaLoad
from areal.fleet.request_check import RequestBounds, common_bounds
from areal.fleet.slot import ANY_VERSION, Slot, State
from areal.observe.log import get_logger
from areal.system.discovery import NameRegistry
from areal.system.durable import is_complete

log = get_logger(__name__)

CHECK_TIMEOUT_INTERVALS = 10
"""A health check may take so many of its intervals before the replica counts as hung: one more interval, for the next
check to begin, bounds how long requests and publications wait for a server that does not answer."""
_REGISTERED = re.compile(r"servers/(\d+)")


class ReplicaSet:
    """The slots of a fleet and the version they should serve."""

    def __init__(
        self,
        registry: NameRegistry,
        num_servers: int,
        config: InferenceEngineConfig,
        factory: ReplicaFactory,
        outlived: range,
    ) -> None:
        self._registry = registry
        self._config = config
        self._factory = factory
        self._num_servers = num_servers
        self._outlived = outlived
        """Versions from before the trainer went back. Whoever holds one when it is met did not get it from here, and so
        not since."""
        self.slots: list[Slot] = []
        """By index."""
        self.target_version = ANY_VERSION
        self.target: WeightUpdate | None = None
        """The publication that made the target version; None before the first."""
        self.has_started = False
        self.is_closed = False
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._watches: dict[Slot, asyncio.Task[None]] = {}

    @property
    def serving(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.state == "serving"]

    def bounds(self) -> RequestBounds:
        """What each replica that was ever well can take."""
        return common_bounds(slot.info for slot in self.slots if slot.info is not None)

    def describe(self) -> str:
        """Why each slot that does not serve does not."""
        if not self.slots:
            return "no server is registered"
        return "; ".join(f"{s.name} is {s.state}: {s.reason}" for s in self.slots if s.state != "serving")

    async def start(self) -> None:
        """Follow the registry; return when `num_servers` replicas are well. ServerUnavailable after setup_timeout."""
        self._tasks = [
            asyncio.create_task(self._follow(), name="follow the registry"),
            asyncio.create_task(self._read_loads(), name="read the load of the servers"),
        ]
        deadline = time.monotonic() + self._config.setup_timeout
        while (num_well := sum(slot.is_well for slot in self.slots)) < self._num_servers:
            if time.monotonic() >= deadline:
                raise ServerUnavailable(
                    f"waited {self._config.setup_timeout:g} s (rollout.setup_timeout) for {self._num_servers} "
                    f"inference servers, {num_well} answer: {self.describe()}"
                )
            await self.wait_for_change(deadline - time.monotonic())
        self.has_started = True
        if self.target_version == ANY_VERSION:
            known = [slot for slot in self.slots if slot.is_well and not (slot.is_outlived or slot.is_unproven)]
            held = [slot.version for slot in known]
            self.set_target(max(held, default=ANY_VERSION), None)

    async def close(self) -> None:
        self.is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in list(self._watches):
            await self._drop(slot, "the fleet is closed")
        self.announce()

    async def wait_for_change(self, limit_s: float | None) -> None:
        """Until some slot changes its state or the target changes, or `limit_s` is over."""
        changed = self._changed
        try:
            async with asyncio.timeout(limit_s):
                await changed.wait()
        except TimeoutError:
            pass

    def announce(self) -> None:
        """Let all who wait for a change look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def set_target(self, version: int, update: WeightUpdate | None) -> None:
        """From now on replicas serve at `version`, and `update` is how others get there."""
        if version < self.target_version:
            older = self._outlived or range(version + 1, 0)
            self._outlived = range(min(older.start, version + 1), max(older.stop, self.target_version + 1))
            for slot in self.slots:
                slot.is_outlived = slot.is_outlived or slot.version > version
        self.target_version = version
        self.target = update
        for slot in self.slots:
            if slot.state in ("stale", "serving"):
                self._settle(slot, slot.version)
                slot.wake.set()
        self.announce()

    def move(self, slot: Slot, state: State, reason: str = "") -> None:
        """Change a slot's state and tell whoever waits for a change."""
        if (slot.state, slot.reason) != (state, reason):
            was_well = slot.is_well
            slot.state = state
            level = logging.DEBUG if was_well and slot.is_well else logging.INFO
            log.log(level, "%s is %s%s", slot.name, state, f": {reason}" if reason else "")
        slot.state = state
        slot.reason = reason
        slot.changes += 1
        self.announce()

    def suspect(self, slot: Slot, replica: Replica, reason: str) -> None:
        """A request to `replica` failed: nothing more is sent there until it has passed a check."""
        if slot.replica is replica and slot.state in ("stale", "serving"):
            slot.num_failures += 1
            self.move(slot, "suspect", reason)
            slot.wake.set()

    async def take_out(self, slot: Slot, reason: str) -> None:
        """Drop the connections to a replica: its running requests fail here and go on elsewhere."""
        replica, slot.replica = slot.replica, None
        slot.load = None
        slot.registration = None  # a server that still lives under this name is met anew at the next look
        self.move(slot, "absent", reason)
        if replica is not None:
            await replica.close()

    async def update(self, slot: Slot, update: WeightUpdate, *, rank: int) -> None:
        """Bring one replica to the update's weights. On failure it is stale or out, and the error is raised."""
        replica = slot.replica
        if replica is None:
            raise ServerUnavailable(f"{slot.name} is {slot.state}: {slot.reason}")
        before = slot.version
        slot.prefixes.clear()  # whatever comes of it, nobody counts on what was cached before
        self.move(slot, "updating", f"takes in version {update.version}")
        try:
            async with asyncio.timeout(self._config.weight_update_timeout_s):
                await replica.update_weights(update, rank=rank)
        except RequestError as error:
            if update.kind == "disk":  # a folder is checked before the first copy
                if slot.replica is replica:
                    self._settle(slot, before, refusal=str(error))
                raise
            await self._lost_midway(slot, replica, str(error))
            raise
        except (ServerUnavailable, TimeoutError) as error:
            reason = str(error) or f"no weights after {self._config.weight_update_timeout_s:g} s"
            await self._lost_midway(slot, replica, reason)
            raise ServerUnavailable(f"{slot.name}: {reason}") from error
        if slot.replica is not replica:
            raise ServerUnavailable(f"{slot.name} was replaced while it took in version {update.version}")
        slot.half_updated = slot.is_outlived = slot.is_unproven = False
        self._settle(slot, update.version)

    async def _lost_midway(self, slot: Slot, replica: Replica, reason: str) -> None:
        """Its requests must not go on with a mixture of weights, so they are dropped with the connections."""
        slot.half_updated = True
        if slot.replica is replica:
            await self.take_out(slot, f"weight update failed: {reason}")

    def _settle(self, slot: Slot, version: int, refusal: str = "") -> None:
        slot.version = version
        if slot.half_updated:
            self.move(slot, "stale", refusal or "an update failed midway, its weights are a mixture")
        elif version == ANY_VERSION:
            self.move(slot, "stale", "waits for its first weights")
        elif slot.is_unproven:
            self.move(slot, "stale", "ran before this run, and waits for the weights of this run")
        elif self.target_version == ANY_VERSION:
            self.move(slot, "stale", "waits for the other replicas to come in")
        elif slot.is_outlived:
            self.move(slot, "stale", f"holds version {version} from before the trainer went back")
        elif version == self.target_version:
            self.move(slot, "serving")
        else:
            self.move(slot, "stale", refusal or f"holds version {version} while {self.target_version} is current")

    async def _follow(self) -> None:
        while True:
            try:
                await self._read_registry()
            except Exception:  # a registry that cannot be read now can be later
                log.exception("reading the registry of servers failed")
            await asyncio.sleep(self._config.health_check_interval_s)

    async def _read_registry(self) -> None:
        """Give each registered server a slot, and take away the slots of those that have left."""
        listed = await asyncio.to_thread(self._registry.list, "servers")
        found = {int(match[1]): value for name, value in listed.items() if (match := _REGISTERED.fullmatch(name))}
        for slot in [slot for slot in self.slots if slot.index not in found]:
            await self._drop(slot, "its name is no longer registered")
        known = {slot.index: slot for slot in self.slots}
        for index, registration in found.items():
            slot = known.get(index) or self._add(index)
            slot.registered = registration

    def _add(self, index: int) -> Slot:
        slot = Slot(index)
        self.slots = sorted([*self.slots, slot], key=lambda slot: slot.index)
        self._watches[slot] = asyncio.create_task(self._watch(slot), name=f"watch {slot.name}")
        return slot

    async def _drop(self, slot: Slot, reason: str) -> None:
        """Forget a replica: from here on its requests go on elsewhere, and that is no failure."""
        self.slots = [other for other in self.slots if other is not slot]
        self._watches[slot].cancel()
        await asyncio.gather(self._watches[slot], return_exceptions=True)
        await self.take_out(slot, reason)
        del self._watches[slot]

    async def _watch(self, slot: Slot) -> None:
        while True:
            slot.wake.clear()
            try:
                await self._look(slot)
            except Exception:  # one failed look must not end the watch
                log.exception("looking after %s failed", slot.name)
            try:
                async with asyncio.timeout(self._config.health_check_interval_s):
                    await slot.wake.wait()
            except TimeoutError:
                pass

    async def _look(self, slot: Slot) -> None:
        """One health check and what follows from it."""
        if slot.state != "updating":
            await self._meet(slot, slot.registered)
        replica, changes = slot.replica, slot.changes
        if replica is None:
            return
        fresh = slot.state in ("absent", "suspect")
        limit = CHECK_TIMEOUT_INTERVALS * self._config.health_check_interval_s
        try:
            async with asyncio.timeout(limit):
                info = await replica.info()
                if slot.state == "absent" and slot.changes == changes:
                    await replica.resume()  # whoever paused it may be gone; a suspect may have been paused by us
        except (ArealError, TimeoutError) as error:
            if slot.replica is replica:
                await self.take_out(slot, str(error) or f"no answer to a health check in {limit:g} s")
            return
        if slot.info is None:
            slot.is_outlived = info.version in self._outlived
        slot.info = info
        if slot.changes != changes or slot.state == "updating":
            return
        if info.version != slot.version:
            slot.prefixes.clear()
        was_half_updated = slot.half_updated
        if info.weights_whole is not None:
            slot.half_updated = not info.weights_whole
        if fresh or info.version != slot.version or slot.half_updated != was_half_updated:
            self._settle(slot, info.version)
        if slot.state == "stale":
            await self._refit(slot)

    async def _meet(self, slot: Slot, registration: str) -> None:
        """A new registration is a new server process."""
        if registration == slot.registration:
            return
        if slot.replica is not None:
            await self.take_out(slot, "replaced by a new registration")
        told = json.loads(registration)
        slot.address = str(told["address"])
        slot.is_unproven = told.get("pid", 0) is None  # a server of ours begins with the weights of its run
        slot.replica = self._factory(slot.name, slot.address)
        slot.incarnation = f"{slot.name}@{uuid.uuid4().hex[:8]}"
        slot.prefixes.clear()
        slot.registration = registration
        if registration != slot.last_registration:
            slot.info = None
            slot.half_updated = slot.is_outlived = False  # a new process loads its weights whole
            slot.given_up_version = None
        slot.last_registration = registration

    async def _read_loads(self) -> None:
        while True:
            await asyncio.gather(*(self._read_load(slot) for slot in self.slots))
            await asyncio.sleep(self._config.health_check_interval_s)

    async def _read_load(self, slot: Slot) -> None:
        replica = slot.replica
        if replica is None:
            return
        load: ReplicaLoad | None = None
        try:
            async with asyncio.timeout(self._config.health_check_interval_s):
                load = await replica.load()
        except (ArealError, TimeoutError) as error:
            log.debug("%s does not tell its load: %s", slot.name, error)
        except Exception:  # one answer that cannot be read must not end the reading
            log.exception("reading the load of %s failed", slot.name)
        if slot.replica is replica:
            slot.load = load

    async def _refit(self, slot: Slot) -> None:
        """Bring a stale replica to the target, where that does not take the trainer."""
        update, before = self.target, slot.reason
        if update is None or update.kind != "disk":
            return  # the next publication includes it: only a folder can be read twice
        try:
            await self.update(slot, update, rank=0)
        except ArealError as error:
            if slot.reason != before:  # else it was told when it was tried before
                log.warning("%s could not be brought to version %d: %s", slot.name, update.version, error)
            whole = not isinstance(error, RequestError) or await asyncio.to_thread(is_complete, Path(update.path))
            if not whole and self.target is update:
                self.target = None  # somebody has deleted it: the trainer is to publish the version again
        else:
            slot.wake.set()  # the target may have moved on meanwhile: look again at once
