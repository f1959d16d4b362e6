"""An agent with the plain openai SDK: the policy may call a calculator, and then answers."""

from __future__ import annotations

import json
import re
from typing import Any

from openai import AsyncOpenAI, BadRequestError

MAX_TURNS = 4
BUDGET_CODES = ("agent.turn_budget", "agent.token_budget", "agent.prompt_too_long")
"""Codes of HTTP 400 after which the policy has used what it may. Any other error is one of this program."""


def calculator(expression: str) -> str:
    """The value of a product of two numbers."""
    match = re.fullmatch(r"(\d{1,4})\*(\d{1,4})", expression)
    return str(int(match[1]) * int(match[2])) if match else "error"


TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of a product of two numbers.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def result_of(call: Any) -> dict[str, str]:
    """The message that answers a tool call. The policy reads what is wrong with its arguments."""
    try:
        text = calculator(json.loads(call.function.arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        text = "error"
    return {"role": "tool", "tool_call_id": call.id, "content": text}


async def run(row: dict[str, Any], client: AsyncOpenAI, session: Any) -> float:
    """One episode: 1 for the right answer, else 0."""
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    try:
        for _ in range(MAX_TURNS):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            answer = completion.choices[0].message
            if not answer.tool_calls:
                return float((answer.content or "").strip() == row["answer"])
            messages.append(answer)
            messages += [result_of(call) for call in answer.tool_calls]
    except BadRequestError as error:
        if error.code not in BUDGET_CODES:
            raise
    return 0.0
