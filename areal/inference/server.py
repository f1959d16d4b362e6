"""The process of the native inference server: options, start, readiness, end.

    python -m areal.inference.server --model-path DIR [--port 0] [--device cpu] [--dtype float32]
    python -m areal.inference.server --config RUN/config.yaml        (under a launcher)

It waits for SIGTERM or Ctrl-C and exits with status 0, or for a failure of the engine thread and exits with status 1.
"""

import argparse
import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvloop
from aiohttp import web

from areal.api.config import NativeServerConfig, PPOConfig
from areal.api.config.load import load_experiment
from areal.api.config.rollout import QUANTIZED_BITS
from areal.api.data import WeightSpec
from areal.api.errors import ArealError, ConfigError, RequestError
from areal.inference.adapters import LoadedAdapters
from areal.inference.engine import (
    Detokenizer,
    Engine,
    build_engine,
    load_detokenizer,
    request_limits,
    resolve_model_path,
)
from areal.inference.generate_route import GenerateRoute
from areal.inference.request_parser import (
    MAX_CONTROL_BYTES,
    MAX_PROMPTS,
    TOO_LARGE,
    AbortBody,
    Body,
    BucketBody,
    FolderBody,
    InstallBody,
    JoinBody,
    LeaveBody,
    LoadBody,
    PauseBody,
    PullBody,
    ReceiveBody,
    RequestLimits,
    UnloadBody,
    error_response,
    invalid,
    json_response,
    ok,
    read_json,
    seed_source,
)
from areal.observe.http_log import HttpLogger
from areal.observe.log import configure_logging, get_logger
from areal.observe.spans import tracing, track
from areal.observe.trace import ChromeTracer, open_tracer
from areal.system.device import bind_to_gpu_node, pick_device
from areal.system.discovery import NameRegistry, announce_server, registry_of
from areal.system.folders import PULLED_WEIGHTS, FolderPuller, folder_routes
from areal.system.heartbeat import beating_loop, launched_heartbeat
from areal.system.http_guard import RequestGuard, guarded
from areal.system.network import BACKLOG, TOKEN_VARIABLE, Host, bind_collectives, http_address, listen, required_token
from areal.system.process import ProcessContext, in_daemon_thread, raise_open_file_limit, run_main, start_is_over
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# HTTP routes for weight updates: from a folder, which may be copied first, or from the trainer's broadcast group.
#
# The engine generates while weights are received. An update without a version is only received; /install_weights makes
# the weights current that were received with the same `update_id`.

JOIN_TIMEOUT_S = 120.0
_in_thread = partial(in_daemon_thread, name="weight-update")


async def _outlasting(work: asyncio.Future[None]) -> None:
    """Wait for work that continues when the client leaves, which cancels its handler: then its error is logged."""
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(_log_error)
        raise


