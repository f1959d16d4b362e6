"""Requests that published packages send, as a session server logged them: accepted, or refused with a reason.

The loops of reasoning-gym, TextArena, OpenEnv and NeMo-Gym are areal's: these packages send none.
"""

import json

import httpx
import pytest

from areal.agent.turns import TurnSettings
from tests.agent.session_kit import KEY, answer, served

QUESTION = {"role": "user", "content": "What is 97*94?"}
PARAMETERS = {
    "type": "object", "properties": {"expression": {"title": "Expression", "type": "string"}},
    "required": ["expression"], "title": "calculatorArguments",
}  # fmt: skip
FUNCTION = {"name": "calculator", "description": "The value of a product of two numbers.", "parameters": PARAMETERS}
STREAM = {"model": "policy", "stream": True, "stream_options": {"include_usage": True}}
CALL = {"arguments": '{"expression": "97*94"}', "name": "calculator"}
VERIFIERS = {
    "first": {**STREAM, "messages": [{"role": "user", "content": "1+8"}]},
    "tools": {**STREAM, "messages": [QUESTION], "tools": [{"type": "function", "function": FUNCTION}]},
    "result": {
        **STREAM,
        "messages": [
            QUESTION,
            {"role": "assistant", "tool_calls": [{"id": "3c", "function": CALL, "type": "function", "index": 0}]},
            {"role": "tool", "tool_call_id": "3c", "content": "9118", "name": "calculator"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "sampling": {
        **STREAM, "messages": [QUESTION], "temperature": 0.5, "top_p": 0.9, "max_tokens": 20, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "seed": 3,
    },
}  # fmt: skip
"""Of verifiers 0.4.0, harness `null`."""
HEADERS = {
    "User-Agent": "AsyncOpenAI/Python 2.54.0", "x-stainless-retry-count": "0", "X-Stainless-Async": "async:asyncio",
    "X-Session-ID": "46425a7865404718b11de41477675865", "Authorization": "Bearer EMPTY",
}  # fmt: skip


async def sent(address, body, headers, path="/v1/chat/completions"):
    async with httpx.AsyncClient() as http:
        return await http.post(f"{address}{path}", json=body, headers={**HEADERS, **headers})


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("by_path", [False, True])
async def test_a_request_of_verifiers_is_a_stream_that_ends_with_the_usage(name, by_path) -> None:
    body = VERIFIERS[name]
    headers = {} if by_path else {"x-api-key": KEY}  # the bearer belongs to no session
    path = f"/sessions/{KEY}/v1/chat/completions" if by_path else "/v1/chat/completions"
    async with served(answer()) as (address, session, _):
        got = await sent(address, body, headers, path)
    *chunks, end = [line.removeprefix("data: ") for line in got.text.splitlines() if line.startswith("data: ")]
    assert (got.status_code, end) == (200, "[DONE]")
    assert [bool(json.loads(chunk).get("usage")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    (asked,) = session.requests
    assert asked.retry_count == 0
    assert [message["role"] for message in asked.messages] == [message["role"] for message in body["messages"]]
    assert [tool["function"]["name"] for tool in asked.tools] == ["calculator"] * len(body.get("tools", ()))


async def test_the_sampling_of_verifiers_is_that_of_the_turn() -> None:
    async with served(answer()) as (address, session, _):
        await sent(address, VERIFIERS["sampling"], {"x-api-key": KEY})
    (asked,) = session.requests
    assert asked.settings == TurnSettings(max_new_tokens=20, temperature=0.5, top_p=0.9, top_k=100_000_000, seed=3)


@pytest.mark.parametrize(
    ("field", "value"), [("reasoning_effort", "high"), ("min_p", 0.1), ("repetition_penalty", 1.1)]
)
async def test_sampling_that_would_change_the_policy_is_refused(field, value) -> None:
    async with served(refuses_foreign=True) as (address, session, _):
        got = await sent(address, {**VERIFIERS["first"], field: value}, {"x-api-key": KEY})
    error = got.json()["error"]
    assert (got.status_code, error["param"], error["code"]) == (400, field, "agent.unsupported_field")
    assert session.requests == []
