"""What a config class declares: its fields with types in words, defaults, limits and sentences."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from areal.api.errors import ConfigProblem as Problem
from areal.api.registry import entries, registered

# ----------------------------------------------------------------------------------------------------------------------
# When an option has an effect: conditions declared with the field, and the one check over a finished config.
#
# A condition is built from `when`, `unless`, `above`, `given` and `satisfies`, joined with `&` and `|`. Its paths are
# relative to the section of the field: `name` is an option of the same section, `../name` of the enclosing section,
# `/section.name` of the whole configuration.


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

    def sentence(self, section: str) -> str:
        """The condition as the end of a sentence: `either` and `both` take the place of brackets."""
        if not self.parts:
            return self.words(section)
        texts = [part.sentence(section) for part in self.parts]
        for place, part in enumerate(self.parts):
            if part.word not in ("", self.word):
                texts[place] = f"{'either' if part.word == 'or' else 'both'} {texts[place]}"
        return (f" {self.word} " if all(not part.parts for part in self.parts) else f", {self.word} ").join(texts)

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
    """Condition of a rare complex case: `test` of the section at `path` ('.' = its own, '/' = all); `text` says it."""
    return Condition(path, test, text)


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A changed option without effect under the other options."""

    path: str
    relevant_when: str
    sentence: str
    """What would give it one, as the end of a sentence."""


def relevance_of(entry: dataclasses.Field[Any]) -> Condition | None:
    """The condition declared with a field; None = the option always has an effect."""
    return entry.metadata.get("relevant")


def options_without_effect(config: Any) -> list[NoEffect]:
    """Every option of `config` that differs from its default and has no effect, in the order of the fields.

    An option that equals its default is never listed, given by the user or not. A section that is null by default is
    listed as a whole, unless it has only nulls; of other sections each changed option is listed.
    """
    return list(_without_effect((config,), "", None))


def notice_of(config: Any) -> str:
    """The notice for a run's start: the options without effect, one a line, each with its condition; '' = none."""
    unused = options_without_effect(config)
    if not unused:
        return ""
    lines = [f"{option.path} has an effect only when {option.sentence}." for option in unused]
    return "\n  ".join(["options without effect under these settings (strict_config=true refuses them):", *lines])


def _without_effect(sections: tuple[Any, ...], prefix: str, because: tuple[str, str] | None) -> Iterator[NoEffect]:
    """`because` is the unmet condition of an enclosing section in both forms."""
    section = sections[-1]
    for entry in dataclasses.fields(section):
        value, default, path = getattr(section, entry.name), _default_of(entry), prefix + entry.name
        condition = relevance_of(entry)
        reason = because
        if not reason and condition is not None and not condition.holds(sections):
            at = prefix.rstrip(".")
            reason = condition.words(at), condition.sentence(at)
        is_section = dataclasses.is_dataclass(value) and not isinstance(value, Named)
        is_whole = not is_section or (default is None and any(part is not None for part in vars(value).values()))
        if reason and value != default and is_whole:
            yield NoEffect(path, *reason)
        elif is_section:
            yield from _without_effect((*sections, value), f"{path}.", reason)
        elif isinstance(value, list):
            for place, item in enumerate(cast("list[Any]", value)):
                if dataclasses.is_dataclass(item):
                    yield from _without_effect((*sections, item), f"{path}[{place}].", None)


def _default_of(entry: dataclasses.Field[Any]) -> Any:
    if entry.default is dataclasses.MISSING is entry.default_factory:
        return dataclasses.MISSING
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


# ----------------------------------------------------------------------------------------------------------------------
# Declarations of a config field: its limits, when it has an effect, and its names in other systems.

Problems = Iterable[Problem | tuple[str, str]]
"""What `problems()` of a config class yields; the paths are those of its fields, dotted below the class."""


def below(section: str, problems: Problems) -> Problems:
    """`problems` of a section, with paths from the enclosing section."""
    for fields in problems:
        problem = Problem(*fields)
        yield problem._replace(path=f"{section}.{problem.path}")


def option(default: Any, *, relevant: Condition | None = None, also: str = "") -> Any:
    """A field without limits.

    `relevant`: when it has an effect; None = always. `also`: the names of the option in AReaL, verl or ROLL where they
    differ from its path here, for the page of options.
    """
    return field(default=default, metadata={"relevant": relevant, "also": also})


