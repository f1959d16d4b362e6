"""The trainer recovers while the controller runs: until it has caught up, no older policy generates a token to train
on, and the status reports it."""

import asyncio

import pytest

from areal.api.data import WeightUpdate
from areal.ledger.audit import audit
from areal.ledger.event_files import read_payload
from areal.ledger.ledger import Ledger
from areal.ledger.state import LedgerState
from areal.rollout.share_codec import WeightsNeeded, decode_share
from tests.rollout import rollout_kit


def disk(version):
    return WeightUpdate(version=version, kind="disk", path=f"v{version}")


async def attach(controller, step):
    await controller.attach(rank=0, world_size=1, dp_size=1, step=step, version=step)


async def go_back(controller, step):
    """As a trainer that is started again: publish, then attach."""
    assert await controller.weights.publish(disk(step), timeout_s=1e6)
    await attach(controller, step)


def test_no_episode_starts_and_no_request_is_sent_until_the_trainer_has_caught_up(tmp_path):
    async def main():
        ledger = Ledger(rollout_kit.FileLog(tmp_path), read_payload=lambda where: read_payload(tmp_path, where))
        asked_at = []

        class Fleet(rollout_kit.FakeFleet):
            async def agenerate(self, request):
                asked_at.append(self.version)
                return await super().agenerate(request)

        class TwoTurns(rollout_kit.ScriptedWorkflow):
            async def arun_episode(self, engine, data):
                await super().arun_episode(engine, data)
                await asyncio.sleep(1.0)
                return await super().arun_episode(engine, data)

        fleet = Fleet()
        config = rollout_kit.make_config(max_staleness=2)
        controller = rollout_kit.make_controller(
            ledger, fleet=fleet, workflow=TwoTurns(), config=config, total_steps=10
        )
        await controller.start()
        await attach(controller, 0)
        first = await rollout_kit.train(controller, range(5))
        assert controller.status()["catching_up"] is False
        await asyncio.sleep(0.5)  # the next episodes are between their turns
        num_admitted, num_running = ledger.state.num_admitted, len(ledger.state.running)
        assert num_running > 0
        asked_at.clear()
        await go_back(controller, 2)
        status = controller.status()
        assert (status["version"], status["highest_version"], status["catching_up"]) == (2, 5, True)
        assert status["awaited"] == "the trainer"
        assert "at version 2 and" in status["gate_closed_because"]
        assert status["waiting_for"].endswith(f"; no episode starts because {status['gate_closed_because']}")
        again = await rollout_kit.train(controller, range(2, 4), step_s=60.0)
        assert again == first[2:4]
        assert "at version 4 and" in controller.waiting_for()
        assert ledger.state.num_admitted == num_admitted
        assert len(ledger.state.running) == num_running
        assert asked_at == []
        await rollout_kit.train(controller, range(4, 10))
        assert min(asked_at) == 5
        await controller.close()
        batches = [decode_share(blobs[0]) for blobs in first]
        assert [batch.step for batch in batches] == list(range(5))
        assert audit(tmp_path).is_clean, audit(tmp_path).violations

    rollout_kit.run_virtual(main())


def test_free_room_is_not_used_while_the_trainer_catches_up():
    async def main():
        ledger = rollout_kit.memory_ledger()

        class SlowReward(rollout_kit.ScriptedWorkflow):
            async def arun_episode(self, engine, data):
                group = await super().arun_episode(engine, data)
                await asyncio.sleep(1.0)
                return group

        config = rollout_kit.make_config(max_staleness=4, max_concurrent=4)
        controller = rollout_kit.make_controller(ledger, workflow=SlowReward(), config=config, total_steps=9)
        await controller.start()
        await attach(controller, 0)
        await rollout_kit.train(controller, range(3))
        await asyncio.sleep(0.5)
        num_admitted = ledger.state.num_admitted
        await go_back(controller, 2)
        await asyncio.sleep(60.0)
        assert len(ledger.state.running) == 0
        assert ledger.state.num_admitted == num_admitted
        await rollout_kit.train(controller, range(2, 9))
        await controller.close()

    rollout_kit.run_virtual(main())


