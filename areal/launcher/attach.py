"""Owns the command that changes a running run: `python -m areal.launcher.local --attach RUN ...`.

It waits for the answer of the run's launcher, and says what that is doing; without an answer it gives up in time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from areal.api.errors import ConfigError, LaunchError
from areal.launcher.preflight import has_launcher
from areal.launcher.run_requests import Answer, Request, RequestBox
from areal.launcher.status import StatusLine
from areal.system.run_paths import RunPaths

_TAKEN_LIMIT_S = 20.0
"""A live launcher looks at requests many times a second."""
_POLL_S = 0.1


def main(argv: Sequence[str]) -> None:
    """Ask, wait, print the result. LaunchError when the launcher refuses or does not answer."""
    paths, request = read_command_line(argv)
    sys.stdout.write(ask(paths, request, StatusLine()) + "\n")


def read_command_line(argv: Sequence[str]) -> tuple[RunPaths, Request]:
    """Which run, and what is asked of it. ConfigError when RUN is no run folder."""
    parser = argparse.ArgumentParser(
        prog="python -m areal.launcher.local",
        description="Change a run while it goes on. Exit status: 0 done, 2 refused or no answer.",
    )
    parser.add_argument("--attach", metavar="RUN", required=True, help="the run folder, as the launcher prints it")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--add-replica", action="store_true", help="start one more inference server")
    what.add_argument("--remove-replica", metavar="NAME", help="stop an inference server, for example server-2")
    args = parser.parse_args(argv)
    paths = RunPaths(Path(args.attach).expanduser().absolute())
    if not paths.lock.is_file():
        raise ConfigError(f"--attach {args.attach}: no run folder; give the one that the launcher printed")
    if args.add_replica:
        return paths, Request.make("add-replica")
    return paths, Request.make("remove-replica", args.remove_replica)


def ask(paths: RunPaths, request: Request, line: StatusLine, *, taken_limit_s: float = _TAKEN_LIMIT_S) -> str:
    """What the launcher says once it has done what was asked."""
    _check_launcher(paths)
    box = RequestBox(paths)
    box.ask(request)
    try:
        answer = _wait(paths, box, request, line, taken_limit_s)
    finally:
        line.end(None)
        box.withdraw(request)
    if answer.state == "refused":
        raise LaunchError(answer.text)
    return answer.text


def _wait(paths: RunPaths, box: RequestBox, request: Request, line: StatusLine, taken_limit_s: float) -> Answer:
    began_s, limit_s, doing = time.monotonic(), taken_limit_s, "the launcher has not yet taken the request"
    while True:
        answer = box.answer_to(request)
        if answer is not None and answer.state != "working":
            return answer
        if answer is not None:
            limit_s, doing = answer.limit_s, answer.text
        waited_s = time.monotonic() - began_s
        if waited_s > limit_s:
            raise LaunchError(f"no result after {limit_s:g} s: {doing}; see the launcher's output")
        _check_launcher(paths)
        line.show(f"waiting {waited_s:.0f} s: {doing}")
        time.sleep(_POLL_S)


def _check_launcher(paths: RunPaths) -> None:
    if not has_launcher(paths):
        raise LaunchError(f"no launcher runs on {paths.root}: replicas can only join or leave a run that is running")
