"""Agents for the tests of rehearsals: a good one, and one for each way to lose something."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import agents
import httpx
from openai import APIConnectionError, APIStatusError, BadRequestError, _base_client

from tests.agent.calculator_agents import calculator

_base_client.INITIAL_RETRY_DELAY = 0.01  # this file is imported in a worker process only
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string", "examples": ["6*7"]}}}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": SCHEMA}}


def checked(call: Any) -> str:
    try:
        return calculator(**json.loads(call.function.arguments))
    except (TypeError, ValueError):
        return "error"


async def dialogue(row: dict[str, Any], client: Any, tool: Any) -> float:
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    for _ in range(4):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        answer = completion.choices[0].message
        if not answer.tool_calls:
            return float(answer.content == row["answer"])
        messages.append(answer)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": tool(call)} for call in answer.tool_calls]
    return 0.0


async def good(row: dict[str, Any], client: Any, session: Any) -> float:
    try:
        return await dialogue(row, client, checked)
    except BadRequestError:
        return 0.0


async def with_runner(row: dict[str, Any], client: Any, session: Any) -> float:
    """An agent of openai-agents, which sends reasoning back only to models named after one vendor."""
    agents.set_tracing_disabled(True)
    model = agents.OpenAIChatCompletionsModel(row.get("model", "policy"), client)

    @agents.function_tool(name_override="calculator")
    def multiply(expression: str) -> str:
        return calculator(expression)

    result = await agents.Runner.run(agents.Agent("one", tools=[multiply], model=model), row["question"])
    return float(result.final_output == row["answer"])


async def trusts_arguments(row: dict[str, Any], client: Any, session: Any) -> float:
    return await dialogue(row, client, lambda call: calculator(**json.loads(call.function.arguments)))  # crashes here


async def swallows(row: dict[str, Any], client: Any, session: Any) -> float:
    try:
        return await dialogue(row, client.with_options(max_retries=0), checked)  # swallowed here
    except (APIConnectionError, APIStatusError):
        return 0.0


async def hangs(row: dict[str, Any], client: Any, session: Any) -> float:
    while not await dialogue(row, client, checked):
        await asyncio.Event().wait()  # hangs here
    return 1.0


async def leaks(row: dict[str, Any], client: Any, session: Any) -> float:
    row["task"] = asyncio.create_task(asyncio.Event().wait(), name="poller")  # leaks here
    row["process"] = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    return await dialogue(row, client, checked)


async def repeats_without_mark(row: dict[str, Any], client: Any, session: Any) -> float:
    """An HTTP client of its author, which repeats a request as a new one."""
    body = {"model": "policy", "messages": [{"role": "user", "content": row["question"]}]}
    headers = {"Authorization": f"Bearer {session.key}"}
    async with httpx.AsyncClient(base_url=session.base_url, headers=headers, verify=False) as http:
        for _ in range(3):
            try:
                reply = await http.post("/chat/completions", json=body)
            except httpx.HTTPError:
                continue
            return float(reply.json()["choices"][0]["message"]["content"] == row["answer"])
    return 0.0


async def streams(row: dict[str, Any], client: Any, session: Any) -> float:
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    text = ""
    async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True):
        text += chunk.choices[0].delta.content or ""
    return float(text == row["answer"])


class OneAnswer:
    """An environment that compares one answer."""

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.answer = row["answer"]
        return [{"role": "user", "content": row["question"]}]

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        return [], float(message["content"] == self.answer), True


class Unprepared(OneAnswer):
    """It expects that an answer has text."""

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        return [], float(message["content"][0] == self.answer), True  # fails here
