"""The quickstart's task: sort five digits. Prompt `73915=`, answer `13579`, one token per character."""

from __future__ import annotations

import random
from typing import Any

NUM_DIGITS = 5
CHARACTERS = "0123456789="
SPECIALS = ("<pad>", "<eos>", "<unk>")


def make_rows(count: int, *, seed: int, exclude: frozenset[str] = frozenset()) -> list[dict[str, str]]:
    """`count` different problems, without the prompts in `exclude`."""
    rng = random.Random(seed)
    seen = set(exclude)
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        digits = "".join(rng.choice("0123456789") for _ in range(NUM_DIGITS))
        prompt = f"{digits}="
        if prompt not in seen:
            seen.add(prompt)
            rows.append({"prompt": prompt, "answer": "".join(sorted(digits))})
    return rows


def sorted_digits_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **row: Any
) -> float:
    """1 when the completion is the sorted digits of the prompt, else 0."""
    return float(completion == answer)
