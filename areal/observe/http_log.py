"""The logger of an HTTP server: one counted line per kind of failed request and minute, instead of tracebacks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from aiohttp import ClientConnectionResetError
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError
from aiohttp.web_exceptions import HTTPException

from areal.observe.log import get_logger

_INTERVAL_S = 60.0
_CLIENTS_FAULT = (HttpProcessingError, HTTPException, RequestPayloadError, ClientConnectionResetError)
"""Malformed, or its client closed the connection before the answer."""


class _OncePerMinute(logging.Filter):
    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._printed_s: dict[str, float] = {}
        self._num_hidden: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
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


def http_logger(clock: Callable[[], float] = time.monotonic) -> logging.Logger:
    """A logger for `aiohttp.web.AppRunner`. Each server gets its own."""
    logger = logging.Logger("areal.http")
    logger.parent = get_logger("areal")
    logger.addFilter(_OncePerMinute(clock))
    return logger
