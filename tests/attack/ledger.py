"""Damage to the ledger of a run, as a disk, a file system or a hand could do it. Each function changes files only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

_GROUP = b'{"event":"group"'


def newest(ledger: Path, pattern: str) -> Path:
    """The file with the highest number that is not empty."""
    return max(path for path in ledger.glob(pattern) if path.stat().st_size)


def groups_of(path: Path) -> Iterator[tuple[int, list[dict]]]:
    """Offset and events of each group in an events file."""
    offset, start, events = 0, 0, []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.startswith(_GROUP):
            if events:
                yield start, events
            start, events = offset, []
        events.append(json.loads(line))
        offset += len(line)
    if events:
        yield start, events


def num_trained(ledger: Path) -> int:
    """Train steps that the ledger records as consumed."""
    events = (e for path in sorted(ledger.glob("events-*")) for _, group in groups_of(path) for e in group)
    return sum(event["event"] == "consumed" for event in events)


def lose_steps(ledger: Path, left: int) -> None:
    """Cut the newest groups, so that the ledger records at most `left` train steps as consumed."""
    path = newest(ledger, "events-*.jsonl")
    before = num_trained(ledger) - sum(e["event"] == "consumed" for _, group in groups_of(path) for e in group)
    for offset, group in groups_of(path):
        before += sum(event["event"] == "consumed" for event in group)
        if before > left:
            cut(path, offset)
            return


def cut(path: Path, size: int) -> None:
    """Keep the first `size` bytes."""
    with open(path, "r+b") as file:
        file.truncate(size)


def flip(path: Path, offset: int) -> None:
    """Change one bit."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
