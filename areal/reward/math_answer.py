"""The verifier of numeric answers: finds the final answer in a text and compares it with the row's.

Answers are compared as numbers (commas, currency, percent, units, fractions, decimals) or, if one is not a number, as
normalised text. `areal.reward.math_symbolic` compares formulas.
"""

import functools
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

# ----------------------------------------------------------------------------------------------------------------------
# Units and magnitudes after (or before) a number, in the languages of public sets of word problems.
#
# A unit that is not in the table, such as apples, has no name here: it agrees with every other.

RowT = TypeVar("RowT")
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u30ff\u3100-\u31bf\u3400-\u9fff\uac00-\ud7ff\uf900-\ufaff"  # noqa: E501
"""Scripts that put no space between a word and a number: Thai, Lao, Burmese, Khmer, Chinese, Japanese, Korean."""
LETTER = rf"[^\W{SPACELESS}]"
"""A letter, digit or underscore of every other script, next to which a digit is part of a word."""


class Unit(NamedTuple):
    kind: str
    factor: Fraction  # Size in the first unit of its kind.


_TABLE = r"""
percent 1 % percent percents pct per\scent por\sciento pour\scent por\scento prozent prosent процент* パーセント 퍼센트 เปอร์เซ็นต์
dollar 1 [$﹩] us[$﹩] usd dollar dollars dólar dólares dolares 美元 美金 ドル 달러 ดอลลาร์ доллар*
dollar 1/100 ¢ cent cents 美分 セント 센트 เซ็นต์
euro 1 € eur euro euros 欧元 ユーロ 유로 ยูโร евро
sterling 1 £ gbp sterling 英镑 ポンド 파운드
yuan 1 cny rmb yuan 元 人民币
yen 1 jpy yen 円 日元 엔
won 1 ₩ krw 원
rupee 1 ₹ inr rs rs\. rupee rupees रुपये টাকা
rouble 1 ₽ rub руб\. рубл*
baht 1 ฿ thb baht บาท
real 1 r[$﹩] brl reais
peso 1 ₱ mxn peso pesos
length 1 m metre metres meter meters mètre mètres metro metros 米 公尺 メートル 미터 เมตร метр*
length 1/1000 mm millimet* milímetro* 毫米 ミリメートル 밀리미터 มิลลิเมตร миллиметр*
length 1/100 cm centimet* centímetro* centimètre* zentimeter 厘米 公分 センチメートル センチ 센티미터 เซนติเมตร сантиметр* см
length 1/10 dm decimet* decímetro* 分米
length 1000 km kilomet* kilómetro* kilomètre* quilômetro* 千米 公里 キロメートル 킬로미터 กิโลเมตร километр* км
length 254/10000 inch inches pulgada* zoll 英寸 インチ 인치 นิ้ว дюйм*
length 3048/10000 ft foot feet 英尺 フィート 피트 ฟุต фут*
length 9144/10000 yd yds yard yards 码 ヤード 야드 หลา ярд*
length 1609344/1000 mi mile miles milla* meile* 英里 マイル 마일 ไมล์ мил[яьи]
mass 1 g gram grams gramm gramo* gramme* 克 グラム 그램 กรัม грамм*
mass 1/1000 mg milligram* miligramo* 毫克 ミリグラム 밀리그램
mass 1000 kg kgs kilo kilos kilogram* kilogramo* 千克 公斤 キログラム キロ 킬로그램 กิโลกรัม килограмм* кг
mass 1000000 ton tons tonne tonnes tonelada* 吨 トン 톤
mass 45359237/100000 lb lbs
mass 45359237/1600000 oz ounce ounces
time 1 s sec secs second seconds segundo* seconde* sekunde* 秒 秒钟 초 วินาที секунд*
time 1/1000 ms millisecond milliseconds 毫秒
time 60 min mins minute minutes minuto* minuten 分钟 分鐘 分間 분 นาที минут*
time 3600 h hr hrs hour hours hora horas heure* stunde* 小时 小時 時間 시간 ชั่วโมง час час[аы] часов
time 86400 day days día días dia dias jour jours tag tage 天 日間 วัน день дн[яе]й? дней
time 604800 week weeks semana* semaine* woche* 周 星期 週間 주일 สัปดาห์ недел*
month 1 month months mes meses mois monat* 个月 か月 ヶ月 개월 เดือน месяц*
month 12 year years año años ano anos ans année* jahr* 年 年間 ปี год года лет
volume 1 l liter liters litre litres litro* 升 リットル 리터 ลิตร литр*
volume 1/1000 ml milliliter* millilitre* mililitro* 毫升 ミリリットル 밀리리터 มิลลิลิตร
volume 3785411784/1000000000 gal gallon gallons galón galones 加仑 ガロン 갤런
degree 1 ° degree degrees grado* grad degré* 度
degree\sc 1 °\s?c celsius 摄氏度 °\s?celsius
degree\sf 1 °\s?f fahrenheit 华氏度 °\s?fahrenheit
radian 1 rad radian radians
speed 1 mph
"""  # noqa: E501
_MAGNITUDES = r"""
12 dozen dozens docena* douzaine* dutzend 打
100 hundred 百
1000 thousand thousands mil mille tausend nghìn ngàn ribu 千 천 พัน тысяч* тыс\.? k
10000 万 萬 만 หมื่น
100000 lakh lakhs แสน
1000000 million millions triệu juta millón millones milhão milhões millionen mio mn mln 百万 백만 ล้าน миллион* млн
10000000 crore crores
100000000 亿 億 억
1000000000 billion billions milliard milliards milliarden миллиард* млрд bn
1000000000000 trillion trillions 兆 조
"""
_TOO_SHORT = frozenset({"m", "s", "h", "l", "g", "k"})  # `5M` is no 5 m: units of one letter are read in lower case.


