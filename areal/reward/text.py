"""Owns verifiers of short texts: exact equality, required format, multiple choice."""

from __future__ import annotations

import re
from typing import Any

_THINK_ANSWER = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
_CHOICE_MARKS = re.compile(
    r"\\boxed\{\s*(?:\\text\{)?\(?([A-J])\)?\}?\s*\}"  # \boxed{B}, \boxed{\text{B}}
    r"|####\s*\(?([A-J])\b"  # #### B
    r"|(?:answer|choice|option)\s*(?:is|:)?\s*:?\s*\**\(?([A-J])\b",  # the answer is (B)
    re.IGNORECASE,
)
_LONE_LETTER = re.compile(r"(?<![A-Za-z'])\(?([A-J])\)?(?![A-Za-z'])")


def exact_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    """1 when the completion is the row's `answer`, white space around both aside."""
    return float(completion.strip() == str(answer).strip())


def format_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    format_pattern: str = "",
    **row: Any,
) -> float:
    """1 when the completion matches the row's `format_pattern`, by default <think>..</think><answer>..</answer>."""
    pattern = re.compile(format_pattern, re.DOTALL) if format_pattern else _THINK_ANSWER
    return float(pattern.fullmatch(completion) is not None)


def choice_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    """1 when the letter A to J chosen in the completion is the one of the row's `answer`."""
    chosen = extract_choice(completion)
    return float(chosen is not None and chosen == extract_choice(str(answer)))


def extract_choice(text: str) -> str | None:
    """The last letter marked as the answer, else the last letter that stands alone."""
    marked = list(_CHOICE_MARKS.finditer(text))
    if marked:
        return next(group for group in marked[-1].groups() if group).upper()
    alone = _LONE_LETTER.findall(text)
    return alone[-1] if alone else None
