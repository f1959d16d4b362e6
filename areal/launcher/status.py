"""The status line of a running run, and the source of its numbers: the controller, or the metrics file."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import yaml
from rich.cells import cell_len, set_cell_size

from areal.api.config import BaseExperimentConfig, LauncherConfig
from areal.api.config.load import save_config
from areal.api.config.redaction import public_command
from areal.launcher.backend import ProcessBackend
from areal.launcher.preflight import newest_checkpoint, step_of
from areal.launcher.result import HeldOutLines, RunAlarmLines
from areal.launcher.units import Child
from areal.observe.trace import WAIT
from areal.system.discovery import NameRegistry
from areal.system.durable import append_line
from areal.system.heartbeat import Beat, read_beats, write_beats
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# Liveness of a run's processes: what each one does according to its heartbeat, and which ones hang.

_LOOK_INTERVAL_S = 0.5
_MAX_PER_LOOK_S = 1.0
"""The maximum that one look adds to a silence: a launcher that was stopped itself has seen no heartbeats."""
_DUMP_S = 1.0  # Time for a hung process to write its stacks before it is killed.


class SilenceTimer:
    """Seconds since each process last changed its heartbeat count. Does not use the times of files."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        self._silent_s: dict[str, float] = {}

    def look(self, name: str, pid: int, beat: Beat | None, *, since_last_look_s: float) -> float:
        """Seconds of silence of process `name`; 0 before the first heartbeat of this `pid`."""
        if beat is None or beat.pid != pid:
            self._seen.pop(name, None)
            return 0.0
        if self._seen.get(name) != (pid, beat.beats):
            self._seen[name] = (pid, beat.beats)
            self._silent_s[name] = 0.0
        else:
            self._silent_s[name] += min(since_last_look_s, _MAX_PER_LOOK_S)
        return self._silent_s[name]


class LivenessWatch:
    """Reads the heartbeats of a run's processes, finds those that hang, and writes RUN/alive.json for readers."""

    def __init__(self, paths: RunPaths, backend: ProcessBackend, hang_s: float) -> None:
        self.beats: dict[str, Beat] = {}
        """The last heartbeat of every running process that has one."""
        self.silent_s: dict[str, float] = {}
        """Seconds since that heartbeat."""
        self._paths = paths
        self._backend = backend
        self._hang_s = hang_s
        self._silences = SilenceTimer()
        self._rejections: set[str] = set()  # Ids of connections to servers with wrong weights that were reported.
        self._looked_s: float | None = None
        self._dump_requested: dict[str, int] = {}

    def look(
        self, children: Iterable[Child], now_s: float, status: dict[str, Any] | None = None
    ) -> list[tuple[Child, str]]:
        """The processes that hang and the servers with wrong weights by the controller's `status`, each with a
        description. Reads the heartbeats at most twice a second."""
        since_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        if self._looked_s is not None and since_s < _LOOK_INTERVAL_S:
            return []
        self._looked_s = now_s
        self.beats, self.silent_s = {}, {}
        hung = list(self._hung(children, since_s))
        with contextlib.suppress(OSError):  # a full disk ends the run elsewhere
            write_beats(self._paths.alive, self.beats)
        return hung + list(self._rejected(children, status))

    @property
    def step(self) -> int | None:
        """The train step that the trainers work on; None when no heartbeat contains one."""
        return max((beat.step for beat in self.beats.values() if beat.step is not None), default=None)

    def _hung(self, children: Iterable[Child], since_s: float) -> Iterator[tuple[Child, str]]:
        beats = self._backend.beats()
        for child in children:
            if not child.is_running or child.pid is None:
                continue
            beat = beats.get(child.name)
            silent_s = self._silences.look(child.name, child.pid, beat, since_last_look_s=since_s)
            if beat is None or beat.pid != child.pid:
                continue
            host, _ = self._backend.place_of(child.planned)
            self.beats[child.name] = dataclasses.replace(beat, node=host.node, silent_s=round(silent_s, 1))
            self.silent_s[child.name] = silent_s
            if silent_s < self._hang_s or child.killed_s is not None:
                continue
            if silent_s < self._hang_s + _DUMP_S and self._dumps_stacks(child.name, child.pid):
                continue
            doing = f"{beat.doing!r} for {beat.for_s:.0f} s" if beat.doing else "empty"
            yield child, f"hung: no heartbeat for {silent_s:.0f} s (launcher.hang_s), the last one was {doing}"

    def _rejected(self, children: Iterable[Child], status: dict[str, Any] | None) -> Iterator[tuple[Child, str]]:
        """A status may be older than the restart that it caused, so each connection to a server counts once."""
        by_name = {child.name: child for child in children if child.is_running and child.killed_s is None}
        replicas: list[dict[str, Any]] = ((status or {}).get("replicas") or {}).get("replicas") or []
        for replica in replicas:
            child, connection = by_name.get(replica.get("name", "")), replica.get("id", "")
            if child is not None and replica.get("weights") == "rejected" and connection not in self._rejections:
                self._rejections.add(connection)
                yield child, "has other weights than the other replicas, also after a second update (rollout.canary)"

    def _dumps_stacks(self, name: str, pid: int) -> bool:
        """Request the stacks of a process, once. False when it cannot write them."""
        if self._dump_requested.get(name) == pid:
            return True
        if not self._backend.request_stacks(name, f"no heartbeat for {self._hang_s:g} s"):
            return False
        self._dump_requested[name] = pid
        return True


