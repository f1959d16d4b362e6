"""Parts that are requested together are one request; each ends on its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest
from areal.fleet.fleet import MAX_MERGED_TOKENS, Answer, Calls, Round
from areal.fleet.replica import AnswerForm, PartChunk
from areal.inference.request_parser import MAX_PROMPTS
from tests.expect import raises_code
from tests.fleet.fake_native import FakeNative
from tests.fleet.fake_server import until

SHORT, STREAMED = AnswerForm(stream_interval=32), AnswerForm(stream_interval=2)
PART = GenerationRequest(
    request_id="a", input_ids=[1, 2, 3], gconfig=GenerationHyperparameters(max_new_tokens=6), group_id="g"
)


def parts(names: str, first: GenerationRequest = PART) -> list[GenerationRequest]:
    return [replace(first, request_id=name, seed=number) for number, name in enumerate(names)]


class Requests:
    """Requests parts of one client, and keeps the tokens of each."""

    def __init__(self, server: FakeNative, form: AnswerForm) -> None:
        self.client = server.client("server-0", server.address, form)
        self.tokens: dict[str, list[int]] = {}
        self._calls, self._form = Calls(form), form

    async def _run(self, answer: Answer) -> None:
        waiter = Round(1)
        self._calls.request(answer, waiter, self.client)
        try:
            await waiter.ended
        finally:
            self._calls.drop(answer)
            self.tokens[answer.request.request_id] = list(answer.response().output_ids)

    def start(self, part: GenerationRequest) -> asyncio.Task[None]:
        answer = Answer(part, self._form)
        answer.next_part("server-0")
        return asyncio.create_task(self._run(answer))


@pytest.fixture
async def server():
    fake = FakeNative()
    await fake.start()
    yield fake
    await fake.die()


async def requests_of(server: FakeNative, form: AnswerForm) -> AsyncIterator[Requests]:
    made = Requests(server, form)
    await made.client.info()
    yield made
    await made.client.close()


@pytest.fixture
async def calls(server):
    async for made in requests_of(server, SHORT):
        yield made


@pytest.fixture
async def streamed(server):
    async for made in requests_of(server, STREAMED):
        yield made


@pytest.fixture(params=[SHORT, STREAMED], ids=["short", "streamed"])
async def either(server, request):
    async for made in requests_of(server, request.param):
        yield made


def of_several_prompts() -> list[GenerationRequest]:
    alone = [replace(PART, group_id="", request_id=name) for name in "st"]
    return [
        *parts("abc"),
        *parts("xy", replace(PART, group_id="h")),
        *alone,
        replace(PART, request_id="d", input_ids=[5, 6]),
    ]


def check_answers(calls: Requests, each: list[GenerationRequest]) -> None:
    for part in each:
        start = 1000 + len(part.input_ids)
        assert calls.tokens[part.request_id] == list(range(start, start + 6))


async def test_streamed_parts_of_one_prompt_and_turn_are_one_request(server, streamed):
    each = of_several_prompts()
    await asyncio.gather(*map(streamed.start, each))
    assert sorted(server.groups) == [["a", "b", "c"], ["x", "y"]]
    assert [asked.body.get("sampling_seed") for asked in server.requests if asked.request_id in "abc"] == [0, 1, 2]
    check_answers(streamed, each)
    await streamed.start(parts("e")[0])
    assert len(server.groups) == 2


async def test_short_parts_of_one_turn_are_one_request(server, calls):
    each = of_several_prompts()
    other = replace(PART, request_id="o", gconfig=GenerationHyperparameters(max_new_tokens=5))
    await asyncio.gather(*map(calls.start, [*each, other]))
    assert server.groups == [[part.request_id for part in each]]
    inputs = {asked.request_id: asked.body for asked in server.requests}
    assert [inputs[name].get("sampling_seed") for name in "abcxysd"] == [0, 1, 2, 0, 1, None, None]
    assert [inputs[name]["group_id"] for name in "axsd"] == ["g", "h", "", "g"]
    check_answers(calls, each)
    await calls.start(parts("e")[0])
    assert len(server.groups) == 1


async def test_a_request_for_several_prompts_is_limited(server, calls):
    each = [replace(PART, request_id=f"p{number}", group_id=f"g{number}") for number in range(MAX_PROMPTS + 2)]
    long = replace(PART, request_id="long", group_id="long", input_ids=list(range(MAX_MERGED_TOKENS)))
    await asyncio.gather(*map(calls.start, [*each, long]))
    assert [len(group) for group in server.groups] == [MAX_PROMPTS, 2]
    check_answers(calls, [*each, long])


async def test_a_request_has_no_more_answers_than_the_server_computes_at_once(server, calls):
    server.max_group = 2
    await calls.client.info()
    await asyncio.gather(*map(calls.start, parts("abcde")))
    assert server.groups == [["a", "b"], ["c", "d"]]
    check_answers(calls, parts("abcde"))


async def test_a_refused_prompt_is_an_error_of_its_parts_alone(server, calls):
    server.refused_ids = [7]
    each = [*parts("abc"), *parts("xy", replace(PART, group_id="h", input_ids=[7]))]
    result = await asyncio.gather(*map(calls.start, each), return_exceptions=True)
    assert [getattr(item, "code", "") for item in result] == [""] * 3 + ["server.request_refused"] * 2
    assert server.groups == [list("abcxy"), list("abc"), list("xy")]
    check_answers(calls, each[:3])


async def test_a_cancelled_part_is_aborted_and_the_others_end(server, either):
    server.hold_at = 3
    tasks = [either.start(part) for part in parts("abc")]
    await until(lambda: server.num_held == 3)
    tasks[1].cancel()
    await until(lambda: server.details("abort") == [{"rid": "b"}])
    server.release()
    await asyncio.gather(tasks[0], tasks[2])
    assert tasks[1].cancelled()
    assert len(either.tokens["a"]) == len(either.tokens["c"]) == 6


async def test_when_all_parts_are_cancelled_the_request_ends(server, streamed):
    server.hold_at = 3
    tasks = [streamed.start(part) for part in parts("abc")]
    await until(lambda: server.num_held == 3)
    for task in tasks:
        task.cancel()
    await until(lambda: server.num_cancelled == 3)


async def test_parts_cancelled_before_they_are_sent_are_not_sent(server, calls):
    tasks = [calls.start(part) for part in parts("abc")]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(tasks[1], tasks[2])
    assert server.groups == [["b", "c"]]


async def test_a_lost_server_and_a_refusal_are_errors_of_every_part(server, either):
    server.fail_generate = 400
    for item in await asyncio.gather(*map(either.start, parts("abc")), return_exceptions=True):
        assert getattr(item, "code", "") == "server.request_refused"
    server.fail_generate = None
    server.hold_at = 3
    tasks = [either.start(part) for part in parts("abc")]
    await until(lambda: server.num_held == 3)
    await server.die()
    for task in tasks:
        with raises_code("fleet.no_answer"):
            await task


async def test_a_chunk_that_breaks_the_protocol_ends_its_part_alone(server, streamed, monkeypatch):
    add = Answer.add

    def add_more(answer: Answer, chunk: PartChunk) -> None:
        add(answer, chunk._replace(logprobs=[]) if answer.part.request_id == "a" else chunk)

    monkeypatch.setattr(Answer, "add", add_more)
    tasks = [streamed.start(part) for part in parts("abc")]
    with raises_code("server.unreadable_answer"):
        await tasks[0]
    await asyncio.gather(*tasks[1:])
    await until(lambda: server.details("abort") == [{"rid": "a"}])
    assert len(streamed.tokens["b"]) == len(streamed.tokens["c"]) == 6
