"""Rewards of evaluations by row, and the interval of their difference."""

import numpy as np
import pytest

from areal.ledger.evaluations import difference_interval, row_rewards
from tests.ledger.forge import Forge


def rows(values):
    return dict(enumerate(np.asarray(values, float).tolist()))


def test_a_constant_difference_of_the_same_rows_has_no_spread_and_no_verdict():
    random = np.random.default_rng(1)
    base = random.normal(size=50)
    result = difference_interval(rows(base + 0.25), rows(base), is_paired=True)
    assert (result.difference, result.low, result.high) == pytest.approx((0.25, 0.25, 0.25))
    assert (result.is_paired, result.num_rows) == (True, 50)
    exact = difference_interval(rows([1.0] * 50), rows([0.0] * 50), is_paired=True)
    assert exact.verdict == "not decided, all draws are equal"


def test_the_interval_has_the_width_of_the_standard_error():
    random = np.random.default_rng(2)
    first, other = random.normal(0.0, 1, 400), random.normal(0, 1, 400)
    result = difference_interval(rows(first), rows(other), is_paired=False)
    error = np.sqrt(first.var() / 400 + other.var() / 400)
    assert result.difference == pytest.approx(first.mean() - other.mean())
    assert result.high - result.low == pytest.approx(2 * 1.96 * error, rel=0.08)
    assert result.verdict == "not decided"


def test_other_rows_are_drawn_separately():
    first, other = rows([1.0, 0.0, 1.0]), {0: 1.0, 2: 0.0}
    assert not difference_interval(first, other, is_paired=True).is_paired


def test_the_text_has_sign_interval_rows_and_verdict():
    result = difference_interval(rows([0.0] * 9), rows([1.0] * 9), is_paired=True)
    assert result.text == "difference -1.000 [-1.000, -1.000] (9 rows, paired): not decided, fewer than 10 rows"


def test_the_verdict_is_the_side_of_zero_on_which_the_interval_is():
    base, better = rows([0.0, 1.0] * 20), rows([1.0, 1.0] * 20)
    assert difference_interval(better, base, is_paired=True).verdict == "higher"
    assert difference_interval(base, better, is_paired=True).verdict == "lower"


def test_the_newest_rewards_of_each_evaluation_are_read(tmp_path):
    forge = Forge(tmp_path)
    forge.started()
    forge.evaluated(1, "greedy", {"": [(0, 0.0), (1, 0.5)]})
    forge.evaluated(2, "greedy", {"": [(0, 1.0)], "hard": [(3, 0.25)]})
    forge.events.append(
        {"event": "evaluated", "step": 3, "mode": "sampled", "result": {}, "at": 1.0}
    )  # before areal had them
    forge.write()
    result = row_rewards(tmp_path)
    assert {name: (item.step, dict(item.rewards)) for name, item in result.items()} == {
        "eval/greedy": (2, {0: 1.0}),
        "eval/greedy/hard": (2, {3: 0.25}),
    }
    assert row_rewards(tmp_path / "none") == {}
