"""What a config class declares: its fields with types in words, defaults, limits and sentences."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

MISSING = "???"
"""Value of a required field until it is given (OmegaConf's mark)."""
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of a config class."""

    name: str
    hint: Any
    """The type without `| None`."""
    nullable: bool
    default: Any
    """A fresh default value; `MISSING` where there is none."""
    choices: tuple[str, ...]
    """The texts that the field takes; empty = no such limit."""
    range_text: str
    """The range of a number in words, or ''."""
    sentence: str

    @property
    def is_section(self) -> bool:
        return is_section(self.hint)

    @property
    def item_section(self) -> type[Any] | None:
        """The class of the sections that a list of sections holds; None for every other field."""
        return _item_section(self.hint)

    @property
    def type_text(self) -> str:
        return type_text(self.hint) + (" or null" if self.nullable else "")


def is_section(hint: Any) -> bool:
    """Whether values of type `hint` are config sections of their own."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _item_section(hint: Any) -> type[Any] | None:
    args = typing.get_args(hint)
    return args[0] if typing.get_origin(hint) is list and is_section(args[0]) else None


def fields_of(cls: type[Any]) -> dict[str, FieldSpec]:
    """The fields of a config class by name, in order. Defaults are fresh on every call."""
    hints, sentences = _hints_of(cls), _sentences_of(cls)
    specs: dict[str, FieldSpec] = {}
    for entry in dataclasses.fields(cls):
        if not entry.init:
            continue
        hint, nullable = _without_null(hints[entry.name])
        bounds = [f"{words} {entry.metadata[name]:g}" for name, words in _BOUNDS.items() if name in entry.metadata]
        specs[entry.name] = FieldSpec(
            name=entry.name,
            hint=hint,
            nullable=nullable,
            default=_default_of(entry),
            choices=entry.metadata.get("choices", ()),
            range_text=" and ".join(bounds),
            sentence=sentences.get(entry.name, ""),
        )
    return specs


def leaf_paths(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, FieldSpec]]:
    """Every option below `cls` with its dotted path; sections themselves are left out.

    The options of each section of a list are below `path[]`.
    """
    for name, spec in fields_of(cls).items():
        path = f"{prefix}{name}"
        if spec.is_section:
            yield from leaf_paths(spec.hint, f"{path}.")
        elif spec.item_section is not None:
            yield from leaf_paths(spec.item_section, f"{path}[].")
        else:
            yield path, spec


def find_field(cls: type[Any], path: str) -> FieldSpec | None:
    """The field at dotted `path` below `cls`, or None when there is no such field."""
    name, _, rest = path.partition(".")
    name, bracket, _ = name.partition("[")
    spec = fields_of(cls).get(name)
    if spec is None or (bracket and spec.item_section is None):
        return None
    if not rest:
        return spec
    below = spec.item_section if bracket else spec.hint
    return find_field(below, rest) if below is not None and is_section(below) else None


def nearest(root: type[Any], section: str, below: type[Any], key: str) -> str:
    """The dotted path a user most likely meant by the unknown `key` in `section`, whose class is `below`; or ''."""
    siblings = difflib.get_close_matches(key, fields_of(below), n=1, cutoff=0.6)
    if siblings:
        return f"{section}.{siblings[0]}" if section else siblings[0]
    paths = [path for path, _ in leaf_paths(root)]
    same_name = [path for path in paths if path.rpartition(".")[2] == key]
    if same_name:
        return same_name[0]
    return next(iter(difflib.get_close_matches(key, paths, n=1, cutoff=0.7)), "")


def with_defaults(cls: type[Any], given: dict[str, Any], instance: Any = None) -> dict[str, Any]:
    """`given` laid over the values of `instance`, or else over the defaults of `cls`, as plain mappings and lists.

    A section that is null by default takes the defaults of its class once `given` holds a key of it. So does every
    mapping in a list of sections. A list replaces the default list as a whole.
    """
    tree: dict[str, Any] = {}
    for name, spec in fields_of(cls).items():
        default = spec.default if instance is None else cast("Any", vars(instance)[name])
        user = given.get(name, default)
        if spec.is_section and (isinstance(user, dict) or dataclasses.is_dataclass(user)):
            opened = cast("dict[str, Any]", user) if isinstance(user, dict) else {}
            tree[name] = with_defaults(spec.hint, opened, default if dataclasses.is_dataclass(default) else None)
        elif spec.item_section is not None and isinstance(user, list | tuple):
            tree[name] = [_item_with_defaults(spec.item_section, item) for item in cast("list[Any]", user)]
        else:
            tree[name] = user
    return tree | {name: value for name, value in given.items() if name not in tree}


def _item_with_defaults(cls: type[Any], item: Any) -> Any:
    if dataclasses.is_dataclass(item):
        return with_defaults(cls, {}, item)
    return with_defaults(cls, cast("dict[str, Any]", item)) if isinstance(item, dict) else item


def type_text(hint: Any) -> str:
    """A type in words for error messages and help."""
    plain = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "anything"}
    if hint in plain:
        return plain[hint]
    if is_section(hint):
        return "section"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list or hint is list:
        return "list of sections" if _item_section(hint) else f"list of {type_text(args[0])}" if args else "list"
    if origin is tuple:
        return f"list of {type_text(args[0])}"
    if origin is dict or hint is dict:
        return f"mapping of text to {type_text(args[1])}" if args else "mapping"
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    return str(hint)


def _without_null(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    kept = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
    nullable = len(kept) < len(typing.get_args(hint))
    inner: Any = kept[0]
    for other in kept[1:]:
        inner = inner | other
    return inner, nullable


def _default_of(entry: dataclasses.Field[Any]) -> Any:
    if entry.default is not dataclasses.MISSING:
        return entry.default
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return MISSING


@cache
def _hints_of(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def _sentences_of(cls: type[Any]) -> dict[str, str]:
    """Field name -> the sentence written under it, the nearest class winning. Empty where there is no source."""
    sentences: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            sentences |= _sentences_in(_class_body(base))
    return sentences


def _sentences_in(body: list[ast.stmt]) -> dict[str, str]:
    found: dict[str, str] = {}
    for statement, follower in pairwise(body):
        match statement, follower:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
            case _:
                pass
    return found


def _class_body(cls: type[Any]) -> list[ast.stmt]:
    try:
        path = inspect.getsourcefile(cls)
    except TypeError:
        path = None
    if path is None or not Path(path).is_file():
        return []
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            return node.body
    return []


@cache
def _parsed(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))
