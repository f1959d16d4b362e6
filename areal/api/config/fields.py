"""Owns how a config field states its limits: the limits sit in the field's metadata and one walker checks them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Limits:
    """What values a field takes. None = no limit on that side; a field that may be null says so in its type."""

    choices: tuple[str, ...] | None = None
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    """True: the value must be above `low`, not equal to it."""


Problems = Iterable[tuple[str, str]]
"""(field name or dotted path below the class, sentence saying what is wrong and what to change)."""


def choice(default: Any, *choices: str) -> Any:
    """A string field that takes one of `choices`."""
    return field(default=default, metadata={"limits": Limits(choices=choices)})


def number(default: Any, *, low: float | None = None, above: float | None = None, high: float | None = None) -> Any:
    """A numeric field within [low, high] or (above, high]."""
    limits = Limits(low=above if above is not None else low, high=high, low_open=above is not None)
    return field(default=default, metadata={"limits": limits})