def test_an_older_policy_does_not_start_an_answer():
    """The fleet holds up answers that have tokens; one that has none it would begin under any policy."""

    async def main():
        ledger, versions = rollout_kit.memory_ledger(), []

        class Fleet(rollout_kit.FakeFleet):
            async def agenerate(self, request):
                await asyncio.sleep(5.0)  # queues
                response = await super().agenerate(request)
                versions.append((self.version, response.output_versions))
                return response

        controller = rollout_kit.make_controller(ledger, fleet=Fleet(), total_steps=6)
        await controller.start()
        await attach(controller, 0)
        await rollout_kit.train(controller, range(3))
        await go_back(controller, 1)
        await asyncio.sleep(20.0)
        assert [made for version, made in versions if version == 1] != [], "the fleet did begin such answers"
        await rollout_kit.train(controller, range(1, 6))
        await controller.close()
        ages = [batch.stats["staleness_max"] for batch in ledger.state.batches.values()]
        assert max(ages) <= 1

    rollout_kit.run_virtual(main())


def test_publishing_an_older_version_closes_the_gate_immediately():
    async def main():
        ledger = rollout_kit.memory_ledger()
        held = asyncio.Event()

        class Fleet(rollout_kit.FakeFleet):
            async def update_weights(self, update):
                if update.version == 1 and self.version == 3:
                    await held.wait()
                await super().update_weights(update)

        controller = rollout_kit.make_controller(ledger, fleet=Fleet(), total_steps=6)
        await controller.start()
        await attach(controller, 0)
        await rollout_kit.train(controller, range(3))
        num_admitted = ledger.state.num_admitted
        assert await controller.weights.publish(disk(1), timeout_s=0.001) is False
        status = controller.status()
        assert (status["updating_to"], status["catching_up"], status["version"]) == (1, True, 3)
        assert status["waiting_since_s"] == pytest.approx(0.001)
        assert status["awaited"].endswith("policy version 1")
        await asyncio.sleep(60.0)
        assert ledger.state.num_admitted == num_admitted
        held.set()
        await go_back(controller, 1)
        await rollout_kit.train(controller, range(1, 6))
        await controller.close()

    rollout_kit.run_virtual(main())


def test_no_batch_is_composed_for_a_dead_trainer():
    """It requested batch 3 at version 3 and died; the servers load version 1 before the restarted trainer attaches."""

    async def main():
        ledger = rollout_kit.memory_ledger()

        class SlowReward(rollout_kit.ScriptedWorkflow):
            async def arun_episode(self, engine, data):
                group = await super().arun_episode(engine, data)
                await asyncio.sleep(50.0 if len(self.seen) > 12 else 0.0)
                return group

        controller = rollout_kit.make_controller(
            ledger, workflow=SlowReward(), config=rollout_kit.make_config(max_staleness=0), total_steps=6
        )
        await controller.start()
        await attach(controller, 0)
        await rollout_kit.train(controller, range(3))
        assert await controller.next_batch(3, timeout_s=31.0) is None
        assert controller.status()["waiting_for"].startswith("batch 3: 0 of 4 episodes accepted, 4 running; ")
        assert controller.status()["waiting_since_s"] == pytest.approx(31.0)
        await controller.weights.publish(disk(1), timeout_s=1e6)
        await asyncio.sleep(100.0)
        assert len(ledger.state.waiting) == 4
        assert 3 not in ledger.state.batches
        await attach(controller, 1)
        assert not controller.status()["waiting_for"].startswith("batch 3")
        await rollout_kit.train(controller, range(1, 6))
        assert [batch.version for batch in ledger.state.batches.values()] == list(range(6))
        await controller.close()

    rollout_kit.run_virtual(main())


