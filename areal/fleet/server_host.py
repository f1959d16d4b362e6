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
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from areal.api.config import InferenceEngineConfig, LauncherConfig, PPOConfig
from areal.api.config.load import load_experiment
from areal.api.config.redaction import public_command
from areal.api.errors import ArealError, ConfigError, LaunchError, RequestError, WeightSyncError
from areal.api.registry import entries
from areal.fleet.broadcasts import Broadcast, BroadcastReceiver
from areal.fleet.replica import AnswerForm, ReplicaFactory, ReplicaInfo, ReplicaLoad
from areal.fleet.server_backend import backend_named, replica_factory
from areal.fleet.server_log import PORT_TAKEN, end_reason, last_error
from areal.observe.http_log import HttpLogger
from areal.observe.log import configure_logging, get_logger
from areal.system.discovery import NameRegistry, announce_server, registry_of
from areal.system.folders import PULLED_WEIGHTS, FolderPuller, Pulled, folder_routes
from areal.system.group_guard import start_guard
from areal.system.heartbeat import beating_loop, launched_heartbeat
from areal.system.http_guard import RequestGuard, guarded, read_body
from areal.system.network import (
    LOOPBACK,
    Host,
    bind_collectives,
    bind_socket,
    http_address,
    is_loopback,
    listen,
    required_token,
)
from areal.system.process import (
    ERROR_PREFIX,
    TRANSIENT_EXIT,
    ProcessContext,
    in_daemon_thread,
    kill_rest_of_group,
    run_main,
    tied_to_this_process,
)
from areal.system.relay import pass_on_to
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# The placeholders in the command of a foreign server, and how the parts of a server over several machines meet.

_LOG = get_logger(__name__)

_PORT = re.compile(r"\{port(?:_[a-z]+)?\}")
_FIRST = re.compile(r"\{first(?:_address|_port)?\}")
STORE_COMMAND = (sys.executable, "-m", "areal.weights.update_group")
"""Serves torch's store on loopback and prints its port. The host of a server itself does not import torch."""
STORE_START_S = 120.0
"""It imports torch, from a file system that may be slow."""
CLIENT_OF_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Environment of the parts: torch's ranks join the store at the given address, and none of them serves one."""
_INDEX = re.compile(r"\{index(?:\+(\d+))?\}")


def port_names(command: Sequence[str]) -> list[str]:
    """The different port placeholders of a command."""
    return sorted({port for word in command for port in _PORT.findall(word)})


def filled_in(
    command: Sequence[str], ports: Mapping[str, int], index: int, first: tuple[str, int] = ("", 0)
) -> list[str]:
    """The command with its placeholders replaced. `first`: where part 0 listens for the others."""
    address, port = first
    both = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    by_name = {"{first}": both, "{first_address}": address, "{first_port}": str(port)}
    with_first = [_FIRST.sub(lambda match: by_name[match[0]], word) for word in command]
    with_ports = [_PORT.sub(lambda match: str(ports[match[0]]), word) for word in with_first]
    return [_INDEX.sub(lambda match: str(index + int(match[1] or 0)), word) for word in with_ports]


def first_part(
    registry: NameRegistry | None, index: int, part: int, host: Host, bound: socket.socket | None, limit_s: float
) -> tuple[str, int]:
    """Address and port where part 0 of server `index` listens for the others.

    Part 0 registers them: the port of `bound`. In the other parts, which register their addresses, `bound` is None.
    ServerUnavailable when nothing is registered in `limit_s` seconds.
    """
    assert registry is not None, "the parts of a server find each other by the registry of their run"
    if bound is not None:
        address, port = host.advertise, int(bound.getsockname()[1])
        registry.add(f"parts/{index}", json.dumps({"address": address, "port": port}), replace=True)
        return address, port
    registry.add(f"part_hosts/{index}-{part}", host.advertise, replace=True)
    fields = json.loads(registry.wait(f"parts/{index}", limit_s))
    return str(fields["address"]), int(fields["port"])


