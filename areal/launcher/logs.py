"""The command `python -m areal.launcher.logs RUN [NAME ...] [--follow]`: the logs of all processes of a run."""

import argparse
import heapq
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from areal.api.errors import ConfigError
from areal.launcher.preflight import has_launcher
from areal.system.process import run_main
from areal.system.run_paths import RunPaths

_TIME = re.compile(r"\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}(?:[.,]\d+)?")
_POLL_S = 0.2


class FollowedLog:
    """One growing log file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rest = b""

    def new_lines(self, *, is_last: bool) -> list[str]:
        """The complete lines written since the last call; with `is_last`, also one that has no end."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                block = file.read()
        except OSError:
            return []
        self._at += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        if is_last and self._rest:
            lines.append(self._rest)
        return [line.decode(errors="replace").rstrip() for line in lines]


def in_order(logs: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    """All lines, with the name of their log, by the times at their beginnings.

    A line without a time stays behind the one before it.
    """

    def timed(name: str, lines: list[str]) -> Iterator[tuple[str, str, str]]:
        last = ""
        for line in lines:
            match = _TIME.match(line)
            last = max(last, match[0]) if match else last
            yield last, name, line

    merged = heapq.merge(*(timed(name, lines) for name, lines in logs.items()), key=lambda entry: entry[0])
    for _, name, line in merged:
        yield name, line


def node_names(paths: RunPaths) -> dict[str, str]:
    """The planned node of each process; empty names on one machine."""
    try:
        processes = json.loads(paths.plan.read_text())["processes"]
    except (OSError, ValueError, KeyError):
        return {}
    nodes = {process["name"]: process["host"]["node"] for process in processes}
    return nodes if len(set(nodes.values())) > 1 else {}


def show(paths: RunPaths, names: list[str], *, follow: bool) -> None:
    """Write the logs to standard output, each line with its process; `follow`: until the launcher has ended."""
    logs: dict[str, FollowedLog] = {}
    while True:
        is_last = not follow or not has_launcher(paths)  # what was written before the launcher ended is then read
        for path in sorted(paths.logs.glob("*.log")):
            if (not names or path.stem in names) and path.stem not in logs:
                logs[path.stem] = FollowedLog(path)
        nodes = node_names(paths)
        prefixes = {name: f"{name}@{nodes[name]}" if nodes.get(name) else name for name in logs}
        width = max(map(len, prefixes.values()), default=0)
        for name, line in in_order({name: log.new_lines(is_last=is_last) for name, log in logs.items()}):
            sys.stdout.write(f"{prefixes[name]:<{width}} | {line}\n")
        sys.stdout.flush()
        if is_last:
            return
        time.sleep(_POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m areal.launcher.logs", description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these processes, for example trainer-0")
    parser.add_argument("--follow", action="store_true", help="continue until the launcher of the run has ended")
    args = parser.parse_intermixed_args()
    paths = RunPaths(args.run.absolute())
    existing = sorted(path.stem for path in paths.logs.glob("*.log"))
    if not existing and not args.follow:
        raise ConfigError(f"{args.run} is not the folder of a run: it has no logs", code="launch.no_run_folder")
    if unknown := [name for name in args.names if existing and name not in existing]:
        message = f"{args.run} has no log of {', '.join(unknown)}: it has {', '.join(existing)}"
        raise ConfigError(message, code="launch.no_run_folder")
    show(paths, args.names, follow=args.follow)


if __name__ == "__main__":
    run_main(main)
