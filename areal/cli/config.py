"""`areal config`: prints the effective configuration of a file or a run, or explains an option."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from areal.api.config.help import default_text, help_text
from areal.api.config.kinds import kind_of_section, sections
from areal.api.config.load import load_experiment
from areal.api.config.redaction import public
from areal.api.config.relevance import relevance_of
from areal.api.config.schema import find_field, nearest, type_text
from areal.api.errors import ConfigError
from areal.cli.import_config import import_config
from areal.system.run_paths import RunPaths, run_folder


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
        epilog=f"Sections: {', '.join(sections())}. docs/config.md lists all options.",
    )
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="several are merged in order")
    parser.add_argument("--json", action="store_true", help="print JSON instead of YAML or text")
    parser.add_argument("words", nargs="*", metavar="RUN | OPTION | key=value", help="for example actor.eps_clip")
    given = parser.parse_args(words)
    plain = [word for word in given.words if "=" not in word and not word.startswith("~")]
    if len(plain) + bool(given.config) != 1:
        parser.error("give --config FILE, or one RUN or OPTION")
    overrides = [word for word in given.words if word not in plain]
    if plain and (path := RunPaths(run_folder(plain[0])).config).is_file():
        text = _effective(["--config", str(path), *overrides], as_json=given.json)
    elif plain:
        text = _explained(plain[0], as_json=given.json)
    else:
        files = [word for path in given.config for word in ("--config", path)]
        text = _effective([*files, *overrides], as_json=given.json)
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
        "option": option,
        "type": "section" if spec.is_section else type_text(spec.hint),
        "choices": list(spec.choices),
        "range": spec.range_text,
        "nullable": spec.nullable,
        "default": default_text(spec).removeprefix("default "),
        "meaning": spec.sentence,
        "relevant_when": "" if condition is None else condition.words(option.rpartition(".")[0]),
    }
    return json.dumps(facts, indent=1) + "\n"
