"""The verifier of programs: runs the last Python block of a completion in a sandbox, against the row's tests.

All comparisons happen outside the program's process: outputs and results of functions are compared here, and assertions
run in a second sandbox, the assertion checker, which gets the program's values but shares no memory with it. A program
that exits early therefore passes no further test, whatever its exit code.

Waits for the sandboxes: `time_limit_s` for each test, `total_time_limit_s` for all tests, plus the start of the last
sandbox. The sum must be below `reward.timeout_s`, at which the pool kills this process and with it the sandboxes.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from areal.api.errors import InputError
from areal.reward.code_tests import AssertTest, CallTest, CodeTest, ProgramTest, parse_tests, same_output, same_result
from areal.reward.sandbox import Isolation, Role, Sandbox, SandboxEnded, SandboxLimits, available_isolation
from areal.reward.sandbox_values import encoded, plain_data

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*(\S*)[^\n]*")
_PYTHON = ("", "python", "python3", "py")
_SPARE_S = 5.0
"""A sandbox ends without `close` at this time after the limit of all tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLimits:
    """Limits of the program of one completion."""

    time_limit_s: float = 4.0
    """Wall time of each test."""
    total_time_limit_s: float = 10.0
    """Wall time of all tests; tests that were not started have failed."""
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if not (self.time_limit_s > 0 and self.total_time_limit_s > 0 and self.memory_bytes > 0):
            raise InputError(f"the row's limits of time and memory must be above 0: {self}", code="reward.bad_row")


def code_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    tests: Any,
    entry_point: str | None = None,
    continuous: bool = False,
    time_limit_s: float | None = None,
    total_time_limit_s: float | None = None,
    memory_mb: float | None = None,
    float_tolerance: float | None = None,
    **row: Any,
) -> float:
    """1 when the completion's last Python block passes all of the row's `tests`, else 0; with `continuous` the fraction
    that it passes; 0 without a block. docs/rewards.md explains the columns; null means the default.

    InputError for invalid columns, RewardError when no sandbox starts.
    """
    cases = parse_tests(tests, entry_point or "")
    limits = CodeLimits(
        time_limit_s=4.0 if time_limit_s is None else time_limit_s,
        total_time_limit_s=10.0 if total_time_limit_s is None else total_time_limit_s,
        memory_bytes=int((1024 if memory_mb is None else memory_mb) * (1 << 20)),
    )
    tolerance = 1e-6 if float_tolerance is None else float_tolerance
    source = last_code_block(completion)
    if source is None:
        return 0.0
    trial = Trial(source, limits=limits, entry_point=entry_point or "", tolerance=tolerance)
    passed = trial.run(cases, stop_at_failure=not continuous)
    return passed / len(cases) if continuous else float(passed == len(cases))


def last_code_block(text: str) -> str | None:
    """The content of the last closed fence marked as Python or unmarked; None when there is none."""
    found, opened, is_python = None, "", False
    lines: list[str] = []
    for line in text.splitlines():
        match = _FENCE.fullmatch(line)
        if not opened and match:
            opened, is_python, lines = match[1], match[2].lower() in _PYTHON, []
        elif match and not match[2] and match[1].startswith(opened):
            found = "\n".join(lines) + "\n" if is_python else found
            opened = ""
        else:
            lines.append(line)
    return found


