"""Cuts by token budget keep every sequence once, respect the limit, and come out in the asked number."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.data.pack import rows_to_train_batch, split_by_tokens, take, token_positions
from tests.expect import raises_code

lengths_lists = st.lists(st.integers(1, 50), max_size=40)


def each_once(parts: list[list[int]], count: int) -> bool:
    return sorted(i for part in parts for i in part) == list(range(count))


@settings(max_examples=100, deadline=None)
@given(lengths_lists, st.integers(50, 200), st.integers(1, 6), st.integers(1, 4))
def test_split_keeps_the_limit(lengths, max_tokens, min_parts, divisor):
    parts = split_by_tokens(lengths, max_tokens, min_parts, divisor)
    assert each_once(parts, len(lengths))
    assert len(parts) >= min_parts
    assert len(parts) % divisor == 0
    assert all(sum(lengths[i] for i in part) <= max_tokens for part in parts)
    # first fit needs no more than about twice the volume, beyond what was asked for
    volume = -(-sum(lengths) // max_tokens)
    assert len(parts) <= -(-max(2 * volume, min_parts, 1) // divisor) * divisor


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=15), st.integers(40, 80), st.integers(1, 4))
def test_neighbours_stay_together(pairs, max_tokens, min_parts):
    lengths = [length for pair in pairs for length in pair]
    parts = split_by_tokens(lengths, max_tokens, min_parts, 1, granularity=2)
    assert each_once(parts, len(lengths))
    for part in parts:
        assert all(part[i] % 2 == 0 and part[i + 1] == part[i] + 1 for i in range(0, len(part), 2))
        assert sum(lengths[i] for i in part) <= max_tokens


def test_split_by_hand():
    assert split_by_tokens([3, 3], None) == [[0, 1]]
    assert split_by_tokens([3, 3], None, 2) == [[0], [1]]
    assert split_by_tokens([3], None, 3) == [[0], [], []]
    assert split_by_tokens([], 10, 2) == [[], []]


def test_limits_are_enforced_where_levelling_would_break_them():
    # longest first would put 4+4 and 3+3+... unevenly; the limit must hold whatever it does
    lengths = [7, 6, 5, 5, 4, 4, 3, 2, 2, 2]
    parts = split_by_tokens(lengths, 10)
    assert each_once(parts, len(lengths))
    assert max(sum(lengths[i] for i in part) for part in parts) <= 10
    assert len(parts) == 4


def test_split_refuses_what_cannot_fit():
    with raises_code("data.too_long", "11 tokens"):
        split_by_tokens([3, 11], 10)
    with raises_code("data.too_long", "12 tokens"):
        split_by_tokens([6, 6], 10, granularity=2)
    with raises_code("data.uneven_units", "granularity=2"):
        split_by_tokens([1, 1, 1], 10, granularity=2)


def test_take_picks_whole_sequences_in_the_given_order():
    batch = rows_to_train_batch([[1, 2], [3, 4, 5], [6]], [[0, 1], [0, 1, 1], [1]])
    some = take(batch, [2, 0])
    assert some.input_ids.tolist() == [6, 1, 2]
    assert some.cu_seqlens.tolist() == [0, 1, 3]
    assert some.cu_seqlens.dtype == torch.int32
    assert some.sequence_index.tolist() == [0, 1, 1]
    assert some.loss_mask.tolist() == [False, True, False]
    assert some.group_ids.tolist() == [2, 0]
    assert some.advantages is None
    assert take(batch, []).num_tokens == 0
    assert take(batch, []).num_sequences == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_token_positions_agree_with_slices(lengths, random):
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    order = random.sample(range(len(lengths)), k=random.randint(0, len(lengths)))
    positions, bounds = token_positions(cu_seqlens, order)
    expected = [t for i in order for t in range(int(cu_seqlens[i]), int(cu_seqlens[i + 1]))]
    assert positions.tolist() == expected
    assert bounds.diff().tolist() == [lengths[i] for i in order]
