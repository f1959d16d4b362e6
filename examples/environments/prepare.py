"""Writes the model and the warm-up rows of an example: a small tokenizer, random weights, dialogues. No network.

python examples/environments/prepare.py FOLDER --task mixture|guess|nim|smollm2 [--seed 0]

`smollm2`: warm-up rows of the mixture alone, for the model of `areal fetch smollm2`.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Callable
from pathlib import Path

from areal.data.tiny_model import character_tokenizer, tiny_model

Row = dict[str, str]
NUM_ROWS = {"mixture": 480 * 128, "guess": 160 * 128, "nim": 160 * 128}
SUM, SPELL = (
    "State the final answer to the following arithmetic problem: ",
    "Spell this word backward (example: sun -> nus): ",
)
RULES = (
    "!\nRules:\n- On your turn, remove at least one object from exactly one pile.\n- Remove objects with the format "
    "'[pile quantity]', e.g. '[0 3]'.\n- Whoever takes the last object(s) wins!\n"
)
WELCOME, PILES = "[GAME] Welcome to Nim, Player ", "[GAME] Current Pile:\n"
PIECES = {
    "mixture": (SUM, SPELL),
    "guess": ("guess", "higher", "lower", "right"),
    "nim": (WELCOME, RULES, PILES, "  pile ", "[GAME] Player ", " removes ", " from pile ", "[Player "),
}
"""By task, the texts of one token each; all others are single characters."""
CONTEXT = {"mixture": 96, "guess": 96, "nim": 448}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMOLLM2_ROWS = 12 * 8
WORDS = ("cat", "dog", "bus", "map", "pen", "cup", "hat", "box", "key", "jam", "fox", "net", "pig", "log", "fan", "zip")
RIGHT = 0.6
"""Share of good answers in the warm-up of mixture and guess: the others teach the form only."""


def asked(*texts: str) -> str:
    """A dialogue of the user and the assistant in turn, as the chat template writes it."""
    roles = ("user", "assistant")
    return "".join(f"<|{roles[k % 2]}|>{text}<|end|>" for k, text in enumerate(texts)) + "<|assistant|>"


def mixture_row(rng: random.Random) -> Row:
    """A sum of two digits, or a word, with the right answer or one of the same form."""
    if rng.randrange(2):
        first, second, sign = rng.randrange(1, 10), rng.randrange(1, 10), rng.choice("+-")
        right = first + second if sign == "+" else first - second
        answer = right if rng.random() < RIGHT else rng.randrange(-8, 19)
        return {"prompt": asked(f"{SUM}{first} {sign} {second} ="), "answer": str(answer)}
    word = "".join(rng.choices(string.ascii_lowercase, k=rng.randrange(3, 6)))
    answer = word[::-1] if rng.random() < RIGHT else "".join(rng.sample(word, len(word)))
    return {"prompt": asked(f"{SPELL}{word}"), "answer": answer}


def smollm2_row(rng: random.Random) -> dict[str, list[Row]]:
    """A sum or a word of three letters, with the right answer, as messages."""
    if rng.randrange(2):
        first, second, sign = rng.randrange(1, 10), rng.randrange(1, 10), rng.choice("+-")
        question, answer = f"{SUM}{first} {sign} {second} =", str(first + second if sign == "+" else first - second)
    else:
        word = rng.choice(WORDS)
        question, answer = f"{SPELL}{word}", word[::-1]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def guess_row(rng: random.Random) -> Row:
    """Up to three guesses with their hints, then a guess that agrees with the hints, or a random one."""
    number, texts, low, high = rng.randrange(10), ["guess"], 0, 9
    for _ in range(rng.randrange(4)):
        guess = rng.choice([digit for digit in range(10) if digit != number])
        texts += [str(guess), "higher" if guess < number else "lower"]
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
    answer = rng.randrange(low, high + 1) if rng.random() < RIGHT else rng.randrange(10)
    return {"prompt": asked(*texts), "answer": str(answer)}


def shown(piles: list[int]) -> str:
    return PILES + "\n".join(f"  pile {place}: {size}" for place, size in enumerate(piles))


def nim_row(rng: random.Random) -> Row:
    """A game of random moves so far, as one player sees it, and a random move, mostly a legal one."""
    piles, me, turn = [3, 4, 5], rng.randrange(2), 0
    texts, new = list[str](), f"{WELCOME}{me}{RULES}{shown(piles)}"
    for _ in range(rng.randrange(6)):
        pile = rng.choice([place for place in range(3) if piles[place]])
        count = rng.randrange(1, piles[pile] + 1)
        if sum(piles) == count:
            break
        if turn == me:
            texts += [new, f"[{pile} {count}]"]
            new = ""
        piles[pile] -= count
        told = (
            f"[Player {turn}] [{pile} {count}]\n[GAME] Player {turn} removes {count} from pile {pile}.\n{shown(piles)}"
        )
        new, turn = f"{new}\n{told}" if new else told, 1 - turn
    if turn != me:
        return nim_row(rng)
    pile = rng.choice([place for place in range(3) if piles[place]])
    move = (pile, rng.randrange(1, piles[pile] + 1)) if rng.random() < 0.9 else (rng.randrange(3), rng.randrange(1, 6))
    return {"prompt": asked(*texts, new), "answer": f"[{move[0]} {move[1]}]"}


MAKERS: dict[str, Callable[[random.Random], Row]] = {"mixture": mixture_row, "guess": guess_row, "nim": nim_row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model/ and warm_up.jsonl are written")
    parser.add_argument("--task", choices=[*PIECES, "smollm2"], required=True)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the rows")
    args = parser.parse_args()
    folder, rng = args.folder.resolve(), random.Random(args.seed)
    folder.mkdir(parents=True, exist_ok=True)
    if args.task == "smollm2":
        chats = [smollm2_row(rng) for _ in range(SMOLLM2_ROWS)]
        (folder / "warm_up.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        return
    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    tokens = ["<pad>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>", *PIECES[args.task], *characters]
    tokenizer = character_tokenizer(tokens, end="<|end|>", context_length=CONTEXT[args.task], chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder / "model")
    tiny_model(tokenizer, args.seed, num_heads=8, initializer_range=0.1).save_pretrained(folder / "model")
    rows = [MAKERS[args.task](rng) for _ in range(NUM_ROWS[args.task])]
    (folder / "warm_up.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
