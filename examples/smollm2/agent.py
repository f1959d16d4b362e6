"""An agent of two turns with the openai client: the policy looks a person up, then answers with the asked keys."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError

BUDGET_CODES = ("agent.turn_budget", "agent.token_budget", "agent.prompt_too_long")
"""Codes of HTTP 400 after which the policy has used what it may. Any other error is one of this program."""


def lookup(people: dict[str, str], call: str) -> str:
    """What is known of the person that the call `{"lookup": NAME}` names."""
    try:
        return people[json.loads(call)["lookup"]]
    except (ValueError, KeyError, TypeError):
        return "no such person"


async def run(row: dict[str, Any], client: AsyncOpenAI, session: Any) -> float:
    """One episode: 1 for exactly the asked keys and their values, else 0."""
    messages = list(row["messages"])
    try:
        call = await client.chat.completions.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": call.choices[0].message.content or ""})
        messages.append({"role": "user", "content": lookup(row["people"], messages[-1]["content"])})
        final = await client.chat.completions.create(model="policy", messages=messages)
        written = json.loads(final.choices[0].message.content or "")
    except ValueError:
        return 0.0
    except BadRequestError as error:
        if error.code not in BUDGET_CODES:
            raise
        return 0.0
    return float(isinstance(written, dict) and written == json.loads(row["answer"]))
