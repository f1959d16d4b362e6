"""The process that hosts one foreign inference server (SGLang, vLLM): its ports, start, readiness, health and end.

    python -m areal.fleet.server_host --backend vllm --config RUN/config.yaml -- vllm serve MODEL --port {port} ...

In the server's command {port} is replaced by a free port of this machine, on which the server must serve HTTP on
loopback, {port_NAME} by one more port for each NAME, {index} by the index of this server in the run, and {index+N} by
N more. When the launch plan places the server on another address than loopback, a gateway there requires the token.

A server over several machines has one host for each part. {first}, {first_address} and {first_port} are where part 0
listens for the other parts: its host chooses a port and registers it, the other hosts wait for that.

The server stays in the process group of its host, and the guard of that group kills it when the host has ended. The
host waits for the server's answers, for its end, and for SIGTERM or Ctrl-C. The time limit of a start is
launcher.ready_timeout_s. The host sends no heartbeat while the server does not answer: after launcher.hang_s the
launcher kills both.
"""

import argparse
import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from areal.api.config import InferenceEngineConfig, LauncherConfig, PPOConfig
from areal.api.config.load import load_experiment
from areal.api.config.redaction import public_command
from areal.api.errors import ArealError, ConfigError, LaunchError
from areal.fleet import server_parts
from areal.fleet.backends import BACKENDS, backend_named, replica_factory
from areal.fleet.replica import ReplicaFactory, ReplicaInfo, ReplicaLoad
from areal.fleet.server_gateway import gateway
from areal.fleet.server_log import PORT_TAKEN, end_reason, last_error
from areal.observe.log import configure_logging, get_logger
from areal.system.discovery import NameRegistry, announce_server, registry_of
from areal.system.group_guard import start_guard
from areal.system.heartbeat import beating_loop, launched_heartbeat
from areal.system.network import Host, bind_collectives, bind_socket, http_address, is_loopback, required_token
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
_ASK_INTERVAL_S = 1.0
_ANSWER_LIMIT_S = 30.0
"""Time limit of an answer; then the call is repeated on a new connection."""
_SLOW_ENGINE_S = 5.0
_REFUSAL_LIMIT_S = 5.0
"""A server that was ready and accepts no connection for this long is killed: it has failed, and may log for minutes."""
_GRACE_SHARE = 0.75
"""Share of launcher.stop_grace_s for the server: the host kills it in the rest, before the launcher kills the host."""
_TAIL_BYTES = 1 << 17
"""Enough for the tracebacks of all ranks, without older errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    backend: str
    command: tuple[str, ...]
    """The command of the foreign server, with placeholders."""
    section: tuple[str, ...] = ()
    """Names of the flags that the configuration gives, to name them in errors."""
    index: int
    process_name: str
    log_path: Path | None
    """File with the output of host and server; None without a launcher."""
    registry: NameRegistry | None
    stop_grace_s: float
    update_limit_s: float
    """Time limit of a weight update: an engine may be silent that long."""
    host: Host = field(default_factory=Host)
    """Where the run reaches the server: on loopback itself, elsewhere its gateway."""
    part: int = 0
    num_parts: int = 1
    ready_limit_s: float = LauncherConfig().ready_timeout_s
    """Time limit for the other parts to find part 0."""
    pulls_weights: bool = False
    """The weights come over HTTP, so the server has a gateway on loopback too."""


def parse_options(argv: Sequence[str]) -> HostOptions:
    """Options from flags, and from the run's config and the launcher's context if there are any."""
    parser = argparse.ArgumentParser(
        prog="python -m areal.fleet.server_host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --backend NAME [--config RUN/config.yaml] -- COMMAND ... {port} ...",
    )
    foreign = sorted(name for name, one in BACKENDS.items() if one.flags)
    parser.add_argument("--backend", choices=foreign, required=True, help="which server COMMAND starts")
    parser.add_argument("--config", help="the run's config.yaml; without it the server belongs to no run")
    at = argv.index("--") if "--" in argv else len(argv)
    args, command = parser.parse_args(argv[:at]), argv[at + 1 :]
    if not any("{port}" in word for word in command):
        text = "give -- and the server's command, with {port} for the port that it serves on"
        raise ConfigError(text, code="fleet.host_command")
    context = ProcessContext.from_env()
    registry = None
    launcher, rollout = LauncherConfig(), InferenceEngineConfig()
    section: tuple[str, ...] = ()
    pulls_weights = False
    if args.config:
        config = load_experiment(["--config", args.config], allow_unknown_top_level=True)
        if not isinstance(config, PPOConfig):
            raise ConfigError(f"{args.config} configures a training without servers", code="fleet.host_command")
        launcher, rollout = config.launcher, config.rollout
        section = tuple(backend_named(args.backend).given(config))
        pulls_weights = config.actor.weight_update_mode == "http"
        if context is not None:
            registry = registry_of(config)
    return HostOptions(
        backend=args.backend,
        command=tuple(command),
        index=context.index if context else 0,
        process_name=context.name if context else "server-0",
        section=section,
        log_path=RunPaths(Path(context.run_dir)).log_of(context.name) if context else None,
        registry=registry,
        stop_grace_s=launcher.stop_grace_s * _GRACE_SHARE,
        update_limit_s=rollout.weight_update_timeout_s,
        host=context.host if context else Host(),
        part=context.part if context else 0,
        num_parts=context.num_parts if context else 1,
        ready_limit_s=launcher.ready_timeout_s,
        pulls_weights=pulls_weights,
    )


class Health:
    """The health of the server, from its answers."""

    def __init__(self, backend: str, engine_limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`engine_limit_s`: maximum time without an answer of the engine, for example during a weight update."""
        self._backend = backend
        self._engine_limit_s = engine_limit_s
        self._clock = clock
        self._started_s = clock()
        self._phase: Literal["starts", "serves", "follows", "ends", "has ended"] = "starts"
        self._info: ReplicaInfo | None = None
        self._load: ReplicaLoad | None = None
        self._has_news = False
        self._failing: set[str] = set()
        self._engine_answered_s = 0.0

    def got_load(self, load: ReplicaLoad) -> None:
        """The HTTP process answered."""
        self._load = load
        self._has_news = True

    def got_info(self, info: ReplicaInfo) -> None:
        """The process that computes answered."""
        self._info = info
        self._engine_answered_s = self._clock()

    def failed(self, call: str, error: str) -> None:
        if call not in self._failing and self._phase == "serves":
            _LOG.warning("the %s server fails: %s", self._backend, error)
        self._failing.add(call)

    def answered(self, call: str) -> None:
        self._failing.discard(call)

    def got_ready(self) -> None:
        self._phase = "serves"
        self._has_news = True

    def follows(self) -> None:
        """A part that gets no requests: while its process lives, part 0 shows whether it works."""
        self._phase = "follows"

    def ends(self) -> None:
        """The server was asked to end: from now on silence is no failure."""
        self._phase = "ends"

    def has_ended(self) -> None:
        """No more heartbeats: the launcher kills the host if a process of the server cannot be killed."""
        self._phase = "has ended"

    def beat_text(self) -> str | None:
        """The text of a heartbeat; None, for no heartbeat, when the server has not answered since the last one."""
        now_s = self._clock()
        if self._phase != "serves":
            texts = {"starts": f"starts {self._backend}: {now_s - self._started_s:.0f} s", "ends": "ends"}
            texts["follows"] = "computes for part 0"
            return texts.get(self._phase)
        has_news, self._has_news = self._has_news, False
        engine_silent_s = now_s - self._engine_answered_s
        if not has_news or self._failing or engine_silent_s > self._engine_limit_s or self._info is None:
            return None
        if engine_silent_s > _SLOW_ENGINE_S:
            return f"answers, but not its engine, which was at version {self._info.version}"
        load = self._load or ReplicaLoad(running=0, queued=0, cache_usage=0.0, generated_tokens=0)
        return f"runs {load.running} requests, {load.queued} queued, version {self._info.version}"


