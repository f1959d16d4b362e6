"""Declarations of a config field: its limits, when it has an effect, and its names in other systems."""

import re
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any

from areal.api.config.relevance import Condition
from areal.api.errors import ConfigProblem as Problem

Problems = Iterable[Problem | tuple[str, str]]
"""What `problems()` of a config class yields; the paths are those of its fields, dotted below the class."""


def below(section: str, problems: Problems) -> Problems:
    """`problems` of a section, with paths from the enclosing section."""
    for found in problems:
        problem = Problem(*found)
        yield problem._replace(path=f"{section}.{problem.path}")


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
    """A text field that takes one of `choices`. The limit is metadata of the field that pydantic checks."""
    pattern = f"^({'|'.join(map(re.escape, choices))})$"
    metadata = {"choices": choices, "pattern": pattern, "relevant": relevant, "also": also}
    return field(default=default, metadata=metadata)


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
    """A number field: at least `low` or above `above`, at most `high` or below `below`."""
    bounds = {"ge": low, "gt": above, "le": high, "lt": below}
    limits: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    return field(default=default, metadata={**limits, "relevant": relevant, "also": also})
