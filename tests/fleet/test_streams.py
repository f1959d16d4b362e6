"""A streamed answer passes each token on once, whatever happens to replicas meanwhile."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing

import pytest

from areal.api.data import GenerationResponse, TokenChunk
from areal.api.errors import ServerUnavailable
from areal.fleet.fleet import Answer, Fleet
from areal.fleet.replica import AnswerForm, PartChunk, RequestLimits
from tests.expect import raises_code
from tests.fleet.fake_server import FleetKit, until
from tests.fleet.test_fleet import a_request, assert_whole

INTERVAL = 8


class Streamed:
    """Collects a stream."""

    def __init__(self, fleet: Fleet, num_tokens: int = 100) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.response: GenerationResponse | None = None
        self.task = asyncio.create_task(self._collect(fleet, num_tokens))

    async def _collect(self, fleet: Fleet, num_tokens: int) -> None:
        async with aclosing(fleet.stream(a_request(num_tokens=num_tokens))) as chunks:
            async for chunk in chunks:
                assert self.response is None, "the response is on the last chunk"
                self.ids += chunk.token_ids
                self.logprobs += chunk.logprobs
                self.versions += chunk.versions
                self.response = chunk.response

    async def whole(self) -> GenerationResponse:
        await self.task
        response = self.response
        assert response is not None
        assert (self.ids, self.logprobs) == (response.output_ids, response.output_logprobs)
        return response


@pytest.mark.parametrize("mode", ["interrupt", "keep"])
async def test_tokens_before_and_after_new_weights_arrive_once(kit: FleetKit, mode: str) -> None:
    server = await kit.server(0, hold_at=40)
    fleet = await kit.fleet(1, weight_update=mode, stream_interval=INTERVAL)
    streamed = Streamed(fleet)
    await until(lambda: len(streamed.ids) >= 33)  # some servers send the first token alone
    assert streamed.ids == [1003 + i for i in range(len(streamed.ids))]
    await fleet.update_weights(kit.disk(1))
    server.release()
    assert_whole(await streamed.whole())
    assert streamed.versions[:33] == [0] * 33
    assert streamed.versions[-1] == 1


async def test_a_dead_replica_costs_no_token_of_a_stream(kit: FleetKit) -> None:
    first, _ = await kit.server(0, hold_at=30), await kit.server(1)
    fleet = await kit.fleet(2, schedule_policy="round_robin", stream_interval=INTERVAL)
    streamed = Streamed(fleet)
    await until(lambda: len(streamed.ids) >= 24)
    await first.die()
    response = await streamed.whole()
    assert_whole(response)
    assert response.replicas == ["server-0", "server-1"]


async def test_a_short_answer_has_its_tokens_once(kit: FleetKit) -> None:
    await kit.server(0)
    fleet = await kit.fleet(1)
    assert_whole(await Streamed(fleet, 4).whole(), 4)


async def test_a_caller_that_leaves_cancels_the_request(kit: FleetKit) -> None:
    server = await kit.server(0, hold_at=40)
    fleet = await kit.fleet(1, stream_interval=INTERVAL)
    streamed = Streamed(fleet)
    await until(lambda: len(streamed.ids) >= 33)
    streamed.task.cancel()
    await asyncio.gather(streamed.task, return_exceptions=True)
    await until(lambda: server.num_cancelled == 1)
    assert fleet.status()["replicas"][0]["running"] == 0


async def test_a_refusal_is_raised_by_the_stream(kit: FleetKit) -> None:
    await kit.server(0)
    fleet = await kit.fleet(1)
    streamed = Streamed(fleet, num_tokens=4094)
    with raises_code("request.too_long"):
        await streamed.task


def answer_of(num_tokens: int) -> Answer:
    answer = Answer(a_request(num_tokens=num_tokens), AnswerForm(stream_interval=2))
    answer.check(RequestLimits(vocab_size=5000, context_length=4096))
    answer.next_part("server-0")
    return answer


def test_what_was_taken_stays_when_its_part_fails() -> None:
    answer = answer_of(8)
    answer.add(PartChunk([1, 2], [-1.0, -1.0], [0, 0], None))
    taken = answer.take(0)
    assert taken == TokenChunk([1, 2], [-1.0, -1.0], [0, 0])
    answer.add(PartChunk([3, 4], [-1.0, math.nan], [0, 0], None))
    assert answer.take(0) is None, "unusable tokens are not passed on"
    assert answer.end_part(0).startswith("server-0 sent ")
    answer.next_part("server-1")
    assert answer.part.input_ids[-2:] == [1, 2]
    answer.add(PartChunk([5, 6], [-1.0, -1.0], [0, 0], "stop"))
    assert (answer.end_part(0), answer.response().output_ids) == ("", [1, 2, 5, 6])
    assert answer.take(0) == TokenChunk([5, 6], [-1.0, -1.0], [0, 0])


@pytest.mark.parametrize("versions", [[0, 0, 0], [0, 7, 7, 7]], ids=["wrong number", "never published"])
def test_tokens_whose_versions_turn_out_wrong_end_the_stream(versions: list[int]) -> None:
    """A server that reports the versions at the end: what was taken cannot be taken back."""
    answer = answer_of(8)
    answer.add(PartChunk([1, 2], [-1.0, -1.0], [0, 0], None))
    assert answer.take(0) is not None
    last = PartChunk([3, 4], [-1.0, -1.0], [0, 0], "stop", versions)
    if len(versions) != 4:
        with pytest.raises(ServerUnavailable):
            answer.add(last)
    else:
        answer.add(last)
    answer.end_part(0)
    with raises_code("server.unreadable_answer", "server-0"):
        answer.take(0)
