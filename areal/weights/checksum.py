"""Checksum of a model's weights: integer arithmetic on their bits, equal on every device and for every sharding.

The sum of a tensor is the sum of its words, each multiplied by an odd number that depends on its position, modulo 2^64.
One changed bit always changes it; any other change is missed with a probability of about 2^-32 at worst.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from areal.api.engine import Ranks, WeightSource

_COLUMNS = 2**15
"""Positions with separate multipliers; later rows reuse them, times a multiplier per row."""
_CPU_ROWS, _CUDA_ROWS = 1, 2**7
"""Rows per block: temporaries of 256 KiB, which fit the cache, and of 32 MiB."""
_WORDS = {1: torch.uint8, 2: torch.int16}
"""By element size; larger elements are split into words of four bytes, so that their top bits have enough weight."""


class WeightsChecksum:
    """Accumulates full weights one by one, in any order."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._columns: dict[torch.device, Tensor] = {}

    def add(self, name: str, weight: Tensor) -> None:
        """Add one weight, without waiting for the device."""
        shape = ",".join(map(str, weight.shape))
        self._sums[f"{name} {weight.dtype} [{shape}]"] = self._sum_of(weight)

    def hexdigest(self) -> str:
        """Return the checksum of all weights added."""
        sums = torch.stack([found.cpu() for found in self._sums.values()]).tolist() if self._sums else []
        lines = sorted(f"{label} {value}\n" for label, value in zip(self._sums, sums, strict=True))
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()

    def _sum_of(self, weight: Tensor) -> Tensor:
        words = weight.detach().contiguous().reshape(-1).view(_WORDS.get(weight.element_size(), torch.int32))
        num_rows = -(-words.numel() // _COLUMNS)
        rows = _multipliers(1, num_rows).to(weight.device)
        if weight.device not in self._columns:
            self._columns[weight.device] = _multipliers(0, _COLUMNS).to(weight.device)
        columns = self._columns[weight.device]
        total = torch.zeros((), dtype=torch.int64, device=weight.device)
        step = _CPU_ROWS if weight.device.type == "cpu" else _CUDA_ROWS
        for first in range(0, num_rows, step):
            block = words[first * _COLUMNS : (first + step) * _COLUMNS]
            whole = block.numel() // _COLUMNS
            if whole:
                sums = (block[: whole * _COLUMNS].view(whole, _COLUMNS) * columns).sum(1)
                total += (sums * rows[first : first + whole]).sum()
            if rest := block.numel() % _COLUMNS:
                total += (block[whole * _COLUMNS :] * columns[:rest]).sum() * rows[first + whole]
        return total

    def adding(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights` and add each."""
        for name, weight in weights:
            self.add(name, weight)
            yield name, weight


def checksum_of(engine: WeightSource, ranks: Ranks) -> str:
    """Return the checksum of a model's current weights on rank 0, "" on the other ranks; a collective."""
    checksum = WeightsChecksum()
    for name, weight in engine.named_weights():
        if ranks.rank == 0:
            checksum.add(name, weight)
    return checksum.hexdigest() if ranks.rank == 0 else ""


@lru_cache(maxsize=16)  # a model has few sizes of weights
def _multipliers(stream: int, count: int) -> Tensor:
    """`count` pseudo-random odd 64-bit numbers: a hash of the position and of `stream`. Returns [count] int64."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream << 32)
    for shift, factor in ((32, 0xD6E8FEB86659FD93), (29, 0xA0761D6478BD642F), (32, 0xE7037ED1A0B428DB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    return torch.from_numpy((mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64))
