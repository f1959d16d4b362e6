"""The replicas of a fleet: which exist, whether they are healthy, and which serve the target version.

One task follows the registry: it adds a slot for each new name and drops the slot of a removed one. One task reads the
load of every replica, for status reports only. One watch task per slot waits for its interval, or until it is woken by
a failed request or a weight update; then it runs a health check and lets the weight updater update a stale
replica. No watch waits for another replica. `areal.fleet.replica_set` has the transitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any

from areal.api.config.rollout import InferenceEngineConfig
from areal.api.errors import ArealError, RequestError, ServerUnavailable
from areal.api.metrics import gather_or_cancel
from areal.fleet.replica import NO_VERSION, Replica, ReplicaInfo, ReplicaLoad, RequestLimits
from areal.fleet.routing import Router
from areal.observe.log import get_logger
from areal.system.discovery import NameRegistry
from areal.system.stacks import place_of_thread

# ----------------------------------------------------------------------------------------------------------------------
# Measures how long an event loop was blocked, so that time limits of others do not include that time.

INTERVAL_S = 0.25
MIN_LATE_S = 0.05
"""Less is the normal latency of a busy loop."""
REPORT_S = 3.0
"""The loop is reported as blocked when it was late by at least this time."""
_LOOK_S = 1.0


class LoopLateness:
    """A timer of one loop that finds out by how much it is late. It runs from `start` to `close`.

    Before `start` nothing is discounted. A thread looks where the loop is while it is late: later nothing shows that.
    """

    def __init__(self, report: Callable[[float, str], None]) -> None:
        """`report(seconds, place)` is called after the loop was blocked for REPORT_S or more. place: file, line and
        function that the loop was in; empty = unknown."""
        self._report = report
        self._late_s = self._due_s = self._ticked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._place = ""
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the timer in the running loop."""
        self._wait()
        look = threading.Thread(target=self._look, args=(threading.get_ident(),), name="loop lateness", daemon=True)
        look.start()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticked_s = time.monotonic()
        self._due_s = loop.time() + INTERVAL_S
        self._timer = loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        late_s = self.total_s - self._late_s
        self._late_s += late_s
        place, self._place = self._place, ""
        self._wait()
        if late_s >= REPORT_S:
            self._report(late_s, place)

    def _look(self, thread_id: int) -> None:
        while not self._closed.wait(_LOOK_S):
            if not self._place and time.monotonic() - self._ticked_s > INTERVAL_S + _LOOK_S:
                self._place = place_of_thread(thread_id)

    @property
    def total_s(self) -> float:
        """Seconds for which the loop was blocked, up to now."""
        return self._total_at(asyncio.get_running_loop().time())

    def _total_at(self, time_s: float) -> float:
        late_s = 0.0 if self._timer is None else time_s - self._due_s
        return self._late_s + (late_s if late_s >= MIN_LATE_S else 0.0)

    @property
    def now_s(self) -> float:
        """The time of the loop without the time for which it was blocked: a clock for deadlines."""
        time_s = asyncio.get_running_loop().time()
        return time_s - self._total_at(time_s)

    def timeout(self, limit_s: float) -> AbstractAsyncContextManager[None]:
        """A timeout that leaves out the time for which the loop was blocked: what arrived meanwhile is read."""
        return _Limit(self, limit_s)

    def close(self) -> None:
        self._closed.set()
        if self._timer is not None:
            self._timer.cancel()


class _Limit(AbstractAsyncContextManager[None]):
    """The time limit of one `async with` block. Not a generator, because each request pays for it."""

    def __init__(self, lateness: LoopLateness, limit_s: float) -> None:
        self._lateness, self._limit_s = lateness, limit_s
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._deadline_s = self._lateness.now_s + self._limit_s
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._expire)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._timer.cancel()  # and drop `_expire`: a reference cycle would keep the task until a collection
        return await self._scope.__aexit__(kind, error, trace)

    def _expire(self) -> None:
        loop, left_s = asyncio.get_running_loop(), self._deadline_s - self._lateness.now_s
        if left_s > MIN_LATE_S:
            self._timer = loop.call_later(left_s, self._expire)
        else:
            self._scope.reschedule(loop.time())


