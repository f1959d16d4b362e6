"""However an answer is cut into parts, it is the answer that was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.config.inference import GenerationHyperparameters
from areal.api.data import GenerationRequest
from areal.api.errors import RequestError, ServerUnavailable
from areal.engine.continuation import Answer, token_budget, versions_of
from areal.engine.replica import PartChunk
from areal.engine.routing import Router


def a_request(num_prompt: int = 3, **gconfig: object) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        input_ids=list(range(num_prompt)),
        gconfig=GenerationHyperparameters(**gconfig),  # type: ignore[arg-type]
    )


def chunk(*token_ids: int, version: int = 0, finish: str | None = None) -> PartChunk:
    count = len(token_ids)
    return PartChunk(list(token_ids), [-1.0] * count, [version] * count, finish)  # type: ignore[arg-type]


@given(
    budget=st.integers(1, 60),
    minimum=st.integers(0, 80),
    cuts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=40),
)
def test_parts_add_up_to_the_whole_budget(budget: int, minimum: int, cuts: list[tuple[int, int]]) -> None:
    answer = Answer(a_request(max_new_tokens=budget, min_new_tokens=minimum), stream_interval=8)
    expected: list[int] = []
    for part_index, (size, replica) in enumerate([*cuts, (budget, 0)]):
        if answer.finished:
            break
        part = answer.next_part(f"server-{replica}")
        assert part.input_ids == [0, 1, 2, *expected]
        assert part.num_prior_output_tokens == len(expected)
        assert part.max_new_tokens == budget - len(expected) > 0
        assert part.min_new_tokens <= part.max_new_tokens
        assert part.min_new_tokens == max(0, min(minimum, budget) - len(expected))
        made = list(range(len(expected), min(len(expected) + size, budget)))
        answer.add(chunk(*made, version=part_index, finish=None if len(expected) + size < budget else "length"))
        answer.interrupted()
        expected += made
    response = answer.response(latency_s=1.0, ttft_s=0.5)
    assert response.output_ids == expected == list(range(budget))
    assert response.output_versions == sorted(response.output_versions)
    assert response.stop_reason == "length"
    assert all(a != b for a, b in zip(response.replicas, response.replicas[1:], strict=False))


def test_the_bound_on_prompt_and_answer_together_counts() -> None:
    assert token_budget(GenerationHyperparameters(max_new_tokens=10, max_tokens=8), 3) == 5
    assert token_budget(GenerationHyperparameters(max_new_tokens=4, max_tokens=8), 3) == 4
    with pytest.raises(RequestError, match=r"prompt of 8 tokens leaves no room .*gconfig\.max_tokens=8"):
        token_budget(GenerationHyperparameters(max_tokens=8), 8)


@pytest.mark.parametrize(
    ("gconfig", "finished"),
    [
        ({"stop_token_ids": [9]}, True),
        ({"stop_token_ids": [9], "ignore_eos": True}, False),
        ({"stop_token_ids": [9], "min_new_tokens": 3}, False),
        ({}, False),
    ],
)
def test_a_stop_token_ends_an_answer_whose_last_word_was_lost(gconfig: dict, finished: bool) -> None:
    answer = Answer(a_request(**gconfig), stream_interval=8)
    answer.next_part("server-0")
    answer.add(chunk(5, 9))
    answer.interrupted()
    assert answer.finished == finished


def test_a_replica_that_breaks_the_protocol_is_noticed() -> None:
    answer = Answer(a_request(max_new_tokens=2), stream_interval=8)
    answer.next_part("server-0")
    with pytest.raises(ServerUnavailable, match="server-0 sent more tokens"):
        answer.add(chunk(1, 2, 3))
    with pytest.raises(ServerUnavailable, match="1 tokens with 0 log-probabilities and 1 versions"):
        answer.add(PartChunk([1], [], [0], None))


def test_spans_become_versions() -> None:
    assert versions_of([(4, 0, 3)], 3) == [4, 4, 4]
    assert versions_of([(4, 0, 2), (5, 2, 2), (6, 2, 3)], 3) == [4, 4, 6]
    for wrong in ([(4, 0, 2)], [(4, 0, 1), (5, 2, 3)], [(4, 1, 3)], [(4, 0, 4)], []):
        with pytest.raises(ValueError, match="version spans"):
            versions_of(wrong, 3)


class Candidate:
    def __init__(self, name: str, num_running: int = 0) -> None:
        self.name = name
        self.num_running = num_running


def test_routing_by_load_and_in_turn() -> None:
    candidates = [Candidate("a", 2), Candidate("b", 1), Candidate("c", 1)]
    by_load = Router("least_loaded")
    assert {by_load.pick(candidates, "").name for _ in range(6)} == {"b", "c"}
    in_turn = Router("round_robin")
    assert sorted(in_turn.pick(candidates, "").name for _ in range(6)) == ["a", "a", "b", "b", "c", "c"]


def test_a_group_stays_where_it_is_until_its_replica_is_gone() -> None:
    router = Router("least_loaded", max_groups=2)
    a, b = Candidate("a"), Candidate("b", 5)
    assert router.pick([a, b], "g").name == "a"
    a.num_running = 99
    assert router.pick([a, b], "g").name == "a"
    assert router.pick([a, b], "g", avoid="a").name == "b"
    assert router.pick([a, b], "g").name == "b"  # and then stays there
    assert router.pick([a], "g").name == "a"
    assert router.pick([a], "", avoid="a").name == "a"  # the only one there is
    router.pick([b], "h")
    router.pick([b], "i")
    assert len(router._replica_of) == 2
