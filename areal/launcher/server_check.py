"""Owns the check of a foreign server before anything starts: its environment, its version, what its own parser says.

Waits for the server's interpreter, which imports the server's package for some 10 to 30 seconds; gives up in time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal.api.config import NativeServerConfig, PPOConfig
from areal.api.config.servers import FOREIGN_SERVERS, ForeignServer, given_flags, ignored_keys, plain_name
from areal.launcher.foreign_server import SERVER_SIDE, flag_words, server_command, server_python
from areal.launcher.job import LaunchPlan
from areal.system.process import AREAL_PROCESS, tied_to_this_process

_LIMIT_S = 300.0
_PLACEHOLDER = re.compile(r"\{(port|index)[^{}]*\}")
"""What the host of a server puts numbers in place of."""


class _NoAnswer(Exception):
    """Why the environment of the server could not be asked."""


def foreign_server_problems(
    config: PPOConfig, plan: LaunchPlan, tell: Callable[[str], None], *, limit_s: float = _LIMIT_S
) -> list[str]:
    """One sentence for everything that the installed server refuses; nothing for servers of other kinds."""
    planned = next((process for process in plan.processes if process.role == "server"), None)
    if config.server_backend not in FOREIGN_SERVERS or planned is None:
        return []
    backend, server = config.server_backend, FOREIGN_SERVERS[config.server_backend]
    python = server_python(config)
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        return [f"server_python: {python} is no program: give the Python interpreter of {server.name}'s environment"]
    tell(f"areal: asks {server.name} in {python} about its flags, which takes a while")
    question = json.dumps(_question(config, on_gpu=bool(planned.gpus)))
    env = {name: value for name, value in {**os.environ, **planned.env}.items() if name != AREAL_PROCESS}
    try:
        answer = _ask(python, str(SERVER_SIDE / f"probe_{backend}.py"), question, tuple(sorted(env.items())), limit_s)
    except _NoAnswer as error:
        return [f"server_python: {python} cannot be asked about {server.name}: {error}"]
    return _sentences(answer, backend, python, is_given=bool(config.server_python))


def notices(config: PPOConfig) -> list[str]:
    """What of the configuration has no effect with the servers that this run has, for people."""
    sections = {"native": config.native != NativeServerConfig(), "sglang": config.sglang, "vllm": config.vllm}
    unused = [name for name, is_given in sections.items() if is_given and name != config.server_backend]
    if config.server_python and (config.server_backend == "native" or config.rollout.server_addrs):
        unused.append("server_python")
    said: list[str] = []
    if unused:
        said.append(f"not used with allocation_mode={config.allocation_mode}: {', '.join(unused)}")
    if config.server_backend in FOREIGN_SERVERS:
        if ignored := ignored_keys(config.server_backend, config.server_flags):
            said.append(f"ignored, areal brings its own or the server has none of it: {', '.join(ignored)}")
        if config.rollout.server_addrs and config.server_flags:
            said.append(f"{config.server_backend}: starts nothing, the servers run already; it only describes them")
    return [f"areal: {text}" for text in said]


def _sentences(answer: dict[str, Any], backend: str, python: str, *, is_given: bool) -> list[str]:
    """The answer for people, path of the key first."""
    server = FOREIGN_SERVERS[backend]
    if "missing" in answer:
        what = "install it there, or give" if is_given else "that is the interpreter of areal itself; give"
        return [
            f"server_python: {server.name} is not installed for {python}: {what} the interpreter of {server.name}'s "
            "environment"
        ]
    version = str(answer["version"])
    problems = [f"server_python: {python}: {text}"] if (text := _too_old(server, version)) else []
    for key, text in answer["problems"]:
        of = f" ({server.name} {version})"
        problems.append(f"{backend}.{key}: {text}{of}" if key else f"server_python: {python} {text}{of}")
    return problems


def _too_old(server: ForeignServer, version: str) -> str:
    """What to say of a version below the oldest supported one, or ''. One that cannot be read is taken for new."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    oldest = tuple(map(int, server.minimum.split(".")))
    if numbers is None or tuple(map(int, numbers.groups())) >= oldest:
        return ""
    return (
        f"{server.name} {version} is too old, areal needs {server.minimum} or newer (tested with {server.tested}): "
        "upgrade it"
    )


def _question(config: PPOConfig, *, on_gpu: bool) -> dict[str, Any]:
    """What flag_check wants to know."""
    backend, server = config.server_backend, FOREIGN_SERVERS[config.server_backend]
    command = server_command(config, on_gpu=on_gpu)
    given = given_flags(backend, config.server_flags)
    users = [
        (key, value, flag_words(server, plain_name(key), value))
        for key, value in config.server_flags.items()
        if plain_name(key) in given and plain_name(key) != server.seed
    ]
    ours = [
        word for name, value in command.flags.items() if name not in given for word in flag_words(server, name, value)
    ]
    ours = [_PLACEHOLDER.sub("1", word) for word in ours]
    return {"on_gpu": on_gpu, "model": command.model_words, "ours": ours, "flags": users}


@functools.cache
def _ask(python: str, probe: str, question: str, env: tuple[tuple[str, str], ...], limit_s: float) -> dict[str, Any]:
    """The answer of a probe, asked once for the same interpreter, flags and environment. _NoAnswer without one."""
    try:
        code, said, errors = _output(python, probe, question, env, limit_s)
    except subprocess.TimeoutExpired:
        raise _NoAnswer(f"no answer in {limit_s:g} s; try its import by hand") from None
    except OSError as error:
        raise _NoAnswer(str(error.strerror or error)) from None
    try:
        return dict(json.loads(said.splitlines()[-1]))  # a program around the interpreter may say more before
    except (ValueError, TypeError, IndexError):
        words = [line.strip() for line in errors.splitlines() if line.strip()]
        raise _NoAnswer(words[-1] if words else f"it ended with {code}") from None


def _output(
    python: str, probe: str, question: str, env: tuple[tuple[str, str], ...], limit_s: float
) -> tuple[int, str, str]:
    """Return code, standard output and error of a probe. In a group of its own, of which nothing is left afterwards:
    the interpreter may be a script that starts the real one."""
    with subprocess.Popen(
        [python, probe],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=dict(env),
        process_group=0,
        preexec_fn=tied_to_this_process(),
    ) as process:
        try:
            said, errors = process.communicate(question, timeout=limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said, errors
