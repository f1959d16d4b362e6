"""Owns a run's processes from start to end: starts all, restarts what died and only that, ends the run, stops all.

Waits for: ready signs, heartbeats and ends of its children and requests of other commands (looked at 20 times a
second), or an interruption by the user. What starts again after which death is told in `restart_rules`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from areal.api.config import LauncherConfig, RecoverConfig
from areal.api.errors import LaunchError
from areal.launcher.children import Child
from areal.launcher.interruptions import Interruptions
from areal.launcher.job import LaunchPlan
from areal.launcher.life import LifeWatch, MemoryMeter
from areal.launcher.preflight import checkpoint_text, disk_problem, newest_checkpoint
from areal.launcher.replicas import ReplicaChanges
from areal.launcher.restart_rules import RestartCounts, backoff_s, judge
from areal.launcher.run_requests import RequestBox
from areal.launcher.status import StatusLine, StatusSource
from areal.launcher.units import Unit, death_of, units_of
from areal.launcher.view import RunView
from areal.system.discovery import NameRegistry
from areal.system.durable import settle_leftovers
from areal.system.process import kill_trees
from areal.system.run_paths import RunPaths

_POLL_S = 0.05
_SETTLE_S = 0.5
"""After a first death: how long others may take to die of the same cause before the cause is chosen."""
_AFTERLIFE_S = 60.0
"""A controller that ended before the trainers is told by them to do so; it is missed if they go on for so long."""
_STUCK_S = 10.0

Status = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    status: Status
    cause: str
    """Empty unless it failed."""
    was_ready: bool
    """All processes were ready once."""
    exit_codes: dict[str, int | None]
    """Of every process's last life, also of servers that left."""
    restarts: dict[str, list[str]]
    """Why each unit (a server, the controller, the trainers) was started again, each time."""