# ----------------------------------------------------------------------------------------------------------------------
# The fleet's record of one replica: its states, the events that change them, and what is known about its weights.
#
# `areal.fleet.replica_set` changes it. Nothing here does I/O.


class State(StrEnum):
    """Only a replica in state SERVING gets requests."""

    ABSENT = "absent"
    """No server is registered, or it does not answer."""
    SUSPECT = "suspect"
    """A request failed: a health check is due."""
    STALE = "stale"
    """Healthy, but its weights are not those of the target version."""
    UPDATING = "updating"
    """A weight update is running."""
    SERVING = "serving"


class Event(StrEnum):
    """What happens to a replica."""

    CHECK_PASSED = "a health check passed and reports news"
    CHECK_FAILED = "a health check failed"
    REQUEST_FAILED = "a request failed"
    TARGET_CHANGED = "the target version changed"
    UPDATE_STARTED = "a weight update started"
    UPDATE_DONE = "a weight update completed"
    UPDATE_REFUSED = "the server refused a weight update and kept its weights"
    UPDATE_FAILED = "a weight update failed after it may have changed weights"
    REMOVED = "the fleet drops the server"


class Action(StrEnum):
    """What the replica set does together with a transition."""

    DISCONNECT = "drop the connections: running requests continue on other replicas"
    FORGET_PREFIXES = "forget which prompts its cache may hold"
    COUNT_FAILURE = "count a failure"
    CHECK_NOW = "run the next health check at once"


@dataclass(frozen=True, slots=True)
class Transition:
    """`to` None: SERVING when the weights are those of the target version, STALE otherwise."""

    to: State | None
    actions: tuple[Action, ...] = ()


_ANSWERING = (State.STALE, State.SERVING)
_INSTALLING = (State.UPDATING, *_ANSWERING)  # a second update of the same replica may have ended first
_COMPARE = Transition(None)
_DROP = Transition(State.ABSENT, (Action.DISCONNECT,))
_RULES: list[tuple[Event, Iterable[State], Transition]] = [
    (Event.CHECK_PASSED, (State.ABSENT, State.SUSPECT, *_ANSWERING), _COMPARE),
    (Event.CHECK_FAILED, State, _DROP),
    (Event.REQUEST_FAILED, _ANSWERING, Transition(State.SUSPECT, (Action.COUNT_FAILURE, Action.CHECK_NOW))),
    (Event.TARGET_CHANGED, _ANSWERING, Transition(None, (Action.CHECK_NOW,))),
    (Event.UPDATE_STARTED, State, Transition(State.UPDATING, (Action.FORGET_PREFIXES,))),
    (Event.UPDATE_DONE, _INSTALLING, _COMPARE),
    (Event.UPDATE_REFUSED, _INSTALLING, _COMPARE),
    (Event.UPDATE_FAILED, State, _DROP),
    (Event.REMOVED, State, _DROP),
]
TRANSITIONS: dict[tuple[State, Event], Transition] = {
    (state, event): transition for event, states, transition in _RULES for state in states
}
"""Every pair that changes something. Other events are ignored: they come later than the state that they concern."""


class Weights(StrEnum):
    """Whether a server's version number identifies its weights. Only VALID weights can serve."""

    VALID = "valid"
    INCOMPLETE = "an update failed midway, its weights are a mixture"
    ABANDONED = "its version is from before the trainer recovered: the same number will mean other weights"
    UNKNOWN = "it was started before this run and waits for the weights of this run"
    UNCHECKED = "its answer to the canary probe is not compared yet"
    DIFFERS = "its answer to the canary probe differs from that of the others: it is updated again"
    PINNED = "it keeps its version for an evaluation"
    REJECTED = "its answer to the canary probe differs also after a second update: it must be restarted"


