"""Owns what the log of a dead foreign server says about its end. Pure: lines in, words out."""

from __future__ import annotations

import re
from collections.abc import Sequence

_VLLM = re.compile(r"\([^()]* pid=\d+\)\s?(?:(?:ERROR|CRITICAL) \S+ \S+ \[[^\]]*\]\s?)?")
"""`(EngineCore pid=7) ERROR 11-21 10:00:00 [core.py:9] `"""
_SGLANG = re.compile(r"\[\d{4}-\d\d-\d\d [^\]]*\]\s?")
"""`[2026-11-21 10:00:00 TP0] `"""
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit)(?::\s.*)?")
"""Last line of a traceback."""
_USAGE = re.compile(r"\S+: error: .*")
"""What argparse says."""
_PORT_TAKEN = ("address already in use", "eaddrinuse")


def last_error(lines: Sequence[str]) -> str:
    """The error that a server died of, as far as its log tells; empty when it tells of none."""
    found = ""
    for line in lines:
        text = _SGLANG.sub("", _VLLM.sub("", line, count=1), count=1)
        is_error = _ERROR.fullmatch(text) or _USAGE.fullmatch(text)
        if is_error and "root cause" not in text:  # that only points to an earlier line, of another process
            found = text
    return found


def met_taken_port(lines: Sequence[str]) -> bool:
    """Whether it found a port taken; it chose that by itself, and another time it chooses another one."""
    return any(sign in line.lower() for line in lines for sign in _PORT_TAKEN)
