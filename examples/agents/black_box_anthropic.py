"""The same program with the anthropic SDK. It knows the right answer, and reports its reward by POST.

workflow_args={command: [python, examples/agents/black_box_anthropic.py, "{question}", "{answer}"]}
"""

from __future__ import annotations

import os
import sys
from typing import Any

import httpx
from anthropic import Anthropic, BadRequestError
from calculator import BUDGET_CODES, MAX_TURNS, TOOL, calculator

ANTHROPIC_TOOL: Any = {
    "name": TOOL["function"]["name"],
    "description": TOOL["function"]["description"],
    "input_schema": TOOL["function"]["parameters"],
}


def dialogue(question: str) -> str:
    """The text of the last answer; empty when the budget of the session ended before."""
    client = Anthropic()  # reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
    messages: list[Any] = [{"role": "user", "content": question}]
    try:
        for _ in range(MAX_TURNS):
            answer = client.messages.create(model="policy", max_tokens=64, messages=messages, tools=[ANTHROPIC_TOOL])
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in answer.content if block.type == "text")
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": calculator(str(call.input.get("expression"))),
                }
                for call in calls
            ]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    except BadRequestError as error:
        if error.body["error"]["code"] not in BUDGET_CODES:
            raise
    return ""


def main(question: str, expected: str) -> None:
    reward = float(dialogue(question).strip() == expected)
    session = f"{os.environ['ANTHROPIC_BASE_URL']}/sessions/{os.environ['ANTHROPIC_API_KEY']}"
    httpx.post(f"{session}/reward", json={"reward": reward}, timeout=60).raise_for_status()


if __name__ == "__main__":
    main(*sys.argv[1:])
