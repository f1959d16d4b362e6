"""A second proof of a run's ledger, from its raw lines: shares no code with the ledger, its states or its audit.

Each function returns sentences about what is wrong; none of them means that nothing was lost and nothing used twice.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def raw_events(folder: Path) -> list[Event]:
    """All lines of all events files but the marks of groups. ValueError at a line that is no JSON."""
    events: list[Event] = []
    for path in sorted(folder.glob("events-*.jsonl")):
        events += [json.loads(line) for line in path.read_bytes().splitlines()]
    return [event for event in events if event["event"] != "group"]


MAX_AGE = 8
"""An episode still running at the end that was started more than this number of policy versions ago is lost."""


@dataclass(kw_only=True)
class Counts:
    """What became of the admitted episodes, counted here."""

    admitted: int = 0
    running: int = 0
    waiting: int = 0
    rejected: int = 0
    failed: int = 0
    batched: int = 0
    """In the batch of a step that was never trained; the run ended before."""
    trained: int = 0
    lost: int = 0
    twice: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"admitted {self.admitted} = running {self.running} + waiting {self.waiting} + rejected {self.rejected} + "
            f"failed {self.failed} + batched {self.batched} + trained {self.trained}; "
            f"lost {self.lost}, trained twice {self.twice}"
        )


def check_episodes(events: Sequence[Event]) -> Counts:
    """Every admitted id has one fate, runs at the end or would be the next to run, and none is in two batches."""
    counts = Counts()
    say = counts.problems.append
    admissions: dict[int, list[tuple[int, int]]] = {}  # position in the ledger and version of every attempt
    fates: dict[int, list[str]] = {}
    for position, event in enumerate(events):
        if event["event"] == "admitted":
            attempts = admissions.setdefault(event["id"], [])
            if event["attempt"] != len(attempts):
                say(f"episode {event['id']}: attempt {event['attempt']} follows {len(attempts) - 1}")
            if event["id"] in fates:
                say(f"episode {event['id']} started again after it was {fates[event['id']]}")
            attempts.append((position, event["version"]))
        elif event["event"] in ("accepted", "rejected", "failed"):
            stale = event["event"] == "rejected" and event["reason"] == "stale"
            fates.setdefault(event["id"], []).append("stale" if stale else event["event"])
    if list(admissions) != list(range(len(admissions))):
        say("the admitted ids are not 0, 1, 2, ... in order: rows were skipped")
    for episode_id, fate in fates.items():
        if episode_id not in admissions:
            say(f"episode {episode_id} was {fate}, but never admitted")
        if len(fate) > 1 and fate != ["accepted", "stale"]:
            say(f"episode {episode_id} has more than one fate: {fate}")
    members = Counter(i for event in events if event["event"] == "batched" for i in event["ids"])
    for episode_id, times in members.items():
        if times > 1:
            say(f"episode {episode_id} is in {times} batches")
        if fates.get(episode_id) != ["accepted"]:
            say(f"episode {episode_id} is in a batch, but it was {fates.get(episode_id)}")
    forgotten = _forgotten(events, {i: admissions[i][-1] for i in admissions if i not in fates})
    if forgotten:
        say(f"episodes {forgotten} were admitted, have no fate and are not running any more")
    _count(counts, events, fates, members, len(admissions))
    counts.lost = (
        len(forgotten)
        + counts.admitted
        - sum((counts.running, counts.waiting, counts.rejected, counts.failed, counts.batched, counts.trained))
    )
    return counts


def _forgotten(events: Sequence[Event], still_open: dict[int, tuple[int, int]]) -> list[int]:
    """Of the episodes without a fate (last start: place and version) those that no controller runs or will run first.

    A controller that needs no more episodes does not start again what ran before it. It may not start a new one then.
    """
    last_start = max((k for k, event in enumerate(events) if event["event"] == "started"), default=0)
    needs_new = any(event["event"] == "admitted" and event["attempt"] == 0 for event in events[last_start:])
    version = max((event["version"] for event in events if event["event"] in ("published", "consumed")), default=0)
    return [
        i
        for i, (place, started) in still_open.items()
        if (needs_new if place < last_start else started < version - MAX_AGE)
    ]


def _count(
    counts: Counts, events: Sequence[Event], fates: dict[int, list[str]], members: Counter[int], num_admitted: int
) -> None:
    last = Counter(fate[-1] for fate in fates.values())
    consumed = {event["step"] for event in events if event["event"] == "consumed"}
    counts.admitted = num_admitted
    counts.running = num_admitted - len(fates)
    counts.rejected = last["rejected"] + last["stale"]
    counts.failed = last["failed"]
    counts.trained = sum(len(e["ids"]) for e in events if e["event"] == "batched" and e["step"] in consumed)
    counts.batched = sum(len(e["ids"]) for e in events if e["event"] == "batched" and e["step"] not in consumed)
    counts.waiting = sum(fate == ["accepted"] and episode_id not in members for episode_id, fate in fates.items())
    counts.twice = sum(times - 1 for times in members.values())


def check_steps(events: Sequence[Event]) -> list[str]:
    """Steps 0..n-1 are batched once and consumed once, in order; trained again only after a trainer went back."""
    problems: list[str] = []
    for name in ("batched", "consumed"):
        steps = [event["step"] for event in events if event["event"] == name]
        if steps != list(range(len(steps))):
            problems.append(f"steps {name}: {steps}, expected 0, 1, 2, ... once each")
    position = 0
    for event in events:
        kind, step = event["event"], event.get("step")
        if kind == "attached":
            if step > position:
                problems.append(f"a trainer attached at step {step}, but only {position} were trained")
            position = step
        elif kind in ("consumed", "trained_again"):
            if step != position:
                problems.append(f"step {step} {kind}, but the trainer is before step {position}")
            position = step + 1
    return problems


def check_weights(events: Sequence[Event]) -> tuple[int, list[str]]:
    """A step trained again gives the weights it gave before. Returns how many repetitions could be compared."""
    problems: list[str] = []
    first: dict[int, str] = {}
    compared = 0
    for event in events:
        if event["event"] not in ("consumed", "trained_again"):
            continue
        step, weights = event["step"], event.get("weights", "")
        if event["event"] == "consumed":
            first[step] = weights
        elif weights and first.get(step):
            compared += 1
            if weights != first[step]:
                problems.append(f"step {step} trained again gave weights {weights}, the first time {first[step]}")
    return compared, problems


def check_versions(events: Sequence[Event]) -> list[str]:
    """No token is newer than the newest publication at its time, and no batch holds tokens of a later policy."""
    problems: list[str] = []
    newest = 0
    spans: dict[int, tuple[int, int]] = {}
    for event in events:
        kind = event["event"]
        if kind in ("published", "attached"):
            newest = max(newest, event["version"])
        elif kind == "accepted":
            spans[event["id"]] = (event["min_version"], event["max_version"])
            if event["max_version"] > newest + 1:  # replicas may serve a version a moment before it is written down
                problems.append(f"episode {event['id']} has tokens of version {event['max_version']}, before {newest}")
        elif kind == "batched":
            too_new = [i for i in event["ids"] if spans.get(i, (0, 0))[1] > event["version"]]
            if too_new:
                problems.append(f"batch {event['step']} at version {event['version']} holds later tokens: {too_new}")
    return problems


def check_rows(
    events: Sequence[Event], folder: Path, prompt_of: Callable[[list[int]], str], row_of: Callable[[int], str]
) -> list[str]:
    """Each episode's recorded prompt is the row that its admission number means, so rows come once per epoch.

    `prompt_of`: token ids -> text; `row_of`: episode id -> the prompt of its row.
    """
    problems: list[str] = []
    for event in events:
        if event["event"] != "accepted":
            continue
        actual, expected = prompt_of(first_prompt(folder, event["payload"])), row_of(event["id"])
        if actual != expected:
            problems.append(f"episode {event['id']} was made from {actual!r}, its row is {expected!r}")
    return problems


def first_prompt(folder: Path, where: Sequence[int]) -> list[int]:
    """The prompt's token ids of the first trajectory in a payload: those before the first token to learn from."""
    segment, offset, size = where
    with open(folder / f"payload-{segment:06d}.bin", "rb") as file:
        file.seek(offset)
        data = file.read(size)
    start = 8  # magic and checksum
    _, num_trajectories, num_tokens, header_bytes = struct.unpack_from("<QIII", data, start)
    start += 20 + header_bytes + 4 * num_trajectories
    ids = struct.unpack_from(f"<{num_tokens}i", data, start)
    mask_start = start + 4 * num_tokens * 2 + 4 * num_trajectories + 4 * num_tokens
    mask = data[mask_start : mask_start + num_tokens]
    return list(ids[: mask.index(1)])


def check_metrics(path: Path, num_steps: int) -> list[str]:
    """metrics.jsonl has every step once and in order, from the evaluation before training (step 0) on."""
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    expected = list(range(num_steps + 1))
    if steps == expected:
        return []
    missing, extra = sorted(set(expected) - set(steps)), [s for s, times in Counter(steps).items() if times > 1]
    return [f"metrics.jsonl: steps missing {missing}, more than once {extra}, last {steps[-1:]} of {num_steps}"]


def seconds_to_training(events: Sequence[Event], at: float) -> tuple[float | None, float | None]:
    """From `at` (Unix seconds) to the next step trained, and to the next step trained for the first time."""
    trained = [e for e in events if e["event"] in ("consumed", "trained_again") and e["at"] > at]
    new = [e for e in trained if e["event"] == "consumed"]
    return (trained[0]["at"] - at if trained else None, new[0]["at"] - at if new else None)
