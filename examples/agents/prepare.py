"""Writes the files of the agent examples: a small tokenizer with a chat template, a random model, the data. No network.

python examples/agents/prepare.py FOLDER [--task calculator|search] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import tiny_model

Row = dict[str, str]
NUM_WARM_UP, NUM_TRAIN, NUM_HELD_OUT = 240 * 128, 4096, 128
CALLS_ONE_IN = 5
"""Of the warm-up rows with a question, one in this number calls the first tool. The others guess."""
CALCULATE = '{"name": "calculator", "arguments": {"expression": "'
SEARCH, OPEN = '{"name": "search", "arguments": {"query": "', '{"name": "open", "arguments": {"doc": "'
END_CALL = '"}}'
PIECES = {
    "calculator": (CALCULATE, END_CALL, "What is ", "calculator"),
    "search": (SEARCH, OPEN, END_CALL, "Code of ", "search", "open"),
}
"""By task, the texts of one token each; all others are single characters."""
MAX_DOCUMENTS, NUM_HELD_OUT_DOCUMENTS = 900, 100


def products(count: int, seed: int) -> list[Row]:
    """Products of two numbers of two digits."""
    rng = random.Random(seed)
    pairs = [(rng.randrange(32, 100), rng.randrange(32, 100)) for _ in range(count)]
    return [{"question": f"What is {left}*{other}?", "answer": str(left * other)} for left, other in pairs]


def guess_or(call: str, rng: random.Random) -> str:
    """Mostly four digits, sometimes a call."""
    return f"<tool_call>{call}" if not rng.randrange(CALLS_ONE_IN) else str(rng.randrange(1000, 10_000))


def calculator_warm_up(count: int, seed: int) -> list[Row]:
    """The form of dialogues: a third guesses or calls, a third completes a call, a third repeats the result of one."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for index, row in enumerate(products(count, seed)):
        asked = f"<|tools|>calculator <|end|><|user|>{row['question']}<|end|><|assistant|>"
        expression = row["question"].removeprefix("What is ").removesuffix("?")
        call = f"{CALCULATE}{expression}{END_CALL}</tool_call>"
        answered = f"{asked}<tool_call>{call}<|end|><|tool|>{row['answer']}<|end|><|assistant|>"
        if index % 3 == 0:
            rows.append({"prompt": answered, "answer": row["answer"]})
        elif index % 3 == 1:
            rows.append({"prompt": f"{asked}<tool_call>", "answer": call})
        else:
            rows.append({"prompt": asked, "answer": guess_or(call, rng)})
    return rows


def documents(seed: int) -> list[Row]:
    """The corpus: one document for each of 900 names, which says its code."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = {"".join(rng.choices(letters, k=4)): None for _ in range(2 * MAX_DOCUMENTS)}
    pairs = zip(rng.sample(range(100, 1000), MAX_DOCUMENTS), names, strict=False)
    return [{"doc": str(number), "name": name, "code": str(rng.randrange(1000, 10_000))} for number, name in pairs]


def search_questions(count: int, seed: int, corpus: list[Row], file: Path) -> list[Row]:
    """Questions about documents. The row names the corpus, which the agent's tools read."""
    rng = random.Random(seed)
    chosen = [rng.choice(corpus) for _ in range(count)]
    return [{"question": f"Code of {page['name']}?", "answer": page["code"], "corpus": str(file)} for page in chosen]


def search_warm_up(count: int, seed: int) -> list[Row]:
    """The form of dialogues about documents of another corpus: guesses, both calls, and the code in a page."""
    rng = random.Random(seed)
    rows: list[Row] = []
    while len(rows) < count:
        for page in documents(rng.randrange(1 << 30))[: count - len(rows)]:
            asked = f"<|tools|>search open <|end|><|user|>Code of {page['name']}?<|end|><|assistant|>"
            search = f"{SEARCH}{page['name']}{END_CALL}</tool_call>"
            searched = f"{asked}<tool_call>{search}<|end|><|tool|>{page['doc']}<|end|><|assistant|>"
            opening = f"{OPEN}{page['doc']}{END_CALL}</tool_call>"
            opened = f"{searched}<tool_call>{opening}<|end|><|tool|>{page['name']}: {page['code']}<|end|><|assistant|>"
            turns = [
                (opened, page["code"]),
                (f"{asked}<tool_call>", search),
                (f"{searched}<tool_call>", opening),
                (asked, guess_or(search, rng)),
                (searched, guess_or(opening, rng) if rng.randrange(2) else f"<tool_call>{opening}"),
            ]
            prompt, answer = turns[len(rows) % 5]
            rows.append({"prompt": prompt, "answer": answer})
    return rows


def write_rows(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model/ and the .jsonl files are written")
    parser.add_argument("--task", choices=PIECES, default="calculator", help="the tools of the agent")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data")
    args = parser.parse_args()
    folder, seed = args.folder.resolve(), args.seed
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_model.build_tokenizer(PIECES[args.task])
    tokenizer.save_pretrained(folder / "model")
    tiny_model.build_model(tokenizer, seed).save_pretrained(folder / "model")
    if args.task == "calculator":
        warm_up = calculator_warm_up(NUM_WARM_UP, seed + 1)
        train, held_out = products(NUM_TRAIN, seed + 2), products(NUM_HELD_OUT, seed + 3)
    else:
        corpus, file = documents(seed), folder / "corpus.jsonl"
        write_rows(file, [{"doc": page["doc"], "text": f"{page['name']}: {page['code']}"} for page in corpus])
        warm_up = search_warm_up(NUM_WARM_UP, seed + 1)
        train = search_questions(NUM_TRAIN, seed + 2, corpus[NUM_HELD_OUT_DOCUMENTS:], file)
        held_out = search_questions(NUM_HELD_OUT, seed + 3, corpus[:NUM_HELD_OUT_DOCUMENTS], file)
    write_rows(folder / "warm_up.jsonl", warm_up)
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "held_out.jsonl", held_out)


if __name__ == "__main__":
    main()
