"""Recovery state of earlier versions of areal, described as torch.distributed.checkpoint describes its files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from areal.engine.region import Splits, region_in

OLD_FORMATS = (2, 3)
"""Format 2 splits dimension 0 of each weight over all ranks; format 3 describes its mesh and how it splits a weight."""


@dataclass(frozen=True, slots=True)
class _File:
    """Where a part is, as `HuggingFaceStorageReader` reads it."""

    relative_path: str


def rank_file(rank: int, world_size: int) -> str:
    """Name of the file of a rank, in every format."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def old_metadata(folder: Path, facts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Metadata:
    """Describe the files of all ranks. `facts`: of state.json; `shapes`: of the model's weights."""
    num_ranks = int(facts["world_size"])
    sizes: dict[str, int] = facts.get("mesh") or {"replicate": 1, "shard": num_ranks, "tensor": 1}
    sizes["expert_shard"] = sizes["shard"] // sizes.setdefault("expert", 1)
    layouts: Mapping[str, Any] = facts.get("weights") or {}
    tensors: dict[str, TensorStorageMetadata] = {}
    files: dict[MetadataIndex, _File] = {}
    for rank in range(num_ranks):
        path = folder / rank_file(rank, num_ranks)
        places = _places(rank, sizes)
        with safe_open(path, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                stored = tuple(opened.get_slice(key).get_shape())
                shape, splits = _layout(key, stored, layouts, shapes)
                region = region_in(shape, splits, sizes, places) if stored else ()
                if tuple(each.stop - each.start for each in region) != stored:
                    raise ValueError(f"{key} of rank {rank} has shape {list(stored)}")
                offsets = torch.Size(each.start for each in region)
                index = MetadataIndex(key, offsets)
                if index in files or 0 in stored:
                    continue
                files[index] = _File(str(path))
                if key not in tensors:
                    properties = TensorProperties(dtype=opened.get_slice(key)[:0].dtype if stored else torch.float32)
                    tensors[key] = TensorStorageMetadata(properties, torch.Size(shape if stored else ()), [])
                tensors[key].chunks.append(ChunkStorageMetadata(offsets, torch.Size(stored)))
    return Metadata(state_dict_metadata=dict(tensors), storage_data=files)


def _places(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Of a rank in the mesh, by the name of the dimension."""
    rest, tensor = divmod(rank, sizes["tensor"])
    replicate, shard = divmod(rest, sizes["shard"])
    expert_shard, expert = divmod(shard, sizes["expert"])
    return {
        "replicate": replicate,
        "shard": shard,
        "tensor": tensor,
        "expert_shard": expert_shard,
        "expert": expert,
    }


def _layout(
    key: str, stored: tuple[int, ...], layouts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], Splits]:
    """Whole shape and splits of the weight that a key belongs to, or of the optimiser state of a weight."""
    part, _, name = key.partition("/")
    name = name if part == "weights" else name.rpartition("/")[0]
    if layouts:
        shape, splits = layouts[name]
        return tuple(shape), tuple((each[0], each[1]) for each in splits)
    shape = shapes.get(name, stored)
    return shape, () if stored == shape else (("shard", 0),)
