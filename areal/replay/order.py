"""Owns what a replay is told to do, as its ranks read it from the folder of the replay."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from areal.system.durable import write_atomic
from areal.system.run_paths import RunPaths

_ORDER = "replay.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOrder:
    """One replay."""

    run: str
    """Folder of the recorded run."""
    start_step: int
    """Steps done before: 0, or those of the recovery checkpoint that it starts from."""
    end_step: int
    """Steps done when it ends."""
    export: bool
    """Write the last weights as Hugging Face checkpoints."""

    def write(self, folder: Path) -> None:
        write_atomic(folder / _ORDER, json.dumps(dataclasses.asdict(self), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls(**json.loads((folder / _ORDER).read_bytes()))


def config_of(folder: Path) -> Path:
    """The configuration of the replay in `folder`, overrides included."""
    return folder / "config.yaml"


def metrics_of(folder: Path) -> Path:
    """One line a step: its metrics as in the run's, and "weights", the checksum after it."""
    return folder / "metrics.jsonl"


def checkpoint_of(run: RunPaths, steps_done: int) -> Path:
    """The recovery checkpoint of a run after so many steps."""
    return run.recover / f"step-{steps_done:06d}"
