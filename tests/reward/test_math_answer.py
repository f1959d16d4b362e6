import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.reward.math_answer import answers_equal, extract_answer, math_reward, parse_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So it is 9 * 2 = 18.\n#### 18", "18"), ("#### 5\nwait\n#### 7\nDone.", "7"),
        (r"thus \boxed{\frac{1}{2}} and", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed {x_{1} = {2}}", "x_{1} = {2}"), (r"#### 3, or better \boxed{4}", "4"),
        (r"\boxed{4} as asked: #### 3", "3"), (r"never closed \boxed{12", "12"),
        ("She makes $1,234.50 in 3 days, so 1,234.50", "1,234.50"), ("costs 12, then 15 dollars.", "15"),
        ("a ratio of 3/4", "3/4"), ("it fell by -7%", "-7%"), ("from 5-3 we get nothing more", "3"),
        ("no number here", None), ("####", None), ("", None),
    ],
)  # fmt: skip
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("18", "18"), ("18.0", "18"), ("$18", "18"), (r"\$18.00", "18"), ("1,234", "1234"), ("1234.50", "$1,234.5"),
        ("18 dollars", "18"), (r"18\text{ cm}", "18"), ("12 m/s", "12"), ("45°", "45"), ("50%", "50"),
        (r"50\%", "0.5"), ("1/2", "0.5"), (r"\frac{3}{4}", "0.75"), (r"\dfrac12", ".5"), (r"-\frac{1}{2}", "-0.5"),
        ("2 1/2", "2.5"), ("0.3333", "1/3"), ("x = 5", "5"), ("**7**", "7"), ("-3", "−3"), ("5.", "5"),
        ("1e3", "1000"), (r"\left( 1, 2 \right)", "(1,2)"), ("Paris", "paris"), ("3 + 4 = 7", "7"),
        ("1,000 + 2,000 = 3,000", "3000"), ("f(1, 2) = 7", "7"), ("5 million dollars", "5000000"),
        ("2.5 thousand", "2500"),
    ],
)  # fmt: skip
def test_equal(given, wanted):
    assert answers_equal(given, wanted)
    assert answers_equal(wanted, given)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("18", "19"), ("-18", "18"), ("0.5", "50"), ("10000", "10001"), ("1/0", "0"), ("1,5", "15"), ("5 or 6", "5"),
        ("", "0"), ("Paris", "London"), ("9" * 5000, "9"), ("a=1, b=2, c=7", "7"), ("a=1; c=7", "7"),
        ("x = 1 or x = 7", "7"), ("1 or x = 7", "7"), ("x >= 7", "7"), ("x <= 7", "7"), ("x != 7", "7"),
        ("7 or more", "7"), ("7 not more", "7"), ("7 million", "7"),
    ],
)  # fmt: skip
def test_not_equal(given, wanted):
    assert not answers_equal(given, wanted)
    assert not answers_equal(wanted, given)


def test_reward_reads_the_answer_column_of_gsm8k():
    answer = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"
    assert math_reward("", "It is 18 dollars", [], [], answer=answer, question="?") == 1.0
    assert math_reward("", "#### 9", [], [], answer=answer) == 0.0
    assert math_reward("", "", [], [], answer=answer) == 0.0
    assert math_reward("", "The answer is 18.", [], [], answer="18") == 1.0


@given(
    st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "${:,}", "{}.0", "{:,}.00", "{} dollars", "x = {}"])
)
def test_every_form_of_an_integer_is_read(number, form):
    assert parse_number(form.format(number)) == (Fraction(number), False)
    assert answers_equal(form.format(number), str(number))
    assert not answers_equal(form.format(number), str(number + 1))


@given(st.text(alphabet="0123456789.,-+/%$#\\{}boxedfrac= \n", max_size=60), st.text(max_size=20))
def test_any_text_is_scored(completion, answer):
    assert math_reward("", completion, [], [], answer=answer) in (0.0, 1.0)


@pytest.mark.parametrize("text", ["#### " + "a b " * 30_000 + "1", "\\boxed{" * 20_000, "1," * 50_000, "9" * 100_000])
def test_long_junk_takes_no_long_time(text):
    began_s = time.process_time()
    math_reward("", text, [], [], answer="#### 5")
    assert time.process_time() - began_s < 1.0


def test_a_fraction_after_an_integer_is_added_to_it():
    assert answers_equal("2\\frac{1}{2}", "2.5")
    assert answers_equal("-2\\frac12", "-2.5")
    assert not answers_equal("2\\frac{1}{2}", "10.5")
    assert not answers_equal("\\frac{1}{2}3", "1/23")
