"""The logger of an HTTP server: one counted line per kind of failed request and minute, instead of tracebacks."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from aiohttp.web_exceptions import HTTPException

from areal.observe.log import get_logger
from areal.system.http_guard import BROKEN_BODY

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
