"""Writes pairs.jsonl and held_out_pairs.jsonl for DPO on the real model's task.

python examples/smollm2/pairs.py FOLDER [--seed 0]
"""

from __future__ import annotations

import json
from typing import Any

import task

NUM_PAIRS, NUM_HELD_OUT_PAIRS = 256, 96


def rendered(messages: list[dict[str, str]]) -> str:
    """The prompt as the chat template of the model writes it."""
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def pairs(count: int, *, seed: int, held_out: bool) -> list[dict[str, str]]:
    """The right answer is chosen; the same with one value of another person is rejected."""
    rows = task.make_rows(2 * count, seed=seed, held_out=held_out)
    preference_pairs: list[dict[str, str]] = []
    for row, other in zip(rows[:count], rows[count:], strict=True):
        answer, wrong = json.loads(row["answer"]), json.loads(other["answer"])
        key = next((key for key in answer if wrong.get(key, answer[key]) != answer[key]), "")
        if key:
            rejected = json.dumps(answer | {key: wrong[key]})
            preference_pairs.append(
                {"prompt": rendered(row["messages"]), "chosen": row["answer"], "rejected": rejected}
            )
    return preference_pairs


def rows_of(seed: int) -> dict[str, list[dict[str, Any]]]:
    return {
        "pairs": pairs(NUM_PAIRS, seed=50_000 + seed, held_out=False),
        "held_out_pairs": pairs(NUM_HELD_OUT_PAIRS, seed=60_000 + seed, held_out=True),
    }


if __name__ == "__main__":
    task.write_rows(__doc__, rows_of)
