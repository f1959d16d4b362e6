"""Trainer ranks without process groups: one rank alone, or a rank of a group of threads."""

from __future__ import annotations

from torch import Tensor


class FakeRanks:
    """Implements `areal.api.engine.Ranks`. `group` None: one rank. See `RankGroup` in tests/trainer/conftest.py."""

    def __init__(self, rank: int = 0, group=None) -> None:
        self.rank = rank
        self.world_size = 1 if group is None else group.size
        self._group = group

    def all_reduce(self, values: Tensor, op: str = "sum") -> Tensor:
        return values if self._group is None else self._group.all_reduce(self.rank, values, op)

    def for_thread(self) -> FakeRanks:
        return self if self._group is None else FakeRanks(self.rank, self._group.for_thread)
