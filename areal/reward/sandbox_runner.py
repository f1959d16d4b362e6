"""What runs the tests of one program outside this process: the interface of the sandbox backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from areal.reward.code_tests import AssertTest, CallTest


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Result of a whole program."""

    stdout: bytes
    exit_code: int | None
    """None = areal ended it: it exceeded its time or its output."""


class SandboxEnded(Exception):
    """A sandbox ended, or was ended, before it answered."""

    def __init__(self, reason: Literal["ended", "time_limit", "too_large", "invalid_message"]) -> None:
        super().__init__(reason)
        self.reason = reason


class ProgramDoesNotLoad(Exception):
    """The program raised or ended before it defined its functions."""


class ProgramRunner(Protocol):
    """Runs the tests of one program. A program never shares an interpreter with what checks it.

    `until_s` is the deadline of one test on the monotonic clock. Each method raises SandboxEnded when the test has
    failed because the program ended or exceeded a limit, ProgramDoesNotLoad when all tests of functions would fail, and
    RewardError when the sandbox itself failed.
    """

    num_parallel: int
    """Tests that may run at the same time, each in its own thread."""

    def write(self, stdin: str, *, until_s: float) -> Output:
        """Run the whole program with `stdin`."""
        ...

    def call(self, case: CallTest, *, until_s: float) -> Any:
        """The program's answer to a call: {"value": encoded result} unless it raised. It may be any JSON."""
        ...

    def check(self, case: AssertTest, *, until_s: float) -> bool:
        """Whether the assertions of a test hold."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...
