"""The calculator agent as a separate program, of which areal knows the command line only.

workflow_args={command: [python, examples/agents/black_box.py, "{question}"]} reward_fn=exact
"""

from __future__ import annotations

import sys
from typing import Any

from calculator import MAX_TURNS, TOOL, result_of
from openai import OpenAI


def main() -> None:
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    messages: list[Any] = [{"role": "user", "content": sys.argv[1]}]
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        if not answer.tool_calls:
            break
        messages.append(answer)
        messages += [result_of(call) for call in answer.tool_calls]


if __name__ == "__main__":
    main()
