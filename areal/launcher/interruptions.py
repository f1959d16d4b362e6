"""Owns the user's requests to stop: Ctrl-C, SIGTERM and a closed terminal are counted instead of died of."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Interruptions:
    """Counts the user's requests to stop; signal handlers call `add`."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int = signal.SIGINT, _: object = None) -> None:
        """One more. A terminal that closes may send its signal several times over, and that is one request."""
        self.count = max(self.count, 1) if number == signal.SIGHUP else self.count + 1


@contextmanager
def counted_interruptions() -> Iterator[Interruptions]:
    """Count signals while the block runs."""
    found = Interruptions()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup stays in force
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, found.add) for number in numbers}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
