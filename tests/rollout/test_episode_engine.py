"""The engine of an episode: it waits for a trainer that recovers, and sends again what an older policy answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from areal.api.config import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse
from areal.api.engine import InferenceEngine
from areal.rollout.executor import EpisodeEngine


class Policy(InferenceEngine):
    """Serves version 5; the first answer to each request in `old` is of version 4."""

    version = 5

    def __init__(self, old: str) -> None:
        self.old = set(old)
        self.asked: list[str] = []
        self.groups: list[int] = []

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
    found = await group
    assert policy.asked == ["a", "b", "c", "a", "b"]
    assert policy.groups == [3, 2]
    assert [one.request_id for one in found] == ["a", "b", "c"]
    assert [one.output_versions[0] for one in found] == [5, 5, 5]
    assert len(counted) == 5
    assert list(engine.answers) == [found[2], *found[:2]]
    assert (engine.replicas, engine.num_interruptions) == (["server-5"], 3)


async def test_answers_of_a_group_keep_a_temperature_other_than_that_of_the_run() -> None:
    engine = EpisodeEngine(Policy(old="b"), lambda answer: None, temperature=0.5)
    found = await engine.agenerate_group(requests("ab"))
    assert [one.temperature for one in found] == [1.0, 1.0]
    assert [one.output_versions[0] for one in found] == [5, 4]
