"""The verifier of boxed answers by symbolic equality: formulas, sets, intervals, matrices, equations.

The math-verify library (based on sympy) compares two expressions. Its own time limit does not stop a `9^{9^9}`, so it
runs in a separate process (`areal.reward.math_process`), which limits the processor time, wall time and memory of each
comparison; an answer that exceeds them is wrong. Waits for the answer of that process, which comes after at most
`_WALL_LIMIT_S` and its start.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

from areal.api.errors import InputError, RewardError
from areal.reward.math_answer import (
    Quantity,
    Unit,
    answers_equal,
    extract_answer,
    join_groups,
    last_boxed,
    parse_number,
    ratio,
    unit_at,
)

_MAX_ANSWER_CHARS = 1000  # Longer answers score 0 without comparison: the library's patterns take quadratic time.
_CPU_LIMIT_S = 4
_WALL_LIMIT_S = 10.0
"""A limit below the pool's default of 15 s: a slow answer then scores 0 and does not fail its episode."""
_MEMORY_BYTES = 1 << 30
_WHOLE = re.compile(r"-?\d+")
_PLAIN = re.compile(
    r"[-+]?\s*(?:(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|\.\d+|\d+\s*/\s*\d+|\d*\\[dt]?frac\{\s*-?\d+\s*\}\{\s*\d+\s*\})"
    r"(?:\s*\\(?:times|cdot)\s*10\^(?:\{\s*[-+]?\d{1,3}\s*\}|\d))?\s*(?:\\?%)?"
)
"""A number only: `2x` and `3i` are not 2 and 3 with units, and `3!` is 6."""
_UNIT = re.compile(
    r"(?:\\[,;: ]|~|\s)*"
    r"(?:\\(?:text|mathrm|textrm|mbox|operatorname)\s*\{(?P<text>[^{}]*)\}(?P<power>\s*\^\s*\{?[23]\}?)?"
    r"|(?P<sign>\^\s*\{?\\circ\}?|°|€|£|¥|₹|\\?\$)|(?<=[\d}])\s*(?P<word>(?:[A-Za-z]{2,}|m|(?<=\s)[gshL])(?:\^\{?[23]\}?|/[A-Za-z]+)?))$"
)
"""A unit at the end: in a command of text, as a sign, or as a word. Letters are variables, except in `5m`, `5 g`."""
_DEGREE = re.compile(r"(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*$")
_CURRENCY = re.compile(r"^(?P<sign>[-+]?)\s*(?P<unit>\\?\$|€|£|¥|₹|\\(?:euro|pounds)\b)\s*")
_RELATIVE_TOLERANCE = Fraction(2, 1_000_000)
_ABSOLUTE_TOLERANCE = Fraction(1, 1_000_000)
_MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_WRAPPING = re.compile(r"^\s*(?:\$\$?|\\\(|\\\[)\s*(.*?)\s*(?:\$\$?|\\\)|\\\])\s*$", re.DOTALL)
_BARE_ROOT = re.compile(r"\\sqrt\s*(\\(?:pi|alpha|beta|gamma|theta|lambda|phi)\b|[a-zA-Z])(?!\s*\{)")
_TRIES = 2
_PROGRAM = str(Path(__file__).with_name("math_process.py"))


def symbolic_math_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    r"""1 when the last \boxed{} of the completion equals the row's `answer` (LaTeX, plain, boxed, or after `####`).

    0 without a box, and for an answer that cannot be read or takes too much time or memory. InputError when the row's
    `answer` cannot be read.
    """
    wanted = gold_answer(answer)
    actual = last_boxed(completion)
    if actual is None or not actual.strip() or len(actual) > _MAX_ANSWER_CHARS:
        return 0.0
    actual = _readable(actual)
    if "".join(actual.split()) == "".join(wanted.split()):
        return 1.0
    (actual, given_unit), (wanted, wanted_unit) = _with_unit(actual), _with_unit(wanted)
    scale = ratio(given_unit, wanted_unit)
    if scale is None:
        return 0.0
    plain = _plain_equality(actual, wanted, scale)
    if plain is not None:
        return float(plain)
    scaled = actual if scale == 1 else rf"\frac{{{scale.numerator}}}{{{scale.denominator}}}\cdot({actual})"
    return float(_math_process().ask({"gold": wanted, "given": scaled})[0])


def _with_unit(text: str) -> tuple[str, Unit | None]:
    """A formula without the unit that it names, and the unit. Text that is no known unit stays."""
    if currency := _CURRENCY.match(text):
        unit, _ = unit_at(currency["unit"].replace("\\euro", "€").replace("\\pounds", "£").replace("\\", ""))
        return currency["sign"] + text[currency.end() :], unit
    match = _UNIT.search(text)
    if match is None or not (before := text[: match.start()].strip()):
        return text, None
    name = (match["text"] or match["word"] or match["sign"].replace("\\", "")).strip() + (match["power"] or "")
    if match["sign"] is None and (degree := _DEGREE.search(before)):  # 20^\\circ\\text{C}
        before, name = before[: degree.start()], f"°{name}"
    elif _DEGREE.fullmatch(name.replace("circ", "\\circ")):
        name = "°"
    unit, rest = unit_at(re.sub(r"^degrees? ([CcFf])", r"°\1", name))
    return (text, None) if unit is None or rest.strip() else (before, unit)


