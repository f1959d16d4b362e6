"""The fleet's record of one replica: its states, the events that change them, and what is known about its weights.

`areal.fleet.replica_set` changes it. Nothing here does I/O.
"""

import asyncio
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from areal.fleet.replica import NO_VERSION, Replica, ReplicaInfo, ReplicaLoad


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
        self.weights = Weights.VALID
        self.failed_version: int | None = None
        """An update to this version failed while other replicas served it: the next attempt is the next version."""
        self.num_differences = 0
        """Canary probes in sequence whose answer differed."""
        self.num_trainer_differences = 0
        """Comparisons with the trainer in sequence in which its answer differed."""
        self.info: ReplicaInfo | None = None
        """From the last health check that passed."""
        self.load: ReplicaLoad | None = None
        """The last report; None when the server does not answer."""
        self.num_running = 0
        self.num_failures = 0
        self.wake = asyncio.Event()
        """Set to run the next health check at once."""
        self.changes = 0
        """Number of changes of state: the result of an older health check is ignored."""

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
            "load": None if self.load is None else dataclasses.asdict(self.load),
        }
