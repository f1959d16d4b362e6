"""Which data rank trains on which groups of rows where tokens that rows share are computed once. Pure, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from areal.data.balance import balanced_parts
from areal.data.prefix_tree import SortedRows, sorted_rows

MIN_SAVED = 0.15
"""Groups that share less than this fraction of the smaller one's tokens are placed independently."""


@dataclass(frozen=True, slots=True)
class GroupTree:
    """The prefix tree of a group of rows."""

    tokens: int
    row: np.ndarray
    """[L] int32: one of its rows. What groups share with each other is the beginning of all of their rows."""


def group_tree(token_ids: np.ndarray, lengths: np.ndarray) -> GroupTree:
    """`token_ids` [T] int32: the rows one after another; `lengths` [S]. Raises ValueError when these do not fit."""
    if not len(lengths) or lengths.min() < 1 or lengths.sum() != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens are not rows of {lengths.tolist()}")
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    rows = sorted_rows(token_ids.astype(np.uint32), bounds)
    first = int(rows.order[0])
    return GroupTree(rows.tree_tokens, token_ids[bounds[first] : bounds[first + 1]].copy())


def tree_parts(groups: Sequence[GroupTree], num_parts: int) -> list[list[int]]:
    """Partition the indices of groups as `balanced_parts` does, by the tokens of the trees of the parts.

    Groups that share much are in one part unless the largest part would then be larger.
    """
    bounds = np.cumsum([0, *(len(group.row) for group in groups)])
    rows = sorted_rows(np.concatenate([group.row for group in groups]).astype(np.uint32), bounds)
    sizes = [group.tokens for group in groups]
    families = _families(sizes, rows, num_parts)
    totals = [part_tokens(sizes, rows, family) for family in families]
    together = [[group for family in part for group in families[family]] for part in balanced_parts(totals, num_parts)]
    candidates = [sorted(map(sorted, together), key=lambda part: (not part, part)), balanced_parts(sizes, num_parts)]
    return min(candidates, key=lambda parts: max(part_tokens(sizes, rows, part) for part in parts))


def part_tokens(sizes: Sequence[int], rows: SortedRows, part: Sequence[int]) -> int:
    """Tokens of the tree of some groups. `sizes`: of the trees of all; `rows`: one row of each."""
    places = np.flatnonzero(np.isin(rows.order, part))
    shared = sum(int(rows.shared[a + 1 : b + 1].min()) for a, b in pairwise(places))
    return sum(sizes[group] for group in part) - shared


def _families(sizes: Sequence[int], rows: SortedRows, num_parts: int) -> list[list[int]]:
    """Groups that share much, those that share most first; at least `num_parts` families, none above a mean part."""
    limit = (sum(sizes) - int(rows.shared.sum())) / num_parts
    family_of, members, totals = list(range(len(sizes))), [[group] for group in range(len(sizes))], list(sizes)
    left = len(sizes)
    for place in np.argsort(-rows.shared, kind="stable").tolist():
        shared, group, before = int(rows.shared[place]), int(rows.order[place]), int(rows.order[place - 1])
        a, b = family_of[before], family_of[group]
        if left <= num_parts or not shared:
            break
        if shared < MIN_SAVED * min(sizes[before], sizes[group]) or totals[a] + totals[b] - shared > limit:
            continue
        for member in members[b]:
            family_of[member] = a
        members[a] += members[b]
        totals[a] += totals[b] - shared
        members[b], left = [], left - 1
    return [sorted(family) for family in members if family]
