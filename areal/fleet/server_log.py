"""The error of a foreign server that has ended, found in the lines of its log. Pure."""

import re
from collections.abc import Iterator, Sequence

_VLLM = re.compile(r"\([^()]* pid=\d+\)\s?(?:(?:ERROR|CRITICAL) \S+ \S+ \[[^\]]*\]\s?)?")
"""`(EngineCore pid=7) ERROR 11-21 10:00:00 [core.py:9] `"""
_SGLANG = re.compile(r"\[\d{4}-\d\d-\d\d [^\]]*\]\s?")
"""`[2026-11-21 10:00:00 TP0] `"""
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit)(?::\s.*)?")
"""The last line of a traceback."""
_USAGE = re.compile(r"[\w. -]+: error: .*")
"""An error of argparse."""
_DIED = re.compile(r"died unexpectedly|crashed with exit code")
_POINTER = re.compile(r"root cause")
"""Text of an error that only refers to an earlier line, of another process."""
_MAX_DETAILS = 3
"""Indented lines after an error that belong to it, as pydantic writes them."""
PORT_TAKEN = re.compile("address already in use|eaddrinuse", re.IGNORECASE)
"""The server found a port in use. It chose that port itself, and chooses another one next time."""


def last_error(lines: Sequence[str]) -> list[str]:
    """The error that ended a server, with the lines of its details; empty when the log has none."""
    return next((error for error in _errors(lines) if not _POINTER.search(error[0])), [])


def end_reason(lines: Sequence[str]) -> list[str]:
    """`last_error`, or what the log says about the end of one of the server's processes; empty when it has neither."""
    died = next(([line] for line in map(_plain, reversed(lines)) if _DIED.search(line)), [])
    return last_error(lines) or died or next(_errors(lines), [])


def _errors(lines: Sequence[str]) -> Iterator[list[str]]:
    """The last one first."""
    plain = [_plain(line) for line in lines]
    for index in reversed(range(len(plain))):
        if _ERROR.fullmatch(plain[index]) or _USAGE.fullmatch(plain[index]):
            yield [plain[index], *_details(plain[index + 1 :])]


def _details(lines: Sequence[str]) -> Iterator[str]:
    for line in lines[:_MAX_DETAILS]:
        if not line.startswith(" ") or "For further information" in line:
            return
        yield line


def _plain(line: str) -> str:
    return _SGLANG.sub("", _VLLM.sub("", line, count=1), count=1)
