"""Writes the rows of the real model's task: warm_up.jsonl, train.jsonl and held_out.jsonl.

python examples/smollm2/prepare.py FOLDER [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import task

NUM_WARM_UP_ROWS = 3 * 8
NUM_TRAIN_ROWS = 1024
NUM_HELD_OUT = 96


def with_answer(row: dict[str, Any]) -> dict[str, Any]:
    """A row for supervised fine-tuning: the answer is the last message."""
    return {"messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the .jsonl files are written")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    warm_up = task.make_rows(NUM_WARM_UP_ROWS, seed=20_000 + args.seed, held_out=False)
    rows = {
        "warm_up": [with_answer(row) for row in warm_up],
        "train": task.make_rows(NUM_TRAIN_ROWS, seed=30_000 + args.seed, held_out=False),
        "held_out": task.make_rows(NUM_HELD_OUT, seed=10_000 + args.seed, held_out=True),
    }
    for name, lines in rows.items():
        (args.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
