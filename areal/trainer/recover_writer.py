"""Writing a recovery checkpoint, which counts only when it is complete, on disk, verified and renamed."""

import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
import torch

from areal.api.engine import Ranks, StagedState
from areal.api.errors import InputError
from areal.system.durable import damage_of, install_folder, seal_folder, write_atomic

NEXT = "next"
"""Folder in which a checkpoint is written before it is renamed to its step. Each attempt has a new folder there: for
some time an NFS client takes a known name for what it was before, such as the checkpoint that was renamed."""
STATE = "state.json"
_SUMS = "checksums"
"""Folder with what each rank wrote: {path: CRC-32}, computed from memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCheckpoint:
    """What one rank writes."""

    step: int
    facts: bytes
    """Content of the file STATE."""
    engines: Mapping[str, StagedState]
    """By role."""
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

    def number(self, own: int) -> int:
        """Rank 0's number, below 2**53. A barrier too."""
        return self._sum(own if self.ranks.rank == 0 else 0)

    def _sum(self, own: int) -> int:
        return int(self.ranks.all_reduce(torch.tensor([float(own)], dtype=torch.float64)).item())


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
