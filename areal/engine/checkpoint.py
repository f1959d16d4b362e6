"""Hugging Face exports, and folders that all ranks write. A folder is complete or does not exist."""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from transformers.configuration_utils import PretrainedConfig

from areal.api.engine import WeightSource
from areal.api.errors import InputError
from areal.engine.adapter_format import PeftAdapter
from areal.engine.mesh import TrainerMesh, copies_of, local_part, sharded_as
from areal.system.durable import publish_folder, remove_unfinished, writing_folder
from areal.weights.weight_files import plan_files, write_index, write_own_files, write_tensors

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


# ----------------------------------------------------------------------------------------------------------------------
# Recovery state of an engine on disk: one safetensors file per rank, in the format that torch.distributed.checkpoint
# reads without pickle. Any number of ranks in any mesh loads it.

_STATE = "state.json"
_FORMAT = 4
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AssertionError, SafetensorError)
"""What the reader of torch raises for damaged files."""


def rank_file(rank: int, world_size: int) -> str:
    """Name of the file of a rank."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor: `values` begin at `offsets` in the whole."""

    values: Tensor
    offsets: tuple[int, ...]


def own_pieces(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Piece]:
    """What this rank writes: its parts, except empty ones and those of which another rank writes its copy."""
    pieces: dict[str, Piece] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        copies, place = copies_of(tensor, rank, world_size)
        values = local_part(tensor)
        if number % copies == place and values.numel():
            (chunk,) = tensor.__create_chunk_list__() if isinstance(tensor, DTensor) else (None,)
            pieces[name] = Piece(values, tuple(chunk.offsets) if chunk else (0,) * tensor.dim())
    return pieces


