"""The checks of config values: types and limits of each field by pydantic, then `problems()` of each section."""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar, cast, get_args

from areal.api.config.redaction import public
from areal.api.config.schema import (
    MISSING,
    FieldSpec,
    Problems,
    fields_of,
    find_field,
    nearest,
    sections_in,
    with_defaults,
)
from areal.api.errors import ConfigError, ConfigProblem

T = TypeVar("T")
_MAX_INTEGER = 2**63
_OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")


def check_config(config: Any) -> None:
    """Raise ConfigError with one line per problem. For configs made or changed in Python; loading does it itself."""
    raise_problems(list(problems_of(config)))


def problems_of(config: Any) -> Iterator[ConfigProblem]:
    """Everything that is wrong with `config` and its sections."""
    cls = cast("type[Any]", type(config))
    tree = with_defaults(cls, {}, config)
    yield from missing_values(cls, tree)
    yield from validated(cls, tree)[1]
    yield from conflicts(config)


def conflicts(config: Any, prefix: str = "") -> Iterator[ConfigProblem]:
    """What the sections of `config` report about their own options."""
    for name, spec in fields_of(cast("type[Any]", type(config))).items():
        value = cast("Any", vars(config)[name])
        if dataclasses.is_dataclass(value):
            yield from conflicts(value, f"{prefix}{name}.")
        elif spec.item_section is not None and isinstance(value, list):
            for i, item in enumerate(cast("list[Any]", value)):
                yield from conflicts(item, f"{prefix}{name}[{i}].")
    report: Callable[[], Problems] | None = getattr(config, "problems", None)
    for found in () if report is None else report():
        problem = ConfigProblem(*found)
        yield problem._replace(path=f"{prefix}{problem.path}")


def missing_values(cls: type[Any], tree: dict[str, Any]) -> Iterator[ConfigProblem]:
    """The required options of `tree` that have no value; they are removed from it."""
    for _, values, section in list(sections_in(cls, tree)):
        for name in [name for name, value in values.items() if value == MISSING]:
            del values[name]
            path = f"{section}.{name}" if section else name
            yield _required(path)


def _required(path: str) -> ConfigProblem:
    return ConfigProblem(path, f"is required: give it in the file or as {path}=...", "config.required")


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


def validated(cls: type[T], tree: dict[str, Any]) -> tuple[T | None, list[ConfigProblem]]:
    """The instance of `cls` with the values of `tree`, and what is wrong with them.

    Wrong values are removed from `tree`; defaults take their places. None: a value is missing that has no default.
    """
    from pydantic import ValidationError

    problems: dict[str, ConfigProblem] = {}
    for _ in range(2):
        try:
            return _validator(cls).validate_python((tree,))[0], list(problems.values())
        except ValidationError as error:
            found: dict[tuple[str | int, ...], ConfigProblem] = {}
            for entry in error.errors(include_url=False, include_context=False):
                steps, problem = _problem(cls, tree, entry["type"], entry["loc"][1:])
                found.setdefault(steps, problem)  # a union reports each of its types
            for steps, problem in found.items():
                problems.setdefault(problem.path, problem)
                _remove(tree, steps)
    return None, list(problems.values())


def _remove(tree: Any, steps: Sequence[str | int]) -> None:
    for step in steps[:-1]:
        tree = tree[step]
    if isinstance(tree, list):
        cast("list[Any]", tree)[cast("int", steps[-1])] = {}
    else:
        tree.pop(steps[-1], None)


def _problem(
    root: type[Any], tree: dict[str, Any], kind: str, location: Sequence[str | int]
) -> tuple[tuple[str | int, ...], ConfigProblem]:
    """The steps to the field that pydantic's error is about, and the error in words. `location` may lead deeper."""
    cls, path, spec = root, "", None
    value: Any = tree
    for i, step in enumerate(location, start=1):
        if isinstance(step, int):
            path, value = f"{path}[{step}]", value[step]
            continue
        section, path = path, f"{path}.{step}" if path else step
        fields = fields_of(cls)
        if step not in fields:
            guess = nearest(root, section, cls, step)
            text = f"unknown key; did you mean {guess}?" if guess else "unknown key: remove it"
            if find_field(cls, step) is not None:
                text = "has dots, which separate sections in overrides only: write nested sections"
            return tuple(location[:i]), ConfigProblem(path, text, "config.unknown_key", guess)
        spec, value = fields[step], value.get(step, MISSING)
        below = spec.item_section or spec.hint
        if not dataclasses.is_dataclass(below) or (spec.item_section and not _is_list(value)):
            while location[i:] and _has_key(value, location[i]):  # a mapping from text to numbers
                step, i = location[i], i + 1
                path, value = f"{path}.{step}", value[step]
                spec = replace(spec, hint=get_args(spec.hint)[1], nullable=False)
            location = location[:i]
            break
        cls = cast("type[Any]", below)
    if spec is None or kind in ("missing", "missing_keyword_only_argument"):
        return tuple(location), _required(path)
    return tuple(location), _problem_of_value(path, value, spec, kind)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _has_key(value: Any, key: Any) -> bool:
    return isinstance(value, dict) and key in value