def test_going_back_cancels_later_evaluations_and_keeps_results():
    async def main():
        ledger = rollout_kit.memory_ledger()
        workflow = rollout_kit.ScriptedWorkflow(lambda index: rollout_kit.Script(token_s=50.0 if index < 2 else 0.01))
        options = {"eval_sets": {"": [{"index": 0}, {"index": 1}]}, "eval_workflows": {"greedy": workflow}}
        controller = rollout_kit.make_controller(ledger, total_steps=9, **options)
        await controller.start()
        await attach(controller, 0)
        await rollout_kit.train(controller, range(2))
        result = await controller.evaluate(2, "greedy", timeout_s=1e6)
        await rollout_kit.train(controller, range(2, 4))
        assert await controller.evaluate(4, "greedy", timeout_s=1.0) is None
        assert "greedy after step 4, 0 of 2 answers done" in controller.waiting_for()
        await go_back(controller, 1)
        await asyncio.sleep(0.01)
        assert "evaluation" not in controller.waiting_for()
        await rollout_kit.train(controller, range(1, 4))
        seen = len(workflow.seen)
        assert await controller.evaluate(2, "greedy", timeout_s=1e6) == result
        assert len(workflow.seen) == seen
        assert (await controller.evaluate(4, "greedy", timeout_s=1e6) or {})["num"] == 2.0
        assert len(workflow.seen) == seen + 2
        assert ledger.state.evaluations.keys() == {(2, "greedy"), (4, "greedy")}
        await controller.close()

    rollout_kit.run_virtual(main())


def test_an_older_policy_does_not_finish_an_evaluation():
    """The trainer publishes, and then attaches: time enough for the last rows."""

    async def main():
        ledger = rollout_kit.memory_ledger()

        class Fleet(rollout_kit.FakeFleet):
            async def agenerate(self, request):
                if self.version == 4:
                    await asyncio.sleep(5.0)  # queues, and has no token yet
                return await super().agenerate(request)

        options = {"eval_sets": {"": [{"index": 0}]}, "eval_workflows": {"greedy": rollout_kit.ScriptedWorkflow()}}
        controller = rollout_kit.make_controller(ledger, fleet=Fleet(), total_steps=4, **options)
        await controller.start()
        await attach(controller, 0)
        await rollout_kit.train(controller, range(4))
        assert await controller.evaluate(4, "greedy", timeout_s=1.0) is None
        await controller.weights.publish(disk(1), timeout_s=1e6)
        await asyncio.sleep(100.0)
        await attach(controller, 1)
        assert ledger.state.evaluations == {}
        await rollout_kit.train(controller, range(1, 4))
        assert await controller.evaluate(4, "greedy", timeout_s=1e6) is not None
        await controller.close()

    rollout_kit.run_virtual(main())


def test_evaluations_are_not_held_while_the_trainer_catches_up():
    async def main():
        workflow = rollout_kit.ScriptedWorkflow()
        options = {"eval_sets": {"": [{"index": 0}]}, "eval_workflows": {"greedy": workflow}}
        controller = rollout_kit.make_controller(rollout_kit.memory_ledger(), total_steps=9, **options)
        await controller.start()
        await attach(controller, 0)
        await rollout_kit.train(controller, range(4))
        await go_back(controller, 1)
        assert await controller.evaluate(1, "greedy", timeout_s=1.0) is not None
        await controller.close()

    rollout_kit.run_virtual(main())


def test_without_a_recorded_batch_there_is_nothing_to_catch_up_with():
    """A new ledger: the trainer came at step 5 and came again, from an older checkpoint, before its first batch."""
    state = LedgerState()
    for version in (5, 3):
        state.apply({"event": "published", "version": version, "kind": "disk", "path": ""})
        assert state.is_catching_up is (version == 3)
        state.apply({"event": "attached", "step": version, "version": version})
        assert not state.is_catching_up


