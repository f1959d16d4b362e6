"""A trainer starts a weight update and continues while the servers install it."""

import asyncio

import pytest

from areal.api.data import WeightUpdate
from areal.api.errors import WeightSyncError
from areal.ledger.audit import audit
from areal.ledger.event_files import read_payload
from areal.ledger.ledger import Ledger
from areal.rollout.client import WeightsNeeded
from tests.rollout import rollout_kit
from tests.rollout.http_kit import running


def update(version):
    return WeightUpdate(version=version, kind="disk", path=f"v{version}")


async def test_a_started_update_is_joined_and_a_failed_one_starts_again(tmp_path):
    may_end, started = asyncio.Event(), []

    class Fleet(rollout_kit.FakeFleet):
        async def update_weights(self, update):
            started.append(update.version)
            await may_end.wait()
            if len(started) == 1:
                raise WeightSyncError("no replica took it", code="weights.none")
            await super().update_weights(update)

    controller = rollout_kit.make_controller(Ledger.open(tmp_path), fleet=Fleet())
    async with running(controller):
        weights = controller.weights
        for _ in range(2):
            assert await weights.start(update(1), timeout_s=0.0)
        assert not await weights.publish(update(1), timeout_s=0.01)
        assert not await weights.settled(timeout_s=0.01)
        may_end.set()
        with pytest.raises(WeightSyncError):
            await weights.publish(update(1), timeout_s=60.0)
        assert await weights.start(update(1), timeout_s=0.0)
        assert await weights.publish(update(1), timeout_s=60.0)
        assert started == [1, 1]


async def test_a_trainer_whose_reported_version_no_update_brings_is_asked_for_it(tmp_path):
    """The controller died while the servers installed it."""
    controller = rollout_kit.make_controller(Ledger.open(tmp_path), config=rollout_kit.make_config(max_staleness=0))
    async with running(controller):
        await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        await controller.next_batch(0, timeout_s=60.0)
        await controller.consumed(0, 1)
        with pytest.raises(WeightsNeeded):
            await controller.next_batch(1, timeout_s=0.0)
        assert await controller.weights.start(update(1), timeout_s=0.0)
        assert await controller.next_batch(1, timeout_s=60.0) is not None


async def test_a_batch_but_no_evaluation_comes_while_the_servers_install_its_version(tmp_path):
    may_end = asyncio.Event()

    class Fleet(rollout_kit.FakeFleet):
        async def update_weights(self, update):
            await may_end.wait()
            await super().update_weights(update)

    workflow = rollout_kit.ScriptedWorkflow()
    evaluation = {"eval_sets": {"": [{"index": 2}]}, "eval_workflows": {"greedy": workflow}}
    controller = rollout_kit.make_controller(Ledger.open(tmp_path), fleet=Fleet(), workflow=workflow, **evaluation)
    async with running(controller):
        await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        await controller.next_batch(0, timeout_s=60.0)
        assert await controller.weights.start(update(1), timeout_s=0.0)
        await controller.consumed(0, 1)
        record = await controller.next_batch(1, timeout_s=60.0)
        assert record is not None
        assert (record.version, controller.state.version) == (1, 0)
        assert await controller.evaluate(1, "greedy", timeout_s=0.01) is None
        may_end.set()
        assert await controller.evaluate(1, "greedy", timeout_s=60.0) is not None


def test_a_restarted_controller_does_not_bring_back_the_version_before_an_update_that_has_begun(tmp_path):
    """It restarted while the trainer trained. The trainer starts the update to version 2, then reports step 1."""

    class Fleet(rollout_kit.FakeFleet):
        """Its updates take time and run one after another, as those of the real fleet."""

        def __init__(self, version):
            super().__init__(version)
            self.lock = asyncio.Lock()

        async def update_weights(self, update):
            async with self.lock:
                await asyncio.sleep(0.5)
                await super().update_weights(update)

    class TwoTurns(rollout_kit.ScriptedWorkflow):
        async def arun_episode(self, engine, data):
            await super().arun_episode(engine, data)
            await asyncio.sleep(0.6)
            return await super().arun_episode(engine, data)

    def begin_life(fleet):
        log = rollout_kit.FileLog(tmp_path)
        ledger = Ledger(log, state=log.state, read_payload=lambda where: read_payload(tmp_path, where))
        config = rollout_kit.make_config(max_staleness=0, on_stale="wait")
        return rollout_kit.make_controller(ledger, config=config, fleet=fleet, workflow=TwoTurns())

    async def main():
        first = begin_life(Fleet(0))
        await first.start()
        await first.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        await rollout_kit.train(first, range(1))
        assert await first.next_batch(1, timeout_s=1e6)
        await first.close()
        second = begin_life(fleet := Fleet(1))
        await second.start()
        update = WeightUpdate(version=2, kind="disk", path="v2")
        assert await second.weights.start(update, timeout_s=1e6)
        await second.consumed(1, 2)
        assert await second.weights.publish(update, timeout_s=1e6)
        await asyncio.sleep(1.0)  # an episode of version 2 has sent its second request
        assert [item.version for item in fleet.updates if item.version < 2] == []
        assert fleet.version == second.state.version == 2
        record = await second.next_batch(2, timeout_s=1e6)
        assert record.stats["staleness_max"] == 0
        await second.close()
        assert audit(tmp_path).is_clean, audit(tmp_path).violations

    rollout_kit.run_virtual(main())
