"""Config values: read in one pass into the classes, with types and limits; then `problems()` of each section."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from areal.api.config.redaction import public
from areal.api.config.schema import MISSING, FieldSpec, Named, Problems, fields_of, find_field, nearest, type_text
from areal.api.errors import ConfigError, ConfigProblem
from areal.api.registry import registered

T = TypeVar("T")
_MAX_INTEGER = 2**63
_NOT_A_NUMBER = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE)
"""How YAML writes numbers that are not finite."""
_BREAKS: dict[str, Callable[[float, float], bool]] = {
    "ge": lambda value, limit: value < limit,
    "gt": lambda value, limit: value <= limit,
    "le": lambda value, limit: value > limit,
    "lt": lambda value, limit: value >= limit,
}


def check_config(config: Any) -> None:
    """Raise ConfigError with one line per problem. For configs made or changed in Python; loading does it itself."""
    raise_problems(list(problems_of(config)))


def problems_of(config: Any) -> Iterator[ConfigProblem]:
    """Everything that is wrong with `config` and its sections."""
    yield from converted(cast("type[Any]", type(config)), cast("dict[str, Any]", vars(config)))[1]
    yield from conflicts(config)


def conflicts(config: Any, written: Mapping[str, Any] | None = None, prefix: str = "") -> Iterator[ConfigProblem]:
    """What the sections of `config` report about their own options.

    `written`: the values that were given. A section without any is as its class makes it, which is never wrong.
    """
    values = cast("dict[str, Any]", config.__dict__)
    for name in values if written is None else written:
        value = values.get(name)
        if dataclasses.is_dataclass(value):
            below = None if written is None else written[name]
            below = cast("dict[str, Any]", below) if isinstance(below, dict) else None
            yield from conflicts(value, below, f"{prefix}{name}.")
        elif isinstance(value, list):
            for place, item in enumerate(cast("list[Any]", value)):
                if dataclasses.is_dataclass(item):
                    yield from conflicts(item, None, f"{prefix}{name}[{place}].")
    report: Callable[[], Problems] | None = getattr(config, "problems", None)
    for fields in () if report is None else report():
        problem = ConfigProblem(*fields)
        yield problem._replace(path=f"{prefix}{problem.path}") if prefix else problem


def converted(cls: type[T], fields: Mapping[str, Any], base: T | None = None) -> tuple[T | None, list[ConfigProblem]]:
    """The instance of `cls` with the values of `fields` over those of `base` (None = the defaults), and what is wrong.

    A wrong value is left out, so that the default takes its place. None: a value is missing that has no default.
    """
    conversion = _Conversion(cls)
    return conversion.section(cls, fields, "", base), conversion.problems


class _WrongError(Exception):
    """A value that cannot be read as `hint`. `path` is below that of the option, None = it is reported."""

    def __init__(self, value: Any, hint: Any, path: str | None, code: str = "config.wrong_type") -> None:
        self.value, self.hint, self.path, self.code = value, hint, path, code


class _Conversion:
    """One reading of a tree of values."""

    def __init__(self, root: type[Any]) -> None:
        self.problems: list[ConfigProblem] = []
        self._root = root

    def section(self, cls: type[T], fields: Mapping[Any, Any], path: str, base: T | None = None) -> T | None:
        """The section at `path`: `fields` over `base`. None when a value is missing that has no default."""
        specs, values = fields_of(cls), dict[str, Any]()
        prefix = f"{path}." if path else ""
        for key, value in fields.items():
            spec, here = specs.get(key), f"{prefix}{key}"
            if spec is None:
                self.problems.append(self._unknown(cls, path, str(key), here))
            elif isinstance(value, str) and value == MISSING:
                self.problems.append(_required(here))
            else:
                try:
                    values[key] = self._value(spec, value, here)
                except _WrongError as error:
                    self.problems += [_problem(here, error, spec)] if error.path is not None else []
        is_whole = True
        for name, spec in specs.items():
            if name in values:
                continue
            default = spec.entry.default if base is None else vars(base)[name]
            has_none = default is dataclasses.MISSING is spec.entry.default_factory
            if name not in fields and (has_none or (isinstance(default, str) and default == MISSING)):
                self.problems.append(_required(f"{prefix}{name}"))
            elif name not in fields and spec.needs_values and default is not None:
                self.section(spec.hint, {}, f"{prefix}{name}")
            is_whole = is_whole and not has_none
        if not is_whole:
            return None
        return cls(**values) if base is None else dataclasses.replace(cast("Any", base), **values)

    def _value(self, spec: FieldSpec, value: Any, path: str) -> Any:
        if value is None and spec.nullable:
            return None
        if spec.is_section:
            return self._below(spec, spec.hint, value, path, spec.default)
        if spec.item_section is not None and isinstance(value, list | tuple):
            items = enumerate(cast("list[Any]", value))
            return [self._below(spec, spec.item_section, item, f"{path}[{place}]", None) for place, item in items]
        if spec.kind:
            return self._named(spec, value, path)
        if spec.choices and isinstance(value, bool):
            value = "on" if value else "off"  # as YAML reads these bare words
        value = _read(value, spec.hint, "")
        if spec.choices and value not in spec.choices:
            raise _WrongError(value, spec.hint, "", "config.not_a_choice")
        for name, limit in spec.bounds:
            if _BREAKS[name](value, limit):
                raise _WrongError(value, spec.hint, "", "config.out_of_range")
        if isinstance(value, int | float) and abs(value) > spec.largest:
            raise _WrongError(value, spec.hint, "", "config.out_of_range")
        return value

    def _below(self, spec: FieldSpec, cls: type[Any], value: Any, path: str, default: Any) -> Any:
        if dataclasses.is_dataclass(value):
            section = self.section(cast("type[Any]", type(value)), vars(value), path)
        elif isinstance(value, dict):
            base = default if dataclasses.is_dataclass(default) else None
            section = self.section(cls, cast("dict[Any, Any]", value), path, base)
        else:
            self.problems.append(_problem(path, _WrongError(value, cls, ""), spec))
            section = None
        if section is None:
            raise _WrongError(value, cls, None)
        return section

    def _named(self, spec: FieldSpec, value: Any, path: str) -> Any:
        """The name of a registered thing, with its own options where a mapping gives them."""
        value = vars(value) if isinstance(value, Named) else value
        fields = cast("dict[Any, Any]", value) if isinstance(value, dict) else {"name": _read(value, str, "")}
        name = fields.get("name", str(spec.default))
        if name not in spec.choices:
            raise _WrongError(name, str, "", "config.not_a_choice")
        section = self.section(registered(spec.kind, name).options or Named, {"name": name} | fields, path)
        if section is None:
            raise _WrongError(value, spec.hint, None)
        return section

    def _unknown(self, cls: type[Any], section: str, key: str, path: str) -> ConfigProblem:
        guess = nearest(self._root, section, cls, key)
        text = f"unknown key; did you mean {guess}?" if guess else "unknown key: remove it"
        if find_field(cls, key) is not None:
            text = "has dots, which separate sections in overrides only: write nested sections"
        return ConfigProblem(path, text, "config.unknown_key", guess)


def _read(value: Any, hint: Any, path: str) -> Any:
    """A value of YAML or of an override as `hint`: numbers may be text, because `${oc.env:X}` always gives text.

    1e3 is the integer 1000. Raises _WrongError.
    """
    if hint is Any:
        return value
    if hint is str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, str):
            if _NOT_A_NUMBER.fullmatch(value):  # an option that was meant for a number
                raise _WrongError(value, hint, path)
            return value
    elif hint is bool:
        value = {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
        if isinstance(value, bool):
            return value
    elif hint is int or hint is float:
        number = _number(value)
        if hint is float and number is not None and not math.isfinite(number):
            raise _WrongError(value, hint, path, "config.out_of_range")
        if hint is float and number is not None:
            return float(number)
        if number is not None and abs(number) < _MAX_INTEGER and number == int(number):
            return int(number)
    else:
        return _read_other(value, hint, path)
    raise _WrongError(value, hint, path)


def _number(value: Any) -> float | None:
    """The number that a value is or that its text writes; None = it is none."""
    for convert in (int, float) if isinstance(value, str) else ():
        try:
            return convert(value)
        except ValueError:
            continue
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _read_other(value: Any, hint: Any, path: str) -> Any:
    """Read lists, mappings, unions and the types of users' classes, as `_read` reads others."""
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is list and isinstance(value, list | tuple):
        try:
            return [_read(item, args[0] if args else Any, "") for item in cast("list[Any]", value)]
        except _WrongError as error:
            raise _WrongError(value, hint, path, error.code) from None
    if origin is dict and isinstance(value, dict):
        below = args[1] if args else Any
        items = cast("dict[Any, Any]", value).items()
        return {_read(key, str, path): _read(item, below, f"{path}.{key}") for key, item in items}
    if origin in (typing.Union, types.UnionType):
        exact = [arg for arg in args if type(value) is (typing.get_origin(arg) or arg)]
        for arg in (*exact, *args):
            try:
                return _read(value, arg, path)
            except _WrongError:
                continue
    elif origin not in (list, dict):
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(hint).validate_python(value)
        except ValidationError:
            pass
    raise _WrongError(value, hint, path)


