"""What a config class declares: its fields with types in words, defaults, limits and sentences."""

import ast
import dataclasses
import difflib
import inspect
import re
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

    owner: type[Any]
    entry: dataclasses.Field[Any]
    hint: Any
    """The type without `| None`."""
    nullable: bool

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def default(self) -> Any:
        """A fresh default value; `MISSING` where there is none."""
        if self.entry.default is not dataclasses.MISSING:
            return self.entry.default
        return MISSING if self.entry.default_factory is dataclasses.MISSING else self.entry.default_factory()

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that the field takes; empty = no such limit."""
        return self.entry.metadata.get("choices", ())

    @property
    def range_text(self) -> str:
        """The range of a number in words, or ''."""
        limits = self.entry.metadata
        return " and ".join(f"{words} {limits[name]:g}" for name, words in _BOUNDS.items() if name in limits)

    @property
    def other_paths(self) -> frozenset[str]:
        """Its names in other systems, dotted where a section matters."""
        return frozenset(re.findall(r"[\w.]+(?![\w.:])", self.entry.metadata.get("also", "")))

    @property
    def other_names(self) -> frozenset[str]:
        """The last parts of them."""
        return frozenset(path.rpartition(".")[2] for path in self.other_paths)

    @property
    def sentence(self) -> str:
        """What the option means; '' where there is no source."""
        return _sentences_of(self.owner).get(self.name, "")

    @property
    def is_section(self) -> bool:
        """Whether values of the field are config sections."""
        return _is_section(self.hint)

    @property
    def item_section(self) -> type[Any] | None:
        """The class of the sections that a list of sections holds; None for every other field."""
        return _item_section(self.hint)

    @property
    def type_text(self) -> str:
        return type_text(self.hint) + (" or null" if self.nullable else "")


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _item_section(hint: Any) -> type[Any] | None:
    args = typing.get_args(hint)
    return args[0] if typing.get_origin(hint) is list and _is_section(args[0]) else None


@cache
def fields_of(cls: type[Any]) -> dict[str, FieldSpec]:
    """The fields of a config class by name, in order."""
    hints, entries = typing.get_type_hints(cls), dataclasses.fields(cls)
    return {entry.name: FieldSpec(cls, entry, *_without_null(hints[entry.name])) for entry in entries if entry.init}


def sections_in(
    cls: type[Any], tree: dict[str, Any], path: str = ""
) -> Iterator[tuple[type[Any], dict[str, Any], str]]:
    """The values of a `cls` and of every section in them: (class, values, dotted path); `path[i]` in a list."""
    yield cls, tree, path
    for name, spec in fields_of(cls).items():
        value, here = tree.get(name), f"{path}.{name}" if path else name
        found = [(spec.hint, value, here)] if spec.is_section else []
        if spec.item_section is not None and isinstance(value, list):
            items = cast("list[Any]", value)
            found = [(spec.item_section, item, f"{here}[{i}]") for i, item in enumerate(items)]
        for below, values, place in found:
            if isinstance(values, dict):
                yield from sections_in(below, cast("dict[str, Any]", values), place)


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
    name, dot, rest = path.partition(".")
    name, bracket, _ = name.partition("[")
    spec = fields_of(cls).get(name)
    if spec is None or (bracket and spec.item_section is None) or (dot and not rest):
        return None
    if not rest:
        return spec
    below = spec.item_section if bracket else spec.hint
    return find_field(below, rest) if below is not None and _is_section(below) else None


def nearest(root: type[Any], section: str, below: type[Any], key: str) -> str:
    """The dotted path a user most likely meant by the unknown `key` in `section`, whose class is `below`; or ''.

    The name of an option in another system, see `FieldSpec.other_names`, is better evidence than a similar spelling.
    """
    renamed = [name for name, spec in fields_of(below).items() if key in spec.other_names]
    if renamed:
        return f"{section}.{renamed[0]}" if section else renamed[0]
    moved = [path for path, spec in leaf_paths(root) if section and f"{section}.{key}" in spec.other_paths]
    if moved:
        return moved[0]
    paths = [path for path, _ in leaf_paths(root)]
    same_name = [path for path in paths if path.rpartition(".")[2] == key]
    inside = [path for path in same_name if path.startswith(f"{section}.")]
    if inside:
        return inside[0]
    siblings = difflib.get_close_matches(key, fields_of(below), n=1, cutoff=0.6)
    if siblings:
        return f"{section}.{siblings[0]}" if section else siblings[0]
    if same_name:
        return same_name[0]
    renamed = [path for path, spec in leaf_paths(root) if key in spec.other_names]
    if renamed:
        return renamed[0]
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
    if _is_section(hint):
        return "section"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(type_text, args))
    if origin is list or hint is list:
        return "list of sections" if _item_section(hint) else f"list of {type_text(args[0])}" if args else "list"
    if origin is dict or hint is dict:
        return f"mapping of text to {type_text(args[1])}" if args else "mapping"
    return str(hint)


def _without_null(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    inner, *others = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
    for other in others:
        inner = inner | other
    return inner, 1 + len(others) < len(typing.get_args(hint))


@cache
def _sentences_of(cls: type[Any]) -> dict[str, str]:
    """Field name -> the sentence written under it, the nearest class winning. Empty where there is no source."""
    sentences: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            for pair in pairwise(_class_body(base)):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        sentences[name] = inspect.cleandoc(text)
                    case _:
                        pass
    return sentences


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
