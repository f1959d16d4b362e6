"""The process that compares formulas with the library math-verify, for one reward worker.

It has a single thread, so that it may fork: each comparison runs in a child with limits on processor time, wall time
and memory, which inherits the cache of the parser. Messages are lines of JSON on standard input and output: {"read":
text} or {"gold": text, "given": text}; the answer is {"holds": bool, "ending": text about a child that was killed}.
Ends when its standard input closes.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from itertools import product
from typing import Any, cast

_WARM_UP = (
    (r"\frac{1}{2}+\sqrt{3}", r"\frac{1+2\sqrt{3}}{2}"), ("(1,2)", "[0,\\infty)"), (r"\{1,2\}", r"\pm 2"),
    ("x=5", "5"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&5\end{bmatrix}"),
    ("x^2+2x+1", "(x+1)^2"), (r"-\infty<x\le2", r"(-\infty,2]"), (r"5\text{ cm}", r"50\%"), (r"90^\circ", r"2\pi r"),
    (r"\text{Monday}", r"\text{Friday}"), (r"\sin(x)", r"\log_2 8"), ("1+2i", "2i+1"), ("5!", r"\binom{5}{2}"),
    ("10_{2}", r"1\times10^3"), (r"(-1,2]\cup[3,4)", r"x \in [1,2]"), ("3,4,5", "|x-1|"), ("y=2x+1", "y-2x=1"),
    (r"\left(\frac{1}{2},-3\right)", "(0.5,3)"), (r"\frac{\sqrt{2}}{3}", "0.4714"),
)  # fmt: skip
"""Compared once: the parser caches what it reads, and forked children inherit the cache."""


_RELATIVE_TOLERANCE = 2e-6


def main(argv: list[str]) -> None:
    cpu_s, wall_s, memory_bytes = int(argv[0]), float(argv[1]), int(argv[2])
    read, equal = load_library()
    for line in sys.stdin:
        order = json.loads(line)

        def holds(order: dict[str, str] = order) -> bool:
            if "read" in order:
                return bool(read(order["read"]))
            actual = read(order["given"])
            return bool(actual) and equal(read(order["gold"]), actual)

        answer, ending = in_child(holds, cpu_s=cpu_s, wall_s=wall_s, memory_bytes=memory_bytes)
        sys.stdout.write(json.dumps({"holds": answer, "ending": ending}) + "\n")
        sys.stdout.flush()


def in_child(work: Callable[[], bool], *, cpu_s: int, wall_s: float, memory_bytes: int) -> tuple[bool, str]:
    """What `work` returns in a forked child; False, and how it ended, when it exceeds a limit."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _limit_this_process(cpu_s, memory_bytes)
            if work():
                os.write(writing, b"1")
        finally:
            os._exit(0)  # without the parent's clean-up, which would write to its channel
    os.close(writing)
    is_true = bool(select.select([reading], [], [], wall_s)[0] and os.read(reading, 1))
    os.close(reading)
    os.kill(pid, signal.SIGKILL)  # harmless when it has ended: it is not reaped yet
    _, status = os.waitpid(pid, 0)
    return is_true, "" if os.WIFEXITED(status) or is_true else signal.Signals(os.WTERMSIG(status)).name


def _limit_this_process(cpu_s: int, memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)  # the library logs each failure


def load_library() -> tuple[Callable[[str], list[Any]], Callable[[list[Any], list[Any]], bool]]:
    """Import math-verify and fill the cache of its parser: about two seconds.

    Returns two functions. The first reads a text: its possible expressions, none when it cannot be read. The second
    compares (expressions of the row, of the completion); the order matters: `5` answers `x=5`.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    extraction = [LatexExtractionConfig(boxed_match_priority=0)]
    # It warns that it runs without its own time limit; the limits of the child replace it.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def read(text: str) -> list[Any]:
        return parse(f"\\boxed{{{text}}}", extraction, fallback_mode="no_fallback", parsing_timeout=cast(int, None))

    def same(left: Any, other: Any) -> bool:
        return verify([left], [other], timeout_seconds=None) and not _differs(left, other)

    def equal(gold: list[Any], answer: list[Any]) -> bool:
        for left, other in product(gold, answer):
            if same(left, other):
                return True
            sets = _as_set(left), _as_set(other)
            if None not in sets and (sets != (left, other)) and same(*sets):
                return True
        return False

    for left, other in _WARM_UP:
        equal(read(left), read(other))
    gc.freeze()  # else a child's garbage collection would copy the pages shared with this process
    return read, equal


def _differs(left: Any, other: Any) -> bool:
    """Whether numbers of two expressions that the library takes for equal differ by more than a relative tolerance: it
    rounds to six places, at which all tiny quantities are equal."""
    from sympy import Basic, Expr, FiniteSet, Matrix

    if isinstance(left, Expr) and isinstance(other, Expr):
        try:
            a, b = complex(left), complex(other)
        except (TypeError, ValueError, OverflowError):
            return False
        return abs(a - b) > _RELATIVE_TOLERANCE * max(abs(a), abs(b))
    if isinstance(left, FiniteSet) and isinstance(other, FiniteSet):
        return not all(any(not _differs(a, b) for b in other.args) for a in left.args)
    if isinstance(left, (Basic, Matrix)) and type(left) is type(other):
        pairs = (left.flat(), other.flat()) if isinstance(left, Matrix) else (left.args, other.args)
        return len(pairs[0]) == len(pairs[1]) and any(map(_differs, *pairs))
    return False


def _as_set(expression: Any) -> Any:
    """The set of an inequality of one variable, of `x \\in S`, or of a set; None of everything else."""
    from sympy import And, Eq, FiniteSet, Or, Set, Union
    from sympy.core.relational import Relational

    if isinstance(expression, Eq) and isinstance(expression.rhs, Set):
        return expression.rhs
    if isinstance(expression, FiniteSet) and all(isinstance(each, Relational) for each in expression.args):
        parts = [_as_set(each) for each in expression.args]  # x < 1 or x > 2
        return Union(*parts) if parts and None not in parts else None
    if isinstance(expression, Set):
        return expression
    is_inequality = isinstance(expression, (Relational, And, Or)) and not isinstance(expression, Eq)
    return expression.as_set() if is_inequality and len(expression.free_symbols) == 1 else None


if __name__ == "__main__":
    main(sys.argv[1:])
