"""Owns the words for a run that stands still. Pure: what is known of its processes in, clauses out, the cause first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from areal.system.heartbeat import Beat

SILENT_S = 10.0
"""A process beats once a second; one that has not for so long is worth a word."""
_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the launcher knows of a run that stands still."""

    status: dict[str, Any] | None
    """The controller's last answer; None when that was long ago, or there is no controller."""
    beats: Mapping[str, Beat]
    """Of the processes that run and have given a sign of life."""
    running: frozenset[str]
    known: frozenset[str]
    """All processes that ever ran."""
    silent_s: Mapping[str, float]
    """Since the last sign of life, for each in `beats`."""
    unanswered_s: float
    """Since the controller last answered."""


def explain(view: View) -> list[str]:
    """Who waits for whom, the end of the chain first."""
    groups = _trainer_groups(view)
    trainers = _trainers(groups)
    controller = _controller(view)
    clauses = _missing(view) + _silent(view)
    if len(groups) > 1:
        return clauses + trainers + _servers(view) + controller
    if view.status is not None and str(view.status.get("asked_for")).startswith(("the trainer", "a trainer")):
        return clauses + trainers + controller + _servers(view)
    return clauses + _servers(view) + _requests(view) + controller + trainers


def _missing(view: View) -> list[str]:
    gone = [name for name in view.known - view.running if not name.startswith("server")]  # the fleet tells of those
    starting = view.running - view.beats.keys()
    told = [(gone, "not running"), (starting, "starting or ending, without a sign of life")]
    return [f"{_listed(names)} {'is' if len(names) == 1 else 'are'} {how}" for names, how in told if names]


def _silent(view: View) -> list[str]:
    return [
        f"{name} (pid {view.beats[name].pid}) has given no sign of life for {silent_s:.0f} s"
        for name, silent_s in sorted(view.silent_s.items(), key=lambda entry: -entry[1])
        if silent_s >= SILENT_S
    ]


@dataclass(frozen=True, slots=True)
class _Group:
    """Trainer ranks that do the same."""

    doing: str
    step: int | None
    for_s: float
    names: list[str]


def _trainer_groups(view: View) -> list[_Group]:
    """The ranks that are behind first: at the smaller step or, in the same step, those that entered their phase
    first, since the others went past them."""
    found: dict[tuple[str, int | None], list[tuple[float, str]]] = {}
    for name, beat in view.beats.items():
        if name.startswith("trainer"):
            for_s = beat.for_s + view.silent_s.get(name, 0.0)
            found.setdefault((beat.doing, beat.step), []).append((for_s, name))
    groups = [
        _Group(doing, step, max(seconds for seconds, _ in members), sorted(name for _, name in members))
        for (doing, step), members in found.items()
    ]
    return sorted(groups, key=lambda group: (-1 if group.step is None else group.step, -group.for_s))


def _trainers(groups: list[_Group]) -> list[str]:
    sentences = [_trainer(group) for group in groups]
    if len(groups) > 1:
        sentences[0] += ", and holds up the others"
    return sentences


def _trainer(group: _Group) -> str:
    who = group.names[0] if len(group.names) == 1 else f"each of {_listed(group.names)}"
    since = f"since {group.for_s:.0f} s"
    if group.step is None:
        return f"{who} {group.doing} {since}"
    if group.doing == "rollout":
        return f"{who} waits in rollout for batch {group.step} {since}"
    where = group.doing if group.doing.startswith("after ") else f"in {group.doing}"
    return f"{who} is {where} of step {group.step} {since}"


def _controller(view: View) -> list[str]:
    if "controller" not in view.running:
        return []  # there is none, or it is told of as missing
    if view.status is None:
        beat = view.beats.get("controller")
        last = f"; what it told last is that it waits for {beat.doing}" if beat is not None else ""
        return [f"the controller has not answered for {view.unanswered_s:.0f} s{last}"]
    since_s = view.status.get("waiting_since_s")
    since = "" if since_s is None else f" since {since_s:.0f} s"
    shut = view.status.get("shut_because") or ""
    told = f"the controller waits for {view.status.get('asked_for') or '?'}{since}"
    return [told + (f", and no episode starts because {shut}" if shut else "")]


def _servers(view: View) -> list[str]:
    """The replicas that do not serve what they should."""
    status = view.status or {}
    replicas: list[dict[str, Any]] = (status.get("replicas") or {}).get("replicas") or []
    publishing = status.get("publishing")
    current = status.get("version") if publishing is None else publishing
    late = [replica for replica in replicas if replica["state"] != "serving" or replica["version"] != current]
    if publishing is not None:  # those that wait for the others are not the cause
        late = [replica for replica in late if replica["state"] == "updating"] or late
    told = [_server(replica, current, publishing) for replica in late]
    if told and not any(replica["state"] == "serving" for replica in replicas) and publishing is None:
        told[0] = "no server serves: " + told[0]
    return told


def _server(replica: dict[str, Any], current: int | None, publishing: int | None) -> str:
    name, state, version, reason = replica["name"], replica["state"], replica["version"], replica["reason"]
    if state == "absent":
        return f"{name} is absent: {reason}"
    if publishing is not None and state == "updating":
        return f"{name} is at version {version} and has not taken in {publishing} yet"
    if version != current:
        known = reason.startswith("holds version")
        return f"{name} is {state} at version {version} while {current} is current" + (
            f": {reason}" if reason and not known else ""
        )
    return f"{name} is {state}" + (f": {reason}" if reason else "")


def _requests(view: View) -> list[str]:
    """Where running episodes are, as far as the fleet's numbers tell."""
    status = view.status or {}
    fleet: dict[str, Any] = status.get("replicas") or {}
    running = status.get("running") or 0
    at_servers = {r["name"]: _at_server(r) for r in fleet.get("replicas") or [] if r["running"]}
    queued = fleet.get("waiting_requests") or 0
    if at_servers:
        where = ", ".join(f"{number} at {name}{of_these}" for name, (number, of_these) in at_servers.items())
        more = f", and {queued} wait for a server" if queued else ""
        return [f"requests get no token: {where}{more}"]
    if queued:
        return [f"{queued} requests wait for a server"]
    if running and not status.get("catching_up"):
        return [f"{running} episodes run without a request to a server: they wait for rewards or in workflow code"]
    return []


def _at_server(replica: dict[str, Any]) -> tuple[int, str]:
    """Requests that it has, and how many of them it says that it has not begun."""
    queued = (replica.get("load") or {}).get("queued")
    return replica["running"], f" ({queued} in its queue)" if queued else ""


def _listed(found: Collection[str]) -> str:
    names = sorted(found)
    if len(names) > _SHOWN:
        return f"{', '.join(names[:_SHOWN])} and {len(names) - _SHOWN} more"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
