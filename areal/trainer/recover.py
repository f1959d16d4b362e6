"""Recovery checkpoints of the trainer: choice of the one to continue from, loading, saving while training continues.

Every rank calls every method and waits only for the other ranks. An error on one rank is raised on all.
"""

import random
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from areal.api.config import BaseExperimentConfig, RecoverConfig
from areal.api.engine import Ranks, StagedState, TrainEngine
from areal.api.errors import ConfigError, InputError
from areal.observe.log import get_logger
from areal.system.durable import (
    damage_of,
    finish_interrupted_writes,
    install_folder,
    remove_folder,
    rename,
    seal_folder,
    write_atomic,
)

# ----------------------------------------------------------------------------------------------------------------------
# The random number generators of a process: seeds, and their state for recovery checkpoints, one file per rank.


def seed_process(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> bytes:
    """Return the state of the global generators of Python, numpy, torch and the GPU."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, words, gauss],
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return orjson.dumps(state)


def set_rng_state(data: bytes) -> None:
    """Restore the result of `rng_state`. Raises ValueError, KeyError or TypeError for other data."""
    state = orjson.loads(data)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _numpy_state() -> list[Any]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    inner = state["state"]
    return [state["bit_generator"], inner["key"].tolist(), inner["pos"], state["has_gauss"], state["gauss"]]


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


# ----------------------------------------------------------------------------------------------------------------------
# Writing a recovery checkpoint, which counts only when it is complete, on disk, verified and renamed.

NEXT = "next"
"""Folder in which a checkpoint is written before it is renamed to its step. Each attempt has a new folder there: for
some time an NFS client takes a known name for what it was before, such as the checkpoint that was renamed."""
STATE = "state.json"
_SUMS = "checksums"  # Folder with what each rank wrote: {path: CRC-32}, computed from memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCheckpoint:
    """What one rank writes."""

    step: int
    facts: bytes
    """Content of the file STATE."""
    engines: Mapping[str, StagedState]
    """Role -> state."""
    rng: bytes
    """State of this process's random number generators."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Actions of all ranks that succeed or fail together."""

    ranks: Ranks

    def together(self, what: str, action: Callable[[], object], *, rank0_only: bool = False) -> None:
        """Run `action` on all ranks or on rank 0; raises InputError on all when it fails on one."""
        error: OSError | None = None
        if self.ranks.rank == 0 or not rank0_only:
            try:
                action()
            except OSError as failure:  # for example a full disk
                error = failure
        if self.count(error is not None):
            reason = error or "another trainer rank failed"
            raise InputError(f"it could not be {what}: {reason}", code="checkpoint.not_written") from error

    def count(self, flag: bool) -> int:
        """The number of ranks where `flag` is set. A barrier too."""
        return self._sum(int(flag))

    def number(self, value: int) -> int:
        """Rank 0's number, below 2**53. A barrier too."""
        return self._sum(value if self.ranks.rank == 0 else 0)

    def _sum(self, value: int) -> int:
        return int(self.ranks.all_reduce(torch.tensor([float(value)], dtype=torch.float64)).item())


def write_checkpoint(folder: Path, staged: StagedCheckpoint, ranks: Ranks) -> Path:
    """Write and rename; a collective, but of `ranks` only: a thread may call it. Returns the final folder.

    Raises InputError on every rank when that fails; other checkpoints in `folder` are then unchanged.
    """
    final, agreed = folder / f"step-{staged.step:06d}", Agreement(ranks)
    if ranks.rank == 0:
        shutil.rmtree(folder / NEXT, ignore_errors=True)
    writing = folder / NEXT / f"{agreed.number(secrets.randbits(48)):x}"
    try:
        agreed.together("written", lambda: _write_own(writing, staged, ranks.rank))
        agreed.together("written", lambda: _seal(writing, staged.facts), rank0_only=True)
        agreed.together("verified", lambda: _verify(writing, ranks))
        agreed.together("renamed", lambda: install_folder(writing, final), rank0_only=True)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder / NEXT, ignore_errors=True)
    return final


