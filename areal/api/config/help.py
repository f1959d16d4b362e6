"""Owns the text of `--help`: every option with its type, default, limits and sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from areal.api.config.schema import MISSING, FieldSpec, fields_of, find_field, type_text
from areal.api.errors import ConfigError


def help_text(cls: type[Any], section: str = "") -> str:
    """The options of `cls`, or only those at or below the dotted path `section`."""
    if not section:
        return "\n".join([*_usage(), *_lines(cls, "")]) + "\n"
    spec = find_field(cls, section)
    if spec is None:
        known = ", ".join(name for name, spec in fields_of(cls).items() if spec.is_section)
        raise ConfigError(f"--help {section}: no such section or option; sections are {known}")
    if spec.is_section:
        return "\n".join(_lines(spec.hint, f"{section}.")) + "\n"
    if spec.item_section is not None:
        return "\n".join(_list_of_sections(section.partition("[")[0], spec, spec.item_section)) + "\n"
    return "\n".join(_option(section, spec)) + "\n"


def _usage() -> list[str]:
    return ["usage: --config FILE.yaml [key.sub=value ...]   (--help SECTION shows one section)", ""]


def _lines(cls: type[Any], prefix: str) -> Iterator[str]:
    for name, spec in fields_of(cls).items():
        path = f"{prefix}{name}"
        if spec.is_section:
            null = " (null unless given)" if spec.default is None else ""
            yield f"[{path}]{null} {spec.sentence}"
            yield from _lines(spec.hint, f"{path}.")
        elif spec.item_section is not None:
            yield from _list_of_sections(path, spec, spec.item_section)
        else:
            yield from _option(path, spec)


def _list_of_sections(path: str, spec: FieldSpec, cls: type[Any]) -> Iterator[str]:
    """A list of sections and what each may hold, once."""
    yield from _option(path, spec)
    yield from _lines(cls, f"{path}[].")


def _option(path: str, spec: FieldSpec) -> list[str]:
    kind = " | ".join(spec.limits.choices or ()) or f"{type_text(spec.hint)} {spec.limits.range_text}".strip()
    kind += ", or null" if spec.nullable else ""
    return [f"  {path}: {kind}; {_default_text(spec)}", f"      {spec.sentence}"]


def _default_text(spec: FieldSpec) -> str:
    if spec.default is None:
        return "default null"
    if isinstance(spec.default, str):
        return "required" if spec.default == MISSING else f"default {spec.default or 'empty'}"
    if isinstance(spec.default, bool):
        return f"default {str(spec.default).lower()}"
    if dataclasses.is_dataclass(spec.default):
        return ""
    return f"default {spec.default}"
