"""A streamed turn: its first text before its last token, a client that leaves, and what is recorded then."""

import asyncio

import anthropic
import openai
import orjson
import pytest

from areal.agent.session import SessionLimits
from areal.agent.session_server import TurnJournal
from areal.agent.turns import TurnRefused
from areal.api.errors import ServerUnavailable
from tests.agent.policies import ChunkEngine
from tests.agent.session_kit import served
from tests.agent.test_dialects import SDKS, code_of
from tests.agent.test_session import request, session_of

TEXT = "one two three four"


def engine_with_gate(cuts=(6,)):
    return ChunkEngine(lambda prompt: TEXT, cuts, gate=asyncio.Event())


def texts_of(name, event):
    match name:
        case "chat":
            return "".join(choice.delta.content or "" for choice in event.choices)
        case "completions":
            return "".join(choice.text for choice in event.choices)
        case "responses":
            return event.delta if event.type == "response.output_text.delta" else ""
        case _:
            return event.delta.text if event.type == "content_block_delta" else ""


BODIES = {name: sdk.body | ({"max_tokens": 50} if name == "completions" else {}) for name, sdk in SDKS.items()}
BODIES["messages"] = BODIES["messages"] | {"max_tokens": 50}


async def first_text(name, stream):
    async for event in stream:
        if text := texts_of(name, event):
            return text
    raise AssertionError("no text")


@pytest.mark.parametrize("name", SDKS)
async def test_the_first_text_arrives_before_the_last_is_generated(name):
    engine, sdk = engine_with_gate(), SDKS[name]
    session = session_of(engine)
    async with served(session=session) as (address, _, _), sdk.client(address) as api:
        stream = await sdk.ask(api)(**BODIES[name], stream=True)
        text = await first_text(name, stream)
        assert (text, engine.num_given) == ("one tw"[: len(text)], 1)
        assert session.transcript.num_turns == 0
        engine.gate.set()
        text += "".join([texts_of(name, event) async for event in stream])
    assert text == TEXT
    assert session.transcript.num_turns == 1


@pytest.mark.parametrize("name", SDKS)
async def test_a_client_that_leaves_in_the_middle_cancels_the_generation(name):
    engine, sdk = engine_with_gate(), SDKS[name]
    session = session_of(engine)
    async with served(session=session, keep_alive_s=0.01) as (address, _, _), sdk.client(address) as api:
        stream = await sdk.ask(api)(**BODIES[name], stream=True)
        await first_text(name, stream)
        await stream.close()
        await engine.left.wait()
    assert session.transcript.turns == {}
    assert session.budget.num_tokens == 6


@pytest.mark.parametrize("name", SDKS)
async def test_a_failure_after_the_first_text_is_an_error_of_the_sdk(name):
    engine, sdk = engine_with_gate(), SDKS[name]
    engine.error = ServerUnavailable("gone", code="fleet.no_replica")
    session = session_of(engine)
    async with served(session=session) as (address, _, _), sdk.client(address) as api:
        stream = await sdk.ask(api)(**BODIES[name], stream=True)
        await first_text(name, stream)
        engine.gate.set()
        with pytest.raises((openai.APIError, anthropic.APIError)) as caught:
            _ = [event async for event in stream]
    assert code_of(caught.value) == "agent.no_server"
    assert (session.transcript.turns, session.counts.failures) == ({}, 1)


async def test_a_client_that_leaves_before_the_head_finds_its_answer_with_a_retry():
    engine = ChunkEngine(lambda prompt: TEXT, (6,))
    session = session_of(engine)
    stream = session.stream(request())
    stream.leave(cancels=False)
    again = session.stream(request(retry_count=1))
    while not again.is_whole:
        (result,) = await again.grown(60.0)
    assert (result.text, len(engine.requests), session.counts.retries) == (TEXT, 1, 1)
    third = session.stream(request(retry_count=1))
    assert await third.grown(60.0) == (result,)
    assert third.is_whole


async def test_the_last_reader_of_a_turn_ends_it_and_the_journal_has_its_intent_only(tmp_path):
    journal, engine = TurnJournal(tmp_path), engine_with_gate()
    session = session_of(engine, events=journal)
    readers = [session.stream(request()), session.stream(request(retry_count=1))]
    (part,) = await readers[0].grown(60.0)
    assert (part.text, part.finish_reason) == ("one tw", None)
    readers[0].leave(cancels=True)
    engine.gate.set()
    while not readers[1].is_whole:
        (whole,) = await readers[1].grown(60.0)
    assert whole.text == TEXT

    engine.gate.clear()
    reader = session.stream(request("again"))
    (part,) = await reader.grown(60.0)
    reader.leave(cancels=True)
    await engine.left.wait()
    engine.gate.set()
    (repeated,) = await session.answer(request("again", retry_count=1))
    assert (repeated.text, repeated.turn_id, part.turn_id) == (TEXT, "s1.2", "s1.1")
    assert list(session.transcript.turns) == ["s1.0", "s1.2"]
    await journal.aclose()
    events = [orjson.loads(line) for path in tmp_path.iterdir() for line in path.read_bytes().splitlines()]
    assert [(event["event"], event.get("turn") or event["turns"]) for event in events] == [
        ("intent", ["s1.0"]), ("generated", "s1.0"), ("intent", ["s1.1"]), ("intent", ["s1.2"]), ("generated", "s1.2"),
    ]  # fmt: skip


async def test_a_stream_ends_with_what_it_has_when_the_time_of_its_session_is_over():
    engine = engine_with_gate()
    session = session_of(engine, limits=SessionLimits(max_seconds=0.05))
    stream = session.stream(request())
    while not stream.is_whole:
        (result,) = await stream.grown(60.0)
    assert (result.text, result.finish_reason, result.token_ids) == ("one tw", "length", ())
    assert (session.counts.timed_out, session.transcript.turns) == (1, {})


async def test_a_refused_turn_has_no_stream():
    session = session_of(ChunkEngine(lambda prompt: TEXT, (6,)), limits=SessionLimits(max_turns=0))
    with pytest.raises(TurnRefused):
        session.stream(request())
    assert session.counts.refused == {"agent.turn_budget": 1}
