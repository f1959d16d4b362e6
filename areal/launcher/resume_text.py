"""A run that its user stops and continues: the requests to stop, what would be lost, and what the user reads."""

import json
import shlex
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from areal.api.config import BaseExperimentConfig
from areal.api.config.load import save_config
from areal.api.config.redaction import public_command
from areal.launcher.preflight import newest_checkpoint, step_of
from areal.launcher.status import last_record
from areal.system.run_paths import RunPaths

_CHANGED = "areal: changed since the earlier run: "


class Interruptions:
    """Number of the user's requests to stop: Ctrl-C, SIGTERM or a closed terminal."""

    def __init__(self) -> None:
        self.count = 0
        self.may_wait = False
        """The first was Ctrl-C: a user waits, and may press it again. Other signals come with a time limit."""

    def add(self, number: int, _: object = None) -> None:
        """Signal handler. A terminal that closes may send SIGHUP several times, which is one request."""
        self.may_wait = self.may_wait or (number == signal.SIGINT and self.count == 0)
        self.count = max(self.count, 1) if number == signal.SIGHUP else self.count + 1


def trained_steps(paths: RunPaths) -> int:
    """Train steps of the metrics."""
    return (last_record(paths.metrics) or {}).get("step", 0)


def has_saved(paths: RunPaths, steps: int) -> bool:
    """Whether the newest recovery checkpoint contains `steps` train steps. One that a thread of the trainers was still
    writing may contain fewer."""
    saved = newest_checkpoint(paths)
    return (step_of(saved) if saved else 0) >= steps


def how_to_continue(newest: Path | None, mode: str, command: Sequence[str]) -> str:
    """The line after an interruption. `newest`: the newest recovery checkpoint; `command`: this process's words."""
    words = [word for word in public_command(command) if word != "--overwrite"]
    if len(words) > 1 and Path(words[1]).name == "areal":  # the console script
        words = ["areal", *words[2:]]
    words += [] if mode in ("auto", "resume") else ["recover.mode=auto"]
    place = f"saved as {newest.name}" if newest else "no recovery checkpoint yet, the finished episodes are kept"
    return f"areal: {place}; to continue: {shlex.join(words)}"


def read_tree(path: Path) -> dict[str, Any]:
    """The values of a configuration file by dotted path; empty when there is none that can be read."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return dict(_leaves("", tree)) if isinstance(tree, Mapping) else {}


def saved_tree(config: BaseExperimentConfig, extras: dict[str, Any], numbers: Mapping[str, str]) -> dict[str, Any]:
    """What `read_tree` would find after `save_config`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        save_config(config, path, extra=extras, numbers=numbers)
        return read_tree(path)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), below)
    else:
        yield path, value


def changes_text(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line per option that differs from the earlier run. Nothing when there was none.

    `recover.mode` is not shown, because it is how a run is continued.
    """
    missing = object()
    names = [name for name in dict.fromkeys([*before, *after]) if name != "recover.mode"] if before else []
    changed = [name for name in names if before.get(name, missing) != after.get(name, missing)]
    return [f"{_CHANGED}{name}: {before.get(name, 'unset')} -> {after.get(name, 'unset')}" for name in changed]


def keep_changes(paths: RunPaths, before: Mapping[str, Any]) -> list[str]:
    """The lines for options that differ from the earlier run. Where it has trained, a file keeps them with its step."""
    lines, last = changes_text(before, read_tree(paths.config)), last_record(paths.metrics)
    if lines and last is not None:
        newest = newest_checkpoint(paths)
        row = {"step": step_of(newest) if newest else 0, "changes": [line.removeprefix(_CHANGED) for line in lines]}
        with open(paths.option_changes, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return lines