def _log_error(work: asyncio.Future[None]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        _LOG.error("a request whose client has left failed: %s: %s", type(error).__name__, error)


class WeightRoutes:
    """Weight updates of one server, one at a time. A client that disconnects does not interrupt one."""

    def __init__(self, engine: Engine, adapters: LoadedAdapters, puller: FolderPuller) -> None:
        self._engine, self._adapters = engine, adapters
        self._puller = puller
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    def posts(self) -> dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]:
        return {
            "/pull_weights": self._pull,
            "/update_weights_from_disk": self._update_from_disk,
            "/init_weights_update_group": self._init_group,
            "/update_weights_from_distributed": self._update_from_distributed,
            "/install_weights": self._install,
            "/destroy_weights_update_group": self._destroy_group,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
        }

    async def _pull(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, PullBody)
        pull = partial(self._puller.pull, body.url, body.mirrors, body.deltas)
        pulled = await asyncio.wrap_future(in_daemon_thread(pull, "pull weights"))
        return json_response({"path": str(pulled.path), "problem": pulled.problem, "num_bytes": pulled.num_bytes})

    async def _update_from_disk(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, FolderBody)
        folder, held = Path(body.model_path), self._puller.held
        in_memory = held is not None and held.offered.path == folder
        receive = self._receive_held if in_memory else self._engine.weights.receive_folder
        receive = partial(receive, folder)
        return await self._receive(receive, body, aborts=body.abort_all_requests)

    def _receive_held(self, folder: Path) -> None:
        with self._puller.reading(folder) as contents:
            if contents is None:
                message = f"this server has pulled other weights since {folder}: send /pull_weights again before it"
                raise RequestError(message, code="weights.bad_folder")
            self._engine.weights.receive_contents(contents)

    async def _update_from_distributed(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, BucketBody)
        if not body.names or not len(body.names) == len(body.dtypes) == len(body.shapes):
            counts = f"{len(body.names)}, {len(body.dtypes)} and {len(body.shapes)}"
            message = f"names, dtypes and shapes have {counts} items: the counts must be equal, and not 0"
            raise RequestError(message, code="weights.invalid_request")
        self._check_group(body.group_name)
        specs = [
            WeightSpec(name=name, dtype=dtype.removeprefix("torch."), shape=shape)
            for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True)
        ]
        weights = self._engine.weights
        if body.load_format == "published":
            return await self._receive(
                partial(weights.receive_published, specs, body.published, body.delta_bytes), body
            )
        return await self._receive(partial(weights.receive, specs), body)

    async def _receive(
        self, receive: Callable[[], None], body: ReceiveBody, *, aborts: bool = False
    ) -> web.StreamResponse:
        """Receive weights while the engine computes, and install them if the body has their version."""
        engine, version = self._engine, body.weight_version
        mode = "abort" if aborts else "retract" if body.flush_cache else "in_place"

        def update() -> None:
            engine.weights.start(body.update_id)
            receive()
            if version is not None:
                engine.call(partial(engine.install_weights, version, mode, body.update_id)).result()

        return await self._one_at_a_time(_in_thread, update)

    async def _install(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, InstallBody)
        install = partial(self._engine.install_weights, body.weight_version, body.mode, body.update_id)
        return await self._one_at_a_time(self._engine.call, install)

    async def _init_group(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, JoinBody)
        # Joining changes no weight, so the engine continues meanwhile.
        join = partial(
            self._engine.weights.join,
            body.master_address,
            body.master_port,
            body.rank_offset,
            body.world_size,
            body.group_name,
            body.backend,
            JOIN_TIMEOUT_S,
        )
        return await self._one_at_a_time(_in_thread, join)

    async def _destroy_group(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, LeaveBody)
        self._check_group(body.group_name)
        # Without the lock: leaving also ends a receive that waits for a dead trainer.
        await asyncio.wrap_future(_in_thread(self._engine.weights.leave))
        return ok()

    async def _one_at_a_time(
        self, submit: Callable[[Callable[[], None]], Future[None]], command: Callable[[], None]
    ) -> web.StreamResponse:
        """Run `command` with `submit` when all earlier ones are done."""

        async def run() -> None:
            async with self._lock:
                with track("weight command", "weights"):
                    await asyncio.wrap_future(submit(command))

        return await self._to_its_end(run())

    async def _load_adapter(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, LoadBody)
        return await self._to_its_end(self._adapters.load(body.lora_name, Path(body.lora_path)))

    async def _unload_adapter(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, UnloadBody)
        return await self._to_its_end(self._adapters.unload(body.lora_name))

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> web.StreamResponse:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await _outlasting(task)
        return ok()

    def _check_group(self, name: str) -> None:
        if not name or name != self._engine.weights.group_name:
            here = self._engine.weights.group_name or "none"
            message = f"this server is not in the update group {name!r} (it is in {here})"
            raise RequestError(message, code="weights.no_group")


# ----------------------------------------------------------------------------------------------------------------------
# The HTTP interface of the native server: SGLang's dialect, plus the version of every token.
#
# Handlers run in the asyncio thread. A control handler waits until the engine thread has run its command.

