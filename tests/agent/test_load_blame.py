"""Zeros that follow the load are distinguished from those of the policy."""

import random

import pytest

from areal.workflow.agent import LoadBlame, SessionLoad, blamed, load_gap


def zero_gap(result) -> float:
    gap = load_gap(result)
    return gap.zero if gap.is_significant else 0.0


def sessions(zero_rate, *, versions=(1,), count=400, seed=0):
    """`zero_rate(load, version)`."""
    rng = random.Random(seed)
    result = []
    for number in range(count):
        load, version = rng.uniform(0, 32), versions[number * len(versions) // count]
        result.append(SessionLoad(is_zero=rng.random() < zero_rate(load, version), load=load, version=version))
    return result


def test_a_time_out_that_bites_only_under_load_is_found() -> None:
    gap = zero_gap(sessions(lambda load, version: 0.4 if load > 16 else 0.05))
    assert gap == pytest.approx(0.35, abs=0.1)


def test_zeros_of_the_policy_are_not_blamed_on_the_load() -> None:
    assert zero_gap(sessions(lambda load, version: 0.4)) == 0.0


def test_a_policy_that_becomes_worse_while_the_load_grows_is_not_blamed_on_the_load() -> None:
    rng = random.Random(0)
    result = [
        SessionLoad(is_zero=rng.random() < 0.1 + 0.15 * version, load=10 * version + rng.random(), version=version)
        for version in range(5)
        for _ in range(80)
    ]
    assert zero_gap(result) == 0.0


def test_the_kind_of_load_is_named_and_each_kind_is_compared() -> None:
    blame, rng = LoadBlame(), random.Random(0)
    for _ in range(300):
        queue_s = rng.uniform(0, 10)
        loads = {"queue_s": queue_s, "open_sessions": rng.randrange(9)}
        blame.add(is_zero=queue_s > 5, reward=float(queue_s <= 5), version=1, loads=loads)
    gaps = blame.gaps()
    assert blamed(gaps)[1] == "queue_s"
    assert (gaps["queue_s"].zero, gaps["queue_s"].reward) == (pytest.approx(1, abs=0.1), pytest.approx(-1, abs=0.1))
    assert abs(gaps["open_sessions"].reward) < 0.2


def test_time_outs_are_compared_and_not_blamed_for_the_zeros_that_they_are() -> None:
    blame = LoadBlame()
    for number in range(60):
        reward = None if number % 3 == 0 else 1.0
        blame.add(is_zero=reward is None, reward=reward, version=1, loads={"timeouts": float(reward is None)})
    assert blame.gaps()["timeouts"].zero == 1.0
    assert blamed(blame.gaps()) == (0.0, "")


def test_without_sessions_there_is_no_gap() -> None:
    assert blamed(LoadBlame().gaps()) == (0.0, "")
