from areal.planner.figures import Interval


def test_an_interval_begins_at_zero_or_above_and_has_no_exponent():
    assert str(Interval(2166.7, -20.0, 3020.0)) == "2,170 [0, 3,020]"
