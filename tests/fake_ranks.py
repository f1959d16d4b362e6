"""Trainer ranks without process groups: one rank alone, or a rank of a group of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class FakeRanks:
    """Implements `areal.api.engine.Ranks`. `group` None: one rank. See `RankGroup` in tests/trainer/conftest.py."""

    def __init__(self, rank: int = 0, group=None) -> None:
        self.rank = rank
        self.world_size = 1 if group is None else group.size
        self._group = group

    def all_reduce(self, values: Tensor, op: str = "sum") -> Tensor:
        return values if self._group is None else self._group.all_reduce(self.rank, values, op)

    def gather(self, content: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
        if self._group is None:
            return iter(())
        assert self.rank == 0 or len(content), "process groups would hang"
        return iter(self._group.gather(self.rank, content))

    def for_thread(self) -> FakeRanks:
        return self if self._group is None else FakeRanks(self.rank, self._group.for_thread)
