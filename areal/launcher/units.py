"""Owns the units of a run: processes that start, die and are counted together (a server, the controller, all trainers).

A trainer rank cannot go on without the others, so when one dies the rest are killed and all start again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Literal

from areal.launcher.children import Child
from areal.launcher.job import PlannedProcess, start_again
from areal.launcher.restart_rules import Death, Role


class Unit:
    """Children with one fate."""

    def __init__(self, planned: Sequence[PlannedProcess]) -> None:
        self.role: Role = planned[0].role
        self.name = "trainers" if self.role == "trainer" else planned[0].name
        self.children = [Child(one, os.environ) for one in planned]
        self.num_starts = 0
        self.restarts: list[str] = []
        """Why it was started again, each time."""
        self.restart_at_s: float | None = None
        """When it starts again; None = nothing is due."""
        self.dead_since_s: float | None = None
        """When an end that nobody wanted was first seen; None = all is well or decided."""
        self.must_run = self.role == "server"
        """An end with 0 is a death too: servers only serve, and a controller may not end before the trainers."""
        self.phase: Literal["member", "joining", "leaving"] = "member"
        """Joining: added while the run went on and not yet ready once; if it cannot start, the run goes on without.
        Leaving: on its way out; its end is wanted."""

    @property
    def is_running(self) -> bool:
        """Some process of it runs."""
        return any(child.is_running for child in self.children)

    @property
    def is_ready(self) -> bool:
        return all(child.is_ready for child in self.children)

    @property
    def was_ready(self) -> bool:
        """At least once, in this life or an earlier one."""
        return all(child.was_ready for child in self.children)

    @property
    def has_ended_well(self) -> bool:
        """Every process of it ended with 0."""
        return all(child.exit_code == 0 for child in self.children)

    def dead(self) -> list[Child]:
        """The processes that ended by themselves and should not have, the likely first death first."""
        allowed = (None,) if self.must_run else (None, 0)
        dead = [child for child in self.children if child.exit_code not in allowed and not child.died_along]
        return sorted(dead, key=lambda child: child.spoke_last_ns())

    def start(self, *, num_servers: int, recover: bool | None) -> None:
        """Start it, for the first time or again. `recover` None = as planned."""
        self.restart_at_s = self.dead_since_s = None
        self.must_run = self.role == "server"
        for child in self.children:
            run_id = self.num_starts if self.role == "trainer" else None
            child.planned = start_again(child.planned, num_servers=num_servers, run_id=run_id, recover=recover)
            child.start()
        self.num_starts += 1

    def kill(self) -> None:
        """Kill what still runs of it; it goes along with the others."""
        for child in self.children:
            child.kill()

    def terminate(self) -> None:
        """Ask all of it to end."""
        for child in self.children:
            child.terminate()

    def clean_up(self) -> None:
        """End what the dead left behind in their process groups."""
        for child in self.children:
            child.end_group()


def death_of(child: Child) -> Death:
    """What the rules have to know of an ended process."""
    code = child.exit_code
    assert code is not None
    return Death(name=child.name, exit_code=code, was_ready=child.was_ready)


def units_of(processes: Iterable[PlannedProcess]) -> list[Unit]:
    """The units of a plan, in its order."""
    units: list[Unit] = []
    trainers: list[PlannedProcess] = []
    for planned in processes:
        if planned.role == "trainer":
            trainers.append(planned)
        else:
            units.append(Unit([planned]))
    return units + ([Unit(trainers)] if trainers else [])
