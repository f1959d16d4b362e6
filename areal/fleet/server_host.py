"""Owns the process that hosts one foreign inference server (SGLang, vLLM): its ports, start, readiness, health, end.

    python -m areal.fleet.server_host --backend vllm --config RUN/config.yaml -- vllm serve MODEL --port {port} ...

In the server's command {port} stands for a free port of this machine, on which it must serve HTTP; {port_NAME} for a
further one, another for each NAME; {index} for the index of this server in the run; {index+N} for N more.

The server stays in the process group of its host, and the guard of that group sees to it that none outlives the host.
The host waits for the server's answers, for its end, and for SIGTERM or Ctrl-C. It sets no limit to how long a start
takes: launcher.ready_timeout_s does. It withholds its heartbeat while the server does not answer: launcher.hang_s then
ends both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from areal.api.config import InferenceEngineConfig, LauncherConfig, PPOConfig
from areal.api.config.load import load_experiment
from areal.api.errors import ArealError, ConfigError, LaunchError
from areal.fleet.backends import BACKENDS, replica_factory
from areal.fleet.replica import ReplicaFactory, ReplicaInfo, ReplicaLoad
from areal.fleet.server_log import last_error, last_words, met_taken_port
from areal.observe.log import configure_logging, get_logger
from areal.system.discovery import NameRegistry, announce_server, registry_of
from areal.system.group_guard import start_guard
from areal.system.heartbeat import beating_loop, launched_heartbeat
from areal.system.network import Host, bind_socket, http_address
from areal.system.process import (
    ERROR_PREFIX,
    TRANSIENT_EXIT,
    ProcessContext,
    kill_rest_of_group,
    run_main,
    tied_to_this_process,
)
from areal.system.run_paths import RunPaths

_LOG = get_logger(__name__)
_PORT = re.compile(r"\{port(?:_[a-z]+)?\}")
_INDEX = re.compile(r"\{index(?:\+(\d+))?\}")
_ASK_INTERVAL_S = 1.0
_ANSWER_LIMIT_S = 30.0
"""After so long a question is asked again, on a new connection."""
_REMARKABLE_S = 5.0
_DEAF_S = 5.0
"""A server that served and takes no connection for so long is on its way out, however long it goes on writing why."""
_GRACE_SHARE = 0.75
"""Of launcher.stop_grace_s: the rest is for killing what does not end, before the launcher kills us."""
_TAIL_BYTES = 1 << 17
"""Far enough back for the tracebacks of all ranks, not for the errors of hours ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Everything a host is told."""

    backend: str
    command: tuple[str, ...]
    """Of the foreign server, with placeholders."""
    index: int
    process_name: str
    log_path: Path | None
    """Where the standard output and error of host and server go; None outside of a launcher."""
    registry: NameRegistry | None
    stop_grace_s: float
    update_limit_s: float
    """An honest weight update takes no longer."""
    host: Host = field(default_factory=Host)
    """Where the server listens, and how the run reaches it."""


def parse_options(argv: Sequence[str]) -> HostOptions:
    """Options from flags, the run's config and the launcher's context where there are some."""
    parser = argparse.ArgumentParser(
        prog="python -m areal.fleet.server_host",
        description="Hosts one foreign inference server: starts COMMAND on free ports, announces it when it is ready, "
        "and ends with it. In COMMAND, {port} becomes the port it must serve HTTP on, {port_NAME} a further one, "
        "{index} and {index+N} the index of this server in the run, and N more.",
        usage="%(prog)s --backend NAME [--config RUN/config.yaml] -- COMMAND ... {port} ...",
    )
    parser.add_argument(
        "--backend",
        choices=sorted(name for name, one in BACKENDS.items() if one.flags),
        required=True,
        help="which server COMMAND starts",
    )
    parser.add_argument("--config", help="the run's config.yaml; without it the server belongs to no run")
    at = argv.index("--") if "--" in argv else len(argv)
    args, command = parser.parse_args(argv[:at]), argv[at + 1 :]
    if not any("{port}" in word for word in command):
        raise ConfigError("give -- and the server's command, with {port} for the port that it serves on")
    context = ProcessContext.from_env()
    registry = None
    launcher, rollout = LauncherConfig(), InferenceEngineConfig()
    if args.config:
        config = load_experiment(["--config", args.config], allow_unknown_top_level=True)
        if not isinstance(config, PPOConfig):
            raise ConfigError(f"{args.config} is of a kind of training that needs no server")
        launcher, rollout = config.launcher, config.rollout
        if context is not None:
            registry = registry_of(config)
    return HostOptions(
        backend=args.backend,
        command=tuple(command),
        index=context.index if context else 0,
        process_name=context.name if context else "server-0",
        log_path=RunPaths(Path(context.run_dir)).log_of(context.name) if context else None,
        registry=registry,
        stop_grace_s=launcher.stop_grace_s * _GRACE_SHARE,
        update_limit_s=rollout.weight_update_timeout_s,
        host=context.host if context else Host(),
    )


def port_names(command: Sequence[str]) -> list[str]:
    """The placeholders of ports in a command, each once."""
    return sorted({found for word in command for found in _PORT.findall(word)})


def filled_in(command: Sequence[str], ports: Mapping[str, int], index: int) -> list[str]:
    """The command with ports and indices in place of the placeholders."""
    with_ports = [_PORT.sub(lambda found: str(ports[found[0]]), word) for word in command]
    return [_INDEX.sub(lambda found: str(index + int(found[1] or 0)), word) for word in with_ports]


class Health:
    """What is known of how the server is, and the words about it."""

    def __init__(self, backend: str, engine_limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`engine_limit_s`: for so long an engine may be busy with something honest."""
        self._backend = backend
        self._engine_limit_s = engine_limit_s
        self._clock = clock
        self._started_s = clock()
        self._phase: Literal["starts", "serves", "ends", "has ended"] = "starts"
        self._info: ReplicaInfo | None = None
        self._load: ReplicaLoad | None = None
        self._has_news = False
        self._failing: set[str] = set()
        self._engine_answered_s = 0.0

    def told_load(self, load: ReplicaLoad) -> None:
        """The process that speaks HTTP answers."""
        self._load = load
        self._has_news = True

    def told_info(self, info: ReplicaInfo) -> None:
        """So does the one that computes."""
        self._info = info
        self._engine_answered_s = self._clock()

    def failed(self, question: str, error: str) -> None:
        """It does not answer a question as it should."""
        if question not in self._failing and self._phase == "serves":
            _LOG.warning("the %s server fails: %s", self._backend, error)
        self._failing.add(question)

    def answered(self, question: str) -> None:
        self._failing.discard(question)

    def got_ready(self) -> None:
        self._phase = "serves"
        self._has_news = True

    def ends(self) -> None:
        """It has been asked to end: its silence is no bad sign any more."""
        self._phase = "ends"

    def has_ended(self) -> None:
        """From here on there is no sign of life, so that the launcher ends us too if the kernel keeps some of it."""
        self._phase = "has ended"

    def tell(self) -> str | None:
        """What the server does; None when it has not answered since the last time and should have."""
        now_s = self._clock()
        if self._phase != "serves":
            words = {"starts": f"starts {self._backend}: {now_s - self._started_s:.0f} s", "ends": "ends"}
            return words.get(self._phase)
        has_news, self._has_news = self._has_news, False
        engine_silent_s = now_s - self._engine_answered_s
        if not has_news or self._failing or engine_silent_s > self._engine_limit_s or self._info is None:
            return None
        if engine_silent_s > _REMARKABLE_S:
            return f"answers, but not its engine, which was at version {self._info.version}"
        load = self._load or ReplicaLoad(running=0, queued=0, cache_usage=0.0, generated_tokens=0)
        return f"runs {load.running} requests, {load.queued} queued, version {self._info.version}"


