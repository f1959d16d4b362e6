"""Owns how a config field states its limits: the limits sit in the field's metadata and one walker checks them."""

from __future__ import annotations

import math
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
    high_open: bool = False
    """True: the value must be below `high`, not equal to it."""

    def broken_by(self, value: object) -> str:
        """What `value` should be instead, or '' when it is within the limits."""
        if value is None:
            return ""
        if self.choices is not None and value not in self.choices:
            return f"use one of {', '.join(self.choices)}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            return ""
        if not math.isfinite(value):
            return "use a finite number"
        too_low = self.low is not None and (value <= self.low if self.low_open else value < self.low)
        too_high = self.high is not None and (value >= self.high if self.high_open else value > self.high)
        return f"use a number {self.range_text}" if too_low or too_high else ""

    @property
    def range_text(self) -> str:
        """The range in words, or ''."""
        parts: list[str] = []
        if self.low is not None:
            parts.append(f"{'above' if self.low_open else 'of at least'} {self.low:g}")
        if self.high is not None:
            parts.append(f"{'below' if self.high_open else 'at most'} {self.high:g}")
        return " and ".join(parts)


Problems = Iterable[tuple[str, str]]
"""(field name or dotted path below the class, sentence saying what is wrong and what to change)."""


def choice(default: Any, *choices: str) -> Any:
    """A string field that takes one of `choices`."""
    return field(default=default, metadata={"limits": Limits(choices=choices)})


def number(
    default: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> Any:
    """A numeric field: at least `low` or above `above`, at most `high` or below `below`."""
    limits = Limits(
        low=low if above is None else above,
        high=high if below is None else below,
        low_open=above is not None,
        high_open=below is not None,
    )
    return field(default=default, metadata={"limits": limits})
