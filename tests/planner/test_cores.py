"""Processes that share cores, by hand: on the virtual clock, and undone for the times of a recorded run."""

import asyncio
import functools
import math
from dataclasses import replace

import pytest

from areal.planner.command import adapted
from areal.planner.cores import Cores, WorkClock, speed
from areal.planner.measured import MeasuredRun, Served, shared_cores
from areal.planner.virtual_loop import run_virtual
from tests.planner.test_simulation import setting


def test_as_many_cores_as_are_used_slow_nothing_down():
    assert (speed(0.0, 2), speed(2.0, 2), speed(3.0, 2)) == (1.0, 1.0, 2 / 3)


def test_workers_that_join_and_leave_slow_each_other_down():
    """Two cores. 6 s of work from 0 s, 2 s of work on two cores from 3 s: they have 2 of 3 cores for 3 s."""
    ends: dict[str, float] = {}

    async def work(cores: Cores, name: str, start_s: float, seconds: float, used: float) -> None:
        await asyncio.sleep(start_s)
        await cores.work(seconds, used)
        ends[name] = asyncio.get_running_loop().time()

    async def main(count: float) -> None:
        cores = Cores(count)
        never = functools.partial(ends.setdefault, "never", 0.0)
        cores.call_at(1.0, never)
        cores.cancel(never)
        cores.call_at(5.0, lambda: ends.setdefault("timer", asyncio.get_running_loop().time()))
        await asyncio.gather(work(cores, "one", 0.0, 6.0, 1.0), work(cores, "two", 3.0, 2.0, 2.0))

    run_virtual(main(2))
    assert ends == pytest.approx({"two": 6.0, "timer": 6.0, "one": 7.0})
    ends.clear()
    run_virtual(main(math.inf))
    assert ends == pytest.approx({"two": 5.0, "timer": 5.0, "one": 6.0})


def test_work_that_is_cancelled_frees_its_cores():
    async def main() -> float:
        cores = Cores(1)
        first = asyncio.create_task(cores.work(10.0, 1.0))
        await asyncio.sleep(1.0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert not cores._calls
        await cores.work(2.0, 1.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(3.0)


def test_the_clock_of_a_run_undoes_what_its_processes_took_from_each_other():
    # One core: both are busy from 2 s to 4 s, at half of the speed.
    clock = WorkClock([(1.0, [(0.0, 4.0)]), (1.0, [(2.0, 6.0)])], cores=1)
    assert [clock.at(moment) for moment in (-1.0, 2.0, 3.0, 4.0, 6.0, 8.0)] == [-1.0, 2.0, 2.5, 3.0, 5.0, 7.0]
    assert clock.speed(0.0, 4.0) == 0.75


def recorded_run() -> tuple[list[dict[str, float]], Served]:
    """A server that always computes on 1.5 cores with its part of the controller, and a trainer that computes on two
    in half of each step: on two cores, 3.5 in that half."""
    rows, used = [], {"cpu/server-0": 0.0, "cpu/controller": 0.0, "cpu/trainer-0": 0.0}
    for step in range(20):
        for name, share in (("cpu/server-0", 1.25), ("cpu/controller", 0.25), ("cpu/trainer-0", 2.0)):
            alone_s = 0.0 if name == "cpu/trainer-0" else 1.0
            used[name] += share * (alone_s + 2 / 3.5)  # a second alone, and one with the trainer
        rows.append({"time": 2.0 * step + 2, "seconds/step": 2.0, "seconds/wait_batch": 1.0, **used})
    return rows, Served(server="server-0", start_s=0.0, end_s=40.0, prompt=1, tokens=100)


def test_the_cores_that_processes_of_a_run_use():
    rows, answer = recorded_run()
    clock, *result = shared_cores(rows, [answer], 2, 1)
    assert result == pytest.approx([1.5, 2.0], rel=0.01)
    assert shared_cores(rows, [answer], 2, 2)[1:] == pytest.approx((1.5, 1.0), rel=0.01)  # of each of two ranks
    assert clock.speed(1.0, 2.0) == pytest.approx(2 / 3.5, rel=0.01)
    assert shared_cores(rows, [], 2, 1)[1:] == (1.0, 1.0)  # `decode_times` says what is missing
    clock, *result = shared_cores(rows, [answer], math.inf, 1)
    assert (clock.speed(1.0, 2.0), result) == (1.0, [1.0, 1.0])


def test_cores_are_those_of_the_steps_whose_answers_are_known():
    rows, answer = recorded_run()
    for start_s in (20.0, 30.0):
        result = shared_cores(rows, [replace(answer, start_s=start_s)], 2, 1)[1:]
        assert result == pytest.approx((1.5, 2.0), rel=0.01)
    assert shared_cores(rows, [replace(answer, end_s=20.0)], 2, 1)[1:] == pytest.approx((1.5, 2.0), rel=0.01)
    assert shared_cores(rows, [replace(answer, start_s=50.0, end_s=60.0)], 2, 1)[1:] == (1.0, 1.0)
    ends = [replace(answer, end_s=4.0), replace(answer, start_s=40.0, end_s=41.0)]  # nothing between them
    assert shared_cores(rows, ends, 2, 1)[1] == 1.0


def test_a_process_that_was_started_again_counts_its_cpu_time_from_0():
    rows, answer = recorded_run()
    for row in rows[10:]:
        row["cpu/server-0"] -= rows[9]["cpu/server-0"]
        row["cpu/trainer-0"] -= rows[9]["cpu/trainer-0"]
    assert shared_cores(rows, [answer], 2, 1)[1:] == pytest.approx((1.5, 2.0), rel=0.01)


def test_answers_of_several_servers_are_not_those_of_one_more():
    rows, answer = recorded_run()
    assert shared_cores(rows, [answer, replace(answer, server="")], 2, 1)[1:] == pytest.approx((1.5, 2.0), rel=0.01)
    assert shared_cores(rows, [replace(answer, server="")], 2, 1)[1:] == pytest.approx((1.5, 2.0), rel=0.01)


def test_another_number_of_threads_is_assumed_to_be_as_fast():
    subject = setting()
    times = replace(subject.times, cores=4)  # two threads for each of two processes, one for each of four
    seen = MeasuredRun(config=subject.config, times=times, work=subject.work, step_s=1.0, staleness=0.0)
    assert not adapted(seen, subject.config)[0].is_extrapolated
    result = adapted(seen, replace(seen.config, allocation_mode="native:d3+fsdp:d1"))[0]
    assert result.is_extrapolated
    assert "another number of threads" in result.source
