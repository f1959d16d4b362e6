"""The task of the real model: read a sentence about a person and write the asked keys as JSON.

Prompt `Omar, 31, is a baker from Quito and owns a dog. Keys: job, age`, answer `{"job": "baker", "age": 31}`.
The values of held-out rows, except ages, occur in no training row.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

SYSTEM = "Answer in JSON."
KEYS = ("name", "age", "city", "job", "pet")
MOST_KEYS = 4
VALUES = {
    "name": "Anna Omar Lucy Mei Paul Nora Sofia Hugo Emma Rosa Tom Yuki Maria Sam Ines David Laura Peter Julia Henry "
    "Sarah Daniel Olga Simon Clara Victor Helen Oscar Alice Bruno",
    "city": "Paris Lima Oslo Delhi Quito Rome Berlin Hanoi London Madrid Dublin Boston Lisbon Vienna Prague Athens "
    "Warsaw Milan Sydney Toronto Chicago Denver Nairobi Havana Manila",
    "job": "baker nurse pilot farmer lawyer painter singer waiter doctor tailor dentist actor chef sailor builder "
    "editor plumber barber dancer guard",
    "pet": "dog cat horse parrot turtle goat snake duck pig sheep lizard canary",
}
HELD_OUT_VALUES = {
    "name": "Ivan Karl Ali Leo Max Martin Nina Robert Eva Frank",
    "city": "Cairo Tunis Tokyo Seoul Munich Dallas Moscow Geneva",
    "job": "teacher driver writer miner clerk banker",
    "pet": "rabbit hamster pony frog",
}
SENTENCES = (
    "{name} is {age} years old, lives in {city}, works as a {job} and has a {pet}.",
    "{name} lives in {city} with a {pet}. The {job} is {age}.",
    "In {city} a {job} of {age} years, {name}, feeds a {pet}.",
    "{name}, {age}, is a {job} from {city} and owns a {pet}.",
    "The {pet} of {name}, a {job} in {city}, is old, and {name} is {age}.",
)


def make_rows(count: int, *, seed: int, held_out: bool) -> list[dict[str, Any]]:
    """`count` rows. The numbers of keys, 1 to MOST_KEYS, are equally frequent; `data_source` names them."""
    rng = random.Random(seed)
    values = {key: texts.split() for key, texts in (HELD_OUT_VALUES if held_out else VALUES).items()}
    rows: list[dict[str, Any]] = []
    for index in range(count):
        person: dict[str, Any] = {key: rng.choice(texts) for key, texts in values.items()}
        person["age"] = rng.randint(18, 89)
        keys = rng.sample(KEYS, 1 + index % MOST_KEYS)
        text = f"{rng.choice(SENTENCES).format(**person)} Keys: {', '.join(keys)}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        source = f"{len(keys)} key{'s' if len(keys) > 1 else ''}"
        answer = json.dumps({key: person[key] for key in keys})
        rows.append({"messages": messages, "answer": answer, "data_source": source})
    return rows


def json_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **row: Any
) -> float:
    """1 when the completion is a JSON object with exactly the asked keys and their values, else 0."""
    try:
        written = json.loads(completion)
    except ValueError:
        return 0.0
    return float(isinstance(written, dict) and written == json.loads(answer))


def best_constant(rows: list[dict[str, Any]]) -> float:
    """The accuracy on `rows` of the best policy that gives the same answer to every prompt."""
    answers = [json.dumps(json.loads(row["answer"]), sort_keys=True) for row in rows]
    return max(map(answers.count, answers)) / len(answers)


def write_rows(description: str | None, rows_of: Callable[[int], dict[str, list[dict[str, Any]]]]) -> None:
    """The command `FOLDER [--seed 0]`: writes NAME.jsonl for each name of `rows_of(seed)`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the .jsonl files are written")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in rows_of(args.seed).items():
        (args.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
