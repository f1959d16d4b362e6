"""Owns verifiers of short texts: exact equality and required format."""

from __future__ import annotations

import re
from typing import Any

from areal.api.errors import InputError

_TAGS = re.compile(r"</?(?:think|answer)>")
_ORDER = ["<think>", "</think>", "<answer>", "</answer>"]


def no_reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """0 for every answer: for runs that a reward model or a teacher scores, in the trainer."""
    return 0.0


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
    format_pattern: str | None = None,
    **row: Any,
) -> float:
    """1 when the whole completion matches the row's `format_pattern`, a regular expression (its dot matches line ends).

    Without one: `<think>..</think> <answer>..</answer>`, each tag once, nothing but white space outside, an answer that
    is not empty. A prompt that ends in `<think>` has opened that tag. InputError for a pattern that is none.
    """
    if not format_pattern:
        opened = "<think>" if prompt.rstrip().endswith("<think>") else ""
        return float(_has_thought_and_answer(opened + completion))
    try:
        pattern = re.compile(format_pattern, re.DOTALL)
    except re.error as error:
        raise InputError(f"the row's format_pattern {format_pattern!r} is no regular expression: {error}") from None
    return float(pattern.fullmatch(completion) is not None)


def _has_thought_and_answer(text: str) -> bool:
    outside_and_inside = _TAGS.split(text)
    if _TAGS.findall(text) != _ORDER:
        return False
    before, _, between, answer, after = outside_and_inside
    return not (before.strip() or between.strip() or after.strip()) and bool(answer.strip())
