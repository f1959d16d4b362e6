"""The prefix tree of rows of tokens: which tokens rows share, and which rows are computed together. Pure, no torch."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

MIN_SHARED = 4
"""Tokens that rows must have in common to share them."""


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in the order of a depth-first walk through their tree: neighbours have most in common."""

    lengths: np.ndarray  # [S] of each row
    order: np.ndarray  # [S] the rows, sorted by their tokens
    shared: np.ndarray  # [S] tokens that each of `order` has in common with the one before it; the first 0

    @property
    def tree_tokens(self) -> int:
        """Tokens of the tree, in which a token that rows share is one."""
        return int(self.lengths.sum() - self.shared.sum())

    def among(self, rows: Sequence[int]) -> "SortedRows":
        """Those of some rows, which get the numbers of their places in `rows`."""
        number = np.full(len(self.lengths), -1)
        number[rows] = np.arange(len(rows))
        kept = np.flatnonzero(number[self.order] >= 0)
        shared = np.zeros(len(kept), dtype=np.int64)
        if len(kept) > 1:
            shared[1:] = np.minimum.reduceat(self.shared[: kept[-1] + 1], kept[:-1] + 1)
        return SortedRows(self.lengths[rows], number[self.order[kept]], shared)

    def parts(self, max_tokens: int, min_parts: int = 1, divisor: int = 1) -> list[list[int]]:
        """Neighbours in the order as lists of at most `max_tokens` tree tokens (one row may have more).

        Their number is the least that `max_tokens` allows, at least `min_parts` and a multiple of `divisor`; some may
        be empty. The largest list is as small as their number allows.
        """
        count = -(-max(len(self._filled(max_tokens)), min_parts) // divisor) * divisor
        if count == 1:
            return [sorted(self.order.tolist())]
        low, high = min(self.tree_tokens // count, max_tokens), max_tokens
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(self._filled(middle)) <= count else (middle + 1, high)
        filled = [sorted(part) for part in self._filled(high)]
        return filled + [[] for _ in range(count - len(filled))]

    def _filled(self, max_tokens: int) -> list[list[int]]:
        filled: list[list[int]] = []
        room = 0
        for row, shared in zip(self.order.tolist(), self.shared.tolist(), strict=True):
            length = int(self.lengths[row])
            if not filled or length - shared > room or length > max_tokens:
                filled.append([])
                shared, room = 0, max_tokens
            filled[-1].append(row)
            room -= length - shared
        return filled


def sorted_rows(keys: np.ndarray, bounds: np.ndarray) -> SortedRows:
    """`keys` [T] unsigned: equal for tokens that are equal. Row i has those from bounds[i] to bounds[i + 1].

    What is shared is 0 where it would be below MIN_SHARED.
    """
    lengths, number_of = np.diff(bounds), keys.astype(keys.dtype.newbyteorder(">"))  # bytes in the order of numbers
    spans = [slice(start, end) for start, end in pairwise(bounds.tolist())]
    order = sorted(range(len(spans)), key=lambda row: number_of[spans[row]].tobytes())
    shared = [_common_length(keys[spans[a]], keys[spans[b]]) for a, b in pairwise(order)]
    numbers = np.array([0, *shared][: len(order)], dtype=np.int64)
    return SortedRows(lengths, np.array(order, dtype=np.int64), np.where(numbers < MIN_SHARED, 0, numbers))


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


class Branch(NamedTuple):
    """The end of a row that no earlier branch of the tree has."""

    row: int
    shared: int
    """Tokens of the row before it, which are on other branches."""
    parent: int
    """The branch that the last of them is on; -1 = none."""
    first: int
    """Place of its first token."""
    size: int


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The tree of rows. Its tokens are in depth-first order: after a token come those that have it before them.

    A branch comes before those that leave it; of these, the last to leave is the first in order.
    """

    branches: list[Branch]
    places: np.ndarray  # [T] place in the tree of each token of the rows
    source: np.ndarray  # [U] a token of the rows for each place


def prefix_tree(rows: SortedRows, bounds: np.ndarray) -> PrefixTree:
    """The tree of sorted rows. Rows that are equal, or the beginning of another, have no branch."""
    order, shared, lengths = rows.order, rows.shared, rows.lengths[rows.order]
    is_leaf = np.append(shared[1:] < lengths[:-1], True)  # others are the beginning of the next one
    leaves = np.flatnonzero(is_leaf)
    previous = np.concatenate([[-1], leaves[:-1]])
    common = np.minimum.reduceat(shared, previous + 1)
    tops = [*np.flatnonzero(common == 0).tolist(), len(leaves)]
    names, sizes, gaps = order[leaves].tolist(), lengths[leaves].tolist(), common.tolist()
    branches: list[Branch] = []
    numbers: list[int] = []  # the branch of each leaf
    for first, end in pairwise(tops):
        numbers += _grow(branches, names[first:end], sizes[first:end], gaps[first:end])
    of_row = np.empty(len(order), dtype=np.int64)
    of_row[order] = np.array(numbers)[np.cumsum(is_leaf) - is_leaf]
    row, begins, parents, firsts, counts = np.array(branches).T
    tokens = np.arange(int(bounds[-1]))
    rows_of = np.repeat(np.arange(len(order)), rows.lengths)
    at, on = tokens - bounds[rows_of], of_row[rows_of]  # place in its row, and branch, of each token
    above = np.flatnonzero(at < begins[on])
    while len(above):  # on the branch before
        on[above] = parents[on[above]]
        above = above[at[above] < begins[on[above]]]
    places = firsts[on] + at - begins[on]
    source = np.empty(int(counts.sum()), dtype=np.int64)
    is_own = row[on] == rows_of
    source[places[is_own]] = tokens[is_own]
    return PrefixTree(branches, places, source)


def _grow(branches: list[Branch], rows: list[int], lengths: list[int], shared: list[int]) -> list[int]:
    """Append the branches of one tree; returns the number of that of each leaf. `rows`: its leaves, sorted; `shared`:
    with the one before."""
    first = branches[-1].first + branches[-1].size if branches else 0
    parents, begins = _parents(lengths, shared)
    children: dict[int, list[int]] = {}
    for leaf in sorted(range(len(rows)), key=lambda leaf: (begins[leaf], -leaf)):
        children.setdefault(parents[leaf], []).append(leaf)
    numbers = [-1] * (len(rows) + 1)  # the last: of no parent
    waiting = children[-1]
    while waiting:
        leaf = waiting.pop()  # the last to leave its parent
        begin = begins[leaf]
        numbers[leaf] = len(branches)
        branches.append(Branch(rows[leaf], begin, numbers[parents[leaf]], first, lengths[leaf] - begin))
        first += lengths[leaf] - begin
        waiting += children.get(leaf, [])
    return numbers[:-1]


def _parents(lengths: list[int], shared: list[int]) -> tuple[list[int], list[int]]:
    """For each leaf of a tree the leaf whose branch it leaves, and where. The longest have their branches first."""
    parents, begins = [-1] * len(lengths), [0] * len(lengths)
    placed: list[int] = []
    for leaf in sorted(range(len(lengths)), key=lambda leaf: -lengths[leaf]):
        at = bisect(placed, leaf)
        before = min(shared[placed[at - 1] + 1 : leaf + 1]) if at else -1
        after = min(shared[leaf + 1 : placed[at] + 1]) if at < len(placed) else -1
        if placed:
            parent, begins[leaf] = (placed[at - 1], before) if before >= after else (placed[at], after)
            while begins[leaf] <= begins[parent] and parents[parent] >= 0:
                parent = parents[parent]
            parents[leaf] = parent
        placed.insert(at, leaf)
    return parents, begins


def joint_keys(columns: Sequence[np.ndarray]) -> np.ndarray:
    """One number of 64 bits for the values of a token in all `columns`, [T, ...] each: different for different ones,
    but for one pair in 10^19."""
    total = np.zeros(len(columns[0]), dtype=np.uint64)
    dice = np.random.default_rng(0)
    for values in columns:
        wide = np.ascontiguousarray(values).reshape(len(values), -1)
        numbers = wide.view(f"u{wide.dtype.itemsize}").astype(np.uint64)
        factors = dice.integers(2**63, size=numbers.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        total += (numbers * factors).sum(axis=1, dtype=np.uint64)
    return total
