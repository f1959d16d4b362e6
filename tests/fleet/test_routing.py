"""Requests go where their group is, where there is room, or where their prompt is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.config.inference import GenerationHyperparameters
from areal.api.data import GenerationRequest
from areal.fleet.routing import BLOCK_TOKENS, OVERLOAD_SLACK, PrefixMemory, Router, prefix_blocks

POLICIES = ["round_robin", "least_loaded", "prefix_affinity"]


class Candidate:
    def __init__(self, name: str, num_running: int = 0) -> None:
        self.name = name
        self.num_running = num_running
        self.prefixes = PrefixMemory()


def of(group_id: str = "", input_ids: list[int] | None = None, adapter: str = "") -> GenerationRequest:
    ids = [1, 2, 3] if input_ids is None else input_ids
    gconfig = GenerationHyperparameters()
    return GenerationRequest(request_id="r", input_ids=ids, gconfig=gconfig, group_id=group_id, adapter=adapter)


def prompt(number: int, num_blocks: int, *, after: list[int] | None = None) -> list[int]:
    """Blocks that no other number has, after some that may be shared."""
    return [*(after or []), *(number * 10**6 + i for i in range(num_blocks * BLOCK_TOKENS))]


def test_routing_by_load_and_in_turn() -> None:
    candidates = [Candidate("a", 2), Candidate("b", 1), Candidate("c", 1)]
    by_load = Router("least_loaded")
    assert {by_load.pick(candidates, of()).name for _ in range(6)} == {"b", "c"}
    in_turn = Router("round_robin")
    assert sorted(in_turn.pick(candidates, of()).name for _ in range(6)) == ["a", "a", "b", "b", "c", "c"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_stays_where_it_is_until_its_replica_is_gone(policy: str) -> None:
    router = Router(policy, max_groups=2)
    a, b = Candidate("a"), Candidate("b", 5)
    first = router.pick([a, b], of("g"))
    second = b if first is a else a
    first.num_running = 99
    assert router.pick([a, b], of("g")) is first
    assert router.pick([a, b], of("g"), avoid=first.name) is second
    assert router.pick([a, b], of("g")) is second  # and then stays there
    assert router.pick([first], of("g")) is first
    assert router.pick([a], of(), avoid="a") is a  # the only one there is
    router.pick([b], of("h"))
    router.pick([b], of("i"))
    assert len(router._replica_of) == 2


def test_a_prompt_goes_to_the_replica_that_has_its_longest_prefix() -> None:
    router = Router("prefix_affinity")
    fleet = [Candidate(name) for name in "abcd"]
    shared = prompt(1, 3)
    knows_three = router.pick(fleet, of(input_ids=shared))
    others = [one for one in fleet if one is not knows_three]
    knows_five = router.pick(others, of(input_ids=prompt(2, 2, after=shared)))
    knows_three.num_running, knows_five.num_running = 3, 6  # busy, and chosen all the same
    assert router.pick(fleet, of(input_ids=prompt(3, 2, after=shared))) in (knows_three, knows_five)
    assert router.pick(fleet, of(input_ids=prompt(2, 2, after=shared) + [7] * 200)) is knows_five
    assert router.pick(fleet, of(input_ids=prompt(4, 6))).num_running == 0  # nobody knows it: by load
    assert router.pick(fleet, of(input_ids=prompt(2, 2, after=shared), adapter="lora-v1")).num_running == 0


def test_the_least_loaded_of_equal_replicas_is_chosen() -> None:
    router = Router("prefix_affinity")
    a, b, c = Candidate("a", 4), Candidate("b", 2), Candidate("c", 0)
    for one in (a, b):
        one.prefixes.add(prefix_blocks(of(input_ids=prompt(1, 2))))
    assert router.pick([a, b, c], of(input_ids=prompt(1, 2))) is b


def test_an_overloaded_replica_loses_its_affinity_and_common_prefixes_spread() -> None:
    router = Router("prefix_affinity")
    fleet = [Candidate(name) for name in "abc"]
    shared = prompt(1, 4)
    for _ in range(120):
        router.pick(fleet, of(input_ids=shared)).num_running += 1
        loads = [one.num_running for one in fleet]
        assert max(loads) <= 1.5 * min(loads) + OVERLOAD_SLACK + 1
    assert all(one.prefixes.num_known(prefix_blocks(of(input_ids=shared))) == 4 for one in fleet)
    fleet[0].num_running = 1000  # one that is stuck
    assert router.pick(fleet, of(input_ids=shared)) is not fleet[0]


def test_affinity_is_forgotten_with_the_cache() -> None:
    router = Router("prefix_affinity")
    a, b = Candidate("a", 2), Candidate("b", 0)
    a.prefixes.add(prefix_blocks(of(input_ids=prompt(1, 2))))
    assert router.pick([a, b], of(input_ids=prompt(1, 2))) is a
    a.prefixes.clear()
    assert router.pick([a, b], of(input_ids=prompt(1, 2))) is b


def test_only_full_blocks_count_and_each_includes_all_before_it() -> None:
    assert prefix_blocks(of(input_ids=[1] * (BLOCK_TOKENS - 1))) == []
    first, second = prompt(1, 1), prompt(2, 1)
    assert prefix_blocks(of(input_ids=first + second))[1] != prefix_blocks(of(input_ids=second + second))[1]
    assert prefix_blocks(of(input_ids=first + second))[0] == prefix_blocks(of(input_ids=[*first, 9]))[0]


@given(seed=st.integers(0, 2**32), max_blocks=st.integers(1, 12))
def test_the_prefix_memory_is_bounded_and_contiguous(seed: int, max_blocks: int) -> None:
    """Against a search from the front, so the bisection finds what is there."""
    rng = random.Random(seed)
    memory = PrefixMemory(max_blocks)
    chains = [[0, *(chain * 100 + i for i in range(1, 8))] for chain in range(1, 4)]
    for _ in range(30):
        chain = rng.choice(chains)[: rng.randint(0, 8)]
        memory.add(chain)
        assert len(memory) <= max_blocks
        assert memory.num_known(chain) == min(len(chain), max_blocks)  # what was just used stays
        for other in chains:
            known = [block in memory._blocks for block in other]
            assert known == sorted(known, reverse=True)
            assert memory.num_known(other) == sum(known)
