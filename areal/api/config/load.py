"""Load a configuration from a command line: YAML files, dotted overrides, interpolation; and write it as YAML."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import os
import re
import sys
import typing
from argparse import ArgumentError, ArgumentParser
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import yaml

import areal
from areal.api.config.experiment import KINDS, BaseExperimentConfig, GRPOConfig, kind_of, with_followers
from areal.api.config.legacy import LegacyKeys, legacy_rule
from areal.api.config.redaction import public, public_text, without_secrets
from areal.api.config.schema import (
    MISSING,
    FieldSpec,
    Named,
    fields_of,
    find_field,
    relevance_of,
    type_text,
    with_defaults,
)
from areal.api.config.validate import conflicts, converted, raise_problems, shown
from areal.api.errors import ConfigError, ConfigProblem
from areal.api.registry import entries

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

# ----------------------------------------------------------------------------------------------------------------------
# The text of `areal config SECTION` and of a script's `--help`: type, default, limits and meaning of options.


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
    for entry in entries(spec.kind).values() if spec.kind else ():
        if entry.options is not None:
            yield f"    with {path}={entry.name}: {(entry.options.__doc__ or '').partition(chr(10))[0]}"
            yield from (
                text
                for option in fields_of(entry.options)
                if option != "name"
                for text in _field(entry.options, f"{path}.", option)
            )


def default_text(spec: FieldSpec) -> str:
    """The default of an option in words."""
    if spec.default is None:
        return "default null"
    if isinstance(spec.default, str):
        return "required" if spec.default == MISSING else f"default {spec.default or 'empty'}"
    if isinstance(spec.default, bool):
        return f"default {str(spec.default).lower()}"
    if isinstance(spec.default, Named):
        return f"default {spec.default}"
    if dataclasses.is_dataclass(spec.default):
        return ""
    return f"default {spec.default}"


# ----------------------------------------------------------------------------------------------------------------------
# YAML text, in files and in overrides: values that look like numbers and are text, and why text cannot be read.

MAX_DEPTH = 32
MAX_NODES = 100_000
"""Values in one text, where an alias counts as often as it is used."""
UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""What reading text as YAML raises: ValueError for bytes that are not UTF-8, thousands of digits and `${`."""
_STARTS = tuple("+-.0123456789")
"""What numbers start with."""
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)"
    r"|\.[0-9_]+(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
"""Numbers of YAML 1.2, among them 1e-5, and those with underscores."""


class _Loader(yaml.SafeLoader):
    """YAML with the numbers of `_FLOAT`, and without dates."""

    num_built = 0


class _CheckedLoader(cast("type[yaml.SafeLoader]", getattr(yaml, "CSafeLoader", yaml.SafeLoader))):
    """The same in C where that is installed, for files that areal wrote."""


