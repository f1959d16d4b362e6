"""Owns the recovery checkpoints of a trainer: where they lie, what is in them, which one a start goes on from.

Every rank calls it, and what one rank finds or fails at is known to all: each waits for the others only.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson
import torch

from areal.api.config import BaseExperimentConfig, RecoverConfig
from areal.api.engine import TrainEngine
from areal.api.errors import ConfigError, InputError
from areal.observe.log import get_logger
from areal.system.durable import damage_of, finish_interrupted_writes, install_folder, remove_folder, seal_folder
from areal.trainer.rng import rng_state, set_rng_state

NEXT = "next"
"""Folder in which a checkpoint is written before it is renamed to its step."""
_NAME = re.compile(r"step-(\d{6,})")
_STATE = "state.json"
_FORMAT = 3
_READABLE = (2, _FORMAT)
"""Format 2 has no `RecoverPoint.actor`: what adapts begins with its configured value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorState:
    """What of the policy's role outlives a step, besides its engine. Equal on all ranks."""

    coefficients: dict[str, float] = field(default_factory=dict[str, float])
    """Coefficients that adapt from step to step, by the name of the option they begin with; those that stay are not
    in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverPoint:
    """Where training stood: `step` train steps done, which is also the policy version of the weights."""

    step: int
    cadence_s: dict[str, float]
    """Seconds of the run's clock at which each periodic action last fired."""
    elapsed_s: float
    """Seconds of training so far."""
    goal_reached: dict[str, float]
    """The evaluator.stop_at that this step reached; empty = none."""
    actor: ActorState = field(default_factory=ActorState)
    """As it is before the next step."""

    def ends(self, config: BaseExperimentConfig) -> bool:
        """Whether the goal that `config` sets is reached, so that there is nothing left to train."""
        return bool(self.goal_reached) and self.goal_reached == config.evaluator.stop_at


