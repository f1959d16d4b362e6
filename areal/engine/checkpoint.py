"""Hugging Face exports, and folders that all ranks write. A folder is complete or does not exist."""

import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.configuration_utils import PretrainedConfig

from areal.api.errors import InputError
from areal.engine.adapter_format import PeftAdapter
from areal.engine.mesh import TrainerMesh
from areal.system.durable import publish_folder, writing_folder
from areal.weights.weight_files import write_weights

_COPIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
    "*.model",
)
"""Files of the source checkpoint that an export contains besides weights and config.json."""


def export_model(
    final: Path,
    weights: Iterator[tuple[str, Tensor]],
    source_config: PretrainedConfig,
    *,
    architecture: str,
    dtype: torch.dtype,
    source: Path,
    mesh: TrainerMesh,
) -> None:
    """Write a checkpoint folder that `transformers` loads; a collective. InputError is raised on every rank.

    `architecture`: the class of the model in transformers.
    """

    def write(folder: Path) -> None:
        write_weights(folder, weights)
        config = deepcopy(source_config)
        config.architectures = [architecture]
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

    def gather(folder: Path) -> None:
        error = _attempt(lambda: write(folder)) if mesh.rank == 0 else None
        for _ in weights:  # the other ranks are in these collectives
            pass
        if error is not None:
            raise error

    write_folder(final, mesh, gather)


def write_folder(final: Path, mesh: TrainerMesh, write: Callable[[Path], object]) -> None:
    """All ranks fill one temporary folder, which rank 0 then renames to `final`; an error of one is raised on all."""
    temporary = writing_folder(final)

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    _raise_together(final, mesh, _attempt(prepare) if mesh.rank == 0 else None)
    _raise_together(final, mesh, _attempt(lambda: write(temporary)))
    _raise_together(final, mesh, _attempt(lambda: publish_folder(temporary, final)) if mesh.rank == 0 else None)


def _attempt(action: Callable[[], object]) -> Exception | None:
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
