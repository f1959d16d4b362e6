"""Which node each process of a run is placed on, and which of its GPUs it gets. Pure rules."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from areal.api.config.launcher import LauncherConfig
from areal.api.errors import ConfigError
from areal.launcher.restart_rules import Role
from areal.system.network import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The resources of a machine that a plan may use."""

    cores: int
    memory_bytes: int | None = None
    """None = not known."""
    gpus: tuple[str, ...] = ()
    """Ids in the form of CUDA_VISIBLE_DEVICES."""
    host: Host = field(default_factory=Host)
    """Address on which its processes listen. `host.node` names the machine."""
    role: Role | None = None
    """The role whose processes are placed here; None = all roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The machine of one process, and its GPUs there; no GPUs = it runs on the CPU."""

    machine: Machine
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The processes of one role."""

    count: int
    gpus: int
    """GPUs of each; 0 = it runs on the CPU."""


@dataclass(frozen=True, slots=True)
class Placement:
    servers: tuple[tuple[Place, ...], ...]
    """The places of each server: one, unless it needs the GPUs of several machines."""
    trainers: tuple[Place, ...]
    """Places in rank order. The ranks of a machine follow each other."""
    spare_gpus: tuple[tuple[Machine, tuple[str, ...]], ...]
    """Machines with GPUs that no process uses."""

    @property
    def num_parts(self) -> int:
        """Machines of each server."""
        return max(map(len, self.servers), default=1)

    def by_name(self, controller: Place | None) -> dict[tuple[Role, int, int], Place]:
        """The place of each process of a run, by role, index and part."""
        result: dict[tuple[Role, int, int], Place] = {} if controller is None else {("controller", 0, 0): controller}
        for index, members in enumerate(self.servers):
            result |= {("server", index, part): place for part, place in enumerate(members)}
        result |= {("trainer", rank, 0): place for rank, place in enumerate(self.trainers)}
        return result


def is_chosen(names: Iterable[str], nodelist: str, exclude: str) -> bool:
    """Whether a node with these names may be used: one is in `nodelist`, if that is given, and none in `exclude`."""
    node_set = set(names)
    return (not nodelist or bool(node_set & node_names(nodelist))) and not node_set & node_names(exclude)


def node_names(text: str) -> set[str]:
    """The names of a list in Slurm's form: `a,node[1-3,07]` -> a, node1, node2, node3, node07."""
    names: set[str] = set()
    for word in re.findall(r"(?:\[[^]]*\]|[^,\[])+", text):
        before, bracket, rest = word.strip().partition("[")
        inside, _, after = rest.partition("]")
        for part in inside.split(",") if bracket else [""]:
            first, dash, last = part.partition("-")
            numbers = range(int(first), int(last) + 1) if dash else ()
            middles = [str(number).zfill(len(first)) for number in numbers] if dash else [part]
            names |= {before + middle + end for middle in middles for end in (node_names(after) if after else {""})}
    return names


