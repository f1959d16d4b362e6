import pytest

from areal.api.metrics import rounded


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (13748.2, "13,750"),
        (1.2345e6, "1,234,000"),
        (0.0046184, "0.004618"),
        (26.0, "26"),
        (0.0, "0"),
        (8.173e-5, "8.173e-05"),
    ],
)
def test_large_numbers_have_no_exponent(value, text):
    assert rounded(value) == text
