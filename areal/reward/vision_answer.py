r"""The verifiers of answers to questions on images: a number in square brackets, and a formula in a box."""

import re
from typing import Any

from areal.api.errors import InputError
from areal.reward.math_answer import answers_equal, extract_answer, last_boxed, parse_number
from areal.reward.math_symbolic import symbolic_math_reward

_COUNT = re.compile(r"\[\s*(\d{1,9}(?:\.\d{1,9})?)\s*\]")
_BRACKETED = re.compile(r"(?<![\\\w])\[([^\[\]]{1,200})(?<!\\)\]")
r"""Not the delimiters `\[` and `\]` of a formula, nor the index of a root."""


def count_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    """1 when the last number in square brackets, as in `[3]`, equals that of the row's `answer`, else 0.

    InputError when `answer` has no number.
    """
    wanted = extract_answer(str(answer).strip(" []"))
    if wanted is None or parse_number(wanted) is None:
        raise InputError(f"the row's answer {str(answer)[:100]!r} is not a number", code="reward.bad_row")
    given = _COUNT.findall(completion)
    return float(bool(given) and answers_equal(given[-1], wanted))


def vision_math_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    r"""As `symbolic_math_reward`; without a \boxed{} the last text in square brackets counts.

    A row's `answer` that is no formula, such as a word, must be equal as text.
    """
    if "\\boxed" not in completion and (found := _BRACKETED.findall(completion)):
        completion = f"\\boxed{{{found[-1]}}}"
    try:
        return symbolic_math_reward(prompt, completion, prompt_ids, completion_ids, answer=answer)
    except InputError:
        given, boxed = last_boxed(completion), last_boxed(str(answer))
        wanted = str(answer) if boxed is None else boxed
        if not wanted.strip():
            raise
        return float(given is not None and answers_equal(given, wanted))
