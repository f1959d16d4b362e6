"""Marks every test of this folder as `tinker`: the real SDK 0.38 and its cookbook, from .venv-tinker, against a real
`areal serve` of a tiny model. `make test-tinker` makes the environment; without it a test fails."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal.serve.audit import audit_service
from tests.tinker.recipe_folder import write_folder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SDK_PYTHON = ROOT / ".venv-tinker/bin/python"
READY_S = 180.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder: the other make targets leave them out."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.tinker)


@dataclass(frozen=True)
class Served:
    """A running service, and the folder in which its clients run."""

    address: str
    key: str
    run: Path
    clients: Path

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a client."""
        inputs = {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", "PYTHONWARNINGS": "ignore"}
        inputs |= {"HF_HOME": str(self.clients / "hub")}  # else datasets would find rows of an earlier test
        return os.environ | inputs | {"TINKER_BASE_URL": self.address, "TINKER_API_KEY": self.key}

    def python(self, *words: str, limit_s: float = 200.0) -> subprocess.CompletedProcess[str]:
        """A program in the environment of the SDK."""
        command, environ = [str(SDK_PYTHON), *words], self.environ
        return subprocess.run(command, cwd=self.clients, env=environ, capture_output=True, text=True, timeout=limit_s)

    def audit(self) -> dict[str, int]:
        """What the files of the service prove."""
        counts, violations = audit_service(self.run)
        assert violations == []
        return counts


def is_up(port: int) -> bool:
    """The service answers; samples may still have to wait for a server."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/healthz", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@contextmanager
def serving(folder: Path, model: Path, name: str, *words: str, clients: Path) -> Iterator[Served]:
    """`areal serve`, with its files in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "areal", "serve", "--model", str(model), "--name", name, "--port", str(port),
        f"cluster.fileroot={folder}", "actor.dtype=float32", "native.dtype=float32", *words,
    ]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AREAL_")}
    folder.mkdir(parents=True)
    run = folder / "serve" / model.name / "serve"
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + READY_S
        while not is_up(port):
            assert process.poll() is None, (folder / "output.txt").read_text()
            assert time.monotonic() < deadline, (folder / "output.txt").read_text()
            time.sleep(0.1)
        key = json.loads((run / "keys.json").read_bytes())["user"]
        yield Served(f"http://127.0.0.1:{port}", key, run, clients)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.fixture(scope="session")
def recipe_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the folder in which recipes run, the model behind all names)."""
    assert SDK_PYTHON.exists(), "the environment .venv-tinker is missing: make test-tinker makes it"
    folder = tmp_path_factory.mktemp("recipes")
    return folder, write_folder(folder)


@pytest.fixture(scope="module")
def serve(
    recipe_folder: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Served]]:
    """name of the model -> its service. The one of another name ends."""
    clients, model = recipe_folder
    running: dict[str, tuple[Any, Served]] = {}

    def start(name: str) -> Served:
        if name not in running:
            stop()
            manager = serving(tmp_path_factory.mktemp("served") / "run", model, name, clients=clients)
            running[name] = manager, manager.__enter__()
        return running[name][1]

    def stop() -> None:
        for manager, _ in running.values():
            manager.__exit__(None, None, None)
        running.clear()

    yield start
    stop()