# ----------------------------------------------------------------------------------------------------------------------
# The description of a stalled run. Pure functions: a snapshot of its processes in, clauses out, the cause first.

SILENT_S = 10.0
"""Heartbeats come once a second; a process without one for this long is reported."""
_MAX_NAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """What the launcher knows about a run that makes no progress."""

    status: dict[str, Any] | None
    """The controller's last answer; None when it is old, or there is no controller."""
    beats: Mapping[str, Beat]
    """The last heartbeats of running processes."""
    running: frozenset[str]
    known: frozenset[str]
    """All processes that ever ran."""
    silent_s: Mapping[str, float]
    """Seconds since the last heartbeat, for each process in `beats`."""
    unanswered_s: float
    """Seconds since the controller last answered."""


def explain(run: RunSnapshot) -> list[str]:
    """Which process waits for which; each clause waits for the one before it."""
    groups = _trainer_groups(run)
    trainers = [_trainers(group) for group in groups]
    controller = _controller(run)
    clauses = _missing(run) + _silent(run)
    if len(groups) > 1:
        trainers[0] += ", and the other ranks wait for it"
        return clauses + trainers + _servers(run) + controller
    if run.status is not None and str(run.status.get("awaited")).startswith(("the trainer", "a trainer")):
        return clauses + trainers + controller + _servers(run)
    return clauses + _servers(run) + _requests(run) + controller + trainers


def _missing(run: RunSnapshot) -> list[str]:
    dead = [name for name in run.known - run.running if not name.startswith("server")]  # the fleet reports those
    starting = run.running - run.beats.keys()
    states = [(dead, "not running"), (starting, "starting or ending, without a heartbeat")]
    return [f"{_listed(names)} {'is' if len(names) == 1 else 'are'} {state}" for names, state in states if names]


def _silent(run: RunSnapshot) -> list[str]:
    return [
        f"{name} (pid {run.beats[name].pid}) has sent no heartbeat for {silent_s:.0f} s"
        for name, silent_s in sorted(run.silent_s.items(), key=lambda entry: -entry[1])
        if silent_s >= SILENT_S
    ]


@dataclass(frozen=True, slots=True)
class _Group:
    """Trainer ranks in the same phase of the same step."""

    doing: str
    step: int | None
    for_s: float
    names: list[str]


