"""A run on several nodes under test: its launcher on one of them, and the proof that nothing was lost."""

import ctypes
import http.client
import importlib.util
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
import pytest

from areal.system.network import LOOPBACK
from tests.cluster.nodes import SSH_PORT, Node, Nodes, Ssh, ssh_missing, start_ray
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_cluster import missing as slurm_missing
from tests.faults.conftest import CONFIG, REWARD
from tests.faults.driver import ROOT, Run, process_name
from tests.faults.ledger_proof import raw_events
from tests.faults.proofs import prove

LAUNCHERS = ("ssh", "ray", "slurm")
LIMIT_S = 600.0
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


def require(launcher: str) -> None:
    """Fail the test when this machine lacks what the launcher needs."""
    no_ray = "" if importlib.util.find_spec("ray") else "needs the package ray: pip install -e '.[ray]'"
    if problem := {"ray": no_ray, "slurm": slurm_missing(), "ssh": ssh_missing()}[launcher]:
        pytest.fail(problem)


class Cluster:
    """Nodes with what one launcher needs: an ssh server on each, or a Ray or Slurm cluster.

    `folder` holds the ssh keys or the files of Slurm. With Slurm the first node runs no jobs, and a job gets three.
    """

    def __init__(self, nodes: Nodes, launcher: str, folder: Path) -> None:
        self.nodes = nodes
        self.launcher = launcher
        self.ssh = Ssh(folder) if launcher == "ssh" else None
        self.slurm = SlurmCluster(nodes, folder, login_only=True) if launcher == "slurm" else None
        for node in nodes if self.slurm is None else ():
            self.prepare(node)

    @property
    def environ(self) -> dict[str, str]:
        """Of the launcher's command."""
        return dict(os.environ) if self.slurm is None else self.slurm.environment

    def power_on(self, node: Node) -> None:
        """Make a node without power usable again."""
        if self.slurm is not None:
            self.slurm.power_on(node)
        else:
            node.power_on()
            self.prepare(node)

    def prepare(self, node: Node) -> None:
        """Make a node usable after it was switched on."""
        if self.ssh is not None:
            self.ssh.serve(node)
        else:
            start_ray(node, None if node is self.nodes[1] else self.nodes[1])

    def words(self, hosts: str = "") -> list[str]:
        """Words of the launcher's command line that name the nodes."""
        if self.slurm is not None:
            memory = [f"launcher.{role}_mem_per_gpu=1000" for role in ("trainer", "inference_server")]
            return ["cluster.n_nodes=3", "cluster.n_gpus_per_node=0", "launcher.stop_grace_s=3", *memory]
        if self.ssh is None:
            # A new actor imports areal in a process of Ray: minutes when other work uses the cores.
            return [f"cluster.n_nodes={len(list(self.nodes))}", "cluster.node_connect_s=120"]
        options = [word for option in self.ssh.options for word in ("--ssh-option", option)]
        return ["--hosts", hosts or ",".join(f"{node.address}:{SSH_PORT}" for node in self.nodes), *options]


def num_nodes(launcher: str) -> int:
    """Nodes for a run that uses three: with Slurm also one for its controller, and a spare one."""
    return 5 if launcher == "slurm" else 3


