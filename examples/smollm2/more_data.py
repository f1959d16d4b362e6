"""Writes the rows of the further examples: pairs for DPO, and the rows of the agent of two turns.

python examples/smollm2/more_data.py FOLDER [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import prepare
import task

NUM_PAIRS, NUM_HELD_OUT_PAIRS = 256, 96
NUM_WARM_UP_ROWS, NUM_AGENT_ROWS = 5 * 8, 512


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


def agent_rows(count: int, *, seed: int, held_out: bool) -> list[dict[str, Any]]:
    """Rows whose sentence is in `people`: the policy has to look it up."""
    rows: list[dict[str, Any]] = []
    for row in task.make_rows(count, seed=seed, held_out=held_out):
        sentence, _, keys = row["messages"][-1]["content"].partition(" Keys: ")
        names = (task.HELD_OUT_VALUES if held_out else task.VALUES)["name"].split()
        name = next(name for name in names if name in sentence)
        system, question = row["messages"][0], {"role": "user", "content": f"Person: {name}. Keys: {keys}"}
        rows.append({"messages": [system, question], "people": {name: sentence}, "answer": row["answer"]})
    return rows


def dialogue(row: dict[str, Any]) -> dict[str, Any]:
    """A row for supervised fine-tuning: both answers of the policy are trained on."""
    ((name, sentence),) = row["people"].items()
    call = {"role": "assistant", "content": json.dumps({"lookup": name})}
    found = {"role": "user", "content": sentence}
    return {"messages": [*row["messages"], call, found, {"role": "assistant", "content": row["answer"]}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the .jsonl files are written")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    warm_up = agent_rows(NUM_WARM_UP_ROWS, seed=40_000 + args.seed, held_out=False)
    rows = {
        "pairs": pairs(NUM_PAIRS, seed=50_000 + args.seed, held_out=False),
        "held_out_pairs": pairs(NUM_HELD_OUT_PAIRS, seed=60_000 + args.seed, held_out=True),
        "agent_warm_up": [dialogue(row) for row in warm_up],
        "agent": agent_rows(NUM_AGENT_ROWS, seed=70_000 + args.seed, held_out=False),
        "agent_held_out": agent_rows(prepare.NUM_HELD_OUT, seed=80_000 + args.seed, held_out=True),
    }
    for name, lines in rows.items():
        (args.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
