"""User code that hangs until its time limit at every row ends the run within minutes."""

import asyncio

import pytest

from areal.api.workflow import RolloutWorkflow
from areal.rollout.evaluation import MAX_FIRST_FAILURES, EvaluationFailed
from areal.rollout.executor import SLOW_FAILURES_IN_A_ROW, SLOW_FAILURES_S, ProducerStopped
from tests.rollout import rollout_kit


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


@pytest.mark.parametrize(("limit_s", "expected"), [(1.0, 50), (15.0, 9), (300.0, SLOW_FAILURES_IN_A_ROW)])
def test_the_producer_stops_after_few_failures_when_each_takes_long(limit_s, expected):
    async def main():
        ledger = rollout_kit.memory_ledger()
        controller = rollout_kit.make_controller(ledger, workflow=HangsUntilItsLimit(limit_s))
        await controller.start()
        await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        with pytest.raises(ProducerStopped, match=rf"\b{expected} .*test_slow_failures.py:\d+") as error:
            await controller.ended()
        assert error.value.code == "rollout.all_failed"
        await controller.close()
        state = ledger.state
        assert state.counts[3] <= expected + 5  # while a trainer had its chance to hear of it
        assert state.num_admitted == state.counts[3] + len(state.running)

    assert SLOW_FAILURES_S == 120.0
    rollout_kit.run_virtual(main())


def test_an_evaluation_with_only_failures_ends_early():
    async def main():
        hangs = HangsUntilItsLimit(15.0)
        controller = rollout_kit.make_controller(
            rollout_kit.memory_ledger(),
            eval_sets={"": [{"index": index} for index in range(256)]},
            eval_workflows={"greedy": hangs},
        )
        await controller.start()
        await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        with pytest.raises(EvaluationFailed, match=r"\b8 .*TimeoutError"):
            await controller.evaluate(0, "greedy", timeout_s=1e6)
        assert hangs.num_ended == MAX_FIRST_FAILURES
        await controller.close()

    rollout_kit.run_virtual(main())
