"""Parts that are requested together are one request; each ends on its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.errors import ServerUnavailable
from areal.fleet.native import MAX_MERGED_PARTS, MAX_MERGED_TOKENS
from areal.fleet.replica import GenerationPart, PartChunk
from tests.expect import raises_code
from tests.fleet.fake_native import FakeNative
from tests.fleet.fake_server import until

PART = GenerationPart(
    part_id="a", input_ids=[1, 2, 3], num_prior_output_tokens=0, max_new_tokens=6, min_new_tokens=0,
    gconfig=GenerationHyperparameters(max_new_tokens=6), adapter="", group_id="g", seed=None, stream_interval=32,
)  # fmt: skip
STREAMED = replace(PART, stream_interval=2)


def parts(first: GenerationPart, names: str) -> list[GenerationPart]:
    return [replace(first, part_id=name, seed=number) for number, name in enumerate(names)]


class Calls:
    """Generates parts with one client, and keeps the tokens of each."""

    def __init__(self, server: FakeNative) -> None:
        self.client = server.client("server-0", server.address)
        self.found: dict[str, list[int]] = {}

    def start(self, part: GenerationPart) -> asyncio.Task[None]:
        tokens = self.found.setdefault(part.part_id, [])

        def add(chunk: PartChunk) -> None:
            tokens.extend(chunk.token_ids)

        return asyncio.create_task(self.client.generate(part, add))


@pytest.fixture
async def server():
    fake = FakeNative()
    await fake.start()
    yield fake
    await fake.die()


@pytest.fixture
async def calls(server):
    found = Calls(server)
    yield found
    await found.client.close()


def of_several_prompts(first: GenerationPart) -> list[GenerationPart]:
    each = [*parts(first, "abc"), *parts(replace(first, group_id="h"), "xy"), replace(first, group_id="", part_id="s")]
    return [*each, replace(first, group_id="", part_id="t"), replace(first, part_id="d", input_ids=[5, 6])]


def check_answers(calls: Calls, each: list[GenerationPart]) -> None:
    for part in each:
        start = 1000 + len(part.input_ids)
        assert calls.found[part.part_id] == list(range(start, start + 6))


async def test_streamed_parts_of_one_prompt_and_turn_are_one_request(server, calls):
    each = of_several_prompts(STREAMED)
    await asyncio.gather(*map(calls.start, each))
    assert sorted(server.groups) == [["a", "b", "c"], ["x", "y"]]
    assert [asked.body.get("sampling_seed") for asked in server.requests if asked.request_id in "abc"] == [0, 1, 2]
    check_answers(calls, each)
    await calls.start(parts(STREAMED, "e")[0])
    assert len(server.groups) == 2


async def test_short_parts_of_one_turn_are_one_request(server, calls):
    each = of_several_prompts(PART)
    other = replace(PART, part_id="o", max_new_tokens=5)
    await asyncio.gather(*map(calls.start, [*each, other]))
    assert server.groups == [[part.part_id for part in each]]
    given = {asked.request_id: asked.body for asked in server.requests}
    assert [given[name].get("sampling_seed") for name in "abcxysd"] == [0, 1, 2, 0, 1, None, None]
    assert [given[name]["group_id"] for name in "axsd"] == ["g", "h", "", "g"]
    check_answers(calls, each)
    await calls.start(parts(PART, "e")[0])
    assert len(server.groups) == 1


async def test_a_request_for_several_prompts_is_limited(server, calls):
    each = [replace(PART, part_id=f"p{number}", group_id=f"g{number}") for number in range(MAX_MERGED_PARTS + 2)]
    long = replace(PART, part_id="long", group_id="long", input_ids=list(range(MAX_MERGED_TOKENS)))
    await asyncio.gather(*map(calls.start, [*each, long]))
    assert [len(group) for group in server.groups] == [MAX_MERGED_PARTS, 2]
    check_answers(calls, [*each, long])


async def test_a_refused_prompt_is_an_error_of_its_parts_alone(server, calls):
    server.refused_ids = [7]
    each = [*parts(PART, "abc"), *parts(replace(PART, group_id="h", input_ids=[7]), "xy")]
    found = await asyncio.gather(*map(calls.start, each), return_exceptions=True)
    assert [getattr(one, "code", "") for one in found] == [""] * 3 + ["server.request_refused"] * 2
    assert server.groups == [list("abcxy"), list("abc"), list("xy")]
    check_answers(calls, each[:3])


@pytest.mark.parametrize("first", [PART, STREAMED])
async def test_a_cancelled_part_is_aborted_and_the_others_end(server, calls, first):
    server.hold_at = 3
    tasks = [calls.start(part) for part in parts(first, "abc")]
    await until(lambda: server.num_held == 3)
    tasks[1].cancel()
    await until(lambda: server.details("abort") == [{"rid": "b"}])
    server.release()
    await asyncio.gather(tasks[0], tasks[2])
    assert tasks[1].cancelled()
    assert len(calls.found["a"]) == len(calls.found["c"]) == 6


async def test_when_all_parts_are_cancelled_the_request_ends(server, calls):
    server.hold_at = 3
    tasks = [calls.start(part) for part in parts(STREAMED, "abc")]
    await until(lambda: server.num_held == 3)
    for task in tasks:
        task.cancel()
    await until(lambda: server.num_cancelled == 3)


async def test_parts_cancelled_before_they_are_sent_are_not_sent(server, calls):
    tasks = [calls.start(part) for part in parts(PART, "abc")]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(tasks[1], tasks[2])
    assert server.groups == [["b", "c"]]


@pytest.mark.parametrize("first", [PART, STREAMED])
async def test_a_lost_server_and_a_refusal_are_errors_of_every_part(server, calls, first):
    server.fail_generate = 400
    for found in await asyncio.gather(*map(calls.start, parts(first, "abc")), return_exceptions=True):
        assert getattr(found, "code", "") == "server.request_refused"
    server.fail_generate = None
    server.hold_at = 3
    tasks = [calls.start(part) for part in parts(first, "abc")]
    await until(lambda: server.num_held == 3)
    await server.die()
    for task in tasks:
        with raises_code("fleet.no_answer"):
            await task


async def test_an_error_of_one_caller_ends_its_part_alone(server, calls):
    def refuse(chunk: PartChunk) -> None:
        raise ServerUnavailable("too many tokens", code="server.unreadable_answer")

    first, *others = parts(STREAMED, "abc")
    broken = asyncio.create_task(calls.client.generate(first, refuse))
    await asyncio.gather(*map(calls.start, others))
    await until(lambda: server.details("abort") == [{"rid": "a"}])
    with raises_code("server.unreadable_answer"):
        await broken
    assert len(calls.found["b"]) == len(calls.found["c"]) == 6
