r"""Owns the verifier of boxed answers by symbolic equality: formulas, sets, intervals, matrices, equations.

What two expressions are worth is decided by the math-verify library (sympy beneath it). Its work is bounded by nothing
but its own alarms, which do not stop a `9^{9^9}`: so each comparison runs in a forked child with limits on processor
time, wall time and memory, and an answer that exceeds them is wrong.

Waits for: that child, at most `_WALL_LIMIT_S`; its death closes the pipe that is waited on.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from areal.api.errors import InputError
from areal.reward.math_answer import last_boxed, parse_number

_MAX_ANSWER_CHARS = 1000
"""Longer answers are wrong unread: no problem asks for one, and the library's patterns take quadratic time."""
_CPU_LIMIT_S = 4
_WALL_LIMIT_S = 10.0
"""Below the pool's default limit of 15 s, so that a slow answer scores 0 there instead of failing its episode."""
_MEMORY_BYTES = 1 << 30
_WHOLE = re.compile(r"-?\d+")
_PLAIN = re.compile(
    r"[-+]?\s*(?:\\?\$)?\s*(?:(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|\.\d+|\d+\s*/\s*\d+"
    r"|\d*\\[dt]?frac\{\s*-?\d+\s*\}\{\s*\d+\s*\})\s*(?:\\?%)?"
)
"""Nothing but a number: `2x` and `3i` are no 2 and 3 with units, and `3!` is 6."""
_MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_WRAPPING = re.compile(r"^\s*(?:\$\$?|\\\(|\\\[)\s*(.*?)\s*(?:\$\$?|\\\)|\\\])\s*$", re.DOTALL)
_BARE_ROOT = re.compile(r"\\sqrt\s*(\\(?:pi|alpha|beta|gamma|theta|lambda|phi)\b|[a-zA-Z])(?!\s*\{)")
_READ, _EQUAL = b"r", b"="
_WARM_UP = (
    (r"\frac{1}{2}+\sqrt{3}", r"\frac{1+2\sqrt{3}}{2}"), ("(1,2)", "[0,\\infty)"), (r"\{1,2\}", r"\pm 2"),
    ("x=5", "5"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&5\end{bmatrix}"),
    ("x^2+2x+1", "(x+1)^2"), (r"-\infty<x\le2", r"(-\infty,2]"), (r"5\text{ cm}", r"50\%"), (r"90^\circ", r"2\pi r"),
    (r"\text{Monday}", r"\text{Friday}"), (r"\sin(x)", r"\log_2 8"), ("1+2i", "2i+1"), ("5!", r"\binom{5}{2}"),
    ("10_{2}", r"1\times10^3"), (r"(-1,2]\cup[3,4)", r"x \in [1,2]"), ("3,4,5", "|x-1|"), ("y=2x+1", "y-2x=1"),
    (r"\left(\frac{1}{2},-3\right)", "(0.5,3)"), (r"\frac{\sqrt{2}}{3}", "0.4714"),
)  # fmt: skip
"""Compared once in each worker: the parser learns from what it reads, and its children inherit that."""


def symbolic_math_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    r"""1 when the last \boxed{} of the completion equals the row's `answer` (LaTeX, plain, boxed, or after `####`).

    0 without a box, and for an answer that cannot be read or takes too much time or memory. InputError when the row's
    own `answer` cannot be read.
    """
    wanted = gold_answer(answer)
    given = last_boxed(completion)
    if given is None or not given.strip() or len(given) > _MAX_ANSWER_CHARS:
        return 0.0
    given = _readable(given)
    plain = _plain_equality(given, wanted)
    if plain is None:
        return float("".join(given.split()) == "".join(wanted.split()) or _symbolic_equality(given, wanted))
    return float(plain)


def gold_answer(answer: Any) -> str:
    r"""The final answer in a row's `answer`: its last \boxed{}, what follows `####`, or all of it."""
    text = str(answer)
    found = last_boxed(text)
    if found is None and "####" in text:
        found = text.rpartition("####")[2].strip().partition("\n")[0]
    found = _readable(text if found is None else found)
    if not found or len(found) > _MAX_ANSWER_CHARS:
        raise InputError(f"the row's answer {text[:200]!r} is no formula of 1 to {_MAX_ANSWER_CHARS} characters")
    if parse_number(found) is None:
        _require_readable(found)
    return found


@functools.lru_cache(maxsize=1024)
def _require_readable(wanted: str) -> None:
    """InputError when the library cannot read an answer to compare with. Kept for the siblings of a group."""
    library = _library()
    said, ending = _in_child(lambda say: say(_READ) if library.read(wanted) else None)
    if said != _READ:
        raise InputError(f"the row's answer {wanted[:200]!r} is no formula that math-verify can read{ending}")


def _readable(text: str) -> str:
    """A formula without math delimiters around it, and with two forms that the library misreads written out:
    `2 1/2` (it takes the product) and a root of one letter without braces (an error)."""
    text = text.strip()
    if (match := _WRAPPING.match(text)) and "$" not in match[1]:
        text = match[1]
    return _BARE_ROOT.sub(r"\\sqrt{\1}", _MIXED.sub(r"\1\\frac{\2}{\3}", text))


def _plain_equality(given: str, wanted: str) -> bool | None:
    """The verdict on two plain numbers, without the library; None when it needs more than that."""
    if _WHOLE.fullmatch(given) and _WHOLE.fullmatch(wanted):
        return given == wanted or parse_number(given) == parse_number(wanted)
    if not (_PLAIN.fullmatch(given) and _PLAIN.fullmatch(wanted)):
        return None
    left, right = parse_number(given), parse_number(wanted)
    if left is None or right is None:
        return None
    (a, a_percent), (b, b_percent) = left, right
    # 50% is written as 50 and as 0.5; not left to the library, whose answer depends on the version of its parser
    is_share = a_percent != b_percent and (a / 100 == b if a_percent else a == b / 100)
    return True if a == b or is_share else None


def _symbolic_equality(given: str, wanted: str) -> bool:
    """Whether the library finds the two equal, asked in a child."""
    library = _library()

    def compare(say: Callable[[bytes], Any]) -> None:
        answer = library.read(given)
        if answer and library.equal(library.read(wanted), answer):
            say(_EQUAL)

    return _in_child(compare)[0] == _EQUAL


def _in_child(work: Callable[[Callable[[bytes], Any]], None]) -> tuple[bytes, str]:
    """What `work` wrote in a forked child until it ended or exceeded its limits, and how it ended, for people."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _limit_this_process()
            work(functools.partial(os.write, writing))
        finally:
            os._exit(0)  # nothing of the parent's clean-up, its channel to the pool least of all
    os.close(writing)
    said, until = b"", time.monotonic() + _WALL_LIMIT_S
    while select.select([reading], [], [], max(0.0, until - time.monotonic()))[0] and (data := os.read(reading, 16)):
        said += data
    os.close(reading)
    os.kill(pid, signal.SIGKILL)  # harmless when it has ended: it is not reaped yet
    _, status = os.waitpid(pid, 0)
    ending = "" if status == 0 else f" (given up: {signal.Signals(os.WTERMSIG(status)).name})"
    return said, ending


def _limit_this_process() -> None:
    """Bound the processor time and memory of what follows; wall time is its parent's to watch."""
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_LIMIT_S, _CPU_LIMIT_S))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY_BYTES, mapped + _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)  # the library logs what it gives up


@dataclass(frozen=True, slots=True)
class _Library:
    """The two functions of math-verify that we use, bound to our options."""

    read: Callable[[str], list[Any]]
    """The expressions a text may stand for; empty when it cannot be read."""
    equal: Callable[[list[Any], list[Any]], bool]
    """(of the row, of the completion): the order matters, `x=5` asked for is met by `5`."""


@functools.cache
def _library() -> _Library:
    """Import math-verify and let its parser learn the usual forms: about two seconds, once a worker."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise InputError("the reward `math` needs the library math-verify: pip install 'math-verify>=0.9'") from error
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]
    # It warns that it runs without alarms of its own; the limits of the child stand for them.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def read(text: str) -> list[Any]:
        return parse(f"\\boxed{{{text}}}", extraction, fallback_mode="no_fallback", parsing_timeout=cast(int, None))

    def equal(gold: list[Any], answer: list[Any]) -> bool:
        return verify(gold, answer, timeout_seconds=None)

    for one, other in _WARM_UP:
        equal(read(one), read(other))
    gc.freeze()  # a child's garbage collection would copy the pages it shares with us
    return _Library(read, equal)