def _trainer_groups(run: RunSnapshot) -> list[_Group]:
    """The ranks that are behind come first: at the smaller step, or in the phase that was entered first."""
    groups_of: dict[tuple[str, int | None], list[tuple[float, str]]] = {}
    for name, beat in run.beats.items():
        if name.startswith("trainer"):
            for_s = beat.for_s + run.silent_s.get(name, 0.0)
            groups_of.setdefault((beat.doing, beat.step), []).append((for_s, name))
    groups = [
        _Group(doing, step, max(seconds for seconds, _ in members), sorted(name for _, name in members))
        for (doing, step), members in groups_of.items()
    ]
    return sorted(groups, key=lambda group: (-1 if group.step is None else group.step, -group.for_s))


def _trainers(group: _Group) -> str:
    who = group.names[0] if len(group.names) == 1 else f"each of {_listed(group.names)}"
    if group.step is None:
        return f"{who} {group.doing} (for {group.for_s:.0f} s)"
    if group.doing.startswith(WAIT):
        what = group.doing.removeprefix(WAIT)
        what = f"batch {group.step}" if what == "batch" else f"the {what} of step {group.step}"
        return f"{who} has waited {group.for_s:.0f} s for {what}"
    where = group.doing if group.doing.startswith("after ") else f"in {group.doing}"
    return f"{who} has been {where} of step {group.step} for {group.for_s:.0f} s"


def _controller(run: RunSnapshot) -> list[str]:
    if "controller" not in run.running:
        return []  # there is none, or it is reported as missing
    if run.status is None:
        beat = run.beats.get("controller")
        last = f"; its last heartbeat says that it waits for {beat.doing}" if beat is not None else ""
        return [f"the controller has not answered for {run.unanswered_s:.0f} s{last}"]
    since_s = run.status.get("waiting_since_s")
    waits = "waits" if since_s is None else f"has waited {since_s:.0f} s"
    closed = run.status.get("gate_closed_because") or ""
    reason = f", and no episode starts because {closed}" if closed else ""
    return [f"the controller {waits} for {run.status.get('awaited') or '?'}{reason}"]


def _servers(run: RunSnapshot) -> list[str]:
    """The replicas that do not serve the version that they should."""
    status = run.status or {}
    replicas: list[dict[str, Any]] = (status.get("replicas") or {}).get("replicas") or []
    updating_to = status.get("updating_to")
    current = status.get("version") if updating_to is None else updating_to
    late = [replica for replica in replicas if replica["state"] != "serving" or replica["version"] != current]
    if updating_to is not None:  # those that have the weights wait for the others
        late = [replica for replica in late if replica["state"] == "updating"] or late
    clauses = [_server(replica, current, updating_to) for replica in late]
    if clauses and not any(replica["state"] == "serving" for replica in replicas) and updating_to is None:
        clauses[0] = "no server serves: " + clauses[0]
    return clauses


def _server(replica: dict[str, Any], current: int | None, updating_to: int | None) -> str:
    name, state, version, reason = replica["name"], replica["state"], replica["version"], replica["reason"]
    if updating_to is not None and state == "updating":
        return f"{name} is at version {version} and has not installed {updating_to} yet"
    text = f"{name} is {state}"
    if version != current and state != "absent":
        text += f" at version {version} while {current} is current"
        reason = "" if reason.startswith("holds version") else reason
    return text + (f": {reason}" if reason else "")


def _requests(run: RunSnapshot) -> list[str]:
    """What running episodes wait for, as far as the fleet's counters show."""
    status = run.status or {}
    fleet: dict[str, Any] = status.get("replicas") or {}
    at_servers = [_at_server(replica) for replica in fleet.get("replicas") or [] if replica["running"]]
    queued = fleet.get("waiting_requests") or 0
    rewards = [status["rewards"]] if status.get("rewards") else []
    if at_servers:
        return [
            f"requests receive no token: {', '.join(at_servers)}" + (f", {queued} without a server" * bool(queued)),
            *rewards,
        ]
    if queued:
        return [f"{queued} requests wait for a server", *rewards]
    if rewards:
        return rewards
    if (running := status.get("running")) and not status.get("catching_up"):
        return [f"{running} episodes run without a request to a server: they wait for rewards or in workflow code"]
    return []


