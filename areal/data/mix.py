"""Mixes of datasets: how often the rows of each occur in an epoch."""

from collections.abc import Sequence
from typing import TypeVar

RowT = TypeVar("RowT")


def mixed_counts(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Rows of each dataset in an epoch, in proportion to `weights`: the smallest such epoch that cuts no dataset.

    No weights: the sizes.
    """
    if not weights:
        return list(sizes)
    scale = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [max(size, round(scale * weight)) for size, weight in zip(sizes, weights, strict=True)]


def mixed_rows(parts: Sequence[Sequence[RowT]], weights: Sequence[float]) -> list[RowT]:
    """The rows of an epoch, dataset by dataset; a repeated row is the same object. The parts have rows."""
    counts = mixed_counts([len(part) for part in parts], weights)
    return [part[i % len(part)] for part, count in zip(parts, counts, strict=True) for i in range(count)]
