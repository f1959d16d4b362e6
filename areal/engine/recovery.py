"""Recovery state on disk: one file per rank, read by any number of ranks in any mesh."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal.api.errors import InputError
from areal.engine.checkpoint import write_folder
from areal.engine.mesh import TrainerMesh
from areal.engine.region import Region, Splits, local_part, region_in, splits_of
from areal.weights.weight_files import write_tensors

_STATE = "state.json"
_FORMAT, _ROWS_FORMAT = 3, 2
"""Format 2 has no description of the mesh: its ranks split dimension 0 of each weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryState:
    """One rank's state of one engine."""

    weights: Mapping[str, Tensor]
    """By name, sharded as the model has them."""
    optimizer: Mapping[str, Tensor]
    """`<weight>/<kind>` -> this rank's part: a number, or split as the weight is."""
    num_steps: int
    """Optimiser steps so far: the position in the schedule."""
    base: str = ""
    """What the weights are adapters of; empty = they are all weights of the model."""


def save_recovery(final: Path, state: RecoveryState, mesh: TrainerMesh, shard_size: int) -> None:
    """Write the state of all ranks, one file each; a collective. `shard_size`: data and context ranks of a copy."""
    checksums = torch.zeros(mesh.world_size, dtype=torch.float64)

    def write(folder: Path) -> None:
        tensors = {f"weights/{name}": local_part(value) for name, value in state.weights.items()}
        tensors |= {f"optimizer/{name}": value for name, value in state.optimizer.items()}
        checksums[mesh.rank] = write_tensors(folder / _rank_file(mesh.rank, mesh.world_size), tensors)
        if mesh.rank == 0:
            copies = mesh.world_size // (shard_size * mesh.dims.tp)
            facts: dict[str, object] = {
                "format": _FORMAT,
                "world_size": mesh.world_size,
                "mesh": {"replicate": copies, "shard": shard_size, "tensor": mesh.dims.tp, "expert": mesh.dims.ep},
                "weights": {name: [list(value.shape), splits_of(value)] for name, value in state.weights.items()},
                "num_steps": state.num_steps,
            }
            facts |= {"base": state.base} if state.base else {}
            (folder / _STATE).write_text(json.dumps(facts))

    def exchange() -> Mapping[str, int]:
        found: list[float] = mesh.all_reduce(checksums).tolist()
        return {_rank_file(rank, mesh.world_size): int(value) for rank, value in enumerate(found)}

    write_folder(final, mesh, write, always=exchange)


class RecoveryReader:
    """Reads parts of the weights and of the optimiser state from the files of all ranks; a context manager."""

    def __init__(self, folder: Path, base: str = "") -> None:
        """Raises InputError when there is no recovery state in `folder`, one of an unknown format or another `base`."""
        self._folder = folder
        try:
            facts: dict[str, Any] = json.loads((folder / _STATE).read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"{folder} contains no recovery state: {error}", code="checkpoint.missing") from error
        if facts["format"] not in (_FORMAT, _ROWS_FORMAT):
            message = f"recovery state in {folder} has format {facts['format']}: use the version of areal that wrote it"
            raise InputError(message, code="checkpoint.other_run")
        if (found := facts.get("base", "")) != base:
            whole = "all weights of a model"
            message = f"recovery state in {folder} has {found or whole}, but this run has {base or whole}"
            raise InputError(message, code="checkpoint.other_base")
        self._num_ranks = int(facts["world_size"])
        self.num_steps = int(facts["num_steps"])
        self._sizes: dict[str, int] = facts.get("mesh") or {"replicate": 1, "shard": self._num_ranks, "tensor": 1}
        self._sizes["expert_shard"] = self._sizes["shard"] // self._sizes.setdefault("expert", 1)
        self._layouts: dict[str, list[Any]] | None = facts.get("weights")
        self._stack = contextlib.ExitStack()
        self._files: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        is_reading = isinstance(error, (OSError, ValueError, KeyError, SafetensorError))
        if is_reading and not isinstance(error, InputError):
            message = f"the recovery state in {self._folder} cannot be read: {error}"
            raise InputError(message, code="checkpoint.damaged") from error

    def weight(self, name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        """A part of a weight. InputError when it is missing or has another shape."""
        splits = self._splits(name, shape)
        return self._part(f"weights/{name}", shape, splits, region)

    def optimizer(self, name: str, shape: tuple[int, ...], region: Region) -> dict[str, Tensor]:
        """Kind -> the part of the optimiser's state of a weight."""
        prefix = f"optimizer/{name}/"
        keys: list[str] = self._file(0).keys()
        kinds = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        return {kind: self._state_part(name, kind, shape, region) for kind in kinds}

    def _state_part(self, name: str, kind: str, shape: tuple[int, ...], region: Region) -> Tensor:
        key = f"optimizer/{name}/{kind}"
        if not self._file(0).get_slice(key).get_shape():
            return self._file(0).get_tensor(key)
        return self._part(key, shape, self._splits(name, shape), region)

    def _splits(self, name: str, shape: tuple[int, ...]) -> Splits:
        if self._layouts is not None:
            found, splits = self._layouts.get(name, (None, ()))
            if found != list(shape):
                what = f"{name} has shape {found}" if found else f"{name} is missing"
                message = f"recovery state {self._folder}: {what}, the model's has shape {list(shape)}"
                raise InputError(message, code="model.weights_do_not_fit")
            return tuple((each[0], each[1]) for each in splits)
        stored = self._file(0).get_slice(f"weights/{name}").get_shape()
        return () if tuple(stored) == shape else (("shard", 0),)

    def _part(self, key: str, shape: tuple[int, ...], splits: Splits, region: Region) -> Tensor:
        found: Tensor | None = None
        missing = 1
        seen: set[tuple[tuple[int, int], ...]] = set()
        for rank in range(self._num_ranks):
            stored = region_in(shape, splits, self._sizes, self._places(rank))
            bounds = tuple((each.start, each.stop) for each in stored)
            both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(stored, region, strict=True)]
            if bounds in seen or any(each.start >= each.stop for each in both):
                continue
            seen.add(bounds)
            opened = self._file(rank).get_slice(key)
            if (has := list(opened.get_shape())) != [high - low for low, high in bounds]:
                raise ValueError(f"{key} of rank {rank} has shape {has}")
            piece: Tensor = opened[_relative(both, stored)] if both else self._file(rank).get_tensor(key)
            if found is None:
                found = torch.empty([each.stop - each.start for each in region], dtype=piece.dtype)
                missing = found.numel()
            found[_relative(both, region)] = piece
            missing -= piece.numel()
            if not missing:
                break
        if found is None:
            return torch.empty([each.stop - each.start for each in region])
        if missing:
            raise ValueError(f"{missing} values of {key} are in no file")
        return found

    def _places(self, rank: int) -> dict[str, int]:
        rest, tensor = divmod(rank, self._sizes["tensor"])
        replicate, shard = divmod(rest, self._sizes["shard"])
        expert_shard, expert = divmod(shard, self._sizes["expert"])
        places = {"replicate": replicate, "shard": shard, "tensor": tensor}
        return places | {"expert_shard": expert_shard, "expert": expert}

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            path = self._folder / _rank_file(rank, self._num_ranks)
            self._files[rank] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[rank]


def _relative(part: list[slice], whole: Region) -> Region:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, whole, strict=True))


def _rank_file(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"
