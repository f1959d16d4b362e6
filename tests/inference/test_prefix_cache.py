"""The prefix cache: what finds a block, which block is taken first, and that it changes no bit of an answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.api.config import NativeServerConfig
from areal.inference.prefix_cache import BlockPool, extend_keys
from areal.inference.scheduler import PlacedImage, Sequence
from tests.inference.integrity import check_pool

BLOCK = 4
ALIKE = ["qwen2-tied", "qwen3-gqa", "llama", "qwen2-windows", "mistral-window"]
"""Families whose products and attention have the same bits for any number of rows."""


def keys_of(token_ids: list[int], *images: PlacedImage) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, token_ids, images, len(token_ids) // BLOCK, BLOCK)
    return keys


def image(sha256: str, start: int, count: int) -> PlacedImage:
    colours = np.zeros((1, 1, 3), np.uint8)
    return PlacedImage(sha256=sha256, start=start, count=count, grid=(1, 1, 1), shift_after=0, colours=colours)


def test_a_key_stands_for_all_tokens_up_to_the_end_of_its_block():
    ids = list(range(13))
    keys = keys_of(ids)
    assert len(set(keys)) == 3
    assert keys_of(ids[:9]) == keys[:2]
    for place in range(12):
        other = keys_of([*ids[:place], 99, *ids[place + 1 :]])
        assert [left == right for left, right in zip(keys, other, strict=True)] == [
            number < place // BLOCK for number in range(3)
        ]
    assert keys_of([0, 0, 0, 0] * 2)[0] != keys_of([0, 0, 0, 0] * 2)[1]


def test_a_key_stands_for_the_images_up_to_the_end_of_its_block():
    ids = [7] * 12
    plain, first = keys_of(ids), keys_of(ids, image("a", 5, 2))
    assert [left == right for left, right in zip(plain, first, strict=True)] == [True, False, False]
    for other in (image("b", 5, 2), image("a", 4, 2), image("a", 6, 2)):
        assert keys_of(ids, other)[1] != first[1]
    wide = keys_of(ids, image("a", 2, 9))
    assert len({*wide, *keys_of(ids, image("b", 2, 9))}) == 6


def test_the_least_recently_used_block_is_taken_first_and_the_end_before_its_beginning():
    pool = BlockPool(6, BLOCK)
    old, new = keys_of([1] * 12), keys_of([2] * 12)
    held = {}
    for keys in (old, new):
        held[keys[0]] = pool.allocate(3)
        for block, key in zip(held[keys[0]], keys, strict=True):
            pool.name(block, key)
        pool.release(held[keys[0]])
    assert (pool.num_used, pool.num_cached) == (0, 6)
    result = pool.find(old[:2])  # used again: now the newest
    assert result == held[old[0]][:2]
    pool.release(result)
    taken = []
    for _ in range(6):
        taken += pool.allocate(1)
        check_pool(pool, [taken])
    assert taken == [*reversed(held[old[0]][2:]), *reversed(held[new[0]]), *reversed(result)]
    assert (pool.allocate(1), pool.num_evicted, pool.find(old)) == (None, 6, [])


def test_a_referenced_block_is_never_taken_and_a_second_one_with_its_tokens_is_not_kept():
    pool = BlockPool(3, BLOCK)
    (first,), (second,) = pool.allocate(1), pool.allocate(1)
    (key,) = keys_of([5] * 4)
    pool.name(first, key)
    pool.name(second, key)
    assert pool.find([key, b"no such key"]) == [first]
    assert pool.allocate(2) is None
    pool.release([first])
    pool.release([second])
    check_pool(pool, [[first]])
    assert sorted(pool.allocate(2)) == sorted({0, 1, 2} - {first})
    pool.forget([first])
    pool.release([first])
    assert (pool.find([key]), pool.num_cached) == ([], 0)


def fresh(driver, sequence: Sequence, start: int, end: int) -> Sequence:
    """The tokens start..end-1 of an answer, made by a driver that has nothing in its cache."""
    driver.engine.scheduler.keeps_prefixes = False
    again = driver.add(
        sequence.token_ids[: sequence.num_prompt + start],
        temperature=1.0,
        seed=sequence.seed,
        max_new_tokens=end - start,
    )
    driver.run()
    return again


@pytest.mark.parametrize(
    ("family", "prefill", "packed"),
    [(family, 13, True) for family in ALIKE]
    + [("qwen2-tied", 512, True), ("llama", 512, False), ("qwen3-gqa", 13, False)],
)
def test_an_answer_has_the_same_bits_beside_others_in_parts_and_from_the_cache(
    family, prefill, packed, build_model, drive, monkeypatch
):
    if packed:
        monkeypatch.setattr(NativeServerConfig, "packed_bytes", staticmethod(lambda size: size))
    model = build_model(family)
    generator = torch.Generator().manual_seed(1)
    history = torch.randint(0, 50, (200,), generator=generator).tolist()
    driver = drive(model, max_prefill_tokens=prefill, max_running=5)
    made = [
        driver.add(history[:length], temperature=1.0, seed=length, max_new_tokens=20)
        for length in (1, 5, 16, 17, 60, 130, 200)
    ]
    driver.run()
    made += [driver.add(item.token_ids, temperature=1.0, seed=7, max_new_tokens=12) for item in made]
    driver.run()
    assert [item.num_cached for item in made[7:]] == [(item.num_prompt - 1) // 16 * 16 for item in made[7:]]
    for each in made:
        for start in {0, each.num_output // 2}:
            again = fresh(drive(model), each, start, each.num_output)
            assert (again.token_ids, again.logprobs) == (each.token_ids, each.logprobs[start:])


Action = st.tuples(st.sampled_from(["add", "add", "step", "step", "abort", "update"]), st.integers(0, 60))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(Action, min_size=8, max_size=24), blocks=st.integers(8, 20), budget=st.sampled_from([9, 64]))
def test_answers_are_those_without_a_cache_under_preemption_and_updates(
    actions, blocks, budget, build_model, drive, monkeypatch
):
    """Random prompts that begin alike, in a cache so small that requests are preempted and blocks are taken."""
    models = [build_model("qwen2-tied", 0), build_model("qwen2-tied", 1)]
    driver, made = drive(models[0], num_blocks=blocks, max_prefill_tokens=budget, max_running=6), []
    weights = driver.engine.weights
    for number, (action, size) in enumerate(actions):
        if action == "add":
            prompt = [3] * (size % 40) + [size % 3] * (1 + size % 7)
            made.append(driver.add(prompt, temperature=1.0, seed=number, max_new_tokens=1 + size % 30))
        elif action == "abort" and made:
            driver.engine._abort([made[size % len(made)]], "test")
        elif action == "update":
            version = 1 - int(driver.engine.version)
            weights.start(str(number))
            for name, value in models[version].named_parameters():
                weights.receive_value(name, value.detach())
            driver.engine.install_weights(str(version), ["retract", "abort"][size % 2], str(number))
        for _ in range(size % 5 if action == "step" else 0):
            if driver.engine.scheduler.running or driver.engine.scheduler.waiting:
                driver.steps(1)
    driver.run()
    for sequence in made:
        for version, start, end in sequence.version_spans(0, sequence.num_output):
            again = fresh(drive(models[int(version)]), sequence, start, end)
            assert again.logprobs == sequence.logprobs[start:end]
            assert again.token_ids == sequence.token_ids[: sequence.num_prompt + end]


async def test_a_session_computes_only_its_new_tokens_until_the_weights_change(served, checkpoint):
    history, seed = [3, 4, 5, 6, 7] * 8, 0

    async def turn() -> tuple[int, list[int], list[float]]:
        sampling = {"max_new_tokens": 20, "temperature": 1.0, "sampling_seed": seed}
        answer = await served.generate(input_ids=history, sampling_params=sampling)
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        return answer["meta_info"]["cached_tokens"], answer["output_ids"], logprobs

    cached = []
    for seed in range(4):
        if seed == 2:
            update = {"model_path": str(checkpoint(1)), "weight_version": "1"}
            await served.post("/update_weights_from_disk", update)
        num_cached, tokens, logprobs = await turn()
        cached.append(num_cached)
        figures = await served.get("/server_info")
        await served.post("/flush_cache")
        assert await turn() == (0, tokens, logprobs)
        history += tokens + [seed] * 10
    assert cached == [0, 48, 0, 112]
    assert figures["kv_tokens_cached"] > 0
    assert figures["kv_tokens_used"] == 0
    assert figures["prefilled_tokens_total"] == sum([40, 70 - 48, 100, 130 - 112, 40, 70, 100])
    assert figures["cached_tokens_total"] == sum(cached)
    assert figures["evicted_tokens_total"] == 0
