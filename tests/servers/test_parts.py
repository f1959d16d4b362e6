"""A real server whose two parts have separate hosts, as on two machines: one address, exact answers, exact weights."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from areal.fleet.server_backend import backend_named
from areal.system.discovery import FileRegistry
from areal.system.network import Host
from areal.system.run_paths import RunPaths
from tests.expect import serve
from tests.fixed_trainer import FixedTrainer
from tests.process_context import a_context
from tests.servers.checkpoints import Scorer, build_model
from tests.servers.real_server import READY_LIMIT_S, Backend, server_start
from tests.servers.server_kit import TOLERANCE, Kit, a_request, gap

CONFIG = """
experiment_name: parts
trial_name: run
allocation_mode: {backend}:d1t2+fsdp:d1
cluster: {{fileroot: {folder}}}
train_dataset: {{path: rows.jsonl}}
reward_fn: math
actor: {{path: {model}, dtype: float32, optimizer: {{lr: 1.0e-5}}, weight_update_mode: http}}
"""


@dataclass
class Parts:
    """The hosts of both parts."""

    hosts: list[subprocess.Popen[bytes]]
    registry: FileRegistry
    logs: list[Path]

    @property
    def address(self) -> str:
        return json.loads(self.registry.get("servers/0") or "{}")["address"]

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.hosts[0]

    def listening(self) -> list[str]:
        """The addresses at which the processes of all parts accept connections."""
        hosts = [psutil.Process(host.pid) for host in self.hosts]
        processes = [item for host in hosts for item in (host, *host.children(recursive=True))]
        result = [(process.name(), at) for process in processes for at in process.net_connections("tcp")]
        return [f"{at.laddr.ip}:{at.laddr.port} of {name}" for name, at in result if at.status == psutil.CONN_LISTEN]

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_LIMIT_S
        while self.registry.get("ready/server-0") is None:
            texts = [log.read_text()[-3000:] for log in self.logs]
            assert [host.poll() for host in self.hosts] == [None, None], texts
            assert time.monotonic() < deadline, texts
            time.sleep(0.1)


@pytest.fixture
def parts(
    backend: Backend, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Parts]:
    """With a gateway, a private folder for temporary files and private shared memory each, as on two machines."""
    monkeypatch.setenv("AREAL_SERVER_TOKEN", "token-of-the-parts")
    (tmp_path / "tmp").mkdir()
    # vLLM takes parts with common shared memory for one machine, and then uses sockets in the folder.
    mounts = 'mount -t tmpfs none "$TMPDIR" && mount -t tmpfs none /dev/shm && exec "$@"'
    private = ["unshare", "--mount", "sh", "-c", mounts, "sh"]
    paths = RunPaths(tmp_path / "parts" / "run")
    paths.logs.mkdir(parents=True)
    paths.config.write_text(CONFIG.format(backend=backend, folder=tmp_path, model=models["old"]))
    kind = backend_named(backend)
    assert kind.part_words is not None
    made = Parts([], FileRegistry(paths.names), [])
    with ExitStack() as stack:
        for part in (0, 1):
            address = f"127.0.0.{2 + part}"
            context = a_context(
                role="server",
                run_dir=str(paths.root),
                host=Host(bind=address, advertise=address, node=f"node{part}"),
                part=part,
                num_parts=2,
            )
            command, env = server_start(backend, models["old"], {}, 1.0, 2)
            host = [
                sys.executable,
                "-m",
                "areal.fleet.server_host",
                "--backend",
                backend,
                "--config",
                str(paths.config),
            ]
            made.logs.append(paths.log_of(context.name))
            log = stack.enter_context(made.logs[-1].open("wb"))
            made.hosts.append(
                subprocess.Popen(
                    [*private, *host, "--", *command, *kind.part_words(part, 2)],
                    env=env | {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path / "tmp")} | context.to_env(),
                    stdout=log,
                    stderr=log,
                    process_group=0,
                )
            )
        try:
            yield made
        finally:
            for item in made.hosts:
                if item.poll() is None:
                    os.killpg(item.pid, signal.SIGKILL)
                item.wait()


async def test_two_parts_serve_as_one_and_take_weights_by_collective_and_over_http(
    parts: Parts, kit: Kit, old: Scorer, new: Scorer
) -> None:
    await asyncio.to_thread(parts.wait_ready)
    assert parts.registry.list("servers").keys() == {"servers/0"}
    assert parts.registry.get("ready/server-0-part-1") is not None
    assert [at for at in parts.listening() if not at.startswith("127.")] == []
    fleet = await kit.fleet(parts)  # type: ignore[arg-type]
    assert gap(await fleet.agenerate(a_request(40)), old) < TOLERANCE
    trainer = FixedTrainer(build_model(2))
    collective, pulled = kit.collective(fleet, trainer, ranks_per_replica=2), kit.http(fleet, trainer)
    await asyncio.to_thread(serve, collective, 1)
    response = await fleet.agenerate(a_request(40))
    assert response.output_versions == [1] * 40
    assert gap(response, new) < TOLERANCE
    trainer.model = build_model(1)
    await asyncio.to_thread(serve, pulled, 2)
    assert gap(await fleet.agenerate(a_request(40)), old) < TOLERANCE
    os.kill(parts.hosts[1].pid, signal.SIGKILL)
    assert await asyncio.to_thread(parts.hosts[1].wait, 60) == -signal.SIGKILL
