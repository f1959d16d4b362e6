"""An error that every episode repeats ends the run after its first three episodes."""

from dataclasses import replace

import pytest

from areal.api.errors import RewardError, ServerUnavailable
from areal.rollout.executor import FIRST_FAILURES, ProducerStopped
from tests.rollout import rollout_kit


class Fails(rollout_kit.ScriptedWorkflow):
    """Episodes in the order of their start; `error_of` gives the error of each, None = it succeeds."""

    def __init__(self, error_of):
        super().__init__()
        self.error_of = error_of
        self.num_started = 0

    async def arun_episode(self, engine, data):
        number, self.num_started = self.num_started, self.num_started + 1
        if (error := self.error_of(number)) is not None:
            raise error
        return await super().arun_episode(engine, data)


async def started(workflow, ledger):
    controller = rollout_kit.make_controller(ledger, workflow=workflow)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    return controller


async def test_the_first_episodes_with_one_error_end_the_run():
    ledger = rollout_kit.memory_ledger()
    controller = await started(Fails(lambda number: KeyError("answer")), ledger)
    with pytest.raises(ProducerStopped, match="KeyError: 'answer'") as error:
        await controller.ended(report_s=0.0)
    assert error.value.code == "rollout.first_failed"
    assert controller.status()["first_failure"].startswith("episode 0 failed: KeyError: 'answer'")
    await controller.close()
    assert FIRST_FAILURES == 3


@pytest.mark.parametrize(
    "error_of",
    [
        lambda number: KeyError("answer") if number in (0, 2) else None,
        lambda number: KeyError("answer") if number in (1, 2) else None,
        lambda number: [KeyError("answer"), ValueError("answer"), KeyError("answer")][number] if number < 3 else None,
        lambda number: ServerUnavailable("no server", code="fleet.no_live_replica") if number < 5 else None,
        lambda number: TimeoutError() if number < 5 else None,
    ],
    ids=["one succeeds", "the first succeeds", "different errors", "lost servers", "time limits"],
)
async def test_other_failures_do_not_end_the_run(error_of):
    ledger = rollout_kit.memory_ledger()
    controller = await started(Fails(error_of), ledger)
    assert await controller.next_batch(0, timeout_s=60.0) is not None
    assert not controller.is_over
    await controller.close()


AGENT_ERROR = "KeyError: 'itm' (bad.py:28)"


class AgentFails(rollout_kit.ScriptedWorkflow):
    """In the episodes of every second row an agent fails, in some or in all of the sessions."""

    def __init__(self, *, in_all):
        super().__init__()
        self.in_all = in_all

    async def arun_episode(self, engine, data):
        group = await super().arun_episode(engine, data)
        assert group is not None
        if data["index"] % 2:
            return group
        if self.in_all:
            raise RewardError(AGENT_ERROR, code="agent.failed")
        return replace(group, agent_error=AGENT_ERROR, rejected="agent_error: KeyError")


@pytest.mark.parametrize("in_all", [False, True])
async def test_an_agent_error_is_the_first_failure_and_is_counted(in_all):
    controller = await started(AgentFails(in_all=in_all), rollout_kit.memory_ledger())
    batch = await controller.next_batch(0, timeout_s=60.0)
    status = controller.status()
    assert status["first_failure"].endswith(AGENT_ERROR)
    assert controller.episodes()["first_failure"] == status["first_failure"]
    assert not status["rejected" if in_all else "failed"]
    assert batch.stats["agent_errors"] == batch.stats["failed" if in_all else "rejected"] >= 1
    if not in_all:
        assert status["reasons"]["rejected: agent_error: KeyError"] == status["rejected"]
    await controller.close()


async def test_without_a_failure_the_status_has_none():
    controller = await started(rollout_kit.ScriptedWorkflow(), rollout_kit.memory_ledger())
    await controller.next_batch(0, timeout_s=60.0)
    assert controller.status()["first_failure"] == ""
    await controller.close()
