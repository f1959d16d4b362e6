"""From a command line to a config: YAML files, dotted overrides, interpolation; and from a config back to YAML."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import sys
from argparse import ArgumentError, ArgumentParser
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from areal.api.config.experiment import BaseExperimentConfig, GRPOConfig, completed
from areal.api.config.help import help_text
from areal.api.config.kinds import KINDS, kind_of
from areal.api.config.legacy import LegacyKeys
from areal.api.config.legacy_rules import legacy_rule
from areal.api.config.redaction import public, public_text, without_secrets
from areal.api.config.schema import MISSING, fields_of, find_field
from areal.api.config.validate import conflicts, missing_values, raise_problems, shown, validated
from areal.api.config.yaml_text import (
    MAX_DEPTH,
    UNREADABLE,
    composed_yaml,
    override_value,
    reason_of,
    with_numbers,
    with_quotes,
    written_numbers,
)
from areal.api.errors import ConfigError, ConfigProblem

T = TypeVar("T")


def load_config(argv: Sequence[str], cls: type[T]) -> T:
    """Read `[script.py] --config FILE.yaml [key.sub=value ...]` into a checked `cls`.

    Overrides are written `key=value`, `+key=value` or `++key=value` (all the same); `~key` restores the default.
    Raises ConfigError with every problem. `--help [SECTION]` prints the options of `cls` and exits.
    """
    if (section := _help_section(argv)) is not None:
        sys.stdout.write(help_text(cls, section))
        raise SystemExit(0)
    return _build(cls, _CommandLine.parse(argv), allow_unknown_top_level=False)


def load_experiment(
    argv: Sequence[str], *, allow_unknown_top_level: bool = False, is_quiet: bool = False
) -> BaseExperimentConfig:
    """The same for a process that does not know the class: the sections of the file decide it, see kinds.py.

    `allow_unknown_top_level` is for runs with a user's script, whose own config class checks the keys it added.
    `is_quiet`: no log line about keys without effect, because the process loads the configuration again.
    """
    line = _CommandLine.parse(argv)
    cls = line.kind(allow_unknown=allow_unknown_top_level)
    return _build(cls, line, allow_unknown_top_level=allow_unknown_top_level, is_quiet=is_quiet)


def script_keys(argv: Sequence[str], script_text: str = "") -> dict[str, Any]:
    """The resolved top-level keys that only a user's script knows, for `save_config(..., extra=...)`.

    Raises ConfigError for a key that is spelled almost like a known one and does not occur in `script_text`.
    """
    line = _CommandLine.parse(argv)
    cls = line.kind(allow_unknown=True)
    tree = _resolved(cls, line.given(cls))[0]
    known = fields_of(cls)
    extra = {key: value for key, value in tree.items() if key not in known and legacy_rule(cls, key, "") is None}
    names = {name for kind in KINDS for name in fields_of(kind)}
    problems: list[ConfigProblem] = []
    for key in extra.keys() - names:
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
        if near and not re.search(rf"\b{re.escape(key)}\b", script_text):
            problems.append(ConfigProblem(key, f"unknown key; did you mean {near[0]}?", "config.unknown_key", near[0]))
    raise_problems(problems, line.source, line.typed)
    return extra


def script_numbers(argv: Sequence[str], keys: Collection[str]) -> dict[str, str]:
    """The numbers of the `keys` that only a script knows, as they are written, by path: its fields may be text."""
    line, found = _CommandLine.parse(argv), dict[str, str]()
    for name in line.files:
        found |= written_numbers(Path(name).read_text(encoding="utf-8"))
    for path, word in zip(line.typed, line.overrides, strict=True):
        if path.split(".")[0] in keys:
            found |= written_numbers(f"value: {word.partition('=')[2]}", path)
    return {path: number for path, number in found.items() if re.split(r"[.\[]", path)[0] in keys}


def save_config(
    config: Any, path: Path | str, *, extra: dict[str, Any] | None = None, numbers: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write `config` and `extra` keys as YAML, without secrets. The file is replaced atomically.

    `numbers`: path -> the number as the user wrote it, for `extra` keys.
    Returns environment variables with the secrets: where they are set, the file loads back equal.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tree, variables = without_secrets(asdict(config) | (extra or {}))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
        file.write(with_numbers(OmegaConf.to_yaml(OmegaConf.create(tree)), numbers or {}))
    temporary.replace(path)
    return variables


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
    given: dict[str, Any],
    resolved: dict[str, Any] | None = None,
    *,
    unresolved: Collection[str] = (),
    allow_unknown_top_level: bool = False,
) -> Reading[T]:
    """Read `given`, the values the user wrote, as a `cls`.

    `resolved` holds them with defaults and without interpolations; None = `given` has no interpolation. `unresolved`
    are the paths of interpolations that failed; they are reported elsewhere.
    """
    tree = completed(cls, given) if resolved is None else resolved
    legacy = LegacyKeys(tree, given)
    legacy.apply(cls)
    if allow_unknown_top_level:
        for key in tree.keys() - fields_of(cls).keys():
            del tree[key]
    missing = [problem for problem in missing_values(cls, tree) if problem.path not in unresolved]
    required = {problem.path for problem in missing}
    config, wrong = validated(cls, tree)
    problems = legacy.problems + missing + [problem for problem in wrong if problem.path not in required]
    if config is not None:
        # A conflict with a value that is not what the user meant would only confuse.
        suspects = {*unresolved, *(p.path for p in problems), *(p.suggestion for p in problems)} - {""}
        problems += [problem for problem in conflicts(config) if not _is_about(problem, suspects)]
    if isinstance(config, BaseExperimentConfig) and config.strict_config:
        text = "has no effect in areal: remove it"
        problems += [ConfigProblem(path, text, "config.no_effect") for path in legacy.ignored]
    return Reading(config, problems, legacy.ignored)


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
        if not known.config:
            raise _bad_word("--config", "is missing: add --config FILE.yaml (docs/config.md lists its options)")
        return _CommandLine(known.config, rest)

    def kind(self, *, allow_unknown: bool) -> type[BaseExperimentConfig]:
        """The kind of training."""
        return kind_of(self.given(GRPOConfig), allow_unknown=allow_unknown)

    def given(self, cls: type[Any]) -> dict[str, Any]:
        """What the user wrote for a `cls`, files and overrides merged, interpolations unresolved."""
        files = [_read_yaml(Path(name), cls) for name in self.files]
        try:
            merged = OmegaConf.merge(*files) if len(files) > 1 else files[0]
        except TypeError:
            problem = "one file gives a list where another gives a mapping: make them agree"
            raise _unreadable(self.source, problem) from None
        tree = cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=False))
        wrong = [found for word in self.overrides if (found := _override(tree, word, cls)) is not None]
        problems = [ConfigProblem(path, message, "config.bad_override") for path, message in wrong]
        raise_problems([*problems, *_not_storable(tree)], self.source, self.typed)
        return tree


def _bad_word(word: str, message: str) -> ConfigError:
    return ConfigError(f"{word}: {message}", problems=[ConfigProblem(word, message, "config.bad_override")])


def _unreadable(path: Path | str, message: str) -> ConfigError:
    problem = ConfigProblem(str(path), message, "config.unreadable_file")
    return ConfigError(str(problem), problems=[problem])


def _read_yaml(path: Path, cls: type[Any]) -> DictConfig:
    if path.is_dir():
        raise _unreadable(path, "is a directory: give the YAML file in it")
    if not path.is_file():
        raise _unreadable(path, "no such configuration file")
    try:
        text = path.read_text(encoding="utf-8")
        root = composed_yaml(text)
        if isinstance(root, yaml.MappingNode):
            return cast("DictConfig", OmegaConf.load(StringIO(with_quotes(text, root, cls))))
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"is not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except (*UNREADABLE, OSError) as error:
        raise _unreadable(path, f"not readable as YAML: {reason_of(error)}") from None
    if root is None:
        raise _unreadable(path, "is empty: a configuration is a mapping of keys to values")
    kind = "list" if isinstance(root, yaml.SequenceNode) else "single value"
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
        return path, f"{shown(text, path)} is not readable as a YAML value: {reason}"
    node = tree
    for depth, name in enumerate(parents, start=1):
        below = node.get(name)
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


def _build(cls: type[T], line: _CommandLine, *, allow_unknown_top_level: bool, is_quiet: bool = False) -> T:
    given = line.given(cls)
    tree, broken = _resolved(cls, given) if _has_interpolation(given) else (deepcopy(completed(cls, given)), {})
    reading = read(cls, given, tree, unresolved=broken, allow_unknown_top_level=allow_unknown_top_level)
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


def _resolved(cls: type[Any], given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of `given` and the defaults, interpolations resolved; and path -> why for those that cannot be.

    An interpolation that cannot be resolved is removed, so that the default takes its place. The reason is empty where
    another entry reports the cause: a target without a value, or a chain of copies.
    """
    config = OmegaConf.create(completed(cls, given))
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
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True)), problems


def _number_or_text(text: str, cls: type[Any], path: str) -> Any:
    try:
        return override_value(text, cls, path)
    except UNREADABLE:
        return text


def _why_unresolvable(node: DictConfig | ListConfig, key: Any) -> str | None:
    """Why node[key] cannot be resolved; '' when its target has no value, which is reported there; None = it can."""
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
