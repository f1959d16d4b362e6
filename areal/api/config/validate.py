"""Owns the checks of a finished config: the limits of every field, then what the classes say about their own fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, cast, runtime_checkable

from areal.api.config.fields import Problem, Problems
from areal.api.config.schema import MISSING, fields_of
from areal.api.errors import ConfigError


@runtime_checkable
class _HasProblems(Protocol):
    def problems(self) -> Problems: ...


def problems_of(config: Any, prefix: str = "") -> Iterator[Problem]:
    """Everything wrong with `config` and its sections."""
    for name, spec in fields_of(cast("type[Any]", type(config))).items():
        value = cast("Any", vars(config)[name])
        advice = spec.limits.broken_by(value)
        if value == MISSING:
            yield Problem(f"{prefix}{name}", "is required", "config.missing_requirement")
        elif advice:
            text = f"{value!r} is not allowed: {advice}" + (" or null" if spec.nullable else "")
            yield Problem(f"{prefix}{name}", text, "config.invalid_value")
        if dataclasses.is_dataclass(value):
            yield from problems_of(value, f"{prefix}{name}.")
        elif spec.item_section is not None and isinstance(value, list):
            for i, item in enumerate(cast("list[Any]", value)):
                yield from problems_of(item, f"{prefix}{name}[{i}].")
    if isinstance(config, _HasProblems):
        for found in config.problems():
            path, text, code = Problem(*found)
            yield Problem(f"{prefix}{path}", text, code)


def check_config(config: Any) -> None:
    """Raise ConfigError with one line per problem. For configs made or changed in Python; loading does it itself."""
    raise_problems([(path, text) for path, text, _ in problems_of(config)])


def raise_problems(problems: list[tuple[str, str]], source: str = "") -> None:
    """Raise ConfigError unless `problems` is empty. `source` names the file."""
    if not problems:
        return
    lines = [f"{path}: {text}" for path, text in problems]
    where = f" in {source}" if source else ""
    if len(lines) == 1:
        raise ConfigError(lines[0] + (f" ({source})" if source else ""))
    raise ConfigError("\n  ".join([f"{len(lines)} problems{where}:", *lines]))
