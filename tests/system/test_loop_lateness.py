"""Time limits that do not include the time for which the loop was blocked."""

import asyncio

import pytest

from areal.system.loop_lateness import LoopLateness
from tests.rollout.rollout_kit import VirtualLoop


def run(main):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def block(seconds):
    """As a callback that computes for `seconds`."""
    asyncio.get_running_loop()._advance(seconds)


def test_an_answer_that_arrives_while_the_loop_is_blocked_is_in_time():
    async def main():
        lateness, answer = LoopLateness(), asyncio.get_running_loop().create_future()
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
        lateness, began_s = LoopLateness(), loop.time()
        loop.call_later(1.0, block, blocked_s)
        with pytest.raises(TimeoutError):
            async with lateness.timeout(10.0):
                await loop.create_future()
        assert loop.time() - began_s == pytest.approx(10.0 + blocked_s, abs=1.0)
        lateness.close()

    run(main())
