"""Writes the files of the quickstart: a character tokenizer, a random Qwen2-style model, the data. No network.

python examples/quickstart/prepare.py FOLDER [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import task

from areal.data.tiny_model import character_tokenizer, write_tiny_model

NUM_SFT_ROWS = 55 * 256
NUM_RL_ROWS = 8192
NUM_HELD_OUT = 256


def build_tokenizer() -> Any:
    """One token per character."""
    return character_tokenizer([*task.SPECIALS, *task.CHARACTERS])


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model/ and the .jsonl files are written")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(args.folder / "model")
    write_tiny_model(args.folder / "model", tokenizer, args.seed, vocab_size=16)
    held_out = task.make_rows(NUM_HELD_OUT, seed=10_000 + args.seed)
    taken = frozenset(row["prompt"] for row in held_out)
    write_rows(args.folder / "held_out.jsonl", held_out)
    write_rows(args.folder / "sft.jsonl", task.make_rows(NUM_SFT_ROWS, seed=20_000 + args.seed, exclude=taken))
    write_rows(args.folder / "train.jsonl", task.make_rows(NUM_RL_ROWS, seed=30_000 + args.seed, exclude=taken))


if __name__ == "__main__":
    main()