def reported(weights: Weights, is_complete: bool | None) -> Weights:
    """`weights` after a server reported whether its weights are complete; None = it cannot tell."""
    if weights is Weights.VALID and is_complete is False:
        return Weights.INCOMPLETE
    if weights is Weights.INCOMPLETE and is_complete:
        return Weights.VALID
    return weights


def after_target_decreased(weights: Weights, version: int, target: int) -> Weights:
    """`weights` of a server after the trainer went back to version `target`."""
    return Weights.ABANDONED if weights is not Weights.UNKNOWN and version > target else weights


def obstacle(weights: Weights, version: int, target: int) -> str:
    """Why a server with these weights cannot serve version `target`; empty when it can."""
    if weights is not Weights.VALID:
        return str(weights)
    if version == NO_VERSION:
        return "waits for its first weights"
    if target == NO_VERSION:
        return "waits for the other replicas"
    return "" if version == target else f"has version {version} while {target} is current"


class Slot:
    """The place of one replica in the fleet. It is kept while servers under its name are replaced."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"server-{index}"
        self.registered = ""
        """The current value in the registry."""
        self.registration: str | None = None
        """The value that the connection was made from; None without a connection."""
        self.last_registration: str | None = None
        self.address = ""
        self.replica: Replica | None = None
        self.incarnation = ""
        """Changes with each new connection to a server."""
        self.state = State.ABSENT
        self.reason = "not registered"
        self.version = NO_VERSION
        self.cleared_at: int | None = None
        """The last version at which it lost all older keys and values; None = not known: no update by this fleet."""
        self.weights = Weights.VALID
        self.failed_version: int | None = None
        """An update to this version failed while other replicas served it: the next attempt is the next version."""
        self.num_differences = 0
        """Canary probes in sequence whose answer differed."""
        self.num_trainer_differences = 0
        """Comparisons with the trainer in sequence in which its answer differed."""
        self.info: ReplicaInfo | None = None
        """Facts of the last health check that passed."""
        self.load: ReplicaLoad | None = None
        """The last report; None when the server does not answer."""
        self.num_running = 0
        self.num_failures = 0
        self.num_invalid = 0
        """Answers with numbers that no trainer can use."""
        self.pulled_bytes = self.failed_deltas = 0
        """As in `Replica`, over earlier connections."""
        self.wake = asyncio.Event()
        """Set to run the next health check at once."""
        self.changes = 0
        """Number of changes of state: the result of an older health check is ignored."""

    @property
    def cached_since(self) -> int:
        """The oldest version of which it may have keys and values."""
        return min(self.version, 0) if self.cleared_at is None else self.cleared_at

    @property
    def is_healthy(self) -> bool:
        """It answers, whatever weights it has."""
        return self.state in (State.STALE, State.UPDATING, State.SERVING)

    def status(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "id": self.incarnation,
            "address": self.address,
            "state": self.state.value,
            "healthy": self.is_healthy,
            "reason": self.reason,
            "version": self.version,
            "weights": self.weights.name.lower(),
            "running": self.num_running,
            "failures": self.num_failures,
            "invalid_answers": self.num_invalid,
            "pulled_bytes": self.pulled_bytes + (self.replica.pulled_bytes if self.replica else 0),
            "failed_deltas": self.failed_deltas + (self.replica.failed_deltas if self.replica else 0),
            "load": None if self.load is None else dataclasses.asdict(self.load),
        }


log = get_logger(__name__)

CHECK_TIMEOUT_INTERVALS = 10
"""Health-check timeout, in intervals. Requests and weight updates wait for a hung server at most this long plus one
interval until the next check."""
RELEASED_PER_TURN = 64
"""Requests that one turn of the event loop sends after a weight update; each costs about 0.1 ms."""
_FIRST_POLL_S = 0.05
"""First pause between two readings of the registry at the start of a run."""
_REGISTERED = re.compile(r"servers/(\d+)")


async def _no_update(slot: Slot) -> None:
    """A fleet whose weights nobody updates."""


async def _unload_adapter(replica: Replica, name: str) -> None:
    with contextlib.suppress(RequestError, ServerUnavailable):  # a restarted server never had it
        await replica.unload_adapter(name)


def _report_block(seconds: float, place: str) -> None:
    where = f" in {place}" if place else ""
    log.warning("the event loop was blocked for %.1f s%s: nothing was read or sent meanwhile", seconds, where)


class ReplicaSet:
    """The slots of a fleet and the version that they should serve."""

    def __init__(
        self,
        registry: NameRegistry,
        num_servers: int,
        config: InferenceEngineConfig,
        factory: Callable[[str, str], Replica],
        abandoned: range,
    ) -> None:
        self._registry = registry
        self._config = config
        self._factory = factory
        self._num_servers = num_servers
        self.router: Router[Slot] = Router(config.schedule_policy)
        """It always has exactly the slots that serve."""
        self._abandoned = abandoned
        """Versions from before the trainer recovered. A server that has one when it is first met got it before that."""
        self.highest_version = abandoned.stop - 1
        """No replica can have generated a token of a higher version."""
        self.slots: list[Slot] = []
        """The slots by index."""
        self.target_version = NO_VERSION
        self.update_stale: Callable[[Slot], Awaitable[None]] = _no_update
        """Called after a health check of a stale replica. Set by the weight updater."""
        self.has_started = False
        self.is_closed = False
        self._changed = asyncio.Event()
        self._senders = deque[asyncio.Future[None]]()
        """Requests that wait until they find a replica, or the fleet is closed."""
        self._releases_more = False
        """The next turn of the loop wakes more of them."""
        self.is_switching = False
        """The whole fleet changes its version: no request may be sent meanwhile. Set by the weight updater."""
        self._limits: RequestLimits | None = None
        self.lateness = LoopLateness(_report_block)
        """No replica fails because the loop of this process was blocked: its limits do not include that time."""
        self.owns_adapters = False
        """Nobody else loads adapters: those of an earlier process of this kind are unloaded."""
        self._adapters: dict[str, str] = {}
        """Name -> folder of the LoRA adapters that every replica serves besides its model."""
        self._unloaded: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._watches: dict[Slot, asyncio.Task[None]] = {}

    @property
    def serving(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.state is State.SERVING]

    @property
    def limits(self) -> RequestLimits:
        """The smallest limits of the replicas that ever passed a health check, of which there must be one."""
        if self._limits is None:
            infos = [slot.info for slot in self.slots if slot.info is not None]
            self._limits = RequestLimits(
                vocab_size=min(info.vocab_size for info in infos),
                context_length=min(info.context_length for info in infos),
            )
        return self._limits

    def describe(self) -> str:
        """The state and reason of each slot that does not serve."""
        if not self.slots:
            return "no server is registered"
        return "; ".join(f"{s.name} is {s.state}: {s.reason}" for s in self.slots if s.state is not State.SERVING)

    async def start(self) -> None:
        """Wait until `num_servers` replicas are healthy.

        ServerUnavailable after rollout.setup_timeout, which begins once all are registered, as in AReaL: until then
        they load, and launcher.ready_timeout_s limits that.
        """
        self.lateness.start()
        self._tasks = [
            asyncio.create_task(self._follow_registry(), name="follow the registry"),
            asyncio.create_task(self._read_loads(), name="read the load of the servers"),
        ]
        deadline_s = self.lateness.now_s + self._config.setup_timeout
        while (num_healthy := sum(slot.is_healthy for slot in self.slots)) < self._num_servers:
            if len(self.slots) < self._num_servers:
                deadline_s = self.lateness.now_s + self._config.setup_timeout
            if self.lateness.now_s >= deadline_s:
                raise ServerUnavailable(
                    f"waited {self._config.setup_timeout:g} s (rollout.setup_timeout) for {self._num_servers} "
                    f"inference servers, {num_healthy} answer: {self.describe()}",
                    code="fleet.not_ready",
                )
            await self.wait_for_change(deadline_s - self.lateness.now_s)
        self.has_started = True
        if self.target_version == NO_VERSION:
            trusted = (Weights.VALID, Weights.INCOMPLETE)
            versions = [slot.version for slot in self.slots if slot.is_healthy and slot.weights in trusted]
            self.set_target(max(versions, default=NO_VERSION))

    async def close(self) -> None:
        self.is_closed = True
        self.lateness.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in list(self._watches):
            await self._drop(slot, "the fleet is closed")
        self.announce()

    async def wait_for_change(self, limit_s: float | None) -> None:
        """Wait until a slot changes its state, the target changes, or `limit_s` seconds are over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._changed.wait()

    async def wait_to_send(self, limit_s: float) -> None:
        """Wait until a replica serves and no update switches the fleet, it is closed, or `limit_s` seconds are over.

        Thousands of requests wait during a weight update; the many changes of state meanwhile do not wake them, and at
        its end each turn of the loop wakes some of them, in their order.
        """
        if self._may_send and not self._senders:
            return
        released = asyncio.get_running_loop().create_future()
        self._senders.append(released)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await released

    @property
    def _may_send(self) -> bool:
        return self.is_closed or (len(self.router.serving) > 0 and not self.is_switching)

    def _release_senders(self) -> None:
        self._releases_more = False
        num_released = 0
        while self._senders and num_released < RELEASED_PER_TURN and self._may_send:
            released = self._senders.popleft()
            if not released.done():  # its wait may be over
                released.set_result(None)
                num_released += 1
        if self._senders and self._may_send:
            self._releases_more = True
            asyncio.get_running_loop().call_soon(self._release_senders)

    def announce(self) -> None:
        """Wake every waiter of `wait_for_change`, and those of `wait_to_send` if a request can be sent."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._senders and not self._releases_more:
            self._release_senders()

    def set_target(self, version: int) -> None:
        """Let replicas serve `version` from now on."""
        if version < self.target_version:
            before = self._abandoned or range(version + 1, 0)
            self._abandoned = range(min(before.start, version + 1), max(before.stop, self.target_version + 1))
            for slot in self.slots:
                slot.weights = after_target_decreased(slot.weights, slot.version, version)
        self.target_version = version
        self.highest_version = max(self.highest_version, version)
        for slot in self.slots:
            self.apply(slot, Event.TARGET_CHANGED)
        self.announce()

    def apply(self, slot: Slot, event: Event, reason: str = "") -> Replica | None:
        """Change a slot as the table says. The result is the client of a dropped connection, which the caller closes.

        `reason` replaces that of the weights, unless the new state is SERVING.
        """
        transition = TRANSITIONS.get((slot.state, event))
        if transition is None:
            return None
        state = transition.to
        if state is None:
            unfit = obstacle(slot.weights, slot.version, self.target_version)
            state, reason = (State.STALE, reason or unfit) if unfit else (State.SERVING, "")
        dropped: Replica | None = None
        for action in transition.actions:
            match action:
                case Action.DISCONNECT:
                    dropped, slot.replica = slot.replica, None
                    if dropped is not None:
                        slot.pulled_bytes += dropped.pulled_bytes
                        slot.failed_deltas += dropped.failed_deltas
                    slot.load = None
                    slot.registration = None  # a server that still runs under this name gets a new connection
                case Action.FORGET_PREFIXES:
                    self.router.prefixes.forget(slot.name)
                case Action.COUNT_FAILURE:
                    slot.num_failures += 1
                case Action.CHECK_NOW:
                    slot.wake.set()
        if (slot.state, slot.reason) != (state, reason):
            was_healthy, slot.state, slot.reason = slot.is_healthy, state, reason
            if state is State.SERVING:
                self.router.serving.add(slot)
            else:
                self.router.serving.remove(slot)
            level = logging.DEBUG if was_healthy and slot.is_healthy else logging.INFO
            log.log(level, "%s is %s%s", slot.name, state, f": {reason}" if reason else "")
        slot.changes += 1
        self.announce()
        return dropped

    def request_failed(self, slot: Slot, replica: Replica, reason: str) -> None:
        """Send nothing more to `replica` until it has passed a health check."""
        if slot.replica is replica:
            self.apply(slot, Event.REQUEST_FAILED, reason)

    async def disconnect(self, slot: Slot, event: Event, reason: str) -> None:
        """Drop the connections to a replica: its running requests fail here and continue on other replicas."""
        dropped = self.apply(slot, event, reason)
        if dropped is not None:
            await dropped.close()

    async def load_adapter(self, name: str, folder: str) -> None:
        """Let every replica serve the LoRA adapter in `folder`, also one that joins before `unload_adapter`.

        A name is never used for another folder. RequestError when a replica refuses it: then none serves it.
        """
        if name in self._adapters:
            raise RequestError(f"adapter {name!r} is loaded already", code="adapter.loaded")
        self._adapters[name] = folder
        self._unloaded.discard(name)
        try:
            await gather_or_cancel([self._load_adapter(slot, name) for slot in self.slots])
        except RequestError:
            await self.unload_adapter(name)
            raise

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests with an adapter; returns when the last one has ended."""
        del self._adapters[name]
        self._unloaded.add(name)
        replicas = [slot.replica for slot in self.slots if slot.replica is not None]
        await asyncio.gather(*(_unload_adapter(replica, name) for replica in replicas))

    async def _load_adapter(self, slot: Slot, name: str) -> None:
        """A replica that does not answer loads it when it answers again, before it serves."""
        replica = slot.replica
        try:
            if replica is not None and name in self._adapters:
                await replica.load_adapter(name, self._adapters[name])
        except RequestError as error:
            if "already" not in str(error):  # loaded by an earlier controller, or by a health check meanwhile
                raise
        except ServerUnavailable as error:
            if replica is not None:
                self.request_failed(slot, replica, str(error))

    async def _match_adapters(self, slot: Slot, replica: Replica, info: ReplicaInfo) -> None:
        """Load and unload adapters of a replica that has restarted, or did not answer before."""
        if info.adapters is None and slot.state is not State.ABSENT:
            return
        served = info.adapters or frozenset()
        for name in [name for name in self._adapters if name not in served]:
            try:
                await self._load_adapter(slot, name)
            except RequestError as error:
                log.warning("%s does not serve adapter %s: %s", slot.name, name, error)
        foreign = served - self._adapters.keys() if self.owns_adapters else self._unloaded & served
        for name in foreign:  # waits for its requests, and the health check does not
            task = asyncio.create_task(_unload_adapter(replica, name), name="unload an adapter")
            self._tasks.append(task)
            task.add_done_callback(self._tasks.remove)

    # The tasks

    async def _follow_registry(self) -> None:
        start_s, interval_s = self.lateness.now_s, self._config.health_check_interval_s
        while True:
            try:
                await self._read_registry()
            except Exception:  # a registry that cannot be read now can be read later
                log.exception("reading the registry of servers failed")
            # Until the first server is found, a pause delays the start of the run by at most a tenth of its duration.
            waited_s = self.lateness.now_s - start_s
            await asyncio.sleep(interval_s if self.slots else min(interval_s, max(_FIRST_POLL_S, waited_s / 10)))

    async def _read_registry(self) -> None:
        """Add a slot for each new server, and drop the slots of servers that are no longer registered."""
        listed = await asyncio.to_thread(self._registry.list, "servers")
        registered = {int(match[1]): value for name, value in listed.items() if (match := _REGISTERED.fullmatch(name))}
        for slot in [slot for slot in self.slots if slot.index not in registered]:
            await self._drop(slot, "its name is no longer registered")
        known = {slot.index: slot for slot in self.slots}
        for index, registration in registered.items():
            slot = known.get(index)
            if slot is None:
                slot = Slot(index)
                self.slots = sorted([*self.slots, slot], key=lambda slot: slot.index)
                self._watches[slot] = asyncio.create_task(self._watch(slot), name=f"watch {slot.name}")
            slot.registered = registration

    async def _drop(self, slot: Slot, reason: str) -> None:
        """Remove a slot. Its requests continue on other replicas and do not count as failed."""
        self.slots = [other for other in self.slots if other is not slot]
        self._limits = None
        self._watches[slot].cancel()
        await asyncio.gather(self._watches[slot], return_exceptions=True)
        await self.disconnect(slot, Event.REMOVED, reason)
        del self._watches[slot]

    async def _watch(self, slot: Slot) -> None:
        while True:
            slot.wake.clear()
            try:
                await self._check(slot)
            except Exception:  # one failed check must not end the watch
                log.exception("checking %s failed", slot.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.health_check_interval_s):
                    await slot.wake.wait()

    async def _check(self, slot: Slot) -> None:
        if slot.state is not State.UPDATING:
            await self._connect(slot)
        replica, changes = slot.replica, slot.changes
        if replica is None:
            return
        is_news = slot.state in (State.ABSENT, State.SUSPECT)
        limit_s = CHECK_TIMEOUT_INTERVALS * self._config.health_check_interval_s
        try:
            async with self.lateness.timeout(limit_s):
                info = await replica.info()
                if slot.state is State.ABSENT and slot.changes == changes:
                    await replica.resume()  # an earlier controller may have paused it
        except (ArealError, TimeoutError) as error:
            if slot.replica is replica:
                await self.disconnect(
                    slot, Event.CHECK_FAILED, str(error) or f"no answer to a health check in {limit_s:g} s"
                )
            return
        if self._adapters or self._unloaded:
            await self._match_adapters(slot, replica, info)
        if slot.info is None and slot.weights is Weights.VALID and info.version in self._abandoned:
            slot.weights = Weights.ABANDONED
        if info != slot.info:
            slot.info, self._limits = info, None
        if slot.changes != changes or slot.state is State.UPDATING:
            return
        weights = reported(slot.weights, info.weights_whole)
        if info.version != slot.version:
            self.router.prefixes.forget(slot.name)
        is_news = is_news or (info.version, weights) != (slot.version, slot.weights)
        slot.version, slot.weights = info.version, weights
        if is_news:
            self.apply(slot, Event.CHECK_PASSED)
        if slot.state is State.STALE:
            await self.update_stale(slot)

    async def _connect(self, slot: Slot) -> None:
        """Connect to the registered server. Another registration than before is another server process."""
        if slot.registered == slot.registration:
            return
        if slot.replica is not None:
            await self.disconnect(slot, Event.REMOVED, "replaced by a new registration")
        record = json.loads(slot.registered)
        slot.registration = slot.registered
        slot.address = str(record["address"])
        slot.replica = self._factory(slot.name, slot.address)
        slot.incarnation = f"{slot.name}@{uuid.uuid4().hex[:8]}"
        self.router.prefixes.forget(slot.name)
        if slot.registered != slot.last_registration:
            slot.info = self._limits = None
            slot.failed_version, slot.num_differences, slot.num_trainer_differences = None, 0, 0
            slot.weights = Weights.VALID  # a new process loads complete weights
        if record.get("pid", 0) is None:  # not started by this run, and it may have been restarted since the last time
            slot.weights = Weights.UNKNOWN
        slot.last_registration = slot.registered

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
            async with self.lateness.timeout(self._config.health_check_interval_s):
                load = await replica.load()
        except (ArealError, TimeoutError) as error:
            log.debug("%s does not report its load: %s", slot.name, error)
        except Exception:  # one answer that cannot be read must not end this task
            log.exception("reading the load of %s failed", slot.name)
        if slot.replica is replica:
            slot.load = load
