"""Owns what the log of a dead foreign server says about its end. Pure: lines in, words out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_VLLM = re.compile(r"\([^()]* pid=\d+\)\s?(?:(?:ERROR|CRITICAL) \S+ \S+ \[[^\]]*\]\s?)?")
"""`(EngineCore pid=7) ERROR 11-21 10:00:00 [core.py:9] `"""
_SGLANG = re.compile(r"\[\d{4}-\d\d-\d\d [^\]]*\]\s?")
"""`[2026-11-21 10:00:00 TP0] `"""
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit)(?::\s.*)?")
"""Last line of a traceback."""
_USAGE = re.compile(r"\S+: error: .*")
"""What argparse says."""
_DIED = re.compile(r"died unexpectedly|crashed with exit code")
_POINTER = re.compile(r"root cause")
"""Of an error that only points to an earlier line, of another process."""
_PORT_TAKEN = ("address already in use", "eaddrinuse")


def last_error(lines: Sequence[str]) -> str:
    """The error that a server died of, as far as its log tells; empty when it tells of none."""
    return next((text for text in _errors(lines) if not _POINTER.search(text)), "")


def last_words(lines: Sequence[str]) -> str:
    """That, or what it says of the death of one of its processes; empty when it says nothing of the kind."""
    died = next((line for line in map(_plain, reversed(lines)) if _DIED.search(line)), "")
    return last_error(lines) or died or next(_errors(lines), "")


def _errors(lines: Sequence[str]) -> Iterator[str]:
    """The last one first."""
    return (text for text in map(_plain, reversed(lines)) if _ERROR.fullmatch(text) or _USAGE.fullmatch(text))


def _plain(line: str) -> str:
    return _SGLANG.sub("", _VLLM.sub("", line, count=1), count=1)


def met_taken_port(lines: Sequence[str]) -> bool:
    """Whether it found a port taken; it chose that by itself, and another time it chooses another one."""
    return any(sign in line.lower() for line in lines for sign in _PORT_TAKEN)