def _at_server(replica: dict[str, Any]) -> str:
    """Requests at a server, and how many of them are in its queue."""
    queued = (replica.get("load") or {}).get("queued")
    return f"{replica['running']} at {replica['name']}" + (f" ({queued} in its queue)" if queued else "")


def _listed(values: Collection[str]) -> str:
    names = sorted(values)
    if len(names) > _MAX_NAMES:
        return f"{', '.join(names[:_MAX_NAMES])} and {len(names) - _MAX_NAMES} more"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


# ----------------------------------------------------------------------------------------------------------------------
# Detection of a stalled run: reports in one line which process waits for which when nothing makes progress.
#
# Progress is any change of the controller's counters, of a trainer rank's phase or step, or of the set of processes.
# `look` is called about once a second.

_COUNTERS = ("step", "version", "updating_to", "admitted", "accepted", "rejected", "failed", "batched", "consumed")
_COUNTERS += ("generated_tokens", "awaited")  # the latter contains the progress of an evaluation
SLOW_STEP_S, SLOW_STEPS = 30.0, 10
"""A train step is slow after this time and after this number of mean steps, also while single episodes still end."""
_MIN_STEPS = 3  # Train steps whose time is known before one can be slow.
_MAX_SHARE_PER_LOOK = 0.25
"""Share of stall_s that one look adds at most: a launcher that was stopped itself has seen no progress."""


