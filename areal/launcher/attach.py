"""The command that changes a running run: `python -m areal.launcher.local --attach RUN ...`.

It waits for the answer of the run's launcher, shows what the launcher does, and gives up after a time limit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from areal.api.errors import ConfigError, LaunchError
from areal.launcher.preflight import has_launcher
from areal.launcher.run_requests import Answer, Request, RequestBox
from areal.launcher.status import StatusLine
from areal.system.run_paths import RunPaths

_TAKEN_LIMIT_S = 20.0
"""A launcher reads requests 20 times a second."""
_POLL_S = 0.1


def read_command_line(argv: Sequence[str]) -> tuple[RunPaths, Request]:
    """The run and the request. ConfigError when RUN is not a run folder."""
    parser = argparse.ArgumentParser(
        prog="python -m areal.launcher.local",
        description="Change a running run. Exit status: 0 done, 2 refused or no answer.",
    )
    parser.add_argument("--attach", metavar="RUN", required=True, help="the run folder, as the launcher prints it")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--add-replica", action="store_true", help="start one more inference server")
    what.add_argument("--remove-replica", metavar="NAME", help="stop an inference server, for example server-2")
    args = parser.parse_args(argv)
    paths = RunPaths(Path(args.attach).expanduser().absolute())
    if not paths.lock.is_file():
        message = f"--attach {args.attach}: not a run folder; give the one that the launcher printed"
        raise ConfigError(message, code="launch.no_run_folder")
    action = "add-replica" if args.add_replica else "remove-replica"
    return paths, Request(action=action, replica=args.remove_replica or "")


def ask(paths: RunPaths, request: Request, line: StatusLine, *, taken_limit_s: float = _TAKEN_LIMIT_S) -> str:
    """The launcher's answer once the request is done. LaunchError when the launcher refuses or does not answer."""
    _check_launcher(paths)
    box = RequestBox(paths)
    box.ask(request)
    try:
        answer = _wait(paths, box, request, line, taken_limit_s)
    finally:
        line.end(None)
        box.withdraw(request)
    if answer.state == "refused":
        raise LaunchError(answer.text, code="launch.request_refused")
    return answer.text


def _wait(paths: RunPaths, box: RequestBox, request: Request, line: StatusLine, limit_s: float) -> Answer:
    began_s, doing = time.monotonic(), "the launcher has not taken the request yet"
    while True:
        answer = box.answer_to(request)
        if answer is not None and answer.state != "working":
            return answer
        if answer is not None:
            limit_s, doing = answer.limit_s, answer.text
        waited_s = time.monotonic() - began_s
        if waited_s > limit_s:
            message = f"no result after {limit_s:g} s: {doing}; see the output of the launcher"
            raise LaunchError(message, code="launch.no_answer")
        _check_launcher(paths)
        line.show(f"waiting {waited_s:.0f} s: {doing}")
        time.sleep(_POLL_S)


def _check_launcher(paths: RunPaths) -> None:
    if not has_launcher(paths):
        message = f"no launcher runs on {paths.root}: replicas can be added and removed only during a run"
        raise LaunchError(message, code="launch.no_answer")
