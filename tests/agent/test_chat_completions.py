import asyncio

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from areal.agent.transcript import message_key
from areal.agent.turns import TurnRefused, answer_message
from tests.agent.session_kit import KEY, OTHER_KEY, answer, call, served

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
    }
]
QUESTION = [{"role": "user", "content": "2+2?"}]


def client(address, key=KEY, *, by_path=False, retries=0):
    base = f"{address}/sessions/{key}/v1" if by_path else f"{address}/v1"
    return AsyncOpenAI(base_url=base, api_key="none" if by_path else key, max_retries=retries)


@pytest.mark.parametrize("by_path", [True, False])
async def test_the_sdk_reads_an_answer_with_reasoning_and_tool_calls(by_path):
    async with served(answer("text", reasoning="why", calls=[call()])) as (address, session, _):
        async with client(address, by_path=by_path) as api:
            got = await api.chat.completions.create(
                model="m", messages=QUESTION, tools=TOOLS, temperature=0.5, max_completion_tokens=9, max_tokens=12
            )
        message = got.choices[0].message
        assert (got.id, got.model, got.choices[0].finish_reason) == ("turn-1", "m", "tool_calls")
        assert (message.content, message.reasoning_content) == ("text", "why")
        assert message.tool_calls[0].function.arguments == call().arguments
        assert got.usage.total_tokens == 10
        request = session.requests[0]
        assert request.messages == tuple(QUESTION)
        assert request.tools == tuple(TOOLS)
        assert (request.settings.max_new_tokens, request.settings.temperature) == (9, 0.5)


async def test_what_was_delivered_and_sent_back_is_the_same_message():
    given = answer("", reasoning="why", calls=[call(), call(call_id="call-2")])
    async with served(given) as (address, session, _), client(address) as api:
        first = await api.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS)
        results = [{"role": "tool", "tool_call_id": f"call-{n}", "content": "4"} for n in (1, 2)]
        history = [*QUESTION, first.choices[0].message, *results]
        await api.chat.completions.create(model="m", messages=history, tools=TOOLS)
        sent_back = session.requests[1].messages[1]
        assert sent_back == answer_message(given)
        assert message_key({**sent_back, "content": ""}) == message_key(answer_message(given))


