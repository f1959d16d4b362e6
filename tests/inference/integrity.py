"""Checks that scheduler and block pool are consistent, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from areal.inference.prefix_cache import BlockPool
from areal.inference.scheduler import Scheduler, Status


def check_pool(pool: BlockPool, holders: Iterable[list[int]]) -> None:
    """AssertionError unless the references equal those of `holders`, one list of blocks each."""
    held = Counter[int]()
    for blocks in holders:
        assert len(set(blocks)) == len(blocks), f"a sequence holds a block twice: {blocks}"
        held.update(blocks)
    free = {*pool._free, *pool._cached}
    assert len(free) == len(pool._free) + len(pool._cached), "a block is free twice"
    assert {key: block for block, key in pool._key_of.items()} == pool._by_key
    assert set(pool._cached) == {block for block in pool._key_of if not pool._references[block]}
    for block, count in enumerate(pool._references):
        assert count == held[block], f"block {block} counts {count} holders, but {held[block]} sequences hold it"
        assert (count == 0) == (block in free), f"block {block} has {count} holders, free: {block in free}"


def check_scheduler(scheduler: Scheduler) -> None:
    """AssertionError unless queues, statuses and blocks are consistent."""
    assert all(sequence.status is Status.RUNNING for sequence in scheduler.running)
    assert all(sequence.status is Status.WAITING and not sequence.blocks for sequence in scheduler.waiting)
    assert len(scheduler.running) <= scheduler.max_running
    for sequence in scheduler.running:
        assert len(sequence.blocks) >= scheduler._pool.blocks_for(sequence.num_computed)
    if (snapshots := scheduler._snapshots) is not None:
        held = [sequence.snapshot for sequence in scheduler.running if sequence.snapshot is not None]
        held += [*snapshots._free, *snapshots._by_key.values(), *(slot for _, slot in snapshots._new)]
        assert len(set(held)) == len(held) == snapshots.num_slots, "a slot is held twice, or by none"
    check_pool(scheduler._pool, (sequence.blocks for sequence in scheduler.running))
