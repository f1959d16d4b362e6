"""Hugging Face exports and per-rank recovery state on disk. A folder is complete or does not exist."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from areal.api.errors import InputError
from areal.engine.adapter_format import PeftAdapter
from areal.engine.mesh import TrainerMesh
from areal.system.durable import publish_folder, writing_folder
from areal.weights.weight_files import write_tensors, write_weights

_COPIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*.model",
)
"""Files of the source checkpoint that an export contains besides weights and config.json."""
_STATE = "state.json"
_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryState:
    """One rank's state of one engine."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    num_steps: int
    """Optimiser steps so far: the position in the schedule."""
    base: str = ""
    """What the weights are adapters of; empty = they are all weights of the model."""


def export_model(
    final: Path,
    weights: Iterator[tuple[str, Tensor]],
    model: PreTrainedModel,
    *,
    dtype: torch.dtype,
    source: Path,
    mesh: TrainerMesh,
) -> None:
    """Write a checkpoint folder that `transformers` loads; a collective. InputError is raised on every rank."""

    def write(folder: Path) -> None:
        write_weights(folder, weights)
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = dtype
        config.save_pretrained(folder)
        for pattern in _COPIED:
            for path in source.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)

    _write_gathered(final, mesh, write, weights)


def export_adapter(final: Path, adapter: PeftAdapter, mesh: TrainerMesh) -> None:
    """Write an adapter folder that `peft` loads; a collective. InputError is raised on every rank."""
    weights = adapter.named_weights()
    _write_gathered(final, mesh, lambda folder: adapter.write(folder, weights), weights)


def _write_gathered(
    final: Path, mesh: TrainerMesh, write: Callable[[Path], None], weights: Iterator[tuple[str, Tensor]]
) -> None:
    """Rank 0 writes `weights`, which all ranks gather."""

    def gather() -> Mapping[str, int]:
        for _ in weights:
            pass
        return {}

    _write_folder(final, mesh, write if mesh.rank == 0 else None, always=gather)


def save_recovery(final: Path, state: RecoveryState, mesh: TrainerMesh) -> None:
    """Write the state of all ranks, one file each; a collective."""
    checksums = torch.zeros(mesh.world_size, dtype=torch.float64)

    def write(folder: Path) -> None:
        tensors = {f"weights/{name}": value for name, value in state.weights.items()}
        tensors |= {f"optimizer/{name}": value for name, value in state.optimizer.items()}
        checksums[mesh.rank] = write_tensors(folder / _rank_file(mesh.rank, mesh), tensors)
        if mesh.rank == 0:
            facts: dict[str, object] = {"format": _FORMAT, "world_size": mesh.world_size, "num_steps": state.num_steps}
            facts |= {"base": state.base} if state.base else {}
            (folder / _STATE).write_text(json.dumps(facts))

    def exchange() -> Mapping[str, int]:
        found: list[float] = mesh.all_reduce(checksums).tolist()
        return {_rank_file(rank, mesh): int(value) for rank, value in enumerate(found)}

    _write_folder(final, mesh, write, always=exchange)


def load_recovery(folder: Path, mesh: TrainerMesh, base: str = "") -> RecoveryState:
    """Read this rank's state from `folder`. Raises InputError when there is none, or for another number of ranks or
    another `base`."""
    facts = _facts(folder, base)
    for key, value in {"format": _FORMAT, "world_size": mesh.world_size}.items():
        if facts[key] != value:
            raise InputError(
                f"recovery state in {folder} has {key} {facts[key]}, but this run needs {value}: use the version of "
                "areal and the allocation_mode that wrote it",
                code="checkpoint.other_run",
            )
    file = folder / _rank_file(mesh.rank, mesh)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise InputError(f"recovery state {file} cannot be read: {error}", code="checkpoint.damaged") from error
    parts: dict[str, dict[str, Tensor]] = {"weights": {}, "optimizer": {}}
    for key, value in tensors.items():
        part, _, name = key.partition("/")
        parts[part][name] = value
    return RecoveryState(weights=parts["weights"], optimizer=parts["optimizer"], num_steps=facts["num_steps"])


def _facts(folder: Path, base: str) -> dict[str, Any]:
    """What rank 0 wrote about a recovery state, after the check of its base model."""
    try:
        facts = json.loads((folder / _STATE).read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} contains no recovery state: {error}", code="checkpoint.missing") from error
    if (found := facts.get("base", "")) != base:
        whole = "all weights of a model"
        message = f"recovery state in {folder} has {found or whole}, but this run has {base or whole}"
        raise InputError(message, code="checkpoint.other_base")
    return facts


def read_whole_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], base: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a recovery state as one process holds them, by name.

    The file of a rank has its part of each weight, split in dimension 0. `shapes`: those of the whole weights.
    Raises InputError when a file is missing or damaged, or a shape or the `base` differs.
    """
    files = sorted(folder.glob("rank-*.safetensors"))
    try:
        if len(files) != _facts(folder, base)["world_size"]:
            raise ValueError(f"it has {len(files)} files of ranks")
        with contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
            for name, shape in shapes.items():
                parts: list[Tensor] = [rank.get_tensor(f"weights/{name}") for rank in ranks]
                whole = parts[0] if tuple(parts[0].shape) == shape else torch.cat(parts)
                if tuple(whole.shape) != shape:
                    raise ValueError(f"{name} has shape {tuple(whole.shape)}, the model's has {shape}")
                yield name, whole
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        message = f"the recovery state in {folder} cannot be read: {error}"
        raise InputError(message, code="checkpoint.damaged") from error


def _rank_file(rank: int, mesh: TrainerMesh) -> str:
    return f"rank-{rank:05d}-of-{mesh.world_size:05d}.safetensors"


def _write_folder(
    final: Path, mesh: TrainerMesh, write: Callable[[Path], None] | None, *, always: Callable[[], Mapping[str, int]]
) -> None:
    """All ranks fill one temporary folder, which rank 0 then renames to `final`; an error of one is raised on all.

    `always` runs even after `write` failed, because the other ranks are in its collectives. It returns the checksums of
    files that are already on disk.
    """
    temporary = writing_folder(final)
    if mesh.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    error = _attempt(lambda: temporary.mkdir(parents=True, exist_ok=True)) if mesh.rank == 0 else None
    mesh.barrier()
    if write is not None and error is None:
        error = _attempt(lambda: write(temporary))
    checksums = {temporary / name: value for name, value in always().items()}
    _raise_together(final, mesh, error)
    if mesh.rank == 0:
        error = _attempt(lambda: publish_folder(temporary, final, checksums))
    _raise_together(final, mesh, error)


def _attempt(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except (OSError, SafetensorError) as error:  # for example a full disk
        return error
    return None


def _raise_together(final: Path, mesh: TrainerMesh, error: Exception | None) -> None:
    failed = mesh.all_reduce(torch.tensor([float(error is not None)], dtype=torch.float64), "max")
    if failed.item():
        if mesh.rank == 0:
            shutil.rmtree(writing_folder(final), ignore_errors=True)
        reason = str(error) if error is not None else "another trainer rank failed"
        raise InputError(f"{final} cannot be written: {reason}", code="checkpoint.not_written") from error
