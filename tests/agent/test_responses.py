import openai
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
from openai import AsyncOpenAI

from areal.agent.transcript import message_key
from areal.agent.turns import TurnRefused, answer_message
from tests.agent.session_kit import KEY, answer, call, served

ASK = {"model": "m", "input": "2+2?"}
TOOLS = [{"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True}]


def client(address, retries=0):
    return AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=retries)


async def test_the_sdk_reads_an_answer_and_sends_its_items_back():
    given = answer("text", reasoning="why", calls=[call(), call("sub", call_id="call-2")])
    async with served(given) as (address, session, _), client(address) as api:
        got = await api.responses.create(
            **ASK, instructions="Be.", tools=TOOLS, max_output_tokens=9, include=["message.output_text.logprobs"]
        )
        outputs = [{"type": "function_call_output", "call_id": f"call-{n}", "output": "4"} for n in (1, 2)]
        items = [{"role": "user", "content": "2+2?"}, *got.output, *outputs]
        await api.responses.create(
            **{**ASK, "input": items}, tools=TOOLS, tool_choice={"type": "function", "name": "add"}
        )
    assert (got.id, got.status, got.output_text, got.instructions) == ("turn-1", "completed", "text", "Be.")
    assert [item.type for item in got.output] == ["reasoning", "message", "function_call", "function_call"]
    assert got.output[1].content[0].logprobs[2].token == "t2"
    assert got.usage.total_tokens == 10
    first, second = session.requests
    assert first.messages == ({"role": "system", "content": "Be."}, {"role": "user", "content": "2+2?"})
    assert (first.settings.max_new_tokens, first.tools[0]["function"]["name"]) == (9, "add")
    _, sent_back, *results = second.messages
    assert sent_back == answer_message(given)
    assert message_key(sent_back) == message_key(answer_message(given))
    assert [one["tool_call_id"] for one in results] == ["call-1", "call-2"]
    assert second.tool_choice == "add"


async def test_a_stream_assembles_to_the_reply():
    given = answer("text", reasoning="why", calls=[call()])
    async with served(given) as (address, _, _), client(address) as api:
        whole = await api.responses.create(**ASK)
        async with api.responses.stream(**ASK) as stream:
            events = [event.type async for event in stream]
            streamed = await stream.get_final_response()
    assert events[0] == "response.created"
    assert events[-1] == "response.completed"
    assert [item.id for item in streamed.output] == [item.id for item in whole.output]
    assert streamed.output_text == whole.output_text
    assert streamed.output[2].arguments == call().arguments


async def test_a_cut_answer_is_incomplete():
    async with served(answer("te", finish_reason="length")) as (address, _, _), client(address) as api:
        got = await api.responses.create(**ASK)
        events = [event async for event in await api.responses.create(**ASK, stream=True)]
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize("keep_alive_s", [0.001, 10.0])
async def test_a_refusal_of_a_stream_becomes_an_error_of_the_sdk(keep_alive_s):
    refused = TurnRefused("no", code="agent.budget", status=400)
    async with served(refused, keep_alive_s=keep_alive_s) as (address, session, _), client(address) as api:
        if keep_alive_s < 1:
            session.may_answer.clear()

        async def read():
            stream = await api.responses.create(**ASK, stream=True)
            session.may_answer.set()
            return [event async for event in stream]

        with pytest.raises(openai.APIError) as caught:
            await read()
    assert caught.value.code == "agent.budget"


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"previous_response_id": "x"}, "previous_response_id", "agent.unsupported_field"),
        ({"text": {"format": {"type": "json_object"}}}, "text", "agent.unsupported_field"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "agent.unsupported_field"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "agent.unsupported_field"),
        ({"include": ["file_search_call.results"]}, "include", "agent.unsupported_field"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "agent.unsupported_field"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
            "agent.remote_image",
        ),
        ({"input": []}, "input", "agent.invalid_field"),
        ({"extra_body": {"n": 2}}, "n", "agent.unknown_field"),
    ],
)
async def test_a_wrong_field_is_refused_by_its_name(more, param, code):
    async with served() as (address, session, _), client(address) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            await api.responses.create(**{**ASK, **more})
        assert (caught.value.param, caught.value.code) == (param, code)
        assert session.requests == []


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_openai_agents_sdk_runs_a_tool_loop(kind, stream):
    set_tracing_disabled(True)
    asked = answer("Let me see.", reasoning="hm", calls=[call(), call(call_id="call-2")])
    async with served(asked, answer("It is 4.")) as (address, session, _), client(address) as api:
        agent = Agent(
            name="calculator",
            instructions="Use the tool.",
            tools=[add],
            model=kind("policy", api),
            model_settings=ModelSettings(temperature=0.7, parallel_tool_calls=True),
        )
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
    assert [(one["tool_call_id"], one["content"]) for one in results] == [("call-1", "4"), ("call-2", "4")]
