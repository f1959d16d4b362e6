"""Progress output of long reads, on standard error."""

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

FIRST_S = 2.0
"""The first line is written after this time."""
BETWEEN_S = 1.0
_STEPS_PER_CHECK = 256
"""Steps between two reads of the clock."""


class Progress:
    """Counts steps. On a terminal it overwrites one line; otherwise it writes lines at increasing intervals."""

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
        if self._count % _STEPS_PER_CHECK == 0 and self._clock() >= self._next_s:
            self._show()

    def _show(self) -> None:
        is_terminal = self._stream.isatty()
        if not is_terminal:
            self._between_s *= 2  # keeps log files short
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
