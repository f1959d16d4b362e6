"""Load of the name registries and of the heartbeats at N processes: files and etcd in the same run.

    python benchmark/registry_load.py [--processes 512] [--seconds 15] [--lease-s 30] [--folder DIR] [--only NAME ...]

Each of N processes registers two names, as servers and ranks do at a start, and renews its lease (etcd). The
processes are threads of one process, so that client CPU time is that of all of them. A look is what the supervisor
does 20 times a second during a start: one listing of the ready signs. A second of a run (`idle`) is: each process
writes its heartbeat, each node of 8 reads those of its processes and sends them, the launcher parses them and writes
RUN/alive.json twice, the controller lists the servers. Operations are the opens, renames and listings in the folder
of the run, by audit events. etcd needs the Debian package etcd-server. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from areal.launcher.node_messages import FROM_AGENT, Alive  # noqa: E402
from areal.system.discovery import EtcdRegistry, FileRegistry, NameRegistry  # noqa: E402
from areal.system.heartbeat import HEARTBEAT, Heartbeat, NodeBeats, write_beats  # noqa: E402
from tests.system.etcd_kit import EtcdCluster  # noqa: E402

KINDS = ("files", "etcd")
_THREADS = 16
_LOOKS = 20
_PER_NODE = 8


def cpu_s() -> float:
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed_s(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def measure(registries: list[NameRegistry], reader: NameRegistry) -> dict[str, float]:
    """Registration of all processes, then looks and listings of one reader."""

    def register(index: int) -> None:
        for name in (f"servers/{index}", f"ready/server-{index}"):
            registries[index].add(name, json.dumps({"address": f"http://10.0.0.1:{index}", "pid": index}), replace=True)

    def register_all() -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(register, range(len(registries))))

    def get_all() -> None:
        for index in range(len(registries)):
            reader.get(f"ready/server-{index}")

    start_s = timed_s(register_all)
    while len(reader.list("servers")) < len(registries):
        time.sleep(0.01)
    gets = [timed_s(get_all) for _ in range(_LOOKS)]
    looks = [timed_s(lambda: reader.list("ready")) for _ in range(_LOOKS)]
    return {
        "adds_per_s": 2 * len(registries) / start_s,
        "gets_per_s": len(registries) / median(gets),
        "look_ms": median(looks) * 1e3,
    }


@dataclass
class Operations:
    """Counts operations in a folder while it is active. An audit hook stays until the process ends."""

    folder: str
    active: bool = False
    counts: Counter[str] = field(default_factory=Counter[str])

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if self.active and event in ("open", "os.rename", "os.scandir", "os.listdir", "os.link", "os.remove"):
            self.counts[event] += str(args[0]).startswith(self.folder)


def idle_load(folder: Path, registry: FileRegistry, processes: int, seconds: int = 5) -> dict[str, object]:
    """CPU milliseconds and operations in the folder of the run for one second of all processes."""
    nodes = {f"node-{number}": NodeBeats() for number in range(-(-processes // _PER_NODE))}
    slots = [node.slot(f"server-{index}")[HEARTBEAT] for node in nodes.values() for index in range(_PER_NODE)]
    beats = [Heartbeat(slot) for slot in slots[:processes]]
    for beat in beats:
        beat.doing("runs 12 requests, 3 queued, version 345")
    used = dict.fromkeys(("processes", "nodes", "launcher", "controller"), 0.0)
    operations = Operations(str(folder))
    sys.addaudithook(operations)
    for _ in range(3):  # after 2 seconds without a change a listing needs no files
        registry.list("servers")
        time.sleep(1.0)
    operations.active = True
    for _ in range(seconds):
        began_s = cpu_s()
        for beat in beats:
            beat.beat()
        wrote_s = cpu_s()
        sent = [FROM_AGENT.dump_json(Alive(resident_bytes=1, beats=node.read())) for node in nodes.values()]
        sent_s = cpu_s()
        arrived = [FROM_AGENT.validate_json(line) for line in sent]
        known = {
            f"{name}-{number}": beat
            for number, alive in enumerate(arrived) if isinstance(alive, Alive) for name, beat in alive.beats.items()
        }  # fmt: skip
        for _ in range(2):
            write_beats(folder / "alive.json", known)
        launched_s = cpu_s()
        registry.list("servers")
        times = (wrote_s - began_s, sent_s - wrote_s, launched_s - sent_s, cpu_s() - launched_s)
        used = {name: spent + more for (name, spent), more in zip(used.items(), times, strict=True)}
    operations.active = False
    assert len(known) == len(beats)
    return {
        "cpu_ms_per_s": {name: round(spent / seconds * 1e3, 2) for name, spent in used.items()},
        "operations_per_s": {name: count / seconds for name, count in operations.counts.items() if count},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--lease-s", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    args = parser.parse_args()
    result: dict[str, object] = {"processes": args.processes}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        if "files" in args.only:
            files = FileRegistry(folder / "names")
            result["files"] = measure([files] * args.processes, files)
            result["idle"] = idle_load(folder, files, args.processes)
        if "etcd" in args.only:
            result |= etcd_load(folder, args.processes, args.seconds, args.lease_s)
    print(json.dumps(result))


def etcd_load(folder: Path, processes: int, seconds: float, lease_s: float) -> dict[str, object]:
    """An etcd of one member, and one registry per process."""
    cluster = EtcdCluster(folder)
    registries: list[NameRegistry] = []
    try:
        registries += [
            EtcdRegistry(cluster.addresses, "e/t", lease_s=lease_s, timeout_s=60.0) for _ in range(processes)
        ]
        reader = EtcdRegistry(cluster.addresses, "e/t", lease_s=lease_s, timeout_s=60.0)
        result: dict[str, object] = {"etcd": measure(registries, reader)}
        client_s, server_s = cpu_s(), cluster.cpu_s()
        time.sleep(seconds)
        return result | {
            "etcd_renewals": {
                "per_s": processes * 10 / lease_s,
                "server_cpu_ms_per_s": (cluster.cpu_s() - server_s) / seconds * 1e3,
                "client_cpu_ms_per_s": (cpu_s() - client_s) / seconds * 1e3,
                "names_left": len(reader.list("servers")),
            }
        }
    finally:
        for registry in registries:
            registry.close()
        cluster.stop()


if __name__ == "__main__":
    main()