def section(factory: Callable[[], Any], *, relevant: Condition | None = None, also: str = "") -> Any:
    """A section, list or mapping whose default `factory` makes."""
    return field(default_factory=factory, metadata={"relevant": relevant, "also": also})


def choice(default: Any, *choices: str, relevant: Condition | None = None, also: str = "") -> Any:
    """A text field that takes one of `choices`. The limit is metadata of the field that pydantic checks."""
    pattern = f"^({'|'.join(map(re.escape, choices))})$"
    metadata = {"choices": choices, "pattern": pattern, "relevant": relevant, "also": also}
    return field(default=default, metadata=metadata)


def choice_of(kind: str, default: Any, *more: str, relevant: Condition | None = None, also: str = "") -> Any:
    """A text field that takes a registered name of `kind`, or one of `more`."""
    return field(default=default, metadata={"kind": kind, "choices": more, "relevant": relevant, "also": also})


@dataclass(frozen=True, kw_only=True)
class Named:
    """The value of an option that names a registered thing; subclasses have the options of that thing."""

    name: str
    """The registered name."""

    def __str__(self) -> str:
        return self.name


def named(kind: str, default: str, *, relevant: Condition | None = None, also: str = "") -> Any:
    """A field for a registered thing: `NAME`, or `{name: NAME, option: value}`."""
    return field(default=Named(name=default), metadata={"kind": kind, "relevant": relevant, "also": also})


@dataclass(frozen=True, kw_only=True)
class WithNames:
    """A config class whose named things may be given in Python as they are in a file."""

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value = vars(self)[entry.name]
            if isinstance(entry.default, Named) and isinstance(value, str | dict):
                fields = {"name": value} if isinstance(value, str) else cast("dict[str, Any]", value)
                options = registered(entry.metadata["kind"], fields["name"], key=entry.name).options or Named
                object.__setattr__(self, entry.name, options(**fields))


def number(
    default: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    relevant: Condition | None = None,
    also: str = "",
) -> Any:
    """A number field: at least `low` or above `above`, at most `high` or below `below`."""
    bounds = {"ge": low, "gt": above, "le": high, "lt": below}
    limits: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    return field(default=default, metadata={**limits, "relevant": relevant, "also": also})


