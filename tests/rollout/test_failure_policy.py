"""When failed and rejected episodes warn, and when they end a run that would otherwise go on for ever."""

import asyncio
import json
import logging
from dataclasses import replace

import pytest

from areal.api.errors import AgentFailed, ServerUnavailable
from areal.api.workflow import RolloutWorkflow
from areal.rollout.evaluation import MAX_FIRST_FAILURES, EvaluationFailed
from areal.rollout.executor import (
    FIRST_FAILURES,
    SLOW_FAILURES_IN_A_ROW,
    SLOW_FAILURES_S,
    FailurePolicy,
    ProducerStopped,
)
from tests.expect import raises_code
from tests.rollout import rollout_kit

LOW_ACCEPTANCE = " one group in 10 "


def policy(*, limit=None, rows_per_epoch=8, filter_name="mixed_rewards"):
    return FailurePolicy(
        batch_size=2, rows_per_epoch=rows_per_epoch, max_rejected=limit, filter_name=filter_name, has_results=False
    )


async def started(workflow=None, **options):
    controller = rollout_kit.make_controller(rollout_kit.memory_ledger(), workflow=workflow, **options)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    return controller


def test_the_limit_is_what_one_train_step_may_reject():
    counts = policy(limit=3)
    assert [counts.rejected("filter") for _ in range(3)] == [None] * 3
    counts.accepted()  # an accepted group takes none back
    error = counts.rejected("workflow")
    assert error.code == "rollout.all_rejected"
    for value in ("max_rejected_per_step=3", "1 of 2 groups", "4 were rejected", "3 by the filter", "1 by the w"):
        assert value in str(error)
    assert "rollout.should_accept_fn" in str(error)


def test_groups_without_a_reward_because_an_agent_failed_point_at_the_agent():
    counts = policy(limit=1)
    errors = [counts.rejected(reason) for reason in ("agent_error: KeyError", "agent_error: ValueError", "filter")]
    assert "areal show RUN --reason agent_error" in str(errors[-1])
    assert "prompts" not in str(errors[-1])


def test_each_train_step_has_its_own_count():
    counts = policy(limit=3)
    for _ in range(5):
        assert [counts.rejected("filter") for _ in range(3)] == [None] * 3
        counts.accepted()
        counts.accepted()


@pytest.mark.parametrize(("rows_per_epoch", "limit"), [(8, 200), (300, 300)], ids=["100 batches", "a long epoch"])
def test_rejections_in_a_row_end_the_run(rows_per_epoch, limit):
    counts = policy(rows_per_epoch=rows_per_epoch, filter_name="")
    assert [counts.rejected("workflow") for _ in range(limit - 1)] == [None] * (limit - 1)
    counts.accepted()
    assert [counts.rejected("workflow") for _ in range(limit - 1)] == [None] * (limit - 1)
    error = str(counts.rejected("workflow"))
    assert f"last {limit} episodes" in error
    assert "1 of 2 groups" in error
    assert "should_accept_fn" not in error


def test_low_acceptance_warns_once_per_step(caplog):
    def warned(number):
        caplog.clear()
        for _ in range(number):
            counts.rejected("filter")
        return [text for text in caplog.messages if LOW_ACCEPTANCE in text]

    counts = policy()
    assert not warned(18)
    (text,) = warned(42)  # 2 of 21 are below 1/10
    assert "0 of 2 groups were accepted, 19 were" in text
    counts.accepted()
    counts.accepted()
    assert not warned(18)
    assert len(warned(1)) == 1


def test_a_run_that_filters_everything_warns_and_ends_at_its_limit(caplog):
    async def main():
        config = rollout_kit.make_config(batch_size=2, rejections=50)
        controller = await started(config=config, accept=lambda group: False)
        with pytest.raises(ProducerStopped, match=r"^51 ") as error:
            await controller.ended()
        assert error.value.code == "rollout.all_rejected"
        await controller.close()
        assert controller.state.reasons == {"rejected: filter": controller.state.counts[2]}

    with caplog.at_level(logging.WARNING):
        rollout_kit.run_virtual(asyncio.wait_for(main(), 1e6))
    assert [text for text in caplog.messages if LOW_ACCEPTANCE in text]


def test_batches_report_the_accepted_fraction_and_statistics_of_rejected_episodes_too():
    class Counting(rollout_kit.ScriptedWorkflow):
        async def arun_episode(self, engine, data):
            group = await super().arun_episode(engine, data)
            group.stats["number"] = float(len(self.seen) % 3)
            return group

    async def main():
        config = rollout_kit.make_config(batch_size=2, max_staleness=0, rejections=6)
        controller = await started(Counting(), config=config, accept=lambda group: group.stats["number"] == 2)
        await rollout_kit.train(controller, range(4))
        await controller.close()
        return controller.state.batches[1].stats

    stats = rollout_kit.run_virtual(main())
    assert stats["accepted_frac"] == pytest.approx(1 / 3)
    assert (stats["episode/number"], stats["ended/number"]) == (2.0, pytest.approx(1.0))


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


async def test_the_first_episodes_with_one_error_end_the_run():
    controller = await started(Fails(lambda number: KeyError("answer")))
    with raises_code("rollout.first_failed", "KeyError: 'answer'"):
        await controller.ended(report_s=0.0)
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
    controller = await started(Fails(error_of))
    assert await controller.next_batch(0, timeout_s=60.0) is not None
    assert not controller.is_over
    await controller.close()