class Supervisor:
    """Runs the processes of one plan to their common end."""

    def __init__(
        self,
        plan: LaunchPlan,
        config: LauncherConfig,
        recover: RecoverConfig,
        paths: RunPaths,
        *,
        registry: NameRegistry,
        source: StatusSource,
        line: StatusLine,
        meter: MemoryMeter,
        interruptions: Interruptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._recover = recover
        self._paths = paths
        self._registry = registry
        self._line = line
        self._meter = meter
        self._interruptions = interruptions
        self._clock = clock
        self._recovered = plan.recover
        self._units = units_of(plan.processes)
        self._counts = RestartCounts()
        self._life = LifeWatch(paths, config.hang_s)
        self._view = RunView(config, paths, source, line, self._life)
        self._replicas = ReplicaChanges(
            RequestBox(paths),
            self._units,
            spare_gpus=plan.spare_gpus,
            num_attached=len(plan.attached),
            config=config,
            registry=registry,
            start=self._start,
            forget=self._retire,
            tell=line.say,
        )
        self._was_ready = False
        self._disk_problem = ""
        self._departed: dict[str, int | None] = {}
        self._departed_restarts: dict[str, list[str]] = {}
        self._ending_since_s: float | None = None
        self._trainers_ended_s: float | None = None
        self._told_stuck: set[int | None] = set()

    def run(self) -> Outcome:
        """From start to end; returns when no process is left."""
        cause: str | None = "the launcher failed"
        try:
            for unit in list(self._units):
                self._start(unit)
            cause = self._watch()
        except LaunchError as error:  # a process could not be started
            cause = str(error)
        finally:
            self._stop()
        if self._interruptions.count:
            status: Status = "interrupted"
        else:
            status = "completed" if cause is None else "failed"
        problem = self._disk_problem or (disk_problem(self._paths) if status == "failed" else "")
        if problem and cause:
            cause = f"{problem}; {cause}"
        return Outcome(
            status=status,
            cause=(cause or "") if status == "failed" else "",
            was_ready=self._was_ready,
            exit_codes=self._departed | {child.name: child.exit_code for child in self._children},
            restarts=self._departed_restarts | {unit.name: unit.restarts for unit in self._units if unit.restarts},
        )

    @property
    def _children(self) -> list[Child]:
        return [child for unit in self._units for child in unit.children]

    @property
    def _leaders(self) -> list[Unit]:
        """The controller and the trainers; servers only serve."""
        return [unit for unit in self._units if unit.role != "server"]

    @property
    def _trainers(self) -> Unit:
        return next(unit for unit in self._units if unit.role == "trainer")

    def _watch(self) -> str | None:
        """Until the run ends well (None), fails (the cause) or is interrupted (None)."""
        while not self._interruptions.count:
            self._note_ready()
            cause = self._idle_end()
            if cause is None and self._trainers.has_ended_well:
                if self._is_over():
                    return None
            else:
                cause = cause or self._look_after_life() or self._look_after_ends() or self._late()
                self._replicas.step(self._clock(), run_was_ready=self._was_ready)
            if cause is not None:
                return cause
            self._meter.sample()
            self._view.show(self._children, was_ready=self._was_ready)
            time.sleep(_POLL_S)
        return None

    def _note_ready(self) -> None:
        for child in self._children:
            if not child.is_ready and self._registry.get(f"ready/{child.name}") is not None:
                child.got_ready()
        self._was_ready = self._was_ready or all(unit.is_ready for unit in self._units)

    def _is_over(self) -> bool:
        """All trainers have ended well: nothing starts again, and the controller gets a moment to end by itself."""
        now = self._clock()
        self._trainers_ended_s = now if self._trainers_ended_s is None else self._trainers_ended_s
        waited_s = now - self._trainers_ended_s
        return waited_s >= self._config.stop_grace_s or not any(unit.is_running for unit in self._leaders)

    def _look_after_life(self) -> str | None:
        """Kill what hangs: it is then dead like any other, and told so. Returns why the run ends."""
        for child, text in self._life.look(self._children, self._clock()):
            self._disk_problem = disk_problem(self._paths)
            if self._disk_problem:  # no sign of life can be written
                return f"{child.name} {text}"
            child.kill(text)
        if self._life.step is not None:
            self._counts.saw_step(self._life.step)
        return None

    def _look_after_ends(self) -> str | None:
        """Restart what died. Returns why the run ends."""
        for unit in list(self._units):
            if unit.phase == "leaving":
                continue
            if unit.restart_at_s is not None:
                if self._clock() >= unit.restart_at_s and not unit.is_running:
                    self._start_again(unit)
                continue
            if cause := self._bury(unit):
                return cause
        return None

    def _bury(self, unit: Unit) -> str | None:
        """Look whether some of a unit died, and decide what follows. Returns why the run ends."""
        now = self._clock()
        if unit.role == "controller" and unit.has_ended_well and not unit.must_run:
            unit.dead_since_s = now if unit.dead_since_s is None else unit.dead_since_s
            unit.must_run = now - unit.dead_since_s >= _AFTERLIFE_S
        dead = unit.dead()
        if not dead:
            return None
        unit.dead_since_s = now if unit.dead_since_s is None else unit.dead_since_s
        was_killed = any((child.exit_code or 0) < 0 for child in dead)
        if unit.is_running and not was_killed and now - unit.dead_since_s < _SETTLE_S:
            return None  # the others may be about to die of the same cause, or of the cause itself
        self._note_ready()  # the sign may be younger than the last look
        unit.kill()
        count = self._counts.of(unit.name)
        self._disk_problem = disk_problem(self._paths)
        verdict = judge(
            unit.role,
            [death_of(child) for child in dead],
            num_restarts=count,
            recover=self._recover,
            disk_problem=self._disk_problem,
        )
        told = next(child for child in dead if child.name == verdict.told.name)
        if unit.phase == "joining":
            self._replicas.failed(unit, f"{unit.name} could not join the run, which goes on without: {told.obituary()}")
            return None
        if verdict.ends_run:
            return self._cause(told, verdict.why)
        delay_s = backoff_s(count)
        self._counts.add(unit.name)
        unit.restarts.append(f"{told.name} {told.end()}")
        unit.restart_at_s = now + delay_s
        self._forget(unit)
        who = "all trainer ranks start" if len(unit.children) > 1 else f"{told.name} starts"
        self._line.say(
            f"{told.obituary()}\n  {who} again in {delay_s:g} s "
            f"({count + 1} of at most {self._recover.retries} without progress)"
        )
        return None

    def _start(self, unit: Unit) -> None:
        """For the first time."""
        unit.start(num_servers=self._replicas.num_servers, recover=None)

    def _start_again(self, unit: Unit) -> None:
        unit.clean_up()
        self._forget(unit)  # also what it wrote between its death's discovery and its end
        recover = None
        if unit.role == "trainer":
            settle_leftovers(self._paths.recover)  # the dead may have been about to replace one
            newest = newest_checkpoint(self._paths)
            self._recovered = recover = newest is not None
            self._line.say(f"areal: trainers go on from {checkpoint_text(newest)}")
            for other in self._leaders:  # a controller that was told that training is over
                other.must_run = other.must_run or (other is not unit and other.has_ended_well)
        unit.start(num_servers=self._replicas.num_servers, recover=recover)

    def _forget(self, unit: Unit) -> None:
        """Remove every trace by which others find the processes of a unit, or take them for alive."""
        for child in unit.children:
            child.is_ready = False
            self._registry.remove(f"ready/{child.name}")
            if unit.role == "server":
                self._registry.remove(f"servers/{child.planned.index}")
            elif unit.role == "controller":
                self._registry.remove("controller")
            self._paths.alive_of(child.name).unlink(missing_ok=True)

    def _retire(self, unit: Unit) -> None:
        """A server has left for good."""
        self._forget(unit)
        self._departed |= {child.name: child.exit_code for child in unit.children}
        if unit.restarts:
            self._departed_restarts[unit.name] = unit.restarts

    def _cause(self, told: Child, why: str) -> str:
        """The likely first death, told first, and the others behind it."""
        if self._disk_problem:  # which is told with it, and is why all the others die
            return f"{told.name} {told.end()}"
        deadline = self._clock() + _SETTLE_S
        while self._clock() < deadline and any(unit.is_running for unit in self._leaders):
            time.sleep(_POLL_S)
        others = [child for unit in self._leaders if unit.restart_at_s is None for child in unit.dead()]
        dead = sorted({*others, told}, key=lambda child: child.spoke_last_ns())
        first = told if why else dead[0]
        then = [child for child in dead if child is not first and not _same_error(first.error, child.error)]
        remark = f" ({why})" if why else ""
        return first.obituary() + remark + "".join(f"\n  then {child.obituary()}" for child in then)

    def _idle_end(self) -> str | None:
        """A process that ended well but never did its part: a script that does not train."""
        if self._recovered:  # a run that was complete before has nothing to do
            return None
        for child in (child for unit in self._leaders for child in unit.children):
            if child.exit_code == 0 and not child.was_ready and self._registry.get(f"ready/{child.name}") is None:
                return (
                    f"{child.name} ended without taking part in the run: a script must call train(...) of its "
                    f"PPOTrainer or SFTTrainer in every process ({child.obituary()})"
                )
        return None

    def _late(self) -> str | None:
        """A process that takes longer than it may: to get ready, or to end after the other ranks ended."""
        now, limit_s = self._clock(), self._config.ready_timeout_s
        for unit in self._units:
            for child in (child for child in unit.children if child.is_running):
                if child.killed_s is not None:
                    self._tell_stuck(child, now)
                elif not child.is_ready and unit.phase != "leaving" and now - child.started_s > limit_s:
                    text = f"was not ready after {limit_s:g} s (launcher.ready_timeout_s)"
                    if not child.was_ready and unit.phase == "member":
                        return f"{child.name} {text}: {child.obituary()}"
                    child.kill(text)
        ranks = self._trainers.children
        if not any(child.exit_code == 0 for child in ranks):
            self._ending_since_s = None
            return None
        self._ending_since_s = now if self._ending_since_s is None else self._ending_since_s
        if now - self._ending_since_s > limit_s:
            names = ", ".join(child.name for child in ranks if child.is_running)
            return f"{names} did not end within {limit_s:g} s after the other ranks had ended"
        return None

    def _tell_stuck(self, child: Child, now: float) -> None:
        """Say it, once, when the kernel does not let a killed process end."""
        if child.killed_s is not None and now - child.killed_s > _STUCK_S and child.pid not in self._told_stuck:
            self._told_stuck.add(child.pid)
            self._line.say(f"areal: {child.name} (pid {child.pid}) does not end {_STUCK_S:g} s after SIGKILL: waiting")

    def _stop(self) -> None:
        """End what still runs. A second interruption ends the polite part."""
        already = self._interruptions.count
        pids = [child.pid for child in self._children if child.is_running and child.pid is not None]
        if already and pids:
            self._line.say(
                f"areal: interrupted: {len(pids)} processes have {self._config.stop_grace_s:g} s to end "
                "(launcher.stop_grace_s); Ctrl-C again kills them at once"
            )
        kill_trees(pids, self._config.stop_grace_s, hurry=lambda: self._interruptions.count > 1)
        for child in self._children:
            child.wait()
            child.end_group()
        if self._was_ready and not self._interruptions.count:
            self._view.end()


def _same_error(first: str, other: str) -> bool:
    """Whether two processes died of one mistake: they say the same, or one passes on what the other said."""
    return bool(first and other) and (first in other or other in first)
