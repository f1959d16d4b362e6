"""A run on several nodes under test: its launcher on one of them, and the proof that nothing was lost."""

import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.cluster.nodes import Nodes, Ssh
from tests.faults.conftest import CONFIG, REWARD
from tests.faults.driver import ROOT, Run, process_name
from tests.faults.ledger_proof import raw_events
from tests.faults.proofs import prove

LIMIT_S = 240.0
_SCAN_S = 0.5
_CLONE_NEWNET = 0x40000000
_AGENTS = ("areal.launcher.node_agent", "ray::AgentActor")


class NodeConnection(http.client.HTTPConnection):
    """A connection to a process on the nodes: its socket is made in the network of one of them."""

    def __init__(self, netloc: str, timeout_s: float, network: str) -> None:
        super().__init__(netloc, timeout=timeout_s)
        self._network = network

    def connect(self) -> None:
        failures: list[OSError] = []

        def connect() -> None:  # in a thread, because the thread changes its network
            try:
                with open(self._network) as file:
                    if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                self.sock = socket.create_connection((self.host, self.port), self.timeout)
            except OSError as error:
                failures.append(error)

        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]


@dataclass(kw_only=True)
class ClusterRun(Run):
    """One run folder, and a launcher on the first of `nodes` with the command `module`."""

    nodes: Nodes
    module: str
    environ: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        argv = [sys.executable, "-m", self.module, *self.arguments]
        environ = {name: value for name, value in os.environ.items() if name != "AREAL_SERVER_TOKEN"}
        with open(self.log_path, "ab") as log:
            self.launcher = self.nodes[1].popen(
                argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ | self.environ
            )
        self.num_launches += 1
        self._next_scan_s = 0.0

    def pids(self, *, fresh: bool = False) -> dict[str, int]:
        """As seen from outside of the nodes. Without what a process has started itself."""
        if self.exit_code is not None or self.launcher is None:
            return {}
        if fresh or time.monotonic() >= self._next_scan_s:
            self._next_scan_s = time.monotonic() + _SCAN_S
            found: dict[str, int] = {}
            for process in (process for node in self.nodes for process in _processes(node.pids())):
                if (name := process_name(process, self.folder)) and _is_started_by_agent(process):
                    found[name] = process.pid
            for entered in psutil.Process(self.launcher.pid).children():  # of nsenter
                found["launcher"] = entered.pid
            self._pids = found
        return self._pids

    def connection(self, netloc: str, timeout_s: float) -> http.client.HTTPConnection:
        assert self.launcher is not None
        return NodeConnection(netloc, timeout_s, self.nodes[1].network)

    def _signal(self, names: Sequence[str], number: signal.Signals) -> dict[str, int]:
        struck = super()._signal(names, number)
        if number == signal.SIGCONT and "launcher" in struck and self.launcher is not None:
            self.launcher.send_signal(number)  # nsenter stops itself when its child is stopped
        return struck

    def node_of(self, name: str) -> int:
        """The number of the node that a process runs on."""
        pid = self.pids(fresh=True)[name]
        return next(number for number, node in enumerate(self.nodes, 1) if node.is_on and pid in node.pids())

    def steps(self) -> int:
        """Train steps that the ledger holds as done."""
        try:
            return sum(event["event"] == "consumed" for event in raw_events(self.folder / "ledger"))
        except (OSError, ValueError):  # a line that is being written
            return 0

    def wait_for_step(self, step: int, limit_s: float = LIMIT_S) -> None:
        assert self.wait_for(lambda: self.steps() >= step, limit_s, poll_s=0.1), self.tail(self.log_path, 40)

    def wait(self, limit_s: float = 300.0) -> int:
        """The exit code of the launcher, when it has ended."""
        assert self.launcher is not None
        try:
            return self.launcher.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(self.tail(self.log_path, 40)) from error

    def attach(self, *words: str) -> str:
        """What the launcher's command for a running run prints. It must succeed."""
        argv = [sys.executable, "-m", "areal.launcher.local", "--attach", str(self.folder), *words]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def prove(self, data: Path) -> list[str]:
        """Nothing is lost or trained twice, and no process is left on any node. Returns the facts."""
        assert self.wait() == 0, self.tail(self.log_path, 40)
        facts, problems = prove(self, data=data, is_to_solve=False)
        assert problems == [], problems
        return facts


def ssh_run(nodes: Nodes, ssh: Ssh, folder: Path, config: Path, *overrides: str, hosts: str = "") -> ClusterRun:
    """A run on all nodes, which have ssh servers. It is not started."""
    options = [word for option in ssh.options for word in ("--ssh-option", option)]
    hosts = hosts or ",".join(f"{node.address}:2222" for node in nodes)
    words = ["--hosts", hosts, *options, "--config", str(config), *overrides]
    return _run(nodes, folder, "areal.launcher.ssh", words)


def ray_run(nodes: Nodes, folder: Path, config: Path, *overrides: str) -> ClusterRun:
    """A run on all nodes, which are those of a Ray cluster. It is not started."""
    words = ["--config", str(config), f"cluster.n_nodes={len(list(nodes))}", *overrides]
    return _run(nodes, folder, "areal.launcher.ray", words)


def _run(nodes: Nodes, folder: Path, module: str, arguments: Sequence[str]) -> ClusterRun:
    return ClusterRun(
        arguments=arguments, folder=folder / "faults" / "run", log_path=folder / "launcher.log", nodes=nodes,
        module=module,
    )  # fmt: skip


def _processes(pids: Sequence[int]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for pid in pids:
        try:
            found.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return found


def _is_started_by_agent(process: psutil.Process) -> bool:
    try:
        parent = process.parent()
        words = " ".join(parent.cmdline()) if parent is not None else ""
    except psutil.Error:
        return False
    return any(agent in words for agent in _AGENTS)


def write_config(folder: Path, data: Path) -> Path:
    """The configuration of a short GRPO run in `folder`."""
    text = CONFIG.replace("DATA", str(data)).replace("RUNS", str(folder)).replace("HERE", str(folder))
    (folder / "reward.py").write_text(REWARD)
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def foreign_sockets(nodes: Nodes, allowed: Sequence[int] = ()) -> list[str]:
    """Listening sockets on other addresses than that of their node."""
    found = [(node, address, port) for node in nodes if node.is_on for address, port in node.listening()]
    return [
        f"{node.name}: {address}:{port}"
        for node, address, port in found
        if address != node.address and port not in allowed
    ]
