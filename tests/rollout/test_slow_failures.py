"""Users' code that hangs until a limit, row after row, ends the run in minutes of its own time."""

import asyncio

import pytest

from areal.api.workflow import RolloutWorkflow
from areal.ledger.event_log import MemoryLog
from areal.ledger.ledger import Ledger
from areal.rollout.evaluation import MAX_FIRST_FAILURES, EvaluationFailed
from areal.rollout.executor import SLOW_FAILURES_IN_A_ROW, SLOW_FAILURES_S, ProducerStopped


class HangsUntilItsLimit(RolloutWorkflow):
    """One worker behind all episodes, as a small reward pool is: they fail one after the other."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._worker = asyncio.Lock()
        self.num_ended = 0

    async def arun_episode(self, engine, data):
        async with self._worker:
            await asyncio.sleep(self._limit_s)
            self.num_ended += 1
            raise TimeoutError("ran past its limit")


def memory_ledger():
    log = MemoryLog()
    return Ledger(log, read_payload=lambda where: log.payloads[where[1]])


@pytest.mark.parametrize(("limit_s", "expected"), [(1.0, 50), (15.0, 9), (300.0, SLOW_FAILURES_IN_A_ROW)])
def test_the_producer_stops_after_few_failures_when_each_takes_long(kit, limit_s, expected):
    async def main():
        ledger = memory_ledger()
        controller = kit.make_controller(ledger, workflow=HangsUntilItsLimit(limit_s))
        await controller.start()
        await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        with pytest.raises(ProducerStopped, match=rf"last {expected} episodes all failed, .*test_slow_failures.py:\d+"):
            await controller.ended()
        await controller.close()
        state = ledger.state
        assert state.counts[3] <= expected + 5  # while a trainer had its chance to hear of it
        assert state.num_admitted == state.counts[3] + len(state.running)

    assert SLOW_FAILURES_S == 120.0
    kit.run_virtual(main())


def test_an_evaluation_of_nothing_but_failures_ends_early_and_quotes_one(kit):
    async def main():
        hangs = HangsUntilItsLimit(15.0)
        controller = kit.make_controller(
            memory_ledger(), eval_rows=[{"index": index} for index in range(256)], eval_workflows={"greedy": hangs}
        )
        await controller.start()
        with pytest.raises(EvaluationFailed, match=r"none of the first 8 .*TimeoutError: ran past its limit"):
            await controller.evaluate(0, "greedy", timeout_s=1e6)
        assert hangs.num_ended == MAX_FIRST_FAILURES
        await controller.close()

    kit.run_virtual(main())
