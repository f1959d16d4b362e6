"""The levels of a curriculum: a pure fold of the events of one file, so that a run that continues has the same ones.

An episode that runs again, after a kill, gets the level of its first start. The file is RUN/environments/levels.jsonl.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from areal.api.errors import ConfigError
from areal.system.durable import append_whole

_KEY = "workflow_args.curriculum"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumRule:
    """When a level changes."""

    target: float
    """Success rate of the last `groups` groups at which the level rises; below half of it the level falls."""
    groups: int = 16
    start: int = 0  # First level.

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "CurriculumRule":
        """ConfigError for an option that is unknown or out of range."""
        if unknown := sorted(set(fields) - {"target", "groups", "start"}):
            raise ConfigError(f"{_KEY}.{unknown[0]} is not known: use target, groups, start", code="config.unknown_key")
        rule = cls(**{"target": 0.5, **fields})
        if not 0 < rule.target <= 1 or rule.groups < 1 or rule.start < 0:
            text = "target is above 0 and at most 1, groups at least 1, start at least 0"
            raise ConfigError(f"{_KEY}: {text}", code="workflow.invalid_args")
        return rule


def opened(file: Path) -> tuple[FileIO, list[dict[str, Any]]]:
    """Opens a file with an event of JSON in each line. Returns it, ready for new events, and the events that it has."""
    file.parent.mkdir(parents=True, exist_ok=True)
    whole, _, rest = file.read_bytes().rpartition(b"\n") if file.exists() else (b"", b"", b"")
    if rest:  # of a write that a kill cut
        os.truncate(file, len(whole) + bool(whole))
    return open(file, "ab", buffering=0), [orjson.loads(line) for line in whole.splitlines()]


@dataclass(slots=True)
class _Task:
    """The state of one dataset."""

    level: int
    rates: list[float] = field(default_factory=list[float])  # Success rates of the groups at this level.


class Curriculum:
    """Levels by dataset. `file` None: nothing is recorded, as without a run."""

    def __init__(self, rule: CurriculumRule, file: Path | None) -> None:
        self._rule = rule
        self._tasks: dict[str, _Task] = {}
        self._levels: dict[int, int] = {}  # Episode -> its level.
        self._ended: set[int] = set()
        self._file = None
        if file is not None:
            self._file, events = opened(file)
            for event in events:
                self._apply(event)

    def begin(self, episode: int | None, env: str, max_level: int) -> int:
        """The level of an episode."""
        if episode is not None and episode in self._levels:
            return self._levels[episode]
        level = min(self._task(env).level, max_level)
        self._add({"event": "begin", "episode": episode, "env": env, "level": level})
        return level

    def end(self, episode: int | None, env: str, level: int, rate: float, max_level: int) -> None:
        """A group of a dataset has ended with this success rate."""
        if episode is None or episode not in self._ended:
            top = max_level
            self._add({"event": "end", "episode": episode, "env": env, "level": level, "rate": rate, "top": top})

    def _task(self, env: str) -> _Task:
        return self._tasks.setdefault(env, _Task(self._rule.start))

    def _add(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            append_whole(self._file, orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE))
        self._apply(event)

    def _apply(self, event: Mapping[str, Any]) -> None:
        episode, task = event["episode"], self._task(event["env"])
        if event["event"] == "begin":
            if episode is not None:
                self._levels[episode] = event["level"]
            if event["level"] < task.level:  # that was above the top
                task.level, task.rates = event["level"], []
            return
        if episode is not None:
            self._ended.add(episode)
        if event["level"] != task.level:  # it began before the level changed
            return
        task.rates.append(event["rate"])
        if len(task.rates) < self._rule.groups:
            return
        rate = sum(task.rates[-self._rule.groups :]) / self._rule.groups
        step = 1 if rate >= self._rule.target else -1 if rate < self._rule.target / 2 else 0
        level = min(max(task.level + step, 0), event["top"])
        if level != task.level:
            task.level, task.rates = level, []
        else:
            del task.rates[: -self._rule.groups]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