class Trial:
    """One program and its tests."""

    def __init__(
        self, source: str, *, limits: CodeLimits, entry_point: str, tolerance: float, isolation: Isolation | None = None
    ) -> None:
        self._source, self._limits, self._tolerance = source, limits, tolerance
        self._entry_point, self._isolation = entry_point, isolation or available_isolation()
        self._until_s = 0.0
        self._served: _Served | None = None

    def run(self, cases: list[CodeTest], *, stop_at_failure: bool) -> int:
        """Number of tests that the program passes; `stop_at_failure`: up to the first failure."""
        self._until_s = time.monotonic() + self._limits.total_time_limit_s
        passed = 0
        try:
            for case in cases:
                passes = self._writes(case) if isinstance(case, ProgramTest) else self._answers(case)
                passed += passes
                if time.monotonic() >= self._until_s or (stop_at_failure and not passes):
                    break
        except _DoesNotLoad:
            pass  # the remaining tests would fail too
        finally:
            self._end()
        return passed

    def _test_until_s(self) -> float:
        return min(self._until_s, time.monotonic() + self._limits.time_limit_s)

    def _sandbox(self, role: Role, source: str, *, stdin: str = "") -> Sandbox:
        limit_s = self._limits.time_limit_s if role == "program" else self._limits.total_time_limit_s
        return Sandbox(
            role,
            source,
            limits=SandboxLimits(cpu_s=limit_s, memory_bytes=self._limits.memory_bytes),
            isolation=self._isolation,
            keep_s=self._limits.total_time_limit_s + _SPARE_S,
            stdin=stdin.encode("utf-8", "replace"),
        )

    def _writes(self, case: ProgramTest) -> bool:
        with self._sandbox("program", self._source, stdin=case.stdin) as sandbox:
            output = sandbox.wait_started().output(until_s=self._test_until_s())
        text = output.stdout.decode("utf-8", "replace")
        return output.exit_code == 0 and same_output(text, case.stdout, self._tolerance)

    def _answers(self, case: CallTest | AssertTest) -> bool:
        try:
            if self._served is None:
                self._served = _Served(self._sandbox, self._source, with_checker=isinstance(case, AssertTest))
                self._served.load(until_s=self._test_until_s())
            if isinstance(case, CallTest):
                return self._served.returns(case, self._tolerance, until_s=self._test_until_s())
            return self._served.passes(case, self._entry_point, until_s=self._test_until_s())
        except SandboxEnded:
            self._end()  # the next test starts new sandboxes
            return False

    def _end(self) -> None:
        if self._served is not None:
            self._served.close()
            self._served = None


class _DoesNotLoad(Exception):
    """The program raised or ended before it defined its functions."""


class _Served:
    """The sandboxes of a program's functions, loaded once for all tests, and of the assertion checker."""

    def __init__(self, start: Callable[[Role, str], Sandbox], source: str, *, with_checker: bool) -> None:
        self._stack = contextlib.ExitStack()
        self._names: dict[str, Any] = {}
        with contextlib.ExitStack() as started:
            self._functions = started.enter_context(start("functions", source))
            self._checker = started.enter_context(start("checker", "")) if with_checker else None
            self._functions.wait_started()
            if self._checker is not None:
                self._checker.wait_started()
            self._stack = started.pop_all()

    def close(self) -> None:
        self._stack.close()

    def load(self, *, until_s: float) -> None:
        """Run the program's own statements. _DoesNotLoad when that fails."""
        try:
            answer = self._functions.receive(until_s=until_s)
        except SandboxEnded as error:
            raise _DoesNotLoad from error
        names = answer.get("value") if isinstance(answer, dict) else None
        if not isinstance(names, dict):
            raise _DoesNotLoad
        self._names = names

    def returns(self, case: CallTest, tolerance: float, *, until_s: float) -> bool:
        """Whether a call returns the wanted result, which is not sent to the program. SandboxEnded as for `ask`."""
        args = [encoded(value, _never) for value in case.args]
        question = {"op": "call", "target": case.function, "args": args, "kwargs": {}}
        answer = self._functions.ask(question, until_s=until_s)
        try:
            return same_result(plain_data(answer["value"]), case.result, tolerance)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return False  # it raised, or its result is not plain data

    def passes(self, case: AssertTest, entry_point: str, *, until_s: float) -> bool:
        """Whether the assertions of a test hold. SandboxEnded when either process ends."""
        assert self._checker is not None
        message: Any = {"test": case.source, "names": self._names, "entry_point": entry_point}
        while True:
            answer = self._checker.ask(message, until_s=until_s)
            if "passed" in answer:
                return answer["passed"] is True
            message = self._functions.ask(answer, until_s=until_s)


def _never(value: Any) -> int:
    raise TypeError(f"an argument of a test is not plain data: {value!r:.100}")
