"""Rows of GSM8K for supervised fine-tuning: a question and its worked solution as chat messages."""

from __future__ import annotations

from typing import Any


def dialogue(row: dict[str, str]) -> dict[str, Any]:
    turns = [("user", row["question"]), ("assistant", row["answer"])]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}