def is_part(registry: NameRegistry | None, index: int, num_parts: int, host: Host, peer: str) -> bool:
    """Whether the machine with address `peer` has a part of server `index`, whose part 0 is on `host`."""
    assert registry is not None, "the parts of a server find each other by the registry of their run"
    names = (f"part_hosts/{index}-{part}" for part in range(1, num_parts))
    return is_loopback(peer) or peer in (host.bind, host.advertise, *map(registry.get, names))


@contextlib.asynccontextmanager
async def meeting_point(
    bound: socket.socket | None, may_join: Callable[[str], bool], command: Sequence[str] = STORE_COMMAND
) -> AsyncIterator[None]:
    """Relay connections at `bound` to the store of `command`, which starts with the first one; None = no store here.

    The store checks no token and listens on loopback. `may_join` is called with the address of each client, and may
    block; others are refused.
    """
    if bound is None:
        yield
        return
    store: asyncio.Task[tuple[asyncio.subprocess.Process, int]] | None = None

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal store
        peer = writer.get_extra_info("peername")[0]
        with contextlib.closing(writer):
            try:
                if not await asyncio.to_thread(may_join, peer):
                    _LOG.warning("refused a connection from %s: no part of this server is on that machine", peer)
                    return
                if store is None:
                    store = asyncio.create_task(_start_store(command), name="start the store of the parts")
                _, port = await asyncio.shield(store)
                await pass_on_to(LOOPBACK, port, reader, writer)
            except (ArealError, OSError, ValueError) as error:
                _LOG.error("%s cannot reach the store of the parts: %s", peer, error)
                return

    server = await asyncio.start_server(relay, sock=bound)
    try:
        yield
    finally:
        server.close()  # its connections end with the store
        if store is not None:
            store.cancel()  # ends only a store that still starts
            (started,) = await asyncio.gather(store, return_exceptions=True)
            if not isinstance(started, BaseException):
                await _end(started[0])


