"""The tensors of decode rows, which change in place, are those that a rebuild from the sequences gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad, scaled_dot_product_attention

from areal.inference import engine as sampler
from areal.inference.attention import decode_queries, padded_keys
from areal.inference.decode_rows import DecodeRows, SampledRows, _scramble
from areal.inference.prefix_cache import BlockPool
from areal.inference.scheduler import FinishReason, SamplingParams, Scheduler, Sequence, StepPlan
from tests.inference.integrity import check_scheduler
from tests.inference.test_paged_kernel import with_graphs

BLOCK, SPARE = 4, 40
DONE = FinishReason(kind="length")


def check(rows: DecodeRows, plan: StepPlan) -> None:
    started = [chunk.sequence for chunk in plan.chunks if chunk.count == 1]
    assert set(rows.sequences) == {*plan.decode, *started}
    assert len(rows.sequences) == len(plan.decode) + len(started)
    numbers, table = rows.inputs.numbers.tolist(), rows.inputs.blocks
    if rows.sequences:
        width = max(len(sequence.blocks) for sequence in rows.sequences)
        assert table.shape == tuple(1 << (size - 1).bit_length() for size in (len(rows), width))
    for row, sequence in enumerate(rows.sequences):
        start, held = sequence.num_computed - 1, sequence.blocks
        assert table[row].tolist() == held + [held[0]] * (table.shape[1] - len(held))
        slot = held[start // BLOCK] * BLOCK + start % BLOCK
        token, seed, *places = (numbers[field][row] for field in range(5))
        assert (token, places) == (sequence.token_ids[start], [start + 7, start + 1, slot])
        assert seed == _scramble(torch.tensor([sequence.seed])).item()
        assert rows.lengths[row] == start + 1
    for row in range(len(rows), len(table)):
        assert table[row].tolist() == [SPARE] * table.shape[1]
        assert [field[row] for field in numbers] == [0, 0, 0, 1, SPARE * BLOCK]
    sampled, fresh = rows.sampled(), SampledRows.of(rows.sequences, torch.device("cpu"))
    assert sampled.special == fresh.special
    heat = [sequence.params.temperature or 1.0 for sequence in rows.sequences]
    assert (sampled.temperatures is None) == (set(heat) <= {1.0})
    assert sampled.temperatures is None or sampled.temperatures.tolist() == heat


Step = st.tuples(st.sampled_from(["add", "group", "abort", "retract", "in_place", "step"]), st.integers(0, 30))


@settings(max_examples=60, deadline=None)
@given(
    actions=st.lists(Step, min_size=10, max_size=60), blocks=st.integers(9, SPARE), budget=st.sampled_from([1, 5, 64])
)
def test_rows_that_change_in_place_are_those_of_a_rebuild(actions, blocks, budget):
    """Joins, leaves, preemptions, new blocks, shared prefixes and weight updates, which retract requests or not."""
    scheduler = Scheduler(BlockPool(blocks, BLOCK), max_running=6, max_prefill_tokens=budget)
    rows = DecodeRows(BLOCK, torch.device("cpu"), spare_block=SPARE)
    for number, (action, size) in enumerate(actions):
        if action in ("add", "group"):
            length = 1 + size % 12
            params = SamplingParams(
                max_new_tokens=1 + size, temperature=1.0 - size % 2 / 2, top_k=3 if size > 25 else -1
            )
            for sibling in range(3 if action == "group" else 1):
                group = f"group-{number}" if action == "group" else ""
                made = Sequence(
                    request_id="r", token_ids=list(range(length)), num_prompt=length, params=params, group_id=group,
                    seed=number * 10 + sibling,
                )  # fmt: skip
                made.position_shift = 7
                if length + params.max_new_tokens <= blocks * BLOCK:
                    scheduler.add(made)
        elif action == "abort" and scheduler.running:
            scheduler.finish(scheduler.running[size % len(scheduler.running)], DONE)
        elif action == "retract":
            scheduler.retract_all()
        elif action == "in_place":
            scheduler.forget_prefixes()
        if (plan := scheduler.plan_step()) is None:
            continue
        rows.update(plan, [chunk.sequence for chunk in plan.chunks if chunk.count == 1])
        check(rows, plan)
        sampled = [*rows.sequences]
        if plan.chunks:
            last = [chunk for chunk in plan.chunks if chunk.is_last]
            sampled = plan.decode + [item for chunk in last for item in (chunk.sequence, *chunk.siblings)]
        else:
            rows.take_tokens(torch.tensor([(number + row) % 50 for row in range(len(sampled))]))
        scheduler.plan_ahead(plan)
        for row, sequence in enumerate(sampled):
            sequence.append((number + row) % 50, 0.0, "0")
        scheduler.finish_many([(item, DONE) for item in sampled if item.num_output >= item.params.max_new_tokens])
        check_scheduler(scheduler)


def test_random_numbers_of_a_device_are_those_of_numpy():
    """Both are int64, whose products wrap; the shifts of the reference are those of unsigned numbers."""
    seeds = np.array([0, 1, 2**62, 2**63 - 1, 12345], dtype=np.int64)
    wanted = []
    for seed in seeds.tolist():
        value = (seed + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        wanted.append(value ^ (value >> 31))
    for actual in (_scramble(seeds), _scramble(torch.from_numpy(seeds)).numpy()):
        assert actual.astype(np.uint64).tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drawing_by_parts_is_inversion_and_does_not_depend_on_other_rows(dtype):
    size, count = 1000, 64  # eight parts, the last one with a rest
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(count, size, generator=generator)).to(dtype)
    logits[:, 300:700] = -torch.inf
    sequences = [
        Sequence(
            request_id="r", token_ids=[0] * (1 + n), num_prompt=1, seed=n,
            params=SamplingParams(temperature=0.5 + n % 3 / 2),
        )
        for n in range(count)
    ]  # fmt: skip
    rows = SampledRows.of(sequences, logits.device)
    tokens, logprobs = sampler.sample(logits, rows).read()
    assert rows.temperatures is not None
    exact = (logits.double() / rows.temperatures[:, None]).log_softmax(-1)
    sums = exact.exp().cumsum(-1)
    for row, (token, uniform) in enumerate(zip(tokens, rows.uniforms().tolist(), strict=True)):
        assert sums[row, token] > uniform - 1e-5
        assert token == 0 or sums[row, token - 1] < uniform + 1e-5
        assert not 300 <= token < 700
    assert logprobs == pytest.approx([exact[row, token].item() for row, token in enumerate(tokens)], abs=1e-5)
    alone = [
        sampler.sample(logits[row : row + 1], SampledRows.of([each], logits.device)).read()
        for row, each in enumerate(sequences)
    ]
    assert [([token], [logprob]) for token, logprob in zip(tokens, logprobs, strict=True)] == alone


def test_a_version_change_is_seen_by_requests_that_nothing_else_is_due_for(build_model, drive, prompts, monkeypatch):
    """Also that steps with graphs take the drawn tokens from the tensor."""
    with_graphs(monkeypatch)
    driver = drive(build_model("qwen3-gqa"), version="3")
    sequence = driver.add(prompts[0], max_new_tokens=40, temperature=1.0)
    sequence.stream_interval = 0
    driver.steps(10)
    assert sequence.look_at == 40
    weights = driver.engine.weights
    weights.check_complete = lambda update_id: None
    driver.engine.install_weights("4", "in_place")
    driver.run()
    assert sequence.version_spans(0, 40) == [("3", 0, 10), ("4", 10, 40)]


@pytest.mark.parametrize("scale", [0.0, 0.5, 8.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_restricted_rows_draw_what_a_sort_of_the_vocabulary_gives(scale, rounded):
    """Also with many equal logits, beside rows for which no selection is enough, and alone."""
    size, count = 5000, 30
    generator = torch.Generator().manual_seed(3)
    logits = scale * torch.randn(count, size, generator=generator)
    logits = logits.bfloat16().float() if rounded else logits
    options = [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.91}, {"top_p": 0.999}, {"top_k": 3000}]
    sequences = [
        Sequence(request_id="r", token_ids=[0], num_prompt=1, seed=n, params=SamplingParams(**options[n % 5]))
        for n in range(count)
    ]
    rows = SampledRows.of(sequences, logits.device)
    tokens, _ = sampler.sample(logits, rows).read()
    for row, (sequence, uniform) in enumerate(zip(sequences, rows.uniforms().tolist(), strict=True)):
        ordered, places = logits[row].double().sort(descending=True, stable=True)
        top_k, top_p = sequence.params.top_k, sequence.params.top_p
        weights = ordered[: size if top_k < 0 else top_k].softmax(-1)
        before = weights.cumsum(-1) - weights
        weights = weights[before < top_p] if top_p < 1 else weights
        sums = weights.cumsum(-1) / weights.sum()
        rank = places.tolist().index(tokens[row])
        assert rank < len(weights) + 1
        assert sums[min(rank, len(weights) - 1)] > uniform - 1e-3
        assert rank == 0 or sums[rank - 1] < uniform + 1e-3
    alone = [
        sampler.sample(logits[row : row + 1], SampledRows.of([item], logits.device)).read()[0]
        for row, item in enumerate(sequences)
    ]
    assert [[token] for token in tokens] == alone


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("width", [48, 192, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_query_rows_of_a_decode_step_have_the_bits_of_those_of_a_chunk(size, width, dtype):
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(3, width, 2, 2 * size, generator=generator).to(dtype).transpose(1, 2)  # as a gathered group
    keys, values = states[..., :size], states[..., size:]
    mask = torch.zeros(3, 1, 1, width, dtype=dtype).index_fill_(3, torch.arange(width - 5, width), -torch.inf)
    rows = torch.randn(3, 2, 3, size, generator=generator).to(dtype)
    few, many = (
        scaled_dot_product_attention(pad(rows, (0, 0, 0, -3 % count)), keys, values, attn_mask=mask)[:, :, :3]
        for count in (decode_queries(size, dtype), 16)
    )
    assert few.equal(many)


def test_padded_keys_of_an_array_are_those_of_its_items():
    counts = np.arange(1, 1200)
    assert padded_keys(counts).tolist() == [padded_keys(count) for count in counts.tolist()]
    assert [padded_keys(count) for count in (1, 16, 17, 192, 193, 512, 513)] == [16, 16, 32, 192, 512, 512, 528]
