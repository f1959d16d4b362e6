"""The verifier of numeric answers: finds the final answer in a text and compares it with the row's.

Answers are compared as numbers (commas, currency, percent, units, fractions, decimals) or, if one is not a number, as
normalised text. `areal.reward.math_symbolic` compares formulas.
"""

import functools
import re
import unicodedata
from fractions import Fraction
from typing import Any, NamedTuple

from areal.reward.units import LETTER, Unit, magnitude_at, ratio, suffixes, unit_at

# How a number may be written, after `written` has replaced LaTeX and Unicode forms.

_CURRENCY = r"(?:(?:US|HK|NT|[ACR])?[$﹩]|[€£¥₹₽₩฿₫₺₴₪₱])"
_DIGITS = r"(?:\d+(?:[.,]\d+)*|\.\d+)"
_POWER = r"(?:\^|\*\*)\s?[({]?([-+]?\d{1,3})[)}]?"
_NUMBER = re.compile(
    rf"(?:(?P<whole>\d+)\s+(?:and\s+)?(?P<above>\d+)\s?/\s?(?P<below>\d+)(?![\d.,])"
    rf"|(?P<digits>{_DIGITS}\.?)(?:\s?[*x]\s?10{_POWER}|[eE]([-+]?\d{{1,3}})(?!\w)|{_POWER})?"
    rf"(?:\s*/\s*(?P<divisor>[-+]?{_DIGITS}))?)"
)
_OR = r"(?:(?:or|ou|oder|o|или)\s|或|または|또는|หรือ)"
_NO_VALUE = rf"(?:[≤≥≠±√^_∓]\s?\{{?|(?<=[\w}}])\{{|(?<=\w )[<>]=?\s|(?<=\d ){_OR}\s?|(?<=\d){_OR}\s?)"
"""What makes the number that follows no value of its own: an inequality, an exponent, the second of two values."""

_BOUND = r"(?:以上|以下|未满|未満|이상|이하|미만|초과|ขึ้นไป)"
_ENDING = r"(?:st|nd|rd|th|px|am|pm|pt)\b"
_FACTOR = r"[A-Za-z]{1,2}"
"""Letters that touch a number, unless they are a unit or one of those endings: a factor of a formula."""


@functools.cache
def _candidate() -> re.Pattern[str]:
    """A number in running text, with its sign, currency, unit, and anything that makes it another value."""
    sign = rf"(?:(?<!{LETTER})(?<![-+)\].])[-+](?:{_CURRENCY}\s?)?|(?<==)\s?[-+]\s)(?=[\d.])"
    body = rf"(?:\d+\s(?:and\s)?\d+\s?/\s?\d+|\d+(?:[.,:~]\d+)*|(?<![\d.])\.\d+)(?:\s?/\s?{_DIGITS})*"
    power = rf"(?:\s?[*x]\s?10(?={_POWER}))?(?:{_POWER}|[eE][-+]?\d+)?"
    units = rf"(?:\s?/?\s?{suffixes()}(?:\^\{{?\d\}}?|\d+(?![.,:]?\d))?)+"
    factor = rf"\s?[√π∞][^\s,.]*|(?!{_ENDING}){_FACTOR}(?!{LETTER})|\s?[-+*/]\s?[a-z](?!{LETTER})"
    tail = rf"(?:(?<=\d){units}|{factor}|\s[xyz](?!{LETTER}|\s?\d)|\s?{_BOUND}|\s{_OR}(?:more|less|fewer))?"
    return re.compile(
        rf"[(\[]\s?[-+]?{_DIGITS},\s?[-+]?{_DIGITS}\s?[)\]]"
        rf"|{_NO_VALUE}?(?:{sign}|{_CURRENCY}\s?[-+]?|百分之)?(?<!{LETTER})(?<!\d[.,:]){body}{power}(?:\s?%)?{tail}"
    )


