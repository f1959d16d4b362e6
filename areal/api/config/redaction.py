"""The one rule for secrets in what areal writes or prints: configurations, plans, commands, logs, trackers.

A value is secret when its name ends in a word such as `key`, `token`, `secret` or `password`, or when it is a URL with
a password. A written configuration refers to an environment variable in its place, which the launcher sets for its
processes. Plans, commands, logs and trackers show `HIDDEN`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

HIDDEN = "..."
_NAME = re.compile(r"(^|[^a-z])(api_?)?(key|token|secret|password|passwd|credentials?)$")
_NOT_SECRET = frozenset({"image_key", "source_key", "temperature_key"})
"""Options with the name of a column of the dataset."""
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_ASSIGNMENT = re.compile(r"(?P<name>[\w.-]+)(?P<sign>[\"']?(?:\s*=\s*|:\s+|:(?!//)))(?P<value>[^\s,}\]]+)")
"""`name=value`, `name: value` or `"name": value` in text."""
_VARIABLE_LISTS = ("inference_server_env_vars", "trainer_env_vars")
"""Options that contain environment variables, `A=1,B=2`. Only the launcher reads them."""


def is_secret(name: str, value: object = HIDDEN) -> bool:
    """Whether the value of an option, flag or environment variable called `name` is secret."""
    if not isinstance(value, str) or not value:
        return False
    plain = name.replace("-", "_").lower()
    return (plain not in _NOT_SECRET and _NAME.search(plain) is not None) or _PASSWORD_IN_URL.search(value) is not None


def public(tree: Any, path: str = "") -> Any:
    """A configuration, or the value of the option at dotted `path`, without secrets, to show it."""
    return _replaced(tree, path, lambda _, value: HIDDEN)


def public_text(text: str) -> str:
    """Text of another program or of a user: HIDDEN in place of `NAME=value` and `NAME: value` for a secret NAME, and of
    user and password in URLs."""
    shown = _ASSIGNMENT.sub(
        lambda match: f"{match['name']}{match['sign']}{HIDDEN}" if is_secret(match["name"]) else match[0], text
    )
    return _PASSWORD_IN_URL.sub(f"://{HIDDEN}@", shown)


def has_secret(text: str) -> bool:
    """Whether text such as a shell command assigns a secret, or contains a URL with a password.

    A reference to a variable (`TOKEN=$TOKEN`) and to a file (`--token-file x`) is no secret.
    """
    assignments = (match for match in _ASSIGNMENT.finditer(text) if not match["value"].lstrip("\"'").startswith("$"))
    return any(is_secret(match["name"]) for match in assignments) or _PASSWORD_IN_URL.search(text) is not None


def without_secrets(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A configuration as it is written to a file, and the environment variables to which it refers, with their values.

    Where a variable is not set, the file gives "" for it.
    """
    variables: dict[str, str] = {}

    def reference(path: str, value: str) -> str:
        name = "AREAL_SECRET_" + re.sub(r"\W+", "_", path).upper()
        variables[name] = value
        return f"${{oc.env:{name},''}}"

    replaced = _replaced(tree, "", reference, lambda text: text.replace("${", "\\${"))
    return replaced, variables


def public_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with HIDDEN in place of secret values."""
    return {name: HIDDEN if is_secret(name, value) else value for name, value in environ.items()}


def public_command(words: Sequence[str]) -> list[str]:
    """A command line with HIDDEN in place of the values of secret flags and of secret overrides (`key.sub=value`)."""
    shown: list[str] = []
    hides = False
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            hides = not equals and is_secret(flag)
            shown.append(f"{flag}={HIDDEN}" if equals and is_secret(flag, value) else word)
        elif equals and is_secret(flag.rpartition(".")[2], value):  # an override key.sub=value
            shown.append(f"{flag}={HIDDEN}")
        else:
            is_hidden = hides or (equals and is_secret(flag, value)) or is_secret("", word)
            shown.append((f"{flag}={HIDDEN}" if equals and not hides else HIDDEN) if is_hidden else word)
    return shown


def _replaced(
    tree: Any, path: str, replace: Callable[[str, str], str], keep: Callable[[str], str] = lambda text: text
) -> Any:
    """`tree` with `replace(path, value)` for secrets, and `keep(text)` for all other text."""
    name = path.rpartition(".")[2]
    if isinstance(tree, dict):
        items = cast("dict[Any, Any]", tree).items()
        return {key: _replaced(value, f"{path}.{key}" if path else str(key), replace, keep) for key, value in items}
    if isinstance(tree, list | tuple):
        items = enumerate(cast("list[Any]", tree))
        if is_secret(name):
            return [replace(f"{path}_{i}", item) if isinstance(item, str) else item for i, item in items]
        return [_replaced(item, f"{path}.{i}", replace, keep) for i, item in items]
    if is_secret(name, tree):
        return replace(path, tree)
    if name in _VARIABLE_LISTS and isinstance(tree, str):
        return keep(_without_secret_pairs(tree))
    return keep(tree) if isinstance(tree, str) else tree


def _without_secret_pairs(text: str) -> str:
    """`A=1,B_TOKEN=x` -> `A=1`. A comma in a value is written with a backslash."""
    pairs = re.split(r"(?<!\\),", text)
    return ",".join(pair for pair in pairs if not is_secret(*pair.strip().partition("=")[::2]))