def rng_file(rank: int) -> str:
    """Path in a checkpoint."""
    return f"rng/rank-{rank:05d}.json"


def _write_own(writing: Path, staged: StagedCheckpoint, rank: int) -> None:
    for name in (*staged.engines, "rng", _SUMS):  # on each rank: another machine may not see these folders yet
        (writing / name).mkdir(parents=True, exist_ok=True)
    sums = {
        f"{role}/{name}": value
        for role, state in staged.engines.items()
        for name, value in state.write(writing / role).items()
    }
    (writing / rng_file(rank)).write_bytes(staged.rng)
    write_atomic(writing / _SUMS / f"rank-{rank:05d}.json", orjson.dumps(sums))


def _seal(writing: Path, facts: bytes) -> None:
    (writing / STATE).write_bytes(facts)
    sums: dict[Path, int] = {}
    for path in (writing / _SUMS).iterdir():
        sums |= {writing / name: value for name, value in orjson.loads(path.read_bytes()).items()}
    shutil.rmtree(writing / _SUMS)
    seal_folder(writing, sums)


def _verify(sealed: Path, ranks: Ranks) -> None:
    """Each rank reads its part of all files and compares the checksums, which were computed from memory."""
    damage = damage_of(sealed, part=ranks.rank, parts=ranks.world_size)
    if damage:
        raise OSError(damage)


_NAME = re.compile(r"step-(\d{6,})")
_FORMAT = 3