class _StepTimes:
    """Finds a train step that takes much longer than the steps so far. A step counts from the end of the one before, as
    this process saw it, without the time of evaluations."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._began_s = 0.0
        self._looked_s = 0.0
        self._times: list[float] = []
        self._was_reported = False

    def slow(self, status: Mapping[str, Any], now_s: float) -> str:
        """What to report, once for each step; empty = nothing."""
        step, since_s, self._looked_s = status.get("step"), now_s - self._looked_s, now_s
        if step != self._step:
            if self._step is not None:
                self._times.append(now_s - self._began_s)
            self._step, self._began_s, self._was_reported = step, now_s, False
        if str(status.get("awaited")).startswith("the evaluation"):
            self._began_s += min(since_s, now_s - self._began_s)
        if len(self._times) < _MIN_STEPS or self._was_reported:
            return ""
        mean_s, spent_s = sum(self._times) / len(self._times), now_s - self._began_s
        if spent_s < max(SLOW_STEP_S, SLOW_STEPS * mean_s):
            return ""
        self._was_reported = True
        return f"no train step for {spent_s:.0f} s, and a step took {mean_s:.1f} s so far"


class StallWatch:
    """Measures the time without progress by its own clock, from changes only."""

    def __init__(
        self,
        stall_s: float,
        stacks: Path,
        request_stacks: Callable[[str, str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stacks`: folder of the stack dumps. `request_stacks`: takes the name of a process and a reason."""
        self._stall_s = stall_s
        self._stacks = stacks
        self._request_stacks = request_stacks
        self._clock = clock
        self._looked_s: float | None = None
        self._stalled_s = 0.0
        self._num_reports = 0
        self._steps = _StepTimes()
        self._names: set[str] = set()
        self._pids: Mapping[str, int] = {}
        self._status: dict[str, Any] | None = None
        self._phases: dict[str, Beat] = {}
        self._unanswered_s = 0.0

    def look(
        self,
        status: dict[str, Any] | None,
        beats: Mapping[str, Beat],
        silent_s: Mapping[str, float],
        pids: Mapping[str, int],
    ) -> str | None:
        """The message for the user, if one is due.

        `status`: the controller's answer, None without one. `beats`, `silent_s`: the last heartbeat of each process and
        its age. `pids`: the processes that run.
        """
        now_s = self._clock()
        since_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, _MAX_SHARE_PER_LOOK * self._stall_s)
        self._looked_s = now_s
        self._names |= pids.keys()
        alive = {name: beat for name, beat in beats.items() if beat.pid == pids.get(name)}
        self._unanswered_s = 0.0 if status is not None else self._unanswered_s + since_s
        has_progress = self._has_progress(status, alive, pids)
        self._status = status or self._status
        if status is not None and (headline := self._steps.slow(status, now_s)):
            return self._report(headline, alive, silent_s, pids)
        if has_progress:
            stalled_s, was_reported = self._stalled_s, self._num_reports > 0
            self._stalled_s, self._num_reports = 0.0, 0
            return f"areal: progress again, after {stalled_s:.0f} s without" if was_reported else None
        self._stalled_s += since_s
        if self._stalled_s < self._stall_s * (self._num_reports + 1):
            return None
        self._num_reports += 1
        return self._report(f"no progress for {self._stalled_s:.0f} s", alive, silent_s, pids)

    def _has_progress(self, status: dict[str, Any] | None, alive: Mapping[str, Beat], pids: Mapping[str, int]) -> bool:
        changed = dict(pids) != self._pids
        self._pids = dict(pids)
        if status is not None:
            changed |= self._status is None or _counters(status) != _counters(self._status)
        for name, beat in alive.items():
            if not name.startswith("trainer"):
                continue  # the controller counts the progress of the others
            before = self._phases.get(name)
            changed |= before is None or (before.doing, before.step) != (beat.doing, beat.step)
            changed |= before is not None and beat.for_s < before.for_s  # left the phase and returned between looks
            self._phases[name] = beat
        return changed

    def _report(
        self, headline: str, alive: Mapping[str, Beat], silent_s: Mapping[str, float], pids: Mapping[str, int]
    ) -> str:
        snapshot = RunSnapshot(
            status=self._status if self._unanswered_s < SILENT_S else None,
            beats=alive,
            running=frozenset(pids),
            known=frozenset(self._names),
            silent_s={name: silent_s[name] for name in alive},
            unanswered_s=self._unanswered_s,
        )
        for name in alive:  # a process without a heartbeat may not handle the signal yet, which would end it
            self._request_stacks(name, headline)
        return f"areal: {headline}: {'; '.join(explain(snapshot))}. Stacks of all processes: {self._stacks}"


def _counters(status: dict[str, Any]) -> object:
    fleet = status.get("replicas") or {}
    return [*(status.get(name) for name in _COUNTERS), fleet.get("generated_tokens")]


_TIMEOUT_S = 0.5
_PLAIN_INTERVAL_S = 10.0
_TAIL_BYTES = 1 << 16
_WAITING_S = 5.0  # After this time within one step the line also shows what the run waits for.


class Source(Protocol):
    """The source of the numbers of the status line."""

    def status(self) -> dict[str, Any] | None:
        """The state of the run; None without an answer."""
        ...

    def text(self, status: dict[str, Any] | None) -> str | None:
        """The status line for an answer of `status()`; None when nothing is known."""
        ...

    def read_last(self) -> str | None:
        """The line that stays after the run; None = what was shown."""
        ...


