"""The layout of one broadcast: a flat tensor of bytes that contains the weights of a bucket one after the other.

There is no padding: a weight starts where the previous one ends. Its bytes can be viewed in its dtype only if that
position is a multiple of the dtype's size, so the sender puts the widest dtypes first (`widest_first`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name` ("bfloat16"). ValueError for anything else."""
    dtype = torch.__dict__.get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown weight dtype {name!r}: give a torch dtype name such as bfloat16")
    return dtype


def widest_first(dtypes: Sequence[str]) -> list[int]:
    """The order in which weights of these dtypes go into a bucket, as indices; equal widths keep theirs."""
    return sorted(range(len(dtypes)), key=lambda index: -torch_dtype(dtypes[index]).itemsize)


def bucket_bytes(dtypes: list[str], shapes: list[list[int]]) -> int:
    """Bytes of a bucket. ValueError when it cannot be viewed in place."""
    return sum(size for _, size in _places(dtypes, shapes))


def views(buffer: Tensor, dtypes: list[str], shapes: list[list[int]]) -> list[Tensor]:
    """Each weight of a bucket as a tensor over the bytes of `buffer` [uint8], without copying. ValueError when they do
    not fit."""
    tensors: list[Tensor] = []
    for dtype, shape, (start, size) in zip(dtypes, shapes, _places(dtypes, shapes), strict=True):
        if start + size > buffer.numel():
            raise ValueError(f"a bucket of more than {start + size - 1} bytes does not fit into {buffer.numel()}")
        tensors.append(buffer[start : start + size].view(torch_dtype(dtype)).view(shape))
    return tensors


def is_finite(value: Tensor) -> bool:
    """Whether every number is finite."""
    if not value.is_floating_point():
        return True
    # A sum of finite numbers is finite except at the limit of the dtype, and costs a fortieth of isfinite on a CPU.
    return math.isfinite(value.sum().item()) or bool(value.isfinite().all())


def _places(dtypes: list[str], shapes: list[list[int]]) -> Iterable[tuple[int, int]]:
    """Start and size in bytes of each weight."""
    end = 0
    for index, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True)):
        width = torch_dtype(dtype).itemsize
        if end % width:
            raise ValueError(
                f"weight {index} of a bucket, {dtype}, would start at byte {end}: put the widest dtypes first"
            )
        size = math.prod(shape) * width
        yield end, size
        end += size
