"""The verifiers of short texts: exact equality and required format."""

import re
from typing import Any

from areal.api.errors import InputError

_TAGS = re.compile(r"</?(?:think|answer)>")
_ORDER = ["<think>", "</think>", "<answer>", "</answer>"]


def no_reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """0 for every answer: for runs in which a reward model or a teacher in the trainer gives the reward."""
    return 0.0


def exact_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    """1 when the completion equals the row's `answer`; white space around both is ignored."""
    return float(completion.strip() == str(answer).strip())


def stripped(completion: str) -> str | None:
    """The completion as the final answer, without white space around it; None when nothing is left."""
    return completion.strip() or None


def format_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    format_pattern: str | None = None,
    **row: Any,
) -> float:
    """1 when the whole completion matches the row's regular expression `format_pattern` (its dot matches line ends).

    Without a pattern: `<think>..</think> <answer>..</answer>`, each tag once, only white space outside them, the answer
    not empty. The tag `<think>` may be at the end of the prompt. InputError for an invalid pattern.
    """
    if not format_pattern:
        opened = "<think>" if prompt.rstrip().endswith("<think>") else ""
        return float(_has_thought_and_answer(opened + completion))
    try:
        pattern = re.compile(format_pattern, re.DOTALL)
    except re.error as error:
        message = f"the row's format_pattern {format_pattern!r} is not a regular expression: {error}"
        raise InputError(message, code="reward.bad_row") from None
    return float(pattern.fullmatch(completion) is not None)


def _has_thought_and_answer(text: str) -> bool:
    if _TAGS.findall(text) != _ORDER:
        return False
    before, _, between, answer, after = _TAGS.split(text)
    return not (before.strip() or between.strip() or after.strip()) and bool(answer.strip())