class ServerHost:
    """One foreign server from its start to its end."""

    def __init__(self, options: HostOptions, make_replica: ReplicaFactory) -> None:
        self._options = options
        # Held as long as we live, bound and not listening: nobody is given these ports as free ones, and the server,
        # which binds with SO_REUSEADDR as we do, can listen on them.
        self._ports = {name: bind_socket(options.host.bind) for name in port_names(options.command)}
        self._address = http_address(self._ports["{port}"], options.host.advertise)
        self._replica = make_replica(options.process_name, self._address)
        self._health = Health(options.backend, options.update_limit_s)
        self._log_start = options.log_path.stat().st_size if options.log_path and options.log_path.exists() else 0
        self._was_ready = False
        self._was_deaf = False

    async def run(self) -> int | None:
        """Serve until SIGTERM or Ctrl-C; then None. Else the return code of the server, which ended by itself.

        Nothing of the server runs any more when this returns.
        """
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        process = await self._start()
        end = asyncio.create_task(process.wait(), name="end of the server")
        stop = asyncio.create_task(stopped.wait(), name="wish to stop")
        watch = asyncio.create_task(self._watch(process), name="watch the server")
        async with beating_loop(launched_heartbeat(), self._health.tell):
            await asyncio.wait({end, stop, watch}, return_when=asyncio.FIRST_COMPLETED)
            code = process.returncode
            if stopped.is_set():
                code = None
                self._health.ends()
                await self._terminate(process, end)
            self._health.has_ended()
            await asyncio.to_thread(kill_rest_of_group)
            for task in (stop, watch):
                task.cancel()
            failures = await asyncio.gather(watch, return_exceptions=True)
            await self._replica.close()
            await end
        for failure in failures:
            if isinstance(failure, Exception):
                raise failure
        return code

    async def _start(self) -> asyncio.subprocess.Process:
        ports = {name: bound.getsockname()[1] for name, bound in self._ports.items()}
        command = filled_in(self._options.command, ports, self._options.index)
        _LOG.info("starts %s", shlex.join(command))
        try:
            return await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, preexec_fn=tied_to_this_process()
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]}: {error.strerror or error}") from error

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """From the start on: wait until it is ready, say so, ask it how it is."""
        while not await self._is_ready():
            await asyncio.sleep(_ASK_INTERVAL_S / 2)
        self._was_ready = True
        self._health.got_ready()
        self._announce()
        # The second question waits behind a weight update, of which this client knows nothing. So it has no limit of
        # its own: asked again it would only pile up.
        await asyncio.gather(
            self._keep_asking("load", _ANSWER_LIMIT_S), self._keep_asking("info", None), self._kill_when_deaf(process)
        )

    async def _is_ready(self) -> bool:
        try:
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                self._health.told_info(await self._replica.info())
        except (ArealError, TimeoutError):
            return False
        return True

    async def _keep_asking(self, question: Literal["load", "info"], limit_s: float | None) -> None:
        while True:
            await asyncio.sleep(_ASK_INTERVAL_S)
            try:
                async with asyncio.timeout(limit_s):
                    if question == "load":
                        self._health.told_load(await self._replica.load())
                    else:
                        self._health.told_info(await self._replica.info())
            except (ArealError, TimeoutError) as error:
                self._health.failed(question, str(error) or "no answer in time")
            else:
                self._health.answered(question)

    async def _kill_when_deaf(self, process: asyncio.subprocess.Process) -> None:
        """vLLM without its engine closes its port at once, and then tells each request's error for minutes."""
        heard_s = time.monotonic()
        host, port = self._ports["{port}"].getsockname()[:2]
        while time.monotonic() - heard_s < _DEAF_S:
            await asyncio.sleep(_ASK_INTERVAL_S)
            try:
                _, writer = await asyncio.open_connection(host, port)
            except ConnectionRefusedError:
                continue
            except OSError:
                pass  # whatever it is, somebody listens
            else:
                writer.close()
            heard_s = time.monotonic()
        self._was_deaf = True
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def _announce(self) -> None:
        options = self._options
        _LOG.info("%s serves on %s", options.backend, self._address)
        if options.registry is None:
            sys.stdout.write(f"{self._address}\n")
            sys.stdout.flush()
        else:
            announce_server(options.registry, options.index, options.process_name, self._address)

    async def _terminate(self, process: asyncio.subprocess.Process, end: asyncio.Task[int]) -> None:
        """Ask it to end and give it time to."""
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait({end}, timeout=self._options.stop_grace_s)

    def report(self, code: int) -> tuple[int, str]:
        """What to say of a server that ended by itself, and with which code to exit so that the launcher does right.

        One that never was ready and says why would fail the same way again; what may be chance is worth another try.
        """
        lines = self._log_lines()
        words = last_words(lines)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if self._was_deaf:
            how = f"took no more connections for {_DEAF_S:g} s and was killed"
        text = f"the {self._options.backend} server {how}" + (f": {words}" if words else "")
        is_chance = not self._was_ready and (met_taken_port(lines) or (code < 0 and not last_error(lines)))
        return (TRANSIENT_EXIT if is_chance else 1), text

    def _log_lines(self) -> list[str]:
        """What was written since the start, as far as the end of the log goes back."""
        path = self._options.log_path
        if path is None:
            return []
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()


def main() -> None:
    options = parse_options(sys.argv[1:])
    configure_logging("info", options.process_name)
    if os.getpgrp() != os.getpid():  # started by hand: the guard must not strike whoever else is in the group
        os.setpgid(0, 0)
    host = ServerHost(options, replica_factory(options.backend))
    start_guard()
    code = asyncio.run(host.run())
    if code is not None:
        exit_code, text = host.report(code)
        sys.stderr.write(f"{ERROR_PREFIX}{text}\n")
        sys.exit(exit_code)


if __name__ == "__main__":
    run_main(main)
