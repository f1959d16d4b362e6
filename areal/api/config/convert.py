"""Owns the step from plain YAML values to config instances: unknown keys, types, missing values, old keys."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from areal.api.config.legacy import CopyOf, Ignored, MovedTo, legacy_rule, moved, refusal
from areal.api.config.schema import MISSING, FieldSpec, fields_of, nearest, type_text

T = TypeVar("T")


class _WrongType(Exception):
    """A value that does not fit its field; the message says what was expected."""


@dataclass
class Reader:
    """Reads one tree of values and gathers everything that is wrong with it."""

    root_class: type[Any]
    tree: dict[str, Any]
    """The whole tree, defaults included and interpolations resolved."""
    allow_unknown_top_level: bool = False
    issues: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(dotted path, what is wrong and what to do), in the order of the tree."""
    suspects: set[str] = field(default_factory=set[str])
    """Paths whose value here is not what the user meant; sentences about them would only confuse."""
    ignored: list[str] = field(default_factory=list[str])
    """Accepted keys without effect that the user should hear of."""

    def read(self, cls: type[T]) -> T:
        """The instance of `cls`, with defaults wherever an issue was found."""
        return self._section(cls, self.tree, "")

    def _section(self, cls: type[T], tree: dict[str, Any], path: str) -> T:
        specs = fields_of(cls)
        prefix = f"{path}." if path else ""
        for key in tree:
            if key not in specs:
                self._unknown(cls, str(key), tree[key], path)
        values: dict[str, Any] = {}
        for name, spec in specs.items():
            values[name] = self._field(spec, tree.get(name, spec.default), f"{prefix}{name}")
        return cls(**values)

    def _field(self, spec: FieldSpec, value: Any, path: str) -> Any:
        if isinstance(value, str) and value == MISSING:
            if path not in self.suspects:  # else its interpolation is broken, which is said already
                self._report(path, f"is required: give it in the file or as {path}=... on the command line")
            return _blank(spec)
        if value is None:
            if spec.nullable or spec.hint is Any:
                return None
            self._report(path, f"null was given where {spec.type_text} is expected")
            return _blank(spec)
        if spec.is_section:
            if dataclasses.is_dataclass(value):
                return value
            if isinstance(value, dict):
                return self._section(spec.hint, cast("dict[str, Any]", value), path)
            self._report(path, f"{value!r} was given where a section with keys of its own is expected")
            return _blank(spec)
        if isinstance(value, bool) and (word := "on" if value else "off") in (spec.limits.choices or ()):
            return word  # YAML reads the bare words on and off as true and false
        if spec.item_section is not None:
            return self._sections(spec.item_section, value, path)
        try:
            return coerce(spec.hint, value)
        except _WrongType as error:
            self._report(path, f"{value!r} was given where {spec.type_text} is expected{error}")
            return _blank(spec)

    def _sections(self, cls: type[T], value: Any, path: str) -> list[T]:
        """A list of sections; problems of the i-th are told at `path[i]`."""
        if not isinstance(value, list | tuple):
            self._report(path, f"{value!r} was given where a list of sections is expected: [{{...}}, {{...}}]")
            return []
        found: list[T] = []
        for i, item in enumerate(cast("list[Any]", value)):
            if isinstance(item, cls):
                found.append(item)
            elif isinstance(item, dict):
                found.append(self._section(cls, cast("dict[str, Any]", item), f"{path}[{i}]"))
            else:
                self._report(f"{path}[{i}]", f"{item!r} was given where a section with keys of its own is expected")
        return found

    def _unknown(self, cls: type[Any], key: str, value: Any, section: str) -> None:
        path = f"{section}.{key}" if section else key
        rule = legacy_rule(cls, key, section)
        if rule is None:
            if section or not self.allow_unknown_top_level:
                guess = nearest(self.root_class, section, cls, key)
                self.suspects.add(guess)
                self._report(path, f"unknown key; did you mean {guess}?" if guess else "unknown key: remove it")
            return
        copied = self._lookup(rule.path) if isinstance(rule, CopyOf) else None
        if isinstance(rule, MovedTo):
            copied = self._lookup(f"{section}.{rule.path}")
        problem = refusal(rule, value, copied)
        if problem is not None:
            self._report(path, problem)
        elif isinstance(rule, Ignored) and rule.notice:
            self.ignored.append(path)

    def _lookup(self, path: str) -> Any:
        node: Any = self.tree
        for name in path.split("."):
            node = cast("dict[str, Any]", node).get(name) if isinstance(node, dict) else None
        return node

    def _report(self, path: str, text: str) -> None:
        self.suspects.add(path)
        self.issues.append((path, text))


