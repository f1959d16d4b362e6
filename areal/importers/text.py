"""A draft as a YAML file with a comment for each line, and as a report of losses."""

import json
from collections.abc import Iterator
from typing import Any

import yaml

from areal.api.config.redaction import public
from areal.importers.draft import Draft, Fate, Option

_TITLES: dict[Fate, str] = {
    "kept": "kept",
    "computed": "computed",
    "server": "passed to the servers",
    "dropped": "dropped",
    "missing": "missing",
}


def yaml_text(draft: Draft, source: str) -> str:
    """The configuration. Each line with a value has its origin as a comment."""
    tree: dict[str, Any] = {}
    for path, option in draft.options.items():
        *sections, name = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = option
    head = [f"# Translated from {source} ({draft.system}) by `areal config import`. Read the comments before a run."]
    missing = [
        f"# missing: {key}={_short(public(draft.values[key], key))}: {why}" for key, why in _of(draft, "missing")
    ]
    return "\n".join([*head, *missing, *_lines(tree, "")]) + "\n"


def _lines(tree: dict[str, Any], indent: str) -> Iterator[str]:
    for name, found in tree.items():
        if isinstance(found, Option):
            yield f"{indent}{name}: {_scalar(found.value)}  # {found.origin}"
        else:
            yield f"{indent}{name}:"
            yield from _lines(found, f"{indent}  ")


def _scalar(value: Any) -> str:
    """YAML in one line."""
    if isinstance(value, float) and value == value and abs(value) not in (float("inf"), 0.0):
        text = repr(value)
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("\n").removesuffix("\n...")


def _of(draft: Draft, fate: Fate) -> list[tuple[str, str]]:
    return [(key, note.text) for key, note in draft.notes.items() if note.fate == fate]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def report_lines(draft: Draft) -> Iterator[str]:
    """What became of each key of the source."""
    counts = ", ".join(f"{len(_of(draft, fate))} {title}" for fate, title in _TITLES.items())
    yield f"{len(draft.values)} keys of {draft.system}: {counts}"
    for fate, title in _TITLES.items():
        for key, text in _of(draft, fate):
            yield f"  {title}: {key}={_short(public(draft.values[key], key))} -> {text}"


def report_json(draft: Draft) -> dict[str, Any]:
    """The same, JSON-ready."""
    keys = [
        {"key": key, "value": public(draft.values[key], key), "fate": note.fate, "text": note.text}
        for key, note in draft.notes.items()
    ]
    options = {
        path: {"value": public(option.value, path), "origin": option.origin} for path, option in draft.options.items()
    }
    return {"system": draft.system, "keys": keys, "options": options}
