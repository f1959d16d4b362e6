"""Lengths of synthetic answers."""

import random
from statistics import fmean, median

import pytest

from areal.api.config.experiment import BenchmarkConfig, LengthRule


@pytest.mark.parametrize(
    "text", ["0", "x", "12)", "uniform(3)", "uniform(5,3)", "lognormal(9,1)", "lognormal(9,1,5)", "1,2"]
)
def test_other_texts_are_refused_with_their_path(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the text itself
        LengthRule.parse(text)
    assert [(problem.path, problem.code) for problem in BenchmarkConfig(length=text).problems()] == [
        ("length", "config.not_a_choice")
    ]


def test_a_number_is_always_drawn():
    rule = LengthRule.parse("512")
    assert {rule.draw(random.Random(seed)) for seed in range(20)} == {512} == {rule.longest}


def test_uniform_lengths_have_both_ends():
    rule, rng = LengthRule.parse("uniform(3, 6)"), random.Random(0)
    assert {rule.draw(rng) for _ in range(400)} == {3, 4, 5, 6}
    assert rule.longest == 6


def test_lognormal_lengths_have_their_median_and_are_cut():
    rule, rng = LengthRule.parse("lognormal(200,0.8,1000)"), random.Random(0)
    drawn = [rule.draw(rng) for _ in range(20_000)]
    assert median(drawn) == pytest.approx(200, rel=0.03)
    assert max(drawn) == rule.longest == 1000
    assert fmean(item == 1000 for item in drawn) == pytest.approx(0.0221, abs=0.004)  # P(Z > ln(5) / 0.8)