def coerce(hint: Any, value: Any) -> Any:
    """`value` as an instance of the (not nullable) type `hint`. Raises _WrongType.

    Numbers may be written as text, because `${oc.env:X}` always yields text; nothing else is converted silently.
    """
    if hint is Any:
        return value
    if hint in _SCALARS:
        return _SCALARS[hint](value)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list or hint is list:
        items = _expect_list(value)
        return [coerce(args[0], item) for item in items] if args else items
    if origin is tuple:
        items = _expect_list(value)
        hints = [args[0]] * len(items) if args[1:] == (...,) else list(args)
        if len(hints) != len(items):
            raise _WrongType(f" with {len(hints)} elements")
        return tuple(coerce(hint, item) for hint, item in zip(hints, items, strict=True))
    if origin is dict or hint is dict:
        if not isinstance(value, dict):
            raise _WrongType("")
        mapping = cast("dict[Any, Any]", value)
        return {coerce(args[0], key): coerce(args[1], item) for key, item in mapping.items()} if args else mapping
    if origin in (types.UnionType, typing.Union):
        return _first_fit(args, value)
    if origin is typing.Literal and value in args:
        return value
    if isinstance(hint, type) and isinstance(value, hint):
        return value
    raise _WrongType("" if origin is typing.Literal else f"; {type_text(hint)} cannot be written in a config file")


def _first_fit(hints: tuple[Any, ...], value: Any) -> Any:
    for hint in sorted(hints, key=lambda hint: hint is str):  # text fits nearly everything: last
        try:
            return coerce(hint, value)
        except _WrongType:
            continue
    raise _WrongType("")


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _WrongType("")


def _to_int(value: Any) -> int:
    if isinstance(value, bool):
        raise _WrongType("")
    if isinstance(value, str):
        value = _number(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int):
        return value
    raise _WrongType("")


def _to_float(value: Any) -> float:
    if isinstance(value, str):
        value = _number(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise _WrongType("")


def _to_str(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise _WrongType(": put it in quotes" if isinstance(value, bool) else "")


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise _WrongType("") from None


_SCALARS: dict[Any, Callable[[Any], Any]] = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}


def _expect_list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _WrongType(", for example [a, b]")
    return list(cast("list[Any]", value))


def _blank(spec: FieldSpec) -> Any:
    """Something of the right kind to go on with after an issue; never seen by a run."""
    if spec.default != MISSING or spec.hint is str:
        return spec.default
    if spec.nullable:
        return None
    if spec.is_section:
        return Reader(spec.hint, {}).read(spec.hint)
    empty: dict[Any, Any] = {int: 0, float: 0.0, bool: False, list: [], dict: {}, tuple: ()}
    return empty.get(typing.get_origin(spec.hint) or spec.hint)


def with_defaults(cls: type[Any], given: dict[str, Any], instance: Any = None) -> dict[str, Any]:
    """`given` laid over the defaults of `cls`; a null section gets its class's defaults once `given` opens it.

    So does every mapping in a list of sections. A list replaces the default list as a whole. What stands under a key
    that has moved (see legacy.py) is found at its new place.
    """
    given = moved(cls, given)
    tree: dict[str, Any] = {}
    for name, spec in fields_of(cls).items():
        default = spec.default if instance is None else cast("Any", vars(instance)[name])
        user = given.get(name, default)
        if spec.is_section and (isinstance(user, dict) or dataclasses.is_dataclass(user)):
            tree[name] = with_defaults(
                spec.hint, _mapping(user), default if dataclasses.is_dataclass(default) else None
            )
        elif spec.item_section is not None and isinstance(user, list | tuple):
            tree[name] = [_item_with_defaults(spec.item_section, item) for item in cast("list[Any]", user)]
        else:
            tree[name] = user
    return tree | {name: value for name, value in given.items() if name not in tree}


def _item_with_defaults(cls: type[Any], item: Any) -> Any:
    if dataclasses.is_dataclass(item):
        return with_defaults(cls, {}, item)
    return with_defaults(cls, cast("dict[str, Any]", item)) if isinstance(item, dict) else item


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
