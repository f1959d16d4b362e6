"""Columns behave like lists that cannot be changed."""

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.columns import Packed, Runs, RunsBuilder, append, joined, packed_ids, packed_logprobs, to_array, to_runs

NUMBERS = st.lists(st.integers(-3, 3), max_size=12)
PLACES = st.integers(-13, 13) | st.none()


@given(NUMBERS, NUMBERS, PLACES, PLACES)
def test_both_kinds_agree_with_a_list(values, others, start, stop):
    for column in (packed_ids(values), to_runs(values)):
        assert column == values
        assert values == column
        assert (column != others) == (values != others)
        assert column + others == others.__class__(values) + others == values + packed_ids(others)
        assert others + column == others + values
        assert column[start:stop] == values[start:stop]
        assert list(column[::-1]) == values[::-1]
        assert [column[place] for place in range(-len(values), len(values))] == values + values
        assert (len(column), column.tolist(), list(column)) == (len(values), values, values)
        assert to_array("i", column) == array("i", values)


@given(NUMBERS, st.integers(0, 13))
def test_runs_that_grow_can_be_cut(values, size):
    builder = RunsBuilder()
    for value in values:
        builder.add(value, 1)
    builder.cut(size)
    assert builder.column() == values[:size]
    assert len(builder) == min(size, len(values))


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 3)), max_size=6), st.integers(-1, 1), st.integers(0, 3))
def test_runs_that_repeat_the_last_number_make_it_longer(runs, value, count):
    builder = RunsBuilder()
    for item, times in runs:
        builder.add(item, times)
    before, more = builder.column().tolist(), Runs.of(value, count)
    assert more == [value] * count
    fits = not before or before[-1] == value
    assert builder.extend_last(more) == (fits and count > 0)
    builder.extend_last(Runs([(value, 1), (value + 1, 1)]))
    assert builder.column() == before + [value] * (count if fits else 0)


def test_numbers_are_appended_or_nothing_changes():
    numbers = array("i", [1])
    for values in ([2, 3], packed_ids([4]), Runs.of(5, 2), (6,)):
        append(numbers, values)
    assert numbers.tolist() == [1, 2, 3, 4, 5, 5, 6]
    for wrong, error in ([7, 2**31], OverflowError), ([7, None], TypeError), ((7, "8"), TypeError):
        with pytest.raises(error):
            append(numbers, wrong)
    assert len(numbers) == 7


def test_an_index_beyond_the_end_is_an_error():
    for column in (packed_ids([1]), Runs([(1, 1)])):
        with pytest.raises(IndexError):
            column[1]


def test_a_column_is_neither_hashable_nor_equal_to_text():
    with pytest.raises(TypeError):
        hash(packed_ids([1]))
    assert packed_ids([]) != ""
    assert Runs() != b""


def test_neighbours_with_one_number_are_one_run():
    assert Runs([(1, 2), (1, 1), (2, 0), (3, 4)]).values == (1, 3)
    assert len(Runs([(math.nan, 1000)]).values) == 1


def test_a_packed_column_is_not_copied():
    numbers = array("f", [0.5])
    assert packed_logprobs(Packed(numbers)).numbers is numbers


def test_log_probabilities_are_float32_and_ids_int32():
    assert packed_logprobs([0.1])[0] == array("f", [0.1])[0] != 0.1
    assert joined("f", ([0.1], Runs([(0.0, 2)]))) == [packed_logprobs([0.1])[0], 0.0, 0.0]
    with pytest.raises(OverflowError):
        packed_ids([2**31])
    with pytest.raises(TypeError):
        packed_ids([1.5])
