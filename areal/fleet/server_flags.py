"""Checks of the flags that a config section (`sglang:`, `vllm:`) passes to a foreign server; their command line form.

Only the installed server knows whether a flag exists and which values it takes: it reports that when it starts.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from areal.api.config.redaction import HIDDEN, is_secret

Flags = Mapping[str, Any]
Problems = Iterable[tuple[str, str]]
"""(path of a configuration key, a sentence that says what is wrong and what to change)."""
_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")

ALLOCATED = "allocation_mode sets it"
LISTENS = "areal chooses free ports on loopback"
ONE_PROCESS = "areal uses one HTTP process of each server"
ONE_GROUP = "areal stops a server as one process group"
OWN_GPUS = "areal assigns the GPUs of each server"
GETS_ADAPTERS = "the servers get the adapters of actor.lora"
NO_KEY = "servers that areal starts listen on loopback only and require no key"
COMMON_OWNED = {
    **dict.fromkeys(("host", "port"), LISTENS),
    **dict.fromkeys(("tp", "tensor_parallel_size", "node_rank"), ALLOCATED),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile"), "areal speaks plain HTTP to its servers"),
    "grpc_port": ONE_PROCESS,
    "api_key": NO_KEY,
    "config": "write the flags of that file here",
}
"""`FlagRules.owned` of every foreign server."""
COMMON_FIXED = {
    **dict.fromkeys(("data_parallel_size", "pipeline_parallel_size"), (1, ALLOCATED)),
    "nnodes": (1, ALLOCATED),
}
"""`FlagRules.fixed` of every foreign server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagRules:
    """What areal knows about the flags of one kind of foreign server. Names are plain: underscores, no dashes."""

    seed: str
    tokenizer: str
    owned: Mapping[str, str]
    """Flags that areal sets itself -> why the user cannot set them."""
    fixed: Mapping[str, tuple[Any, str]]
    """Flags that must have one value -> the value and why no other works."""
    negatable: bool
    """Whether a switch that is on by default is written as --no-... to turn it off."""
    bare: frozenset[str] = frozenset()
    """Switches without a --no-... form: false leaves them out."""
    ignored: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    """Keys of AReaL files that this server does not read, or whose value areal chooses -> the values that may be
    dropped; () = all values."""
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Flags with lists -> items of AReaL files and their names on this server."""


def plain_name(key: str) -> str:
    """The name of a flag with underscores and without leading dashes."""
    return key.lstrip("-").replace("-", "_")


def is_unset(value: Any) -> bool:
    """Whether a value leaves its flag out: null, "" and [], as in AReaL's files."""
    return value is None or value in ("", [])


def _is_ignored(rules: FlagRules, key: str, value: Any) -> bool:
    name = plain_name(key)
    return name in rules.ignored and (not rules.ignored[name] or value in rules.ignored[name])


def given_flags(rules: FlagRules, flags: Flags) -> dict[str, Any]:
    """The flags that reach the server, by plain name and with its values: without unset and ignored ones."""
    found = {
        plain_name(key): value
        for key, value in flags.items()
        if not is_unset(value) and not _is_ignored(rules, key, value)
    }
    for name, names in rules.renamed.items():
        if isinstance(items := found.get(name), list):
            found[name] = [names.get(str(item), item) for item in cast("list[Any]", items)]
    return found


def ignored_flags(rules: FlagRules, flags: Flags) -> list[str]:
    """Keys that a user set and that have no effect on this kind of server."""
    return [
        key
        for key, value in flags.items()
        if _is_ignored(rules, key, value) and not is_unset(value) and value is not False
    ]


def flag_problems(section: str, rules: FlagRules, flags: Flags) -> Problems:
    """Every problem of a section that can be found without the server. Paths start with `section`."""
    seen: set[str] = set()
    for key, value in flags.items():
        name, path = plain_name(str(key)), f"{section}.{key}"
        if not _FLAG.fullmatch(str(key)):
            yield path, f"is not the name of a flag: write {name or 'it'} as the server's --help does, without --"
        elif name in seen:
            yield path, "is given twice, with dashes and with underscores: keep one"
        elif name in rules.owned and not is_unset(value):
            shown = HIDDEN if is_secret(name, value) else repr(value)
            yield path, f"{shown} cannot be set here, {rules.owned[name]}: remove it"
        elif is_secret(name, value):
            text = "would be in the list of processes: use launcher.inference_server_env_vars, for example HF_TOKEN=..."
            yield path, text
        elif name in rules.fixed and not is_unset(value) and value != rules.fixed[name][0]:
            expected, why = rules.fixed[name]
            shown = str(expected).lower() if isinstance(expected, bool) else expected
            yield path, f"{value!r} cannot be set here, {why}: remove it or set it to {shown}"
        elif problem := _value_problem(value):
            yield path, problem
        elif name == rules.seed and not is_unset(value) and not (type(value) is int and value >= 0):
            yield path, f"{value!r} is not a seed: use an integer of at least 0"
        seen.add(name)


def _value_problem(value: Any) -> str:
    if value == "???":
        return "is required: give it a value or remove it"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value!r} cannot be written on a command line: use a finite number"
    if isinstance(value, dict):
        inner = list(cast("dict[Any, Any]", value).values())
    elif isinstance(value, list):
        inner = cast("list[Any]", value)
    elif value is None or isinstance(value, bool | int | float | str):
        return "" if "\0" not in str(value) else "contains a zero byte: remove it"
    else:
        return f"{value!r} has a type that cannot be written on a command line: quote it"
    return next((problem for one in inner if (problem := _value_problem(one))), "")


def flag_words(rules: FlagRules, name: str, value: Any) -> list[str]:
    """The command line words of one flag. `name` is plain."""
    flag = name.replace("_", "-")
    if value is True:
        return [f"--{flag}"]
    if value is False:
        return [f"--no-{flag}"] if rules.negatable and name not in rules.bare else []
    if isinstance(value, list):
        return [f"--{flag}", *map(_word, cast("list[Any]", value))]
    return [f"--{flag}={_word(value)}"]


def _word(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, dict | list | bool) else str(value)
