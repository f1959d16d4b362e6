"""The calculator task as an environment: areal holds the dialogue, and calls the tool.

workflow_args.environment=examples/agents/environment.py:Multiplication
workflow_args.tools=[examples/agents/calculator.py:calculator]
"""

from __future__ import annotations

from typing import Any


class Multiplication:
    """One question and one answer, with any tool calls between them. One instance per session."""

    async def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        self._answer = row["answer"]
        return [{"role": "user", "content": row["question"]}]

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, str]], float, bool]:
        """New messages, the reward, and whether the dialogue ends."""
        return [], float((message["content"] or "").strip() == self._answer), True
