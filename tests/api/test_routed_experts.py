import pytest

from areal.api.columns import ExpertShape, RoutedExperts

SMALL, LARGE = ExpertShape(2, 1, 255), ExpertShape(1, 2, 256)


def test_a_number_takes_one_byte_up_to_255_experts():
    assert (SMALL.row_bytes, LARGE.row_bytes) == (2, 4)
    assert len(RoutedExperts(LARGE, bytes(12))) == 3


def test_slices_and_joins_are_of_whole_tokens():
    record = RoutedExperts(SMALL, bytes(range(8)))
    assert record[1:3].data == bytes([2, 3, 4, 5])
    assert record[3:1].data == record[9:].data == b""
    assert RoutedExperts.joined([record[:1], record[1:]]) == record
    assert RoutedExperts.unknown(LARGE, 2).data == b"\xff" * 8
    assert len(RoutedExperts.unknown(LARGE, -1)) == 0


def test_parts_of_a_row_and_other_models_are_refused():
    with pytest.raises(ValueError, match="rows of 2 bytes"):
        RoutedExperts(SMALL, b"123")
    with pytest.raises(ValueError, match="different models"):
        RoutedExperts.joined([RoutedExperts(SMALL, b""), RoutedExperts(LARGE, b"")])
