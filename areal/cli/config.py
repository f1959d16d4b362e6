"""`areal config`: prints the effective configuration of a file or a run, or explains an option."""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal.api.config.experiment import GRPOConfig, Kind, kind_of, kind_of_section, sections
from areal.api.config.load import (
    UNREADABLE,
    default_text,
    help_text,
    load_experiment,
    override_value,
    reason_of,
    yaml_value,
)
from areal.api.config.redaction import public, public_text
from areal.api.config.schema import find_field, nearest, relevance_of, type_text
from areal.api.config.validate import shown
from areal.api.errors import ConfigError, InputError
from areal.importers.cosmos import from_cosmos
from areal.importers.draft import Draft, flat
from areal.importers.own import from_areal
from areal.importers.roll import from_roll
from areal.importers.script import composed, report_json, report_lines, script_words, yaml_text
from areal.importers.verl import from_verl
from areal.system.durable import write_atomic
from areal.system.run_paths import RunPaths, run_folder

# `areal config import`: a configuration of another system as one of ours, with the origin of every line.

SYSTEMS: dict[str, Callable[[dict[str, Any]], Draft]] = {
    "verl": lambda tree: from_verl(flat(tree)),
    "roll": lambda tree: from_roll(flat(tree)),
    "cosmos": lambda tree: from_cosmos(flat(tree)),
    "areal": from_areal,
}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def import_config(words: Sequence[str]) -> int:
    """`areal config import SYSTEM FILE [key=value ...] [-o OUT [--overwrite]] [--json]`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="areal config import",
        description="Translate a configuration. The YAML has the origin of each line as a comment; the report says for "
        "each key whether it was kept, computed, passed to the servers, dropped (and why), or has no counterpart.",
    )
    parser.add_argument("system", choices=list(SYSTEMS))
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML or TOML, or a shell script with key=value words")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options in the words of the other system")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="write the YAML there (default: print it)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT where it exists")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_intermixed_args(words)
    if args.output is not None:
        _check_output(args.output, args.file, may_replace=args.overwrite)
    if args.system == "areal":
        kind = kind_of(_given(args.file, args.overrides, GRPOConfig), allow_unknown=True)
        tree = _given(args.file, args.overrides, kind)
    else:
        tree = _given(args.file, args.overrides, None)
    unset = _of_shell(tree) if args.file.suffix == ".sh" else {}
    known, unknown = _resolved(tree)
    draft = SYSTEMS[args.system](known)
    if draft.is_foreign:
        keys, likely = ", ".join(list(draft.values)[:3]) or "no keys", _likely_system(known)
        hint = f": areal config import {likely} {args.file}" if likely else ""
        raise _unreadable(args.file, f"it is no configuration of {draft.system}; it has {keys}{hint}")
    for key, (value, why) in (unset | unknown).items():
        draft.unresolved(key, value, why)
    draft.refer(
        {key: reference[1] for key, value in flat(tree).items() if (reference := _REFERENCE.fullmatch(str(value)))}
    )
    text = yaml_text(draft, args.file.name)
    if args.output is not None:
        _write(args.output, text)
    if args.json:
        sys.stdout.write(json.dumps(report_json(draft), indent=1, default=str) + "\n")
        return 0
    sys.stdout.write("" if args.output is not None else text)
    sys.stderr.write("\n".join(report_lines(draft)) + "\n")
    return 0


def _likely_system(tree: dict[str, Any]) -> str:
    """The system that knows most keys of the tree; empty if it is foreign to each."""
    known: dict[str, int] = {}
    for system, translate in SYSTEMS.items():
        try:
            draft = translate(tree)
            known |= {} if draft.is_foreign else {system: draft.num_known}
        except ConfigError as error:  # unsupported: a file of the system that is not imported
            known |= {system: 1} if error.code == "config.unsupported" else {}
    return max(known, key=known.__getitem__, default="")


def _check_output(path: Path, source: Path, *, may_replace: bool) -> None:
    if path.exists() and source.exists() and path.samefile(source):
        raise InputError(f"--output {path} is the file to import: choose another one", code="config.output")
    if path.is_file() and not may_replace:
        raise InputError(f"--output {path} exists: choose another file, or add --overwrite", code="config.output")


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        message = f"--output {path} cannot be written: {error.strerror or error}"
        raise InputError(message, code="command.not_written") from error


def _given(file: Path, overrides: Sequence[str], kind: Kind | None) -> dict[str, Any]:
    """The values of a file and of overrides. With the `kind` of an AReaL file, as `load` reads them."""
    read = partial(_read, kind=kind)
    tree = composed(read(file), file, read)
    for word in overrides:
        key, equals, text = word.lstrip("+").partition("=")
        if not equals or not key.rpartition(".")[2]:
            raise ConfigError(f"{public_text(word)}: write key.sub=value", code="config.bad_override")
        try:
            _put(tree, key, _value(text, kind, key))
        except UNREADABLE as error:
            reason = reason_of(error) if public(text, key) == text else "quote it"
            message = f"{key}: {shown(text, key)} is not readable as a YAML value: {reason}"
            raise ConfigError(message, code="config.bad_override") from None
    return tree


def _read(path: Path, kind: Kind | None) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".sh":
            return _script_tree(text, kind)
        content: Any = _toml(text) if path.suffix == ".toml" else yaml_value(text, kind)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except UNREADABLE as error:
        raise _unreadable(path, reason_of(error)) from None
    if not isinstance(content, dict) or not content:
        raise _unreadable(path, "it is no mapping of keys to values" if content else "it is empty")
    return cast("dict[str, Any]", content)


def _script_tree(text: str, kind: Kind | None) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for word in script_words(text):
        key, _, written = word.lstrip("+").partition("=")
        try:
            value = _value(written, kind, key)
        except UNREADABLE:  # for example `date +%F`, whose value only a shell knows
            value = written.replace("${", "\\${")
        _put(tree, key, value)
    return tree


def _toml(text: str) -> Any:
    """The value of TOML; dates are text."""
    return json.loads(json.dumps(tomllib.loads(text), default=str))


def _value(text: str, kind: Kind | None, key: str) -> Any:
    return yaml_value(f"value: {text}", None)["value"] if kind is None else override_value(text, kind, key)


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why}", code="config.unreadable_file")


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    place = tree
    for section in sections:
        below = place.get(section)
        place[section] = place = cast("dict[str, Any]", below) if isinstance(below, dict) else {}
    place[name] = value


def _of_shell(tree: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, str]]:
    """Remove the keys whose value has a variable that the script does not set; their values, with the reason."""
    values: dict[str, tuple[Any, str]] = {}
    for name, value in list(tree.items()):
        if isinstance(value, dict) and value:
            values |= _of_shell(cast("dict[str, Any]", value), f"{prefix}{name}.")
            if not value:
                del tree[name]
        elif names := dict.fromkeys(re.findall(r"\$\w+", str(value))):
            values[f"{prefix}{name}"] = value, f"the value of {', '.join(names)} is not known"
            del tree[name]
    return values


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


def config(words: Sequence[str]) -> int:
    """`areal config --config FILE [key=value ...]`, or in place of --config: RUN, OPTION, `import SYSTEM FILE`."""
    if list(words[:1]) == ["import"]:
        return import_config(words[1:])
    parser = argparse.ArgumentParser(
        prog="areal config",
        usage="%(prog)s (--config FILE.yaml | RUN) [key.sub=value ...] [--json]\n       %(prog)s OPTION [--json]\n"
        "       %(prog)s import verl|roll|cosmos|areal FILE [key.sub=value ...] [-o OUT.yaml] [--json]",
        description="Print the effective configuration of a file or of a run, without secrets, explain an option, or "
        "import a configuration of another system.",
        epilog=f"Sections: {', '.join(sections())}.",
    )
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="several are merged in order")
    parser.add_argument("--json", action="store_true", help="print JSON instead of YAML or text")
    parser.add_argument("words", nargs="*", metavar="RUN | OPTION | key=value", help="for example actor.eps_clip")
    args = parser.parse_args(words)
    plain = [word for word in args.words if "=" not in word and not word.startswith("~")]
    if len(plain) + bool(args.config) != 1:
        parser.error("give --config FILE, or one RUN or OPTION")
    overrides = [word for word in args.words if word not in plain]
    if plain and (path := RunPaths(run_folder(plain[0])).config).is_file():
        text = _effective(["--config", str(path), *overrides], as_json=args.json)
    elif plain:
        text = _explained(plain[0], as_json=args.json)
    else:
        files = [word for path in args.config for word in ("--config", path)]
        text = _effective([*files, *overrides], as_json=args.json)
    sys.stdout.write(text)
    return 0


def _effective(words: Sequence[str], *, as_json: bool) -> str:
    tree = public(asdict(load_experiment(words, allow_unknown_top_level=True)))
    return json.dumps(tree, indent=1) + "\n" if as_json else OmegaConf.to_yaml(OmegaConf.create(tree))


def _explained(option: str, *, as_json: bool) -> str:
    kind = kind_of_section(option)
    try:
        text = help_text(kind, option)
    except ConfigError as error:
        section, _, key = option.rpartition(".")
        above = find_field(kind, section)
        if above is not None and above.is_section:
            guess = nearest(kind, section, above.hint, key)
        else:
            guess = nearest(kind, "", kind, option)
        advice = f"did you mean {guess}?" if guess else f"sections are {', '.join(sections())}"
        message = f"{option}: there is no such run, option or section; {advice}"
        raise ConfigError(message, code="config.unknown_key") from error
    if not as_json:
        return text
    spec = find_field(kind, option)
    assert spec is not None  # help_text found it
    condition = relevance_of(spec.entry)
    facts: dict[str, Any] = {
        "option": option, "type": "section" if spec.is_section else type_text(spec.hint),
        "choices": list(spec.choices), "range": spec.range_text, "nullable": spec.nullable,
        "default": default_text(spec).removeprefix("default "), "meaning": spec.sentence,
        "relevant_when": "" if condition is None else condition.words(option.rpartition(".")[0]),
    }  # fmt: skip
    return json.dumps(facts, indent=1) + "\n"
