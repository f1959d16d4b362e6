"""The calculator agent as a separate program, of which areal knows the command line only. A function gives the reward.

workflow_args={command: [python, examples/agents/black_box.py, "{question}"]} reward_fn=exact
"""

from __future__ import annotations

import sys
from typing import Any

from calculator import BUDGET_CODES, MAX_TURNS, TOOL, result_of
from openai import BadRequestError, OpenAI


def main(question: str) -> None:
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    messages: list[Any] = [{"role": "user", "content": question}]
    try:
        for _ in range(MAX_TURNS):
            answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
            if not answer.tool_calls:
                return
            messages.append(answer)
            messages += [result_of(call) for call in answer.tool_calls]
    except BadRequestError as error:
        if error.code not in BUDGET_CODES:
            raise


if __name__ == "__main__":
    main(sys.argv[1])
