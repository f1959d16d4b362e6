"""Several nodes on one machine: namespaces with addresses, host names and processes of their own, on one bridge.

Each node has a private /dev/shm and /run, and shares all other files. Everything ends with the process that made it,
also after SIGKILL. Root, Linux and iproute2 are needed. As a command it runs another one on the first node:

    python -m tests.cluster.nodes 3 [--ssh FOLDER] [--ray] -- COMMAND...
"""

import argparse
import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from areal.system.process import tied_to_this_process

NETWORK = "10.255.0"
SSH_PORT = 2222
_LIMIT_S = 120.0
RAY_OPTIONS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "10",
}
"""Ray notices the loss of a node in some seconds."""
_RAY_NICENESS = 15
"""Ray starts its workers with this much more."""
_NO_MAC = "02:00:00:00:ff:ff"
"""Of no interface: what is sent to it is lost."""
_FIRST = """
printf '%s' "$1" >/proc/sys/kernel/hostname
mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/resolv" "$(realpath /etc/resolv.conf)"
shift 2
for folder in "$@"; do mkdir -p "$folder" && mount -t tmpfs -o mode=1777 node "$folder" || exit 1; done
echo up
trap : TERM INT HUP
sleep infinity & while :; do wait; done
"""
"""Process 1 of a node: it makes the node's files and then takes in processes that lost their parent."""


