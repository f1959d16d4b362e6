"""What a comparison says, worked by hand."""

import pytest

from areal.replay.recorded import Comparison, StepComparison

LIVE = {"step": 1, "actor/loss": 0.25, "actor/grad_norm": 1.5, "actor/entropy": 2.0}


def compared(step, recorded, live, **ours):
    return StepComparison.of(
        step, recorded, live, LIVE | {name.replace("_", "/", 1): item for name, item in ours.items()}
    )


def test_a_step_is_equal_when_its_weights_and_metrics_are():
    step = compared(1, "ab", LIVE, weights="ab")
    assert step.different == []
    assert step.line() == "step 1: weights equal; actor/loss, actor/grad_norm equal"


def test_the_smallest_difference_counts_and_is_shown_with_both_values():
    step = compared(3, "ab", LIVE, weights="cd", actor_loss=0.25000000000000006, actor_entropy=9.0)
    assert step.different == ["weights", "actor/loss"]
    assert step.line() == (
        "step 3: weights DIFFER at step 3; actor/grad_norm equal; "
        "actor/loss DIFFERS (live 0.25, replay 0.25000000000000006)"
    )


@pytest.mark.parametrize(
    ("steps", "is_equal", "summary"),
    [
        ([(1, "ab", LIVE, {"weights": "ab"})], True, "equal: 1 steps, 1 with checksums, 1 with metrics"),
        ([(1, "ab", LIVE, {"weights": "ab"}), (2, "ab", LIVE, {"weights": "ab", "actor_grad_norm": None}),
          (3, "ab", None, {"weights": "xx"})], False,
         "DIFFERENT from step 2 on (actor/grad_norm): 3 steps, 3 with checksums, 2 with metrics"),
        ([(1, "", LIVE, {"weights": "ab"})], True, "equal: 1 steps, 0 with checksums, 1 with metrics"),
        ([(1, "", None, {"weights": "ab"})], None,
         "nothing to compare with: 1 steps, 0 with checksums, 0 with metrics"),
    ],
)  # fmt: skip
def test_an_exact_replay_remembers_its_first_difference(steps, is_equal, summary):
    comparison = Comparison(is_exact=True)
    for step, recorded, live, ours in steps:
        comparison.add(compared(step, recorded, live, **ours))
    assert (comparison.is_equal, comparison.summary()) == (is_equal, summary)


def test_a_comparison_shows_what_there_is_side_by_side():
    comparison, ours = Comparison(is_exact=False), {"weights": "x", "actor_loss": 0.5, "actor_clip_ratio": 0.1}
    lines = comparison.add(compared(1, "ab", LIVE, **ours))
    assert [" ".join(line.split()) for line in lines] == [
        "| loss | grad norm | clip ratio | entropy",
        "step | live replay | live replay | live replay | live replay",
        "1 | 0.25 0.5 | 1.5 1.5 | - 0.1 | 2 2",
    ]
    assert len(comparison.add(compared(2, "ab", None, **ours))) == 1
    assert comparison.summary().splitlines() == [
        "means over 2 steps:",
        "  loss: live 0.25, replay 0.5 (+0.25)",
        "  grad norm: live 1.5, replay 1.5 (+0)",
        "  entropy: live 2, replay 2 (+0)",
        "weights: different from step 1 on",
    ]
