"""Sessions without code of an agent: an environment that answers the policy, and Python functions as its tools."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from areal.agent.tool_functions import Tool, answer_call, parsed_arguments, tool_schema
from areal.agent.turns import BUDGET_CODES, Message
from areal.api.errors import ConfigError, RewardError

MAX_TURNS = 64
"""Turns of a session without agent.max_turns."""
_TOOL_TIMEOUT_S = 60.0


class Environment(Protocol):
    """What the policy talks to. One instance per session."""

    async def reset(self, row: dict[str, Any]) -> list[Message]:
        """The first messages of the dialogue on a row."""
        ...

    async def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """The messages after an answer without tool calls, its reward, and whether the dialogue ends."""
        ...


async def run_environment(
    client: Any, row: dict[str, Any], environment: Environment | None, tools: Sequence[Tool]
) -> dict[str, Any] | None:
    """One dialogue. `client`: AsyncOpenAI of the session. Returns the reward of each turn that the environment gave.

    Tool calls of an answer run at the same time and are answered; any other answer goes to the environment. A dialogue
    that the budget of the session ends has the rewards so far, 0 without any. Without an environment the first answer
    without a call ends the dialogue, and it has no reward here.
    """
    messages = list(await environment.reset(row) if environment is not None else first_messages(row))
    schemas, turns = [tool_schema(tool) for tool in tools], dict[str, float]()
    for _ in range(MAX_TURNS):
        options = {"tools": schemas} if schemas else {}
        try:
            completion = await client.chat.completions.create(model="policy", messages=messages, **options)
        except Exception as error:
            if getattr(error, "code", None) not in BUDGET_CODES:
                raise
            break
        answer = completion.choices[0].message
        message = _sent_back(answer)
        messages.append(message)
        if answer.tool_calls:
            messages += await asyncio.gather(*(_tool_message(call, tools) for call in answer.tool_calls))
            continue
        if environment is None:
            break
        found = await environment.step(message)
        new, reward, is_done = _checked(found)
        turns[completion.id] = reward
        messages += new
        if is_done:
            break
    return {"reward": 0.0, "turns": turns} if environment is not None else None


def first_messages(row: dict[str, Any]) -> list[Message]:
    """Where no environment gives the first messages: those of the row. ConfigError when it has none."""
    if isinstance(row.get("messages"), list):
        return list(row["messages"])
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    message = f"a row needs `messages` or `prompt` where no environment gives the first messages, not {sorted(row)}"
    message += ": set train_dataset.map_fn (docs/data.md)"
    raise ConfigError(message, code="agent.no_messages")


def _sent_back(answer: Any) -> Message:
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.tool_calls:
        message["tool_calls"] = [call.model_dump() for call in answer.tool_calls]
    return message


async def _tool_message(call: Any, tools: Sequence[Tool]) -> Message:
    arguments, problem = parsed_arguments(call.function.arguments)
    content = await answer_call(call.function.name, arguments, problem, tools, timeout_s=_TOOL_TIMEOUT_S)
    if isinstance(content, list):
        content = [
            {"type": "image_url", "image_url": {"url": part["url"]}} if part["type"] == "image" else part
            for part in content
        ]
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def _checked(found: Any) -> tuple[list[Message], float, bool]:
    try:
        messages, reward, is_done = found
        return list(messages), float(reward), bool(is_done)
    except (TypeError, ValueError) as error:
        message = f"step returned {found!r}: return (messages, reward, done)"
        raise RewardError(message, code="agent.wrong_step") from error
