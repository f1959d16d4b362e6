"""Hugging Face exports, and folders that all ranks write. A folder is complete or does not exist."""

import math
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from secrets import randbits

import torch
from safetensors import SafetensorError
from transformers.configuration_utils import PretrainedConfig

from areal.api.engine import WeightSource
from areal.api.errors import InputError
from areal.engine.adapter_format import PeftAdapter
from areal.engine.mesh import TrainerMesh
from areal.system.durable import publish_folder, remove_unfinished, writing_folder
from areal.weights.weight_files import plan_files, write_index, write_own_files

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
    engine: WeightSource,
    source_config: PretrainedConfig,
    *,
    architecture: str,
    dtype: torch.dtype,
    source: Path,
    mesh: TrainerMesh,
) -> None:
    """Write a checkpoint folder that `transformers` loads; a collective. InputError is raised on every rank.

    Each weight is gathered, and only the rank that writes its file keeps it. `architecture`: the class of the model in
    transformers.
    """
    specs = engine.weight_specs()
    sizes = {spec.name: math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec in specs}
    files = plan_files(sizes, mesh.world_size)

    def write(folder: Path) -> None:
        write_own_files(folder, engine.named_weights(), files, mesh.rank, mesh.world_size)

    def finish(folder: Path) -> None:
        config = deepcopy(source_config)
        config.architectures = [architecture]
        config.dtype = dtype
        config.save_pretrained(folder)
        for pattern in _COPIED:
            for path in source.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)
        write_index(folder, files, sizes)

    write_folder(final, mesh, write, finish)


def export_adapter(final: Path, adapter: PeftAdapter, mesh: TrainerMesh) -> None:
    """Write an adapter folder that `peft` loads; a collective. InputError is raised on every rank."""
    weights = adapter.named_weights()

    def gather(folder: Path) -> None:
        error = _attempt(lambda: adapter.write(folder, weights)) if mesh.rank == 0 else None
        for _ in weights:  # the other ranks are in these collectives
            pass
        if error is not None:
            raise error

    write_folder(final, mesh, gather)


def write_folder(
    final: Path,
    mesh: TrainerMesh,
    write: Callable[[Path], object],
    finish: Callable[[Path], None] = lambda folder: None,
) -> None:
    """All ranks fill one temporary folder, which rank 0 then finishes and renames to `final`.

    An error of one is raised on all.
    """
    if mesh.rank == 0:
        remove_unfinished(final)
    number = torch.tensor([float(randbits(48) if mesh.rank == 0 else 0)], dtype=torch.float64)
    temporary = writing_folder(final, f"{int(mesh.all_reduce(number, 'max').item()):x}")

    def publish() -> None:
        finish(temporary)
        publish_folder(temporary, final)

    # Each rank makes the folder: another machine may not see yet that rank 0 has made its parents.
    _raise_together(final, mesh, _attempt(lambda: temporary.mkdir(parents=True, exist_ok=True)))
    _raise_together(final, mesh, _attempt(lambda: write(temporary)))
    _raise_together(final, mesh, _attempt(publish) if mesh.rank == 0 else None)


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
            remove_unfinished(final)
        reason = str(error) if error is not None else "another trainer rank failed"
        raise InputError(f"{final} cannot be written: {reason}", code="checkpoint.not_written") from error
