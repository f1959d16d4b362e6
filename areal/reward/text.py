"""The verifiers of short texts: exact equality and required format."""

import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from areal.api.config import PPOConfig
from areal.api.errors import InputError
from areal.api.registry import ANSWER_CALL, load_function, resolve_function
from areal.reward.math_answer import LETTER, SPACELESS, last_boxed

# The final answer of a completion, which decides a majority vote.

_NUMBERS = {"gsm8k", "math", "clevr_count_70k", "geometry3k", "virl39k"}
"""Rewards whose answers end in a number or a formula."""
AnswerFn = Callable[[str], str | None]
"""Text of a completion -> its final answer, in one spelling for equal answers; None = it has none."""


def answer_function(config: PPOConfig) -> AnswerFn:
    """The function at evaluator.answer_fn. Empty: `number` for rewards of numbers and formulas, `choice` for choice,
    else `text`. ConfigError when there is no such function."""
    name = config.evaluator.answer_fn
    if not name:
        used = {config.reward_fn, *(each for _, fns in config.reward.tables() for each in fns)}
        name = "number" if used & _NUMBERS else "choice" if "choice" in used else "text"
    return load_function(resolve_function(name, "answers", key="evaluator.answer_fn"), ANSWER_CALL)


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


# The verifier of multiple-choice answers: which of the letters A to J a text chooses.
#
# The most formal statement counts, and among equals the last: a box, a tag or `####`; then "the answer is ..."; then
# "option ... is correct"; then a single letter. A text that names two letters at once chooses none.

