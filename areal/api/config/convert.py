"""The step from plain values to a config instance: keys of AReaL files, required values, types, limits, conflicts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from areal.api.config.legacy import LegacyKeys
from areal.api.config.schema import fields_of, with_defaults
from areal.api.config.validate import conflicts, missing_values, validated
from areal.api.errors import ConfigProblem

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """What was read of one tree of values."""

    config: T | None
    """None when a value is missing for which the class has no default."""
    problems: list[ConfigProblem]
    """Everything that is wrong. Where it is not empty, `config` has defaults in place of the wrong values."""
    ignored: list[str]
    """Accepted keys without effect that the user should know of."""


def read(
    cls: type[T],
    given: dict[str, Any],
    resolved: dict[str, Any] | None = None,
    *,
    unresolved: Collection[str] = (),
    allow_unknown_top_level: bool = False,
) -> Reading[T]:
    """Read `given`, the values the user wrote, as a `cls`.

    `resolved` holds them with defaults and without interpolations; None = `given` has no interpolation. `unresolved`
    are the paths of interpolations that failed; they are reported elsewhere.
    """
    tree = with_defaults(cls, given) if resolved is None else resolved
    legacy = LegacyKeys(tree, given)
    legacy.apply(cls)
    if allow_unknown_top_level:
        for key in tree.keys() - fields_of(cls).keys():
            del tree[key]
    missing = [problem for problem in missing_values(cls, tree) if problem.path not in unresolved]
    required = {problem.path for problem in missing}
    config, wrong = validated(cls, tree)
    problems = legacy.problems + missing + [problem for problem in wrong if problem.path not in required]
    if config is not None:
        # A conflict with a value that is not what the user meant would only confuse.
        suspects = {*unresolved, *(p.path for p in problems), *(p.suggestion for p in problems)} - {""}
        problems += [problem for problem in conflicts(config) if not _is_about(problem, suspects)]
    return Reading(config, problems, legacy.ignored)


def _is_about(problem: ConfigProblem, suspects: Collection[str]) -> bool:
    """Whether the problem names one of the suspect options, by its full or its last name."""
    path, text = f"{problem.path}.", problem.message
    return any(
        path.startswith(f"{name}.") or name in text or f"{name.rpartition('.')[2]}=" in text for name in suspects
    )
