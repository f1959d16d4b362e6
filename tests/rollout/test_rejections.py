"""When a run whose groups are all rejected warns, and when it ends instead of going on for ever."""

import asyncio
import logging

import pytest

from areal.rollout.executor import ProducerStopped, Rejections
from tests.rollout import rollout_kit


def counts(*, limit=None, batch_size=2, rows_per_epoch=8, filter_name="mixed_rewards"):
    return Rejections(batch_size=batch_size, rows_per_epoch=rows_per_epoch, limit=limit, filter_name=filter_name)


def test_the_limit_is_what_one_train_step_may_reject():
    rejections = counts(limit=3)
    for _ in range(3):
        assert not rejections.count_rejected("filter")
    rejections.count_accepted()
    assert not rejections.exceeded_limit()  # three are allowed, and an accepted group takes none back
    rejections.count_rejected("workflow")
    message = rejections.exceeded_limit()
    assert message.startswith("4 groups")
    for value in (
        "rollout.max_rejected_per_step=3",
        "1 of 2 groups",
        "4 were rejected",
        "3 by the filter",
        "1 by the w",
    ):
        assert value in message
    assert "rollout.should_accept_fn" in message
    assert "mixed_rewards" in message


def test_groups_without_a_reward_because_an_agent_failed_point_at_the_agent():
    rejections = counts(limit=1)
    for reason in ("agent_error: KeyError", "agent_error: ValueError", "filter"):
        rejections.count_rejected(reason)
    assert "areal show RUN --reason agent_error" in rejections.exceeded_limit()
    assert "prompts" not in rejections.exceeded_limit()


def test_each_train_step_has_its_own_count():
    rejections = counts(limit=3)
    for _ in range(5):
        for _ in range(3):
            rejections.count_rejected("filter")
        rejections.count_accepted()
        rejections.count_accepted()
        assert not rejections.exceeded_limit()


def test_a_hundred_rejected_batches_in_a_row_end_the_run():
    rejections = counts(filter_name="")
    for _ in range(199):
        rejections.count_rejected("workflow")
    assert not rejections.exceeded_limit()
    rejections.count_accepted()
    rejections.count_rejected("workflow")
    assert not rejections.exceeded_limit()
    for _ in range(199):
        assert not rejections.exceeded_limit()
        rejections.count_rejected("workflow")
    assert "last 200 episodes" in rejections.exceeded_limit()
    assert "1 of 2 groups" in rejections.exceeded_limit()
    assert "should_accept_fn" not in rejections.exceeded_limit()


def test_a_long_epoch_raises_the_limit_of_rejections_in_a_row():
    rejections = counts(rows_per_epoch=300)
    for _ in range(299):
        rejections.count_rejected("filter")
    assert not rejections.exceeded_limit()
    rejections.count_rejected("filter")
    assert rejections.exceeded_limit()


def test_low_acceptance_warns_once_per_step():
    rejections = counts()
    warnings = [rejections.count_rejected("filter") for _ in range(60)]
    assert [bool(warning) for warning in warnings] == [False] * 18 + [True] + [False] * 41  # 2 of 21 are below 1/10
    assert "one group in 10 " in warnings[18]
    assert "0 of 2 groups" in warnings[18]
    rejections.count_accepted()
    rejections.count_accepted()
    assert [bool(rejections.count_rejected("filter")) for _ in range(19)] == [False] * 18 + [True]


def test_a_run_that_filters_everything_warns_and_ends_at_its_limit(caplog):
    async def main():
        ledger = rollout_kit.memory_ledger()
        config = rollout_kit.make_config(batch_size=2, rejections=50)
        controller = rollout_kit.make_controller(ledger, config=config, accept=lambda group: False)
        await controller.start()
        await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        with pytest.raises(ProducerStopped, match=r"^51 ") as error:
            await controller.ended()
        assert error.value.code == "rollout.all_rejected"
        await controller.close()
        assert ledger.state.reasons == {"rejected: filter": ledger.state.counts[2]}

    with caplog.at_level(logging.WARNING):
        rollout_kit.run_virtual(asyncio.wait_for(main(), 1e6))
    assert [text for text in caplog.messages if " one group in 10 " in text]


def test_batches_report_the_accepted_fraction_and_statistics_of_rejected_episodes_too():
    class Counting(rollout_kit.ScriptedWorkflow):
        async def arun_episode(self, engine, data):
            group = await super().arun_episode(engine, data)
            group.stats["number"] = float(len(self.seen) % 3)
            return group

    async def main():
        ledger = rollout_kit.memory_ledger()
        config = rollout_kit.make_config(batch_size=2, max_staleness=0, rejections=6)
        controller = rollout_kit.make_controller(
            ledger, config=config, workflow=Counting(), accept=lambda group: group.stats["number"] == 2
        )
        await controller.start()
        await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        await rollout_kit.train(controller, range(4))
        await controller.close()
        return ledger.state.batches[1].stats

    stats = rollout_kit.run_virtual(main())
    assert stats["accepted_frac"] == pytest.approx(1 / 3)
    assert (stats["episode/number"], stats["ended/number"]) == (2.0, pytest.approx(1.0))
