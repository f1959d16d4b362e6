"""The order of a replay, which its ranks read from the folder of the replay."""

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
    """The steps to replay, and the run."""

    run: str
    """Folder of the recorded run."""
    start_step: int
    """Steps done before the replay: 0, or the step of its recovery checkpoint."""
    end_step: int
    """Steps done after the replay."""
    export: bool
    """Export the final weights as Hugging Face checkpoints."""

    def write(self, folder: Path) -> None:
        write_atomic(folder / _ORDER, json.dumps(dataclasses.asdict(self), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls(**json.loads((folder / _ORDER).read_bytes()))


def config_of(folder: Path) -> Path:
    """The configuration of the replay in `folder`, overrides included."""
    return folder / "config.yaml"


def metrics_of(folder: Path) -> Path:
    """One line per step: metrics as in the run's file, and "weights", the checksum after the step."""
    return folder / "metrics.jsonl"


def checkpoint_of(run: RunPaths, steps_done: int) -> Path:
    """The recovery checkpoint of a run after `steps_done` steps."""
    return run.recover / f"step-{steps_done:06d}"
