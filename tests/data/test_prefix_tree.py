"""The prefix tree of rows: each beginning once, in depth-first order; parts that share and keep a limit."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.data import prefix_tree as trees


@st.composite
def rows_of_trees(draw, num_tokens: int = 4) -> list[list[int]]:
    """Rows that leave others anywhere, up to 12 forks deep; some equal others, or are their beginning."""
    tails = st.lists(st.integers(0, num_tokens - 1), max_size=6)
    rows = [draw(tails)]
    for tail, parent, cut in draw(st.lists(st.tuples(tails, st.integers(0, 30), st.integers(0, 12)), max_size=12)):
        before = rows[min(parent, len(rows) - 1)]  # mostly the last one
        rows.append(before[: max(len(before) - cut // 2, 0)] + tail)
    return [row or [0] for row in rows]


@pytest.fixture(autouse=True)
def _every_length(monkeypatch):
    monkeypatch.setattr(trees, "MIN_SHARED", 1)


def packed(rows) -> tuple[np.ndarray, np.ndarray]:
    keys = np.array([token for row in rows for token in row], dtype=np.uint32)
    return keys, np.array([0, *accumulate(map(len, rows))])


def beginnings(rows) -> set[tuple[int, ...]]:
    return {tuple(row[: end + 1]) for row in rows for end in range(len(row))}


@settings(max_examples=100, deadline=None)
@given(rows_of_trees())
def test_each_beginning_is_one_token_of_the_tree(rows):
    keys, bounds = packed(rows)
    ordered = trees.sorted_rows(keys, bounds)
    tree = trees.prefix_tree(ordered, bounds)
    assert len(tree.source) == ordered.tree_tokens == len(beginnings(rows))
    beginning_of: dict[int, tuple[int, ...]] = {}
    for row, path in zip(rows, np.split(tree.places, bounds[1:-1]), strict=True):
        assert keys[tree.source[path]].tolist() == row
        for end, place in enumerate(path.tolist()):
            assert beginning_of.setdefault(place, tuple(row[: end + 1])) == tuple(row[: end + 1])
    for place, begin in beginning_of.items():  # after a token come those that have it before them
        below = [other for other, longer in beginning_of.items() if longer[: len(begin)] == begin]
        assert sorted(below) == list(range(place, place + len(below)))


@settings(max_examples=100, deadline=None)
@given(rows_of_trees())
def test_a_branch_leaves_another_after_its_own_first_token(rows):
    keys, bounds = packed(rows)
    branches = trees.prefix_tree(trees.sorted_rows(keys, bounds), bounds).branches
    assert all(first.first + first.size == second.first for first, second in pairwise(branches))
    for number, branch in enumerate(branches):
        assert branch.size > 0
        assert branch.parent < number
        if branch.parent < 0:
            assert branch.shared == 0
        else:
            parent = branches[branch.parent]
            assert parent.shared < branch.shared <= parent.shared + parent.size
    by_tree = [branch for branch in branches if branch.parent < 0]
    assert {rows[branch.row][0] for branch in by_tree} == {row[0] for row in rows}


@settings(max_examples=100, deadline=None)
@given(rows_of_trees(), st.integers(1, 30), st.integers(1, 4), st.integers(1, 3))
def test_parts_keep_the_limit_and_neighbours_together(rows, limit, min_parts, divisor):
    ordered = trees.sorted_rows(*packed(rows))
    parts = ordered.parts(limit, min_parts, divisor)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    assert len(parts) >= min_parts
    assert len(parts) % divisor == 0
    for part in parts:
        assert len(part) < 2 or len(beginnings([rows[row] for row in part])) <= limit
    assert ordered.parts(limit, min_parts, divisor) == parts


def test_parts_are_balanced_and_follow_the_tree():
    rows = [[fork, 9, 9, 9, leaf] for leaf in range(3) for fork in range(4)]
    ordered = trees.sorted_rows(*packed(rows))
    parts = ordered.parts(20, min_parts=4)
    assert [{rows[row][0] for row in part} for part in parts] == [{0}, {1}, {2}, {3}]
    assert ordered.parts(28) == [list(range(12))]


def test_short_beginnings_are_not_shared(monkeypatch):
    monkeypatch.setattr(trees, "MIN_SHARED", 3)
    keys, bounds = packed([[1, 2, 5, 6], [1, 2, 7, 8], [1, 2, 7, 9]])
    ordered = trees.sorted_rows(keys, bounds)
    assert ordered.tree_tokens == 9
    assert [branch.shared for branch in trees.prefix_tree(ordered, bounds).branches] == [0, 0, 3]


def test_joint_keys_differ_where_any_column_does():
    ids = np.array([1, 1, 1, 2], dtype=np.uint32)
    more = np.array([[0, 1], [1, 0], [0, 1], [0, 1]], dtype=np.int16)
    temperatures = np.array([np.nan, np.nan, np.nan, 1.0], dtype=np.float32)
    keys = trees.joint_keys([ids, more, temperatures])
    assert keys[0] == keys[2]
    assert len(set(keys.tolist())) == 3
