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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import uvloop
from aiohttp import web

from areal.api.config import NativeServerConfig, PPOConfig
from areal.api.config.load import load_experiment
from areal.api.errors import ConfigError
from areal.inference.engine import Engine
from areal.inference.engine_builder import build_engine, load_detokenizer, request_limits, resolve_model_path
from areal.inference.request_parser import seed_source
from areal.inference.server_routes import ServerApp
from areal.observe.http_log import HttpLogger
from areal.observe.log import configure_logging, get_logger
from areal.observe.spans import tracing
from areal.observe.trace import ChromeTracer, open_tracer
from areal.system.device import bind_to_gpu_node, pick_device
from areal.system.discovery import NameRegistry, announce_server, registry_of
from areal.system.folder_puller import FolderPuller
from areal.system.heartbeat import beating_loop, launched_heartbeat
from areal.system.http_guard import RequestGuard
from areal.system.network import BACKLOG, TOKEN_VARIABLE, Host, bind_collectives, http_address, listen, required_token
from areal.system.process import ProcessContext, raise_open_file_limit, run_main, start_is_over
from areal.system.run_paths import RunPaths
from areal.weights.fast_products import fast_products

_LOG = get_logger(__name__)


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
    names = ("model_path", "device", "dtype", "context_length", "max_running_requests", "max_total_tokens")
    names += ("chunked_prefill_size", "random_seed", "log_level")
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    native = replace(native, **given)
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
    puller = FolderPuller(options.token)
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
    with tracing(options.tracer), fast_products(), loop as runner:
        failure = runner.run(serve_until_signal(options))
    if failure is not None:
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