_PATIENCE_S = 5.0  # A wait for an unfinished checkpoint that takes longer is logged.


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
    evaluating: int | None = None
    """Train steps done at the evaluation in the background whose result is not known yet."""

    def ends(self, config: BaseExperimentConfig) -> bool:
        """Whether the goal in `config` is reached, so that no step remains."""
        return config.evaluator.goals_reached(self.goal_reached)


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A checkpoint that a thread writes."""

    step: int
    written: Future[Path]


class RecoverStore:
    """RUN/recover/step-000123, each complete or ignored. The previous one is kept until the new one is verified."""

    def __init__(
        self,
        folder: Path,
        config: RecoverConfig,
        engines: dict[str, TrainEngine],
        ranks: Ranks,
        *,
        committed: Callable[[int, Path], None] = lambda step, path: None,
    ) -> None:
        """`engines`: the models to save, by role. `committed`: called on rank 0 with each complete checkpoint."""
        self._folder = folder
        self._config = config
        self._engines = engines
        self._ranks = ranks
        self._agreed = Agreement(ranks)
        self._committed = committed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recovery-checkpoint")
        self._thread_ranks: Ranks | None = None  # The ranks for collectives of the thread.
        self._unfinished: _Unfinished | None = None
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
        self._agreed.count(False)  # the other ranks wait until this is done
        mode = self._config.mode
        if mode == "disabled" or (mode == "fault" and not after_failure):
            return None
        damaged: list[str] = []
        ahead = self._ahead_of(newest_step) if self._checkpoints() else []
        for path in reversed(self._checkpoints()):
            if path in ahead:
                continue
            damage = damage_of(path, part=self._ranks.rank, parts=self._ranks.world_size)
            if not self._agreed.count(bool(damage)):
                self._set_aside(ahead)
                self._previous = path
                return path
            damaged.append(path.name)
            if damage:
                get_logger("trainer").error("the recovery checkpoint %s is damaged and skipped: %s", path, damage)
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
            rename(path, kept)
            get_logger("trainer").error(
                "the newest events of the ledger were lost: the recovery checkpoint %s is ahead of it and is now %s",
                path.name,
                kept,
            )

    def load(self, path: Path) -> RecoverPoint:
        """Restore every engine and the random number generators of this process from `path`."""
        try:
            state = orjson.loads((path / STATE).read_bytes())
            self._check(state)
            for role, engine in self._engines.items():
                engine.load(path / role)
            # of more ranks than wrote it, the others continue the numbers of those
            place = self._ranks.rank % int(state["trainer ranks"])
            set_rng_state((path / rng_file(place)).read_bytes())
            facts = state["point"]
            point = RecoverPoint(**facts | {"actor": ActorState(**facts["actor"])})
        except (InputError, OSError, ValueError, KeyError, TypeError) as error:
            message = f"{path} does not fit this run: {error}; use its configuration, or change trial_name"
            raise InputError(message, code="checkpoint.other_run") from error
        get_logger("trainer").info("recovered from %s: %d steps done", path, point.step)
        return point

    def _check(self, state: dict[str, object]) -> None:
        expected = {"format": _FORMAT, "models": list(self._engines)}
        for name, value in expected.items():
            if state.get(name) != value:
                raise ValueError(f"its {name} is {state.get(name)}, not {value}")

    def save(self, point: RecoverPoint, *, waits: bool = True) -> Path:
        """Save a checkpoint, after the one that is not finished; a collective. Returns its folder.

        `waits` false: return when the state is copied to host memory; a thread writes it, and `finish` gives its end.
        Raises InputError on every rank when a checkpoint cannot be written; the earlier ones are then unchanged.
        """
        self.finish()
        began_s = time.monotonic()
        facts = {"format": _FORMAT, "trainer ranks": self._ranks.world_size, "models": list(self._engines)}
        staged = StagedCheckpoint(
            step=point.step,
            facts=orjson.dumps({**facts, "point": asdict(point)}),
            engines={role: engine.stage(copies=not waits) for role, engine in self._engines.items()},
            rng=rng_state(),
        )
        if waits:
            self._commit(point.step, self._write(staged, self._ranks))
        else:
            self._thread_ranks = self._thread_ranks or self._ranks.for_thread()
            written = self._thread.submit(self._write, staged, self._thread_ranks)
            self._unfinished = _Unfinished(point.step, written)
            seconds = time.monotonic() - began_s
            get_logger("trainer").info("checkpoint after step %d: copied in %.3f s", point.step, seconds)
        return self._folder / f"step-{point.step:06d}"

    @property
    def is_writing(self) -> bool:
        """Whether the thread of this rank writes."""
        return self._unfinished is not None and not self._unfinished.written.done()

    def finish(self) -> None:
        """Wait until the last checkpoint is complete; a collective. Raises what `save` raises."""
        if self._unfinished is None:
            return
        unfinished, self._unfinished = self._unfinished, None
        self._commit(unfinished.step, _result_of(unfinished))

    def close(self) -> None:
        """Wait for an unfinished checkpoint; its failure is logged."""
        if self._unfinished is not None:
            self._unfinished.written.add_done_callback(_log_failure)
            self._unfinished = None
        self._thread.shutdown()

    def _write(self, staged: StagedCheckpoint, ranks: Ranks) -> Path:
        try:
            final = write_checkpoint(self._folder, staged, ranks)
        except InputError as error:
            kept = ", ".join(path.name for path in self._checkpoints()) or "none before it"
            message = f"the recovery checkpoint after step {staged.step} failed: {error}; kept: {kept}"
            raise InputError(message, code="checkpoint.not_written") from error
        if self._is_rank0:
            self._remove_all_but(final)
        return final

    def _commit(self, step: int, final: Path) -> None:
        self._previous = final
        if self._is_rank0:
            self._committed(step, final)

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
        by_step = {int(match[1]): path for path in self._folder.glob("step-*") if (match := _NAME.fullmatch(path.name))}
        return [by_step[step] for step in sorted(by_step)]


def _result_of(unfinished: _Unfinished) -> Path:
    try:
        return unfinished.written.result(_PATIENCE_S)
    except TimeoutError:
        if unfinished.written.done():
            raise
        get_logger("trainer").info("waits until the recovery checkpoint after step %d is written", unfinished.step)
        return unfinished.written.result()


def _log_failure(written: Future[Path]) -> None:
    if error := written.exception():
        get_logger("trainer").error("%s", error)
