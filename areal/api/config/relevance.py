"""When an option has an effect: conditions declared with the field, and the one check over a finished config.

A condition is built from `when`, `unless`, `above`, `given` and `satisfies`, joined with `&` and `|`. Its paths are
relative to the section of the field: `name` is an option of the same section, `../name` of the enclosing section,
`/section.name` of the whole configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether an option has an effect under the other options: one test, or several joined by a word."""

    path: str = ""
    passes: Callable[[Any], bool] = bool
    text: str = ""
    """What the option at `path` is when the test passes; a whole sentence where `path` is a section ('.' or '/')."""
    parts: tuple[Condition, ...] = ()
    word: str = ""
    """'and' or 'or' between `parts`; empty for a single test."""

    def __and__(self, other: Condition) -> Condition:
        return Condition(parts=(self, other), word="and")

    def __or__(self, other: Condition) -> Condition:
        return Condition(parts=(self, other), word="or")

    def holds(self, sections: tuple[Any, ...]) -> bool:
        """Evaluate in the last of `sections`, the config objects from the whole configuration down to the section."""
        if self.parts:
            return (all if self.word == "and" else any)(part.holds(sections) for part in self.parts)
        up, name = _split(self.path, len(sections) - 1)
        value: Any = sections[-1 - up]
        try:
            for part in name.split(".") if name else ():
                value = None if value is None else getattr(value, part)
            return self.passes(value)
        except AttributeError:
            return True  # a config class that lacks the option, such as an actor alone: the effect is unknown

    def words(self, section: str) -> str:
        """The condition in words, for an option of the section at the dotted path `section` ('' = top level)."""
        if not self.parts:
            return " ".join([*self.paths(section), self.text])
        texts = [(part.words(section), part.word in ("", self.word)) for part in self.parts]
        return f" {self.word} ".join(text if is_flat else f"({text})" for text, is_flat in texts)

    def paths(self, section: str) -> Iterator[str]:
        """The absolute paths of the options that the condition reads."""
        for part in self.parts:
            yield from part.paths(section)
        parents = section.split(".") if section else []
        up, name = _split(self.path, len(parents))
        if name:
            yield ".".join([*parents[: len(parents) - up], name])


def when(path: str, *values: object) -> Condition:
    """The option at `path` has one of `values`."""
    return Condition(path, lambda value: value in values, f"is {_listed(values)}")


def unless(path: str, *values: object) -> Condition:
    """The option at `path` has none of `values`."""
    return Condition(path, lambda value: value not in values, f"is not {_listed(values)}")


def above(path: str, bound: float) -> Condition:
    """The number at `path` is above `bound`; null is not."""
    return Condition(path, lambda value: value is not None and value > bound, f"is above {bound:g}")


def given(path: str) -> Condition:
    """The option at `path` is neither null nor empty."""
    return Condition(path, lambda value: value not in (None, "", [], {}), "is set")


def satisfies(path: str, test: Callable[[Any], bool], text: str) -> Condition:
    """For the rare complex case: `test` of the section at `path` ('.' = the field's own, '/' = all); `text` says it."""
    return Condition(path, test, text)


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A changed option without effect under the other options."""

    path: str
    relevant_when: str


def relevance_of(entry: dataclasses.Field[Any]) -> Condition | None:
    """The condition declared with a field; None = the option always has an effect."""
    return entry.metadata.get("relevant")


def options_without_effect(config: Any) -> list[NoEffect]:
    """Every option of `config` that differs from its default and has no effect, in the order of the fields.

    An option that equals its default is never listed, given by the user or not. A section that is null by default is
    listed as a whole, unless it has only nulls; of other sections each changed option is listed.
    """
    return list(_without_effect((config,), "", ""))


def notice_of(config: Any) -> str:
    """The notice for a run's start: the options without effect, one a line, each with its condition; '' = none."""
    found = options_without_effect(config)
    if not found:
        return ""
    lines = [f"{one.path}: relevant when {one.relevant_when}" for one in found]
    return "\n  ".join(["options without effect under these settings (strict_config=true refuses them):", *lines])


def _without_effect(sections: tuple[Any, ...], prefix: str, because: str) -> Iterator[NoEffect]:
    """`because` is the unmet condition of an enclosing section; '' = there is none."""
    section = sections[-1]
    for entry in dataclasses.fields(section):
        value, default, path = getattr(section, entry.name), _default_of(entry), prefix + entry.name
        condition = relevance_of(entry)
        reason = because
        if not reason and condition is not None and not condition.holds(sections):
            reason = condition.words(prefix.rstrip("."))
        is_section = dataclasses.is_dataclass(value)
        is_whole = not is_section or (default is None and any(part is not None for part in vars(value).values()))
        if reason and value != default and is_whole:
            yield NoEffect(path, reason)
        elif is_section:
            yield from _without_effect((*sections, value), f"{path}.", reason)
        elif isinstance(value, list):
            for place, item in enumerate(cast("list[Any]", value)):
                if dataclasses.is_dataclass(item):
                    yield from _without_effect((*sections, item), f"{path}[{place}].", "")


def _default_of(entry: dataclasses.Field[Any]) -> Any:
    return entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()


def _split(path: str, depth: int) -> tuple[int, str]:
    """(levels up from the section, dotted name there) of a condition's path in a section at `depth`."""
    if path.startswith("/"):
        return depth, path[1:]
    up = path.count("../")
    return up, path.replace("../", "").strip(".")


def _listed(values: tuple[object, ...]) -> str:
    *texts, last = map(_text, values)
    return f"{', '.join(texts)} or {last}" if texts else last


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if value in ("", [], {}):
        return "empty"
    return f"{value:g}" if isinstance(value, float) else str(value)
