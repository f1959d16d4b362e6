from dataclasses import replace

from areal.rollout.gate import GateCounts, GateLimits, room, why_closed

LIMITS = GateLimits(batch_size=4, max_concurrent=6, max_staleness=1, total_episodes=40)


def at(*, running, accepted, version, waiting=0, next_step=0):
    return GateCounts(running=running, accepted=accepted, version=version, waiting=waiting, next_step=next_step)


def test_room_examples():
    # (max_staleness + version + 1) * batch_size = 8 at version 0, 12 at version 1
    assert room(LIMITS, at(running=0, accepted=0, version=0)) == 6  # concurrency decides
    assert room(LIMITS, at(running=6, accepted=0, version=0)) == 0
    assert room(LIMITS, at(running=2, accepted=4, version=0)) == 2  # 8 - 4 - 2
    assert room(LIMITS, at(running=3, accepted=5, version=0)) == 0
    assert room(LIMITS, at(running=3, accepted=5, version=1)) == 3  # min(6 - 3, 12 - 5 - 3)


def test_a_rejection_frees_its_room_immediately():
    before = room(LIMITS, at(running=4, accepted=4, version=0))
    assert before == 0
    assert room(LIMITS, at(running=3, accepted=4, version=0)) == 1


def test_max_staleness_zero_is_synchronous():
    limits = GateLimits(batch_size=4, max_concurrent=100, max_staleness=0, total_episodes=40)
    assert room(limits, at(running=0, accepted=0, version=0)) == 4
    assert room(limits, at(running=0, accepted=4, version=0)) == 0
    assert room(limits, at(running=0, accepted=4, version=1)) == 4


def test_a_queue_bounds_what_runs_and_waits():
    limits = GateLimits(batch_size=4, max_concurrent=6, max_staleness=3, total_episodes=40, queue_size=5)
    assert room(limits, at(running=0, accepted=4, waiting=0, version=1)) == 5
    assert room(limits, at(running=2, accepted=8, waiting=3, version=1)) == 0
    assert "queue_size=5" in why_closed(limits, at(running=2, accepted=8, waiting=3, version=1))


def test_room_is_never_negative_after_a_recovery():
    assert room(LIMITS, at(running=9, accepted=30, version=0)) == 0


def test_the_last_steps_admit_only_what_they_need():
    assert room(LIMITS, at(running=1, accepted=38, version=9)) == 1
    assert room(LIMITS, at(running=2, accepted=38, version=9)) == 0


def test_why_closed_names_the_numbers():
    assert why_closed(LIMITS, at(running=0, accepted=0, version=0)) == ""
    assert "max_concurrent_rollouts=6" in why_closed(LIMITS, at(running=6, accepted=0, version=0))
    assert "(1 + 0 + 1) x 4 = 8 until policy version 1 " in why_closed(LIMITS, at(running=3, accepted=5, version=0))
    assert "38 accepted and 2 running" in why_closed(LIMITS, at(running=2, accepted=38, version=9))


def test_with_a_smallest_batch_why_closed_says_that_rejected_episodes_count():
    limits = replace(LIMITS, smallest_batch=1)
    assert "5 accepted or rejected and 3 running" in why_closed(limits, at(running=3, accepted=5, waiting=2, version=0))


def test_with_a_smallest_batch_there_is_room_for_what_the_next_batch_lacks():
    limits = replace(LIMITS, max_staleness=0, smallest_batch=2)
    rejected = at(running=0, accepted=4, waiting=0, version=0, next_step=0)  # all four of the first step
    assert room(limits, rejected) == 2
    assert room(limits, replace(rejected, running=1)) == 1
    assert room(limits, replace(rejected, running=1, waiting=1)) == 0


def test_while_a_batch_is_trained_on_its_successor_waits_for_the_new_version():
    limits = replace(LIMITS, max_staleness=0, smallest_batch=2)
    assert room(limits, at(running=0, accepted=4, waiting=0, version=0, next_step=1)) == 0
    assert room(limits, at(running=0, accepted=4, waiting=0, version=1, next_step=1)) == 4
