"""The rule of the set-point of staleness, worked by hand."""

from dataclasses import replace

import pytest

from areal.ledger.state import AcceptedEpisode, BatchRecord, LedgerState, TokenCounts
from areal.rollout.gate import GateCounts, GateLimits, room, why_closed
from areal.rollout.setpoint import SetPoint

RULE = SetPoint(target=1.5, is_ess=False, batch_size=4, max_lead=3.0)


def batch(step: int, **stats: float) -> BatchRecord:
    result = {f"setpoint/{name}": value for name, value in stats.items()}
    return BatchRecord(step=step, version=step, mask_before=0, episode_ids=(), payloads=(), stats=result)


def state(count: int = 10, ess: float | None = None, **stats: float) -> LedgerState:
    """After `count` batches, the last one with these statistics."""
    return LedgerState(batches={step: batch(step, **stats) for step in range(count)}, ess=ess)


def episodes(*ahead: int | None) -> list[AcceptedEpisode]:
    counts = TokenCounts(1, 1, 1, 1, 0.0, ((0, 1, 1),))
    return [AcceptedEpisode(number, (0, 0, 0), 0, 1, {}, counts, item) for number, item in enumerate(ahead)]


AT_TWO = episodes(6, 8, 8, 10)
"""Started when the gate allowed 8 episodes beyond those of their version, in the mean: a lead of 2 batches."""


def test_the_lead_moves_to_what_would_have_given_the_target():
    result = RULE.stats(state(lead=2.0), AT_TWO, 1.0)
    # A lead of 2 gave 1, so 3 gives 1.5; the mean of the reciprocals is 0.7 / 2 + 0.3 / 3 = 0.45.
    assert result == {
        "setpoint/target": 1.5,
        "setpoint/value": 1.0,
        "setpoint/error": -0.5,
        "setpoint/used_lead": 2.0,
        "setpoint/lead": pytest.approx(1 / 0.45),
    }


def test_what_was_measured_counts_under_its_own_lead_and_not_under_the_present_one():
    # The lead is right by now: the batch that was late is no reason to change it again.
    assert RULE.stats(state(lead=3.0), AT_TWO, 1.0)["setpoint/lead"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("lead", "staleness", "expected"),
    [
        (3.0, 0.1, 3.0),  # the hard bound
        (0.25, 50.0, 1 / (0.7 / 0.25 + 0.3)),  # a batch at most halves its lead of 2
        (1.0, 0.0, 1 / (0.7 + 0.3 / 4)),  # or doubles it
    ],
)
def test_a_lead_is_bounded(lead, staleness, expected):
    assert RULE.stats(state(lead=lead), AT_TWO, staleness)["setpoint/lead"] == pytest.approx(expected)


def test_one_episode_may_always_be_ahead():
    ahead = episodes(1, 1, 1, 2)  # a lead of 5/16
    assert RULE.stats(state(lead=0.25), ahead, 9.0)["setpoint/lead"] == 0.25


@pytest.mark.parametrize(
    ("known", "ahead"),
    [
        (state(2, lead=1.0), AT_TWO),  # episodes that all started at once
        (state(lead=1.0), episodes(0, 0, -1, 0)),  # no lead: nothing but their own batch
        (state(lead=1.0), episodes(None, None)),  # the run had no set-point when they started
    ],
)
def test_batches_that_say_nothing_about_a_lead_leave_it(known, ahead):
    assert RULE.stats(known, ahead, 0.7)["setpoint/lead"] == 1.0


def test_a_run_begins_at_its_target_and_continues_one_without_a_set_point_at_the_bound():
    assert RULE.lead(LedgerState()) == 1.5
    assert RULE.lead(state()) == 3.0
    assert replace(RULE, is_ess=True, target=0.9).lead(LedgerState()) == 1.0


def test_the_effective_sample_size_is_that_of_the_batch_before():
    rule = replace(RULE, is_ess=True, target=0.8)
    known = state(ess=0.8 ** (1.5**1.5), lead=2.0, used_lead=1.5)
    result = rule.stats(known, AT_TWO, 1.0)
    # -log ess is 1.5^1.5 times that of the target, and (1 / 1.5^1.5)^(2/3) = 1 / 1.5: a lead of 1 in place of 1.5.
    assert result["setpoint/lead"] == pytest.approx(1 / (0.7 / 2 + 0.3))
    assert result["setpoint/error"] == pytest.approx(0.8 ** (1.5**1.5) - 0.8)
    unknown = rule.stats(state(lead=2.0), AT_TWO, 1.0)
    assert unknown == {"setpoint/target": 0.8, "setpoint/used_lead": 2.0, "setpoint/lead": 2.0}


def test_the_gate_has_one_more_bound():
    limits = GateLimits(batch_size=4, max_concurrent=100, max_staleness=3, total_episodes=400)
    counts = GateCounts(running=1, accepted=6, version=1, waiting=2, next_step=1, lead=2)
    assert room(limits, counts) == (1 + 1) * 4 + 2 - 6 - 1
    closed = replace(counts, running=4)
    assert room(limits, closed) == 0
    assert "the 2 episodes more than version 1 needs, which rollout.target_staleness allows" in why_closed(
        limits, closed
    )
    assert room(limits, replace(counts, lead=99)) == room(limits, replace(counts, lead=None)) == 13
