"""The fleet's record of one replica: address, state, weights, limits and load.

`areal.fleet.replica_set` changes it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from areal.fleet.replica import NO_VERSION, Replica, ReplicaInfo, ReplicaLoad
from areal.fleet.replica_states import State, Weights
from areal.fleet.routing import PrefixMemory


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
        self.info: ReplicaInfo | None = None
        """From the last health check that passed."""
        self.load: ReplicaLoad | None = None
        """The last report; None when the server does not answer."""
        self.prefixes = PrefixMemory()
        """What its cache may hold: empty after a new connection or a weight update."""
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
