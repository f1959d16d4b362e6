"""Owns what the trainer keeps on disk: Hugging Face exports and per-rank recovery state. Both whole or absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from areal.api.errors import InputError
from areal.engine.mesh import TrainerMesh
from areal.engine.weight_files import write_weights
from areal.system.durable import publish_folder

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
"""What of the source checkpoint goes into an export besides weights and config.json."""
_STATE = "state.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryState:
    """One rank's state of one engine; every tensor is on the CPU."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    num_steps: int


def export_model(
    final: Path,
    weights: Iterator[tuple[str, Tensor]],
    model_config: PretrainedConfig,
    *,
    class_name: str,
    dtype: torch.dtype,
    source: Path,
    mesh: TrainerMesh,
) -> None:
    """Write a checkpoint folder that `transformers` loads; a collective. Raises on every rank when rank 0 cannot."""

    def write(folder: Path) -> None:
        write_weights(folder, weights)
        config = deepcopy(model_config)
        config.architectures = [class_name]
        config.dtype = dtype
        config.save_pretrained(folder)
        for pattern in _COPIED:
            for path in source.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)

    def gather() -> None:
        for _ in weights:
            pass

    _write_folder(final, mesh, write if mesh.rank == 0 else None, always=gather)


def save_recovery(final: Path, state: RecoveryState, mesh: TrainerMesh) -> None:
    """Write the state of all ranks, one file each; a collective."""

    def write(folder: Path) -> None:
        tensors = {f"weights/{name}": value for name, value in state.weights.items()}
        tensors |= {f"optimizer/{name}": value for name, value in state.optimizer.items()}
        tensors |= {f"rng/{name}": value for name, value in state.rng.items()}
        save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, _rank_file(folder, mesh))
        if mesh.rank == 0:
            facts = {"format": _FORMAT, "world_size": mesh.world_size, "num_steps": state.num_steps}
            (folder / _STATE).write_text(json.dumps(facts))

    _write_folder(final, mesh, write, always=lambda: None)


def load_recovery(folder: Path, mesh: TrainerMesh) -> RecoveryState:
    """This rank's state from `folder`. InputError when it is not there or of another number of ranks."""
    try:
        facts = json.loads((folder / _STATE).read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} holds no recovery state of the trainer: {error}") from error
    if facts["format"] != _FORMAT:
        raise InputError(f"recovery state in {folder} has format {facts['format']}, this version reads {_FORMAT}")
    if facts["world_size"] != mesh.world_size:
        raise InputError(
            f"recovery state in {folder} is of {facts['world_size']} trainer ranks, this run has {mesh.world_size}: "
            "use the allocation_mode it was written with"
        )
    try:
        tensors = load_file(_rank_file(folder, mesh))
    except (OSError, SafetensorError) as error:
        raise InputError(f"recovery state {_rank_file(folder, mesh)} cannot be read: {error}") from error
    parts: dict[str, dict[str, Tensor]] = {"weights": {}, "optimizer": {}, "rng": {}}
    for key, value in tensors.items():
        part, _, name = key.partition("/")
        parts[part][name] = value
    return RecoveryState(
        weights=parts["weights"], optimizer=parts["optimizer"], rng=parts["rng"], num_steps=facts["num_steps"]
    )


def _rank_file(folder: Path, mesh: TrainerMesh) -> Path:
    return folder / f"rank-{mesh.rank:05d}-of-{mesh.world_size:05d}.safetensors"


def _write_folder(
    final: Path, mesh: TrainerMesh, write: Callable[[Path], None] | None, *, always: Callable[[], None]
) -> None:
    """All ranks fill one temporary folder, which rank 0 then publishes; an error on one rank is raised on all.

    `always` runs whether or not `write` failed: collectives that other ranks are in must come to their end.
    """
    temporary = final.with_name(f".{final.name}.writing")
    if mesh.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    error = _attempt(lambda: temporary.mkdir(parents=True, exist_ok=True)) if mesh.rank == 0 else None
    mesh.barrier()
    if write is not None and error is None:
        error = _attempt(lambda: write(temporary))
    always()
    _raise_together(final, mesh, error)
    if mesh.rank == 0:
        error = _attempt(lambda: publish_folder(temporary, final))
    _raise_together(final, mesh, error)


def _attempt(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except (OSError, SafetensorError) as error:  # a full disk, mostly
        return error
    return None


def _raise_together(final: Path, mesh: TrainerMesh, error: Exception | None) -> None:
    failed = mesh.all_reduce(torch.tensor([float(error is not None)], dtype=torch.float64), "max")
    if failed.item():
        reason = str(error) if error is not None else "another trainer rank failed"
        raise InputError(f"{final} cannot be written: {reason}") from error