def test_episodes_of_an_unreachable_version_are_restarted():
    """They would wait for version 5, which needs their own batches."""

    async def main():
        ledger = rollout_kit.memory_ledger()
        controller = rollout_kit.make_controller(ledger, total_steps=8)
        await controller.start()
        await controller.weights.publish(disk(5), timeout_s=1.0)
        await attach(controller, 5)
        await asyncio.sleep(0.01)
        await go_back(controller, 3)
        assert {episode.attempt for episode in ledger.state.running.values()} == {1}
        assert {episode.version for episode in ledger.state.running.values()} == {3}
        async with asyncio.timeout(1000.0):
            await rollout_kit.train(controller, range(3, 8))
        assert ledger.state.reasons == {}
        await controller.close()

    rollout_kit.run_virtual(main())


def test_a_trainer_at_the_version_of_all_servers_sends_no_weights():
    """Were servers named that lack nothing, they would be awaited in a group that none of them joins."""

    async def main():
        class Fleet(rollout_kit.FakeFleet):
            def live_replicas(self, version):
                return [] if version == self.version else ["server-0"]

        ledger = rollout_kit.memory_ledger()
        controller = rollout_kit.make_controller(ledger, fleet=Fleet(3))
        asking = asyncio.create_task(controller.live_replicas(3, timeout_s=5.0))
        await asyncio.sleep(1.0)
        assert not asking.done(), "the fleet is not there yet"
        await controller.start()
        assert await asking == []
        assert await controller.weights.publish(WeightUpdate(version=3, kind="collective"), timeout_s=5.0)
        assert ledger.state.version == 3
        assert await controller.live_replicas(4, timeout_s=5.0) == ["server-0"]
        await controller.close()

    rollout_kit.run_virtual(main())


def test_weights_are_requested_immediately_unless_the_batch_exists():
    async def main():
        lacking = False

        class Fleet(rollout_kit.FakeFleet):
            def status(self):
                return {"needs_weights": lacking}

        workflow = rollout_kit.ScriptedWorkflow()
        workflows = {"greedy": workflow, "sampled": workflow}
        options = {"eval_sets": {"": [{"index": 0}]}, "eval_workflows": workflows}
        controller = rollout_kit.make_controller(rollout_kit.memory_ledger(), fleet=Fleet(), total_steps=9, **options)
        await controller.start()
        await attach(controller, 0)
        assert await controller.evaluate(0, "greedy", timeout_s=1.0) is not None
        await rollout_kit.train(controller, range(1))
        lacking = True
        began_s = asyncio.get_running_loop().time()
        batch, evaluation = (controller.next_batch(1, timeout_s=9.0), controller.evaluate(1, "sampled", timeout_s=9.0))
        for asking in (batch, evaluation):
            with pytest.raises(WeightsNeeded, match=r"\b1\b"):
                await asking
        assert asyncio.get_running_loop().time() == began_s
        assert await controller.next_batch(0, timeout_s=1.0) is not None
        assert await controller.evaluate(0, "greedy", timeout_s=1.0) is not None
        await controller.close()

    rollout_kit.run_virtual(main())


def test_waiting_for_lists_replicas_and_gate_limits():
    async def main():
        class Fleet(rollout_kit.FakeFleet):
            def status(self):
                serving = {"name": "server-0", "state": "serving", "version": self.version, "reason": ""}
                stale = {"name": "server-1", "state": "stale", "version": 40, "reason": "no folder"}
                return {"replicas": [serving, stale]}

        slow = rollout_kit.ScriptedWorkflow(lambda index: rollout_kit.Script(token_s=1e6))
        controller = rollout_kit.make_controller(
            rollout_kit.memory_ledger(), fleet=Fleet(41), workflow=slow, total_steps=50
        )
        await controller.start()
        await attach(controller, 41)
        assert await controller.next_batch(41, timeout_s=1.0) is None
        assert controller.waiting_for().split("; ") == [
            "batch 41: 0 of 4 episodes accepted, 8 running",
            "no episode starts because 8 episodes are running, the maximum (max_concurrent_rollouts=8)",
            "not serving version 41: server-1 (version 40) is stale: no folder",
        ]
        await controller.close()

    rollout_kit.run_virtual(main())
