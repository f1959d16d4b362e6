"""Log lines `time level process name message` on standard error, for the logger "areal" and those below it."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable

from aiohttp.web_exceptions import HTTPException

from areal.system.http_guard import BROKEN_BODY

_ROOT = "areal"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module. `name` is `__name__`, or a short name to put below "areal"."""
    return logging.getLogger(name if name == _ROOT or name.startswith(_ROOT + ".") else f"{_ROOT}.{name}")


def configure_logging(level: str = "INFO", process_name: str = "main") -> None:
    """Send the lines of the logger "areal" to standard error. Called once at the start of a process."""
    root = logging.getLogger(_ROOT)
    handler = logging.StreamHandler(sys.stderr)
    shown = process_name.replace("%", "%%")  # a percent sign would start a field of the format string
    form = f"%(asctime)s.%(msecs)03d %(levelname)s {shown} %(name)s %(message)s"
    handler.setFormatter(logging.Formatter(form, "%Y-%m-%d %H:%M:%S"))
    root.handlers = [handler]
    root.setLevel(level.upper())
    root.propagate = False


# ----------------------------------------------------------------------------------------------------------------------
# The logger of an HTTP server: one counted line per kind of failed request and minute, instead of tracebacks.

_INTERVAL_S = 60.0
_CLIENTS_FAULT = (HTTPException, *BROKEN_BODY)  # Malformed, or its client closed the connection before the answer.


class HttpLogger(logging.Logger):
    """Logger for `aiohttp.web.AppRunner`. Each server has one, and closes it after its last request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("areal.http")
        self.parent = get_logger("areal")
        self._clock = clock
        self._printed_s: dict[str, float] = {}
        self._num_hidden: Counter[str] = Counter()
        self.addFilter(self._is_printed)

    def _is_printed(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, _CLIENTS_FAULT):
            return True  # a defect of a handler keeps its traceback
        kind, now_s = type(error).__name__, self._clock()
        if now_s - self._printed_s.get(kind, -_INTERVAL_S) < _INTERVAL_S:
            self._num_hidden[kind] += 1
            return False
        self._printed_s[kind] = now_s
        record.msg, record.args = "HTTP request failed (%s), %d more before this one", (kind, self._num_hidden[kind])
        record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
        self._num_hidden[kind] = 0
        return True

    def close(self) -> None:
        """Print the counts that no line contains yet."""
        for kind, count in (+self._num_hidden).items():
            self.warning("malformed HTTP requests (%s), %d more after the last line", kind, count)
        self._num_hidden.clear()
