"""The dialects of the session server with the SDKs of OpenAI and Anthropic: answers, streams, refusals, retries."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import anthropic
import httpx
import openai
import pydantic
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

from areal.agent.dialects.dialect import NEUTRAL
from areal.agent.transcript import message_key
from areal.agent.turns import TurnRefused, answer_message
from areal.api.config import GenerationHyperparameters
from tests.agent.session_kit import KEY, OTHER_KEY, answer, call, in_thread, served

QUESTION = [{"role": "user", "content": "2+2?"}]
SCHEMA = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}]
RESPONSE_TOOLS = [{"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": True}]
MESSAGE_TOOLS = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
CHAT = {"model": "m", "messages": QUESTION}
COMPLETION = {"model": "m", "prompt": "2+2="}
RESPONSE = {"model": "m", "input": "2+2?"}
MESSAGE = {"model": "m", "max_tokens": 9, "messages": QUESTION}


def openai_client(address, key=KEY, *, by_path=False, retries=0):
    base = f"{address}/sessions/{key}/v1" if by_path else f"{address}/v1"
    return AsyncOpenAI(base_url=base, api_key="none" if by_path else key, max_retries=retries)


def anthropic_client(address, key=KEY, *, by_path=False, kind=AsyncAnthropic, retries=0):
    base = f"{address}/sessions/{key}" if by_path else address
    return kind(base_url=base, api_key="none" if by_path else key, max_retries=retries)


class Sdk(NamedTuple):
    """One dialect as its SDK uses it."""

    path: str
    client: Callable[..., Any]
    ask: Callable[..., Any]
    body: dict[str, Any]
    errors: Any
    """The module with the exceptions."""


SDKS = {
    "chat": Sdk("/chat/completions", openai_client, lambda api: api.chat.completions.create, CHAT, openai),
    "completions": Sdk("/completions", openai_client, lambda api: api.completions.create, COMPLETION, openai),
    "responses": Sdk("/responses", openai_client, lambda api: api.responses.create, RESPONSE, openai),
    "messages": Sdk("/messages", anthropic_client, lambda api: api.messages.create, MESSAGE, anthropic),
}


def code_of(error: Any) -> str:
    return error.body["error"]["code"] if isinstance(error, anthropic.APIError) else error.code


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", SDKS)
async def test_a_refusal_becomes_the_error_of_the_sdk(name, stream):
    sdk = SDKS[name]
    kinds = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}
    for status, kind in (kinds | {503: "InternalServerError"}).items():
        refused = TurnRefused("no", code="agent.budget", status=status, param="messages", retry_after_s=1.5)
        async with served(refused) as (address, _, _), sdk.client(address) as api:
            with pytest.raises(getattr(sdk.errors, kind)) as caught:
                await sdk.ask(api)(**sdk.body, stream=stream)
        assert code_of(caught.value) == "agent.budget"
        assert caught.value.response.headers["Retry-After"] == "2"


@pytest.mark.parametrize("name", SDKS)
async def test_an_error_after_keep_alives_is_an_event(name):
    sdk, refused = SDKS[name], TurnRefused("no", code="agent.budget", status=400)
    async with served(refused, keep_alive_s=0.001) as (address, session, _), sdk.client(address) as api:
        session.may_answer.clear()
        stream = await sdk.ask(api)(**sdk.body, stream=True)
        session.may_answer.set()
        with pytest.raises(sdk.errors.APIError) as caught:
            _ = [event async for event in stream]
    assert code_of(caught.value) == "agent.budget"


@pytest.mark.parametrize("name", SDKS)
async def test_a_retry_has_the_fingerprint_of_its_first_attempt(name):
    sdk, refused = SDKS[name], TurnRefused("no", code="agent.budget", status=503, retry_after_s=0.001)
    async with served(refused, answer()) as (address, session, _), sdk.client(address, retries=2) as api:
        await sdk.ask(api)(**sdk.body)
        await sdk.ask(api)(**sdk.body, extra_body={"top_p": 0.5})
    first, retry, other = session.requests
    assert (first.retry_count, retry.retry_count, other.retry_count) == (0, 1, 0)
    assert first.fingerprint == retry.fingerprint != other.fingerprint


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


REMOTE = {"type": "image_url", "image_url": {"url": "https://x/a.png"}}
REMOTE_SOURCE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
# dialect -> (fields, field that the refusal names, end of its code)
# fmt: off
WRONG = {
    "chat": [
        ({"x": 1}, "x", "unknown_field"), ({"temperature": 3}, "temperature", "invalid_field"),
        ({"n": 0}, "n", "invalid_field"), ({"stop": [""]}, "stop", "invalid_field"),
        ({"user": 1}, "user", "invalid_field"), ({"top_logprobs": 2}, "top_logprobs", "unsupported_field"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_field"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_field"),
        ({"logit_bias": {"1": 2}}, "logit_bias", "unsupported_field"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_field"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_field"),
        ({"messages": user(REMOTE)}, "messages[0].content[0].image_url.url", "remote_image"),
        ({"messages": user({"type": "input_audio", "input_audio": {}})}, "messages[0].content[0].type", "multimodal"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "invalid_field"),
        ({"messages": []}, "messages", "invalid_field"), ({"model": None}, "model", "invalid_field"),
        # what would cost the server much time or memory
        ({"model": "m" * 513}, "model", "invalid_field"), ({"messages": [{}] * 20_001}, "messages", "invalid_field"),
        ({"messages": user(*[{}] * 20_001)}, "messages[0].content", "invalid_field"),
        ({"tools": [{}] * 20_001}, "tools", "invalid_field"), ({"stop": ["x" * 1025]}, "stop", "invalid_field"),
    ],
    "completions": [
        ({"prompt": ["a", "b"]}, "prompt", "unsupported_field"), ({"prompt": [True]}, "prompt", "invalid_field"),
        ({"prompt": ""}, "prompt", "invalid_field"), ({"logprobs": 2}, "logprobs", "unsupported_field"),
        ({"echo": True}, "echo", "unsupported_field"), ({"best_of": 2}, "best_of", "unsupported_field"),
        ({"suffix": "x"}, "suffix", "unsupported_field"),
    ],
    "responses": [
        ({"previous_response_id": "x"}, "previous_response_id", "unsupported_field"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_field"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_field"),
        ({"include": ["file_search_call.results"]}, "include", "unsupported_field"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_field"),
        ({"input": user({"type": "input_image", "image_url": "x"})}, "input[0].content[0].image_url", "remote_image"),
        ({"input": []}, "input", "invalid_field"), ({"n": 2}, "n", "unknown_field"),
    ],
    "messages": [
        ({"x": 1}, "x", "unknown_field"), ({"max_tokens": None}, "max_tokens", "invalid_field"),
        ({"temperature": 1.5}, "temperature", "invalid_field"), ({"metadata": "x"}, "metadata", "invalid_field"),
        ({"messages": user(REMOTE_SOURCE)}, "messages[0].content[0].source", "remote_image"),
        ({"messages": user({"type": "video"})}, "messages[0].content[0].type", "multimodal"),
        ({"messages": [{"role": "assistant", "content": "4"}]}, "messages", "unsupported_field"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "unsupported_field"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_field"),
        ({"tool_choice": {}}, "tool_choice.type", "invalid_field"),
    ],
}
# fmt: on


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_field_is_refused_by_its_name(name):
    async with served() as (address, session, _), httpx.AsyncClient() as http:
        for more, param, code in WRONG[name]:
            url = f"{address}/sessions/{KEY}/v1{SDKS[name].path}"
            got = await http.post(url, json={**SDKS[name].body, **more})
            error = got.json()["error"]
            expected = (400, "invalid_request_error", param, f"agent.{code}")
            assert (got.status_code, error["type"], error["param"], error["code"]) == expected, more
        assert session.requests == []


FOREIGN = {
    "chat": {
        "reasoning_effort": "low", "verbosity": "low", "chat_template_kwargs": {"a": 1},
        "prediction": {"type": "content", "content": "x"}, "thinking": {"type": "enabled"}, "min_p": 0.1,
    },
    "completions": {"min_p": 0.5},
    "responses": {"reasoning": {"effort": "low"}, "text.verbosity": "low", "max_tool_calls": 3},
    "messages": {"thinking": {"type": "enabled", "budget_tokens": 2048}, "output_config.effort": "low"},
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
async def test_a_foreign_field_is_ignored_with_one_warning_or_refused(name, caplog):
    for path, value in FOREIGN[name].items():
        first, _, inner = path.partition(".")
        more = {first: {inner: value} if inner else value}
        caplog.clear()
        async with served() as (address, session, _), SDKS[name].client(address) as api:
            for _ in range(2):
                await SDKS[name].ask(api)(**SDKS[name].body, extra_body=more)
            assert [path in record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [True]
        async with served(refuses_foreign=True) as (address, session, _), SDKS[name].client(address) as api:
            with pytest.raises(SDKS[name].errors.BadRequestError) as caught:
                await SDKS[name].ask(api)(**SDKS[name].body, extra_body=more)
            assert (code_of(caught.value), session.requests) == ("agent.unsupported_field", [])


METADATA_VALUES = {"session_id": "s", "request_id": "r", "rid": "r", "cache_salt": "x", "priority": -1}
NOT_NEUTRAL = {
    "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 4, "stop_token_ids": [5], "ignore_eos": True,
    "skip_special_tokens": False, "include_stop_str_in_output": True, "bad_words": ["x"], "logit_bias": {"1": 2},
    "use_beam_search": True, "structured_outputs": {"json": {}}, "prompt_logprobs": 0, "continue_final_message": True,
    "required_prefix_token_ids": [1], "return_tokens_as_token_ids": True, "chat_template": "x",
    "allowed_token_ids": [1],
}  # fmt: skip


@pytest.mark.parametrize("name", SDKS)
async def test_neutral_values_and_metadata_of_inference_servers_have_no_effect(name):
    ours = {"completions": {"add_special_tokens": True}}.get(name, {})
    bodies = [{field: value} for field, (values, _) in NEUTRAL.items() for value in (*values, None)]
    bodies = [body for body in bodies if not body.keys() & ours] + [METADATA_VALUES, ours]
    async with served() as (address, session, _), httpx.AsyncClient() as http:
        for body in [{}, *bodies]:
            got = await http.post(f"{address}/sessions/{KEY}/v1{SDKS[name].path}", json={**SDKS[name].body, **body})
            assert got.status_code == 200, (body, got.text)
    first, *others = session.requests
    limits = {"top_k", "frequency_penalty", "presence_penalty"}  # Of the run, unless the request names them.
    for body, other in zip(bodies, others, strict=True):
        settings = replace(first.settings, **{item: getattr(other.settings, item) for item in body.keys() & limits})
        assert replace(other, num_bytes=first.num_bytes, fingerprint=first.fingerprint) == replace(
            first, settings=settings
        )


@pytest.mark.parametrize("name", SDKS)
async def test_other_values_of_inference_servers_are_refused_by_their_names(name):
    async with served(refuses_foreign=True) as (address, session, _), httpx.AsyncClient() as http:
        for field, value in NOT_NEUTRAL.items():
            body = {**SDKS[name].body, field: value}
            got = (await http.post(f"{address}/sessions/{KEY}/v1{SDKS[name].path}", json=body)).json()["error"]
            assert (got["param"], got["code"]) == (field, "agent.unsupported_field")
            assert field in got["message"]
    assert session.requests == []


@pytest.mark.parametrize("name", ["chat", "completions", "messages"])
@pytest.mark.parametrize("value", [-1, 0])
async def test_a_top_k_of_all_tokens_is_no_limit(name, value):
    async with served() as (address, session, _), SDKS[name].client(address) as api:
        await SDKS[name].ask(api)(**SDKS[name].body, extra_body={"top_k": value})
    assert session.requests[0].settings.top_k == GenerationHyperparameters().top_k


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", ["chat", "completions"])
async def test_the_ids_of_tokens_are_those_that_vllm_sends(name, stream):
    shown = replace(answer(), prompt_ids=(7, 8, 9))
    options = {"stream": stream, "extra_body": {"return_token_ids": True}}
    async with served(shown) as (address, session, _), SDKS[name].client(address) as api:
        got = await SDKS[name].ask(api)(**SDKS[name].body, **options)
        chunks = [item async for item in got] if stream else [got]
    assert session.requests[0].shows_prompt
    holders = chunks if name == "chat" else [chunk.choices[0] for chunk in chunks]
    prompts = [list(ids) for holder in holders if (ids := holder.model_extra.get("prompt_token_ids")) is not None]
    tokens = [token for chunk in chunks for token in chunk.choices[0].model_extra.get("token_ids", [])]
    assert (prompts, tokens) == ([[7, 8, 9]], [0, 1, 2])


async def test_token_ids_in_replayed_messages_and_items_are_not_read():
    ids = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5], "token_ids": None}
    said = {"role": "assistant", "content": "four"}
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "four"}]}
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "4"}
    async with served() as (address, session, _), openai_client(address) as api:
        for more in ({}, ids):
            await api.chat.completions.create(**CHAT | {"messages": [*QUESTION, said | more, *QUESTION]})
            items = [*QUESTION, item | more, *QUESTION, call | more, output]
            await api.responses.create(**RESPONSE | {"input": items})
    assert session.requests[0].messages == session.requests[2].messages
    assert session.requests[1].messages == session.requests[3].messages


class Found(pydantic.BaseModel):
    number: int
    kind: Literal["a", "b"] | None = None


async def test_the_wanted_format_of_an_answer_arrives_as_a_schema():
    expected = Found.model_json_schema()["properties"].keys()
    async with served(answer('{"number": 4, "kind": null}')) as (address, session, _), openai_client(address) as api:
        chat = await api.chat.completions.parse(**CHAT, response_format=Found)
        response = await api.responses.parse(**RESPONSE, text_format=Found)
        await api.chat.completions.create(**CHAT, response_format={"type": "json_object"})
        await api.chat.completions.create(**CHAT, response_format={"type": "text"})
        async with anthropic_client(address) as claude:
            await claude.messages.parse(**MESSAGE, output_format=Found)
    assert chat.choices[0].message.parsed == response.output_parsed == Found(number=4)
    schemas = [request.answer_schema for request in session.requests]
    assert [schema and schema.get("properties", {}).keys() for schema in schemas] == [
        expected, expected, {}.keys(), None, expected,
    ]  # fmt: skip


async def test_a_last_message_of_the_assistant_begins_the_answer():
    async with served(answer('{"a": 4}')) as (address, session, _), anthropic_client(address) as api:
        got = await api.messages.create(
            **MESSAGE | {"messages": [*QUESTION, {"role": "assistant", "content": '{"a":'}]}
        )
    assert (session.requests[0].prefill, session.requests[0].messages) == ('{"a":', tuple(QUESTION))
    assert got.content[0].text == " 4}"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_continues_when_its_client_has_left(stream):
    async with served(keep_alive_s=0.001) as (address, session, _):
        session.may_answer.clear()
        async with httpx.AsyncClient() as http:
            url = f"{address}/sessions/{KEY}/v1/chat/completions"
            asking = asyncio.create_task(http.post(url, json=CHAT | {"stream": stream}))
            await session.asked.wait()
            asking.cancel()
        async with httpx.AsyncClient() as http:  # its request arrives after the end of the first connection
            await http.get(address)
        session.may_answer.set()
        await session.answered.wait()
    assert session.delivered_answers == []


async def test_unknown_and_ambiguous_keys_are_refused():
    async with served() as (address, _, _):
        with pytest.raises(openai.AuthenticationError):
            await openai_client(address, "none").models.list()
        with pytest.raises(openai.NotFoundError):
            await openai_client(address, "none", by_path=True).models.list()
        with pytest.raises(openai.AuthenticationError):
            await openai_client(address).models.list(extra_headers={"x-api-key": OTHER_KEY})
        assert [model.id async for model in openai_client(address).models.list()] == ["policy"]


@pytest.mark.parametrize("by_path", [True, False])
async def test_chat_reads_an_answer_with_reasoning_and_tool_calls(by_path):
    inputs = answer("text", reasoning="why", calls=[call()])
    async with served(inputs) as (address, session, _), openai_client(address, by_path=by_path) as api:
        options = {"temperature": 0.5, "max_completion_tokens": 9, "max_tokens": 12}
        got = await api.chat.completions.create(**CHAT, tools=TOOLS, **options)
    message, request = got.choices[0].message, session.requests[0]
    assert (got.id, got.model, got.choices[0].finish_reason) == ("turn-1", "m", "tool_calls")
    assert (message.content, message.reasoning_content) == ("text", "why")
    assert (message.tool_calls[0].function.arguments, got.usage.total_tokens) == (call().arguments, 10)
    assert got.usage.prompt_tokens_details.cached_tokens == 4
    assert (request.messages, request.tools) == (tuple(QUESTION), tuple(TOOLS))
    assert (request.settings.max_new_tokens, request.settings.temperature) == (9, 0.5)


async def test_what_chat_delivered_and_got_back_is_the_same_message():
    inputs = answer("", reasoning="why", calls=[call(), call(call_id="call-2")])
    async with served(inputs) as (address, session, _), openai_client(address) as api:
        first = await api.chat.completions.create(**CHAT, tools=TOOLS)
        results = [{"role": "tool", "tool_call_id": f"call-{n}", "content": "4"} for n in (1, 2)]
        history = [*QUESTION, first.choices[0].message, *results]
        await api.chat.completions.create(model="m", messages=history, tools=TOOLS)
    sent_back = session.requests[1].messages[1]
    assert sent_back == answer_message(inputs)
    assert message_key({**sent_back, "content": ""}) == message_key(answer_message(inputs))


async def test_a_stream_of_chat_has_the_same_answers_as_the_reply():
    inputs = (answer("one", reasoning="r", calls=[call(), call("sub", call_id="call-2")]), answer("two"))
    async with served(inputs) as (address, _, _), openai_client(address) as api:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await api.chat.completions.create(**CHAT, n=2, logprobs=True, **options)
        chunks = [chunk async for chunk in stream]
        whole = await api.chat.completions.create(**CHAT, n=2, logprobs=True)
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
    async with (
        served(answer("one", calls=[call()])) as (address, _, _),
        openai_client(address) as api,
        api.chat.completions.stream(**CHAT) as stream,
    ):
        got = (await stream.get_final_completion()).choices[0].message
    assert (got.content, got.tool_calls[0].function.name) == ("one", "add")


def synchronous(address, ask):
    def run():
        with OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as api:
            return ask(api)

    return in_thread(run)


async def test_the_synchronous_sdk_reads_two_completions_with_logprobs():
    async with served((answer("4"), answer("5"))) as (address, session, _):
        options = {"n": 2, "logprobs": 0, "seed": 3, "stop": "\n"}
        got = await synchronous(address, lambda api: api.completions.create(**COMPLETION, **options))
    assert [choice.text for choice in got.choices] == ["4", "5"]
    assert got.choices[0].logprobs.tokens == ["t0", "t1", "t2"]
    assert (got.choices[0].logprobs.text_offset, got.usage.completion_tokens) == ([0, 2, 4], 6)
    request = session.requests[0]
    assert (request.prompt, request.messages, request.num_answers) == ("2+2=", (), 2)
    assert (request.settings.max_new_tokens, request.settings.seed, request.settings.stop) == (16, 3, ("\n",))


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6]]])
async def test_a_prompt_may_be_token_ids_and_a_stream_ends_with_the_usage(prompt):
    async with served() as (address, session, _):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        ask = lambda api: list(api.completions.create(model="m", prompt=prompt, **options))  # noqa: E731
        chunks = await synchronous(address, ask)
    assert session.requests[0].prompt == (5, 6)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "four"
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 10)


async def test_responses_reads_an_answer_and_sends_its_items_back():
    inputs = answer("text", reasoning="why", calls=[call(), call("sub", call_id="call-2")])
    async with served(inputs) as (address, session, _), openai_client(address) as api:
        options = {"max_output_tokens": 9, "include": ["message.output_text.logprobs"]}
        got = await api.responses.create(**RESPONSE, instructions="Be.", tools=RESPONSE_TOOLS, **options)
        outputs = [{"type": "function_call_output", "call_id": f"call-{n}", "output": "4"} for n in (1, 2)]
        items, choice = [*QUESTION, *got.output, *outputs], {"type": "function", "name": "add"}
        await api.responses.create(model="m", input=items, tools=RESPONSE_TOOLS, tool_choice=choice)
    assert (got.id, got.status, got.output_text, got.instructions) == ("turn-1", "completed", "text", "Be.")
    assert [item.type for item in got.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (got.output[1].content[0].logprobs[2].token, got.usage.total_tokens) == ("t2", 10)
    assert got.usage.input_tokens_details.cached_tokens == 4
    first, second = session.requests
    assert first.messages == ({"role": "system", "content": "Be."}, *QUESTION)
    assert (first.settings.max_new_tokens, first.tools[0]["function"]["name"]) == (9, "add")
    _, sent_back, *results = second.messages
    assert sent_back == answer_message(inputs)
    assert [result["tool_call_id"] for result in results] == ["call-1", "call-2"]
    assert second.tool_choice == "add"


async def test_a_stream_of_responses_assembles_to_the_reply():
    inputs = answer("text", reasoning="why", calls=[call()])
    async with served(inputs) as (address, _, _), openai_client(address) as api:
        whole = await api.responses.create(**RESPONSE)
        async with api.responses.stream(**RESPONSE) as stream:
            events = [event.type async for event in stream]
            streamed = await stream.get_final_response()
    assert (events[0], events[-1]) == ("response.created", "response.completed")
    assert [item.id for item in streamed.output] == [item.id for item in whole.output]
    assert (streamed.output_text, streamed.output[2].arguments) == (whole.output_text, call().arguments)
    async with served(answer("te", finish_reason="length")) as (address, _, _), openai_client(address) as api:
        got = await api.responses.create(**RESPONSE)
        events = [event async for event in await api.responses.create(**RESPONSE, stream=True)]
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert events[-1].type == "response.incomplete"


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_openai_agents_sdk_runs_a_tool_loop(kind, stream):
    set_tracing_disabled(True)
    asked = answer("Let me see.", reasoning="hm", calls=[call(), call(call_id="call-2")])
    async with served(asked, answer("It is 4.")) as (address, session, _), openai_client(address) as api:
        settings = ModelSettings(temperature=0.7, parallel_tool_calls=True)
        words = {"name": "calculator", "instructions": "Use the tool.", "tools": [add]}
        agent = Agent(**words, model=kind("policy", api), model_settings=settings)
        if stream:
            result = Runner.run_streamed(agent, "2+2?")
            _ = [event async for event in result.stream_events()]
        else:
            result = await Runner.run(agent, "2+2?")
    assert result.final_output == "It is 4."
    first, second = session.requests
    assert second.messages[: len(first.messages)] == first.messages
    sent_back, *results = second.messages[len(first.messages) :]
    delivered = answer_message(asked)
    if kind is OpenAIChatCompletionsModel:
        del delivered["reasoning_content"]  # this client does not send it back
    assert message_key(sent_back) == message_key(delivered)
    assert [(item["tool_call_id"], item["content"]) for item in results] == [("call-1", "4"), ("call-2", "4")]


@pytest.mark.parametrize("by_path", [True, False])
async def test_messages_reads_reasoning_text_and_tool_calls_and_sends_them_back(by_path):
    inputs = answer("text", reasoning="why", calls=[call(), call("sub", call_id="call-2")])
    async with served(inputs) as (address, session, _), anthropic_client(address, by_path=by_path) as api:
        options = {"stop_sequences": ["x"], "extra_body": {"top_k": 5}}
        system = [{"type": "text", "text": "Be."}]
        got = await api.messages.create(**MESSAGE, tools=MESSAGE_TOOLS, system=system, **options)
        results = [{"type": "tool_result", "tool_use_id": f"call-{n}", "content": "4"} for n in (1, 2)]
        results.append({"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}})
        history = [*QUESTION, {"role": "assistant", "content": got.content}, {"role": "user", "content": results}]
        choice = {"type": "tool", "name": "add"}
        await api.messages.create(**MESSAGE | {"messages": history}, tools=MESSAGE_TOOLS, tool_choice=choice)
    assert [block.type for block in got.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (got.id, got.stop_reason, got.usage.input_tokens, got.usage.output_tokens) == ("turn-1", "tool_use", 7, 3)
    first, second = session.requests
    assert first.messages == ({"role": "system", "content": "Be."}, *QUESTION)
    assert (first.tools, first.settings.stop, first.settings.top_k) == (tuple(TOOLS), ("x",), 5)
    _, sent_back, *rest = second.messages
    assert message_key(sent_back) == message_key(answer_message(inputs))
    assert sent_back["reasoning_content"] == "why"
    assert [(item["role"], item["content"]) for item in rest] == [("tool", "4"), ("tool", "4"), ("user", "and?")]
    assert second.tool_choice == "add"
    assert len(session.delivered_answers) == 2


async def test_a_stream_of_messages_assembles_to_the_reply():
    inputs = answer("text", reasoning="why", calls=[call()])
    async with (
        served(inputs, answer("cut", finish_reason="length")) as (address, _, _),
        anthropic_client(address) as api,
    ):
        async with api.messages.stream(**MESSAGE) as stream:
            streamed = await stream.get_final_message()
        second = await api.messages.create(**MESSAGE)
    async with served(inputs) as (address, _, _), anthropic_client(address) as api:
        whole = await api.messages.create(**MESSAGE)
        counted = await api.messages.count_tokens(model="m", messages=QUESTION)
    assert streamed.model_dump(exclude={"parsed_output"}) == whole.model_dump(exclude={"parsed_output"})
    assert (second.stop_reason, second.content[0].text) == ("max_tokens", "cut")
    assert counted.input_tokens == 7


async def test_the_synchronous_client_of_messages_works_and_pings_are_skipped():
    async with served(keep_alive_s=0.001) as (address, session, _):
        session.may_answer.clear()

        def ask():
            with anthropic_client(address, kind=Anthropic) as api:
                events = [event.type for event in api.messages.create(**MESSAGE, stream=True)]
                return events, api.messages.create(**MESSAGE).content[0].text

        asking = in_thread(ask)
        await session.asked.wait()
        session.may_answer.set()
        events, text = await asking
    blocks = [f"content_block_{part}" for part in ("start", "delta", "stop")]
    assert (events, text) == (["message_start", *blocks, "message_delta", "message_stop"], "four")
