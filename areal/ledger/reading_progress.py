"""Owns the line that says how far a long reading is: on standard error, once it has taken a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

FIRST_S = 2.0
"""Nothing is said before."""
BETWEEN_S = 1.0
_STEPS_PER_LOOK = 256
"""The clock is looked at once in so many steps."""


class Progress:
    """Counts steps. A terminal gets one line that is written over, anything else a line now and then."""

    def __init__(self, what: str, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._stream = stream or sys.stderr
        self._clock = clock
        self._next_s = clock() + FIRST_S
        self._between_s = BETWEEN_S
        self._count = 0
        self._is_shown = False

    def step(self) -> None:
        self._count += 1
        if self._count % _STEPS_PER_LOOK == 0 and self._clock() >= self._next_s:
            self._show()

    def _show(self) -> None:
        is_terminal = self._stream.isatty()
        if not is_terminal:
            self._between_s *= 2  # a log file is not flooded
        self._next_s = self._clock() + self._between_s
        self._stream.write(f"\r{self._count} {self._what} ..." if is_terminal else f"{self._count} {self._what} ...\n")
        self._stream.flush()
        self._is_shown = is_terminal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
