"""When a run whose groups are all rejected warns, and when it ends instead of going on for ever."""

import asyncio
import logging

import pytest

from areal.ledger.event_log import MemoryLog
from areal.ledger.ledger import Ledger
from areal.rollout.executor import ProducerStopped
from areal.rollout.rejections import Rejections


def counts(*, limit=None, batch_size=2, rows_per_epoch=8, filter_name="mixed_rewards"):
    return Rejections(batch_size=batch_size, rows_per_epoch=rows_per_epoch, limit=limit, filter_name=filter_name)


def test_the_limit_is_what_one_train_step_may_reject():
    rejections = counts(limit=3)
    for _ in range(3):
        assert not rejections.count_rejected("filter")
    rejections.count_accepted()
    assert not rejections.why_hopeless()  # three are allowed, and an accepted group takes none back
    rejections.count_rejected("workflow")
    assert rejections.why_hopeless() == (
        "4 groups were rejected for one train step (rollout.max_rejected_per_step=3): 1 of its 2 groups are accepted, "
        "4 were rejected (3 by the filter mixed_rewards, 1 by the workflow: it returned None); bring prompts that the "
        "policy solves sometimes, neither always nor never, or accept more with rollout.should_accept_fn (now "
        "mixed_rewards), or raise rollout.max_rejected_per_step"
    )


def test_the_next_step_counts_anew():
    rejections = counts(limit=3)
    for _ in range(5):
        for _ in range(3):
            rejections.count_rejected("filter")
        rejections.count_accepted()
        rejections.count_accepted()
        assert not rejections.why_hopeless()


def test_without_a_limit_a_hundred_batches_in_a_row_end_the_run_and_one_accepted_group_goes_on():
    rejections = counts(filter_name="")
    for _ in range(199):
        rejections.count_rejected("workflow")
    assert not rejections.why_hopeless()
    rejections.count_accepted()
    rejections.count_rejected("workflow")
    assert not rejections.why_hopeless()
    for _ in range(199):
        assert not rejections.why_hopeless()
        rejections.count_rejected("workflow")
    assert rejections.why_hopeless().startswith("the last 200 episodes were all rejected: 1 of its 2 groups")
    assert "should_accept_fn" not in rejections.why_hopeless()


def test_an_epoch_in_a_row_when_that_is_more():
    rejections = counts(rows_per_epoch=300)
    for _ in range(299):
        rejections.count_rejected("filter")
    assert not rejections.why_hopeless()
    rejections.count_rejected("filter")
    assert rejections.why_hopeless()


def test_a_step_that_accepts_less_than_one_in_ten_is_warned_of_once():
    rejections = counts()
    warnings = [rejections.count_rejected("filter") for _ in range(60)]
    assert [bool(warning) for warning in warnings] == [False] * 18 + [True] + [False] * 41  # 2 of 21 are below 1/10
    assert "less than one group in 10 is accepted for a train step: 0 of its 2 groups" in warnings[18]
    rejections.count_accepted()
    rejections.count_accepted()
    assert [bool(rejections.count_rejected("filter")) for _ in range(19)] == [False] * 18 + [True]


def test_a_run_that_filters_everything_warns_and_ends_at_its_limit(kit, caplog):
    async def main():
        log = MemoryLog()
        ledger = Ledger(log, read_payload=lambda where: log.payloads[where[1]])
        config = kit.make_config(batch_size=2, rejections=50)
        controller = kit.make_controller(ledger, config=config, accept=lambda group: False)
        await controller.start()
        await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        with pytest.raises(ProducerStopped, match=r"^51 groups were rejected for one train step"):
            await controller.ended()
        await controller.close()
        assert ledger.state.reasons == {"rejected: filter": ledger.state.counts[2]}

    with caplog.at_level(logging.WARNING):
        kit.run_virtual(asyncio.wait_for(main(), 1e6))
    assert [text for text in caplog.messages if text.startswith("less than one group in 10")]


def test_batches_tell_which_share_was_accepted_and_every_step_has_the_whole_limit(kit):
    async def main():
        log = MemoryLog()
        ledger = Ledger(log, read_payload=lambda where: log.payloads[where[1]])
        config = kit.make_config(batch_size=2, max_staleness=0, rejections=6)
        turns = iter(range(1000))
        controller = kit.make_controller(ledger, config=config, accept=lambda group: next(turns) % 3 == 2)
        await controller.start()
        await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
        await kit.train(controller, range(4))
        await controller.close()
        return ledger.state.batches[1].stats

    assert kit.run_virtual(main())["accepted_frac"] == pytest.approx(1 / 3)
