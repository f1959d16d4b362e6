"""Owns the number of files and connections this process may have open."""

from __future__ import annotations

import resource

WANTED = 65536
"""A request in flight is a connection, and thousands are in flight; many systems start processes with 256 or 1024."""


def raise_open_file_limit(wanted: int = WANTED) -> int:
    """Raise the soft limit as far as the hard one and `wanted` allow; never lowers it. Returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):  # some systems cap it below the hard limit they report
        return soft
    return allowed
