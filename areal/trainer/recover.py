"""Recovery checkpoints of the trainer: folders, contents, and choice of the one to continue from.

Every rank calls every method and waits only for the other ranks. An error on one rank is raised on all.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson
import torch

from areal.api.config import BaseExperimentConfig, RecoverConfig
from areal.api.engine import Ranks, TrainEngine
from areal.api.errors import ConfigError, InputError
from areal.observe.log import get_logger
from areal.system.durable import damage_of, finish_interrupted_writes, install_folder, remove_folder, seal_folder
from areal.trainer.rng import rng_state, set_rng_state

NEXT = "next"
"""Folder in which a checkpoint is written before it is renamed to its step."""
_NAME = re.compile(r"step-(\d{6,})")
_STATE = "state.json"
_FORMAT = 3
_OLD_FORMAT = 2
"""Has no `RecoverPoint.actor`: adaptive coefficients start with their configured values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorState:
    """State of the actor role besides its engine. Equal on all ranks."""

    coefficients: dict[str, float] = field(default_factory=dict[str, float])
    """Adaptive coefficients by the name of the option with their initial value. Constant ones are not included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverPoint:
    """The position of training. `step`: train steps done, which is also the policy version of the weights."""

    step: int
    cadence_s: dict[str, float]
    """Seconds of training when each periodic action last ran."""
    elapsed_s: float
    """Seconds of training so far."""
    goal_reached: dict[str, float]
    """The evaluator.stop_at that was reached; empty = none."""
    actor: ActorState = field(default_factory=ActorState)
    """State before the next step."""

    def ends(self, config: BaseExperimentConfig) -> bool:
        """Whether the goal in `config` is reached, so that no step remains."""
        return config.evaluator.goals_reached(self.goal_reached)


class RecoverStore:
    """RUN/recover/step-000123, each complete or ignored. The previous one is kept until the new one is verified."""

    def __init__(self, folder: Path, config: RecoverConfig, engines: dict[str, TrainEngine], ranks: Ranks) -> None:
        """`engines`: the models to save, by role."""
        self._folder = folder
        self._config = config
        self._engines = engines
        self._ranks = ranks
        self._is_rank0 = ranks.rank == 0
        self._previous: Path | None = None
        """The checkpoint that this run continued from or wrote last: known to be intact."""

    def start_from(self, *, after_failure: bool, newest_step: Callable[[], int | None] = lambda: None) -> Path | None:
        """The checkpoint to continue from under recover.mode; None = start from the beginning.

        `newest_step`: the most train steps from which the ledger can continue, None = any; called on rank 0.
        Checkpoints of more steps used batches whose record is lost. They are renamed.

        Raises ConfigError when recover.mode=resume and no checkpoint is intact, or when all are ahead of the ledger.
        """
        if self._is_rank0:
            finish_interrupted_writes(self._folder)
            shutil.rmtree(self._folder / NEXT, ignore_errors=True)
        self._count(False)  # the other ranks wait until this is done
        mode = self._config.mode
        if mode == "disabled" or (mode == "fault" and not after_failure):
            return None
        damaged: list[str] = []
        ahead = self._ahead_of(newest_step) if self._checkpoints() else []
        for path in reversed(self._checkpoints()):
            if path in ahead:
                continue
            found = damage_of(path, part=self._ranks.rank, parts=self._ranks.world_size)
            if not self._count(bool(found)):
                self._set_aside(ahead)
                self._previous = path
                return path
            damaged.append(path.name)
            if found:
                get_logger("trainer").error("the recovery checkpoint %s is damaged and skipped: %s", path, found)
        if ahead:
            raise ConfigError(
                "the newest events of the ledger were lost, and no intact recovery checkpoint is old enough for the "
                f"rest: {', '.join(path.name for path in ahead)} in {self._folder}. Restore the ledger folder from a "
                f"copy. Or move it away: training continues from {ahead[-1].name}, with the dataset from its first "
                "row. Or move these checkpoints away: training starts from the beginning, with the recorded batches",
                code="checkpoint.ahead_of_ledger",
            )
        if mode == "resume":
            what = f"has only damaged checkpoints: {', '.join(damaged)}" if damaged else "has no complete checkpoint"
            message = f"recover.mode=resume, but {self._folder} {what}: use auto to start from the beginning"
            raise ConfigError(message, code="checkpoint.missing")
        return None

    def _ahead_of(self, newest_step: Callable[[], int | None]) -> list[Path]:
        """The checkpoints of more steps than the ledger records, by step; a collective."""
        newest = newest_step() if self._is_rank0 else 0
        shared = self._ranks.all_reduce(torch.tensor([-1.0 if newest is None else float(newest)], dtype=torch.float64))
        limit = shared.item()
        return [path for path in self._checkpoints() if 0 <= limit < int(path.name.removeprefix("step-"))]

    def _set_aside(self, ahead: list[Path]) -> None:
        for path in ahead if self._is_rank0 else []:
            kept = path.with_name(f"ahead-of-ledger-{path.name}")
            shutil.rmtree(kept, ignore_errors=True)
            path.rename(kept)
            get_logger("trainer").error(
                "the newest events of the ledger were lost: the recovery checkpoint %s is ahead of it and is now %s",
                path.name,
                kept,
            )

    def load(self, path: Path) -> RecoverPoint:
        """Restore every engine and the random number generators of this process from `path`."""
        try:
            state = orjson.loads((path / _STATE).read_bytes())
            self._check(state)
            for role, engine in self._engines.items():
                engine.load(path / role)
            # of more ranks than wrote it, the others continue the numbers of those
            place = self._ranks.rank % int(state["trainer ranks"])
            set_rng_state((path / _rng_file(place)).read_bytes())
            facts = state["point"]
            point = RecoverPoint(**facts | {"actor": ActorState(**facts.get("actor", {}))})
        except (InputError, OSError, ValueError, KeyError, TypeError) as error:
            message = f"{path} does not fit this run: {error}; use its configuration, or change trial_name"
            raise InputError(message, code="checkpoint.other_run") from error
        get_logger("trainer").info("recovered from %s: %d steps done", path, point.step)
        return point

    def _check(self, state: dict[str, object]) -> None:
        readable = _OLD_FORMAT if state.get("format") == _OLD_FORMAT else _FORMAT
        expected = {"format": readable, "models": list(self._engines)}
        for name, value in expected.items():
            if state.get(name) != value:
                raise ValueError(f"its {name} is {state.get(name)}, not {value}")

    def save(self, point: RecoverPoint) -> Path:
        """Write a checkpoint; a collective. It is valid only when complete, on disk, verified and renamed.

        Raises InputError on every rank when that fails; the earlier checkpoints are then unchanged.
        """
        writing, final = self._folder / NEXT, self._folder / f"step-{point.step:06d}"
        try:
            self._write(writing, point)
            self._together("verified", lambda: self._verify(writing))
            self._together("renamed", lambda: install_folder(writing, final), rank0_only=True)
        except InputError as error:
            if self._is_rank0:
                shutil.rmtree(writing, ignore_errors=True)
            kept = ", ".join(path.name for path in self._checkpoints()) or "none before it"
            message = f"the recovery checkpoint after step {point.step} failed: {error}; kept: {kept}"
            raise InputError(message, code="checkpoint.not_written") from error
        if self._is_rank0:
            self._remove_all_but(final)
        self._previous = final
        return final

    def _write(self, writing: Path, point: RecoverPoint) -> None:
        def prepare() -> None:
            if writing.exists():
                shutil.rmtree(writing)
            (writing / _rng_file(self._ranks.rank)).parent.mkdir(parents=True)

        def describe() -> None:
            facts = {"format": _FORMAT, "trainer ranks": self._ranks.world_size, "models": list(self._engines)}
            (writing / _STATE).write_bytes(orjson.dumps({**facts, "point": asdict(point)}))
            seal_folder(writing)

        self._together("started", prepare, rank0_only=True)
        for role, engine in self._engines.items():
            engine.save(writing / role, with_optimizer=True)
        self._together("written", lambda: (writing / _rng_file(self._ranks.rank)).write_bytes(rng_state()))
        self._together("written", describe, rank0_only=True)

    def _verify(self, sealed: Path) -> None:
        """Each rank reads its part of all files and compares the checksums, which were computed from memory."""
        damage = damage_of(sealed, part=self._ranks.rank, parts=self._ranks.world_size)
        if damage:
            raise OSError(damage)

    def _remove_all_but(self, newest: Path) -> None:
        """Keep the newest and the previous one. The others are older, damaged, or from before a recovery."""
        for path in self._checkpoints():
            if path not in (newest, self._previous):
                try:
                    remove_folder(path)
                except OSError as error:  # this run does not depend on it
                    get_logger("trainer").warning("%s could not be removed: %s", path, error)

    def _checkpoints(self) -> list[Path]:
        """All checkpoints by step, damaged ones included."""
        found = {int(match[1]): path for path in self._folder.glob("step-*") if (match := _NAME.fullmatch(path.name))}
        return [found[step] for step in sorted(found)]

    def _together(self, what: str, action: Callable[[], object], *, rank0_only: bool = False) -> None:
        """Run `action` on all ranks or on rank 0; raises InputError on all when it fails on one."""
        error: OSError | None = None
        if self._is_rank0 or not rank0_only:
            try:
                action()
            except OSError as failure:  # for example a full disk
                error = failure
        if self._count(error is not None):
            reason = error or "another trainer rank failed"
            raise InputError(f"it could not be {what}: {reason}", code="checkpoint.not_written") from error

    def _count(self, flag: bool) -> int:
        """The number of ranks where `flag` is set. A barrier too."""
        return int(self._ranks.all_reduce(torch.tensor([float(flag)], dtype=torch.float64)).item())


def _rng_file(rank: int) -> str:
    return f"rng/rank-{rank:05d}.json"
