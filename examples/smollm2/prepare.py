"""Writes the rows of the real model's task: warm_up.jsonl, train.jsonl and held_out.jsonl.

python examples/smollm2/prepare.py FOLDER [--seed 0]
"""

from __future__ import annotations

from typing import Any

import task

NUM_WARM_UP_ROWS = 3 * 8
NUM_TRAIN_ROWS = 1024
NUM_HELD_OUT = 96


def with_answer(row: dict[str, Any]) -> dict[str, Any]:
    """A row for supervised fine-tuning: the answer is the last message."""
    return {"messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]}


def rows_of(seed: int) -> dict[str, list[dict[str, Any]]]:
    warm_up = task.make_rows(NUM_WARM_UP_ROWS, seed=20_000 + seed, held_out=False)
    return {
        "warm_up": [with_answer(row) for row in warm_up],
        "train": task.make_rows(NUM_TRAIN_ROWS, seed=30_000 + seed, held_out=False),
        "held_out": task.make_rows(NUM_HELD_OUT, seed=10_000 + seed, held_out=True),
    }


if __name__ == "__main__":
    task.write_rows(__doc__, rows_of)
