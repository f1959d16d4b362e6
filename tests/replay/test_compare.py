"""What a comparison says, worked by hand."""

from areal.replay.compare import Comparison, Exactness, compare_step

LIVE = {"step": 1, "actor/loss": 0.25, "actor/grad_norm": 1.5, "actor/entropy": 2.0}


def test_a_step_is_equal_when_its_weights_and_metrics_are():
    compared = compare_step(1, "ab", LIVE, LIVE | {"weights": "ab"})
    assert compared.different == []
    assert compared.line() == "step 1: weights equal; actor/loss, actor/grad_norm equal"


def test_the_smallest_difference_counts_and_is_told_with_both_values():
    compared = compare_step(
        3, "ab", LIVE, LIVE | {"weights": "cd", "actor/loss": 0.25000000000000006, "actor/entropy": 9.0}
    )
    assert compared.different == ["weights", "actor/loss"]
    assert compared.line() == (
        "step 3: weights DIFFER at step 3; actor/grad_norm equal; "
        "actor/loss DIFFERS (live 0.25, replay 0.25000000000000006)"
    )


def test_exactness_remembers_the_first_difference():
    exactness = Exactness()
    exactness.add(compare_step(1, "ab", LIVE, LIVE | {"weights": "ab"}))
    assert exactness.is_equal
    exactness.add(compare_step(2, "ab", LIVE, LIVE | {"weights": "ab", "actor/grad_norm": None}))
    exactness.add(compare_step(3, "ab", None, LIVE | {"weights": "xx"}))
    assert not exactness.is_equal
    assert exactness.summary() == (
        "DIFFERENT from step 2 on (actor/grad_norm): 3 steps, 3 with checksums, 2 with metrics"
    )


def test_without_checksums_the_metrics_decide():
    exactness = Exactness()
    assert "weights not recorded" in exactness.add(compare_step(1, "", LIVE, LIVE | {"weights": "ab"}))
    assert exactness.summary() == "equal: 1 steps, 0 with checksums, 1 with metrics"


def test_nothing_to_compare_with_is_not_equal():
    exactness = Exactness()
    exactness.add(compare_step(1, "", None, LIVE | {"weights": "ab"}))
    assert not exactness.has_compared
    assert exactness.summary().startswith("nothing to compare with")


def test_a_comparison_shows_what_there_is_side_by_side():
    comparison, own = Comparison(), LIVE | {"weights": "x", "actor/loss": 0.5, "actor/clip_ratio": 0.1}
    lines = comparison.add(compare_step(1, "ab", LIVE, own), LIVE, own)
    assert [" ".join(line.split()) for line in lines] == [
        "| loss | grad norm | clip ratio | entropy",
        "step | live replay | live replay | live replay | live replay",
        "1 | 0.25 0.5 | 1.5 1.5 | - 0.1 | 2 2",
    ]
    assert len(comparison.add(compare_step(2, "ab", None, own), None, own)) == 1
    assert comparison.summary().splitlines() == [
        "means over 2 steps:",
        "  loss: live 0.25, replay 0.5 (+0.25)",
        "  grad norm: live 1.5, replay 1.5 (+0)",
        "  entropy: live 2, replay 2 (+0)",
        "weights: different from step 1 on",
    ]