def gold_answer(answer: Any) -> str:
    r"""The final answer in a row's `answer`: its last \boxed{}, what follows `####`, or all of it."""
    text = str(answer)
    result = last_boxed(text)
    if result is None and "####" in text:
        result = text.rpartition("####")[2].strip().partition("\n")[0]
    result = _readable(text if result is None else result)
    if not result or len(result) > _MAX_ANSWER_CHARS:
        message = f"the row's answer {text[:200]!r} is not a formula of 1 to {_MAX_ANSWER_CHARS} characters"
        raise InputError(message, code="reward.bad_row")
    if parse_number(result) is None:
        _require_readable(_with_unit(result)[0])
    return result


@functools.lru_cache(maxsize=1024)
def _require_readable(wanted: str) -> None:
    """InputError when the library cannot read the row's answer. Cached for the other answers of a group."""
    is_readable, ending = _math_process().ask({"read": wanted})
    if not is_readable:
        cause = f" (ended by {ending})" if ending else ""
        message = f"the row's answer {wanted[:200]!r} is not a formula that math-verify can read{cause}"
        raise InputError(message, code="reward.bad_row")


def _readable(text: str) -> str:
    """A formula without surrounding math delimiters, and with two forms rewritten that the library misreads:
    `2 1/2` (read as a product) and a root of one letter without braces (an error)."""
    text = text.strip()
    if (match := _WRAPPING.match(text)) and "$" not in match[1]:
        text = match[1]
    text = join_groups(text)
    return _BARE_ROOT.sub(r"\\sqrt{\1}", _MIXED.sub(r"\1\\frac{\2}{\3}", text))


def _plain_equality(actual: str, wanted: str, scale: Fraction) -> bool | None:
    """Whether two plain numbers are equal, without the library; None when the library has to decide."""
    left, right = _plain_number(actual), _plain_number(wanted)
    if left is None or right is None:
        return None
    a, b = left.value * scale, right.value
    # datasets write 50% as 50 and as 0.5; the library's answer depends on the version of its parser
    is_share = left.is_percent != right.is_percent and (a / 100 == b if left.is_percent else a == b / 100)
    if a == b or is_share:
        return True
    # The library rounds to six places, at which all tiny quantities are equal.
    if left.is_percent == right.is_percent and abs(a - b) > _RELATIVE_TOLERANCE * max(abs(a), abs(b)):
        return False
    return False if _WHOLE.fullmatch(actual) and _WHOLE.fullmatch(wanted) else abs(a - b) <= _ABSOLUTE_TOLERANCE


def _plain_number(text: str) -> Quantity | None:
    return parse_number(text) if _PLAIN.fullmatch(text) else None


@functools.cache
def _math_process() -> MathProcess:
    """The process of this reward worker. InputError without math-verify."""
    if importlib.util.find_spec("math_verify") is None:
        message = "the reward `math` needs the library math-verify: pip install 'math-verify>=0.9'"
        raise InputError(message, code="reward.missing_library")
    return MathProcess()


class MathProcess:
    """A process that compares formulas: started on demand, ended with this one. Several threads may use it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, order: dict[str, str]) -> tuple[bool, str]:
        """Whether it holds, and the signal that ended its child ('' = none). RewardError when the process died."""
        with self._lock:
            for _ in range(_TRIES):
                if self._process is None:
                    self._process = self._start()
                assert self._process.stdin is not None
                assert self._process.stdout is not None
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.write(json.dumps(order) + "\n")
                    self._process.stdin.flush()
                if line := self._process.stdout.readline():
                    answer = json.loads(line)
                    return answer["holds"], answer["ending"]
                self.close()
            raise RewardError(
                f"the process that compares formulas died {_TRIES} times", code="reward.math_process_died"
            )

    def _start(self) -> subprocess.Popen[str]:
        # A new interpreter: a fork of this process, which has threads, could deadlock.
        argv = [sys.executable, "-P", _PROGRAM, str(_CPU_LIMIT_S), str(_WALL_LIMIT_S), str(_MEMORY_BYTES)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None


# The verifiers of answers to questions on images: a number in square brackets, and a formula in a box.

_COUNT = re.compile(r"\[\s*\$?\s*(\d{1,9}(?:\.\d{1,9})?)(?:\s*\$)?(?:\s+[A-Za-z ]{1,40})?\s*\]")
_BRACKETED = re.compile(r"(?<![\\\w])\[([^\[\]]{1,200})(?<!\\)\]")
r"""Text in brackets, but not in the delimiters `\[` and `\]` of a formula, and not the index of a root."""


def count_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    """1 when the last number in square brackets, as in `[3]` or `[3 cubes]`, equals that of the row's `answer`, else 0.

    InputError when `answer` has no number.
    """
    wanted = extract_answer(str(answer).strip(" []"))
    if wanted is None or parse_number(wanted) is None:
        raise InputError(f"the row's answer {str(answer)[:100]!r} is not a number", code="reward.bad_row")
    numbers = _COUNT.findall(completion)
    return float(bool(numbers) and answers_equal(numbers[-1], wanted))


def vision_math_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    r"""Score as `symbolic_math_reward` does; without a \boxed{} the last text in square brackets counts.

    A row's `answer` that is no formula, such as a word, must be equal as text.
    """
    if "\\boxed" not in completion and (bracketed := _BRACKETED.findall(completion)):
        completion = f"\\boxed{{{bracketed[-1]}}}"
    try:
        return symbolic_math_reward(prompt, completion, prompt_ids, completion_ids, answer=answer)
    except InputError:
        actual, boxed = last_boxed(completion), last_boxed(str(answer))
        wanted = str(answer) if boxed is None else boxed
        if not wanted.strip():
            raise
        return float(actual is not None and answers_equal(actual, wanted))
