"""Writes the rows of the agent of two turns: agent_warm_up.jsonl, agent.jsonl and agent_held_out.jsonl.

python examples/smollm2/agent_rows.py FOLDER [--seed 0]
"""

from __future__ import annotations

import json
from typing import Any

import task

NUM_WARM_UP_ROWS, NUM_ROWS, NUM_HELD_OUT = 6 * 8, 512, 96


def agent_rows(count: int, *, seed: int, held_out: bool) -> list[dict[str, Any]]:
    """Rows of the task whose sentence is not in the prompt but in `people`: the policy has to look it up."""
    names = (task.HELD_OUT_VALUES if held_out else task.VALUES)["name"].split()
    rows: list[dict[str, Any]] = []
    for row in task.make_rows(count, seed=seed, held_out=held_out):
        system, asked = row["messages"]
        sentence, _, keys = asked["content"].partition(" Keys: ")
        name = next(name for name in names if name in sentence)
        question = {"role": "user", "content": f"Person: {name}. Keys: {keys}"}
        rows.append({**row, "messages": [system, question], "people": {name: sentence}})
    return rows


def dialogue(row: dict[str, Any]) -> dict[str, Any]:
    """A row for supervised fine-tuning, which trains on both answers of the policy."""
    ((name, sentence),) = row["people"].items()
    texts = [("assistant", json.dumps({"lookup": name})), ("user", sentence), ("assistant", row["answer"])]
    return {"messages": [*row["messages"], *({"role": role, "content": text} for role, text in texts)]}


def rows_of(seed: int) -> dict[str, list[dict[str, Any]]]:
    warm_up = agent_rows(NUM_WARM_UP_ROWS, seed=40_000 + seed, held_out=False)
    return {
        "agent_warm_up": [dialogue(row) for row in warm_up],
        "agent": agent_rows(NUM_ROWS, seed=70_000 + seed, held_out=False),
        "agent_held_out": agent_rows(NUM_HELD_OUT, seed=80_000 + seed, held_out=True),
    }


if __name__ == "__main__":
    task.write_rows(__doc__, rows_of)
