"""Owns the way from a command line to a config: YAML files, dotted overrides, interpolation, and back to YAML."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from yaml import YAMLError

from areal.api.config.convert import Reader, with_defaults
from areal.api.config.experiment import BaseExperimentConfig, GRPOConfig
from areal.api.config.help import help_text
from areal.api.config.kinds import help_of_kinds, kind_of, kind_of_section
from areal.api.config.legacy import legacy_rule
from areal.api.config.schema import fields_of, find_field
from areal.api.config.validate import problems_of, raise_problems
from areal.api.errors import ConfigError

T = TypeVar("T")


def load_config(argv: Sequence[str], cls: type[T]) -> T:
    """Read `[script.py] --config FILE.yaml [key.sub=value ...]` into a checked `cls`.

    Raises ConfigError naming every problem. `--help [SECTION]` prints the options of `cls` and exits.
    """
    line = _CommandLine.parse(argv)
    if line.help_section is not None:
        sys.stdout.write(help_text(cls, line.help_section))
        raise SystemExit(0)
    return _build(cls, _given(line, cls), line.source, allow_unknown_top_level=False)


def load_experiment(argv: Sequence[str], *, allow_unknown_top_level: bool = False) -> BaseExperimentConfig:
    """The same for a launcher, which does not know the class: the sections in the file tell it, see kinds.py.

    `allow_unknown_top_level` is for runs with a user's script: its own config class checks the keys it added.
    """
    line = _CommandLine.parse(argv)
    if line.help_section is not None:
        cls = _kind(line, allow_unknown=True)[0] if line.files else kind_of_section(line.help_section)
        sys.stdout.write(help_text(cls, line.help_section))
        if not line.help_section and not line.files:
            sys.stdout.write(help_of_kinds())
        raise SystemExit(0)
    cls, given = _kind(line, allow_unknown=allow_unknown_top_level)
    return _build(cls, given, line.source, allow_unknown_top_level=allow_unknown_top_level)


def script_keys(argv: Sequence[str]) -> dict[str, Any]:
    """The resolved top-level keys that only a user's script knows, for `save_config(..., extra=...)`."""
    cls, given = _kind(_CommandLine.parse(argv), allow_unknown=True)
    merged = OmegaConf.create(with_defaults(cls, given))
    _drop_broken_interpolations(merged)
    tree = cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=True))
    known = fields_of(cls)
    return {key: value for key, value in tree.items() if key not in known and legacy_rule(cls, key, "") is None}


