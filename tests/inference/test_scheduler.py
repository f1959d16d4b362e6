"""The scheduler and the cache account, without tensors: nothing is lost, nothing is computed twice or too early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.inference.prefix_cache import BlockPool
from areal.inference.scheduler import (
    Chunk,
    FinishReason,
    SamplingParams,
    Scheduler,
    Sequence,
    Status,
    StepPlan,
)
from tests.inference.integrity import check_pool, check_scheduler

BLOCK = 4
DONE = FinishReason(kind="length")


def make(blocks: int = 64, *, max_running: int = 8, budget: int = 64) -> Scheduler:
    return Scheduler(BlockPool(blocks, BLOCK), max_running=max_running, max_prefill_tokens=budget)


def request(length: int, *, group: str = "", new: int = 4, first: int = 0) -> Sequence:
    return Sequence(
        request_id="r",
        token_ids=[first] * length,
        num_prompt=length,
        params=SamplingParams(max_new_tokens=new),
        group_id=group,
    )


class Memory:
    """What the blocks hold, token by token: proves that every token attends to its own sequence's past."""

    def __init__(self) -> None:
        self.content: dict[int, list[int | None]] = {}

    def execute(self, plan: StepPlan) -> list[Sequence]:
        """Do a step as the model runner does. Returns the sequences that get a next token."""
        chunks = [Chunk(sequence, sequence.num_computed - 1, 1) for sequence in plan.decode] + plan.chunks
        for chunk in chunks:
            for position in range(chunk.start, chunk.start + chunk.count):
                block = chunk.sequence.blocks[position // BLOCK]
                cells = self.content.setdefault(block, [None] * BLOCK)
                cells[position % BLOCK] = chunk.sequence.token_ids[position]
        for chunk in chunks:
            self.check(chunk.sequence, chunk.start + chunk.count)
        self._copy(plan.copies_after)
        sampled: list[Sequence] = []
        for chunk in chunks:
            assert chunk.is_last or not chunk.siblings
            if chunk.is_last:
                sampled += [chunk.sequence, *(chunk.siblings or [])]
        for sequence in sampled:
            self.check(sequence, len(sequence.token_ids))
        return sampled

    def check(self, sequence: Sequence, length: int) -> None:
        held = [token for block in sequence.blocks for token in self.content.get(block, [None] * BLOCK)]
        assert held[:length] == sequence.token_ids[:length]

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            self.content[target] = list(self.content[source])


def run(scheduler: Scheduler, memory: Memory, steps: int = 10_000) -> int:
    """Generate until nothing is left; the token after a prefix is a function of the sequence."""
    computed = 0
    for _ in range(steps):
        plan = scheduler.plan_step()
        if plan is None:
            break
        computed += len(plan.decode) + sum(chunk.count for chunk in plan.chunks)
        ended = []
        sampled = memory.execute(plan)
        scheduler.plan_ahead(plan)
        for sequence in sampled:
            sequence.append((id(sequence) + len(sequence.token_ids)) % 1000, 0.0, "0")
            if sequence.num_output >= sequence.params.max_new_tokens:
                ended.append((sequence, DONE))
        scheduler.finish_many(ended)
        check_scheduler(scheduler)
    return computed


def test_siblings_cost_one_prefill():
    scheduler, memory = make(), Memory()
    siblings = [request(10, group="g", new=1) for _ in range(8)]
    for sequence in siblings:
        scheduler.add(sequence)
    plan = scheduler.plan_step()
    assert plan is not None
    assert [(chunk.start, chunk.count, len(chunk.siblings or [])) for chunk in plan.chunks] == [(0, 10, 7)]
    assert len(plan.copies_after) == 7  # the two tokens in the third block
    assert scheduler.num_used_tokens == BLOCK * (2 + 8)  # two whole blocks held by all, one tail each
    assert len(memory.execute(plan)) == 8
    scheduler.finish_many([(sequence, DONE) for sequence in siblings])
    assert scheduler.num_used_tokens == 0
    assert [sequence.num_cached for sequence in siblings] == [0] + [10] * 7


def test_a_late_sibling_computes_what_is_not_in_a_full_block():
    scheduler, memory = make(), Memory()
    scheduler.add(request(10, group="g"))
    run(scheduler, memory, steps=2)
    late = request(10, group="g")
    scheduler.add(late)
    plan = scheduler.plan_step()
    assert plan is not None
    assert [sequence.num_computed for sequence in plan.decode] == [12]
    assert [(chunk.start, chunk.count) for chunk in plan.chunks] == [(8, 2)]
    assert late.num_cached == 8
    memory.execute(plan)


def test_full_blocks_are_computed_once_also_for_other_groups_and_after_the_end():
    scheduler, memory = make(), Memory()
    for group in ("a", "b", "", ""):
        scheduler.add(request(10, group=group))
    assert run(scheduler, memory) == 10 + 3 * 2 + 4 * 3
    scheduler.add(request(10))
    assert run(scheduler, memory) == 2 + 3
    scheduler.forget_prefixes()
    scheduler.add(request(10))
    assert run(scheduler, memory) == 10 + 3
    scheduler.keeps_prefixes = False
    scheduler.add(request(10))
    assert run(scheduler, memory) == 10 + 3


def test_long_prompts_are_cut_and_do_not_stop_decoding():
    scheduler, memory = make(budget=16, blocks=64), Memory()
    short, long = request(3, new=10), request(40, new=2)
    scheduler.add(short)
    run(scheduler, memory, steps=1)
    scheduler.add(long)
    chunks = []
    for _ in range(3):
        plan = scheduler.plan_step()
        assert plan is not None
        assert plan.decode == [short]
        chunks.append([(chunk.sequence is long, chunk.count) for chunk in plan.chunks])
        for sequence in memory.execute(plan):
            sequence.append(7, 0.0, "0")
    assert chunks == [[(True, 16)], [(True, 16)], [(True, 8)]]


def test_a_full_cache_preempts_the_youngest():
    scheduler, memory = make(blocks=4), Memory()
    old, young = request(7, new=6), request(7, new=6)
    scheduler.add(old)
    scheduler.add(young)
    run(scheduler, memory, steps=2)
    plan = scheduler.plan_step()  # token 9 of the old one needs a third block
    assert plan is not None
    assert (plan.decode, plan.chunks) == ([old], [])
    assert young.status is Status.WAITING
    assert young.num_retractions == 1
    assert scheduler.num_preemptions == 1
    for sequence in memory.execute(plan):
        sequence.append(1, 0.0, "0")
    run(scheduler, memory)
    assert (old.num_output, young.num_output) == (6, 6)
    assert scheduler.num_used_tokens == 0


def test_retracted_sequences_keep_their_order():
    scheduler, memory = make(max_running=3), Memory()
    sequences = [request(4) for _ in range(5)]
    for sequence in sequences:
        scheduler.add(sequence)
    run(scheduler, memory, steps=2)
    scheduler.retract_all()
    check_scheduler(scheduler)
    assert list(scheduler.waiting) == sequences
    assert scheduler.num_used_tokens == 0


def test_finishing_twice_is_harmless():
    scheduler = make()
    sequence = request(4)
    scheduler.add(sequence)
    scheduler.plan_step()
    scheduler.finish(sequence, DONE)
    scheduler.finish(sequence, FinishReason(kind="abort"))
    assert sequence.finish == DONE
    assert scheduler.plan_step() is None


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20), st.sampled_from(["", "a", "b"]), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("retract")),
        st.tuples(st.just("forget")),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(ACTIONS, st.integers(1, 5), st.integers(1, 24), st.integers(8, 24))
