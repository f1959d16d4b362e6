"""The verifier of numeric answers: finds the final answer in a text and compares it with the row's.

Answers are compared as numbers (commas, currency, percent, units, fractions, decimals) or, if one is not a number, as
normalised text. `areal.reward.math_symbolic` compares formulas.
"""

import math
import re
from fractions import Fraction
from typing import Any

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = rf"[-+]?\s?\$?\s?(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
_LAST_NUMBER = re.compile(rf"(?<![\w.])(?:{_NUMBER})(?:\s?/\s?{_DIGITS})?\s?\\?%?")
_BARE_NUMBER = re.compile(
    r"([-+]?)\s*((?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|\.\d+)(?:[eE]([-+]?\d{1,3}))?(?:\s*/\s*([-+]?[\d,]+(?:\.\d+)?))?"
)
_MIXED = re.compile(r"([-+]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
_FRAC = re.compile(r"\\[dt]?frac\s*\{\s*([-+]?[\d.,]+)\s*\}\s*\{\s*([-+]?[\d.,]+)\s*\}|\\[dt]?frac\s*(\d)\s*(\d)")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")
_LATEX_NOISE = re.compile(r"\\(?:left|right|!|,|;|:|quad|displaystyle)|~")
_UNIT = re.compile(r"[\s°]*[A-Za-z][A-Za-z\s./^²³]*$|\s*°\s*[CF]?$|\^\\circ$")
_SEVERAL = re.compile(r"[,;]|\b(?:and|or)\b", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_HEDGE = re.compile(r"\b(?:or|not)\b", re.IGNORECASE)
_BARE_WORD = re.compile(r"[^\s$\\{}]+")
_RELATIVE_TOLERANCE = 1e-4
_MAX_NUMBER_CHARS = 500  # Longer answers are not read as numbers: the patterns for units would take quadratic time.


def math_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    """1 when the final answer of the completion equals that of the row's `answer`, else 0."""
    given = extract_answer(completion)
    wanted = extract_answer(str(answer)) or str(answer)
    return float(given is not None and answers_equal(given, wanted))


def extract_answer(text: str) -> str | None:
    r"""The final answer: after the last `####` or in the last \boxed{}, whichever is later; else the last number."""
    hashes, boxed = text.rfind("####"), text.rfind("\\boxed")
    if hashes > boxed:
        line = text[hashes + 4 :].lstrip(" \t#").partition("\n")[0].strip()
        if line:
            return line
    if boxed >= 0:
        content = _balanced(text, boxed + len("\\boxed"))
        if content:
            return content
    numbers = _LAST_NUMBER.findall(text)
    return numbers[-1].strip() if numbers else None


def canonical_answer(text: str) -> str | None:
    """The final answer of a text in one spelling: `1,200`, `1200.0` and `$1200` are the vote 1200. None without one."""
    found = extract_answer(text)
    if found is None or (number := parse_number(found)) is None:
        return None if found is None else _normalised(found)
    return f"{number[0]}%" if number[1] else str(number[0])


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed or \fbox: in its braces, else the next word. None when there is no box or its
    braces never close, as in a truncated answer."""
    start, command = max((text.rfind(name), name) for name in ("\\boxed", "\\fbox"))
    if start < 0:
        return None
    rest = text[start + len(command) :].lstrip()
    if rest.startswith("{"):
        return _balanced(rest, 0)
    match = _BARE_WORD.match(rest)
    return match[0] if match else None


def _balanced(text: str, start: int) -> str | None:
    """The content of the braces that open at `start` or after white space there; None when they never close."""
    while start < len(text) and text[start].isspace():
        start += 1
    if start >= len(text) or text[start] != "{":
        return None
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position].strip()
    return None


def answers_equal(given: str, wanted: str) -> bool:
    """Whether two answers are equal: as numbers when both are numbers, else as normalised text."""
    left, right = parse_number(given), parse_number(wanted)
    if left is not None and right is not None:
        (a, a_percent), (b, b_percent) = left, right
        if _close(a, b):
            return True
        # datasets write 50% as 50 and as 0.5: when only one side has the sign, both are accepted
        return a_percent != b_percent and (_close(a / 100, b) if a_percent else _close(a, b / 100))
    if left is not None or right is not None:
        return False
    return _normalised(given) == _normalised(wanted)


def _close(a: Fraction, b: Fraction) -> bool:
    if a.denominator == 1 and b.denominator == 1:
        return a == b
    try:
        return math.isclose(float(a), float(b), rel_tol=_RELATIVE_TOLERANCE)
    except OverflowError:
        return a == b


def parse_number(text: str) -> tuple[Fraction, bool] | None:
    """The number of an answer and whether it has a percent sign; None when it is not a single number."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    plain = _right_side(_plain(text))
    if plain is None:
        return None
    percent = plain.endswith("%")
    plain = plain.rstrip("%").strip()
    unit = match[0].strip().lower() if (match := _UNIT.search(plain)) else ""
    if _HEDGE.search(unit):
        return None
    plain = _UNIT.sub("", plain).strip() or plain
    value = _number(plain)
    return None if value is None else (value * _MAGNITUDES.get(unit.partition(" ")[0], 1), percent)


def _right_side(plain: str) -> str | None:
    """What follows the last `=`; None when the text assigns several values, as `a=1, b=2` does, or is an inequality."""
    left, equals, right = plain.rpartition("=")
    first, _, between = left.partition("=")
    is_several = _HEDGE.search(first) or ("=" in left and _SEVERAL.search(_THOUSANDS.sub("", between)))
    return None if equals and (is_several or left.endswith(("<", ">", "!", "~", "\\"))) else right.strip()


def _number(plain: str) -> Fraction | None:
    try:
        if mixed := _MIXED.fullmatch(plain):
            sign, whole, above, below = mixed.groups()
            value = int(whole) + Fraction(int(above), int(below))
            return -value if sign == "-" else value
        if match := _BARE_NUMBER.fullmatch(plain):
            sign, digits, exponent, divisor = match.groups()
            value = Fraction(digits.replace(",", "").rstrip(".")) * Fraction(10) ** int(exponent or 0)
            if divisor:
                value /= Fraction(divisor.replace(",", ""))
            return -value if sign == "-" else value
    except (ZeroDivisionError, ValueError):
        return None
    return None


def _plain(text: str) -> str:
    plain = text.strip().strip("*`").strip()
    if "\\" in plain or "~" in plain:
        plain = plain.replace("\\$", "").replace("\\%", "%")
        plain = _TEXT_COMMAND.sub(r" \1", plain)
        plain = _LATEX_NOISE.sub("", plain)
        plain = _FRAC.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]} ", plain)  # spaces: no adjacent digit may join it
    for sign in "$€£¥":
        plain = plain.replace(sign, "")
    plain = plain.replace("−", "-").strip()  # the typographic minus
    return plain.rstrip(".!?,; ").strip()


def _normalised(text: str) -> str:
    return "".join(_plain(text).replace("\\(", "").replace("\\)", "").split()).lower()
