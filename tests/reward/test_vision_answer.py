"""Answers to questions on images: a number in brackets, a formula in a box or in brackets, words."""

import pytest

from areal.reward.math_symbolic import count_reward, vision_math_reward
from tests.expect import raises_code


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("There are [3].", "3", 1.0), ("[2] cubes and [1] ball: [ 3 ]", "[3]", 1.0), ("[3.0]", "3", 1.0),
        ("[3] or [4]", "3", 0.0), ("3", "3", 0.0), ("[three]", "3", 0.0), ("[13]", "3", 0.0),
        ("[" * 10_000, "3", 0.0),
    ],
)  # fmt: skip
def test_the_last_number_in_brackets_counts(completion, answer, reward):
    assert count_reward("", completion, [], [], answer=answer) == reward


def test_a_count_that_is_no_number_is_an_error_of_the_row():
    with raises_code("reward.bad_row"):
        count_reward("", "[3]", [], [], answer="[many]")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", 1.0), (r"[2], so \boxed{3}", "3", 1.0),
        (r"[3], so \boxed{2}", "3", 0.0), (r"the answer is [2\sqrt{3}]", r"2 \sqrt{3}", 1.0),
        (r"\[x = 4\] and \sqrt[3]{8}", "3", 0.0), (r"\boxed{B}", r"\boxed{B}", 1.0),
        (r"\boxed{C}", r"\boxed{B}", 0.0), (r"\boxed{Right triangle}", r"\boxed{right triangle}", 1.0),
        (r"\boxed{no}", "yes", 0.0), (r"yes", "yes", 0.0),
    ],
)  # fmt: skip
def test_a_formula_in_a_box_or_in_brackets_counts(completion, answer, reward):
    assert vision_math_reward("", completion, [], [], answer=answer) == reward


def test_an_empty_answer_is_an_error_of_the_row():
    with raises_code("reward.bad_row"):
        vision_math_reward("", r"\boxed{3}", [], [], answer=r"\boxed{}")