class Rejects(rollout_kit.ScriptedWorkflow):
    """Episodes are rejected for the reasons in their order; empty = accepted."""

    def __init__(self, reason_of):
        super().__init__()
        self.reason_of = reason_of
        self.num_started = 0

    async def arun_episode(self, engine, data):
        number, self.num_started = self.num_started, self.num_started + 1
        group = await super().arun_episode(engine, data)
        return replace(group, rejected=self.reason_of(number))


@pytest.mark.parametrize("reason", ["no_reward", "turn_budget", "agent_error: KeyError"])
async def test_the_first_episodes_without_a_reward_for_one_cause_end_the_run(reason):
    controller = await started(Rejects(lambda number: reason))
    with raises_code("rollout.first_failed", reason, "3"):
        await controller.ended(report_s=0.0)
    await controller.close()
    assert controller.state.reasons[f"rejected: {reason}"] < 20


@pytest.mark.parametrize(
    "reasons",
    [
        ["no_reward", "no_reward", ""],
        ["no_reward", "turn_budget", "no_reward"],
        ["agent_timeout"] * 3,
        ["other"] * 3,
        ["no_reward", "filter of the workflow", "no_reward"],
    ],
)
async def test_other_rejections_of_the_first_episodes_do_not_end_the_run(reasons):
    controller = await started(Rejects(lambda number: reasons[number] if number < len(reasons) else ""))
    assert await controller.next_batch(0, timeout_s=60.0) is not None
    assert not controller.is_over
    await controller.close()


class Stuck(rollout_kit.ScriptedWorkflow):
    """Episodes of odd rows wait for ever, and ignore that they are cancelled once."""

    async def arun_episode(self, engine, data):
        if data["index"] % 2:
            try:
                await asyncio.gather(self.waits())
            except asyncio.CancelledError:
                await asyncio.sleep(5.0)
        return await super().arun_episode(engine, data)

    async def waits(self):
        await asyncio.get_running_loop().create_future()


def test_stuck_episodes_are_replaced_with_a_reason_a_stack_and_an_alarm(tmp_path, caplog):
    async def main():
        config = rollout_kit.make_config(max_concurrent=4)
        config = replace(config, rollout=replace(config.rollout, episode_timeout_s=60.0))
        controller = await started(Stuck(), config=config, alarms_path=tmp_path / "alarms.jsonl")
        blobs = await rollout_kit.train(controller, range(4))
        reasons, first = dict(controller.state.reasons), controller.status()["first_failure"]
        await controller.close()
        controller.state.check_integrity()
        return len(blobs), reasons, first

    with caplog.at_level(logging.WARNING):
        num_steps, reasons, first = rollout_kit.run_virtual(asyncio.wait_for(main(), 1e6))
    assert num_steps == 4
    assert set(reasons) == {"failed: rollout.episode_timeout"}
    assert "waits" in first
    assert "test_failure_policy.py" in first
    assert len([text for text in caplog.messages if "it waits in:" in text]) == 1
    names = [json.loads(line)["name"] for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert {"stuck_episodes", "failed_episodes"} == set(names)
    assert names.count("stuck_episodes") == 1


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
            raise AgentFailed(AGENT_ERROR, "KeyError")
        return replace(group, agent_error=AGENT_ERROR, rejected="agent_error: KeyError")


@pytest.mark.parametrize("in_all", [False, True])
async def test_an_agent_error_is_the_first_failure_and_is_counted(in_all):
    controller = await started(AgentFails(in_all=in_all))
    batch = await controller.next_batch(0, timeout_s=60.0)
    status = controller.status()
    assert status["first_failure"].endswith(AGENT_ERROR)
    assert controller.episodes()["first_failure"] == status["first_failure"]
    assert not status["rejected" if in_all else "failed"]
    assert batch.stats["agent_errors"] == batch.stats["failed" if in_all else "rejected"] >= 1
    outcome = "failed" if in_all else "rejected"
    assert status["reasons"][f"{outcome}: agent_error: KeyError"] == status[outcome]
    await controller.close()


async def test_without_a_failure_the_status_has_none():
    controller = await started()
    await controller.next_batch(0, timeout_s=60.0)
    assert controller.status()["first_failure"] == ""
    await controller.close()


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
        controller = await started(HangsUntilItsLimit(limit_s))
        with pytest.raises(ProducerStopped, match=rf"\b{expected} .*test_failure_policy.py:\d+") as error:
            await controller.ended()
        assert error.value.code == "rollout.all_failed"
        await controller.close()
        state = controller.state
        assert state.counts[3] <= expected + 5  # while a trainer had its chance to hear of it
        assert state.num_admitted == state.counts[3] + len(state.running)

    assert SLOW_FAILURES_S == 120.0
    rollout_kit.run_virtual(main())


def test_an_evaluation_with_only_failures_ends_early():
    async def main():
        hangs = HangsUntilItsLimit(15.0)
        sets = {"": [{"index": index} for index in range(256)]}
        controller = await started(eval_sets=sets, eval_workflows={"greedy": hangs})
        with pytest.raises(EvaluationFailed, match=r"\b8 .*TimeoutError"):
            await controller.evaluate(0, "greedy", timeout_s=1e6)
        assert hangs.num_ended == MAX_FIRST_FAILURES
        await controller.close()

    rollout_kit.run_virtual(main())