async def _start_store(command: Sequence[str]) -> tuple[asyncio.subprocess.Process, int]:
    """The process and the port that it printed; ValueError when it does not print one. It dies with this process."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, preexec_fn=tied_to_this_process()
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(STORE_START_S):
            line = await process.stdout.readline()
        if not line:
            raise ValueError(f"it ended with exit code {await process.wait()}")
        return process, int(line)
    except BaseException as error:
        await _end(process)
        if isinstance(error, TimeoutError):
            raise ValueError(f"it has no port after {STORE_START_S:g} s") from error
        raise


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def announce_part(registry: NameRegistry, index: int, part: int, process_name: str, gateway: str) -> None:
    """Register a part that serves no requests as ready, and its `gateway` if it has one."""
    if gateway:
        registry.add(f"gateways/{index}-{part}", gateway, replace=True)
    registry.add(f"ready/{process_name}", json.dumps({"pid": os.getpid()}), replace=True)


def gateways_of_parts(registry: NameRegistry | None, index: int, num_parts: int, limit_s: float) -> list[str]:
    """The gateways of the other parts of server `index`. ServerUnavailable when one is not registered in `limit_s`."""
    if registry is None:
        return []
    return [registry.wait(f"gateways/{index}-{part}", limit_s) for part in range(1, num_parts)]


# ----------------------------------------------------------------------------------------------------------------------
# The gateway of a foreign server: an HTTP server that requires the run's token and passes requests on.
#
# SGLang and vLLM protect only a part of their routes by a key. On a host that other machines can reach, such a server
# listens on loopback, and its gateway on the host's address. A gateway also copies weights to this machine, and lets
# the gateways of the other parts of its server do the same on theirs.

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
"""Headers of one connection (RFC 9110, section 7.6.1)."""
_NOT_PASSED_ON = _HOP_BY_HOP | {"host", "authorization", "content-length"}


@asynccontextmanager
async def gateway(
    host: Host,
    token: str,
    server: str,
    parts: Callable[[], list[str]] = list[str],
    *,
    part: int = 0,
    receive_limit_s: float = 0.0,
) -> AsyncIterator[str]:
    """Serve on `host` while the block runs; yields the address. Other requests with `token` go to `server`, an address.

    `parts` returns the gateways of the other parts of a server over several machines; it may block. `part`: the number
    of this one. `receive_limit_s`: time limit of a wait in a broadcast of the trainer; 0: there is none to receive.

    An answer is passed on while it arrives. When the client leaves, the request to the server is aborted; when the
    server breaks off an answer, so does the gateway.
    """
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session:
        app = web.Application(middlewares=[guarded(RequestGuard(token, host), _error)], client_max_size=0)
        puller = FolderPuller(token)
        app.router.add_post("/pull_weights", _takes(_pulling(puller), session, token, parts))
        receiver = BroadcastReceiver(puller, token, part=part, limit_s=receive_limit_s)
        if receive_limit_s:
            await receiver.start()
            app.router.add_post("/receive_weights", _takes(_receiving(receiver), session, token, parts))
        app.add_routes(folder_routes(puller.offered, PULLED_WEIGHTS, _error))
        app.router.add_route("*", "/{path:.*}", _passes_on(session, server))
        http_log = HttpLogger()
        runner = web.AppRunner(app, access_log=None, logger=http_log, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        bound = listen(host, token)
        await web.SockSite(runner, bound).start()
        try:
            yield http_address(bound, host.advertise)
        finally:
            await runner.cleanup()
            await receiver.end()
            puller.close()
            http_log.close()


def _error(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": code}}, status=status)


_Take = Callable[[dict[str, Any]], Coroutine[Any, Any, Pulled]]
"""Get the weights that the body of a request names. KeyError, TypeError, ValueError or AttributeError for others."""


def _pulling(puller: FolderPuller) -> _Take:
    async def pull(body: dict[str, Any]) -> Pulled:
        url, mirrors = str(body["url"]), [str(mirror) for mirror in body.get("mirrors", ())]
        deltas = {str(base): str(delta) for base, delta in body.get("deltas", {}).items()}
        return await asyncio.wrap_future(in_daemon_thread(lambda: puller.pull(url, mirrors, deltas), "pull weights"))

    return pull


def _receiving(receiver: BroadcastReceiver) -> _Take:
    async def receive(body: dict[str, Any]) -> Pulled:
        return await receiver.receive(Broadcast.parse(body, receiver.part))

    return receive


def _takes(take: _Take, session: aiohttp.ClientSession, token: str, parts: Callable[[], list[str]]) -> Handler:
    """The route by which all parts of a server get weights."""
    headers = {"Authorization": f"Bearer {token}"}

    async def take_by(address: str, body: dict[str, Any]) -> Pulled:
        async with session.post(address, json=body, headers=headers) as answer:
            fields = await answer.json()
            if answer.status == 200:
                return Pulled(Path(fields["path"]), str(fields["problem"]), int(fields["num_bytes"]))
            kind = RequestError if answer.status == 400 else WeightSyncError
            raise kind(fields["error"]["message"], code=fields["error"]["code"])

    async def take_all(request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await read_body(request))
            others = await asyncio.to_thread(parts)
            try:
                async with asyncio.TaskGroup() as group:  # when a part fails, the others end
                    calls = [take(body), *(take_by(part + request.path, body) for part in others)]
                    tasks = [group.create_task(call) for call in calls]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            pulled_parts = [task.result() for task in tasks]
            path, *different = dict.fromkeys(str(pulled.path) for pulled in pulled_parts)
            if different:
                both = f"{path} and {', '.join(different)}"
                text = f"the parts of this server keep weights in {both}: set one TMPDIR"
                raise WeightSyncError(text, code="weights.pull_failed")
        except aiohttp.ClientError as error:
            return _error(500, f"another part of this server does not answer: {error}", "weights.pull_failed")
        except ArealError as error:
            return _error(400 if isinstance(error, RequestError) else 500, str(error), error.code)
        except (ValueError, KeyError, TypeError, AttributeError):
            return _error(400, "the body is not an object with the fields of this route", "weights.invalid_request")
        problem = next((pulled.problem for pulled in pulled_parts if pulled.problem), "")
        num_bytes = sum(pulled.num_bytes for pulled in pulled_parts)
        return web.json_response({"path": path, "problem": problem, "num_bytes": num_bytes})

    return take_all


def _passes_on(session: aiohttp.ClientSession, server: str) -> Handler:
    async def pass_on(request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_PASSED_ON}
        try:
            body = await read_body(request) if request.can_read_body else None
        except RequestError as error:
            return _error(400, str(error), error.code)
        try:
            response = await session.request(
                request.method, f"{server}{request.raw_path}", headers=headers, data=body, allow_redirects=False
            )
        except aiohttp.ClientConnectionError as error:
            return web.json_response({"error": {"message": f"the server does not answer: {error}"}}, status=502)
        async with response:
            passed = {name: value for name, value in response.headers.items() if name.lower() not in _HOP_BY_HOP}
            answer = web.StreamResponse(status=response.status, reason=response.reason, headers=passed)
            await answer.prepare(request)
            try:
                async for piece in response.content.iter_any():
                    await answer.write(piece)
            except (aiohttp.ClientError, asyncio.IncompleteReadError):
                if request.transport is not None:
                    request.transport.abort()
                return answer
            await answer.write_eof()
            return answer

    return pass_on


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
    """Address at which the run reaches the server: on loopback itself, elsewhere its gateway."""
    part: int = 0
    num_parts: int = 1
    ready_limit_s: float = LauncherConfig().ready_timeout_s
    """Time limit for the other parts to find part 0."""
    gets_weights: bool = False
    """The host copies or receives the weights of each version, so the server has a gateway on loopback too."""
    receives: bool = False
    """It receives them, in a broadcast."""


def parse_options(argv: Sequence[str]) -> HostOptions:
    """Options from flags, and from the run's config and the launcher's context if there are any."""
    parser = argparse.ArgumentParser(
        prog="python -m areal.fleet.server_host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --backend NAME [--config RUN/config.yaml] -- COMMAND ... {port} ...",
    )
    foreign = sorted(name for name in entries("backends") if backend_named(name).flags)
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
    gets_weights = receives = False
    if args.config:
        config = load_experiment(["--config", args.config], allow_unknown_top_level=True)
        if not isinstance(config, PPOConfig):
            raise ConfigError(f"{args.config} configures a training without servers", code="fleet.host_command")
        launcher, rollout = config.launcher, config.rollout
        section = tuple(backend_named(args.backend).given(config))
        receives = config.actor.weight_update_mode == "delta_xccl"
        gets_weights = receives or config.actor.pulls_weights
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
        gets_weights=gets_weights,
        receives=receives,
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
        self._ports = {name: bind_socket() for name in port_names(options.command)}
        self._address = http_address(self._ports["{port}"])
        self._meeting = bind_socket(options.host.bind) if options.num_parts > 1 and options.part == 0 else None
        self._replica = make_replica(options.process_name, self._address, AnswerForm())
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
            os.environ |= CLIENT_OF_STORE
            os.environ[backend_named(options.backend).address_variable] = options.host.advertise
            known = options.registry, options.index, options.part, options.host, self._meeting
            first = await asyncio.to_thread(first_part, *known, options.ready_limit_s)
        command = filled_in(options.command, ports, options.index, first)
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
            may_join = partial(is_part, *known, options.num_parts, options.host)
            await stack.enter_async_context(meeting_point(self._meeting, may_join))
            if options.gets_weights or not (options.part or is_loopback(options.host.bind)):
                num_parts = 1 if options.part else options.num_parts  # part 0 lets the others copy weights
                parts = partial(gateways_of_parts, *known, num_parts, options.ready_limit_s)
                token = required_token("the gateway of a server")
                limit_s = options.update_limit_s if options.receives else 0.0
                served = gateway(options.host, token, self._address, parts, part=options.part, receive_limit_s=limit_s)
                address = await stack.enter_async_context(served)
            await self._watch(process, address)

    async def _watch(self, process: asyncio.subprocess.Process, address: str) -> None:
        """Wait until the server is ready, announce its public address, then poll its health.

        A part that serves no requests is ready once its process runs.
        """
        options = self._options
        if options.part and options.registry is not None:
            self._health.follows()
            part = options.index, options.part, options.process_name, address
            await asyncio.to_thread(announce_part, options.registry, *part)
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
