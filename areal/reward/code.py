"""The verifier of programs: runs the last Python block of a completion in a sandbox, against the row's tests.

All comparisons happen outside the program's process: outputs and results of functions are compared here, and assertions
run in a second sandbox, the assertion checker, which gets the program's values but shares no memory with it. A program
that exits early therefore passes no further test, whatever its exit code.

Waits for the sandboxes: `time_limit_s` for each test, `total_time_limit_s` for all tests, plus the start of the last
sandbox. The sum must be below `reward.timeout_s`, at which the pool kills this process and with it the sandboxes.
"""

import contextlib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from areal.reward.code_tests import (
    AssertTest,
    CallTest,
    CodeLimits,
    CodeTest,
    ProgramDoesNotLoad,
    ProgramRunner,
    ProgramTest,
    SandboxEnded,
    parse_tests,
    same_output,
    same_result,
)
from areal.reward.sandbox import program_runner
from areal.reward.sandbox_inside import plain_data

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*(\S*)[^\n]*")
_PYTHON = ("python", "python3", "py", "py3")
_MODULES = "bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys"
_NAMES = {
    "typing": "Any Callable Deque Dict FrozenSet Generator Iterable Iterator List Optional Sequence Set Tuple Union",
    "collections": "Counter OrderedDict defaultdict deque",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "functools": "cache cmp_to_key lru_cache reduce",
    "itertools": "accumulate chain combinations count cycle groupby pairwise permutations product zip_longest",
    "math": "ceil comb factorial floor gcd inf isqrt lcm log log2 pi sqrt",
}
"""What platforms of function-style problems import before an answer; without `pow`, which would hide Python's."""
_FUTURE = re.compile(r"^from __future__ import [^\n(]*\n", re.MULTILINE)


def code_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    tests: Any,
    entry_point: str | list[str] | None = None,
    continuous: bool = False,
    time_limit_s: float | None = None,
    total_time_limit_s: float | None = None,
    memory_mb: float | None = None,
    float_tolerance: float | None = None,
    **row: Any,
) -> float:
    """1 when the completion's last Python block passes all of the row's `tests`, else 0; with `continuous` the fraction
    that it passes; 0 without a block. docs/rewards.md explains the columns; null means the default.

    InputError for invalid columns, RewardError when no sandbox starts or the remote service fails, ConfigError when
    reward.sandbox.backend cannot be used.
    """
    cases = parse_tests(
        tests, [entry_point] if isinstance(entry_point, str) and entry_point else list(entry_point or [])
    )
    limits = CodeLimits(
        time_limit_s=4.0 if time_limit_s is None else time_limit_s,
        total_time_limit_s=10.0 if total_time_limit_s is None else total_time_limit_s,
        memory_bytes=int((1024 if memory_mb is None else memory_mb) * (1 << 20)),
    )
    tolerance = 1e-6 if float_tolerance is None else float_tolerance
    source = last_code_block(completion)
    if source is None:
        return 0.0
    called = {name for case in cases for name in _functions_of(case)}
    if called:
        source = with_imports(source, called)
    trial = Trial(program_runner(source, limits), limits=limits, tolerance=tolerance)
    passed = trial.run(cases, stop_at_failure=not continuous)
    return passed / len(cases) if continuous else float(passed == len(cases))


def last_code_block(text: str) -> str | None:
    """The content of the last closed fence marked as Python, else of the last unmarked one; None when there is none.

    Lines lose the indentation of their fence, which is that of a list item.
    """
    marked, unmarked, opened, language, indent = None, None, "", "", ""
    lines: list[str] = []
    for line in text.splitlines():
        match = _FENCE.fullmatch(line)
        if not opened and match:
            indent, opened, language, lines = match[1], match[2], match[3].lower().strip("{.}"), []
        elif match and not match[3] and match[2].startswith(opened):
            content = "\n".join(lines) + "\n"
            if language in _PYTHON:
                marked = content
            elif not language:
                unmarked = content
            opened = ""
        else:
            width = len(line) - len(line.lstrip(" \t"))
            lines.append(line[min(width, len(indent)) :])
    return unmarked if marked is None else marked


def _functions_of(case: CodeTest) -> list[str]:
    if isinstance(case, ProgramTest):
        return []
    return [case.function] if isinstance(case, CallTest) else list(case.names.values())


def with_imports(source: str, called: set[str]) -> str:
    """The program after the imports of such platforms, without the names that tests call: it must define them."""
    names = {module: [name for name in text.split() if name not in called] for module, text in _NAMES.items()}
    lines = [f"import {_MODULES}\n", *(f"del {module}\n" for module in _MODULES.split(", ") if module in called)]
    lines += [f"from {module} import {', '.join(kept)}\n" for module, kept in names.items() if kept]
    start = max((match.end() for match in _FUTURE.finditer(source)), default=0)
    return source[:start] + "".join(lines) + source[start:]


class Trial:
    """One program and its tests. Closes the runner at the end of `run`."""

    def __init__(self, runner: ProgramRunner, *, limits: CodeLimits, tolerance: float) -> None:
        self._runner, self._limits, self._tolerance = runner, limits, tolerance
        self._until_s = 0.0

    def run(self, cases: list[CodeTest], *, stop_at_failure: bool) -> int:
        """Number of tests that the program passes; `stop_at_failure`: up to the first failure."""
        self._until_s = time.monotonic() + self._limits.total_time_limit_s
        passed, together = 0, self._runner.num_parallel
        does_not_load = contextlib.suppress(ProgramDoesNotLoad)  # the remaining tests would fail too
        with contextlib.closing(self._runner), does_not_load, ThreadPoolExecutor(together) as threads:
            # A local sandbox ends with the thread that started it, so it is started by this one.
            apply = threads.map if together > 1 else map
            for first in range(0, len(cases), together):
                results = list(apply(self._passes, cases[first : first + together]))
                passed += sum(results)
                if time.monotonic() >= self._until_s or (stop_at_failure and not all(results)):
                    break
        return passed

    def _passes(self, case: CodeTest) -> bool:
        until_s = min(self._until_s, time.monotonic() + self._limits.time_limit_s)
        try:
            if isinstance(case, ProgramTest):
                output = self._runner.write(case.stdin, until_s=until_s)
                text = output.stdout.decode("utf-8", "replace")
                return output.exit_code == 0 and same_output(text, case.stdout, self._tolerance)
            if isinstance(case, AssertTest):
                return self._runner.check(case, until_s=until_s)
            answer = self._runner.call(case, until_s=until_s)
        except SandboxEnded:
            return False
        try:
            return same_result(plain_data(answer["value"]), case.result, self._tolerance)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return False  # it raised, or its result is not plain data