_LOG = get_logger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServerApp:
    """Routes of one server."""

    def __init__(
        self, *, model_path: str, draw_seed: Callable[[], int], guard: RequestGuard, puller: FolderPuller
    ) -> None:
        self.model_path = model_path
        self._puller = puller
        self._guard = guard
        self.generate = GenerateRoute(draw_seed)

    def attach(self, engine: Engine, limits: RequestLimits, detokenizer: Detokenizer | None) -> None:
        """Set the engine. Called once, before `application`."""
        self._engine = engine
        self._limits = limits
        self._adapters = LoadedAdapters(engine.runner.adapters, engine.call, _in_thread, engine.weights.base, limits)
        self.generate.attach(engine, limits, self._adapters, detokenizer)
        self._weights = WeightRoutes(engine, self._adapters, self._puller)

    def application(self) -> web.Application:
        """The aiohttp application with all routes."""
        largest = max(MAX_CONTROL_BYTES, self.generate.parser.max_group_bytes)
        application = web.Application(
            middlewares=[guarded(self._guard, error_response), _errors_as_json], client_max_size=largest
        )
        posts: dict[str, Handler] = {
            "/generate": self.generate.answer,
            "/generate_group": self.generate.answer_group,
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush_cache,
            **self._weights.posts(),
        }
        gets: dict[str, Handler] = {
            "/health": self._health,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/metrics": self._metrics,
        }
        for path, handler in posts.items():
            application.router.add_post(path, handler)
        for path, handler in gets.items():
            application.router.add_get(path, handler)
        application.add_routes(folder_routes(self._puller.offered, PULLED_WEIGHTS, error_response))
        return application

    # ---- control

    async def _run(self, command: Callable[[], None]) -> None:
        """Run a command in the engine thread between two steps."""
        await _outlasting(asyncio.wrap_future(self._engine.call(command)))

    async def _abort_request(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, AbortBody)
        if body.abort_all:
            await self._run(self._engine.abort_all)
        elif body.rid is not None:
            self.generate.abort(body.rid)
        else:
            raise invalid("the body has neither rid nor abort_all")
        return ok()

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, PauseBody)
        await self._run(partial(self._engine.pause, body.mode))
        return ok()

    async def _continue(self, request: web.Request) -> web.StreamResponse:
        await read_json(request, Body)
        await self._run(self._engine.resume)
        return ok()

    async def _flush_cache(self, request: web.Request) -> web.StreamResponse:
        await read_json(request, Body)
        await self._run(self._engine.flush_cache)
        return ok()

    # ---- observation

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self._engine.is_stuck:
            message = f"the engine thread has completed no step for {self._engine.stuck_s:.0f} s"
            return error_response(500, message, "request.engine_failed")
        return ok()

    async def _model_info(self, request: web.Request) -> web.StreamResponse:
        return json_response(
            {
                "model_path": self.model_path,
                "weight_version": self._engine.version,
                "vocab_size": self._limits.vocab_size,
                "context_length": self._limits.context_length,
                "max_group_samples": min(MAX_PROMPTS, self._engine.scheduler.max_running),
                "adapters": self._adapters.names,
                "is_generation": True,
            }
        )

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        return json_response(
            {**self._figures(), "weight_version": self._engine.version, "is_paused": self._engine.is_paused}
        )

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        lines: list[str] = []
        for name, value in self._figures().items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE areal_{name} {kind}", f"areal_{name} {value}"]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    def _figures(self) -> dict[str, float]:
        scheduler, counters = self._engine.scheduler, self._engine.counters
        return {
            "running_requests": len(scheduler.running),
            "queued_requests": len(scheduler.waiting),
            "kv_tokens_used": scheduler.num_used_tokens,
            "kv_tokens_cached": scheduler.num_kept_tokens,
            "kv_tokens_capacity": scheduler.num_capacity_tokens,
            "generated_tokens_total": counters.generated_tokens,
            "computed_tokens_total": counters.computed_tokens,
            "prefilled_tokens_total": counters.prefilled_tokens,
            "cached_tokens_total": scheduler.num_cached_tokens,
            "evicted_tokens_total": scheduler.num_evicted_tokens,
            "drafted_tokens_total": scheduler.num_drafted_tokens,
            "accepted_tokens_total": scheduler.num_accepted_tokens,
            "finished_requests_total": counters.finished,
            "aborted_requests_total": counters.aborted,
            "preemptions_total": scheduler.num_preemptions,
            "steps_total": counters.steps,
            "busy_seconds_total": round(counters.busy_s, 6),
            "install_seconds_total": round(counters.install_s, 6),
        }


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(413 if error.code == TOO_LARGE else 400, str(error), error.code)
    except ArealError as error:
        _LOG.error("%s failed: %s", request.path, error)
        return error_response(500, str(error), error.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """All options of a server process."""

    native: NativeServerConfig
    host: Host
    port: int
    device: str
    num_threads: int
    token: str
    process_name: str
    index: int
    registry: NameRegistry | None
    tracer: ChromeTracer | None = None
    from_scratch: bool = False
    """The policy starts from random weights of the trainer; the server has no weights until the first update."""
    records_experts: bool = False
    """Answers can have the chosen experts (actor.router_replay)."""


def parse_options(argv: Sequence[str]) -> ServerOptions:
    """Options from flags, then from the config of the run and the context of the launcher, if any."""
    parser = argparse.ArgumentParser(
        prog="python -m areal.inference.server",
        description=f"The native inference server. The environment variable {TOKEN_VARIABLE} must contain a secret; "
        "clients send it with every request as `Authorization: Bearer SECRET`.",
    )
    parser.add_argument(
        "--config", help="config.yaml of the run; its section `native` has the defaults of the options below"
    )
    parser.add_argument("--model-path", help="folder or hub name of the model")
    parser.add_argument("--host", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 = any free one (default)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where the model runs")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="weight and compute type")
    parser.add_argument("--quantization", choices=("none", *QUANTIZED_BITS), help="weights of linear layers")
    parser.add_argument("--num-threads", type=int, help="CPU threads (default: that of torch)")
    parser.add_argument("--context-length", type=int, help="maximum tokens of prompt and answer together")
    parser.add_argument("--max-running-requests", type=int, help="maximum running requests")
    parser.add_argument("--max-total-tokens", type=int, help="capacity of the KV cache in tokens")
    parser.add_argument("--chunked-prefill-size", type=int, help="maximum prompt tokens per step")
    parser.add_argument("--random-seed", type=int, help="seed of requests without a seed")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    args = parser.parse_args(argv)
    context = ProcessContext.from_env()
    native, registry, tracer, from_scratch, records_experts = NativeServerConfig(), None, None, False, False
    if args.config:
        config = load_experiment(["--config", args.config], allow_unknown_top_level=True)
        if not isinstance(config, PPOConfig):
            message = f"{args.config} has no section `native`: this kind of training starts no server"
            raise ConfigError(message, code="config.conflict")
        native = replace(config.native, model_path=config.native.model_path or config.actor.path)
        from_scratch, records_experts = config.servers_start_empty, config.actor.router_replay
        if context is not None:
            registry = registry_of(config)
            tracer = open_tracer(config.perf_tracer, RunPaths.of(config), context.name)
    names = (
        "model_path",
        "device",
        "dtype",
        "quantization",
        "context_length",
        "max_running_requests",
        "max_total_tokens",
        "chunked_prefill_size",
        "random_seed",
        "log_level",
    )
    options = {name: value for name, value in vars(args).items() if name in names and value is not None}
    native = replace(native, **options)
    for name, sentence, *_ in native.problems():
        raise ConfigError(f"--{name.replace('_', '-')}: {sentence}", code="config.conflict")
    if not native.model_path:
        raise ConfigError("no model: set --model-path", code="config.required")
    host = context.host if context else Host()
    if args.host:
        host = Host(bind=args.host, advertise=args.host, node=host.node)
    return ServerOptions(
        native=native,
        host=host,
        port=args.port,
        device=context.device if context and not args.device else pick_device(native.device),
        num_threads=args.num_threads or (context.num_threads if context else torch.get_num_threads()),
        token=required_token("the inference server"),
        process_name=context.name if context else "server",
        index=context.index if context else 0,
        registry=registry,
        tracer=tracer,
        from_scratch=from_scratch,
        records_experts=records_experts,
    )


async def serve(
    options: ServerOptions, stopped: asyncio.Event, on_ready: Callable[[str], None]
) -> BaseException | None:
    """Serve until `stopped` is set. Returns the error of the engine thread; None after a regular end."""
    loop = asyncio.get_running_loop()
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        loop.call_soon_threadsafe(stopped.set)

    native = options.native
    path = resolve_model_path(native.model_path)
    seeds = seed_source(native.random_seed + options.index)
    puller = FolderPuller(options.token, in_memory=True)
    guard = RequestGuard(options.token, options.host)
    app = ServerApp(model_path=str(path), draw_seed=seeds, guard=guard, puller=puller)
    detokenizer = load_detokenizer(path)
    engine = build_engine(
        native,
        path,
        options.device,
        deliver=app.generate.deliver,
        on_failure=fail,
        detokenizer=detokenizer,
        from_scratch=options.from_scratch,
        records_experts=options.records_experts,
    )
    app.attach(engine, request_limits(native, engine.runner, detokenizer), detokenizer)
    bound = listen(options.host, options.token, options.port)
    http_log = HttpLogger()
    # A closed connection cancels its handler, which aborts the request of the client.
    runner = web.AppRunner(
        app.application(),
        access_log=None,
        logger=http_log,
        auto_decompress=False,
        handler_cancellation=True,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    await web.SockSite(runner, bound, backlog=BACKLOG).start()
    engine.start()
    on_ready(http_address(bound, options.host.advertise))
    async with beating_loop(launched_heartbeat(), lambda: _activity(engine)):
        await stopped.wait()
    if failures:
        app.generate.fail_waiting(failures[0])
    else:
        await loop.run_in_executor(None, engine.stop)
    await runner.cleanup()
    puller.close()
    http_log.close()
    return failures[0] if failures else None


def _activity(engine: Engine) -> str | None:
    """The activity for the heartbeat; None when the engine hangs, so that the launcher restarts the server."""
    if engine.is_stuck:
        return None
    paused = "is paused with" if engine.is_paused else "runs"
    scheduler = engine.scheduler
    return f"{paused} {len(scheduler.running)} requests, {len(scheduler.waiting)} queued, version {engine.version}"


async def serve_until_signal(options: ServerOptions) -> BaseException | None:
    """Serve until SIGTERM or Ctrl-C."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)

    def ready(address: str) -> None:
        start_is_over()
        gc.collect()
        gc.freeze()  # otherwise each full collection scans all objects of torch and transformers
        _LOG.info("serving %s on %s", options.native.model_path, address)
        if options.registry is None:  # started by hand
            sys.stdout.write(f"{address}\n")
            sys.stdout.flush()
        else:
            announce_server(options.registry, options.index, options.process_name, address)

    return await serve(options, stopped, ready)


def main() -> None:
    options = parse_options(sys.argv[1:])
    configure_logging(options.native.log_level, options.process_name)
    bind_to_gpu_node()
    torch.set_num_threads(options.num_threads)
    raise_open_file_limit()
    bind_collectives(options.host)
    # Two threads share the interpreter; a short interval reduces the wait for the other thread.
    sys.setswitchinterval(0.001)
    loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with tracing(options.tracer), loop as runner:
        failure = runner.run(serve_until_signal(options))
    if failure is not None:
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
