"""Evaluations on a replica that keeps its version during training: when they begin, what a trainer learns."""

import asyncio

import pytest

from areal.api.data import WeightUpdate
from areal.api.errors import RequestError
from tests.expect import raises_code
from tests.rollout import rollout_kit
from tests.rollout.rollout_kit import FakeFleet, Script, ScriptedWorkflow


class Pinned:
    """The replica of a fleet that keeps its version; its answers wait for `may_answer`."""

    def __init__(self, version):
        self.version, self.is_lost, self.num_released = version, False, 0
        self.may_answer = asyncio.Event()

    async def agenerate(self, request):
        await self.may_answer.wait()
        return await FakeFleet(self.version).agenerate(request)

    async def agenerate_group(self, requests):
        return [await self.agenerate(request) for request in requests]

    def release(self):
        self.num_released += 1


class Fleet(FakeFleet):
    def __init__(self, version=0, num_spare=1):
        super().__init__(version)
        self.num_spare, self.pins = num_spare, []
        self.may_update = asyncio.Event()
        self.may_update.set()

    def pin(self):
        if not self.num_spare:
            return None
        self.pins.append(Pinned(self.version))
        return self.pins[-1]

    async def update_weights(self, update):
        await self.may_update.wait()
        await super().update_weights(update)


async def started(fleet, workflow=None, step=1):
    workflow = workflow or ScriptedWorkflow()
    controller = rollout_kit.make_controller(
        rollout_kit.memory_ledger(),
        fleet=fleet,
        eval_sets={"": [{"index": 3}, {"index": 5}]},
        eval_workflows={"sampled": workflow, "greedy": workflow},
    )
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=step, version=step)
    return controller


async def state_of(controller, step, **options):
    inputs = {"begins": False, "timeout_s": 0.0} | options
    result = await controller.background_evaluation(step, **inputs)
    return result.state, result.results


def update(version):
    return WeightUpdate(version=version, kind="disk", path=f"/v{version}")


async def test_training_goes_on_while_a_replica_answers_under_its_version():
    fleet = Fleet(version=1)
    controller = await started(fleet)
    assert await state_of(controller, 1, begins=True) == ("running", {})
    (pinned,) = fleet.pins
    await rollout_kit.train(controller, range(1, 3))
    assert (fleet.version, controller.state.trained_steps) == (3, 3)
    assert await state_of(controller, 1) == ("running", {})
    assert controller._evaluations.active == ""  # nobody waits for it
    pinned.may_answer.set()
    state, results = await state_of(controller, 1, timeout_s=100.0)
    assert (state, {mode: item["reward"] for mode, item in results.items()}) == (
        "ready",
        {"sampled": 4.0, "greedy": 4.0},
    )
    assert (pinned.version, pinned.num_released, len(fleet.pins)) == (1, 1, 1)
    assert controller.state.evaluations[1, "greedy"]["reward"] == 4.0
    await controller.close()


async def test_it_begins_when_the_servers_have_the_version():
    fleet = Fleet(version=0)
    controller = await started(fleet, step=0)
    fleet.may_update.clear()
    await controller.next_batch(0, timeout_s=100.0)
    installs = asyncio.create_task(controller.weights.publish(update(1), timeout_s=100.0))
    await controller.consumed(0, 1)
    assert await state_of(controller, 1, begins=True) == ("running", {})
    assert fleet.pins == []
    fleet.may_update.set()
    assert await installs
    assert [pinned.version for pinned in fleet.pins] == [1]
    await controller.close()
    assert fleet.pins[0].num_released == 1


async def test_no_replica_can_be_spared():
    controller = await started(Fleet(version=1, num_spare=0))
    assert await state_of(controller, 1, begins=True) == ("missed", {})
    assert (await controller.evaluate(1, "greedy", timeout_s=100.0))["reward"] == 4.0
    await controller.close()


async def test_a_lost_replica_gives_no_result():
    fleet = Fleet(version=1)
    controller = await started(fleet)
    await state_of(controller, 1, begins=True)
    fleet.pins[0].is_lost = True
    fleet.pins[0].may_answer.set()
    assert await state_of(controller, 1, timeout_s=100.0) == ("missed", {})
    assert (fleet.pins[0].num_released, controller.state.evaluations) == (1, {})
    await controller.close()


async def test_a_trainer_that_goes_back_ends_it():
    fleet = Fleet(version=2)
    controller = await started(fleet, step=2)
    await state_of(controller, 2, begins=True)
    await controller.weights.publish(update(1), timeout_s=100.0)
    await controller.attach(rank=0, world_size=1, dp_size=1, step=1, version=1)
    assert await state_of(controller, 2, timeout_s=100.0) == ("missed", {})
    assert fleet.pins[0].num_released == 1
    await controller.close()


async def test_a_trainer_that_goes_back_to_its_version_joins_it():
    fleet = Fleet(version=1)
    controller = await started(fleet)
    await state_of(controller, 1, begins=True)
    await asyncio.sleep(0)
    await controller.weights.publish(update(1), timeout_s=100.0)
    await controller.attach(rank=0, world_size=1, dp_size=1, step=1, version=1)
    assert await state_of(controller, 1, begins=True) == ("running", {})
    (pinned,) = fleet.pins
    pinned.may_answer.set()
    state, results = await state_of(controller, 1, timeout_s=100.0)
    assert (state, results.keys(), pinned.num_released) == ("ready", {"sampled", "greedy"}, 1)
    await controller.close()


async def test_an_evaluation_without_any_score_fails_the_trainer():
    fleet = Fleet(version=1)
    controller = await started(fleet, ScriptedWorkflow(lambda index: Script(outcome="fail")))
    await state_of(controller, 1, begins=True)
    fleet.pins[0].may_answer.set()
    with raises_code("rollout.evaluation_failed"):
        await state_of(controller, 1, timeout_s=100.0)
    await controller.close()


async def test_a_run_without_held_out_rows_has_none():
    controller = rollout_kit.make_controller(rollout_kit.memory_ledger(), fleet=Fleet(version=1))
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=1, version=1)
    with pytest.raises(RequestError):
        await state_of(controller, 1, begins=True)
    await controller.close()
