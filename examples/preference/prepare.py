"""Writes the files of the preference examples: the quickstart's tokenizer and random model, and pairs. No network.

python examples/preference/prepare.py FOLDER [--seed 0]

A pair is a prompt of the quickstart, its sorted digits (chosen), and the same digits in another order (rejected).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart" / "prepare.py"
FILES = {"train.jsonl": "train_pairs.jsonl", "held_out.jsonl": "held_out_pairs.jsonl"}


def make_pair(row: dict[str, str], rng: random.Random) -> dict[str, str] | None:
    """None when all digits are equal, because then there is no other order."""
    answer = row["answer"]
    if len(set(answer)) == 1:
        return None
    digits = list(answer)
    while "".join(digits) == answer:
        rng.shuffle(digits)
    return {"prompt": row["prompt"], "chosen": answer, "rejected": "".join(digits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model/ and the .jsonl files are written")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data")
    args = parser.parse_args()
    subprocess.run([sys.executable, QUICKSTART, args.folder, "--seed", str(args.seed)], check=True)
    rng = random.Random(args.seed)
    for source, target in FILES.items():
        rows = [json.loads(line) for line in (args.folder / source).read_text().splitlines()]
        pairs = [pair for row in rows if (pair := make_pair(row, rng)) is not None]
        (args.folder / target).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


if __name__ == "__main__":
    main()