@functools.cache
def _units() -> list[tuple[re.Pattern[str], Unit]]:
    rows = (line.split() for line in _TABLE.strip().splitlines())
    return [(_words(words), Unit(kind.replace(r"\s", " "), Fraction(factor))) for kind, factor, *words in rows]


@functools.cache
def _magnitudes() -> list[tuple[re.Pattern[str], int]]:
    return [(_words(words), int(factor)) for factor, *words in map(str.split, _MAGNITUDES.strip().splitlines())]


def _words(words: Sequence[str]) -> re.Pattern[str]:
    return re.compile(_alternatives(words))


def _alternatives(words: Sequence[str]) -> str:
    """A pattern of whole words, longest first. Short words but `L` and `K` have one case, others any."""
    parts: list[str] = []
    for word in sorted(words, key=len, reverse=True):
        body = word[:-1] + r"[^\W\d]*" if word.endswith("*") else word
        if word not in _TOO_SHORT:
            body = f"(?i:{body})"
        parts.append("[lL]" if word == "l" else "[kK]" if word == "k" else body)
    ending = rf"(?:(?<={LETTER})(?!{LETTER})|(?<!{LETTER}))"
    return rf"(?:{'|'.join(parts)}){ending}"


@functools.cache
def suffixes() -> str:
    """The regular expression of a unit or magnitude."""
    rows = [*_TABLE.strip().splitlines(), *(f"- {line}" for line in _MAGNITUDES.strip().splitlines())]
    return _alternatives([word for row in rows for word in row.split()[2:]])


def magnitude_at(text: str) -> tuple[int, str]:
    """The product of the magnitudes that `text` starts with (`hundred thousand`), and what follows them."""
    product, rest = 1, text
    while match := _longest(_magnitudes(), rest.lstrip()):
        length, factor = match
        if (unit := _longest(_units(), rest.lstrip())) and unit[0] > length:  # a kilogram, in Chinese: thousand grams
            break
        product, rest = product * factor, rest.lstrip()[length:]
    return product, rest


def unit_at(text: str) -> tuple[Unit | None, str]:
    """The unit that `text` starts with (`cm^2`, `square metres`, `km/h`), and what follows it."""
    rest = text.lstrip()
    shape = re.match(r"(?i:(square|sq\.?|cubic|平方|立方|ตาราง|квадратных)\s*)", rest)
    match = _longest(_units(), rest[shape.end() :] if shape else rest)
    if match is None:
        return (Unit("length", Fraction(254, 10000)), "") if re.fullmatch(r"in\.?", rest) else (None, text)
    length, unit = match
    rest = rest[(shape.end() if shape else 0) + length :]
    power = re.match(r"\s?\^\s?\{?([23])\}?|([23])(?!\d)", rest) if unit.kind == "length" else None
    size = int(power[1] or power[2]) if power else 1
    if shape:
        size = 3 if shape[1].lower() in ("cubic", "立方") else 2
    rest = rest[power.end() :] if power else rest
    unit = Unit(f"{unit.kind}^{size}", unit.factor**size) if size > 1 else unit
    if unit.kind == "length^3":
        unit = Unit("volume", unit.factor * 1000)
    if (per := re.match(r"\s?(?:/|(?i:per|pro|por|par)\s)\s?", rest)) and unit.kind in ("length", "mass", "volume"):
        below, after = unit_at(rest[per.end() :])
        if below is not None:
            return Unit(f"{unit.kind}/{below.kind}", unit.factor / below.factor), after
    return unit, rest


def _longest(rows: list[tuple[re.Pattern[str], RowT]], text: str) -> tuple[int, RowT] | None:
    matches = [(match.end(), value) for pattern, value in rows if (match := pattern.match(text))]
    return max(matches, key=lambda pair: pair[0], default=None)


def ratio(actual: Unit | None, wanted: Unit | None) -> Fraction | None:
    """By what to multiply a number of `actual` for one of `wanted`; 1 when a side names no unit, None when the units
    differ."""
    if actual is None or wanted is None:
        return Fraction(1)
    if actual.kind == wanted.kind:
        return actual.factor / wanted.factor
    kinds = sorted((actual.kind, wanted.kind))
    return Fraction(1) if kinds[0] == "degree" and kinds[1].startswith("degree ") else None


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
    actual, text = extract_answer(completion), str(answer)
    is_bare = "\n" not in text and parse_number(text) is not None
    wanted = text if is_bare else extract_answer(text) or text
    return float(actual is not None and answers_equal(actual, wanted))


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
    answer = extract_answer(text)
    if answer is None or (number := parse_number(answer)) is None:
        return None if answer is None else _normalised(answer)
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


def answers_equal(actual: str, wanted: str) -> bool:
    """Whether two answers are equal: as numbers when both are numbers, else as normalised text."""
    left, right = parse_number(actual), parse_number(wanted)
    if left is None or right is None:
        return left is right and _normalised(actual) == _normalised(wanted)
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
