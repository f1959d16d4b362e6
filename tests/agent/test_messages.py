import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from areal.agent.transcript import message_key
from areal.agent.turns import TurnRefused, answer_message
from tests.agent.session_kit import KEY, answer, call, in_thread, served

TOOLS = [{"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}]
CHAT_TOOLS = (
    {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
    },
)
QUESTION = [{"role": "user", "content": "2+2?"}]
ASK = {"model": "m", "max_tokens": 9, "messages": QUESTION}


def client(address, key=KEY, *, by_path=False, kind=AsyncAnthropic, retries=0):
    base = f"{address}/sessions/{key}" if by_path else address
    return kind(base_url=base, api_key="none" if by_path else key, max_retries=retries)


@pytest.mark.parametrize("by_path", [True, False])
async def test_the_sdk_reads_reasoning_text_and_tool_calls_and_sends_them_back(by_path):
    given = answer("text", reasoning="why", calls=[call(), call("sub", call_id="call-2")])
    async with served(given) as (address, session, _), client(address, by_path=by_path) as api:
        got = await api.messages.create(
            **ASK, tools=TOOLS, system=[{"type": "text", "text": "Be."}], stop_sequences=["x"], extra_body={"top_k": 5}
        )
        results = [{"type": "tool_result", "tool_use_id": f"call-{n}", "content": "4"} for n in (1, 2)]
        results.append({"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}})
        history = [*QUESTION, {"role": "assistant", "content": got.content}, {"role": "user", "content": results}]
        await api.messages.create(
            **{**ASK, "messages": history}, tools=TOOLS, tool_choice={"type": "tool", "name": "add"}
        )
    assert [block.type for block in got.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (got.id, got.stop_reason, got.usage.input_tokens, got.usage.output_tokens) == ("turn-1", "tool_use", 7, 3)
    first, second = session.requests
    assert first.messages == ({"role": "system", "content": "Be."}, *QUESTION)
    assert (first.tools, first.settings.stop, first.settings.top_k) == (CHAT_TOOLS, ("x",), 5)
    _, sent_back, *rest = second.messages
    assert message_key(sent_back) == message_key(answer_message(given))
    assert sent_back["reasoning_content"] == "why"
    assert [(one["role"], one["content"]) for one in rest] == [("tool", "4"), ("tool", "4"), ("user", "and?")]
    assert second.tool_choice == "add"
    assert len(session.delivered_answers) == 2


async def test_a_stream_assembles_to_the_reply():
    given = answer("text", reasoning="why", calls=[call()])
    async with served(given, answer("cut", finish_reason="length")) as (address, _, _), client(address) as api:
        async with api.messages.stream(**ASK) as stream:
            streamed = await stream.get_final_message()
        second = await api.messages.create(**ASK)
    async with served(given) as (address, _, _), client(address) as api:
        whole = await api.messages.create(**ASK)
    assert streamed.model_dump(exclude={"parsed_output"}) == whole.model_dump(exclude={"parsed_output"})
    assert (second.stop_reason, second.content[0].text) == ("max_tokens", "cut")


async def test_the_synchronous_client_works_and_pings_are_skipped():
    async with served(keep_alive_s=0.001) as (address, session, _):
        session.may_answer.clear()

        def ask():
            with client(address, kind=Anthropic) as api:
                events = [event.type for event in api.messages.create(**ASK, stream=True)]
                return events, api.messages.create(**ASK).content[0].text

        asking = in_thread(ask)
        await session.asked.wait()
        session.may_answer.set()
        events, text = await asking
    assert events == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    assert text == "four"


async def test_tokens_are_counted_without_a_turn():
    async with served() as (address, session, _), client(address) as api:
        counted = await api.messages.count_tokens(model="m", messages=QUESTION)
        assert counted.input_tokens == 7
        assert session.delivered_answers == []


REFUSALS = [
    (400, anthropic.BadRequestError),
    (401, anthropic.AuthenticationError),
    (404, anthropic.NotFoundError),
    (429, anthropic.RateLimitError),
    (503, anthropic.InternalServerError),
]


@pytest.mark.parametrize(("status", "kind"), REFUSALS)
async def test_a_refusal_becomes_the_error_of_the_sdk(status, kind):
    refused = TurnRefused("no", code="agent.budget", status=status, param="messages")
    async with served(refused) as (address, _, _), client(address) as api:
        for stream in (True, False):
            with pytest.raises(kind) as caught:
                await api.messages.create(**ASK, stream=stream)
            assert caught.value.body["error"]["code"] == "agent.budget"


async def test_an_error_after_pings_is_an_event():
    refused = TurnRefused("no", code="agent.budget", status=400)
    async with served(refused, keep_alive_s=0.001) as (address, session, _), client(address) as api:
        session.may_answer.clear()
        stream = await api.messages.create(**ASK, stream=True)
        session.may_answer.set()
        with pytest.raises(anthropic.APIStatusError) as caught:
            _ = [event async for event in stream]
    assert caught.value.body["error"]["code"] == "agent.budget"


async def test_a_retry_has_the_fingerprint_of_its_first_attempt():
    refused = TurnRefused("no", code="agent.budget", status=503, retry_after_s=0.001)
    async with served(refused, answer()) as (address, session, _), client(address, retries=2) as api:
        await api.messages.create(**ASK)
    first, retry = session.requests
    assert (first.fingerprint, first.retry_count, retry.retry_count) == (retry.fingerprint, 0, 1)


VIDEO = {"type": "video"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
WRONG = {
    "x": ({"x": 1}, "agent.unknown_field"),
    "max_tokens": ({"max_tokens": None}, "agent.invalid_field"),
    "temperature": ({"temperature": 1.5}, "agent.invalid_field"),
    "thinking": ({"thinking": {"type": "disabled"}}, "agent.unsupported_field"),
    "metadata": ({"metadata": "x"}, "agent.invalid_field"),
    "messages[0].content[0].source": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "agent.remote_image"),
    "messages[0].content[0].type": ({"messages": [{"role": "user", "content": [VIDEO]}]}, "agent.multimodal"),
    "messages": ({"messages": [*QUESTION, {"role": "assistant", "content": "4"}]}, "agent.unsupported_field"),
    "tools[0].type": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "agent.unsupported_field"),
    "tool_choice": ({"tool_choice": {"type": "any"}}, "agent.invalid_field"),
    "tool_choice.type": ({"tool_choice": {}}, "agent.invalid_field"),
}


@pytest.mark.parametrize("param", WRONG)
async def test_a_wrong_field_is_refused_by_its_name(param):
    more, code = WRONG[param]
    async with served() as (address, session, _), client(address) as api:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await api.post("/v1/messages", body={**ASK, **more}, cast_to=object)
        error = caught.value.body["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
        assert session.requests == []
