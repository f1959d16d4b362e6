import pytest

from areal.planner.figures import Interval, rounded


@pytest.mark.parametrize(
    ("value", "text"), [(2166.7, "2,170"), (1.234e6, "1,230,000"), (0.004618, "0.00462"), (26.0, "26"), (0.0, "0")]
)
def test_figures_have_three_digits_and_no_exponent(value, text):
    assert rounded(value) == text


def test_an_interval_begins_at_zero_or_above():
    assert str(Interval(1500.0, -20.0, 3020.0)) == "1,500 [0, 3,020]"
