"""The text of `areal config SECTION` and of a script's `--help`: type, default, limits and meaning of options."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from areal.api.config.relevance import relevance_of
from areal.api.config.schema import MISSING, FieldSpec, fields_of, find_field, type_text
from areal.api.errors import ConfigError


def help_text(cls: type[Any], section: str = "") -> str:
    """The options of `cls`, or only those at or below the dotted path `section`."""
    if not section:
        usage = "usage: --config FILE.yaml [key.sub=value ...]   (--help SECTION shows one section)"
        return "\n".join([usage, "", *_lines(cls, "")]) + "\n"
    owner, _, name = section.rpartition(".")
    above = find_field(cls, owner) if owner else None
    below = above and (above.item_section if owner.endswith("]") else above.hint)
    parent = cls if not owner else below
    if find_field(cls, section) is None or parent is None:
        known = ", ".join(name for name, spec in fields_of(cls).items() if spec.is_section)
        message = f"--help {section}: no such section or option; sections are {known}"
        raise ConfigError(message, code="config.unknown_key")
    return "\n".join(_field(parent, f"{owner}." if owner else "", name.partition("[")[0])) + "\n"


def _lines(cls: type[Any], prefix: str) -> Iterator[str]:
    for name in fields_of(cls):
        yield from _field(cls, prefix, name)


def _field(cls: type[Any], prefix: str, name: str) -> Iterator[str]:
    spec, path = fields_of(cls)[name], f"{prefix}{name}"
    condition = relevance_of(cls.__dataclass_fields__[name])
    relevance = "" if condition is None else f"relevant when {condition.words(prefix.rstrip('.'))}"
    if spec.is_section:
        null = " (null unless given)" if spec.default is None else ""
        yield f"[{path}]{null} {spec.sentence}" + (f" ({relevance})" if relevance else "")
        yield from _lines(spec.hint, f"{path}.")
        return
    kind = " | ".join(spec.choices) or f"{type_text(spec.hint)} {spec.range_text}".strip()
    kind += ", or null" if spec.nullable else ""
    yield f"  {path}: {kind}; {default_text(spec)}"
    yield f"      {spec.sentence}"
    if relevance:
        yield f"      {relevance}"
    if spec.item_section is not None:
        yield from _lines(spec.item_section, f"{path}[].")


def default_text(spec: FieldSpec) -> str:
    """The default of an option in words."""
    if spec.default is None:
        return "default null"
    if isinstance(spec.default, str):
        return "required" if spec.default == MISSING else f"default {spec.default or 'empty'}"
    if isinstance(spec.default, bool):
        return f"default {str(spec.default).lower()}"
    if dataclasses.is_dataclass(spec.default):
        return ""
    return f"default {spec.default}"
