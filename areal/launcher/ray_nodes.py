"""The nodes of a Ray cluster that a run may use, and what it reserves there for each process."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from areal.api.config.launcher import LauncherConfig
from areal.launcher.job import LaunchPlan, PlannedProcess
from areal.launcher.placement import Machine, is_chosen, memory_demand
from areal.system.network import Host


def demands(
    plan: LaunchPlan, machines: Sequence[Machine], options: LauncherConfig
) -> list[tuple[PlannedProcess, dict[str, float]]]:
    """The CPUs, GPUs and bytes of memory that Ray reserves for each process.

    A process with GPUs gets for each the CPUs of its threads and its memory (`launcher.*_mem_per_gpu`), others one CPU;
    less when the processes of a node exceed what it has.
    """
    cpus = {planned.name: float(planned.num_threads * len(planned.gpus) or 1) for planned in plan.processes}
    memory = {planned.name: memory_demand(planned.role, len(planned.gpus), options) for planned in plan.processes}
    has = {machine.host.node: (float(machine.cores), float(machine.memory_bytes or 0)) for machine in machines}
    shares: dict[str, tuple[float, ...]] = {}
    for node, limits in has.items():
        names = [planned.name for planned in plan.processes if planned.host.node == node]
        totals = [sum(wanted[name] for name in names) for wanted in (cpus, memory)]
        shares[node] = tuple(
            min(1.0, limit / total) if total else 1.0 for limit, total in zip(limits, totals, strict=True)
        )
    return [
        (planned, resources_of(of_cpus * cpus[planned.name], len(planned.gpus), int(of_memory * memory[planned.name])))
        for planned in plan.processes
        for of_cpus, of_memory in [shares[planned.host.node]]
    ]


def resources_of(cpus: float, gpus: int, memory: int = 0) -> dict[str, float]:
    """Resources of a bundle, with at least some of a CPU."""
    found = {"CPU": max(0.001, int(cpus * 1000) / 1000), "GPU": float(gpus), "memory": float(memory)}
    return {name: amount for name, amount in found.items() if amount}


def living_nodes(ray: Any, nodelist: str = "", exclude: str = "") -> dict[str, Machine]:
    """Nodes that run processes, by their ids: those with GPUs first, then by address. The lists have names or addresses
    (`launcher.nodelist`, `launcher.exclude`)."""
    found = [
        node
        for node in ray.nodes()
        if node["Alive"]
        and node["Resources"].get("CPU", 0) >= 1
        and is_chosen((node["NodeManagerHostname"], node["NodeManagerAddress"]), nodelist, exclude)
    ]
    found.sort(key=lambda node: (-node["Resources"].get("GPU", 0), node["NodeManagerAddress"], node["NodeID"]))
    names = Counter(node["NodeManagerHostname"] for node in found)
    nodes: dict[str, Machine] = {}
    for node in found:
        name, address, has = node["NodeManagerHostname"], node["NodeManagerAddress"], node["Resources"]
        host = Host(bind=address, advertise=address, node=name if names[name] == 1 else f"{name}-{node['NodeID'][:6]}")
        gpus = tuple(str(index) for index in range(int(has.get("GPU", 0))))
        memory = int(has.get("memory", 0))
        nodes[node["NodeID"]] = Machine(cores=int(has["CPU"]), memory_bytes=memory, gpus=gpus, host=host)
    return nodes
