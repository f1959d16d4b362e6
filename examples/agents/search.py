"""An agent with two tools: it searches a small corpus, opens a document, and answers from what it reads."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, BadRequestError

MAX_TURNS = 6
BUDGET_CODES = ("agent.turn_budget", "agent.token_budget", "agent.prompt_too_long")
"""Codes of HTTP 400 after which the policy has used what it may. Any other error is one of this program."""


def schema(name: str, description: str, parameter: str) -> Any:
    """A tool with one parameter, a text."""
    shape = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": shape}}


TOOLS = [
    schema("search", "The numbers of the documents that contain a text.", "query"),
    schema("open", "The text of a document.", "doc"),
]


@functools.cache
def corpus(path: str) -> dict[str, str]:
    """Document number -> text."""
    rows = (json.loads(line) for line in Path(path).read_text().splitlines())
    return {row["doc"]: row["text"] for row in rows}


class Search:
    """areal makes one instance for each process, and calls `run` for each session."""

    async def run(self, row: dict[str, Any], client: AsyncOpenAI, session: Any) -> dict[str, float]:
        """One episode: the reward is 1 for the right answer; `opened` is the share of sessions with the right text."""
        texts, messages = corpus(row["corpus"]), [{"role": "user", "content": row["question"]}]
        rewards = {"reward": 0.0, "opened": 0.0}
        try:
            for _ in range(MAX_TURNS):
                completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
                answer = completion.choices[0].message
                if not answer.tool_calls:
                    return rewards | {"reward": float((answer.content or "").strip() == row["answer"])}
                messages.append(answer)
                for call in answer.tool_calls:
                    text = self.result(call.function, texts)
                    rewards["opened"] = max(rewards["opened"], float(row["answer"] in text))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        except BadRequestError as error:
            if error.code not in BUDGET_CODES:
                raise
        return rewards

    def result(self, function: Any, texts: dict[str, str]) -> str:
        """What a tool answers. The policy reads what is wrong with a call."""
        arguments = json.loads(function.arguments)
        if function.name == "search" and (query := str(arguments.get("query", ""))):
            return " ".join([doc for doc, text in texts.items() if query in text][:3]) or "none"
        if function.name == "open":
            return texts.get(str(arguments.get("doc")), "none")
        return "error"