class RunStatus:
    """Refreshes the status line at the configured interval, by one request to the controller each time."""

    def __init__(
        self,
        config: LauncherConfig,
        backend: ProcessBackend,
        source: Source,
        line: StatusLine,
        liveness: LivenessWatch,
        stacks: Path,
        alarms: RunAlarmLines,
        held_out: HeldOutLines,
    ) -> None:
        self._interval_s = config.status_interval_s
        self._alarms = alarms
        self._held_out = held_out
        self._source = source
        self._line = line
        self._liveness = liveness
        self._stall = StallWatch(config.stall_s, stacks, backend.request_stacks)
        self._next_s = 0.0
        self._has_failure = False
        self.last: dict[str, Any] | None = None
        """The answer of the controller to the last request; None without one."""
        self.last_known: dict[str, Any] | None = None
        """The last answer of the controller."""

    def show(self, children: Sequence[Child], *, was_ready: bool) -> None:
        """Refresh the line when it is due. `was_ready`: all processes were ready once."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        self.last = status = self._source.status()
        self.last_known = status or self.last_known
        self._show_new()
        pids = {child.name: child.pid for child in children if child.is_running and child.pid is not None}
        if report := self._stall.look(status, self._liveness.beats, self._liveness.silent_s, pids):
            self._line.say(report)
        failure = status.get("first_failure", "") if status else ""
        if failure and not self._has_failure:
            self._has_failure = True
            self._line.say(f"areal: warning: {failure}")
        parts = [self._source.text(status) if was_ready else None, waiting_text(children, now_s)]
        if any(parts):
            self._line.show(" | ".join(part for part in parts if part))

    def _show_new(self) -> None:
        for text in (*self._held_out.new(), *self._alarms.new()):
            self._line.say(f"areal: {text}")

    def end(self) -> None:
        """Leave the result of the run as the last line."""
        self._show_new()
        self._line.end(self._source.read_last())


def waiting_text(children: Sequence[Child], now_s: float) -> str | None:
    """Which processes are not ready yet, and the seconds since their start; None when all are ready."""
    waiting = [child for child in children if not child.is_ready and child.exit_code != 0]
    if not waiting:
        return None
    waited_s = now_s - min((child.started_s for child in waiting if child.is_running), default=now_s)
    return f"waiting {waited_s:.0f} s for {', '.join(child.name for child in waiting)} to get ready"


class StatusSource:
    """Reads the state of a run from the controller, or from metrics.jsonl when there is none."""

    def __init__(
        self, registry: NameRegistry, metrics: Path, *, has_controller: bool, total_steps: int | None, token: str = ""
    ) -> None:
        self._registry = registry
        self._headers = {"Authorization": f"Bearer {token}"}
        self._metrics = metrics
        self._has_controller = has_controller
        self._total_steps = total_steps
        self._step: int | None = None
        self._step_since_s = 0.0
        # The client uses no proxy: the controller is in the network of the run.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def status(self) -> dict[str, Any] | None:
        """The controller's answer to one request; None without a controller or without an answer."""
        entry = self._registry.get("controller") if self._has_controller else None
        if entry is None:
            return None
        try:
            request = urllib.request.Request(f"{json.loads(entry)['address']}/status", headers=self._headers)
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                status = json.loads(answer.read())
            return status if isinstance(status, dict) else None
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            return None

    def text(self, status: dict[str, Any] | None) -> str | None:
        """The status line for an answer of `status()`; None when nothing is known."""
        if not self._has_controller:
            return self.read_last()
        if status is None:
            return None
        now_s = time.monotonic()
        if status.get("step") != self._step:
            self._step, self._step_since_s = status.get("step"), now_s
        return rollout_line(status, self._total_steps, is_waiting=now_s - self._step_since_s >= _WAITING_S)

    def read_last(self) -> str | None:
        """The status line from the last record of the metrics; None without one."""
        if (last := last_record(self._metrics)) is None:
            return None
        return (finished_line if self._has_controller else training_line)(last, self._total_steps)


@dataclass(frozen=True, slots=True)
class EvaluationSource:
    """Reads the state of an evaluation without training from the heartbeat of its process."""

    heartbeats: Path

    def status(self) -> dict[str, Any] | None:
        beat = read_beats(self.heartbeats).get("controller")
        return None if beat is None else {"awaited": beat.doing}

    def text(self, status: dict[str, Any] | None) -> str | None:
        return None if status is None else str(status["awaited"])

    def read_last(self) -> str | None:
        return None


