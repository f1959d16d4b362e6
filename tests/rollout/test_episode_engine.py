"""The engine of an episode: it waits for a trainer that recovers, and sends again what an older policy answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from areal.api.config import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse, TokenChunk
from areal.api.engine import InferenceEngine
from areal.rollout.executor import MAX_KEPT_ANSWERS, EpisodeEngine
from tests.expect import raises_code


class Policy(InferenceEngine):
    """Serves version 5; the first answer to each request in `old` is of version 4."""

    version = 5

    def __init__(self, old: str) -> None:
        self.old = set(old)
        self.asked: list[str] = []
        self.groups: list[int] = []
        self.estimate_error = 0
        """Of the versions in a stream, before the end."""

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        self.asked.append(request.request_id)
        version = 4 if request.request_id in self.old else 5
        self.old.discard(request.request_id)
        return GenerationResponse(
            request_id=request.request_id, input_ids=[1], output_ids=[2, 3], output_logprobs=[-1.0, -1.0],
            output_versions=[version, 5], stop_reason="stop", replicas=[f"server-{version}"], num_interruptions=1,
        )  # fmt: skip

    async def agenerate_group(self, requests: Sequence[GenerationRequest]) -> list[GenerationResponse]:
        self.groups.append(len(requests))
        return await super().agenerate_group(requests)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        result = await self.agenerate(request)
        yield TokenChunk([2], [-1.0], [result.output_versions[0] + self.estimate_error])
        yield TokenChunk([3], [-1.0], [5], result)


def requests(names: Sequence[str]) -> list[GenerationRequest]:
    return [GenerationRequest(request_id=name, input_ids=[1], gconfig=GenerationHyperparameters()) for name in names]


async def test_old_answers_of_a_group_are_requested_again_if_a_trainer_may_recover() -> None:
    policy, counted = Policy(old="ab"), list[GenerationResponse]()
    may_send = asyncio.Event()
    engine = EpisodeEngine(policy, counted.append, may_send=may_send, keep_answers=True)
    group = asyncio.create_task(engine.agenerate_group(requests("abc")))
    await asyncio.sleep(0)
    assert policy.asked == []
    may_send.set()
    result = await group
    assert policy.asked == ["a", "b", "c", "a", "b"]
    assert policy.groups == [3, 2]
    assert [item.request_id for item in result] == ["a", "b", "c"]
    assert [item.output_versions[0] for item in result] == [5, 5, 5]
    assert len(counted) == 5
    assert list(engine.answers) == [result[2], *result[:2]]
    assert (engine.replicas, engine.num_interruptions) == (["server-5"], 3)


async def test_answers_of_an_older_policy_are_none_of_the_episode() -> None:
    counted = list[GenerationResponse]()
    engine = EpisodeEngine(Policy(old=""), counted.append, keep_answers=True, temperature=0.5)
    ours, other, streamed = requests("abc")
    result = await engine.agenerate_group([ours, replace(other, adapter="policy-v000001")])
    assert [item.request_id for item in result] == ["a", "b"]
    async with aclosing(engine.stream(replace(streamed, adapter="policy-v000001"))) as chunks:
        assert [chunk.token_ids async for chunk in chunks] == [[2], [3]]
    assert (engine.num_answers, engine.num_tokens, engine.num_interruptions) == (1, 2, 1)
    assert engine.answers == result[:1]
    assert [item.request_id for item in counted] == ["a"]


async def test_answers_of_a_group_keep_a_temperature_other_than_that_of_the_run() -> None:
    engine = EpisodeEngine(Policy(old="b"), lambda answer: None, temperature=0.5)
    result = await engine.agenerate_group(requests("ab"))
    assert [item.temperature for item in result] == [1.0, 1.0]
    assert [item.output_versions[0] for item in result] == [5, 4]


async def test_a_stream_that_an_older_policy_begins_is_requested_again_before_it_is_seen() -> None:
    policy, counted, may_send = Policy(old="a"), list[GenerationResponse](), asyncio.Event()
    may_send.set()
    engine = EpisodeEngine(policy, counted.append, may_send=may_send, keep_answers=True, temperature=0.5)
    async with aclosing(engine.stream(requests("a")[0])) as chunks:
        result = [chunk async for chunk in chunks]
    assert policy.asked == ["a", "a"]
    assert [(chunk.token_ids, chunk.versions) for chunk in result] == [([2], [5]), ([3], [5])]
    assert [result[-1].response, result[-1].response.temperature] == [engine.answers[0], 1.0]  # pyright: ignore[reportOptionalMemberAccess]
    assert (len(counted), engine.replicas) == (1, ["server-5"])


async def test_a_stream_whose_older_policy_shows_at_its_end_fails() -> None:
    policy, may_send = Policy(old="a"), asyncio.Event()
    may_send.set()
    policy.estimate_error = 1
    engine = EpisodeEngine(policy, lambda answer: None, may_send=may_send)
    with raises_code("server.unreadable_answer"):
        async with aclosing(engine.stream(requests("a")[0])) as chunks:
            _ = [chunk async for chunk in chunks]
    assert engine.replicas == []


async def test_the_newest_answers_are_kept_for_a_reader() -> None:
    engine = EpisodeEngine(Policy(old=""), lambda answer: None, keep_answers=True)
    for count in range(1, MAX_KEPT_ANSWERS + 3):
        await engine.agenerate_group(requests([f"{count}"]))
        first = max(count - MAX_KEPT_ANSWERS, 0) + 1
        assert [item.request_id for item in engine.answers] == [f"{name}" for name in range(first, count + 1)]
    without = EpisodeEngine(Policy(old=""), lambda answer: None)
    await without.agenerate_group(requests("a"))
    assert without.answers == []
