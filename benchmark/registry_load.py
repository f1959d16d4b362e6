"""Load of the name registries at N processes: files and etcd in the same run. Needs etcd (apt-get install etcd-server).

    python benchmark/registry_load.py [--processes 512] [--seconds 15] [--lease-s 30] [--folder DIR]

Each of N processes registers two names, as servers and ranks do at a start, and renews its lease (etcd) or writes its
heartbeat once a second (files, as with both registries). The processes are threads of one process, so that client CPU
time is that of all of them. A look is what the supervisor does 20 times a second: one `get` of each ready sign.
The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from areal.system.discovery import NameRegistry  # noqa: E402
from areal.system.etcd_registry import EtcdRegistry  # noqa: E402
from areal.system.file_registry import FileRegistry  # noqa: E402
from areal.system.heartbeat import Heartbeat  # noqa: E402
from tests.system.etcd_kit import EtcdCluster  # noqa: E402

_THREADS = 16
_LOOKS = 20


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

    def look() -> None:
        for index in range(len(registries)):
            reader.get(f"ready/server-{index}")

    start_s = timed_s(register_all)
    while len(reader.list("servers")) < len(registries):
        time.sleep(0.01)
    looks = [timed_s(look) for _ in range(_LOOKS)]
    listings = [timed_s(lambda: reader.list("servers")) for _ in range(_LOOKS)]
    return {"register_s": start_s, "look_ms": median(looks) * 1e3, "list_ms": median(listings) * 1e3}


def heartbeats_cpu_ms(folder: Path, processes: int, rounds: int = 5) -> float:
    """CPU milliseconds of one heartbeat of all processes."""
    beats = [Heartbeat(folder / "alive" / f"server-{index}.json") for index in range(processes)]
    for beat in beats:
        beat.beat()
    began_s = cpu_s()
    for _ in range(rounds):
        for beat in beats:
            beat.beat()
    return (cpu_s() - began_s) / rounds * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--lease-s", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        files = FileRegistry(folder / "names")
        found: dict[str, object] = {"processes": args.processes, "files": measure([files] * args.processes, files)}
        found["heartbeats_cpu_ms_per_s"] = heartbeats_cpu_ms(folder, args.processes)
        cluster = EtcdCluster(folder)
        registries: list[NameRegistry] = []
        try:
            registries += [
                EtcdRegistry(cluster.addresses, "e/t", lease_s=args.lease_s, timeout_s=60.0)
                for _ in range(args.processes)
            ]
            reader = EtcdRegistry(cluster.addresses, "e/t", lease_s=args.lease_s, timeout_s=60.0)
            found["etcd"] = measure(registries, reader)
            client_s, server_s = cpu_s(), cluster.cpu_s()
            time.sleep(args.seconds)
            found["etcd_renewals"] = {
                "per_s": args.processes * 10 / args.lease_s,
                "server_cpu_ms_per_s": (cluster.cpu_s() - server_s) / args.seconds * 1e3,
                "client_cpu_ms_per_s": (cpu_s() - client_s) / args.seconds * 1e3,
                "names_left": len(reader.list("servers")),
            }
        finally:
            for registry in registries:
                registry.close()
            cluster.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
