"""Agents for tests: they use the plain openai SDK."""

import asyncio
import contextlib
import itertools
import json
import time
from typing import Any

import openai

TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}


def calculator(expression: str) -> str:
    """A product."""
    first, _, second = expression.partition("*")
    return str(int(first) * int(second))


async def run(row: dict[str, Any], client: Any, session: Any) -> float:
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    for _ in range(3):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        answer = completion.choices[0].message
        if not answer.tool_calls:
            return float(answer.content == row["answer"])
        messages.append(answer)
        for call in answer.tool_calls:
            text = calculator(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return 0.0


async def ask(row: dict[str, Any], client: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["question"]}])


class WithParts:
    """Turn rewards, parts and a metric."""

    async def run(self, row: dict[str, Any], client: Any, session: Any) -> dict[str, Any]:
        first = await ask(row, client)
        session.reward(0.25, of=0)
        return {"reward": 1.0, "format": 0.5, "turns": {first.id: 0.5}}


async def without_reward(row: dict[str, Any], client: Any, session: Any) -> None:
    await ask(row, client)


async def sometimes_without_reward(row: dict[str, Any], client: Any, session: Any) -> float | None:
    answer = await ask(row, client)
    return 1.0 if answer.choices[0].message.content == "1" else None


async def asks_nothing(row: dict[str, Any], client: Any, session: Any) -> float:
    return 1.0


_ASKS = itertools.cycle([True, True, False])


async def asks_in_some(row: dict[str, Any], client: Any, session: Any) -> float:
    """A reward for every session, also for one that asked nothing."""
    if next(_ASKS):
        await ask(row, client)
    return 1.0


async def raises(row: dict[str, Any], client: Any, session: Any) -> float:
    await ask(row, client)
    raise LookupError("no such page")


async def raises_after_two(row: dict[str, Any], client: Any, session: Any) -> float:
    answer = await ask(row, client)
    if answer.choices[0].message.content == "2":
        raise LookupError("no such page")
    return 1.0


async def hangs(row: dict[str, Any], client: Any, session: Any) -> float:
    await ask(row, client)
    await asyncio.Event().wait()
    return 1.0


async def blocks(row: dict[str, Any], client: Any, session: Any) -> float:
    await ask(row, client)
    time.sleep(3600)
    return 1.0


async def too_many_turns(row: dict[str, Any], client: Any, session: Any) -> float:
    for _ in range(10):
        await ask(row, client)
    return 1.0


async def returns_its_own(row: dict[str, Any], client: Any, session: Any) -> float:
    """Asks until it is refused, and returns its own reward."""
    with contextlib.suppress(openai.BadRequestError):
        while True:
            await ask(row, client)
    return 0.25


async def fails_beyond_budget(row: dict[str, Any], client: Any, session: Any) -> float:
    """Its first request is answered. What it raises because of the refusal of the second one depends on the row."""
    await ask(row, client)
    try:
        await ask(row, client)
    except Exception as refusal:
        if row["kind"] == "wrapped":
            raise RuntimeError("the model failed") from refusal
        if row["kind"] == "in a group":
            raise ExceptionGroup("tasks", [refusal]) from None
        if row["kind"] == "while handling it":
            raise RuntimeError("the model failed")  # noqa: B904 - as some agents do
    return float(row["no such column"])


class Guessing:
    """An environment: the policy guesses a number in at most three answers."""

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.answer, self.left = row["answer"], 3
        return [{"role": "user", "content": row["question"]}]

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        self.left -= 1
        is_right = message["content"] == self.answer
        return [{"role": "user", "content": "no"}], float(is_right), is_right or not self.left


class Lookups:
    """A service that answers two requests at the same time, each in 5 ms, on a clock of its own: it has the requests
    of `num_sessions` sessions at the same moment, and a client waits 30 ms for its answer."""

    def __init__(self, num_sessions: int) -> None:
        self._together, self._places = asyncio.Barrier(num_sessions), itertools.count()

    async def is_in_time(self) -> bool:
        place = next(self._places)
        await self._together.wait()
        return 5 * (place // 2 + 1) <= 30


async def with_lookup(row: dict[str, Any], client: Any, session: Any) -> float:
    """A tool of the agent may time out, and a time-out looks like a wrong answer."""
    result = await row["lookups"].is_in_time()
    answer = await ask(row, client)
    return float(result and answer.choices[0].message.content == row["answer"])


async def rewarded_later(row: dict[str, Any], client: Any, session: Any) -> None:
    """Its reward comes by POST after its end."""
    await ask(row, client)
    row["addresses"].append(f"{session.base_url.removesuffix('/v1')}/sessions/{session.key}/reward")


async def streams(row: dict[str, Any], client: Any, session: Any) -> float:
    """Two streamed answers with every setting of sampling."""
    chunks = await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": row["question"]}],
        stream=True,
        n=2,
        stop=["!"],
        seed=5,
        logprobs=True,
        max_tokens=9,
        temperature=0.5,
    )
    texts, logprobs = ["", ""], [0, 0]
    async for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += len(choice.logprobs.content or ()) if choice.logprobs else 0
    row["streamed"] = texts, logprobs
    return 1.0


async def rewards_each_call(row: dict[str, Any], client: Any, session: Any) -> float:
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    for _ in range(2):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        messages.append(completion.choices[0].message)
        for call in completion.choices[0].message.tool_calls:
            session.reward(0.5, of=call.id)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "1"})
    return 1.0