def _required(path: str) -> ConfigProblem:
    return ConfigProblem(path, f"is required: give it in the file or as {path}=...", "config.required")


def _problem(path: str, error: _WrongError, spec: FieldSpec) -> ConfigProblem:
    """The error about the option `path` in words."""
    is_below = bool(error.path)
    path, or_null = f"{path}{error.path}", " or null" if spec.nullable and not is_below else ""
    value = public(error.value, path)
    if error.code == "config.out_of_range":
        is_finite = not isinstance(value, float) or math.isfinite(value)
        most = ""
        if isinstance(value, int | float) and is_finite and abs(value) > spec.largest:
            largest = f"{spec.largest:g}"
            most = f" and at most {largest}" if spec.bounds else f" from -{largest} to {largest}"
        advice = f"use a {'' if is_finite else 'finite '}number {spec.range_text}".rstrip() + most
        return ConfigProblem(path, f"{shown(value)} is not allowed: {advice}{or_null}", error.code)
    if error.code == "config.not_a_choice":
        advice = f"use one of {', '.join(spec.choices)}{or_null}"
        return ConfigProblem(path, f"{shown(value)} is not allowed: {advice}", error.code)
    expected, hint = type_text(error.hint) + or_null, ""
    if path.endswith("]") or (spec.is_section and not is_below):
        expected = "a section with its own keys"
    elif _holds_bool(value) and ("list of text" in expected if isinstance(value, list) else expected[:4] == "text"):
        hint = ": put it in quotes"
    elif "list" in expected and not isinstance(value, list):
        plain = "[a, b]" if "text" in expected else "[1, 2]"
        hint = f", for example {'[{...}, {...}]' if spec.item_section else plain}"
    return ConfigProblem(path, f"{shown(value)} is not allowed: expected {expected}{hint}", "config.wrong_type")


