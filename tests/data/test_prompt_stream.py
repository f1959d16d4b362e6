from areal.data.prompt_stream import PromptStream
from tests.expect import raises_code


def stream(num_rows=10, **options):
    return PromptStream(list(range(num_rows)), **({"seed": 3, "batch_size": 4} | options))


def test_every_row_occurs_once_per_epoch():
    rows = stream(12)
    for epoch in range(3):
        assert sorted(rows.row(k) for k in range(epoch * 12, epoch * 12 + 12)) == list(range(12))


def test_the_order_is_a_function_of_seed_and_position_alone():
    first, second = stream(), stream()
    forward = [first.row(k) for k in range(24)]
    assert [second.row(k) for k in reversed(range(24))] == forward[::-1]
    assert [stream(seed=4).row(k) for k in range(8)] != forward[:8]
    assert forward[:8] != forward[8:16]


def test_the_order_does_not_change_between_releases():
    assert [stream().row(k) for k in range(8)] == [9, 6, 0, 2, 1, 4, 7, 5]  # recovery relies on it


def test_drop_last_leaves_out_the_short_batch():
    rows = stream(10)
    assert rows.rows_per_epoch == 8
    epoch = [rows.row(k) for k in range(8)]
    assert len(set(epoch)) == 8


def test_without_drop_last_the_border_batch_takes_from_the_next_epoch():
    rows = stream(10, drop_last=False)
    assert rows.rows_per_epoch == 10
    assert sorted(rows.row(k) for k in range(10)) == list(range(10))
    assert sorted(rows.row(k) for k in range(10, 20)) == list(range(10))


def test_without_shuffle_rows_come_in_order():
    assert [stream(shuffle=False).row(k) for k in range(10)] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]


def test_too_few_rows_are_refused():
    with raises_code("data.too_few_rows", "batch_size=4", 3):
        stream(3)
