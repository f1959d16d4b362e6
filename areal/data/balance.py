"""Balanced partition of sequences over ranks, mini-batches and micro-batches. Pure Python, no torch."""

import heapq
from collections.abc import Sequence

_Part = tuple[int, list[int]]
"""Sum of the sizes, indices."""


def balanced_parts(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Partition the indices of `sizes` into exactly `num_parts` lists whose sums are close to each other.

    Karmarkar-Karp (largest differencing method, 1982): two partial partitions are merged, the fullest part of one with
    the emptiest of the other, always those two whose sums differ most. Two sums never differ by more than the greatest
    size. No part is empty when there are at least `num_parts` sizes above 0. Indices ascend within a part, parts are
    ordered by their first index, and the result depends on the arguments only.
    """
    if num_parts == 1:
        return [list(range(len(sizes)))]
    # One heap entry is a partial partition: (-(greatest - smallest sum), first index, parts by descending sum); parts
    # that are still empty are not stored. The first index is unique and decides ties.
    heap: list[tuple[int, int, list[_Part]]] = [(-size, i, [(size, [i])]) for i, size in enumerate(sizes)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, parts = heapq.heappop(heap)
        _, second, others = heap[0]
        merged = _merged(parts, others, num_parts)
        smallest = merged[-1][0] if len(merged) == num_parts else 0
        heapq.heapreplace(heap, (smallest - merged[0][0], min(first, second), merged))
    found = sorted(sorted(indices) for _, indices in heap[0][2]) if heap else []
    return found + [[] for _ in range(num_parts - len(found))]


def _merged(parts: list[_Part], others: list[_Part], num_parts: int) -> list[_Part]:
    """The fullest of `parts` joins the emptiest of `others`, and so on."""
    merged = [*parts, *((0, list[int]()) for _ in range(num_parts - len(parts)))]
    for place, (total, indices) in enumerate(others):
        own_total, own = merged[num_parts - 1 - place]
        own.extend(indices)
        merged[num_parts - 1 - place] = (own_total + total, own)
    return sorted((part for part in merged if part[1]), key=lambda part: (-part[0], part[1][0]))