class ServerHost:
    """One foreign server from its start to its end."""

    def __init__(self, options: HostOptions, make_replica: ReplicaFactory) -> None:
        self._options = options
        # Bound and not listening as long as the host runs: no other process gets these ports, and the server, which
        # binds with SO_REUSEADDR too, can listen on them.
        self._ports = {name: bind_socket() for name in server_parts.port_names(options.command)}
        self._address = http_address(self._ports["{port}"])
        self._meeting = bind_socket(options.host.bind) if options.num_parts > 1 and options.part == 0 else None
        self._replica = make_replica(options.process_name, self._address)
        self._health = Health(options.backend, options.update_limit_s)
        self._log_start = options.log_path.stat().st_size if options.log_path and options.log_path.exists() else 0
        self._was_ready = False
        self._refused_connections = False

    async def run(self) -> int | None:
        """Serve until SIGTERM or Ctrl-C; then None. Otherwise the return code of the server, which ended by itself.

        No process of the server runs when this returns.
        """
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        process = await self._start()
        end = asyncio.create_task(process.wait(), name="end of the server")
        stop = asyncio.create_task(stopped.wait(), name="wait for a stop signal")
        watch = asyncio.create_task(self._serve(process), name="watch the server")
        async with beating_loop(launched_heartbeat(), self._health.beat_text):
            await asyncio.wait({end, stop, watch}, return_when=asyncio.FIRST_COMPLETED)
            code = process.returncode
            if stopped.is_set():
                code = None
                self._health.ends()
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await asyncio.wait({end}, timeout=self._options.stop_grace_s)
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
        first, options = ("", 0), self._options
        if options.num_parts > 1:
            os.environ |= server_parts.CLIENT_OF_STORE
            os.environ[BACKENDS[options.backend].address_variable] = options.host.advertise
            known = options.registry, options.index, options.part, options.host, self._meeting
            first = await asyncio.to_thread(server_parts.first_part, *known, options.ready_limit_s)
        command = server_parts.filled_in(options.command, ports, options.index, first)
        _LOG.info("starting %s", shlex.join(public_command(command)))
        try:
            return await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, preexec_fn=tied_to_this_process()
            )
        except OSError as error:
            text = f"cannot start {command[0]}: {error.strerror or error}"
            raise LaunchError(text, code="launch.cannot_start") from error

    async def _serve(self, process: asyncio.subprocess.Process) -> None:
        """Watch the server, with its gateway and the store of its parts if it needs them."""
        options, address = self._options, "" if self._options.part else self._address
        known = options.registry, options.index
        async with contextlib.AsyncExitStack() as stack:
            may_join = partial(server_parts.is_part, *known, options.num_parts, options.host)
            await stack.enter_async_context(server_parts.meeting_point(self._meeting, may_join))
            if options.pulls_weights or not (options.part or is_loopback(options.host.bind)):
                num_parts = 1 if options.part else options.num_parts  # part 0 lets the others copy weights
                parts = partial(server_parts.gateways_of_parts, *known, num_parts, options.ready_limit_s)
                token = required_token("the gateway of a server")
                address = await stack.enter_async_context(gateway(options.host, token, self._address, parts))
            await self._watch(process, address)

    async def _watch(self, process: asyncio.subprocess.Process, address: str) -> None:
        """Wait until the server is ready, announce its public address, then poll its health.

        A part that serves no requests is ready once its process runs.
        """
        options = self._options
        if options.part and options.registry is not None:
            self._health.follows()
            part = options.index, options.part, options.process_name, address
            await asyncio.to_thread(server_parts.announce_part, options.registry, *part)
            await asyncio.Event().wait()
        while not self._was_ready:
            try:
                async with asyncio.timeout(_ANSWER_LIMIT_S):
                    self._health.got_info(await self._replica.info())
                self._was_ready = True
            except (ArealError, TimeoutError):
                await asyncio.sleep(_ASK_INTERVAL_S / 2)
        self._health.got_ready()
        _LOG.info("%s serves on %s", self._options.backend, address)
        if self._options.registry is None:
            sys.stdout.write(f"{address}\n")
            sys.stdout.flush()
        else:
            announce_server(self._options.registry, self._options.index, self._options.process_name, address)
        # "info" has no time limit: it gets no answer during a weight update, and repeated calls would only queue up.
        await asyncio.gather(
            self._poll("load", _ANSWER_LIMIT_S), self._poll("info", None), self._kill_when_refusing(process)
        )

    async def _poll(self, call: Literal["load", "info"], limit_s: float | None) -> None:
        while True:
            await asyncio.sleep(_ASK_INTERVAL_S)
            try:
                async with asyncio.timeout(limit_s):
                    if call == "load":
                        self._health.got_load(await self._replica.load())
                    else:
                        self._health.got_info(await self._replica.info())
            except (ArealError, TimeoutError) as error:
                self._health.failed(call, str(error) or "no answer in time")
            else:
                self._health.answered(call)

    async def _kill_when_refusing(self, process: asyncio.subprocess.Process) -> None:
        """vLLM without its engine closes its port at once, and then logs an error for each request for minutes."""
        last_s = time.monotonic()
        host, port = self._ports["{port}"].getsockname()[:2]
        while time.monotonic() - last_s < _REFUSAL_LIMIT_S:
            await asyncio.sleep(_ASK_INTERVAL_S)
            try:
                _, writer = await asyncio.open_connection(host, port)
            except ConnectionRefusedError:
                continue
            except OSError:
                pass  # the server listens
            else:
                writer.close()
            last_s = time.monotonic()
        self._refused_connections = True
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def report(self, code: int) -> tuple[int, str]:
        """The host's exit code and error after the server ended by itself. The server's own error is in the same log.

        TRANSIENT_EXIT lets the launcher start it again: a port in use, or a kill without an error before it was ready.
        A server that printed an error before it was ready would fail in the same way again.
        """
        lines = self._log_lines()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if self._refused_connections:
            how = f"accepted no connection for {_REFUSAL_LIMIT_S:g} s and was killed"
        text = f"the {self._options.backend} server {how}"
        pattern, section, reason = r"--{}(?![\w-])", self._options.section, " ".join(end_reason(lines))
        if named := [name for name in section if re.search(pattern.format(name.replace("_", "-")), reason)]:
            text += f" (set by {', '.join(f'{self._options.backend}.{name}' for name in named)})"
        met_taken_port = any(map(PORT_TAKEN.search, lines))
        is_transient = not self._was_ready and (met_taken_port or (code < 0 and not last_error(lines)))
        return (TRANSIENT_EXIT if is_transient else 1), text

    def _log_lines(self) -> list[str]:
        """The lines written since the start, at most the last `_TAIL_BYTES`."""
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
    if os.getpgrp() != os.getpid():  # started by hand: the guard must not kill others in the group
        os.setpgid(0, 0)
    host = ServerHost(options, replica_factory(options.backend))
    bind_collectives(options.host)  # the server inherits the choice
    start_guard()
    code = asyncio.run(host.run())
    if code is not None:
        exit_code, text = host.report(code)
        sys.stderr.write(f"{ERROR_PREFIX}{text}\n")
        sys.exit(exit_code)


if __name__ == "__main__":
    run_main(main)
