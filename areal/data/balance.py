"""Balanced partition of sequences over ranks, mini-batches and micro-batches. Pure Python, no torch."""

import heapq
from collections.abc import Sequence

_Part = tuple[int, int, list[int]]  # Minus the sum of the sizes, first index of the list, indices.


def balanced_parts(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Partition the indices of `sizes` into exactly `num_parts` lists whose sums are close to each other.

    Karmarkar-Karp (largest differencing method, 1982): two partial partitions are merged, the fullest part of one with
    the emptiest of the other, always those two whose sums differ most. Two sums never differ by more than the greatest
    size. No part is empty when there are at least `num_parts` sizes above 0. Indices ascend within a part, parts are
    ordered by their first index, and the result depends on the arguments only.
    """
    partition = Partition(sizes, num_parts)
    partition.merge(len(sizes))
    return partition.parts()


class Partition:
    """The computation of `balanced_parts`, which an event loop can divide over several turns."""

    def __init__(self, sizes: Sequence[int], num_parts: int) -> None:
        self._sizes = sizes
        self._num_parts = num_parts
        # A partial partition is (-(greatest - smallest sum), lowest index, parts by descending sum); parts that are
        # still empty are not stored. The lowest index is unique and decides ties. Those of one size are made when they
        # are merged: all at once are many objects for one pass of the cycle collector.
        self._heap: list[tuple[int, int, list[_Part]]] = []
        indices = range(len(sizes))
        self._single = sorted(indices, key=sizes.__getitem__, reverse=True)[::-1]  # the next one is the last
        if num_parts == 1 and indices:
            self._single, self._heap = [], [(0, 0, [(0, 0, list(indices))])]

    def merge(self, limit: int) -> bool:
        """Merge at most `limit` pairs of partial partitions. True: all are merged."""
        for _ in range(min(limit, len(self._single) + len(self._heap) - 1)):
            first, parts = self._next()
            second, others = self._next()
            _join(parts, others, self._num_parts)
            smallest = parts[-1][0] if len(parts) == self._num_parts else 0
            heapq.heappush(self._heap, (parts[0][0] - smallest, min(first, second), parts))
        return len(self._single) + len(self._heap) <= 1

    def _next(self) -> tuple[int, list[_Part]]:
        """Remove the partial partition whose sums differ most."""
        if self._single:
            index = self._single[-1]
            size = -self._sizes[index]
            if not self._heap or (size, index) < self._heap[0][:2]:
                self._single.pop()
                return index, [(size, index, [index])]
        _, lowest, parts = heapq.heappop(self._heap)
        return lowest, parts

    def parts(self) -> list[list[int]]:
        """The result, once all are merged."""
        lists = [indices for _, _, indices in self._heap[0][2]] if self._heap else [[index] for index in self._single]
        filled = sorted(map(sorted, lists))
        return filled + [[] for _ in range(self._num_parts - len(filled))]


def _join(parts: list[_Part], others: list[_Part], num_parts: int) -> None:
    """The emptiest of `parts` receives the fullest of `others`, and so on; `parts` stays in descending order."""
    count = len(parts)
    for place, other in enumerate(others, 1):
        if num_parts - place >= count:  # it is still empty
            parts.append(other)
        else:
            total, first, indices = parts[num_parts - place]
            indices += other[2]
            parts[num_parts - place] = (total + other[0], first, indices)
    parts.sort()
