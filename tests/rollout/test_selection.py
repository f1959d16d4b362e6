"""What the newest episodes say about the choice of those that are trained on; numbers worked by hand."""

import math

import pytest

from areal.rollout.executor import ProducerStats
from areal.rollout.selection import TRAINED, Outcome, Selection, selection_text

NAN = math.nan


def selection(*outcomes: Outcome, size: int = 100) -> Selection:
    result = Selection(size)
    for episode_id, outcome in enumerate(outcomes):
        result.ended(episode_id, outcome)
    return result


def test_what_is_trained_on_is_compared_with_all_that_ended():
    stats = selection(
        Outcome(TRAINED, 2, 20, 1.0, "math"),
        Outcome(TRAINED, 2, 60, 0.5, "math"),
        Outcome("filter", 4, 80, 0.0, "code"),
        Outcome("time_limit", 2, 240, NAN, "code"),
    ).stats()
    assert stats == pytest.approx(
        {
            "selection/lost/filter": 0.25,
            "selection/lost/time_limit": 0.25,
            "selection/lost_frac": 0.5,
            "selection/length_ratio": (80 / 4) / (400 / 10),
            "selection/reward_gap": 0.75 - 0.5,
            "selection/source_shift": 0.5,
        }
    )
    assert selection_text(stats) == (
        "50% of the newest episodes are not trained on (time_limit 25%, filter 25%); trained answers are 0.50 times as "
        "long as generated ones; their reward is 0.250 above that of all; 50% of them come from other sources"
    )
    assert "their reward is 0.128 below that of all" in selection_text(stats | {"selection/reward_gap": -0.128})


def test_without_losses_there_is_nothing_to_say():
    stats = selection(Outcome(TRAINED, 1, 7, 1.0, "")).stats()
    assert stats["selection/length_ratio"] == 1
    assert (stats["selection/lost_frac"], stats["selection/reward_gap"], stats["selection/source_shift"]) == (0, 0, 0)
    assert selection_text(stats) == ""
    assert selection().stats() == {}
    assert selection(Outcome("failed", 0, 0, NAN, "")).stats() == {}


def test_an_accepted_episode_that_becomes_stale_is_lost():
    result = selection(Outcome(TRAINED, 1, 10, 1.0, ""), Outcome(TRAINED, 1, 30, 0.0, ""))
    result.dropped(1, "stale")
    result.dropped(7, "stale")  # it left the window
    assert result.stats()["selection/lost/stale"] == 0.5
    assert result.stats()["selection/length_ratio"] == 0.5


def test_only_the_newest_episodes_count():
    result = selection(*[Outcome("filter", 1, 1, 0.0, "")] * 5, *[Outcome(TRAINED, 1, 1, 0.0, "")] * 3, size=4)
    assert result.stats()["selection/lost_frac"] == 0.25


def test_episodes_without_an_answer_have_no_length():
    stats = selection(Outcome(TRAINED, 0, 0, 1.0, ""), Outcome("failed", 0, 0, NAN, "")).stats()
    assert "selection/length_ratio" not in stats
    assert "as long" not in selection_text(stats)


def test_what_servers_copied_is_counted_since_the_last_batch():
    counts = {"pulled_bytes": 0.0, "failed_deltas": 0.0}
    producer = ProducerStats(Selection(1), lambda: dict(counts))

    def counted() -> list[float | None]:
        stats = producer.since_last_batch(0.0, [])
        return [stats.get(name) for name in counts]

    assert counted() == [None, None]
    counts.update(pulled_bytes=70.0)
    assert counted() == [70, 0]
    counts.update(pulled_bytes=90.0, failed_deltas=2.0)
    assert counted() == [20, 2]
    assert counted() == [0, 0]
