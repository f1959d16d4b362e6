"""The promises of admission and of each rollout.on_stale policy, over random durations on a virtual clock."""

import asyncio
import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal.ledger.state import REJECTED
from areal.rollout.controller import BatchUnavailable
from areal.rollout.share_codec import decode_share
from tests.rollout import rollout_kit

OUTCOMES = st.sampled_from(["accept"] * 6 + ["reject", "fail"])
DURATIONS = st.sampled_from([0.001, 0.01, 0.1, 0.5, 3.0])


@st.composite
def runs(draw):
    return {
        "batch_size": draw(st.integers(1, 5)),
        "max_staleness": draw(st.integers(0, 3)),
        "max_concurrent": draw(st.integers(1, 20)),
        "queue_room": draw(st.one_of(st.none(), st.integers(0, 5))),
        "step_s": draw(st.sampled_from([0.0, 0.05, 1.0])),
        "dp_size": draw(st.integers(1, 3)),
        "episodes": draw(st.lists(st.tuples(OUTCOMES, DURATIONS, st.integers(1, 4)), min_size=25, max_size=40)),
    }


def play(run, on_stale, num_steps=6, workflow_class=None, dynamic_bs=False):
    """One whole run; the events, and per step the shares and the ids of the batch."""
    room = run.get("queue_room")
    queue_size = None if room is None else run["batch_size"] + room
    config = rollout_kit.make_config(
        batch_size=run["batch_size"],
        max_staleness=run["max_staleness"],
        on_stale=on_stale,
        max_concurrent=run["max_concurrent"],
        queue_size=queue_size,
        dynamic_bs=dynamic_bs,
        dp_size=run["dp_size"] if dynamic_bs else 1,
    )
    scripts = [
        rollout_kit.Script(outcome=outcome, token_s=seconds, num_tokens=tokens)
        for outcome, seconds, tokens in run["episodes"]
    ]

    def check_after_every_event(event):
        state = ledger.state
        state.check_integrity()
        assert sum(state.counts) == state.num_admitted
        if event["event"] == "admitted":
            assert len(state.running) <= run["max_concurrent"]
            limit = (run["max_staleness"] + state.version + 1) * run["batch_size"]
            assert dynamic_bs or state.num_accepted + len(state.running) <= limit
            assert queue_size is None or len(state.waiting) + len(state.running) <= queue_size

    ledger = rollout_kit.memory_ledger(check_after_every_event)

    async def main():
        controller = rollout_kit.make_controller(
            ledger,
            config=config,
            workflow=(workflow_class or rollout_kit.ScriptedWorkflow)(lambda index: scripts[index]),
            num_rows=len(scripts),
            total_steps=num_steps,
        )
        await controller.start()
        await controller.attach(rank=0, world_size=1, dp_size=run["dp_size"], step=0, version=0)
        blobs = await rollout_kit.train(controller, range(num_steps), step_s=run["step_s"], dp_size=run["dp_size"])
        controller.finish()
        await controller.ended()
        await controller.close()
        return blobs

    try:
        blobs = rollout_kit.run_virtual(main())
    except BatchUnavailable as error:
        assume(error.code != "rollout.first_failed")  # the first three episodes have failed: another promise
        raise
    return ledger.state, [[decode_share(blob) for blob in shares] for shares in blobs]


def trained_ages(shares):
    """Ages of the tokens that are trained on, over the shares of one batch."""
    return np.concatenate([share.version - share.table.output_versions[share.table.loss_mask == 1] for share in shares])


@pytest.mark.parametrize("on_stale", ["train", "mask", "drop", "wait"])
@settings(max_examples=25, deadline=None)
@given(run=runs())
def test_nothing_is_lost_or_used_twice(on_stale, run):
    state, steps = play(run, on_stale)
    ids = [state.batches[step].episode_ids for step in range(6)]
    flat = list(itertools.chain(*ids))
    assert len(flat) == len(set(flat)) == 6 * run["batch_size"]
    assert all(len(batch) == run["batch_size"] for batch in ids)
    assert state.num_accepted == len(state.waiting) + len(flat)
    for shares in steps:  # every group arrived whole, on one rank
        groups = np.concatenate([share.group_index for share in shares])
        assert sorted(groups) == list(range(run["batch_size"]))