def missing() -> str:
    """Why nodes cannot be made here; empty when they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "nodes on one machine need Linux and root"
    for program, package in {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}.items():
        if shutil.which(program) is None:
            return f"nodes on one machine need the program {program} (Debian package {package})"
    spaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork")
    bridge = ("ip", "link", "add", "br0", "type", "bridge")
    made = subprocess.run(["unshare", *spaces, *bridge], capture_output=True, text=True, check=False)
    return f"nodes on one machine need namespaces and bridges: {made.stderr.strip()}" if made.returncode else ""


def ssh_missing() -> str:
    """Why nodes cannot have an ssh server; empty when they can."""
    if _sshd() is None or shutil.which("ssh-keygen") is None:
        return "the nodes need sshd and ssh-keygen (Debian packages openssh-server and openssh-client)"
    return ""


class Node:
    """One node, named node1, node2, ... It is on when it is made."""

    def __init__(self, number: int, folder: Path, bridge: int, private: Sequence[str]) -> None:
        self.name = f"node{number}"
        self.address = f"{NETWORK}.{number}"
        self.mac = f"02:00:00:00:00:{number:02x}"  # fixed: the others keep the address of a node that restarts
        self._folder = folder
        self._bridge = bridge
        self._cable = f"v{number}"
        self._private = ("/dev/shm", "/run", *private)
        self._first: subprocess.Popen[str] | None = None
        self._pid = 0
        self._commands: list[subprocess.Popen[Any]] = []

    @property
    def is_on(self) -> bool:
        return self._first is not None

    @property
    def network(self) -> str:
        """The file of its network namespace."""
        return f"/proc/{self._pid}/ns/net"

    def power_on(self) -> None:
        """Start the node, without processes."""
        spaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        script = ("bash", "-c", _FIRST, "node", self.name, str(self._folder), *self._private)
        self._first = _tied(["unshare", *spaces, *script], stdout=subprocess.PIPE, text=True)
        assert self._first.stdout is not None
        if self._first.stdout.readline() != "up\n":
            raise RuntimeError(f"{self.name} could not be made")
        self._pid = _child_of(self._first.pid)
        peer = ("type", "veth", "peer", "name", self._cable, "netns", str(self._bridge))
        self._ip("link", "add", "eth0", "address", self.mac, *peer)
        _ip_in(self._bridge, "link", "set", self._cable, "master", "br0", "up")
        self._ip("addr", "add", f"{self.address}/24", "dev", "eth0")
        self._ip("link", "set", "eth0", "up")
        self._ip("link", "set", "lo", "up")

    def power_off(self) -> None:
        """Kill all processes of the node. No other node hears of it: its cable is pulled first."""
        first, self._first = self._first, None
        if first is None:
            return
        _ip_in(self._bridge, "link", "del", self._cable)
        os.kill(self._pid, signal.SIGKILL)
        for command in self._commands:  # one that stops with its stopped child would not see its end
            with contextlib.suppress(ProcessLookupError):
                command.send_signal(signal.SIGCONT)
        first.wait(_LIMIT_S)
        self._commands.clear()

    def cable(self, state: str) -> None:
        """Pull the cable ("down") or put it back ("up"). The processes of the node live on."""
        _ip_in(self._bridge, "link", "set", self._cable, state)

    def reach(self, other: "Node", *, reaches: bool) -> None:
        """Whether packets of this node to another one arrive; lost ones are lost silently."""
        mac = other.mac if reaches else _NO_MAC
        self._ip("neigh", "replace", other.address, "lladdr", mac, "dev", "eth0", "nud", "permanent")

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in the current folder on the node. `options` are those of subprocess.Popen."""
        entered = ["nsenter", "-a", "-t", str(self._pid), "env", "-C", str(options.pop("cwd", os.getcwd())), *argv]
        self._commands.append(command := _tied(entered, **options))
        return command

    def run(self, argv: Sequence[str], *, timeout_s: float = 300.0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the node to its end; its output is text. It is killed after `timeout_s`."""
        with self.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as command:
            try:
                out, err = command.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                command.kill()
                raise
        return subprocess.CompletedProcess(list(argv), command.returncode, out, err)

    def pids(self) -> list[int]:
        """The processes of the node, by their ids outside of it, without the one that makes it a node."""
        if not self.is_on:
            return []
        ours = os.readlink(f"/proc/{self._pid}/ns/pid")
        result: list[int] = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == ours:
                    result.append(int(entry.name))
        idle = {self._pid, *_children(self._pid)[:1]}
        return [pid for pid in result if pid not in idle and not _is_zombie(pid)]

    def listening(self) -> set[tuple[str, int]]:
        """Addresses and ports of its listening sockets for TCP."""
        lines = [
            line for name in ("tcp", "tcp6") for line in Path(f"/proc/{self._pid}/net/{name}").read_text().splitlines()
        ]
        local = [words[1].split(":") for line in lines if (words := line.split())[3] == "0A"]
        return {(_address(text), int(port, 16)) for text, port in local}

    def _ip(self, *arguments: str) -> None:
        _ip_in(self._pid, *arguments)


class Nodes:
    """Context manager for some nodes, all of them on. Several of these do not disturb each other."""

    def __init__(self, count: int, *, private: Sequence[str] = ()) -> None:
        """`private`: folders that each node has for itself, empty at its start, besides /dev/shm and /run."""
        self.folder = Path(tempfile.mkdtemp(prefix="nodes-"))
        self._count = count
        self._private = tuple(private)
        self._bridge: subprocess.Popen[str] | None = None
        self._nodes: list[Node] = []

    def __enter__(self) -> "Nodes":
        hosts = "".join(f"{NETWORK}.{number} node{number}\n" for number in range(1, self._count + 1))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (self.folder / "resolv").touch()
        try:
            self._bridge = _tied(
                ["unshare", "--net", "sh", "-c", "echo up; exec sleep infinity"], stdout=subprocess.PIPE
            )
            assert self._bridge.stdout is not None
            self._bridge.stdout.readline()
            _ip_in(self._bridge.pid, "link", "add", "br0", "type", "bridge")
            _ip_in(self._bridge.pid, "link", "set", "br0", "up")
            for number in range(1, self._count + 1):
                self._nodes.append(Node(number, self.folder, self._bridge.pid, self._private))
                self._nodes[-1].power_on()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, number: int) -> Node:
        """Nodes are counted from 1, as their names and addresses are."""
        return self._nodes[number - 1]

    def __iter__(self):
        return iter(self._nodes)

    def cut(self, item: int, other: int) -> None:
        """Two nodes lose each other silently: no packet of one reaches the other."""
        self[item].reach(self[other], reaches=False)
        self[other].reach(self[item], reaches=False)

    def heal(self, item: int, other: int) -> None:
        self[item].reach(self[other], reaches=True)
        self[other].reach(self[item], reaches=True)

    def close(self) -> None:
        """End all processes of all nodes."""
        for node in self._nodes:
            node.power_off()
        if self._bridge is not None:
            self._bridge.kill()
            self._bridge.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Ssh:
    """Keys and ssh servers for nodes; `folder` holds the keys, and the log of each server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = folder / "id"
        self.known_hosts = folder / "known_hosts"
        self.options = (f"IdentityFile={self.key}", f"UserKnownHostsFile={self.known_hosts}")
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("id", "host"):
            (folder / name).unlink(missing_ok=True)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        shutil.copy(folder / "id.pub", folder / "authorized_keys")
        self.known_hosts.touch()

    def serve(self, node: Node, *, port: int = SSH_PORT) -> str:
        """Start a server on the node, or start it again after a power cut. Returns HOST:PORT for `--hosts`."""
        host_key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        entry = f"[{node.address}]:{port} {host_key}\n"
        if entry not in self.known_hosts.read_text():
            with open(self.known_hosts, "a") as file:
                file.write(entry)
        options = (
            f"ListenAddress={node.address}:{port}", f"AuthorizedKeysFile={self.folder / 'authorized_keys'}",
            "StrictModes=no", "UsePAM=no", "PasswordAuthentication=no", "PermitRootLogin=prohibit-password",
            "PidFile=none", "ClientAliveInterval=2", "ClientAliveCountMax=2", "MaxStartups=100",
        )  # fmt: skip
        flags = [word for option in options for word in ("-o", option)]
        prepared = 'mkdir -p /run/sshd && chmod 755 /run /run/sshd && exec "$@"'
        server = (str(_sshd()), "-D", "-f", "/dev/null", "-h", str(self.folder / "host"), *flags)
        log = str(self.folder / f"{node.name}.log")
        node.popen(["sh", "-c", prepared, "sh", *server, "-E", log], stdin=subprocess.DEVNULL)
        wait_for(lambda: (node.address, port) in node.listening(), _LIMIT_S)
        return f"{node.address}:{port}"


@contextlib.contextmanager
def urgent_children() -> Iterator[None]:
    """Start Ray in this block: its programs get the cores first, and its workers like other processes.

    A raylet ends when its agent needs 15 seconds to start, and leaves a cluster that never answers.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, before - _RAY_NICENESS)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def ray_command(*words: str) -> list[str]:
    """The command line of Ray, also where its program is not in PATH."""
    return [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())", *words]


def start_ray(node: Node, head: Node | None = None, *, cpus: int = 4, dashboard: bool = False) -> None:
    """Start Ray on a node, also after a power cut. Without `head` it is the head of the cluster.

    `dashboard`: the head takes jobs at port 8265 of its address.
    """
    first = ("--head", "--port=6379", f"--include-dashboard={dashboard}", f"--dashboard-host={node.address}")
    where = first if head is None else (f"--address={head.address}:6379",)
    ours = (f"--node-ip-address={node.address}", f"--num-cpus={cpus}", "--num-gpus=0", "--disable-usage-stats")
    argv = ray_command("start", *where, *ours, "--object-store-memory=100000000")
    with urgent_children():
        done = node.run(argv, env={**os.environ, **RAY_OPTIONS})
    assert done.returncode == 0, done.stdout + done.stderr


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")  # sshd wants an absolute path


def _tied(argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen(argv, preexec_fn=tied_to_this_process(), **options)


def _ip_in(pid: int, *arguments: str) -> None:
    """Run `ip` in the network of a process."""
    subprocess.run(["nsenter", "-n", "-t", str(pid), "ip", *arguments], check=True, capture_output=True, text=True)


def _address(text: str) -> str:
    """An address as the kernel writes it: words of 32 bits, each with its last byte first."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _child_of(pid: int) -> int:
    return _children(pid)[0]


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_for(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """What `condition` returns once that is true. TimeoutError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:g} s")
        time.sleep(0.01)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="number of nodes")
    parser.add_argument("--ssh", type=Path, metavar="FOLDER", help="an ssh server on each node, with its keys there")
    parser.add_argument("--ray", action="store_true", help="a Ray cluster of all nodes, with 4 CPUs each")
    parser.add_argument("command", nargs="+", help="runs on node1; all nodes end with it")
    args = parser.parse_args()
    if problem := missing() or (ssh_missing() if args.ssh else ""):
        sys.exit(problem)
    with Nodes(args.count, private=("/tmp/ray",) if args.ray else ()) as nodes:
        if args.ssh:
            ssh = Ssh(args.ssh.absolute())
            print("--hosts", ",".join([ssh.serve(node) for node in nodes]), file=sys.stderr)  # noqa: T201
            print("".join(f"--ssh-option {option} " for option in ssh.options), file=sys.stderr)  # noqa: T201
        for node in nodes if args.ray else ():
            start_ray(node, None if node is nodes[1] else nodes[1])
        code = nodes[1].popen(args.command).wait()
    sys.exit(code)


if __name__ == "__main__":
    main()