_SIGNED = re.compile(
    rf"(?P<first>[-+]?)\s*(?P<currency>{_CURRENCY}|百分之|[A-Z]{{3}}\s|(?i:rs\.?|rm|rp)\s?)?\s*(?P<second>[-+]?)\s*"
)
_LABEL = re.compile(
    r"(?P<words>(?:[^\W\d]|[\s'’*\"])*?)(?:[:：≈]|\b(?:is|are|est|es|ist|é|è|равно|равен)\b|答案|[是为為はが]|等于|은|는|คือ)"
    r"[\s*:\"]*(?=[-+\d.]|\W?\d|[A-Z]{3}\s\d)"
)
_HEDGE = re.compile(
    r"\b(?:or|not|nor|ou|oder|o|или|não|no|nicht|pas|не|plus|minus|times|wrong|incorrect)\b|n't\b"
    rf"|{_BOUND}|或|不|超过|超え|ない|또는|아니|아닌|หรือ|ไม่",
    re.IGNORECASE,
)
_REMARK = re.compile(r"^(?P<before>.*?[^\s])(?P<gap>\s*)\((?P<inside>[^()]*)\)$")
_CALCULATION = re.compile(r"\s\(\s?=[^()=]*\)$")
_OTHER_WORDS = re.compile(r"[^\d=<>≤≥≠±∓√π∞+*^\\{}|~#()\[\]!,;:、/]*(?:/\s?[^\W\d]+)?")
_VARIABLE = re.compile(rf"\s?(?![aàyeé]\s)[A-Za-zΑ-ω](?!{LETTER})|(?!{_ENDING}){_FACTOR}(?!{LETTER})")
_SEVERAL = re.compile(r"[,;]|\b(?:and|or)\b", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_BARE_WORD = re.compile(r"[^\s$\\{}]+")
_RELATIVE_TOLERANCE = Fraction(1, 10_000)
_ABSOLUTE_TOLERANCE = Fraction(1, 100)  # At most a cent: 14000.5 is not 14000.
_MAX_NUMBER_CHARS = 500  # Longer answers are not read as numbers: the patterns for units would take quadratic time.

# Other spellings, and how `written` writes them.

_SUPERSCRIPTS = {ord(char): plain for char, plain in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+", strict=True)}
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_VULGAR = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞↉])")
_FOREIGN_DIGIT = re.compile(r"[^\D0-9]")
_SIGNS = {ord(char): "-" for char in "‐‑‒–—―−➖˗⁃"} | {ord(char): "/" for char in "⁄∕÷"}
_SIGNS |= {ord("٫"): ".", ord("٬"): ",", ord("×"): "*", ord("·"): "*", ord("⋅"): "*", ord("∙"): "*", ord("٪"): "%"}
_SIGNS |= dict.fromkeys([0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF], "")
_GROUP_SEPARATOR = r"(?:\\(?:text|mathord|mathrm)\{,\}|\{,\}|,?\\[,;:! ]|,?\{?\\thinspace\}?|[ '’_٬])"
_GROUPS = re.compile(
    rf"(?<![A-Za-z\d])(?<!\d[.,])\d{{1,3}}(?:{_GROUP_SEPARATOR}\d{{3}}(?!\d))+(?!\s?/\s?\d|\s?\\[dtc]?frac)"
)
_ONE_SEPARATOR = re.compile(_GROUP_SEPARATOR)
_SYMBOLS = {
    "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "ne": "≠", "neq": "≠", "pm": "±",
    "mp": "∓", "lt": " < ", "gt": " > ", "sqrt": "√", "pi": "π", "infty": "∞", "times": "*", "cdot": "*", "div": "/",
    "approx": "≈", "simeq": "≈", "circ": "°", "degree": "°", "percent": "%", "left": "", "right": "", "quad": " ",
    "qquad": " ", "displaystyle": "", "thinspace": " ", "euro": "€", "pounds": "£", "textdollar": "﹩", "dollar": "﹩",
    "boxed": " ", "fbox": " ",
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]+)(?![A-Za-z])\s?|\\([,;:! ()\[\]])|~(?!\d)|(?<!\d)~")
_TEXT_COMMAND = re.compile(
    r"\\(?:text\w*|math(?:rm|bf|sf|it|tt)|mbox|hbox|operatorname|bm|boldsymbol|num|unit|emph|underline)\*?\s*"
    r"\{([^{}]*)\}"
)
_QUANTITY = re.compile(r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_ARGUMENT = rf"(?:\{{\s*([-+]?{_DIGITS})\s*\}}|(\d))"
_FRAC = re.compile(rf"\\[dtc]?frac\s*{_ARGUMENT}\s*{_ARGUMENT}")
_DELIMITED = re.compile(r"(?<![\\$])\$(?=\S)([^$\n]{1,300})(?<=\S)\$(?!\d)")


class Quantity(NamedTuple):
    value: Fraction
    unit: Unit | None = None  # None = no unit, or one without a known name.

    @property
    def is_percent(self) -> bool:
        return self.unit is not None and self.unit.kind == "percent"


def math_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    """1 when the final answer of the completion equals that of the row's `answer`, else 0."""
    given, text = extract_answer(completion), str(answer)
    is_bare = "\n" not in text and parse_number(text) is not None
    wanted = text if is_bare else extract_answer(text) or text
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
    numbers = [match[0] for match in _candidate().finditer(written(text))]
    return numbers[-1].strip() if numbers else None


def canonical_answer(text: str) -> str | None:
    """The final answer of a text in one spelling: `1,200`, `1200.0` and `$1200` are the vote 1200. None without one."""
    found = extract_answer(text)
    if found is None or (number := parse_number(found)) is None:
        return None if found is None else _normalised(found)
    return f"{number.value}%" if number.is_percent else str(number.value)


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
    if left is None or right is None:
        return left is right and _normalised(given) == _normalised(wanted)
    a, b = left.value, right.value
    if (left.unit is None) != (right.unit is None) and (left.is_percent or right.is_percent):
        # datasets write 50% as 50 and as 0.5: when only one side has the sign, both are accepted
        return _close(a, b) or (_close(a / 100, b) if left.is_percent else _close(a, b / 100))
    scale = ratio(left.unit, right.unit)
    return scale is not None and _close(a * scale, b)


def _close(a: Fraction, b: Fraction) -> bool:
    if a.denominator == 1 and b.denominator == 1:
        return a == b
    return abs(a - b) <= min(_RELATIVE_TOLERANCE * max(abs(a), abs(b)), _ABSOLUTE_TOLERANCE)


def parse_number(text: str) -> Quantity | None:
    """The number of an answer with its unit; None when it is not a single number."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    plain = _right_side(_CALCULATION.sub("", _plain(text)))
    if plain is None:
        return None
    if (label := _LABEL.match(plain)) and not _HEDGE.search(label["words"]):
        plain = plain[label.end() :]
    if (result := _quantity(plain)) or not (remark := _REMARK.match(plain)):
        return result
    result, inside = _quantity(remark["before"]), remark["inside"].strip()
    if (
        result is None
        or _HEDGE.search(inside)
        or (not remark["gap"] and not unit_at(inside)[0] and not re.match(r"[^\W\d]{2}|%", inside))
    ):
        return None
    if (other := _quantity(inside.lstrip("= "))) and other.value != result.value:
        return None
    return Quantity(result.value, result.unit or unit_at(inside)[0])


def _quantity(plain: str) -> Quantity | None:
    while plain[:1] in tuple("({[") and plain.endswith({"(": ")", "{": "}", "[": "]"}[plain[0]]):
        if plain[0] == "[" or plain[0] in plain[1:] or re.search(r",(?!\d{3}\b)", plain):
            break
        plain = plain[1:-1].strip()
    start = _SIGNED.match(plain)
    match = start and _NUMBER.match(plain, start.end())
    if not start or not match:
        return None
    try:
        value = _value(match)
    except (ZeroDivisionError, ValueError):
        return None
    rest = plain[match.end() :]
    factor, rest = magnitude_at(rest)
    if value is None or (factor == 1 and rest[:1].isdigit()):
        return None
    value *= factor
    while factor > 1 and (more := re.match(rf"\s?({_DIGITS})", rest)):  # 3 thousand 500
        below, after = magnitude_at(rest[more.end() :])
        addend = _decimal(more[1])
        if addend is None or below >= factor or addend * below >= factor:
            return None
        value, factor, rest = value + addend * below, below, after
    sign = -1 if "-" in (start["first"], start["second"]) else 1
    before = (start["currency"] or "").strip()
    unit, words = unit_at(rest)
    if unit is None:
        words = rest.removeprefix("-") if re.match(r"-[^\W\d]", rest) else rest
    if _HEDGE.search(words) or not _OTHER_WORDS.fullmatch(words) or (unit is None and _VARIABLE.match(words)):
        return None
    if before:
        unit = unit_at("%" if before == "百分之" else before)[0]
    return Quantity(sign * value, unit)


def _value(match: re.Match[str]) -> Fraction | None:
    if match["whole"]:
        return int(match["whole"]) + Fraction(int(match["above"]), int(match["below"]))
    value = _decimal(match["digits"])
    ten, exponent, power = match[5], match[6], match[7]
    if value is None:
        return None
    if power:
        if abs(value) > 1000 or abs(int(power)) > 100:
            return None
        value = value ** int(power)
    value *= Fraction(10) ** int(ten or exponent or 0)
    if divisor := match["divisor"]:
        below = _decimal(divisor.lstrip("+-"))
        return None if below is None else value / (-below if divisor[0] == "-" else below)
    return value


def _decimal(digits: str) -> Fraction | None:
    """The value of digits with separators: `1,234.5`, `1.234,5`, `1,00,000`, `12,5`; None for `1,2,3` and `1.2.3`."""
    digits = digits.rstrip(".")
    if re.fullmatch(r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}", digits):
        digits = digits.replace(".", "").replace(",", ".")
    elif re.fullmatch(r"0,\d+|\d+,(?:\d\d?|\d{4,})", digits):
        digits = digits.replace(",", ".")
    elif re.fullmatch(r"(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})(?:\.\d*)?", digits):
        digits = digits.replace(",", "")
    return Fraction(digits) if re.fullmatch(r"\d+(?:\.\d*)?|\.\d+", digits) else None


def _right_side(plain: str) -> str | None:
    """What follows the last `=`; None when the text assigns several values, as `a=1, b=2` does, or is an inequality."""
    left, equals, right = plain.rpartition("=")
    first, _, between = left.partition("=")
    is_several = _HEDGE.search(first) or ("=" in left and _SEVERAL.search(_THOUSANDS.sub("", between)))
    return None if equals and (is_several or left.endswith(("<", ">", "!", "~", "\\"))) else right.strip()


def _plain(text: str) -> str:
    return written(text).strip().strip("*`\"'“”「」 ").rstrip(".!?,;।。、 *`\"'”").strip()


def written(text: str) -> str:
    """The text with other spellings of digits, signs, separators, fractions and units replaced by plain ones."""
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = unicodedata.normalize("NFKC", _VULGAR.sub(" ", text).translate(_SIGNS)).translate(_SIGNS)
    text = _FOREIGN_DIGIT.sub(lambda match: str(unicodedata.digit(match[0])), text)
    text = join_groups(text)
    if "\\" in text or "~" in text:
        text = re.sub(r"\\([$%#&_])", lambda match: "﹩" if match[1] == "$" else match[1], text)
        text = _QUANTITY.sub(r" \1 \2 ", text)
        for _ in range(2):  # one may contain another
            text = _TEXT_COMMAND.sub(r" \1 ", text)
        text = _COMMAND.sub(_symbol, _FRAC.sub(_fraction, text))
        text = re.sub(r"\^\s?\{?°\}?", "°", text)
    return _DELIMITED.sub(r" \1 ", text.replace("$$", " "))


def join_groups(text: str) -> str:
    r"""The text without separators of thousands that are `{,}`, `\,`, `\!`, spaces or apostrophes."""
    return _GROUPS.sub(lambda match: _ONE_SEPARATOR.sub("", match[0]), text)


def _symbol(match: re.Match[str]) -> str:
    return " " if match[1] is None else _SYMBOLS.get(match[1], match[0])


def _fraction(match: re.Match[str]) -> str:
    """A fraction with a stroke, with spaces where a digit beside it would join its own."""
    above, below = match[1] or match[2], match[3] or match[4]
    before, after = match.string[: match.start()].rstrip()[-1:], match.string[match.end() : match.end() + 1]
    return f"{' ' * before.isdigit()}{above}/{below}{' ' * after.isdigit()}"


def _normalised(text: str) -> str:
    return "".join(_plain(text).split()).lower()