def last_record(path: Path) -> dict[str, Any] | None:
    """The last complete line of a metrics file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
        return json.loads(lines[-2]) if len(lines) > 1 else None
    except (OSError, ValueError):
        return None


def rollout_line(status: dict[str, Any], total_steps: int | None, *, is_waiting: bool) -> str:
    """The line of an asynchronous run.

    `is_waiting`: also say what the run waits for, how many servers serve, and which reward calls bound the run.
    """
    parts = [
        _step(status, status.get("total_steps") or total_steps),
        f"reward {_number(status.get('reward_mean'), '.3f')}",
        f"queue {status.get('waiting', 0)}+{status.get('running', 0)} running"
        + "".join(_ended(status, name) for name in ("rejected", "failed") if status.get(name)),
        f"staleness {_number(status.get('staleness_mean'), '.2f')}",
        f"{_number(status.get('tokens_per_s'), ',.0f')} tokens/s",
    ]
    if is_waiting:
        replicas: list[dict[str, Any]] = (status.get("replicas") or {}).get("replicas") or []
        num_serving = sum(replica["state"] == "serving" for replica in replicas)
        if num_serving < len(replicas):
            parts.append(f"{num_serving} of {len(replicas)} servers serve")
        parts.append(f"waits for {status.get('awaited') or '?'}")
        parts += filter(None, [status.get("rewards")])
    return " | ".join(parts)


def _ended(status: dict[str, Any], outcome: str) -> str:
    """The number of episodes with an outcome, and its most frequent reason."""
    prefix, reasons = f"{outcome}: ", status.get("reasons") or {}
    counts = {name.removeprefix(prefix): count for name, count in reasons.items() if name.startswith(prefix)}
    reason = f" ({max(counts, key=counts.__getitem__)})" if counts else ""
    return f", {status[outcome]} {outcome}{reason}"


def finished_line(record: dict[str, Any], total_steps: int | None) -> str:
    """The line of an asynchronous run that has ended."""
    reward, staleness = record.get("rollout/reward"), record.get("rollout/staleness_mean")
    return f"{_step(record, total_steps)} | reward {_number(reward, '.3f')} | staleness {_number(staleness, '.2f')}"


def training_line(record: dict[str, Any], total_steps: int | None) -> str:
    """The line of a run without rollouts."""
    loss, speed = _number(record.get("loss"), ".4f"), _number(record.get("trained_tokens_per_s"), ",.0f")
    return f"{_step(record, total_steps)} | loss {loss} | {speed} tokens/s"


def _step(record: dict[str, Any], total_steps: int | None) -> str:
    return f"step {record.get('step', 0)}/{'?' if total_steps is None else total_steps}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def fitted(text: str, width: int) -> str:
    """The line in at most `width` columns: whole parts in the middle are left out first, then the end is cut."""
    parts = text.split(" | ")
    while len(parts) > 2 and cell_len(" | ".join(parts)) > width:
        del parts[2]
    text = " | ".join(parts)
    return text if cell_len(text) <= width else set_cell_size(text, width)


class StatusLine:
    """One line: refreshed in place on a terminal, else printed as a new line at most every 10 seconds."""

    def __init__(self, stream: TextIO | None = None, *, width: Callable[[], int] | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._width = width or (lambda: shutil.get_terminal_size().columns)
        self._live = self._stream.isatty()
        self._shown = ""
        self._shown_s = float("-inf")

    def show(self, text: str) -> None:
        """Show `text`; outside of a terminal, only if it is new and the interval is over."""
        if self._live:
            self._stream.write("\r" + fitted(text, self._width() - 1) + "\x1b[K")
        elif text != self._shown and time.monotonic() - self._shown_s >= _PLAIN_INTERVAL_S:
            self._stream.write(text + "\n")
            self._shown_s = time.monotonic()
        else:
            return
        self._shown = text
        self._stream.flush()

    def say(self, text: str) -> None:
        """Print a line that stays, above the live one."""
        self._stream.write(("\r\x1b[K" if self._live and self._shown else "") + text + "\n")
        self._stream.flush()
        self._shown = ""

    def end(self, text: str | None) -> None:
        """Leave `text`, or what is shown, as the last line."""
        shown, self._shown = self._shown, ""
        if self._live and shown:
            self._stream.write("\n" if text is None else "\r\x1b[K")
            shown = "" if text is not None else shown
        if text is not None and text != shown:
            self._stream.write(text + "\n")
        self._stream.flush()


# ----------------------------------------------------------------------------------------------------------------------
# A run that its user stops and continues: the requests to stop, what would be lost, and what the user reads.

_CHANGED = "areal: changed since the earlier run: "


class Interruptions:
    """Number of the user's requests to stop: Ctrl-C, SIGTERM or a closed terminal."""

    def __init__(self) -> None:
        self.count = 0
        self.may_wait = False
        """The first was Ctrl-C: a user waits, and may press it again. Other signals come with a time limit."""

    def add(self, number: int, _: object = None) -> None:
        """Signal handler. A terminal that closes may send SIGHUP several times, which is one request."""
        self.may_wait = self.may_wait or (number == signal.SIGINT and self.count == 0)
        self.count = max(self.count, 1) if number == signal.SIGHUP else self.count + 1


