"""Starts a real vLLM or SGLang on the CPU, with the command of a launcher, and ends it; for tests and by hand.

The native server starts in the same way, so that a test can compare all three.

    python tests/servers/real_server.py vllm CHECKPOINT ['{"max_num_seqs": 8}']     serves until Ctrl-C

`wait_ready` waits for the server to answer /health: the server unblocks it, or its end, or the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Literal

from areal.api.config import GenerationHyperparameters, GRPOConfig, InferenceEngineConfig, PPOActorConfig
from areal.fleet.server_backend import backend_named
from areal.fleet.server_host import filled_in, port_names
from areal.system.network import bind_socket, run_token

Backend = Literal["native", "vllm", "sglang"]
ROOT = Path(__file__).parents[2]
SGLANG_STUBS = ROOT / "tests" / "servers" / "environments" / "sglang_cpu"
"""Stubs of the packages that SGLang imports and a machine without a GPU cannot install; they go on PYTHONPATH."""
READY_LIMIT_S = 300.0
"""A start takes 20 to 100 s on two busy cores."""
_TELL_S = 15.0
CONTEXT_LENGTH = 1024
FLAGS: dict[Backend, dict[str, Any]] = {
    "native": {"context_length": CONTEXT_LENGTH},
    "vllm": {"max_model_len": CONTEXT_LENGTH},
    "sglang": {"context_length": CONTEXT_LENGTH},
}


class ServerFailed(Exception):
    """It ended, or did not get ready; says the last words of its log."""


def environment_python(backend: Backend) -> Path:
    """The interpreter of the server's environment. ServerFailed, saying what to do, where it is not installed."""
    folder = ROOT / f".venv-{backend}"
    if not (folder / ".installed").exists():
        raise ServerFailed(
            f"{folder.name} is not set up: run `make test-{backend}`, or `make {folder.name}/.installed`"
        )
    return folder / "bin" / "python"


def server_start(
    backend: Backend, model: Path, flags: dict[str, Any], temperature: float, size: int, **rollout: Any
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command, with placeholders, and the variables that a launcher starts this server with."""
    if backend == "native":
        words = ("-m", "areal.inference.server", f"--model-path={model}", "--port={port}", "--dtype=float32")
        ours = (f"--{name.replace('_', '-')}={value}" for name, value in (FLAGS[backend] | flags).items())
        return (sys.executable, *words, *ours), os.environ | {"OMP_NUM_THREADS": "1"}
    config = GRPOConfig(
        experiment_name="servers",
        trial_name="by-hand",
        allocation_mode=f"{backend}:d1t{size}+fsdp:d1",
        actor=PPOActorConfig(path=str(model), dtype="float32", temperature=temperature),
        gconfig=GenerationHyperparameters(temperature=temperature),
        server_python=str(environment_python(backend)),
        rollout=InferenceEngineConfig(**rollout),
        **{backend: FLAGS[backend] | flags},
    )
    kind = backend_named(backend)
    command = kind.command(config, False)
    env = os.environ | {"OMP_NUM_THREADS": "1"} | command.env
    if kind.core_bindings is not None:
        env |= kind.core_bindings(0, size, 1, range(os.cpu_count() or 1))
    if backend == "sglang":
        env["PYTHONPATH"] = str(SGLANG_STUBS)
    env["PATH"] = f"{Path(command.argv[0]).parent}{os.pathsep}{env['PATH']}"
    return command.argv, env


class RealServer:
    """One server, in a process group of its own, with its output in `log`."""

    def __init__(
        self,
        backend: Backend,
        model: Path,
        folder: Path,
        *,
        flags: dict[str, Any] | None = None,
        temperature: float = 1.0,
        size: int = 1,
        name: str = "server",
        **rollout: Any,
    ) -> None:
        """Start it, for a run with these `rollout` options. `flags` are more of the server's own, as in a run's
        configuration, and `temperature` is that run's: vLLM tells the log-probabilities of one only. `size`: ranks over
        which the model is cut."""
        command, env = server_start(backend, model, flags or {}, temperature, size, **rollout)
        # Held, not listening: nobody else is given these ports, and the server can listen on them.
        self._bound = {placeholder: bind_socket() for placeholder in port_names(command)}
        ports = {placeholder: bound.getsockname()[1] for placeholder, bound in self._bound.items()}
        port = ports["{port}"]
        self.backend: Backend = backend
        self.address = f"http://127.0.0.1:{port}"
        self.log = folder / f"{backend}-{name}-{port}.log"
        self._name = name
        self._began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                filled_in(command, ports, 0),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
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
            request = urllib.request.Request(
                f"{self.address}/health", headers={"Authorization": f"Bearer {run_token()}"}
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
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
        for bound in self._bound.values():
            bound.close()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("vllm", "sglang"))
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("flags", type=json.loads, nargs="?", help='of the server, as JSON: {"enable_lora": true}')
    args = parser.parse_args(argv)
    server = RealServer(args.backend, args.checkpoint, Path.cwd(), flags=args.flags)
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
