"""An event loop whose clock jumps to the next timer: an hour of a run takes as long as its callbacks compute.

What the loop would do in threads happens at once, in the loop: equal programs run in an equal order. Sockets and
processes of a program would be waited for in virtual time, so that nothing of the outside world may be used.
"""

import asyncio
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from areal.api.errors import ArealError

Result = TypeVar("Result")
_RESOLUTION_S = time.get_clock_info("monotonic").resolution
"""asyncio calls a timer that is due before the time plus this."""


class NothingHappens(ArealError, RuntimeError):
    """Every task waits, and no timer is set: the program would wait forever."""

    code = "plan.deadlock"


class _JumpingSelector(selectors.SelectSelector):
    """A selector that advances a clock in place of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingHappens("every task waits for another one, and no timer is set")
        self.now_s += max(timeout, 0.0)
        if self.now_s + _RESOLUTION_S == self.now_s:  # after months: else the loop never sees the timer as due
            self.now_s = math.nextafter(self.now_s, math.inf)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and advances only when no callback is ready."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Calls the function at once: it takes no virtual time."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller awaits it, as that of a thread
            done.set_exception(error)
        return done


def run_virtual(main: Coroutine[Any, Any, Result]) -> Result:
    """The result of a program under virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
