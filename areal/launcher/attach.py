"""Changes of a running run: the command `areal run --attach RUN ...`, and the files that it uses.

The command writes a request, waits for the answers of the run's launcher, shows them, and gives up after a time limit.
"""

import argparse
import dataclasses
import http.client
import json
import shutil
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from areal.api.config import BaseExperimentConfig, PPOConfig, check_config
from areal.api.config.rollout import address_problems, server_url
from areal.api.errors import ConfigError, LaunchError
from areal.launcher.preflight import has_launcher
from areal.launcher.status import StatusLine
from areal.system.discovery import NameRegistry
from areal.system.durable import write_atomic
from areal.system.network import TOKEN_VARIABLE, is_loopback, run_token
from areal.system.run_paths import RunPaths, run_folder

# ----------------------------------------------------------------------------------------------------------------------
# Attached servers, which were started outside the run: their addresses, a first check, their registration.
#
# `wait_until_all_answer` waits for any HTTP answer of each server, or for its limit. Nothing here starts or stops one.

ADDRESSES_VARIABLE = "AREAL_LLM_SERVER_ADDRS"
_ANSWER_LIMIT_S = 5.0
_SERVER_POLL_S = 0.5
_REPORTED_AFTER_S = 2.0


def with_attached_servers(config: BaseExperimentConfig, environ: Mapping[str, str]) -> BaseExperimentConfig:
    """The configuration with the addresses in the environment. ConfigError when they cannot be used."""
    if not isinstance(config, PPOConfig):
        return config
    if addresses := [part.strip() for part in environ.get(ADDRESSES_VARIABLE, "").split(",") if part.strip()]:
        config = _with_addresses(config, addresses)
    far = [url for url in map(server_url, config.rollout.server_addrs) if not is_loopback(urlsplit(url).hostname or "")]
    if far and not run_token(environ):
        message = f"rollout.server_addrs: {far[0]} is not on this machine: set {TOKEN_VARIABLE} to its secret"
        raise ConfigError(message, code="launch.token_missing")
    if far and config.actor.weight_update_mode not in ("auto", "disk", "delta_disk"):
        problem = f"{config.actor.weight_update_mode} does not reach {far[0]}, which is not on this machine"
        fix = "use disk, and a cluster.fileroot that all machines share under one path"
        raise ConfigError(f"actor.weight_update_mode: {problem}: {fix}", code="launch.attached_needs_disk")
    return config


def _with_addresses(config: PPOConfig, addresses: list[str]) -> PPOConfig:
    for text, problem in address_problems(addresses):
        raise ConfigError(f"{ADDRESSES_VARIABLE}: {text!r} {problem}", code="launch.bad_server_addresses")
    configured = config.rollout.server_addrs
    if configured and list(map(server_url, configured)) != list(map(server_url, addresses)):
        names = f"{', '.join(configured)}, but {ADDRESSES_VARIABLE} names {', '.join(addresses)}"
        message = f"rollout.server_addrs names {names}: remove one of them"
        raise ConfigError(message, code="launch.bad_server_addresses")
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, server_addrs=addresses))
    try:
        check_config(config)
    except ConfigError as error:
        raise ConfigError(f"{error} (the addresses come from {ADDRESSES_VARIABLE})", code=error.code) from None
    return config


def wait_until_all_answer(
    urls: Sequence[str],
    limit_s: float,
    say: Callable[[str], None],
    *,
    token: str = "",
    hurry: Callable[[], bool] = lambda: False,
) -> None:
    """Return once each gave any HTTP answer, or `hurry()` is true. LaunchError names those that gave none.

    ConfigError when a server requires another token than `token`.
    """
    began_s, was_reported = time.monotonic(), False
    missing = dict.fromkeys(urls, "")
    while True:
        missing = {url: failure for url in missing if (failure := _failure_of(url, token))}
        if not missing or hurry():
            return
        text = ", ".join(f"{url} ({failure})" for url, failure in missing.items())
        waited_s = time.monotonic() - began_s
        if waited_s >= limit_s:
            fix = f"start these servers, or correct rollout.server_addrs or {ADDRESSES_VARIABLE}"
            message = f"no answer in {limit_s:g} s (rollout.setup_timeout) from {text}: {fix}"
            raise LaunchError(message, code="launch.attached_silent")
        if not was_reported and waited_s >= _REPORTED_AFTER_S:
            was_reported = True
            say(f"areal: waiting up to {limit_s:g} s for attached servers: {text}")
        time.sleep(min(_SERVER_POLL_S, limit_s))


