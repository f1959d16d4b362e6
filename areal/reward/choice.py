"""The verifier of multiple-choice answers: which of the letters A to J a text chooses.

The most formal statement counts, and among equals the last: a box, a tag or `####`; then "the answer is ..."; then
"option ... is correct"; then a single letter. A text that names two letters at once chooses none.
"""

import re
from typing import Any

from areal.api.errors import InputError
from areal.reward.math_answer import last_boxed

_MAX_SHORT_CHARS = 500
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|textsf|boxed)\s*\{([^{}]*)\}|[*_`$]")
_ALONE = re.compile(
    r"(?:option|choice|answer)?[\s:]*[(\[]?([A-J])(?:[)\].:,]|\s*$)(?![\s,;]*[(\[]?[A-J]\s*(?:[)\].,]|$))",
    re.IGNORECASE,
)
_TAGGED = re.compile(r"<answer>(.{0,500}?)</answer>|####([^\n]*)", re.DOTALL | re.IGNORECASE)
_LETTER = (
    r"[\s*_:]*"
    r"(?:(?i:option|choice)[\s*_:]*)?"
    r"(?:[(\[]([A-Ja-j])[)\]]|([A-J])(?![\w'])|([a-j])(?=[*.)]*\s*(?:\n|$)))"
)
"""Upper-case letters without brackets; any letter in brackets; lower-case letters at the end of a line."""
_STATEMENTS = (
    re.compile(r"(?i:\banswers?\b)[^.\n:=]{0,40}?(?i:\bis|\bbe|[:=])" + _LETTER),
    re.compile(r"(?i:\b(?:choose|pick|select|go with)|\b(?:option|choice)\s+(?:is|would be|:))" + _LETTER),
    re.compile(
        r"(?i:\b(?:option|choice))"
        + _LETTER
        + r"[*\s]*(?=(?i:is|seems|must be)\b\s*(?i:the\s+)?(?i:correct|right|best))"
    ),
)
_MORE = re.compile(
    r"[)\]*\s]*(?:[,;+/&]|\bor\b|\band\b|(?=[\s(\[]))(?:\s*\b(?:or|and|maybe|perhaps|possibly)\b)*[\s*]*"
    r"(?:(?:option|choice)\s+)?[(\[]?[A-J](?![\w'])(?![)\]]?[*\s]+(?!and\b|or\b)\w{2})",
    re.IGNORECASE,
)
"""A second letter after a statement, which no further word follows: `A, B` but not `A, B is wrong`."""
_ONLY_LETTERS = re.compile(r"\W*(?:[A-J]\W+)+[A-J]\W*")
_JOINED = re.compile(r"[ *]*(?:[+/&]|\bor\b|\band\b)?[ *]*(?:(?:option|choice)\s+)?", re.IGNORECASE)
_LONE = re.compile(r"(?<![\w'\\])(?:[(\[]([A-Ja-j])[)\]]|([A-J])(?![\w']))")
_DENIED = re.compile(
    r"(?:\b(?:not|nor|neither|than|except|exclude|eliminate|rule out)|n't)[\s*]*(?:(?:option|choice)[\s*]*)?$",
    re.IGNORECASE,
)
_ARTICLE = re.compile(r"\s+(?!is\b|or\b|and\b|because\b|since\b|as\b)[a-z]")
"""Text after a single A or I that makes it a word."""


def choice_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    """1 when the completion chooses the letter of the row's `answer` ("B", "(b)", "B. Paris").

    InputError when `answer` names no letter.
    """
    wanted = _sole_letter(str(answer)) or extract_choice(str(answer))
    if wanted is None:
        raise InputError(f"the row's answer {str(answer)[:100]!r} names no letter A to J", code="reward.bad_row")
    return float(extract_choice(completion) == wanted)


def extract_choice(text: str) -> str | None:
    """The letter that a text chooses, in upper case; None when it chooses none or several."""
    formal = [(match.start(), match[1] if match[1] is not None else match[2]) for match in _TAGGED.finditer(text)]
    boxed = last_boxed(text)
    if boxed is not None:
        formal.append((max(text.rfind("\\boxed"), text.rfind("\\fbox")), boxed))
    if formal:
        return _sole_letter(max(formal)[1])
    for statement in _STATEMENTS:
        if found := list(statement.finditer(text)):
            match = found[-1]
            return None if _MORE.match(text, match.end()) else _letter_of(match)
    lone = [
        match
        for match in _LONE.finditer(text)
        if not (match[0] in ("A", "I") and _ARTICLE.match(text, match.end()))
        and not _DENIED.search(text[max(0, match.start() - 30) : match.start()])
    ]
    if _ONLY_LETTERS.fullmatch(text):
        return None
    if len(lone) > 1 and _JOINED.fullmatch(text, lone[-2].end(), lone[-1].start()):
        return None
    return _letter_of(lone[-1]) if lone else None


def _sole_letter(text: str) -> str | None:
    """The letter of a short text that is one letter, or starts with one before a full stop or bracket."""
    if len(text) > _MAX_SHORT_CHARS:
        return None
    plain, before = text, ""
    while plain != before:
        plain, before = _WRAPPER.sub(r"\1", plain), plain
    plain = plain.strip()
    match = _ALONE.match(plain)
    return match[1].upper() if match and not _MORE.match(plain, match.end()) else None


def _letter_of(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group).upper()