class RecoverStore:
    """RUN/recover/step-000123, each whole or ignored. The previous one stays until the new one was read back."""

    def __init__(self, folder: Path, config: RecoverConfig, engines: dict[str, TrainEngine]) -> None:
        """`engines`: what is saved, by role; the first also connects the ranks."""
        self._folder = folder
        self._config = config
        self._engines = engines
        self._lead = next(iter(engines.values()))
        self._previous: Path | None = None
        """What this run went on from or wrote last: known to be intact."""

    @property
    def _is_rank0(self) -> bool:
        return self._lead.dp_rank == 0

    def start_from(self, *, after_failure: bool) -> Path | None:
        """What recover.mode says to go on from; None = start anew. ConfigError when mode=resume finds nothing."""
        if self._is_rank0:
            finish_interrupted_writes(self._folder)
            shutil.rmtree(self._folder / NEXT, ignore_errors=True)
        self._count(False)  # the others look only now
        mode = self._config.mode
        if mode == "disabled" or (mode == "fault" and not after_failure):
            return None
        damaged: list[str] = []
        for path in reversed(self._checkpoints()):
            found = damage_of(path, part=self._lead.dp_rank, parts=self._lead.dp_size)
            if not self._count(bool(found)):
                self._previous = path
                return path
            damaged.append(path.name)
            if found:
                get_logger("trainer").error("the recovery checkpoint %s is damaged and passed over: %s", path, found)
        if mode == "resume":
            what = f"all are damaged: {', '.join(damaged)}" if damaged else "holds no complete checkpoint"
            raise ConfigError(f"recover.mode=resume, but {self._folder} {what}: use auto to start anew")
        return None

    def load(self, path: Path) -> RecoverPoint:
        """Bring every engine and this process's random numbers to the state in `path`."""
        try:
            state = orjson.loads((path / _STATE).read_bytes())
            self._check(state)
            for role, engine in self._engines.items():
                engine.load(path / role, with_optimizer=True)
            set_rng_state((path / self._rng_file()).read_bytes())
            facts = state["point"]
            point = RecoverPoint(**facts | {"actor": ActorState(**facts.get("actor", {}))})
        except (InputError, OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} does not fit this run: {error}; use the configuration it was written with, or change "
                "trial_name to start anew"
            ) from error
        get_logger("trainer").info("recovered from %s: %d steps done", path, point.step)
        return point

    def _check(self, state: dict[str, object]) -> None:
        if state.get("format") not in _READABLE:
            raise InputError(f"its format is {state.get('format')}, not {_FORMAT}")
        expected = {"trainer ranks": self._lead.dp_size, "models": list(self._engines)}
        for name, value in expected.items():
            if state.get(name) != value:
                raise InputError(f"its {name} is {state.get(name)}, not {value}")

    def save(self, point: RecoverPoint) -> Path:
        """Write a checkpoint; a collective. It counts only once it is whole, on disk, read back and renamed.

        InputError on every rank when that fails: the earlier checkpoints are untouched then.
        """
        writing, final = self._folder / NEXT, self._folder / f"step-{point.step:06d}"
        try:
            self._write(writing, point)
            self._together("read back", lambda: self._prove(writing))
            self._together("renamed", lambda: install_folder(writing, final), rank0_only=True)
        except InputError as error:
            if self._is_rank0:
                shutil.rmtree(writing, ignore_errors=True)
            kept = ", ".join(path.name for path in self._checkpoints()) or "none before it"
            raise InputError(
                f"the recovery checkpoint after step {point.step} failed: {error}; kept: {kept}; mend the cause and "
                "start again"
            ) from error
        if self._is_rank0:
            self._remove_all_but(final)
        self._previous = final
        return final

    def _write(self, writing: Path, point: RecoverPoint) -> None:
        def prepare() -> None:
            if writing.exists():
                shutil.rmtree(writing)
            (writing / self._rng_file()).parent.mkdir(parents=True)

        def describe() -> None:
            facts = {"format": _FORMAT, "trainer ranks": self._lead.dp_size, "models": list(self._engines)}
            (writing / _STATE).write_bytes(orjson.dumps({**facts, "point": asdict(point)}))
            seal_folder(writing)

        self._together("begun", prepare, rank0_only=True)
        for role, engine in self._engines.items():
            engine.save(writing / role, with_optimizer=True)
        self._together("written", lambda: (writing / self._rng_file()).write_bytes(rng_state()))
        self._together("written", describe, rank0_only=True)

    def _prove(self, sealed: Path) -> None:
        """Each rank reads its part of all files: the page cache may answer, the checksums are of what was in memory."""
        damage = damage_of(sealed, part=self._lead.dp_rank, parts=self._lead.dp_size)
        if damage:
            raise OSError(damage)

    def _remove_all_but(self, newest: Path) -> None:
        """The newest and the one this run came from stay. Any other is older, or damaged, or of another future."""
        for path in self._checkpoints():
            if path not in (newest, self._previous):
                try:
                    remove_folder(path)
                except OSError as error:  # a nuisance: nothing of this run depends on it
                    get_logger("trainer").warning("%s could not be removed: %s", path, error)

    def _checkpoints(self) -> list[Path]:
        """By step, whatever their state."""
        found = {int(match[1]): path for path in self._folder.glob("step-*") if (match := _NAME.fullmatch(path.name))}
        return [found[step] for step in sorted(found)]

    def _rng_file(self) -> str:
        return f"rng/rank-{self._lead.dp_rank:05d}.json"

    def _together(self, what: str, action: Callable[[], object], *, rank0_only: bool = False) -> None:
        """Do something on all ranks or on the first; InputError on all when it fails on one."""
        error: OSError | None = None
        if self._is_rank0 or not rank0_only:
            try:
                action()
            except OSError as failure:  # a full disk, mostly
                error = failure
        if self._count(error is not None):
            raise InputError(f"it could not be {what}: {error or 'another trainer rank failed'}") from error

    def _count(self, flag: bool) -> int:
        """On how many ranks `flag` is set; every rank waits here for the others."""
        return int(self._lead.all_reduce(torch.tensor([float(flag)], dtype=torch.float64)).item())