class HostCopies:
    """Host memory for the pieces of a save, which the next save uses again."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def of(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """The pieces with copied values. They stay valid until the next call."""
        result: dict[str, Piece] = {}
        for name, piece in pieces.items():
            values, copy = piece.values, self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (values.shape, values.dtype):
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            result[name] = Piece(copy.copy_(values, non_blocking=True), piece.offsets)
        self._copies = {name: piece.values for name, piece in result.items()}
        if any(piece.values.is_cuda for piece in pieces.values()):
            torch.cuda.current_stream().synchronize()
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPieces:
    """Implements `areal.api.engine.StagedState` for any engine whose state is named tensors."""

    pieces: Mapping[str, Piece]
    rank: int
    world_size: int
    num_steps: int
    """Optimiser steps so far: the position in the schedule."""
    base: str = ""
    """What the weights are adapters of; empty = they are all weights of the model."""

    def write(self, folder: Path) -> dict[str, int]:
        """Write the file of this rank; rank 0 also the facts. Returns the checksum of the file, by its name."""
        if self.rank == 0:
            facts = {"format": _FORMAT, "world_size": self.world_size, "num_steps": self.num_steps, "base": self.base}
            (folder / _STATE).write_text(json.dumps(facts))
        offsets = {name: {"saved_offsets": piece.offsets} for name, piece in self.pieces.items()}
        facts = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        file = rank_file(self.rank, self.world_size)
        return {file: write_tensors(folder / file, {n: piece.values for n, piece in self.pieces.items()}, facts)}


class RecoveryReader:
    """Reads parts of the weights and of the optimiser state from the files of all ranks."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], base: str = "") -> None:
        """`shapes`: of the model's weights. Raises InputError when the folder has no state of this model, or of an
        unknown format, or of another `base`, or when a part of a tensor is in no file."""
        self._folder = folder
        try:
            facts: dict[str, Any] = json.loads((folder / _STATE).read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"{folder} contains no recovery state: {error}", code="checkpoint.missing") from error
        if (present := facts["format"]) != _FORMAT:
            message = f"recovery state in {folder} has format {present}: use the version of areal that wrote it"
            raise InputError(message, code="checkpoint.other_run")
        if (present := facts.get("base", "")) != base:
            whole = "all weights of a model"
            message = f"recovery state in {folder} has {present or whole}, but this run has {base or whole}"
            raise InputError(message, code="checkpoint.other_base")
        self.num_steps = int(facts["num_steps"])
        self._reader = HuggingFaceStorageReader(str(folder))
        try:
            for rank in range(facts["world_size"]):
                (folder / rank_file(rank, facts["world_size"])).stat()
            self._metadata = self._reader.read_metadata()
        except _UNREADABLE as error:
            raise self._damaged(error) from error
        self._tensors: dict[str, TensorStorageMetadata] = {}
        for name, tensor in self._metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            tensor.chunks = _once(tensor.chunks)
            self._tensors[name] = tensor
        self._check(shapes)

    def kinds(self, weight: str) -> dict[str, TensorStorageMetadata]:
        """Kind -> size and type of the optimiser state of a weight."""
        prefix = f"optimizer/{weight}/"
        return {name[len(prefix) :]: saved for name, saved in self._tensors.items() if name.startswith(prefix)}

    def gradient(self, weight: str) -> TensorStorageMetadata | None:
        """Size and type of the gradient of a weight; None = there is none."""
        return self._tensors.get(f"gradients/{weight}")

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, by the names in the files, with their values; a sharded one with its part."""
        self._read(DefaultLoadPlanner(flatten_state_dict=False), tensors)

    def fill_pieces(self, pieces: Mapping[str, Piece]) -> None:
        """Fill parts of tensors, by the names in the files."""
        self._read(_PiecePlanner(pieces), {})

    @torch.no_grad()
    def _read(self, planner: DefaultLoadPlanner, targets: Mapping[str, Any]) -> None:
        try:
            # The steps of torch.distributed.checkpoint.load without its exchange of pickled plans.
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            planner.set_up_planner(dict(targets), self._metadata, is_coordinator=True)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except _UNREADABLE as error:
            raise self._damaged(error) from error

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """The planner of torch leaves a tensor as it is where no file has its values."""
        for name, shape in shapes.items():
            saved = self._tensors.get(f"weights/{name}")
            if saved is None or tuple(saved.size) != shape:
                what = f"{name} has shape {list(saved.size)}" if saved else f"{name} is missing"
                message = f"recovery state {self._folder}: {what}, the model's has shape {list(shape)}"
                raise InputError(message, code="model.weights_do_not_fit")
        for name, saved in self._tensors.items():
            if name.startswith("weights/") and name.removeprefix("weights/") not in shapes:
                message = f"recovery state {self._folder} has {name.removeprefix('weights/')}, which the model has not"
                raise InputError(message, code="model.weights_do_not_fit")
            if missing := saved.size.numel() - sum(chunk.sizes.numel() for chunk in saved.chunks):
                raise self._damaged(f"{missing} values of {name} are in no file")

    def _damaged(self, cause: object) -> InputError:
        return InputError(f"the recovery state in {self._folder} cannot be read: {cause}", code="checkpoint.damaged")


class _PiecePlanner(DefaultLoadPlanner):
    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self._pieces.items():
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.values.shape)
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].values


def empty_like(weight: Tensor, stored: TensorStorageMetadata) -> Tensor:
    """Memory for optimiser state: a number, or a tensor sharded as the weight is, with as many columns or fewer."""
    dtype, local = stored.properties.dtype, local_part(weight)
    if len(stored.size) < weight.ndim:
        return torch.zeros(stored.size, dtype=dtype, device=weight.device)
    shape = local.shape
    if stored.size != weight.shape:  # one value for several columns
        shape = (*shape[:-1], stored.size[-1] * shape[-1] // weight.shape[-1])
    return sharded_as(weight, local.new_zeros(shape, dtype=dtype))


def _once(chunks: Iterable[ChunkStorageMetadata]) -> list[ChunkStorageMetadata]:
    """Several files may contain the same part."""
    return list({tuple(chunk.offsets): chunk for chunk in chunks}.values())
