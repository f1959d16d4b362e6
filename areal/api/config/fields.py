"""Declarations beside a config field: its limits, when it has an effect, and its names in other systems."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from areal.api.config.relevance import Condition


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


class Problem(NamedTuple):
    """One error of a configuration."""

    path: str
    """Field name or dotted path below the class that reports it."""
    text: str
    """What is wrong and what to change."""
    code: str = "config.conflict"


Problems = Iterable[Problem | tuple[str, str]]


def below(section: str, problems: Problems) -> Problems:
    """`problems` of a section, with paths from the enclosing section."""
    for found in problems:
        path, text, code = Problem(*found)
        yield Problem(f"{section}.{path}", text, code)


def option(default: Any, *, relevant: Condition | None = None, also: str = "") -> Any:
    """A field without limits.

    `relevant`: when it has an effect; None = always. `also`: the names of the option in AReaL, verl or ROLL where they
    differ from its path here, for docs/config.md.
    """
    return field(default=default, metadata={"relevant": relevant, "also": also})


def section(factory: Callable[[], Any], *, relevant: Condition | None = None, also: str = "") -> Any:
    """A section, list or mapping whose default `factory` makes."""
    return field(default_factory=factory, metadata={"relevant": relevant, "also": also})


def choice(default: Any, *choices: str, relevant: Condition | None = None, also: str = "") -> Any:
    """A string field that takes one of `choices`."""
    return field(default=default, metadata={"limits": Limits(choices=choices), "relevant": relevant, "also": also})


def number(
    default: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    relevant: Condition | None = None,
    also: str = "",
) -> Any:
    """A numeric field: at least `low` or above `above`, at most `high` or below `below`."""
    limits = Limits(
        low=low if above is None else above,
        high=high if below is None else below,
        low_open=above is not None,
        high_open=below is not None,
    )
    return field(default=default, metadata={"limits": limits, "relevant": relevant, "also": also})
