"""Metrics over several answers, against numbers worked by hand and an enumeration of all subsets."""

import itertools
import math

import pytest

from areal.rollout.evaluation import Graded, answer_metrics, default_ks, estimate, majority_vote, pass_at_k


def graded(*pairs):
    return [Graded(reward=reward, answer=answer) for answer, reward in pairs]


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - C(3,2) / C(4,2) = 1 - 3/6
        (5, 2, 3, 9 / 10),  # 1 - C(3,3) / C(5,3) = 1 - 1/10
        (5, 3, 3, 1.0),  # only two answers are wrong
        (200, 0, 100, 0.0),
        (200, 1, 100, 1 / 2),
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer():
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([index < c for index in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_equals_the_product_form_of_the_paper():
    """Chen et al. 2021, figure 3: 1 - prod(1 - k / i for i from n-c+1 to n)."""
    for n, c, k in [(100, 7, 10), (200, 150, 60), (1000, 3, 100)]:
        product = math.prod(1.0 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 0.0
        assert pass_at_k(n, c, k) == pytest.approx(1.0 - product, rel=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5), (0, 0, 1)])
def test_pass_at_k_outside_of_its_domain(n, c, k):
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, c, k)


def test_the_majority_decides_even_when_it_is_wrong():
    assert majority_vote(graded(("8", 1.0), ("8", 1.0), ("9", 0.0)), 1.0) == 1.0
    assert majority_vote(graded(("8", 1.0), ("9", 0.0), ("9", 0.0)), 1.0) == 0.0


def test_a_tie_counts_as_the_mean_over_the_tied_answers():
    assert majority_vote(graded(("8", 1.0), ("9", 0.0)), 1.0) == 1 / 2
    assert majority_vote(graded(("8", 1.0), ("9", 0.0), ("7", 0.0)), 1.0) == pytest.approx(1 / 3)
    assert majority_vote(graded(("8", 1.0), ("8", 1.0), ("9", 0.0), ("9", 0.0), ("7", 0.0)), 1.0) == 1 / 2


def test_answers_without_a_final_answer_do_not_vote():
    assert majority_vote(graded((None, 0.0), (None, 0.0), ("8", 1.0)), 1.0) == 1.0
    assert majority_vote(graded((None, 0.0), (None, 1.0)), 1.0) == 0.0


def test_one_answer_with_different_rewards_counts_with_its_share():
    assert majority_vote(graded(("8", 1.0), ("8", 0.4), ("9", 0.0)), 1.0) == 1 / 2


def test_the_standard_error_is_over_prompts():
    result = estimate([0.0, 1.0, 1.0, 1.0])
    assert (result.mean, result.num_rows) == (0.75, 4)
    assert result.stderr == pytest.approx(math.sqrt((0.75**2 + 3 * 0.25**2) / 3) / 2)  # s / sqrt(4), by hand 0.25
    assert estimate([0.5]).stderr is None


def test_default_ks():
    assert [default_ks(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_metrics_of_two_prompts_by_hand():
    rows = [
        graded(("8", 1.0), ("8", 1.0), ("9", 0.1), (None, 0.0)),  # 2 of 4 correct, mean 0.525, the majority is right
        graded(("1", 0.1), ("1", 0.1), ("2", 1.0), ("3", 0.1)),  # 1 of 4 correct, mean 0.325, the majority is wrong
    ]
    actual = answer_metrics(rows, num_samples=4, correct_reward=1.0)
    assert list(actual) == ["mean@4", "pass@1", "pass@2", "pass@4", "majority@4"]
    means = {name: item.mean for name, item in actual.items()}
    expected = {
        "mean@4": 0.425,
        "pass@1": (2 / 4 + 1 / 4) / 2,
        "pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,
        "pass@4": 1.0,
        "majority@4": 0.5,
    }
    assert means == pytest.approx(expected)
    assert actual["mean@4"].stderr == pytest.approx(0.1)  # s = 0.2 / sqrt(2); s / sqrt(2)
    assert actual["pass@4"].stderr == 0.0


def test_failed_answers_leave_a_prompt_out_where_it_has_too_few():
    rows = [graded(("8", 1.0), ("8", 1.0)), graded(("9", 0.0)), []]
    result = answer_metrics(rows, num_samples=2, correct_reward=1.0)
    assert {name: (item.mean, item.num_rows) for name, item in result.items()} == {
        "mean@2": (0.5, 2),
        "pass@1": (0.5, 2),
        "pass@2": (1.0, 1),
        "majority@2": (0.5, 2),
    }
    assert answer_metrics([[]], num_samples=2, correct_reward=1.0) == {}


def test_one_answer_per_prompt_and_chosen_ks():
    assert list(answer_metrics([graded(("8", 1.0))], num_samples=1, correct_reward=1.0)) == ["mean@1", "pass@1"]
    chosen = answer_metrics([graded(("8", 1.0), ("9", 0.0), ("9", 0.0))], num_samples=3, correct_reward=1.0, ks=[2])
    assert {name: item.mean for name, item in chosen.items()} == pytest.approx(
        {"mean@3": 1 / 3, "pass@2": 2 / 3, "majority@3": 0.0}
    )