async def test_a_stream_has_the_same_answers_as_the_reply():
    given = (answer("one", reasoning="r", calls=[call(), call("sub", call_id="call-2")]), answer("two"))
    async with served(given) as (address, _, _), client(address) as api:
        stream = await api.chat.completions.create(
            model="m", messages=QUESTION, n=2, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        whole = await api.chat.completions.create(model="m", messages=QUESTION, n=2, logprobs=True)
    texts, calls, finish = {0: "", 1: ""}, {}, {}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        for part in choice.delta.tool_calls or []:
            calls[part.index] = calls.get(part.index, "") + part.function.arguments
        finish[choice.index] = choice.finish_reason or finish.get(choice.index)
    assert texts == {0: "one", 1: "two"}
    assert calls == {0: call().arguments, 1: call().arguments}
    assert finish == {0: "tool_calls", 1: "stop"}
    assert chunks[-1].usage == whole.usage
    assert chunks[0].choices[0].logprobs.model_dump() == whole.choices[0].logprobs.model_dump()
    assert whole.choices[0].logprobs.content[1].token == "t1"


async def test_the_stream_helper_of_the_sdk_assembles_the_answer():
    async with (
        served(answer("one", calls=[call()])) as (address, _, _),
        client(address) as api,
        api.chat.completions.stream(model="m", messages=QUESTION) as stream,
    ):
        got = await stream.get_final_completion()
    assert got.choices[0].message.content == "one"
    assert got.choices[0].message.tool_calls[0].function.name == "add"


REFUSALS = [
    (400, openai.BadRequestError),
    (401, openai.AuthenticationError),
    (404, openai.NotFoundError),
    (429, openai.RateLimitError),
    (503, openai.InternalServerError),
]


@pytest.mark.parametrize(("status", "kind"), REFUSALS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_becomes_the_error_of_the_sdk(status, kind, stream):
    refused = TurnRefused("no", code="agent.budget", status=status, param="messages", retry_after_s=1.5)
    async with served(refused) as (address, _, _), client(address) as api:
        with pytest.raises(kind) as caught:
            await api.chat.completions.create(model="m", messages=QUESTION, stream=stream)
    assert (caught.value.code, caught.value.param) == ("agent.budget", "messages")
    assert caught.value.response.headers["Retry-After"] == "2"


async def test_an_error_after_keep_alives_is_an_event():
    refused = TurnRefused("no", code="agent.budget", status=400)
    async with served(refused, keep_alive_s=0.001) as (address, session, _), client(address) as api:
        session.may_answer.clear()
        stream = await api.chat.completions.create(model="m", messages=QUESTION, stream=True)
        session.may_answer.set()
        with pytest.raises(openai.APIError) as caught:
            _ = [chunk async for chunk in stream]
    assert caught.value.code == "agent.budget"


async def test_a_retry_has_the_fingerprint_of_its_first_attempt():
    refused = TurnRefused("no", code="agent.budget", status=503, retry_after_s=0.001)
    async with served(refused, answer()) as (address, session, _), client(address, retries=2) as api:
        await api.chat.completions.create(model="m", messages=QUESTION)
        await api.chat.completions.create(model="m", messages=QUESTION, seed=1)
    first, retry, other = session.requests
    assert (first.retry_count, retry.retry_count, other.retry_count) == (0, 1, 0)
    assert first.fingerprint == retry.fingerprint != other.fingerprint


@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_continues_when_its_client_has_left(stream):
    async with served(keep_alive_s=0.001) as (address, session, _):
        session.may_answer.clear()
        body = {"model": "m", "messages": QUESTION, "stream": stream}
        async with httpx.AsyncClient() as http:
            asking = asyncio.create_task(http.post(f"{address}/sessions/{KEY}/v1/chat/completions", json=body))
            await session.asked.wait()
            asking.cancel()
        session.may_answer.set()
        await session.answered.wait()
    assert session.delivered_answers == []


async def test_unknown_and_ambiguous_keys_are_refused():
    async with served() as (address, _, _):
        with pytest.raises(openai.AuthenticationError):
            await client(address, "none").models.list()
        with pytest.raises(openai.NotFoundError):
            await client(address, "none", by_path=True).models.list()
        with pytest.raises(openai.AuthenticationError):
            await client(address).models.list(extra_headers={"x-api-key": OTHER_KEY})
        assert [model.id async for model in client(address).models.list()] == ["policy"]


WRONG = {
    "x": ({"x": 1}, "agent.unknown_field"),
    "temperature": ({"temperature": 3}, "agent.invalid_field"),
    "n": ({"n": 0}, "agent.invalid_field"),
    "stop": ({"stop": [""]}, "agent.invalid_field"),
    "user": ({"user": 1}, "agent.invalid_field"),
    "top_logprobs": ({"top_logprobs": 2}, "agent.unsupported_field"),
    "response_format": ({"response_format": {"type": "json_object"}}, "agent.unsupported_field"),
    "reasoning_effort": ({"reasoning_effort": "low"}, "agent.unsupported_field"),
    "tool_choice": ({"tool_choice": "required"}, "agent.invalid_field"),
    "tools[0].type": ({"tools": [{"type": "web_search"}]}, "agent.unsupported_field"),
    "messages[0].content[0].image_url.url": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/a.png"}}]}]},
        "agent.remote_image",
    ),
    "messages[0].content[0].type": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "agent.multimodal",
    ),
    "messages[0].role": ({"messages": [{"role": "robot", "content": ""}]}, "agent.invalid_field"),
    "messages": ({"messages": []}, "agent.invalid_field"),
    "model": ({"model": None}, "agent.invalid_field"),
}


@pytest.mark.parametrize("param", WRONG)
async def test_a_wrong_field_is_refused_by_its_name(param):
    more, code = WRONG[param]
    async with served() as (address, session, _), httpx.AsyncClient() as http:
        body = {"model": "m", "messages": QUESTION, **more}
        got = await http.post(f"{address}/sessions/{KEY}/v1/chat/completions", json=body)
        assert (got.status_code, got.json()["error"]["param"], got.json()["error"]["code"]) == (400, param, code)
        assert session.requests == []
