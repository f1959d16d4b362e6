"""A real etcd cluster on loopback, whose members tests kill, stop and start again."""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

_START_LIMIT_S = 60.0


class EtcdCluster:
    def __init__(self, folder: Path, *, num_members: int = 1) -> None:
        if shutil.which("etcd") is None:
            pytest.exit("etcd is missing: apt-get install etcd-server etcd-client", returncode=2)
        self._folder = folder
        self._ports = [(_free_port(), _free_port()) for _ in range(num_members)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for index in range(num_members):
            self.start(index, wait=False)
        self.wait_until_ready()

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{client}" for client, _ in self._ports)

    def start(self, index: int, *, wait: bool = True) -> None:
        """Start a member, or start it again over its data."""
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports[index])
        members = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, (_, port) in enumerate(self._ports))
        command = ["etcd", "--name", f"m{index}", "--data-dir", str(self._folder / f"m{index}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", members]
        with (self._folder / f"m{index}.log").open("ab") as log:
            self._processes[index] = subprocess.Popen(command, stdout=log, stderr=log)
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Until each running member knows a leader."""
        deadline = time.monotonic() + _START_LIMIT_S
        for index in self._processes:
            while not self._is_ready(index):
                assert time.monotonic() < deadline, (self._folder / f"m{index}.log").read_text()[-2000:]
                time.sleep(0.05)

    def _is_ready(self, index: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ports[index][0]}/health", timeout=2) as answer:
                return b"true" in answer.read()
        except (urllib.error.URLError, OSError):
            return False

    def kill(self, index: int) -> None:
        process = self._processes.pop(index)
        process.kill()
        process.wait()

    def freeze(self, index: int) -> None:
        os.kill(self._processes[index].pid, signal.SIGSTOP)

    def unfreeze(self, index: int) -> None:
        os.kill(self._processes[index].pid, signal.SIGCONT)

    def cpu_s(self) -> float:
        """CPU seconds of all members."""
        return sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in self._processes.values())

    def stop(self) -> None:
        for index in list(self._processes):
            self.kill(index)


def _free_port() -> int:
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        return result.getsockname()[1]
