"""Writes pairs.jsonl and held_out_pairs.jsonl for DPO on the real model's task.

python examples/smollm2/pairs.py FOLDER [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import task

NUM_PAIRS, NUM_HELD_OUT_PAIRS = 256, 96


def rendered(messages: list[dict[str, str]]) -> str:
    """The prompt as the chat template of the model writes it."""
    turns = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def pairs(count: int, *, seed: int, held_out: bool) -> list[dict[str, str]]:
    """The right answer is chosen; the same with one value of another person is rejected."""
    rows = task.make_rows(2 * count, seed=seed, held_out=held_out)
    found: list[dict[str, str]] = []
    for row, other in zip(rows[:count], rows[count:], strict=True):
        answer, wrong = json.loads(row["answer"]), json.loads(other["answer"])
        key = next((key for key in answer if wrong.get(key, answer[key]) != answer[key]), "")
        if key:
            rejected = json.dumps(answer | {key: wrong[key]})
            found.append({"prompt": rendered(row["messages"]), "chosen": row["answer"], "rejected": rejected})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the .jsonl files are written")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = {
        "pairs": pairs(NUM_PAIRS, seed=50_000 + args.seed, held_out=False),
        "held_out_pairs": pairs(NUM_HELD_OUT_PAIRS, seed=60_000 + args.seed, held_out=True),
    }
    for name, lines in rows.items():
        (args.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