def trained_steps(paths: RunPaths, status: Mapping[str, Any] | None = None) -> int:
    """Train steps of the metrics, or of the controller's `status`: servers get the weights of a step before its
    evaluation, and its metrics are written after that."""
    return max((last_record(paths.metrics) or {}).get("step", 0), (status or {}).get("version") or 0)


def has_saved(paths: RunPaths, steps: int) -> bool:
    """Whether the newest recovery checkpoint contains `steps` train steps. One that a thread of the trainers was still
    writing may contain fewer."""
    saved = newest_checkpoint(paths)
    return (step_of(saved) if saved else 0) >= steps


def how_to_continue(newest: Path | None, mode: str, command: Sequence[str]) -> str:
    """The line after an interruption. `newest`: the newest recovery checkpoint; `command`: this process's words."""
    words = [word for word in public_command(command) if word != "--overwrite"]
    if len(words) > 1 and Path(words[1]).name == "areal":  # the console script
        words = ["areal", *words[2:]]
    words += [] if mode in ("auto", "resume") else ["recover.mode=auto"]
    place = f"newest recovery checkpoint: {newest.name}; " if newest else ""
    return f"areal: {place}to continue: {shlex.join(words)}"


def read_tree(path: Path) -> dict[str, Any]:
    """The values of a configuration file by dotted path; empty when there is none that can be read."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return dict(_leaves("", tree)) if isinstance(tree, Mapping) else {}


def saved_tree(config: BaseExperimentConfig, extras: dict[str, Any], numbers: Mapping[str, str]) -> dict[str, Any]:
    """What `read_tree` would find after `save_config`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        save_config(config, path, extra=extras, numbers=numbers)
        return read_tree(path)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), below)
    else:
        yield path, value


def changes_text(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line per option that differs from the earlier run.

    `recover.mode` is not shown, because it is how a run is continued.
    """
    missing = object()
    names = [name for name in dict.fromkeys([*before, *after]) if name != "recover.mode"]
    changed = [name for name in names if before.get(name, missing) != after.get(name, missing)]
    return [f"{_CHANGED}{name}: {before.get(name, 'unset')} -> {after.get(name, 'unset')}" for name in changed]


def keep_changes(paths: RunPaths, changes: Sequence[str]) -> None:
    """Where the earlier run has trained, add the lines for changed options to a file, with its train step."""
    if last_record(paths.metrics) is None:
        return
    newest = newest_checkpoint(paths)
    row = {"step": step_of(newest) if newest else 0, "changes": [line.removeprefix(_CHANGED) for line in changes]}
    append_line(paths.option_changes, json.dumps(row).encode())
