"""Requests go where their group is, where there is room, or where their prompt is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest
from areal.fleet.routing import BLOCK_TOKENS, FEW_HOLDERS, OVERLOAD_SLACK, LoadOrder, PrefixIndex, Router, prefix_blocks

POLICIES = ["round_robin", "least_loaded", "prefix_affinity"]


class Candidate:
    def __init__(self, name: str, num_running: int = 0) -> None:
        self.name = name
        self.num_running = num_running


def router_of(policy: str, *candidates: Candidate, max_groups: int = 100) -> Router[Candidate]:
    router: Router[Candidate] = Router(policy, max_groups=max_groups)
    for candidate in candidates:
        router.serving.add(candidate)
    return router


def of(group_id: str = "", input_ids: list[int] | None = None, adapter: str = "") -> GenerationRequest:
    ids = [1, 2, 3] if input_ids is None else input_ids
    gconfig = GenerationHyperparameters()
    return GenerationRequest(request_id="r", input_ids=ids, gconfig=gconfig, group_id=group_id, adapter=adapter)


def prompt(number: int, num_blocks: int, *, after: list[int] | None = None) -> list[int]:
    """Blocks that no other number has, after some that may be shared."""
    return [*(after or []), *(number * 10**6 + i for i in range(num_blocks * BLOCK_TOKENS))]


def test_routing_by_load_and_in_turn() -> None:
    candidates = [Candidate("a", 2), Candidate("b", 1), Candidate("c", 1)]
    by_load = router_of("least_loaded", *candidates)
    assert [by_load.pick(of()).name for _ in range(6)] == ["b", "c"] * 3
    in_turn = router_of("round_robin", *candidates)
    assert [in_turn.pick(of()).name for _ in range(6)] == ["a", "b", "c"] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_stays_where_it_is_until_its_replica_is_gone(policy: str) -> None:
    a, b = Candidate("a"), Candidate("b", 5)
    router = router_of(policy, a, b, max_groups=2)
    first = router.pick(of("g"))
    second = b if first is a else a
    router.serving.change(first, 99)
    assert router.pick(of("g")) is first
    assert router.pick(of("g"), avoid=first.name) is second
    assert router.pick(of("g")) is second  # and then stays there
    router.serving.remove(second)
    assert router.pick(of("g")) is first
    assert router.pick(of(), avoid=first.name) is first  # the only one there is
    router.pick(of("h"))
    router.pick(of("i"))
    assert len(router._replica_of) == 2


def test_a_prompt_goes_to_the_replica_that_has_its_longest_prefix() -> None:
    fleet = {name: Candidate(name) for name in "abcd"}
    router = router_of("prefix_affinity", *fleet.values())
    shared = prompt(1, 3)
    knows_three = router.pick(of(input_ids=shared))
    knows_five = router.pick(of(input_ids=prompt(2, 2, after=shared)), avoid=knows_three.name)
    router.serving.change(knows_three, 3)
    router.serving.change(knows_five, 6)  # busy, and chosen all the same
    assert router.pick(of(input_ids=prompt(3, 2, after=shared))) is knows_three
    assert router.pick(of(input_ids=prompt(2, 2, after=shared) + [7] * 200)) is knows_five
    assert router.pick(of(input_ids=prompt(4, 6))).num_running == 0  # nobody knows it: by load
    assert router.pick(of(input_ids=prompt(2, 2, after=shared), adapter="lora-v1")).num_running == 0


@pytest.mark.parametrize("num_others", [0, FEW_HOLDERS])
def test_the_least_loaded_of_equal_replicas_is_chosen(num_others: int) -> None:
    a, b, c = Candidate("a", 4), Candidate("b", 2), Candidate("c", 0)
    others = [Candidate(f"o{i}", 5) for i in range(num_others)]
    router = router_of("prefix_affinity", a, b, c, *others)
    for item in (a, b, *others):
        router.prefixes.add(item.name, prefix_blocks(of(input_ids=prompt(1, 2))))
    assert router.pick(of(input_ids=prompt(1, 2))) is b
    router.serving.remove(b)
    assert router.pick(of(input_ids=prompt(1, 2))) is a


def test_a_prefix_of_all_prompts_spreads_over_the_fleet() -> None:
    fleet = [Candidate(name) for name in "abc"]
    router = router_of("prefix_affinity", *fleet)
    shared = prompt(1, 4)
    for _ in range(120):
        router.serving.change(router.pick(of(input_ids=shared)), +1)
        loads = [item.num_running for item in fleet]
        assert max(loads) <= 1.5 * min(loads) + OVERLOAD_SLACK + 1
    assert [router.prefixes.num_blocks(item.name) for item in fleet] == [4, 4, 4]
    router.serving.change(fleet[0], 1000)  # one that is stuck
    assert router.pick(of(input_ids=shared)) is not fleet[0]


def test_affinity_is_forgotten_with_the_cache() -> None:
    a, b = Candidate("a", 2), Candidate("b", 0)
    router = router_of("prefix_affinity", a, b)
    router.prefixes.add("a", prefix_blocks(of(input_ids=prompt(1, 2))))
    assert router.pick(of(input_ids=prompt(1, 2))) is a
    router.prefixes.forget("a")
    router.prefixes.forget("a")
    assert router.pick(of(input_ids=prompt(1, 2))) is b


def test_only_full_blocks_count_and_each_includes_all_before_it() -> None:
    assert prefix_blocks(of(input_ids=[1] * (BLOCK_TOKENS - 1))) == []
    first, second = prompt(1, 1), prompt(2, 1)
    assert prefix_blocks(of(input_ids=first + second))[1] != prefix_blocks(of(input_ids=second + second))[1]
    assert prefix_blocks(of(input_ids=first + second))[0] == prefix_blocks(of(input_ids=[*first, 9]))[0]


@given(seed=st.integers(0, 2**32), max_blocks=st.integers(1, 12))
def test_the_prefix_index_is_bounded_and_equals_a_search_of_every_replica(seed: int, max_blocks: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(max_blocks)
    names, able = ["a", "b", "c"], set("abc")
    known: dict[str, list[int]] = {name: [] for name in names}  # the newest use last
    chains = [[0, *(chain * 100 + i for i in range(1, 8))] for chain in range(1, 4)]
    for _ in range(40):
        name = rng.choice(names)
        if rng.random() < 0.1:
            index.forget(name)
            known[name] = []
        chain = rng.choice(chains)[: rng.randint(0, 8)]
        index.add(name, chain)
        used = chain[:max_blocks]
        known[name] = ([block for block in known[name] if block not in used] + used[::-1])[-max_blocks:]
        assert index.num_blocks(name) == len(known[name])
        able = set(rng.sample(names, rng.randint(0, 3)))
        for other in chains:
            longest = max((sum(block in known[item] for block in other) for item in able), default=0)
            deepest = index.deepest(other, able.__contains__)
            assert deepest == (other[longest - 1] if longest else None)
            for block in other:
                assert sorted(index.holders(block)) == [item for item in names if block in known[item]]
                assert index.max_holders(block) >= len(list(index.holders(block)))
    for name in names:
        index.forget(name)
    for _ in range(100):
        index.add("d", [0])
    assert list(index._holders) == [0]  # nothing of what was forgotten is left
    assert not index._forgotten


@given(seed=st.integers(0, 2**32))
def test_the_order_of_load_equals_a_sort(seed: int) -> None:
    rng = random.Random(seed)
    order: LoadOrder[Candidate] = LoadOrder()
    every = [Candidate(f"s{i}", rng.randint(0, 3)) for i in range(6)]
    serving: set[str] = set()
    for _ in range(60):
        subject = rng.choice(every)
        match rng.choice(["add", "remove", "start", "end", "chosen"]):
            case "add":
                order.add(subject)
                serving.add(subject.name)
            case "remove":
                order.remove(subject)
                serving.discard(subject.name)
            case "start":
                order.change(subject, +1)
            case "end" if subject.num_running:
                order.change(subject, -1)
            case "chosen" if subject.name in serving:
                order.chosen(subject)
                equals = [other.name for other in order.ascending() if other.num_running == subject.num_running]
                assert equals[-1] == subject.name
                assert [other.name for other in order.in_turn()][-1] == subject.name
            case _:
                pass
        result = list(order.ascending())
        assert {other.name for other in result} == serving
        assert [other.num_running for other in result] == sorted(other.num_running for other in result)
        assert len(order) == len(serving)
        assert not serving or order.least_load == result[0].num_running


def test_a_request_of_a_removed_replica_does_not_change_the_load_of_its_successor() -> None:
    order: LoadOrder[Candidate] = LoadOrder()
    old, new = Candidate("a", 1), Candidate("a")
    order.add(old)
    order.remove(old)
    order.add(new)
    order.change(old, -1)
    order.remove(old)
    assert (old.num_running, new.num_running, list(order.ascending())) == (0, 0, [new])