@pytest.mark.parametrize("on_stale", ["mask", "drop", "wait"])
@settings(max_examples=25, deadline=None)
@given(run=runs())
def test_no_token_older_than_the_bound_is_trained_on(on_stale, run):
    _, steps = play(run, on_stale)
    for shares in steps:
        ages = trained_ages(shares)
        assert ages.size == 0 or ages.max() <= run["max_staleness"]
        assert ages.size == 0 or ages.min() >= 0


@pytest.mark.parametrize("on_stale", ["train", "mask"])
@settings(max_examples=25, deadline=None)
@given(run=runs())
def test_dynamic_batches_lack_only_what_was_rejected(on_stale, run):
    run = run | {"dp_size": min(run["dp_size"], run["batch_size"])}
    state, steps = play(run, on_stale, dynamic_bs=True)
    flat = list(itertools.chain(*(state.batches[step].episode_ids for step in range(6))))
    assert len(flat) == len(set(flat))
    sizes = [len(state.batches[step].episode_ids) for step in range(6)]
    assert all(run["dp_size"] <= size <= run["batch_size"] for size in sizes)
    assert 6 * run["batch_size"] - sum(sizes) <= state.counts[REJECTED]
    for shares in steps:
        ages = trained_ages(shares)
        assert on_stale == "train" or ages.size == 0 or ages.max() <= run["max_staleness"]


@settings(max_examples=25, deadline=None)
@given(run=runs())
def test_wait_consumes_in_order_of_admission(run):
    state, _ = play(run, "wait")
    flat = list(itertools.chain(*(state.batches[step].episode_ids for step in range(6))))
    assert flat == sorted(flat)
    # and nothing that could have been trained on was passed over
    assert not [episode_id for episode_id in state.waiting if episode_id < flat[-1]]


@pytest.mark.parametrize("dynamic_bs", [False, True])
@settings(max_examples=20, deadline=None)
@given(run=runs())
def test_max_staleness_zero_trains_only_on_its_own_version(dynamic_bs, run):
    run = run | {"max_staleness": 0, "dp_size": min(run["dp_size"], run["batch_size"])}
    _, steps = play(run, "train", dynamic_bs=dynamic_bs)
    for shares in steps:
        assert set(trained_ages(shares)) <= {0}


@pytest.mark.parametrize(("on_stale", "num_dropped"), [("train", 0), ("mask", 0), ("drop", 1), ("wait", 0)])
def test_a_slow_episode_under_each_stale_policy(on_stale, num_dropped):
    """Style guide, appendix B: admission alone does not bound the age of one episode."""

    class Workflow(rollout_kit.ScriptedWorkflow):
        async def arun_episode(self, engine, data):
            group = await super().arun_episode(engine, data)  # its tokens are made at once, under version 0 or 1
            if data["index"] == 7:
                await asyncio.sleep(8.0)
            return group

    run = {"batch_size": 2, "max_staleness": 1, "max_concurrent": 4, "step_s": 1.0, "dp_size": 1}
    run["episodes"] = [("accept", 0.01, 1)] * 40
    state, steps = play(run, on_stale, num_steps=16, workflow_class=Workflow)
    ages = [float(share.stats["staleness_max"]) for shares in steps for share in shares]
    assert max(ages) <= 1 if on_stale in ("drop", "wait") else max(ages) >= 7
    assert state.reasons["rejected: stale"] == num_dropped
    trained = max(float(trained_ages(shares).max()) for shares in steps)
    assert trained <= 1 or on_stale == "train"
