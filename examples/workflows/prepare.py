"""Writes a tokenizer of single characters, a small random model and the data of the calculator example. No network.

python examples/workflows/prepare.py runs/calculator/data
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from areal.data.tiny_model import character_tokenizer, tiny_model

TOKENS = ["<pad>", "<eos>", "<unk>", *"0123456789+=?"]


def problems(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Pairs of a sum such as `31+15` and its value."""
    rng = random.Random(seed)
    for _ in range(count):
        left, other = rng.randrange(10, 50), rng.randrange(10, 50)
        yield f"{left}+{other}", str(left + other)


def warm_up_rows(count: int, seed: int) -> Iterator[dict[str, str]]:
    """A third calls the calculator, a third guesses, and a third copies the result of a call."""
    rng = random.Random(seed)
    for index, (text, value) in enumerate(problems(count, seed)):
        guess = str(rng.randrange(20, 100))
        yield [
            {"prompt": f"{text}=", "answer": f"{text}?"},
            {"prompt": f"{text}=", "answer": guess},
            {"prompt": f"{text}={text}?<eos>{value}=", "answer": value},
        ][index % 3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model/ and the .jsonl files are written")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer(TOKENS)
    tokenizer.save_pretrained(args.folder / "model")
    tiny_model(tokenizer, args.seed).save_pretrained(args.folder / "model")
    rows = {
        "warm_up": list(warm_up_rows(120 * 256, args.seed + 1)),
        "train": [{"prompt": f"{text}=", "answer": value} for text, value in problems(4096, args.seed + 2)],
        "held_out": [{"prompt": f"{text}=", "answer": value} for text, value in problems(128, args.seed + 3)],
    }
    for name, rows_of_file in rows.items():
        (args.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_file))


if __name__ == "__main__":
    main()
