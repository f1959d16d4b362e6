"""Time limits that do not include the time for which the loop was blocked."""

import asyncio
import threading

import pytest

from areal.fleet import replica_set as loop_lateness
from areal.fleet.replica_set import LoopLateness
from areal.system.stacks import place_of_thread
from tests.rollout.rollout_kit import VirtualLoop


def run(main):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def block(seconds):
    """As a callback that computes for `seconds`."""
    asyncio.get_running_loop()._advance(seconds)


def started(report=lambda seconds, place: None):
    lateness = LoopLateness(report)
    lateness.start()
    return lateness


def test_an_answer_that_arrives_while_the_loop_is_blocked_is_in_time():
    async def main():
        lateness, answer = started(), asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(1.0, block, 30.0)
        asyncio.get_running_loop().call_later(2.0, answer.set_result, "answer")
        async with lateness.timeout(10.0):
            assert await answer == "answer"
        assert 29.0 < lateness.total_s < 31.0
        lateness.close()

    run(main())


@pytest.mark.parametrize("blocked_s", [0.0, 30.0])
def test_a_limit_is_the_time_for_which_the_loop_ran(blocked_s):
    async def main():
        loop = asyncio.get_running_loop()
        lateness, began_s = started(), loop.time()
        loop.call_later(1.0, block, blocked_s)
        with pytest.raises(TimeoutError):
            async with lateness.timeout(10.0):
                await loop.create_future()
        assert loop.time() - began_s == pytest.approx(10.0 + blocked_s, abs=1.0)
        lateness.close()

    run(main())


@pytest.mark.parametrize(("blocked_s", "num_reports"), [(0.0, 0), (2.0, 0), (30.0, 1)])
def test_a_long_block_is_reported_once(blocked_s, num_reports):
    reports = []

    async def main():
        lateness = started(lambda *report: reports.append(report))
        asyncio.get_running_loop().call_later(1.0, block, blocked_s)
        await asyncio.sleep(100.0)
        lateness.close()

    run(main())
    assert [(round(seconds), place) for seconds, place in reports] == [(blocked_s, "")] * num_reports


def test_a_report_names_the_code_that_blocked_the_loop(monkeypatch):
    looked, reports = threading.Event(), []

    def look(thread_id):
        looked.set()
        return place_of_thread(thread_id)

    def accept_code():
        assert looked.wait(60)
        block(30.0)

    async def main():
        lateness = started(lambda *report: reports.append(report))
        asyncio.get_running_loop().call_soon(accept_code)
        await asyncio.sleep(10.0)
        lateness.close()

    monkeypatch.setattr(loop_lateness, "place_of_thread", look)
    run(main())
    ((_, place),) = reports
    assert __file__ in place
    assert place.endswith(" accept_code")
