"""Runs the tests of a program in sandboxes on this machine, also those made by bubblewrap."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from areal.reward.code_tests import AssertTest, CallTest, CodeLimits
from areal.reward.sandbox import Isolation, Role, Sandbox, SandboxLimits
from areal.reward.sandbox_runner import Output, ProgramDoesNotLoad, SandboxEnded
from areal.reward.sandbox_values import call_question

_SPARE_S = 5.0
"""A sandbox ends without `close` at this time after the limit of all tests."""


class LocalRunner:
    """Functions are loaded once for all tests; the assertion checker is a second sandbox."""

    num_parallel = 1

    def __init__(self, source: str, limits: CodeLimits, isolation: Isolation) -> None:
        self._source, self._limits, self._isolation = source, limits, isolation
        self._sandboxes: list[Sandbox] = []
        """That of the functions and that of the checker, if they run."""

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

    def write(self, stdin: str, *, until_s: float) -> Output:
        limit_s = until_s - time.monotonic()
        with self._sandbox("program", self._source, stdin=stdin) as sandbox:
            sandbox.wait_started()
            return sandbox.output(until_s=time.monotonic() + limit_s)

    def call(self, case: CallTest, *, until_s: float) -> Any:
        with self._closed_at_failure():
            (functions, *_), until_s = self._loaded(until_s, with_checker=False)
            return functions.ask(call_question(case.function, case.args), until_s=until_s)

    def check(self, case: AssertTest, *, until_s: float) -> bool:
        with self._closed_at_failure():
            (functions, checker), until_s = self._loaded(until_s, with_checker=True)
            message: Any = {"test": case.source, "names": case.names, "modules": case.modules}
            while "passed" not in (answer := checker.ask(message, until_s=until_s)):
                message = functions.ask(answer, until_s=until_s)
            return answer["passed"] is True

    def _loaded(self, until_s: float, *, with_checker: bool) -> tuple[list[Sandbox], float]:
        """The running sandboxes, and the deadline, which starts after their start."""
        if not self._sandboxes:
            limit_s = until_s - time.monotonic()
            with contextlib.ExitStack() as started:
                found = [started.enter_context(self._sandbox("functions", self._source))]
                if with_checker:
                    found.append(started.enter_context(self._sandbox("checker", "")))
                for sandbox in found:
                    sandbox.wait_started()
                started.pop_all()
            self._sandboxes = found
            until_s = time.monotonic() + limit_s
            try:
                answer = found[0].receive(until_s=until_s)
            except SandboxEnded as error:
                raise ProgramDoesNotLoad from error
            if not isinstance(answer, dict) or "value" not in answer:
                raise ProgramDoesNotLoad
        return self._sandboxes, until_s

    @contextlib.contextmanager
    def _closed_at_failure(self) -> Iterator[None]:
        """The next test then starts new sandboxes."""
        try:
            yield
        except SandboxEnded:
            self.close()
            raise

    def close(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.close()
        self._sandboxes = []