def _problem_of_value(path: str, value: Any, spec: FieldSpec, kind: str) -> ConfigProblem:
    or_null = " or null" if spec.nullable else ""
    value = public(value, path)
    if kind in _OUT_OF_RANGE:
        advice = f"use a {'finite ' if kind == 'finite_number' else ''}number {spec.range_text}".rstrip()
        return ConfigProblem(path, f"{shown(value)} is not allowed: {advice}{or_null}", "config.out_of_range")
    if spec.choices and kind == "string_pattern_mismatch":
        advice = f"use one of {', '.join(spec.choices)}{or_null}"
        return ConfigProblem(path, f"{shown(value)} is not allowed: {advice}", "config.not_a_choice")
    expected, hint = spec.type_text, ""
    if path.endswith("]") or spec.is_section:
        expected = "a section with its own keys"
    elif _holds_bool(value) and ("list of text" in expected if isinstance(value, list) else expected[:4] == "text"):
        hint = ": put it in quotes"
    elif "list" in expected and not isinstance(value, list):
        plain = "[a, b]" if "text" in expected else "[1, 2]"
        hint = f", for example {'[{...}, {...}]' if spec.item_section else plain}"
    return ConfigProblem(path, f"{shown(value)} is not allowed: expected {expected}{hint}", "config.wrong_type")


def _holds_bool(value: Any) -> bool:
    """Whether YAML read a bare word such as yes as true or false."""
    values = cast("list[Any]", value if isinstance(value, list) else [value])
    return any(isinstance(one, bool) for one in values)


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


@cache
def _validator(cls: type[Any]) -> Any:
    """pydantic's validator of a tuple that holds one `cls`: a dataclass itself takes no configuration from outside."""
    from pydantic import ConfigDict, TypeAdapter
    from pydantic_core import SchemaValidator

    adapter = TypeAdapter[Any](cast("Any", tuple)[cls], config=ConfigDict(extra="forbid", allow_inf_nan=False))
    return SchemaValidator(_with_readers(adapter.core_schema))


def _with_readers(schema: Any) -> Any:
    """`schema` with a strict scalar type behind each reader below, where pydantic would convert more or less."""
    from pydantic_core import core_schema

    if isinstance(schema, list | tuple):
        return type(cast("Any", schema))(_with_readers(item) for item in cast("list[Any]", schema))
    if not isinstance(schema, dict):
        return schema
    entries = cast("dict[str, Any]", schema)
    found = {
        key: value if key in ("default", "metadata", "serialization") else _with_readers(value)
        for key, value in entries.items()
    }
    if found.get("type") not in ("bool", "int", "float", "str"):
        return found
    readers = {"bool": _read_bool, "int": _read_int, "float": _read_float, "str": _read_text}
    reader = _read_choice if "pattern" in found else readers[found["type"]]
    return core_schema.no_info_before_validator_function(reader, cast("Any", found | {"strict": True}))


def _read_bool(value: Any) -> Any:
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _read_int(value: Any) -> Any:
    """Numbers may be written as text, because `${oc.env:X}` always gives text; 1e3 is the integer 1000."""
    number = _read_float(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, int) and abs(number) >= _MAX_INTEGER:
        raise ValueError("more than 64 bits")
    return number


def _read_float(value: Any) -> Any:
    if isinstance(value, str):
        for convert in (int, float):
            try:
                return convert(value)
            except ValueError:
                continue
    return value


def _read_text(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value


def _read_choice(value: Any) -> Any:
    """YAML reads the bare words on and off as true and false."""
    return ("on" if value else "off") if isinstance(value, bool) else value