@dataclass(kw_only=True)
class ClusterRun(Run):
    """One run folder, and a launcher on the first node of `cluster`."""

    cluster: Cluster
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> Nodes:
        return self.cluster.nodes

    def start(self) -> None:
        module = f"areal.launcher.{self.cluster.launcher}"
        argv = [sys.executable, "-m", module, *self.arguments, *self.cluster.words()]
        environ = {name: value for name, value in self.cluster.environ.items() if name != "AREAL_SERVER_TOKEN"}
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
            result: dict[str, int] = {}
            for process in (process for node in self.nodes for process in _processes(node.pids())):
                if (name := process_name(process, self.folder)) and _is_started_by_agent(process):
                    result[name] = process.pid
            for process in self._launchers():
                result["launcher"] = process.pid
            self._pids = result
        return self._pids

    def _launchers(self) -> list[psutil.Process]:
        """The process that supervises the run: a child of nsenter, or with Slurm the script of the job."""
        assert self.launcher is not None
        if self.cluster.slurm is None:
            return psutil.Process(self.launcher.pid).children()
        return [
            process
            for node in self.nodes
            for process in _processes(node.pids())
            if "--inside" in (words := _words_of(process)) and words[-1].startswith(f"{self.folder}/")
        ]

    def connection(self, netloc: str, timeout_s: float) -> http.client.HTTPConnection:
        assert self.launcher is not None
        return NodeConnection(netloc, timeout_s, self.nodes[1].network)

    def cut_power(self, names: Sequence[str]) -> dict[str, int]:
        """With Slurm, a node that runs nothing of the run is replaced by the first one that does."""
        pids, lost = self.pids(fresh=True), dict[str, int]()
        if self.cluster.slurm is not None:
            used = {node.name for node in self.nodes if set(node.pids()) & set(pids.values())}
            names = [name if name in used else min(used, default=name) for name in names]
        for node in self.nodes:
            if node.name in names and node.is_on:
                ours = set(node.pids())
                lost |= {name: pid for name, pid in pids.items() if pid in ours}
                node.power_off()
        return lost

    def restore(self) -> None:
        for node in self.nodes:
            if not node.is_on:
                self.cluster.power_on(node)

    def _signal(self, names: Sequence[str], number: signal.Signals) -> dict[str, int]:
        has_shell = self.cluster.slurm is None  # the launcher is a child of nsenter
        if has_shell and number in (signal.SIGKILL, signal.SIGCONT) and "launcher" in names and self.launcher:
            # nsenter has stopped itself with its child. It continues after the child has received the signal.
            threading.Timer(0.3, self.launcher.send_signal, [signal.SIGCONT]).start()
        return super()._signal(names, number)

    def node_of(self, name: str) -> str:
        """The name of the node that a process runs on."""
        return self.nodes_of(name).pop()

    def nodes_of(self, *names: str) -> set[str]:
        """The names of the nodes that run these processes."""
        pids = {pid for name, pid in self.pids(fresh=True).items() if name in names}
        return {node.name for node in self.nodes if pids & set(node.pids())}

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

    def prove(self, data: Path, *, replays: bool = True) -> list[str]:
        """Nothing is lost or trained twice, and no process is left on any node. Returns the facts."""
        assert self.wait() == 0, self.tail(self.log_path, 40)
        facts, problems = prove(self, data=data, is_to_solve=False, replays=replays)
        assert problems == [], problems
        return facts


def cluster_run(cluster: Cluster, folder: Path, config: Path, *overrides: str) -> ClusterRun:
    """A run of `write_config` in `folder`. It is not started."""
    words, log = ["--config", str(config), *overrides], folder / "launcher.log"
    return ClusterRun(arguments=words, folder=folder / "faults" / "run", log_path=log, cluster=cluster)


def _processes(pids: Sequence[int]) -> list[psutil.Process]:
    result: list[psutil.Process] = []
    for pid in pids:
        try:
            result.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return result


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _is_started_by_agent(process: psutil.Process) -> bool:
    try:
        parent = process.parent()
    except psutil.Error:
        return False
    words = "" if parent is None else " ".join(_words_of(parent))
    return any(agent in words for agent in _AGENTS)


def write_config(folder: Path, data: Path) -> Path:
    """The configuration of a short GRPO run in `folder`."""
    text = CONFIG.replace("DATA", str(data)).replace("RUNS", str(folder)).replace("HERE", str(folder))
    (folder / "reward.py").write_text(REWARD)
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def left_behind(nodes: Nodes) -> list[str]:
    """Command lines of processes of areal on the nodes, of its Ray actors, and of connections to its agents."""
    lines = [" ".join(_words_of(process)) for node in nodes for process in _processes(node.pids())]
    names = ("-m areal.", "ray::AgentActor", "ray::NameActor", "ssh -o")
    return [line for line in lines if any(name in line for name in names)]


def foreign_sockets(nodes: Nodes, allowed: Sequence[int] = ()) -> list[str]:
    """Listening sockets on other addresses than that of their node, which other machines reach."""
    result = [(node, address, port) for node in nodes if node.is_on for address, port in node.listening()]
    return [
        f"{node.name}: {address}:{port}"
        for node, address, port in result
        if address not in (node.address, LOOPBACK) and port not in allowed
    ]