_MAX_SHORT_CHARS = 500
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|textsf|boxed)\s*\{([^{}]*)\}|[*_`$]")
_FOREIGN_LABEL = (
    r"(?:正?确?的?答案|正解|答え|答|选项|選項|정답|답|คำตอบ)[\s*_]*(?:[是为為选選はが은는]|คือ)?"
    r"|(?:故|应|應)?(?:选择|選擇|选|選)|ข้อ"
)
_ALONE = re.compile(
    rf"(?:(?:the\s+)?(?:option|choice|answer)(?:\s+is)?\b|{_FOREIGN_LABEL})?[\s:]*[(\[]?([A-J])"
    rf"(?:[)\].:,]|\s*$|[{SPACELESS}])(?![\s,;]*[(\[]?[A-J]\s*(?:[)\].,]|$))",
    re.IGNORECASE,
)
_TAGGED = re.compile(r"<answer>(.{0,500}?)</answer>|####([^\n]*)", re.DOTALL | re.IGNORECASE)
_OVER = rf"(?!{LETTER}|')"
_LETTER = (
    r"[\s*_:]*"
    r"(?:(?i:option|choice|ข้อ|选项|選項)[\s*_:]*)?"
    rf"(?:[(\[]([A-Ja-j])[)\]]|([A-J]){_OVER}|([a-j])(?=[*.)]*\s*(?:\n|$)|,?\s+(?:because|since|as)\b))"
)
"""Upper-case letters without brackets; any letter in brackets; lower-case letters at the end of a line."""
_STATEMENTS = (
    re.compile(r"(?i:\banswers?\b)[^.\n:=]{0,40}?(?i:\bis|\bbe|[:=])" + _LETTER),
    re.compile(
        r"(?:答案|正解|答え|选项|選項|정답|답|คำตอบ)[^.\n:=不非A-Ja-j]{0,12}?(?:[是为為选選应應はが은는:]|คือ)" + _LETTER
    ),
    re.compile(r"(?<![不非])(?:选择|選擇|选|選|正确的是)[为為]?" + _LETTER),
    re.compile(r"(?i:\b(?:choose|pick|select|go with)|\b(?:option|choice)\s+(?:is|would be|:))" + _LETTER),
    re.compile(
        rf"(?i:\b(?:option|choice))[\s*_:]*(?:[(\[]([A-Ja-j])[)\]]|([A-Ja-j]){_OVER})"
        r"[*\s]*(?=(?i:is|seems|must be)\b\s*(?i:the\s+)?(?i:correct|right|best))"
    ),
)
_AND = r"(?:\b(?:and|or)\b|或|和|与|與|及|と|や|また|또는|와|과|หรือ|และ)"
_MORE = re.compile(
    rf"[)\]*\s]*(?:[,;+/&]|{_AND}|(?=[\s(\[]))(?:\s*(?:{_AND}|\b(?:maybe|perhaps|possibly)\b))*[\s*]*"
    rf"(?:(?:option|choice)\s+)?[(\[]?[A-J]{_OVER}(?!不|错|錯)(?![)\]]?[*\s]+(?!and\b|or\b)\w{{2}})",
    re.IGNORECASE,
)
"""A second letter after a statement, which no further word follows: `A, B` but not `A, B is wrong`."""
_ONLY_LETTERS = re.compile(r"\W*(?:[A-J]\W+)+[A-J]\W*")
_JOINED = re.compile(rf"[ *]*(?:[+/&]|{_AND})?[ *]*(?:(?:option|choice)\s+)?", re.IGNORECASE)
_LONE = re.compile(rf"(?<!{LETTER})(?<!['\\])(?:[(\[]([A-Ja-j])[)\]]|([A-J]){_OVER})")
_DENIED = re.compile(
    r"(?:(?:\b(?:not|nor|neither|than|except|exclude|eliminate|rule out)|n't)[\s*]*(?:(?:option|choice)[\s*]*)?"
    r"|(?:不是|不选|不選|非|而非|除了|排除|ไม่ใช่)(?:选项|ข้อ)?\s*)$",
    re.IGNORECASE,
)
_WRONG = re.compile(r"\)?\s*(?:选项|選項|项)?\s*(?:不(?:对|對|正|是)|错|錯|が?(?:違|誤)|[은는이가]\s*(?:아니|틀))")
"""What says after a letter that it is not chosen."""
_PUNCTUATION = {ord(char): plain for char, plain in zip("。、【】「」『』〔〕", ".,()()()()", strict=True)}
_BARE_LETTER = re.compile(r"[\W_]*(?:(?i:option|choice|answer)[\W_]+)?([A-Ja-j])[\W_]*")
_LABEL = re.compile(r"[(\[]?[A-Ja-j][)\].:]\**\s*\S")
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
    text = unicodedata.normalize("NFKC", text).translate(_PUNCTUATION)
    if len(text) < _MAX_SHORT_CHARS and (bare := _BARE_LETTER.fullmatch(text)):
        return bare[1].upper()
    formal = [(match.start(), match[1] if match[1] is not None else match[2]) for match in _TAGGED.finditer(text)]
    boxed = last_boxed(text)
    if boxed is not None:
        formal.append((max(text.rfind("\\boxed"), text.rfind("\\fbox")), boxed))
    if formal:
        return _sole_letter(max(formal)[1])
    for statement in _STATEMENTS:
        if matches := list(statement.finditer(text)):
            match = matches[-1]
            return None if _MORE.match(text, match.end()) else _letter_of(match)
    lone = [
        match
        for match in _LONE.finditer(text)
        if not (match[0] in ("A", "I") and _ARTICLE.match(text, match.end()))
        and not _DENIED.search(text[max(0, match.start() - 30) : match.start()])
        and not _WRONG.match(text, match.end())
    ]
    if _ONLY_LETTERS.fullmatch(text) or _is_list_of_options(text, lone):
        return None
    if len(lone) > 1 and _JOINED.fullmatch(text, lone[-2].end(), lone[-1].start()):
        return None
    return _letter_of(lone[-1]) if lone else None


def _is_list_of_options(text: str, lone: Sequence[re.Match[str]]) -> bool:
    """Whether the letters only number the options, one a line: a question that is repeated chooses nothing."""
    begins = [match for match in lone if _LABEL.match(text, match.start()) and _is_line_start(text, match.start())]
    letters = "".join(_letter_of(match) for match in begins)
    return len(begins) == len(lone) > 1 and "ABCDEFGHIJ".startswith(letters)


def _is_line_start(text: str, at: int) -> bool:
    return not text[:at].rpartition("\n")[2].strip(" *-")


def _sole_letter(text: str) -> str | None:
    """The letter of a short text that is one letter, or starts with one before a full stop or bracket."""
    if len(text) > _MAX_SHORT_CHARS:
        return None
    plain, before = unicodedata.normalize("NFKC", text).translate(_PUNCTUATION), ""
    while plain != before:
        plain, before = _WRAPPER.sub(r"\1", plain), plain
    plain = plain.strip()
    match = _ALONE.match(plain)
    return match[1].upper() if match and not _MORE.match(plain, match.end()) else None


def _letter_of(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group).upper()
