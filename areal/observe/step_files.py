"""Files of a run with one line per step: metrics.jsonl, and the samples next to it."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import orjson

from areal.api.errors import InputError
from areal.system.durable import append_line, append_whole, write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One trajectory in a table of samples."""

    group: int
    """Equal for the trajectories of one prompt."""
    reward: float
    reward_parts: dict[str, float]
    prompt: str
    answer: str
    """Everything after the prompt, special tokens included."""
    num_generated: int
    """Generated tokens."""
    versions: list[int]
    """Lowest and highest policy version of the generated tokens; empty = none was generated."""
    stop_reason: str
    images: list[str] = field(default_factory=list[str])
    """SHA-256 of the image files, in the order of their places."""

    def cells(self) -> list[str]:
        """The row as text, in the order of SAMPLE_COLUMNS."""
        parts = ", ".join(f"{name} {score:g}" for name, score in self.reward_parts.items())
        versions = " to ".join(map(str, dict.fromkeys(self.versions)))
        return [
            f"{self.reward:g}",
            parts,
            self.prompt,
            self.answer,
            str(self.num_generated),
            versions,
            self.stop_reason,
            str(self.group),
            ", ".join(self.images),
        ]


SAMPLE_COLUMNS = (
    "reward",
    "parts",
    "prompt",
    "answer",
    "generated tokens",
    "versions",
    "stop reason",
    "group",
    "images",
)


class StepLines:
    """A file of JSON objects, one per line, each with the train step and the time (Unix seconds) of its writing."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        """Open for append. Removes lines from `first_step` on, which an attempt that died has written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if _is_before(line, first_step)]
        if kept != lines:
            write_atomic(path, b"".join(kept))
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def append(self, step: int, facts: Mapping[str, Any]) -> None:
        append_whole(self._file, _line(step, facts) + b"\n")

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
            self._file.close()


def append_step_line(path: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Append to a StepLines file that another process has open; that process may replace the file at its start."""
    append_line(path, _line(step, facts))


def _line(step: int, facts: Mapping[str, Any]) -> bytes:
    return json.dumps({"step": step, "time": round(time.time(), 3), **facts}, allow_nan=False).encode()


def read_step_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a StepLines file; none where there is no file. Damaged lines are left out."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if _step_of(line) is not None]


class JsonlTracker(StepLines):
    """metrics.jsonl: the values of every step; null for a value that is not finite.

    The samples of a step are a file `samples/step-000100.jsonl` next to it, one line per row.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        """Open the file and remove the samples from `first_step` on."""
        super().__init__(path, first_step=first_step)
        self._samples = path.parent / "samples"
        for old in self._samples.glob("step-*.jsonl"):
            if first_step <= 1 or old.name >= _samples_name(first_step):
                old.unlink()

    def log(self, step: int, values: dict[str, float]) -> None:
        self.append(step, {name: value if math.isfinite(value) else None for name, value in values.items()})

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._samples.mkdir(exist_ok=True)
        lines = [orjson.dumps({"step": step} | dataclasses.asdict(row)) + b"\n" for row in rows]
        path = self._samples / _samples_name(step)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(lines))  # without fsync, for which training would wait: nothing depends on it
        temporary.replace(path)


def _samples_name(step: int) -> str:
    return f"step-{step:06d}.jsonl"


def _is_before(line: bytes, first_step: int) -> bool:
    """Whether a line is complete and of a step before `first_step`. A start from step 1 keeps nothing."""
    step = _step_of(line)
    return step is not None and first_step > 1 and step < first_step


def _step_of(line: bytes) -> int | None:
    """The step of a complete line; None of a damaged one."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


# ----------------------------------------------------------------------------------------------------------------------
# `log_metric`: numbers that code inside an episode or a reward function reports by name.

_LOGGED: ContextVar[dict[str, list[float]] | None] = ContextVar("areal_episode_metrics", default=None)


class LoggedMetrics:
    """Collects what `log_metric` gets while its block runs, also in tasks and threads that the block starts."""

    __slots__ = ("_token", "_values")

    def __enter__(self) -> Self:
        self._values: dict[str, list[float]] = {}
        self._token = _LOGGED.set(self._values)
        return self

    def __exit__(self, *error: object) -> None:
        _LOGGED.reset(self._token)

    def means(self) -> dict[str, float]:
        """The mean of the values of each name."""
        return {name: sum(values) / len(values) for name, values in self._values.items()} if self._values else {}


def log_metric(name: str, value: float) -> None:
    """Report a number of the running episode, for example `log_metric("tool_calls", 2)`.

    Several values of one name are averaged within the episode, then over the episodes of the batch: the trackers and
    metrics.jsonl get the mean as rollout/episode/NAME, evaluations as eval/MODE/episode/NAME. In a reward function the
    name becomes reward/FUNCTION/NAME. Outside of an episode, for example in a test, it only checks its arguments.
    Raises InputError unless `value` is a finite number.
    """
    if not isinstance(name, str) or not hasattr(value, "__float__") or not math.isfinite(float(value)):
        message = f"log_metric({name!r}, {value!r}): the first must be text and the second a finite number"
        raise InputError(message, code="workflow.not_finite")
    if (logged := _LOGGED.get()) is not None:
        logged.setdefault(name, []).append(float(value))
