"""Starts a real vLLM or SGLang by hand, on the CPU, and ends it: what the tests of this folder and a person need.

    python tests/servers/real_server.py vllm CHECKPOINT [--flag value ...]     serves until Ctrl-C

`wait_ready` waits for the server to answer /health: the server unblocks it, or its end, or the limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal

from areal.system.network import bind_socket

Backend = Literal["vllm", "sglang"]
ROOT = Path(__file__).parents[2]
SERVER_SIDE = ROOT / "areal" / "server_side"
READY_LIMIT_S = 300.0
"""A start takes 20 to 100 s on two busy cores."""
_TELL_S = 15.0
CONTEXT_LENGTH = 1024


class ServerFailed(Exception):
    """It ended, or did not get ready; says the last words of its log."""


def environment_python(backend: Backend) -> Path:
    """The interpreter of the server's environment. ServerFailed, saying what to do, where it is not installed."""
    folder = ROOT / f".venv-{backend}"
    if not (folder / ".installed").exists():
        raise ServerFailed(f"{folder.name} is not set up: run `make test-{backend}`, or `make {folder.name}/.installed`")
    return folder / "bin" / "python"


def vllm_command(model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    argv = ["-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--enforce-eager", "--dtype", "float32", "--max-model-len", str(CONTEXT_LENGTH)]
    argv += ["--kv-cache-memory-bytes", "64M", "--enable-scale-out", "--max-num-seqs", "32"]
    env = {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "PYTHONPATH": str(SERVER_SIDE),
    }
    return argv, env


def sglang_command(model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    argv = ["-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
    argv += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-cuda-graph"]
    argv += ["--context-length", str(CONTEXT_LENGTH), "--max-total-tokens", "16384", "--max-running-requests", "32"]
    argv += ["--enable-metrics", "--incremental-streaming-output"]
    return argv, {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SERVER_SIDE / "sglang_cpu")}


class RealServer:
    """One server, in a process group of its own, with its output in `log`."""

    def __init__(self, backend: Backend, model: Path, folder: Path, *flags: str, name: str = "server") -> None:
        """Start it; `flags` come after, and so above, those of every test."""
        python = environment_python(backend)
        with bind_socket() as bound:  # free a moment ago, which is all that a server that binds by itself allows
            port = bound.getsockname()[1]
        argv, env = (vllm_command if backend == "vllm" else sglang_command)(model, port)
        self.backend: Backend = backend
        self.address = f"http://127.0.0.1:{port}"
        self.log = folder / f"{backend}-{name}-{port}.log"
        self._name = name
        self._began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(python), *argv, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"} | env,
                start_new_session=True,
            )

    def wait_ready(self, limit_s: float = READY_LIMIT_S) -> RealServer:
        """Until it answers; says now and then that it waits. ServerFailed when it ends or takes too long."""
        told = self._began
        while not self._answers():
            now = time.monotonic()
            if self.process.poll() is not None:
                raise ServerFailed(f"{self._name} ended with {self.process.returncode}:\n{self.last_words()}")
            if now > self._began + limit_s:
                raise ServerFailed(f"{self._name} is not ready after {limit_s:g} s:\n{self.last_words()}")
            if now > told + _TELL_S:
                told = now
                self._tell(f"waits {now - self._began:.0f} s so far; log: {self.log}")
            time.sleep(0.25)
        self._tell(f"ready after {time.monotonic() - self._began:.0f} s at {self.address}")
        return self

    def _tell(self, words: str) -> None:
        print(f"[{self.backend} {self._name}] {words}", file=sys.__stderr__, flush=True)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=30) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def last_words(self, num_bytes: int = 3000) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-num_bytes:].decode(errors="replace")

    def kill_all(self) -> None:
        """SIGKILL to the whole group, as on a machine that dies; its children hold ports and memory otherwise."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main(argv: list[str]) -> int:
    backend, model, *flags = argv
    if backend not in ("vllm", "sglang"):
        print("vllm or sglang?", file=sys.stderr)
        return 2
    server = RealServer(backend, Path(model), Path.cwd(), *flags)
    try:
        server.wait_ready()
        server.process.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.kill_all()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
