"""Owns what a fleet knows of one replica: address, state, weights, limits, and how busy it is.

A record; `areal.fleet.replica_set` decides what becomes of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Literal

from areal.fleet.replica import Replica, ReplicaInfo, ReplicaLoad
from areal.fleet.routing import PrefixMemory

ANY_VERSION = -1
"""Target before the first replicas are in, and what a server says that has no weights yet: it never serves."""
State = Literal["absent", "suspect", "stale", "updating", "serving"]
"""absent: not there or not answering. suspect: a request failed, a check is due. stale: well, but holds other weights
than the target. updating: takes in weights. serving: may get requests."""


class Slot:
    """One replica's place in the fleet, kept while servers under its name come and go."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"server-{index}"
        self.registered = ""
        """What the registry says of it now."""
        self.registration: str | None = None
        """What the connection was made from; None when there is no connection."""
        self.last_registration: str | None = None
        self.address = ""
        self.replica: Replica | None = None
        self.incarnation = ""
        """Changes whenever the connection to a server is made anew."""
        self.state: State = "absent"
        self.reason = "not registered"
        self.version = ANY_VERSION
        self.half_updated = False
        """An update failed midway: the weights are a mixture, whatever version the server reports."""
        self.is_outlived = False
        """Its version is from before the trainer went back to an older one: the number may come again, the weights
        may not."""
        self.is_unproven = False
        """It belongs to nobody's run, and this run has not given it weights yet: whatever version it tells, it may hold
        others."""
        self.given_up_version: int | None = None
        """It failed to take in this version while others served it: the next version is its next chance."""
        self.info: ReplicaInfo | None = None
        """As of the last health check that was answered."""
        self.load: ReplicaLoad | None = None
        """As it last said; None when it does not say."""
        self.prefixes = PrefixMemory()
        """What its cache may hold: nothing when the connection is made anew or weights change."""
        self.num_running = 0
        self.num_failures = 0
        self.wake = asyncio.Event()
        self.changes = 0
        """Counts changes of state, so that the outcome of an older check is not taken for news."""

    @property
    def is_well(self) -> bool:
        """It answers, whatever weights it holds."""
        return self.state in ("stale", "updating", "serving")

    def status(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "id": self.incarnation,
            "address": self.address,
            "state": self.state,
            "healthy": self.is_well,
            "reason": self.reason,
            "version": self.version,
            "running": self.num_running,
            "failures": self.num_failures,
            "load": None if self.load is None else dataclasses.asdict(self.load),
        }
