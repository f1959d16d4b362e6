"""Owns the Hugging Face exports of a run: their folders and how many are kept."""

from __future__ import annotations

from pathlib import Path

from areal.api.data import StepInfo
from areal.api.engine import TrainEngine
from areal.observe.log import get_logger
from areal.system.durable import finish_interrupted_writes, remove_folder


class Saver:
    """Writes checkpoints/<role>/step-000123 (123 steps done) and removes the oldest beyond `keep_last`."""

    def __init__(self, folder: Path, engines: dict[str, TrainEngine], *, keep_last: int | None, is_rank0: bool) -> None:
        self._folder = folder
        self._engines = engines
        self._keep_last = keep_last
        self._is_rank0 = is_rank0
        if is_rank0:
            for role in engines:
                finish_interrupted_writes(folder / role)

    def save(self, info: StepInfo) -> Path:
        """Export every trained model after step `info`; a collective. Returns the folder of the first."""
        name = f"step-{info.step + 1:06d}"
        for role, engine in self._engines.items():
            engine.save(self._folder / role / name, with_optimizer=False)
        if self._is_rank0:
            self._remove_old(name)
        first = self._folder / next(iter(self._engines)) / name
        get_logger("trainer").info("saved %s", first)
        return first

    def _remove_old(self, newest: str) -> None:
        """Exports of later steps, left from before a recovery, do not push out the ones that are made again."""
        if self._keep_last is None:
            return
        for role in self._engines:
            made = [path for path in sorted((self._folder / role).glob("step-*")) if path.name <= newest]
            for old in made[: -self._keep_last]:
                remove_folder(old)
