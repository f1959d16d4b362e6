"""`areal config import`: a configuration of another system as one of ours, with the origin of every line."""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal.api.errors import ConfigError, InputError
from areal.importers.cosmos import from_cosmos
from areal.importers.draft import Draft, Note, flat
from areal.importers.hydra import composed
from areal.importers.own import from_areal
from areal.importers.roll import from_roll
from areal.importers.script import script_words
from areal.importers.text import report_json, report_lines, yaml_text
from areal.importers.verl import from_verl
from areal.system.durable import write_atomic

SYSTEMS: dict[str, Callable[[dict[str, Any]], Draft]] = {
    "verl": lambda tree: from_verl(flat(tree)),
    "roll": lambda tree: from_roll(flat(tree)),
    "cosmos": lambda tree: from_cosmos(flat(tree)),
    "areal": from_areal,
}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def import_config(words: Sequence[str]) -> int:
    """`areal config import SYSTEM FILE [key=value ...] [-o OUT.yaml] [--json]`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="areal config import",
        description="Translate a configuration. The YAML has the origin of each line as a comment; the report says for "
        "each key whether it was kept, computed, passed to the servers, dropped (and why), or has no counterpart.",
    )
    parser.add_argument("system", choices=list(SYSTEMS))
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML or TOML, or a shell script with key=value words")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options in the words of the other system")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="write the YAML there (default: print it)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = parser.parse_intermixed_args(words)
    tree = composed(_read(given.file), given.file, _read)
    for word in given.overrides:
        _put(tree, word)
    known, unknown = _resolved(tree)
    draft = SYSTEMS[given.system](known)
    if all(note.fate in ("dropped", "missing") for note in draft.notes.values()):
        keys = ", ".join(list(draft.values)[:3]) or "no keys"
        raise _unreadable(given.file, f"it is no configuration of {draft.system}; it has {keys}")
    for key, (value, why) in unknown.items():
        draft.values[key], draft.notes[key] = value, Note("missing", f"give {key}=VALUE after the file: {why}")
    draft.refer({key: found[1] for key, value in flat(tree).items() if (found := _REFERENCE.fullmatch(str(value)))})
    text = yaml_text(draft, given.file.name)
    if given.output is not None:
        _write(given.output, text)
    if given.json:
        sys.stdout.write(json.dumps(report_json(draft), indent=1, default=str) + "\n")
        return 0
    sys.stdout.write("" if given.output is not None else text)
    sys.stderr.write("\n".join(report_lines(draft)) + "\n")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        message = f"--output {path} cannot be written: {error.strerror or error}"
        raise InputError(message, code="command.not_written") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".sh":
            return _script_tree(text)
        found: Any = _toml(text) if path.suffix == ".toml" else _yaml(text)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError) as error:
        raise _unreadable(path, " ".join(str(error).split())) from error
    if not isinstance(found, dict) or not found:
        raise _unreadable(path, "it is no mapping of keys to values" if found else "it is empty")
    return cast("dict[str, Any]", found)


def _script_tree(text: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for word in script_words(text):
        _put(tree, word)
    return tree


def _toml(text: str) -> Any:
    """The value of TOML; dates are text."""
    return json.loads(json.dumps(tomllib.loads(text), default=str))


def _yaml(text: str) -> Any:
    """The value of YAML as the other systems read it: 1e-6 is a number, and 2026-01-31 is text."""
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why}", code="config.unreadable_file")


def _put(tree: dict[str, Any], word: str) -> None:
    """Set `key.sub=value` in a tree."""
    key, equals, text = word.lstrip("+").partition("=")
    *sections, name = key.split(".")
    if not equals or not name:
        raise ConfigError(f"{word}: write key.sub=value", code="config.bad_override")
    place: dict[str, Any] = tree
    for section in sections:
        below = place.get(section)
        place[section] = place = cast("dict[str, Any]", below) if isinstance(below, dict) else {}
    try:
        place[name] = _yaml(f"value: {text}")["value"]
    except yaml.YAMLError as error:
        raise ConfigError(f"{word}: the value is no YAML", code="config.bad_override") from error


def _resolved(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, str]]]:
    """The tree with the values of its interpolations; and the keys whose interpolation has none, with the reason."""
    unknown: dict[str, tuple[Any, str]] = {}

    def visit(node: DictConfig, prefix: str) -> None:
        for name in list(node):
            key, is_section = f"{prefix}{name}", not OmegaConf.is_interpolation(node, name)
            try:
                value = node[name]
                if isinstance(value, DictConfig) and value and is_section:
                    visit(value, f"{key}.")
                    if not value:  # all of it is unknown
                        del node[name]
                elif isinstance(value, DictConfig | ListConfig):
                    OmegaConf.to_container(value, resolve=True)
            except OmegaConfBaseException as error:
                written = cast("dict[Any, Any]", OmegaConf.to_container(node, resolve=False))[name]
                unknown[key] = written, str(error).partition("\n")[0]
                del node[name]

    config = cast("DictConfig", OmegaConf.create(dict(tree)))
    visit(config, "")
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True)), unknown