def _failure_of(url: str, token: str) -> str:
    """Why a server gives no HTTP answer; empty when it gives any. ConfigError when it refuses the token."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {token}"})
        with opener.open(request, timeout=_ANSWER_LIMIT_S):
            return ""
    except urllib.error.HTTPError as error:
        if error.code == 401:
            message = f"the server at {url} requires another token: set {TOKEN_VARIABLE} to its token or API key"
            raise ConfigError(message, code="launch.token_mismatch") from None
        return ""  # an error is an answer
    except urllib.error.URLError as error:
        return str(getattr(error.reason, "strerror", None) or error.reason)
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


def register(registry: NameRegistry, urls: Sequence[str]) -> None:
    """Register the servers with the run, in the given order."""
    for index, url in enumerate(urls):
        registry.add(f"servers/{index}", json.dumps({"address": url, "pid": None}), replace=True)


_TAKEN_LIMIT_S = 20.0  # A launcher reads requests 20 times a second.
_POLL_S = 0.1
_REQUEST, _ANSWER = ".request.json", ".answer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    action: Literal["add-replica", "remove-replica"]
    replica: str = ""
    """Process name of the server to remove."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    state: Literal["working", "done", "refused"]
    """working = another answer follows."""
    text: str
    limit_s: float = 0.0
    """Seconds after which the launcher has finished or given up, while it works."""


class RequestBox:
    """The folder RUN/requests. A request stays until the command that wrote it has read the answer."""

    def __init__(self, paths: RunPaths) -> None:
        self._folder = paths.requests
        self._taken: set[str] = set()

    def clear(self) -> None:
        """Remove the requests to an earlier launcher."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, request: Request) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path(request.id, _REQUEST), json.dumps(asdict(request)).encode())

    def withdraw(self, request: Request) -> None:
        """Remove a request and its answer."""
        for kind in (_REQUEST, _ANSWER):
            self._path(request.id, kind).unlink(missing_ok=True)

    def answer_to(self, request: Request) -> Answer | None:
        try:
            return Answer(**json.loads(self._path(request.id, _ANSWER).read_bytes()))
        except FileNotFoundError:
            return None

    def take(self) -> list[Request]:
        """The requests that were not taken before."""
        result: list[Request] = []
        for path in sorted(self._folder.glob(f"[!.]*{_REQUEST}")):
            if path.name in self._taken:
                continue
            self._taken.add(path.name)
            try:
                result.append(Request(**json.loads(path.read_bytes())))
            except (OSError, ValueError, TypeError):  # withdrawn meanwhile, or not a request
                continue
        return result

    def answer(self, request: Request, answer: Answer) -> None:
        """Answer a request, unless its command has given up and withdrawn it."""
        if self._path(request.id, _REQUEST).exists():
            write_atomic(self._path(request.id, _ANSWER), json.dumps(asdict(answer)).encode())

    def _path(self, request_id: str, kind: str) -> Path:
        return self._folder / f"{request_id}{kind}"


def run_command(words: Sequence[str]) -> int:
    """`areal run --attach RUN ... [--json]`: make the change, print its result, return the exit status."""
    paths, request = read_command_line([word for word in words if word != "--json"])
    text = ask(paths, request, StatusLine())
    facts = {"run": str(paths.root), "action": request.action, "state": "done", "text": text}
    sys.stdout.write((json.dumps(facts) if "--json" in words else text) + "\n")
    return 0


def read_command_line(argv: Sequence[str]) -> tuple[RunPaths, Request]:
    """The run and the request. ConfigError when RUN is not a run folder."""
    parser = argparse.ArgumentParser(
        prog="areal run",
        usage="%(prog)s --attach RUN (--add-replica | --remove-replica NAME) [--json]\n       "
        "%(prog)s --launcher slurm --attach RUN",
        description="Change a running run; with --launcher slurm: follow its job. Exit status: 0 done, 2 refused or "
        "no answer.",
    )
    parser.add_argument("--attach", metavar="RUN", required=True, help="the run folder, as the launcher prints it")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--add-replica", action="store_true", help="start one more inference server")
    what.add_argument("--remove-replica", metavar="NAME", help="stop an inference server, for example server-2")
    # `--attach --help` would take --help for the run folder.
    args = parser.parse_args(["--help"] if {"--help", "-h"} & {*argv} else argv)
    paths = RunPaths(run_folder(args.attach).absolute())
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
