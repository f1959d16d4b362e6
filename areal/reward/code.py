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

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*(\S*)[^\n]*")
_PYTHON = ("", "python", "python3", "py")


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
    trial = Trial(program_runner(source, limits), limits=limits, tolerance=tolerance)
    passed = trial.run(cases, stop_at_failure=not continuous)
    return passed / len(cases) if continuous else float(passed == len(cases))


def last_code_block(text: str) -> str | None:
    """The content of the last closed fence marked as Python or unmarked; None when there is none."""
    result, opened, is_python = None, "", False
    lines: list[str] = []
    for line in text.splitlines():
        match = _FENCE.fullmatch(line)
        if not opened and match:
            opened, is_python, lines = match[1], match[2].lower() in _PYTHON, []
        elif match and not match[2] and match[1].startswith(opened):
            result = "\n".join(lines) + "\n" if is_python else result
            opened = ""
        else:
            lines.append(line)
    return result


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