def test_random_operations_keep_the_scheduler_consistent(actions, max_running, budget, blocks):
    scheduler, memory = make(blocks, max_running=max_running, budget=budget), Memory()
    sequences: list[Sequence] = []
    for action in actions:
        if action[0] == "add":
            _, length, group, new = action
            # Members of a group have prompts with a common beginning of 9 tokens.
            sequence = request(length, group=group, new=new, first=len(sequences) if not group else ord(group))
            if group and length > 9:
                sequence.token_ids[9:] = [len(sequences) % 2] * (length - 9)
            sequences.append(sequence)
            scheduler.add(sequence)
        elif action[0] == "step":
            run(scheduler, memory, steps=action[1])
        elif action[0] == "abort" and sequences:
            scheduler.finish(sequences[action[1] % len(sequences)], FinishReason(kind="abort"))
        elif action[0] == "retract":
            scheduler.retract_all()
        elif action[0] == "forget":  # as an update that keeps the requests
            scheduler.retract_all()
            scheduler.forget_prefixes()
            memory.content.clear()
        check_scheduler(scheduler)
    run(scheduler, memory)
    for sequence in sequences:
        assert sequence.finish is not None
        assert sequence.finish.kind == "abort" or sequence.num_output == sequence.params.max_new_tokens
    assert scheduler.num_used_tokens == 0


def test_the_block_pool_counts_references():
    pool = BlockPool(4, BLOCK)
    blocks = pool.allocate(3)
    assert blocks == [0, 1, 2]
    assert pool.allocate(2) is None
    pool.share(blocks[:1])
    pool.release(blocks)
    assert pool.num_used == 1
    check_pool(pool, [[0]])
    with pytest.raises(AssertionError, match="block 0"):
        check_pool(pool, [])
    pool.release([0])
    with pytest.raises(ValueError, match="block "):
        pool.release([0])
    with pytest.raises(ValueError, match="block "):
        pool.share([0])
    assert [pool.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
