"""Writes the files of the vision quickstart: a tokenizer, a random Qwen3-VL model, rows with images. No network.

python examples/vision/prepare.py FOLDER [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import squares
from tiny_vision import tiny_vision_model, write_image_processor

from areal.data.tiny_model import IMAGE_TOKENS, character_tokenizer

NUM_SFT_ROWS = 40 * 128
NUM_RL_ROWS = 4096
NUM_HELD_OUT = 256


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model/ and the .jsonl files are written")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data")
    args = parser.parse_args()
    model = args.folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    tokens = ["<pad>", "<eos>", "<unk>", *IMAGE_TOKENS, "<|assistant|>", *squares.TOKENS]
    tokenizer = character_tokenizer(tokens, context_length=64, chat_template=squares.TEMPLATE)
    tokenizer.save_pretrained(model)
    # ten times the initial weights of large models, with which nothing is learnt in a minute
    tiny_vision_model(tokenizer, args.seed, initializer_range=0.2).save_pretrained(model)
    write_image_processor(model)
    seed = args.seed
    write_rows(args.folder / "sft.jsonl", squares.make_rows(NUM_SFT_ROWS, seed=20_000 + seed, colour_part=0.25))
    write_rows(args.folder / "train.jsonl", squares.make_rows(NUM_RL_ROWS, seed=30_000 + seed, colour_part=0.1))
    write_rows(args.folder / "held_out.jsonl", squares.make_rows(NUM_HELD_OUT, seed=10_000 + seed, colour_part=0.1))


if __name__ == "__main__":
    main()