def save_config(config: Any, path: Path | str, *, extra: dict[str, Any] | None = None) -> None:
    """Write `config` and `extra` keys as YAML that loads back equal. The file appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = OmegaConf.to_yaml(OmegaConf.create(_escaped(asdict(config) | (extra or {}))))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


@dataclass(frozen=True, slots=True)
class _CommandLine:
    files: list[str] = field(default_factory=list[str])
    overrides: list[str] = field(default_factory=list[str])
    help_section: str | None = None

    @property
    def source(self) -> str:
        return ", ".join(self.files)

    @staticmethod
    def parse(argv: Sequence[str]) -> _CommandLine:
        words = list(argv[1:] if argv and argv[0].endswith(".py") else argv)
        files: list[str] = []
        overrides: list[str] = []
        help_section: str | None = None
        while words:
            word = words.pop(0)
            if word in ("--help", "-h"):
                wanted = bool(words) and "=" not in words[0] and not words[0].startswith("-")
                help_section = words.pop(0) if wanted else ""
            elif word.startswith("--config="):
                files.append(word.removeprefix("--config="))
            elif word == "--config":
                if not words:
                    raise ConfigError("--config needs a file: --config FILE.yaml")
                files.append(words.pop(0))
            elif help_section is None and word.startswith("-"):
                raise ConfigError(f"unknown flag {word}: options are written key.sub=value after --config FILE.yaml")
            else:
                overrides.append(word)
        if help_section is not None:
            return _CommandLine(files, help_section=help_section)
        if not files:
            raise ConfigError("no configuration file given: add --config FILE.yaml (--help lists every option)")
        return _CommandLine(files, overrides)


def _given(line: _CommandLine, cls: type[Any]) -> dict[str, Any]:
    """What the user wrote, files and overrides together; interpolations stay as they are."""
    files = [_read_yaml(Path(name)) for name in line.files]
    try:
        merged = OmegaConf.merge(*files) if len(files) > 1 else files[0]
    except TypeError:
        raise ConfigError(
            f"{line.source}: one file gives a list where another gives a mapping: make them agree"
        ) from None
    tree = cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=False))
    problems = [problem for word in line.overrides if (problem := _override(tree, word, cls)) is not None]
    raise_problems(problems)
    return tree


def _kind(line: _CommandLine, *, allow_unknown: bool) -> tuple[type[BaseExperimentConfig], dict[str, Any]]:
    """The kind of training and what the user wrote, its text options read as text."""
    cls = kind_of(_given(line, GRPOConfig), allow_unknown=allow_unknown)
    return cls, _given(line, cls)


def _read_yaml(path: Path) -> DictConfig:
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    try:
        loaded = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {_one_line(error)}") from None
    if isinstance(loaded, ListConfig):
        raise ConfigError(f"{path}: holds a list; a configuration is a mapping of keys to values")
    return loaded


def _override(tree: dict[str, Any], word: str, cls: type[Any]) -> tuple[str, str] | None:
    """Write one `key.sub=value` into `tree`; the value replaces what was there. Returns a problem, if any."""
    path, equals, text = word.removeprefix("+").partition("=")
    path = path.strip()
    if not equals:
        return word, "is not an override: write key.sub=value"
    if not all(path.split(".")):
        return word, "has an empty name in its key: write key.sub=value"
    *parents, last = path.split(".")
    node = tree
    for depth, name in enumerate(parents):
        below = node.get(name)
        if below is None or below == "???":
            below = node[name] = {}
        if not isinstance(below, dict):
            return path, f"cannot be set: {'.'.join(parents[: depth + 1])} is {below!r}, not a section"
        node = cast("dict[str, Any]", below)
    try:
        node[last] = _override_value(text, find_field(cls, path))
    except (YAMLError, OmegaConfBaseException) as error:
        return path, f"{text!r} is not readable as a YAML value: {_one_line(error)}"
    return None


def _override_value(text: str, spec: Any) -> Any:
    """Text fields take their text as it stands (007, 1e-3, yes); everything else is read as YAML."""
    text = text.strip()
    if spec is not None and spec.hint is str and text != "null" and text[:1] not in ("'", '"'):
        return text
    loaded = OmegaConf.create(f"value: {text}")
    return cast("dict[str, Any]", OmegaConf.to_container(loaded, resolve=False))["value"]


def _build(cls: type[T], given: dict[str, Any], source: str, *, allow_unknown_top_level: bool) -> T:
    merged = OmegaConf.create(with_defaults(cls, given))
    broken = _drop_broken_interpolations(merged)
    tree = cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=True))
    reader = Reader(cls, tree, allow_unknown_top_level, suspects=set(broken))
    config = reader.read(cls)
    problems = [(path, text) for path, text in broken.items() if text] + reader.issues
    for path, text, _ in problems_of(config):
        if path not in reader.suspects and not any(_mentions(text, suspect) for suspect in reader.suspects):
            problems.append((path, text))
    raise_problems(problems, source)
    if reader.ignored:
        # Children read the resolved file, in which these keys are gone: this is said once per run.
        logging.getLogger("areal.config").warning(
            "ignored, because nothing here reads them: %s", ", ".join(reader.ignored)
        )
    return config


def _mentions(text: str, path: str) -> bool:
    """Whether a sentence speaks about `path`, by its full or its last name."""
    return bool(path) and (path in text or f"{path.rpartition('.')[2]}=" in text)


def _drop_broken_interpolations(config: DictConfig) -> dict[str, str]:
    """Remove every `${...}` that cannot be resolved, so that defaults stand in. Returns path -> why.

    The reason is empty where another entry already tells the cause: a target that misses its value, a chain of copies.
    """
    broken: list[tuple[DictConfig | ListConfig, Any, str, str, str]] = []

    def visit(node: DictConfig | ListConfig, path: str) -> None:
        keys: list[Any] = list(node) if isinstance(node, DictConfig) else list(reversed(range(len(node))))
        for key in keys:
            here = f"{path}[{key}]" if isinstance(node, ListConfig) else f"{path}.{key}" if path else str(key)
            if OmegaConf.is_interpolation(node, key):
                reason = _why_unresolvable(node, key)
                if reason is not None:
                    raw = cast("dict[Any, Any]", OmegaConf.to_container(node, resolve=False))
                    broken.append((node, key, here, raw[key], reason))
            elif not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig | ListConfig):
                visit(node[key], here)

    visit(config, "")
    for node, key, *_ in broken:
        del node[key]
    problems: dict[str, str] = {}
    for _, _, path, written, reason in broken:
        copied = any("${" + other + "}" in written for _, _, other, _, _ in broken if other != path)
        problems[path] = "" if copied or not reason else f"{written} cannot be resolved: {reason}"
    return problems


def _why_unresolvable(node: DictConfig | ListConfig, key: Any) -> str | None:
    """Why node[key] cannot be resolved; '' when its target misses a value, which is reported there; None = fine."""
    try:
        value = node[key]
        if isinstance(value, DictConfig | ListConfig):
            OmegaConf.to_container(value, resolve=True)
    except InterpolationToMissingValueError:
        return ""
    except RecursionError:
        return "it leads back to itself"
    except (OmegaConfBaseException, ValueError) as error:
        return _one_line(error)
    return None


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in cast("list[Any]", value)]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("full_key:", "object_type=")))