MISSING = "???"
"""Value of a required field until it is given (OmegaConf's mark)."""
_YEAR_S = 366 * 86400.0
_LARGEST = 1e9
_LARGEST_INTEGER = 2**31 - 1
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of a config class."""

    owner: type[Any]
    entry: dataclasses.Field[Any]
    name: str
    hint: Any
    """The type without `| None`."""
    nullable: bool
    is_section: bool
    """Whether values of the field are config sections."""
    item_section: type[Any] | None
    """The class of the sections that a list of sections holds; None for every other field."""
    needs_values: bool
    """Whether a section has options of its own without a default."""
    kind: str
    """The kind of the registered things that the field names; empty = none."""
    choices: tuple[str, ...]
    """The texts that the field takes; empty = no such limit."""
    bounds: tuple[tuple[str, float], ...]
    """The limits of a number: ge, gt, le or lt, and the value."""

    @property
    def default(self) -> Any:
        """A fresh default value; `MISSING` where there is none."""
        if self.entry.default is not dataclasses.MISSING:
            return self.entry.default
        return MISSING if self.entry.default_factory is dataclasses.MISSING else self.entry.default_factory()

    @property
    def range_text(self) -> str:
        """The range of a number in words, or ''."""
        return " and ".join(f"{_BOUNDS[name]} {limit:g}" for name, limit in self.bounds)

    @property
    def largest(self) -> float:
        """The most that the absolute value of a number may be; no larger one has a use."""
        if any(name in ("le", "lt") for name, _ in self.bounds):
            return math.inf
        if re.search(r"_s$|_secs$|timeout|period", self.name):
            return _YEAR_S
        return math.inf if "seed" in self.name else _LARGEST_INTEGER if self.hint is int else _LARGEST

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
    def type_text(self) -> str:
        return type_text(self.hint) + (" or null" if self.nullable else "")


@cache
def fields_of(cls: type[Any]) -> dict[str, FieldSpec]:
    """The fields of a config class by name, in order."""
    hints, specs = typing.get_type_hints(cls), dict[str, FieldSpec]()
    for entry in dataclasses.fields(cls):
        if not entry.init:
            continue
        hint: Any = hints[entry.name]
        limits, nullable = entry.metadata, False
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
            nullable = len(parts) < len(typing.get_args(hint))
            hint = typing.Union[tuple(parts)]  # noqa: UP007 - of a list
        args = typing.get_args(hint)
        of_item: Any = args[0] if typing.get_origin(hint) is list else None
        is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint is not Named
        needs_values = False
        for below in dataclasses.fields(cast("Any", hint)) if is_section else ():
            needs_values = needs_values or below.default == MISSING
        bounds: list[tuple[str, float]] = []
        for name in _BOUNDS:
            if name in limits:
                bounds.append((name, limits[name]))
        specs[entry.name] = FieldSpec(
            owner=cls,
            entry=entry,
            name=entry.name,
            hint=hint,
            nullable=nullable,
            is_section=is_section,
            item_section=of_item if dataclasses.is_dataclass(of_item) else None,  # pyright: ignore[reportArgumentType]
            needs_values=needs_values,
            kind=limits.get("kind", "") if hint is Named else "",
            choices=(*limits.get("choices", ()), *(entries(limits["kind"]) if "kind" in limits else ())),
            bounds=tuple(bounds),
        )
    return specs


def sections_in(
    cls: type[Any], tree: dict[str, Any], path: str = ""
) -> Iterator[tuple[type[Any], dict[str, Any], str]]:
    """The values of a `cls` and of every section in them: (class, values, dotted path); `path[i]` in a list."""
    yield cls, tree, path
    specs = fields_of(cls)
    for name, value in list(tree.items()):
        spec, here = specs.get(name), f"{path}.{name}" if path else name
        if spec is None:
            continue
        if spec.is_section and isinstance(value, dict):
            yield from sections_in(spec.hint, cast("dict[str, Any]", value), here)
        elif spec.item_section is not None and isinstance(value, list):
            for place, item in enumerate(cast("list[Any]", value)):
                if isinstance(item, dict):
                    yield from sections_in(spec.item_section, cast("dict[str, Any]", item), f"{here}[{place}]")


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
    if spec.kind:
        below_all = [find_field(entry.options or Named, rest) for entry in entries(spec.kind).values()]
        return next(filter(None, below_all), None)
    below = spec.item_section if bracket else spec.hint
    return find_field(below, rest) if isinstance(below, type) and dataclasses.is_dataclass(below) else None


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


def with_defaults(cls: type[Any], written: dict[str, Any], instance: Any = None) -> dict[str, Any]:
    """`written` laid over the values of `instance`, or else over the defaults of `cls`, as plain mappings and lists.

    A section that is null by default takes the defaults of its class once `given` holds a key of it. So does every
    mapping in a list of sections. A list replaces the default list as a whole.
    """
    tree: dict[str, Any] = {}
    for name, spec in fields_of(cls).items():
        default = spec.default if instance is None else cast("Any", vars(instance)[name])
        user = written.get(name, default)
        if spec.is_section and (isinstance(user, dict) or dataclasses.is_dataclass(user)):
            opened = cast("dict[str, Any]", user) if isinstance(user, dict) else {}
            tree[name] = with_defaults(spec.hint, opened, default if dataclasses.is_dataclass(default) else None)
        elif spec.item_section is not None and isinstance(user, list | tuple):
            tree[name] = [_item_with_defaults(spec.item_section, item) for item in cast("list[Any]", user)]
        else:
            tree[name] = dataclasses.asdict(user) if isinstance(user, Named) else user
    return tree | {name: value for name, value in written.items() if name not in tree}


def _item_with_defaults(cls: type[Any], item: Any) -> Any:
    if dataclasses.is_dataclass(item):
        return with_defaults(cls, {}, item)
    return with_defaults(cls, cast("dict[str, Any]", item)) if isinstance(item, dict) else item


def type_text(hint: Any) -> str:
    """A type in words for error messages and help."""
    plain = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "anything"}
    if hint in plain:
        return plain[hint]
    if hint is Named:
        return "text"
    if dataclasses.is_dataclass(hint):
        return "section"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(type_text, args))
    if origin is list or hint is list:
        if args and dataclasses.is_dataclass(args[0]):
            return "list of sections"
        return f"list of {type_text(args[0])}" if args else "list"
    if origin is dict or hint is dict:
        return f"mapping of text to {type_text(args[1])}" if args else "mapping"
    return str(hint)


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
