"""The faults of a soak: waits for the moment, applies the fault, and checks that the run recovers before the next one.

Waits for: conditions of the run under test, each with a time limit; the run's own progress (`ALIVE_S`); the
launcher's hang detection, which must find what was stopped. The launcher that is killed is started again at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.faults.driver import Run, RunBroken
from tests.faults.schedule import EVERYTHING, Fault, Moment

ALIVE_S = 150.0
"""A run without faults for this time must have trained a new step."""
FOUND_S = 30.0
"""How much longer than launcher.hang_s a stopped process may go unnoticed (the launcher itself may be starting)."""
QUICK_POLL_S, POLL_S = 0.002, 0.02
_PROGRESS_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """A fault as it happened."""

    fault: Fault
    at: float
    """Unix seconds."""
    step: int
    """Train steps done then."""
    was_moment: bool
    """False: the fault was injected at the time limit, before its moment came."""
    doing: str
    """What the controller said a moment before."""
    struck: tuple[str, ...]
    """Targets that were there."""


@dataclass(kw_only=True)
class Striker:
    """Carries out a schedule on one run."""

    run: Run
    hang_s: float
    say: Callable[[str], None]
    blows: list[Blow] = field(default_factory=list)
    _next_progress_s: float = 0.0
    _last: dict[str, Any] = field(default_factory=dict)
    _killed: dict[str, int] = field(default_factory=dict)

    def run_to_the_end(self, faults: list[Fault]) -> list[Fault]:
        """Strike until the run ends; returns the faults that found no run any more. RunBroken when it is not alive."""
        rest = list(faults)
        while self.run.exit_code is None:
            if not self._has_recovered(chained=bool(rest) and rest[0].is_chained):
                break
            if not rest:
                continue
            fault = rest[0]
            was_moment = self._wait_for(fault.moment)
            if self.run.exit_code is not None:
                break
            self._strike(rest.pop(0), was_moment)
        if self.run.exit_code:
            raise RunBroken(f"the launcher ended by itself with {self.run.exit_code}:\n{Run.tail(self.run.log_path)}")
        return rest

    def _has_recovered(self, *, chained: bool) -> bool:
        """Until a new step was trained and everything is up again (a chained fault does not wait); False at the end."""
        if chained:
            return self.run.exit_code is None
        goal = self.run.highest_step + 1
        deadline = time.monotonic() + ALIVE_S
        while self.run.exit_code is None:
            self._look()
            if self.run.highest_step >= goal and self.run.all_ready(EVERYTHING[1:]):
                self.run.restore()
                return True
            if time.monotonic() >= deadline:
                raise RunBroken(
                    f"no step beyond {goal - 1} in {ALIVE_S:g} s, or not all is up: {self._last.get('waiting_for')}; "
                    f"there are {sorted(self.run.pids(fresh=True))}"
                )
            time.sleep(POLL_S)
        return False

    def _look(self) -> dict[str, Any]:
        """The controller's status, the last one when it does not answer; a progress line now and then."""
        self._last = self.run.status() or self._last
        if time.monotonic() >= self._next_progress_s:
            self._next_progress_s = time.monotonic() + _PROGRESS_S
            shown = self._last.get("step"), self.run.highest_step, self._last.get("waiting_for")
            self.say(f"    step {shown[0]} (highest {shown[1]}), {len(self.blows)} faults so far; waits for {shown[2]}")
        return self._last

    def _wait_for(self, moment: Moment) -> bool:
        """True when the moment came, False when its limit passed or the run ended."""
        start = self.run.highest_step
        deadline = time.monotonic() + moment.limit_s
        quick = moment.kind in ("publishing", "checkpointing", "catching_up")
        while not self._is_now(moment, start):
            if time.monotonic() >= deadline or self.run.exit_code is not None:
                return False
            time.sleep(QUICK_POLL_S if quick else POLL_S)
        time.sleep(moment.delay_s)
        return True

    def _is_now(self, moment: Moment, start: int) -> bool:
        folder = self.run.folder
        match moment.kind:
            case "training":
                self._look()
                is_due = self.run.highest_step >= start + moment.steps
                return is_due and not (moment.loses_steps and self.run.checkpoint_step >= self.run.highest_step)
            case "publishing":
                if next((folder / "weights").glob(".writing-*"), None) is not None:
                    return True
                return self._look().get("replicas", {}).get("updating_to") is not None
            case "checkpointing":
                return (folder / "recover" / "next").exists()
            case "evaluating":
                return str(self._look().get("waiting_for", "")).startswith("the evaluation")
            case "catching_up":
                status = self.run.status()
                return status is not None and status["step"] < self.run.highest_step
            case "restarting":
                return any(self._is_starting(name, pid) for name, pid in self._killed.items())
            case "soon":
                return True

    def _is_starting(self, name: str, killed: int) -> bool:
        pid = self.run.pids(fresh=True).get(name, killed)
        return pid != killed and not self.run.is_ready(name, pid)

    def _strike(self, fault: Fault, was_moment: bool) -> None:
        doing, step = str(self._last.get("waiting_for", "")), self.run.highest_step
        at = time.time()
        actions = {"kill": self.run.kill, "terminate": self.run.terminate, "power": self.run.cut_power}
        struck = actions.get(fault.action, self.run.stop)(fault.targets)
        self._killed = struck
        self.blows.append(Blow(fault=fault, at=at, step=step, was_moment=was_moment, doing=doing, struck=tuple(struck)))
        late = "" if was_moment else f" (not seen in {fault.moment.limit_s:g} s, strikes anyway)"
        gone = [] if fault.action == "power" else sorted(set(fault.targets) - set(struck))
        absent = f"; not there: {', '.join(gone)}" if gone else ""
        self.say(f"{len(self.blows):3}. step {step}: {fault}, moment: {fault.moment}{late}{absent}")
        if fault.action == "stop":
            self._wait_until_found(struck)
        elif fault.action not in actions:
            time.sleep(fault.hold_s)
            if fault.action == "stop_then_go":
                self.run.go_on(fault.targets)
            else:
                self.run.kill(fault.targets)
        if self.run.exit_code is not None and "launcher" in struck:
            self.run.start()

    def _wait_until_found(self, struck: dict[str, int]) -> None:
        deadline = time.monotonic() + self.hang_s + FOUND_S
        while stopped := [name for name, pid in struck.items() if _is_there(pid)]:
            if time.monotonic() >= deadline:
                raise RunBroken(
                    f"{stopped} made no progress for {self.hang_s + FOUND_S:g} s, and the launcher did not restart them"
                )
            if self.run.exit_code is not None:
                return
            time.sleep(POLL_S)


def _is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def last_words(run: Run, lines: int = 12) -> str:
    """For a failure: the end of every log and every explanation of a stall, as text."""
    parts = [f"  {path.name}:\n{Run.tail(path, lines)}" for path in sorted(_logs(run.folder))]
    stalls = [line for line in run.log_path.read_text(errors="replace").splitlines() if "stall" in line.lower()]
    parts.append("  stall explanations:\n" + "\n".join(f"    {line}" for line in stalls[-10:] or ["none"]))
    parts.append(f"  stacks: {sorted(path.name for path in (run.folder / 'stacks').glob('*.txt'))}")
    return "\n".join(parts)


def _logs(folder: Path) -> list[Path]:
    return [*(folder / "logs").glob("*.log"), *folder.parent.glob(f"{folder.name}-launcher.log")]
