"""The processes of the service, started by the launcher as a user's script: gateway (controller) and trainer ranks."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import orjson
import uvloop
from aiohttp import web

from areal.api.config import PPOConfig, load_experiment
from areal.fleet.fleet import Fleet
from areal.fleet.server_backend import replica_factory
from areal.observe.http_log import HttpLogger
from areal.observe.log import get_logger
from areal.serve.audit import FOLDER, SETTINGS
from areal.serve.gateway import Gateway, Keys, make_app
from areal.serve.sampling import AdapterPool, Sampling, WholeWeights
from areal.serve.service import ADAPTER, ServedModel, Service, base_folder
from areal.system.discovery import registry_of
from areal.system.heartbeat import beating_loop, launched_heartbeat
from areal.system.network import http_address, listen, required_token
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths
from areal.trainer.process_setup import join_run

_CLEAN_S = 60.0
_VERSIONS = 2**31 - 1
"""Versions of an earlier gateway are lower, and count as abandoned, so that servers load its checkpoints again."""
KEYS = "keys.json"
"""In the folder of the service: the API keys of its users."""


async def serve_clients(config: PPOConfig, context: ProcessContext, served: ServedModel, port: int) -> signal.Signals:
    """Run the gateway until SIGTERM or SIGINT, which is returned.

    It is ready once the servers are: a client that comes before waits for its first sample.
    """
    token, registry, paths = required_token("the gateway"), registry_of(config), RunPaths.of(config)
    folder = paths.root / FOLDER
    service = Service(folder, served, world_size=context.world_size)
    factory = replica_factory(config.server_backend)
    fleet = Fleet(
        registry,
        context.num_servers,
        config.rollout,
        factory,
        seed=config.seed,
        dtype=config.served_dtype,
        owns_adapters=True,
        abandoned=range(1, _VERSIONS if served.is_full else 1),
    )
    if served.is_full:
        weights = WholeWeights(fleet, base_folder(folder, Path(config.actor.path)) / ADAPTER)
    else:
        weights = AdapterPool(fleet, config.native.max_adapters)
    sampling = Sampling(fleet, weights, context_length=served.context_length)
    keys = Keys(json.loads((folder / KEYS).read_bytes()))
    gateway = Gateway(service, sampling, keys)
    app = make_app(gateway, keys, token=token, host=context.host)
    stopped: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda n=number: stopped.done() or stopped.set_result(n))
    http_log = HttpLogger()
    runner = web.AppRunner(app, access_log=None, logger=http_log, auto_decompress=False, shutdown_timeout=1.0)
    await runner.setup()
    journal = asyncio.create_task(service.journal.run(), name="journal")
    cleaning = asyncio.create_task(_clean(service, gateway), name="delete expired objects")
    try:
        async with beating_loop(launched_heartbeat(), service.describe):
            bound = listen(context.host, token, port)
            await web.SockSite(runner, bound).start()
            address = {"address": http_address(bound, context.host.advertise), "pid": os.getpid()}
            registry.add("controller", orjson.dumps(address).decode(), replace=True)
            await fleet.start()
            sampling.has_started.set()
            registry.add("ready/controller", orjson.dumps({"pid": os.getpid()}).decode(), replace=True)
            get_logger("serve").info("ready at %s", address["address"])
            await asyncio.wait([journal, cleaning, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in (journal, cleaning):
                if task.done():
                    task.result()
            return stopped.result()
    finally:
        await sampling.close()
        await fleet.close()
        await runner.cleanup()
        for task in (journal, cleaning):
            task.cancel()
        await asyncio.gather(journal, cleaning, return_exceptions=True)
        service.journal.close()
        http_log.close()


async def _clean(service: Service, gateway: Gateway) -> None:
    """Until it is cancelled."""
    while True:
        await asyncio.sleep(_CLEAN_S)
        await service.delete_expired()
        await gateway.end_silent_sessions()


def main() -> None:
    config = load_experiment(sys.argv[1:])
    assert isinstance(config, PPOConfig)
    context = join_run()
    folder = RunPaths.of(config).root / FOLDER
    settings = json.loads((folder / SETTINGS).read_bytes())
    served = ServedModel(**settings["served"])
    if context.role == "trainer":
        from areal.serve.worker import run_worker

        run_worker(config, context, folder, served)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        number = loop.run(serve_clients(config, context, served, settings["port"]))
    signal.signal(number, signal.SIG_DFL)  # an exit with 0 would be the end of the training
    signal.raise_signal(number)


if __name__ == "__main__":
    main()  # the launcher's own program handles its errors