COMMAND_LINE = "command line"
"""The source of an option that was given as key=value."""


def raise_problems(problems: Sequence[ConfigProblem], source: str = "", typed: Collection[str] = ()) -> None:
    """Raise ConfigError unless `problems` is empty. `source`: the files; `typed`: the options given as key=value."""
    if not problems:
        return

    def is_typed(problem: ConfigProblem) -> bool:
        # An override of a.b.c may make an a.b that is no option, or that is of another type.
        is_of_section = problem.code in ("config.unknown_key", "config.wrong_type")
        return problem.code == "config.bad_override" or any(
            _is_below(problem.path, name) or (is_of_section and _is_below(name, problem.path)) for name in typed
        )

    places = [COMMAND_LINE if is_typed(problem) else source for problem in problems]
    if len(set(places)) == 1:
        lines, where = [str(problem) for problem in problems], places[0]
    else:
        lines = [f"{problem} ({place})" for problem, place in zip(problems, places, strict=True)]
        where = ""
    if len(lines) == 1:
        raise ConfigError(lines[0] + (f" ({where})" if where else ""), problems=problems)
    where = f" in {'the ' * (where == COMMAND_LINE)}{where}" if where else ""
    raise ConfigError("\n  ".join([f"{len(lines)} problems{where}:", *lines]), problems=problems)


def _is_below(path: str, section: str) -> bool:
    return path == section or path.startswith((f"{section}.", f"{section}["))


def _holds_bool(value: Any) -> bool:
    """Whether YAML read a bare word such as yes as true or false."""
    values = cast("list[Any]", value if isinstance(value, list) else [value])
    return any(isinstance(value, bool) for value in values)


def shown(value: Any, path: str = "") -> str:
    """The value of the option at `path` as the user may recognise it: cut to about 80 characters, without secrets."""
    value = public(value, path)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:80]}..."
