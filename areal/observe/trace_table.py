"""Where the time of train steps, episodes and server requests goes, from the events of a trace. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

Event = Mapping[str, Any]
Interval = tuple[float, float]
"""Start and end, microseconds."""
OTHER = "other"
_SHOWN = 0.0005
"""Smallest share of a part in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTable:
    """How the time of one kind of work divides into parts, over all of it."""

    kind: str
    """step, episode or request."""
    process: str
    """Whose work it is, for example trainer-0."""
    count: int
    mean_s: float
    longest_s: float
    parts: Mapping[str, float]
    """Part -> mean seconds per piece of work in which at least one such part ran; `other` = none did. Parts may
    overlap, for example requests and rewards of one episode."""
    busy_share: float
    """Share of the time from the first to the last piece of work in which at least one ran."""

    def lines(self) -> list[str]:
        head = f"{self.process}: {self.count} {self.kind}s of {self.mean_s:.3g} s (longest {self.longest_s:.3g} s)"
        head += f", one or more during {self.busy_share:.0%} of the time"
        width = max(map(len, self.parts), default=0)
        whole = self.mean_s or 1.0
        rows = sorted(self.parts.items(), key=lambda part: -part[1])
        rows = [(name, spent) for name, spent in rows if spent >= _SHOWN * whole]
        return [head, *(f"  {name:<{width}}  {spent:9.4f} s  {spent / whole:4.0%}" for name, spent in rows)]


def time_tables(events: Iterable[Event]) -> list[TimeTable]:
    """One table for the steps of each trainer, the episodes of the controller and the requests of each server."""
    names: dict[int, str] = {}
    phases: dict[int, list[Event]] = defaultdict(list)
    tracks: dict[tuple[int, str], dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event["ph"] == "M":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            phases[event["pid"]].append(event)
        elif event["ph"] == "b":
            tracks[event["pid"], event["cat"]][event["id"]].append(event)
    found = [_steps(names.get(pid, str(pid)), spans) for pid, spans in phases.items()]
    for (pid, kind), by_id in tracks.items():
        found += _tracks(names.get(pid, str(pid)), kind, list(by_id.values()))
    return sorted((table for table in found if table is not None), key=lambda table: (table.kind, table.process))


def _steps(process: str, spans: Sequence[Event]) -> TimeTable | None:
    """A train step begins with its phase `rollout`, or with its first phase in a run without rollouts."""
    ordered = sorted(spans, key=lambda event: event["ts"])
    first = "rollout" if any(event["name"] == "rollout" for event in ordered) else ordered[0]["name"]
    starts = [event["ts"] for event in ordered if event["name"] == first]
    end = max(event["ts"] + event["dur"] for event in ordered)
    edges = [*starts, end]
    inside = [event for event in ordered if event["ts"] >= starts[0]]
    parts: dict[str, float] = defaultdict(float)
    for name in {event["name"] for event in inside}:
        parts[name] = _length(_interval(event) for event in inside if event["name"] == name) / 1e6 / len(starts)
    covered = _length(map(_interval, inside)) / 1e6 / len(starts)
    lengths = [(after - before) / 1e6 for before, after in pairwise(edges)]
    parts[OTHER] = max(0.0, fmean(lengths) - covered)
    return TimeTable(
        kind="step",
        process=process,
        count=len(starts),
        mean_s=fmean(lengths),
        longest_s=max(lengths),
        parts=dict(parts),
        busy_share=covered / fmean(lengths) if fmean(lengths) else 0.0,
    )


def _tracks(process: str, kind: str, works: Sequence[Sequence[Event]]) -> list[TimeTable]:
    """`works`: the events of each piece of work; the one named as its kind is the whole."""
    wholes = [event for work in works for event in work if event["name"] == kind]
    if not wholes:
        return []
    seconds: dict[str, float] = defaultdict(float)
    for work in works:
        parts = [event for event in work if event["name"] != kind]
        for name in {event["name"] for event in parts}:
            seconds[name] += _length(_interval(event) for event in parts if event["name"] == name) / 1e6
        whole = sum(event["args"]["us"] for event in work if event["name"] == kind)
        seconds[OTHER] += max(0.0, whole - _length(map(_interval, parts))) / 1e6
    lengths = [event["args"]["us"] / 1e6 for event in wholes]
    intervals = [_interval(event) for event in wholes]
    passed = max(end for _, end in intervals) - min(start for start, _ in intervals)
    table = TimeTable(
        kind=kind,
        process=process,
        count=len(wholes),
        mean_s=fmean(lengths),
        longest_s=max(lengths),
        parts={name: spent / len(wholes) for name, spent in seconds.items()},
        busy_share=_length(intervals) / passed if passed else 1.0,
    )
    return [table]


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + (event["dur"] if event["ph"] == "X" else event["args"]["us"])


def _length(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
