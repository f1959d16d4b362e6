r"""The verifier of boxed answers by symbolic equality: formulas, sets, intervals, matrices, equations.

The math-verify library (based on sympy) compares two expressions. Its own time limit does not stop a `9^{9^9}`, so each
comparison runs in a forked child with limits on processor time, wall time and memory; an answer that exceeds them is
wrong. This process waits for the child for at most `_WALL_LIMIT_S`; the child's end closes the pipe that it waits for.
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
from typing import Any, cast

from areal.api.errors import InputError
from areal.reward.math_answer import last_boxed, parse_number

_MAX_ANSWER_CHARS = 1000
"""Longer answers score 0 without comparison: the library's patterns take quadratic time."""
_CPU_LIMIT_S = 4
_WALL_LIMIT_S = 10.0
"""Below the pool's default limit of 15 s: a slow answer then scores 0 and does not fail its episode."""
_MEMORY_BYTES = 1 << 30
_WHOLE = re.compile(r"-?\d+")
_PLAIN = re.compile(
    r"[-+]?\s*(?:\\?\$)?\s*(?:(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|\.\d+|\d+\s*/\s*\d+"
    r"|\d*\\[dt]?frac\{\s*-?\d+\s*\}\{\s*\d+\s*\})\s*(?:\\?%)?"
)
"""A number only: `2x` and `3i` are not 2 and 3 with units, and `3!` is 6."""
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
"""Compared once in each worker: the parser caches what it reads, and forked children inherit the cache."""


def symbolic_math_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any, **row: Any
) -> float:
    r"""1 when the last \boxed{} of the completion equals the row's `answer` (LaTeX, plain, boxed, or after `####`).

    0 without a box, and for an answer that cannot be read or takes too much time or memory. InputError when the row's
    `answer` cannot be read.
    """
    wanted = gold_answer(answer)
    given = last_boxed(completion)
    if given is None or not given.strip() or len(given) > _MAX_ANSWER_CHARS:
        return 0.0
    given = _readable(given)
    plain = _plain_equality(given, wanted)
    if plain is not None:
        return float(plain)
    return float("".join(given.split()) == "".join(wanted.split()) or _symbolic_equality(given, wanted))


def gold_answer(answer: Any) -> str:
    r"""The final answer in a row's `answer`: its last \boxed{}, what follows `####`, or all of it."""
    text = str(answer)
    found = last_boxed(text)
    if found is None and "####" in text:
        found = text.rpartition("####")[2].strip().partition("\n")[0]
    found = _readable(text if found is None else found)
    if not found or len(found) > _MAX_ANSWER_CHARS:
        message = f"the row's answer {text[:200]!r} is not a formula of 1 to {_MAX_ANSWER_CHARS} characters"
        raise InputError(message, code="reward.bad_row")
    if parse_number(found) is None:
        _require_readable(found)
    return found


@functools.lru_cache(maxsize=1024)
def _require_readable(wanted: str) -> None:
    """InputError when the library cannot read the row's answer. Cached for the other answers of a group."""
    read, _ = _library()
    output, ending = _in_child(lambda write: write(_READ) if read(wanted) else None)
    if output != _READ:
        message = f"the row's answer {wanted[:200]!r} is not a formula that math-verify can read{ending}"
        raise InputError(message, code="reward.bad_row")


def _readable(text: str) -> str:
    """A formula without surrounding math delimiters, and with two forms rewritten that the library misreads:
    `2 1/2` (read as a product) and a root of one letter without braces (an error)."""
    text = text.strip()
    if (match := _WRAPPING.match(text)) and "$" not in match[1]:
        text = match[1]
    return _BARE_ROOT.sub(r"\\sqrt{\1}", _MIXED.sub(r"\1\\frac{\2}{\3}", text))


def _plain_equality(given: str, wanted: str) -> bool | None:
    """Whether two plain numbers are equal, without the library; None when the library has to decide."""
    if _WHOLE.fullmatch(given) and _WHOLE.fullmatch(wanted):
        return given == wanted or parse_number(given) == parse_number(wanted)
    if not (_PLAIN.fullmatch(given) and _PLAIN.fullmatch(wanted)):
        return None
    left, right = parse_number(given), parse_number(wanted)
    if left is None or right is None:
        return None
    (a, a_percent), (b, b_percent) = left, right
    # datasets write 50% as 50 and as 0.5; the library's answer depends on the version of its parser
    is_share = a_percent != b_percent and (a / 100 == b if a_percent else a == b / 100)
    return True if a == b or is_share else None


def _symbolic_equality(given: str, wanted: str) -> bool:
    """Whether the library finds the two equal; computed in a child."""
    read, equal = _library()

    def compare(write: Callable[[bytes], Any]) -> None:
        answer = read(given)
        if answer and equal(read(wanted), answer):
            write(_EQUAL)

    return _in_child(compare)[0] == _EQUAL


def _in_child(work: Callable[[Callable[[bytes], Any]], None]) -> tuple[bytes, str]:
    """What `work` wrote in a forked child until it ended or exceeded its limits, and a text about an early end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _limit_this_process()
            work(functools.partial(os.write, writing))
        finally:
            os._exit(0)  # without the parent's clean-up, which would use its channel to the pool
    os.close(writing)
    output, until = b"", time.monotonic() + _WALL_LIMIT_S
    while select.select([reading], [], [], max(0.0, until - time.monotonic()))[0] and (data := os.read(reading, 16)):
        output += data
    os.close(reading)
    os.kill(pid, signal.SIGKILL)  # harmless when it has ended: it is not reaped yet
    _, status = os.waitpid(pid, 0)
    ending = "" if status == 0 else f" (ended by {signal.Signals(os.WTERMSIG(status)).name})"
    return output, ending


def _limit_this_process() -> None:
    """Limit the processor time and memory of this process; its parent limits the wall time."""
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_LIMIT_S, _CPU_LIMIT_S))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY_BYTES, mapped + _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)  # the library logs each failure


@functools.cache
def _library() -> tuple[Callable[[str], list[Any]], Callable[[list[Any], list[Any]], bool]]:
    """Import math-verify and fill the cache of its parser: about two seconds, once in each worker.

    Returns two functions. The first reads a text: its possible expressions, none when it cannot be read. The second
    compares (expressions of the row, of the completion); the order matters: `5` answers `x=5`.
    """
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        message = "the reward `math` needs the library math-verify: pip install 'math-verify>=0.9'"
        raise InputError(message, code="reward.missing_library") from error
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]
    # It warns that it runs without its own time limit; the limits of the child replace it.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def read(text: str) -> list[Any]:
        return parse(f"\\boxed{{{text}}}", extraction, fallback_mode="no_fallback", parsing_timeout=cast(int, None))

    def equal(gold: list[Any], answer: list[Any]) -> bool:
        return verify(gold, answer, timeout_seconds=None)

    for one, other in _WARM_UP:
        equal(read(one), read(other))
    gc.freeze()  # else a child's garbage collection would copy the pages shared with this process
    return read, equal
