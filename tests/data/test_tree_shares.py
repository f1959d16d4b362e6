"""Groups of data ranks where shared tokens are computed once: balanced by tokens of trees, with whole groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.data import prefix_tree
from areal.data.balance import balanced_parts
from areal.data.tree_shares import group_tree, tree_parts
from tests.data.test_prefix_tree import beginnings, rows_of_trees


def tree_of(rows):
    return group_tree(np.array([token for row in rows for token in row], "<i4"), np.array([len(row) for row in rows]))


def largest_over_mean(groups, parts) -> float:
    """Of the tokens of the trees of the parts, counted from the rows."""
    tokens = [len(beginnings([row for group in part for row in groups[group]])) for part in parts]
    return max(tokens) / (sum(tokens) / len(tokens))


def answers(prompt, lengths, first):
    """Rows that share the prompt only."""
    return [[*prompt, *range(first + 1000 * row, first + 1000 * row + size)] for row, size in enumerate(lengths)]


@pytest.fixture
def every_length(monkeypatch):
    monkeypatch.setattr(prefix_tree, "MIN_SHARED", 1)


@pytest.mark.usefixtures("every_length")
@settings(max_examples=200, deadline=None)
@given(st.lists(rows_of_trees(), min_size=1, max_size=8), st.integers(1, 5))
def test_every_group_is_in_one_part_and_no_part_is_empty(groups, num_parts):
    trees = [tree_of(rows) for rows in groups]
    assert [tree.tokens for tree in trees] == [len(beginnings(rows)) for rows in groups]
    parts = tree_parts(trees, num_parts)
    assert len(parts) == num_parts
    assert sorted(group for part in parts for group in part) == list(range(len(groups)))
    assert all(part == sorted(part) for part in parts)
    assert sum(not part for part in parts) == max(num_parts - len(groups), 0)
    assert tree_parts(trees, num_parts) == parts


def test_ranks_compute_equally_many_tokens():
    """Groups of 16 with equally many tokens: of long prompts and of long answers."""
    dice = np.random.default_rng(0)
    groups = []
    for number in range(32):
        prompt = int(dice.choice([10, 50, 225]))
        sizes = (250 - prompt) * dice.uniform(0.5, 1.5, 16)
        groups.append(answers([number] * prompt, sizes.astype(int).clip(1), 100_000 * (number + 1)))
    by_rows = balanced_parts([sum(map(len, rows)) for rows in groups], 4)
    by_trees = tree_parts([tree_of(rows) for rows in groups], 4)
    assert largest_over_mean(groups, by_rows) > 1.2
    assert largest_over_mean(groups, by_trees) < 1.01


def test_groups_of_one_prompt_are_together():
    prompts = [[number] * 100 for number in range(4)]
    groups = [answers(prompts[number % 4], [5, 5], 1000 + 10_000 * number) for number in range(8)]
    parts = tree_parts([tree_of(rows) for rows in groups], 2)
    assert [{group % 4 for group in part} for part in parts] in ([{0, 1}, {2, 3}], [{0, 2}, {1, 3}], [{0, 3}, {1, 2}])
    assert sum(len(beginnings([row for group in part for row in groups[group]])) for part in parts) == 4 * 120


def test_groups_of_one_prompt_are_divided_where_a_rank_would_have_too_much():
    groups = [answers([1] * 100, [50, 50], 1000 + 10_000 * number) for number in range(8)]
    parts = tree_parts([tree_of(rows) for rows in groups], 4)
    assert [len(part) for part in parts] == [2, 2, 2, 2]


def test_rows_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="3 tokens are not rows of"):
        group_tree(np.array([1, 2, 3], "<i4"), np.array([2, 2]))
