"""Owns the recovery checkpoints of a trainer: where they lie, what is in them, which one a start goes on from."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import orjson

from areal.api.config import RecoverConfig
from areal.api.engine import TrainEngine
from areal.api.errors import ConfigError, InputError
from areal.observe.log import get_logger
from areal.system.durable import is_complete, publish_folder, write_atomic

NEXT = "next"
"""Folder in which a checkpoint is written before it is renamed to its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverPoint:
    """Where training stood: `step` train steps done, which is also the policy version of the weights."""

    step: int
    cadence_s: dict[str, float]
    """Seconds of the run's clock at which each periodic action last fired."""
    elapsed_s: float
    """Seconds of training so far."""


class RecoverStore:
    """RUN/recover/step-000123, each complete or ignored. The previous one stays until the new one is complete."""

    def __init__(self, folder: Path, config: RecoverConfig, *, num_ranks: int, is_rank0: bool) -> None:
        self._folder = folder
        self._config = config
        self._num_ranks = num_ranks
        self._is_rank0 = is_rank0

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        complete = [path for path in sorted(self._folder.glob("step-*")) if is_complete(path)]
        return complete[-1] if complete else None

    def start_from(self, *, after_failure: bool) -> Path | None:
        """What recover.mode says to go on from; None = start anew. ConfigError when mode=resume finds nothing."""
        mode = self._config.mode
        if mode == "disabled" or (mode == "fault" and not after_failure):
            return None
        newest = self.newest()
        if newest is None and mode == "resume":
            raise ConfigError(
                f"recover.mode=resume, but {self._folder} holds no complete checkpoint: use auto to start anew"
            )
        return newest

    def load(self, path: Path, engines: dict[str, TrainEngine]) -> RecoverPoint:
        """Bring every engine to the state in `path`."""
        state = orjson.loads((path / "state.json").read_bytes())
        if state.pop("num_ranks") != self._num_ranks:
            raise InputError(
                f"{path} was written by another number of trainer ranks than {self._num_ranks}: "
                "use the same allocation_mode to recover"
            )
        for role, engine in engines.items():
            engine.load(path / role, with_optimizer=True)
        point = RecoverPoint(**state)
        get_logger("trainer").info("recovered from %s: %d steps done", path, point.step)
        return point

    def save(self, point: RecoverPoint, engines: dict[str, TrainEngine], barrier: TrainEngine) -> Path:
        """Write a checkpoint; a collective. It counts only once it is renamed, complete and on disk."""
        writing = self._folder / NEXT
        if self._is_rank0:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
        _wait_for_all(barrier)
        for role, engine in engines.items():
            engine.save(writing / role, with_optimizer=True)
        _wait_for_all(barrier)
        final = self._folder / f"step-{point.step:06d}"
        if self._is_rank0:
            state = {
                "step": point.step,
                "cadence_s": point.cadence_s,
                "elapsed_s": point.elapsed_s,
                "num_ranks": self._num_ranks,
            }
            write_atomic(writing / "state.json", orjson.dumps(state))
            publish_folder(writing, final)
            for old in sorted(self._folder.glob("step-*"))[:-2]:
                shutil.rmtree(old)
        _wait_for_all(barrier)
        return final


def _wait_for_all(engine: TrainEngine) -> None:
    import torch

    engine.all_reduce(torch.zeros(1, dtype=torch.float64))