for _loader in (_Loader, _CheckedLoader):
    _loader.yaml_implicit_resolvers = {
        start: [rule for rule in rules if rule[0] not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")]
        for start, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    cast("Any", _loader).add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, [*_STARTS])


def yaml_value(text: str, hint: Any) -> Any:
    """The value of YAML that is read as `hint`, a config class or None = any type. Text keeps numbers as written.

    YAML reads 007 as 7, 1.50 as 1.5, 2024_01_02 as 20240102 and the time limit 12:30:00 as 45000, a number in base 60.
    Raises one of `UNREADABLE`.
    """
    loader = _Loader(text)
    root = cast("Any", loader).get_single_node()
    value = None if root is None else _built(loader, root, hint, ())
    if "${" in text:
        check_interpolations(value)
    return value


def check_interpolations(value: Any) -> None:
    """Raise ValueError for a text with `${` that is no interpolation."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.create({"value": value})
    except OmegaConfBaseException as error:
        raise ValueError(str(error)) from None


def _built(loader: Any, node: yaml.Node, hint: Any, above: tuple[yaml.Node, ...]) -> Any:
    """The value of a node that is read as `hint`; None = of any type. `above`: the nodes that contain it."""
    loader.num_built += 1
    if loader.num_built > MAX_NODES:
        text = f"the aliases make more than {MAX_NODES} values: write fewer"
        raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
    if node in above:
        raise yaml.constructor.ConstructorError(None, None, "found unconstructable recursive node", node.start_mark)
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.value[:1] in _STARTS and (":" in node.value or _keeps_text(hint)):
            return node.value
        return loader.construct_object(node)
    if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
        return loader.construct_object(node, deep=True)
    if len(above) > 2 * MAX_DEPTH:
        raise RecursionError
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        of_item = typing.get_args(hint)[0] if typing.get_origin(hint) is list else str if _keeps_text(hint) else None
        return [_built(loader, item, of_item, above) for item in node.value]
    tree: dict[Any, Any] = {}
    pairs: list[tuple[Any, Any]] = []
    merged: list[tuple[Any, Any]] = []
    for key_node, value_node in cast("list[tuple[Any, Any]]", node.value):
        (merged if key_node.tag == "tag:yaml.org,2002:merge" else pairs).append((key_node, value_node))
    for _, value_node in merged:
        for shared in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
            tree = cast("dict[Any, Any]", _built(loader, shared, hint, above)) | tree
    specs: dict[Any, FieldSpec] = (
        dict(fields_of(hint)) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else {}
    )
    written = set[Any]()
    of_value = typing.get_args(hint)[1] if typing.get_origin(hint) is dict else None
    for key_node, value_node in pairs:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool | None) or key in written:
            text = f"found duplicate key {key}" if isinstance(key, str | int | float) else "found unhashable key"
            raise yaml.constructor.ConstructorError("in a mapping", node.start_mark, text, key_node.start_mark)
        written.add(key)
        spec = specs.get(key)
        tree[key] = _built(loader, value_node, of_value if spec is None else spec.hint, above)
    return tree


def override_value(text: str, cls: type[Any], path: str) -> Any:
    """The value of `path=text`. Text fields take it unchanged (007, 1e-3, yes); everything else is read as in files."""
    text, spec = text.strip(), find_field(cls, path)
    is_list = text[:1] == "[" and spec is not None and spec.hint is not str
    hint = None if spec is None else spec.hint
    if not _keeps_text(hint) or is_list or text == "null" or text[:1] in ("'", '"'):
        return yaml_value(f"value: {text}", dict[str, hint])["value"]
    if "${" in text:
        check_interpolations(text)
    return text


def written_numbers(text: str, override: str = "") -> dict[str, str]:
    """Path -> each number in YAML as it is written, such as 1.50. `override`: the path of the key `value`."""
    numbers_by_path = _numbers_by_path(cast("Any", yaml).compose(text, Loader=_Loader), "")
    return {override + path.removeprefix("value") if override else path: node.value for path, node in numbers_by_path}


def with_numbers(text: str, numbers: Mapping[str, str]) -> str:
    """The YAML `text` with `numbers` as they are written, by path, in place of the same numbers."""
    numbers_by_path = list(_numbers_by_path(cast("Any", yaml).compose(text, Loader=_Loader), "")) if numbers else []
    for path, node in reversed(numbers_by_path):
        written = numbers.get(path, node.value)
        before, after = yaml_value(f"- {node.value}\n- {written}", None)
        if before == after:
            text = f"{text[: node.start_mark.index]}{written}{text[node.end_mark.index :]}"
    return text


def _numbers_by_path(node: yaml.Node | None, path: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _numbers_by_path(value, f"{path}.{key.value}" if path else str(key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _numbers_by_path(item, f"{path}[{index}]")
    elif isinstance(node, yaml.ScalarNode) and node.style is None and node.value[:1] in _STARTS:
        yield from [] if ":" in node.value else [(path, node)]


def _keeps_text(hint: Any) -> bool:
    """Whether a single value of this type is text."""
    return hint is str or hint == str | list[str]


def reason_of(error: BaseException) -> str:
    """The message of an error of YAML, OmegaConf or Python in one line."""
    if isinstance(error, RecursionError):
        return f"it is nested deeper than {MAX_DEPTH} levels"
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    if isinstance(error, ValueError) and "digits" in str(error):
        return "a number has thousands of digits"
    if isinstance(error, yaml.MarkedYAMLError):  # without the quoted line, which may contain a secret
        places = [(error.context, error.context_mark), (error.problem, error.problem_mark)]
        return ", ".join(f"{text} in {_place(mark)}" if mark else text for text, mark in places if text)
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(("full_key:", "object_type=")))
    return re.sub(r'in "<[^>]*>", ', "", text)


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


T = TypeVar("T")


def load_config(argv: Sequence[str], cls: type[T]) -> T:
    """Read `[script.py] --config FILE.yaml [key.sub=value ...]` into a checked `cls`.

    Overrides are written `key=value`, `+key=value` or `++key=value` (all the same); `~key` restores the default.
    Raises ConfigError with every problem. `--help [SECTION]` prints the options of `cls` and exits.
    """
    if (section := _help_section(argv)) is not None:
        sys.stdout.write(help_text(cls, section))
        raise SystemExit(0)
    line = _CommandLine.parse(argv)
    checked = _read_checked(line, cls, allow_unknown_top_level=False)
    return _build(cls, line, line.given(cls), allow_unknown_top_level=False) if checked is None else checked


def load_experiment(
    argv: Sequence[str], *, allow_unknown_top_level: bool = False, is_quiet: bool = False
) -> BaseExperimentConfig:
    """The same for a process that does not know the class: the sections of the file decide it, see kinds.py.

    `allow_unknown_top_level` is for runs with a user's script, whose own config class checks the keys it added.
    `is_quiet`: no log line about keys without effect, because the process loads the configuration again.
    """
    line = _CommandLine.parse(argv)
    if (checked := _read_checked(line, None, allow_unknown_top_level=allow_unknown_top_level)) is not None:
        return checked
    cls, tree = line.kind(allow_unknown=allow_unknown_top_level)
    return _build(cls, line, tree, allow_unknown_top_level=allow_unknown_top_level, is_quiet=is_quiet)


def script_keys(argv: Sequence[str], script_text: str = "") -> dict[str, Any]:
    """The resolved top-level keys that only a user's script knows, for `save_config(..., extra=...)`.

    Raises ConfigError for a key that is spelled almost like a known one and does not occur in `script_text`.
    """
    line = _CommandLine.parse(argv)
    cls, tree_of_files = line.kind(allow_unknown=True)
    known = fields_of(cls)
    names = {name for kind in KINDS for name in fields_of(kind)}
    script_only = [key for key in tree_of_files if key not in known and legacy_rule(cls, key, "") is None]
    problems: list[ConfigProblem] = []
    for key in script_only:
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
        if key not in names and near and not re.search(rf"\b{re.escape(key)}\b", script_text):
            problems.append(ConfigProblem(key, f"unknown key; did you mean {near[0]}?", "config.unknown_key", near[0]))
    raise_problems(problems, line.source, line.typed)
    tree = (
        _resolved(cls, tree_of_files)[0]
        if _has_interpolation({key: tree_of_files[key] for key in script_only})
        else tree_of_files
    )
    return {key: tree[key] for key in script_only}


def script_numbers(argv: Sequence[str], keys: Collection[str]) -> dict[str, str]:
    """The numbers of the `keys` that only a script knows, as they are written, by path: its fields may be text."""
    line, numbers = _CommandLine.parse(argv), dict[str, str]()
    for name in line.files:
        numbers |= written_numbers(Path(name).read_text(encoding="utf-8"))
    for path, word in zip(line.typed, line.overrides, strict=True):
        if path.split(".")[0] in keys:
            numbers |= written_numbers(f"value: {word.partition('=')[2]}", path)
    return {path: number for path, number in numbers.items() if re.split(r"[.\[]", path)[0] in keys}


def save_config(
    config: Any, path: Path | str, *, extra: dict[str, Any] | None = None, numbers: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write a checked `config` and `extra` keys as YAML, without secrets. The file is replaced atomically.

    Its first line has the class and a checksum, with which the processes of a run read it without checks.
    `numbers`: path -> the number as the user wrote it, for `extra` keys.
    Returns environment variables with the secrets: where they are set, the file loads back equal.
    """
    from omegaconf import OmegaConf

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tree, variables = without_secrets(asdict(config) | (extra or {}))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    text = with_numbers(OmegaConf.to_yaml(OmegaConf.create(tree)), numbers or {})
    with open(temporary, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
        file.write(f"# checked: {type(config).__name__} {_checksum(text)}\n{text}")
    temporary.replace(path)
    return variables


_CHECKED = re.compile(r"# checked: (\w+) (\w+)\n")
_VARIABLE = re.compile(r"(?<!\\)\$\{oc\.env:(\w+),''\}")


def _checksum(text: str) -> str:
    return hashlib.sha256(f"{areal.__version__}\n{text}".encode()).hexdigest()


def _read_checked(line: _CommandLine, cls: type[Any] | None, *, allow_unknown_top_level: bool) -> Any:
    """The configuration in the only file of `line`, where `save_config` wrote it and nobody changed it; else None.

    `cls` None: the class that the file names. Nothing is checked again.
    """
    path = Path(line.files[0])
    if line.overrides or len(line.files) > 1 or not path.is_file():
        return None
    with open(path, "rb") as file:
        head = file.readline(200).decode("utf-8", errors="replace")
        match = _CHECKED.fullmatch(head)
        text = "" if match is None else file.read().decode("utf-8", errors="replace")
    kind = cls or next((kind for kind in KINDS if match is not None and kind.__name__ == match[1]), None)
    if match is None or kind is None or kind.__name__ != match[1] or _checksum(text) != match[2]:
        return None
    tree = cast("dict[str, Any]", yaml.load(text, Loader=_CheckedLoader))
    tree = _with_variables(tree) if "${" in text else tree
    if allow_unknown_top_level:
        tree = {key: value for key, value in tree.items() if key in fields_of(kind)}
    config, problems = converted(kind, tree)
    return None if problems else config


def _with_variables(tree: Any) -> Any:
    """The values of a file of `save_config` with the environment variables that it names for secrets."""
    if isinstance(tree, dict):
        return {key: _with_variables(value) for key, value in cast("dict[Any, Any]", tree).items()}
    if isinstance(tree, list):
        return [_with_variables(value) for value in cast("list[Any]", tree)]
    if not isinstance(tree, str):
        return tree
    return _VARIABLE.sub(lambda match: os.environ.get(match[1], ""), tree).replace("\\${", "${")


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
    written: dict[str, Any],
    resolved: dict[str, Any] | None = None,
    *,
    unresolved: Collection[str] = (),
    allow_unknown_top_level: bool = False,
) -> Reading[T]:
    """Read `given`, the values the user wrote, as a `cls`.

    `resolved` holds them without interpolations; None = `given` has none. `unresolved` are the paths of interpolations
    that failed; they are reported elsewhere.
    """
    tree = deepcopy(with_followers(cls, written)) if resolved is None else resolved
    legacy = LegacyKeys(cls, tree, written)
    legacy.apply()
    if allow_unknown_top_level:
        tree = {key: value for key, value in tree.items() if key in fields_of(cls)}
    config, wrong = converted(cls, tree)
    wrong = [problem for problem in wrong if problem.code != "config.required" or problem.path not in unresolved]
    problems = legacy.problems + wrong
    if config is not None:
        # A conflict with a value that is not what the user meant would only confuse.
        suspects = {*unresolved, *(p.path for p in problems), *(p.suggestion for p in problems)} - {""}
        reported = list(conflicts(config, tree))
        problems += [problem for problem in reported if not _is_about(problem, suspects)] if suspects else reported
    wrong_values = {(problem.path, problem.code) for problem in problems}
    problems = [each for each in problems if (_leader(cls, written, each.path), each.code) not in wrong_values]
    if isinstance(config, BaseExperimentConfig) and config.strict_config:
        text = "has no effect in areal: remove it"
        problems += [ConfigProblem(path, text, "config.no_effect") for path in legacy.ignored]
    return Reading(config, problems, legacy.ignored)


def _leader(cls: type[Any], written: dict[str, Any], path: str) -> str:
    """The option whose value that at `path` has, because it is written as `${option}` or follows it; or ''."""
    value: Any = written
    for name in path.split("."):
        value = cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
    if value is None:
        return cls.FOLLOWERS.get(path, "") if issubclass(cls, BaseExperimentConfig) else ""
    copied = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    return copied[1] if copied else ""


def _is_about(problem: ConfigProblem, suspects: Collection[str]) -> bool:
    """Whether the problem names one of the suspect options, by its full or its last name."""
    path, text = f"{problem.path}.", problem.message
    return any(
        path.startswith(f"{name}.") or name in text or f"{name.rpartition('.')[2]}=" in text for name in suspects
    )


def _help_section(argv: Sequence[str]) -> str | None:
    """The section after --help, empty without one; None without --help."""
    flag = next((index for index, word in enumerate(argv) if word in ("--help", "-h")), None)
    if flag is None:
        return None
    return next((word for word in argv[flag + 1 : flag + 2] if "=" not in word and not word.startswith("-")), "")


@dataclass(frozen=True, slots=True)
class _CommandLine:
    files: list[str] = field(default_factory=list[str])
    overrides: list[str] = field(default_factory=list[str])

    @property
    def source(self) -> str:
        return ", ".join(self.files)

    @property
    def typed(self) -> list[str]:
        """The paths of the overrides."""
        return [word.lstrip("+~").partition("=")[0].strip() for word in self.overrides]

    @staticmethod
    def parse(argv: Sequence[str]) -> _CommandLine:
        words = argv[1:] if argv and argv[0].endswith(".py") else argv
        parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--config", action="append", default=[])
        try:
            known, rest = parser.parse_known_args(words)
        except ArgumentError:
            raise _bad_word("--config", "needs a file: --config FILE.yaml") from None
        for word in rest:
            if word.startswith("-"):
                advice = "unknown flag; options are written key.sub=value after --config FILE.yaml"
                raise _bad_word(public_text(word), advice)
        files = [word for word in rest if word.endswith((".yaml", ".yml")) and "=" not in word]
        if files:
            raise _bad_word(files[0], f"is a file: write --config {files[0]}")
        if not known.config:
            raise _bad_word("--config", "is missing: add --config FILE.yaml (`areal config SECTION` shows its options)")
        return _CommandLine(known.config, rest)

    def kind(self, *, allow_unknown: bool) -> tuple[type[BaseExperimentConfig], dict[str, Any]]:
        """The kind of training, and what the user wrote for it."""
        tree = self.given(GRPOConfig)
        cls = kind_of(tree, allow_unknown=allow_unknown)
        return cls, tree if cls is GRPOConfig else self.given(cls)

    def given(self, cls: type[Any]) -> dict[str, Any]:
        """What the user wrote for a `cls`, files and overrides merged, interpolations unresolved."""
        tree, *others = [_read_yaml(Path(name), cls) for name in self.files]
        try:
            for other in others:
                tree = _merged(tree, other)
        except TypeError:
            problem = "one file gives a list where another gives a mapping: make them agree"
            raise _unreadable(self.source, problem) from None
        wrong = [rejected for word in self.overrides if (rejected := _override(tree, word, cls)) is not None]
        problems = [ConfigProblem(path, message, "config.bad_override") for path, message in wrong]
        raise_problems([*problems, *_not_storable(tree)], self.source, self.typed)
        return tree


def _merged(tree: Any, other: Any) -> Any:
    """`other` laid over `tree`. TypeError when one has a list where the other has a mapping."""
    if {dict, list} == {type(tree), type(other)}:
        raise TypeError
    if not isinstance(tree, dict) or not isinstance(other, dict):
        return other
    below, above = cast("dict[str, Any]", tree), cast("dict[str, Any]", other)
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


def _bad_word(word: str, message: str) -> ConfigError:
    return ConfigError(f"{word}: {message}", problems=[ConfigProblem(word, message, "config.bad_override")])


def _unreadable(path: Path | str, message: str) -> ConfigError:
    problem = ConfigProblem(str(path), message, "config.unreadable_file")
    return ConfigError(str(problem), problems=[problem])


def _read_yaml(path: Path, cls: type[Any]) -> dict[str, Any]:
    if path.is_dir():
        raise _unreadable(path, "is a directory: give the YAML file in it")
    if not path.is_file():
        raise _unreadable(path, "no such configuration file")
    try:
        tree = yaml_value(path.read_text(encoding="utf-8"), cls)
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"is not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except (*UNREADABLE, OSError) as error:
        raise _unreadable(path, f"not readable as YAML: {reason_of(error)}") from None
    if isinstance(tree, dict):
        return cast("dict[str, Any]", tree)
    if tree is None:
        raise _unreadable(path, "is empty: a configuration is a mapping of keys to values")
    kind = "list" if isinstance(tree, list) else "single value"
    raise _unreadable(path, f"holds a {kind}: a configuration is a mapping of keys to values")


def _override(tree: dict[str, Any], word: str, cls: type[Any]) -> tuple[str, str] | None:
    """Apply one override to `tree`; a value replaces what was there. Returns (key or word, what is wrong with it)."""
    deletes = word.startswith("~")
    prefix = "~" if deletes else "++" if word.startswith("++") else "+"
    path, equals, text = word.removeprefix(prefix).partition("=")
    path = path.strip()
    *parents, last = path.split(".")
    if not equals and not deletes:
        return public_text(word), "is not an override: write key.sub=value"
    if not all((*parents, last)):
        return word, "has an empty name in its key: write key.sub=value"
    try:
        value = override_value(text, cls, path) if equals else None
    except UNREADABLE as error:
        reason = reason_of(error) if public(text, path) == text else "quote it"
        if isinstance(error, yaml.MarkedYAMLError) and "${" in text:
            reason += ": put ${...} in quotes"
        return path, f"{shown(text, path)} is not readable as a YAML value: {reason}"
    node = tree
    for depth, name in enumerate(parents, start=1):
        below = node.get(name)
        if isinstance(below, str) and (spec := find_field(cls, ".".join(parents[:depth]))) and spec.kind:
            below = node[name] = {"name": below}
        if (below is None or below == MISSING) and not deletes:
            below = node[name] = {}
        if below is not None and not isinstance(below, dict):
            section = ".".join(parents[:depth])
            return path, f"cannot be set: {section} is {shown(below, section)}, not a section"
        node = cast("dict[str, Any]", below or {}) if deletes else cast("dict[str, Any]", below)
    if not deletes:
        node[last] = value
    elif last not in node and find_field(cls, path) is None:
        return path, f"cannot be deleted with {word}: there is no such key"
    elif equals and node.get(last) != value:
        return path, f"is not deleted, because its value is {shown(node.get(last), path)}: write ~{path}"
    else:
        node.pop(last, None)
    return None


def _not_storable(tree: dict[str, Any]) -> Iterator[ConfigProblem]:
    """Values that cannot be written to a file and read again."""
    for key, value in tree.items():
        try:
            if _depth(value) > MAX_DEPTH:
                raise RecursionError
            json.dumps(value, ensure_ascii=False, default=repr).encode()
        except (ValueError, RecursionError) as error:
            yield ConfigProblem(str(key), f"cannot be stored: {reason_of(error)}", "config.wrong_type")


def _depth(value: Any) -> int:
    children: list[Any] = list(cast("dict[Any, Any]", value).values()) if isinstance(value, dict) else []
    if isinstance(value, list):
        children = cast("list[Any]", value)
    return 1 + max(map(_depth, children), default=0)


def _build(
    cls: type[T], line: _CommandLine, written: dict[str, Any], *, allow_unknown_top_level: bool, is_quiet: bool = False
) -> T:
    tree, broken = _resolved(cls, written) if _has_interpolation(written) else (None, {})
    reading = read(cls, written, tree, unresolved=broken, allow_unknown_top_level=allow_unknown_top_level)
    unresolved = [ConfigProblem(path, text, "config.unresolved_interpolation") for path, text in broken.items() if text]
    raise_problems([*unresolved, *reading.problems], line.source, line.typed)
    if reading.ignored and not is_quiet:
        # The saved configuration lacks these keys, so that the children of a launcher do not repeat this.
        names = ", ".join(reading.ignored)
        logging.getLogger("areal.config").warning("these options have no effect in areal and are ignored: %s", names)
    assert reading.config is not None  # a missing value is a problem
    return reading.config


def _has_interpolation(value: Any) -> bool:
    """Whether a text in `value` holds an interpolation. Only then OmegaConf is needed, which takes most of a load."""
    if isinstance(value, dict):
        return any(map(_has_interpolation, cast("dict[Any, Any]", value).values()))
    if isinstance(value, list):
        return any(map(_has_interpolation, cast("list[Any]", value)))
    return isinstance(value, str) and "${" in value


def _resolved(cls: type[Any], sections: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of `given`, interpolations resolved; and path -> why for those that cannot be.

    An interpolation that cannot be resolved is removed, so that the default takes its place. The reason is empty where
    another entry reports the cause: a target without a value, or a chain of copies.
    """
    from omegaconf import DictConfig, ListConfig, OmegaConf

    sections = with_followers(cls, sections)
    config = OmegaConf.create(with_defaults(cls, sections))  # they may refer to defaults
    broken: list[tuple[DictConfig | ListConfig, Any, str, str, str]] = []
    texts: list[tuple[DictConfig | ListConfig, Any, str, str]] = []

    def visit(node: DictConfig | ListConfig, path: str) -> None:
        keys: list[Any] = list(node) if isinstance(node, DictConfig) else list(reversed(range(len(node))))
        for key in keys:
            here = f"{path}[{key}]" if isinstance(node, ListConfig) else f"{path}.{key}" if path else str(key)
            if OmegaConf.is_interpolation(node, key):
                reason = _why_unresolvable(node, key)
                spec = find_field(cls, here)
                if reason is not None:
                    raw = cast("dict[Any, Any]", OmegaConf.to_container(node, resolve=False))
                    broken.append((node, key, here, raw[key], reason))
                elif spec is not None and spec.hint in (int, float, bool) and isinstance(node[key], str):
                    texts.append((node, key, here, node[key]))
            elif not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig | ListConfig):
                visit(node[key], here)

    visit(config, "")
    for node, key, *_ in broken:
        del node[key]
    for node, key, path, text in texts:
        # `seed: ${oc.env:SEED}` gives text; it becomes a number here, so that copies (`${seed}`) are numbers too.
        node[key] = _number_or_text(text, cls, path)
    problems: dict[str, str] = {}
    for _, _, path, written, reason in broken:
        copied = any("${" + other + "}" in written for _, _, other, _, _ in broken if other != path)
        problems[path] = "" if copied or not reason else f"{written} cannot be resolved: {reason}"
    return _picked(cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True)), sections), problems


def _picked(tree: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """The keys of `given` in `tree`; a key that `tree` lacks is left out."""
    picked: dict[str, Any] = {}
    for key, value in written.items():
        below = tree.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            picked[key] = _picked(cast("dict[str, Any]", below), cast("dict[str, Any]", value))
        elif key in tree:
            picked[key] = below
    return picked


def _number_or_text(text: str, cls: type[Any], path: str) -> Any:
    try:
        return override_value(text, cls, path)
    except UNREADABLE:
        return text


def _why_unresolvable(node: DictConfig | ListConfig, key: Any) -> str | None:
    """Why node[key] cannot be resolved; '' when its target has no value, which is reported there; None = it can."""
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

    try:
        value = node[key]
        if isinstance(value, DictConfig | ListConfig):
            OmegaConf.to_container(value, resolve=True)
    except InterpolationToMissingValueError:
        return ""
    except RecursionError:
        return "it refers to itself"
    except (OmegaConfBaseException, ValueError) as error:
        return reason_of(error)
    return None
