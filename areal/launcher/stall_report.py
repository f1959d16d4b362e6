"""The description of a stalled run. Pure functions: a snapshot of its processes in, clauses out, the cause first."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from areal.system.heartbeat import Beat

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
    found = [(dead, "not running"), (starting, "starting or ending, without a heartbeat")]
    return [f"{_listed(names)} {'is' if len(names) == 1 else 'are'} {state}" for names, state in found if names]


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
    found: dict[tuple[str, int | None], list[tuple[float, str]]] = {}
    for name, beat in run.beats.items():
        if name.startswith("trainer"):
            for_s = beat.for_s + run.silent_s.get(name, 0.0)
            found.setdefault((beat.doing, beat.step), []).append((for_s, name))
    groups = [
        _Group(doing, step, max(seconds for seconds, _ in members), sorted(name for _, name in members))
        for (doing, step), members in found.items()
    ]
    return sorted(groups, key=lambda group: (-1 if group.step is None else group.step, -group.for_s))


def _trainers(group: _Group) -> str:
    who = group.names[0] if len(group.names) == 1 else f"each of {_listed(group.names)}"
    if group.step is None:
        return f"{who} {group.doing} (for {group.for_s:.0f} s)"
    if group.doing == "rollout":
        return f"{who} has waited {group.for_s:.0f} s for batch {group.step}"
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
    """Where running episodes are, as far as the fleet's counters show."""
    status = run.status or {}
    fleet: dict[str, Any] = status.get("replicas") or {}
    at_servers = [_at_server(replica) for replica in fleet.get("replicas") or [] if replica["running"]]
    queued = fleet.get("waiting_requests") or 0
    if at_servers:
        return [f"requests receive no token: {', '.join(at_servers)}" + (f", {queued} without a server" * bool(queued))]
    if queued:
        return [f"{queued} requests wait for a server"]
    if (running := status.get("running")) and not status.get("catching_up"):
        return [f"{running} episodes run without a request to a server: they wait for rewards or in workflow code"]
    return []


def _at_server(replica: dict[str, Any]) -> str:
    """Requests at a server, and how many of them are in its queue."""
    queued = (replica.get("load") or {}).get("queued")
    return f"{replica['running']} at {replica['name']}" + (f" ({queued} in its queue)" if queued else "")


def _listed(found: Collection[str]) -> str:
    names = sorted(found)
    if len(names) > _MAX_NAMES:
        return f"{', '.join(names[:_MAX_NAMES])} and {len(names) - _MAX_NAMES} more"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