def place(machines: Sequence[Machine], servers: Demand, trainers: Demand, *, gpu_limit: int) -> Placement:
    """Place the processes of a run. ConfigError with code launch.too_few_gpus when they do not fit.

    At most `gpu_limit` GPUs of each machine are used. A server is placed on one machine, the first with enough free
    GPUs; when it needs more than any machine has, on whole machines. Trainer ranks first take whole free machines,
    then what is left. Processes on the CPU are divided between the machines by their number of cores.
    """
    usable = [machine.gpus[:gpu_limit] for machine in machines]
    free = {index: list(gpus) for index, gpus in enumerate(usable)}
    load = dict.fromkeys(range(len(machines)), 0)

    def take(index: int, count: int) -> Place:
        taken = tuple(free[index].pop(0) for _ in range(count))
        return Place(machine=machines[index], gpus=taken)

    def usable_by(role: Role) -> list[int]:
        return [index for index, machine in enumerate(machines) if machine.role in (None, role)]

    def by_cores(role: Role) -> int:
        index = min(usable_by(role), key=lambda index: (load[index] + 1) / machines[index].cores)
        load[index] += 1
        return index

    def server() -> tuple[Place, ...]:
        if not servers.gpus:
            return (take(by_cores("server"), 0),)
        allowed = usable_by("server")
        if (index_of_free := next((index for index in allowed if len(free[index]) >= servers.gpus), None)) is not None:
            return (take(index_of_free, servers.gpus),)
        largest = max(1, *map(len, usable))
        whole = [index for index in allowed if len(free[index]) == len(usable[index]) == largest]
        members = servers.gpus // largest
        if servers.gpus <= largest or servers.gpus % largest or len(whole) < members:
            raise _too_few(machines, usable, servers, trainers)
        return tuple(take(index, largest) for index in whole[:members])

    placed_servers = tuple(server() for _ in range(servers.count))
    if trainers.gpus:
        # stable: whole ones first
        by_room = sorted(usable_by("trainer"), key=lambda index: len(free[index]) < len(usable[index]))
        slots = [index for index in by_room for _ in range(len(free[index]) // trainers.gpus)][: trainers.count]
        if len(slots) < trainers.count:
            raise _too_few(machines, usable, servers, trainers)
    else:
        slots = sorted(by_cores("trainer") for _ in range(trainers.count))
    placed_trainers = tuple(take(index, trainers.gpus) for index in slots)
    spare = tuple((machines[index], tuple(gpus)) for index, gpus in free.items() if gpus)
    return Placement(placed_servers, placed_trainers, spare)


def place_again(wanted: Place, alive: Sequence[Machine], in_use: Iterable[Place], *, gpu_limit: int) -> Place | None:
    """A place for one process of a run: the wanted one while it is free, else another machine that is alive.

    `in_use`: the places of the other processes. The first machine with enough free GPUs; without GPUs the machine with
    the fewest processes per core. None when no machine has room.
    """
    load, used = Counter[str](), set[tuple[str, str]]()
    for place in in_use:
        node = place.machine.host.node
        load[node] += 1
        used |= {(node, gpu) for gpu in place.gpus}
    if wanted.machine in alive and not any((wanted.machine.host.node, gpu) in used for gpu in wanted.gpus):
        return wanted
    if not wanted.gpus:
        machine = min(alive, key=lambda machine: (load[machine.host.node] + 1) / machine.cores, default=None)
        return None if machine is None else Place(machine=machine)
    for machine in alive:
        free = [gpu for gpu in machine.gpus[:gpu_limit] if (machine.host.node, gpu) not in used]
        if len(free) >= len(wanted.gpus):
            return Place(machine=machine, gpus=tuple(free[: len(wanted.gpus)]))
    return None


def _too_few(
    machines: Sequence[Machine], usable: Sequence[Sequence[str]], servers: Demand, trainers: Demand
) -> ConfigError:
    demands = ((servers, "servers"), (trainers, "trainer ranks"))
    needed = [f"{demand.count} {role} of {demand.gpus}" for demand, role in demands if demand.count and demand.gpus]
    total = sum(demand.count * demand.gpus for demand, _ in demands)
    have = ", ".join(
        f"{machine.host.node or 'this machine'} has {len(gpus)}" for machine, gpus in zip(machines, usable, strict=True)
    )
    return ConfigError(
        f"allocation_mode needs {total} GPUs ({', '.join(needed)}), but {have}: use smaller sizes, more nodes "
        "(cluster.n_nodes), more of their GPUs (cluster.n_gpus_per_node), or n_gpus_per_node=0 to run on the CPU",
        code="launch.too_few_gpus",
    )


def memory_demand(role: Role, gpus: int, options: LauncherConfig) -> int:
    """Bytes of host memory for a process with `gpus` GPUs (`launcher.*_mem_per_gpu`); 0 for one on the CPU."""
    each = options.inference_server_mem_per_gpu if role == "server" else options.trainer_mem_per_gpu
    return gpus * each * 2**20


def shortages(machines: Sequence[Machine], computing: Mapping[Host, int], memory: Mapping[Host, int]) -> Iterator[str]:
    """A warning for each machine with more than two computing processes per core, or less memory than they want."""
    for machine in machines:
        where = f" of {machine.host.node}" if len(machines) > 1 else ""
        if computing[machine.host] > 2 * machine.cores:
            yield (
                f"warning: {computing[machine.host]} server and trainer processes share {machine.cores} cores{where}, "
                "which is slow: use fewer (allocation_mode)"
            )
        if machine.memory_bytes and memory[machine.host] > machine.memory_bytes:
            wanted, has = (f"{amount / 2**30:.0f} GiB" for amount in (memory[machine.host], machine.memory_bytes))
            yield f"warning: launcher.*_mem_per_gpu of the processes{where} are {wanted}, and the machine has {has}"
