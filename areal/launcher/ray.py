"""The Ray launcher of `areal run`: runs a configuration in the actors of a Ray cluster. No other module imports ray."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.config.launcher import ClusterSpecConfig, LauncherConfig
from areal.api.errors import ConfigError, LaunchError
from areal.launcher.job import LaunchPlan, PlannedProcess, moved
from areal.launcher.local import launch, read_command_line
from areal.launcher.node_agent import NodeAgent
from areal.launcher.node_link import NodeLink, agent_command, check_containers, image_of, variables_of_agent
from areal.launcher.node_messages import Hello
from areal.launcher.nodes import NodesBackend
from areal.launcher.placement import Machine, Place, is_chosen, memory_demand, place_again
from areal.launcher.preflight import check_ports
from areal.launcher.restart_rules import Role
from areal.launcher.result import help_if_asked
from areal.launcher.status import StatusLine
from areal.system.network import TRAINERS_VARIABLE, Host
from areal.system.process import run_main, tied_to_this_process
from areal.system.run_paths import RunPaths

_CONNECT_S = 5.0


def connect_ray() -> Any:
    """Connect to the Ray cluster at RAY_ADDRESS. Returns the package. LaunchError when there is none."""
    send_token(os.environ)
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        message = "the Ray launcher needs the package ray: pip install -e '.[ray]'"
        raise ConfigError(message, code="launch.package_missing") from error
    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS") or "auto"
    advice = "start one (ray start --head), set RAY_ADDRESS, or use ray job submit"
    if "://" in address:
        message = f"RAY_ADDRESS={address}: a launcher outside of the cluster is not supported: use ray job submit"
        raise LaunchError(message, code="launch.no_ray")
    try:
        if address != "auto":  # Ray itself tries for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        with _kept_handlers():
            ray.init(address, log_to_driver=False, configure_logging=True, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        cause = " ".join(str(error).split())
        raise LaunchError(
            f"no Ray cluster at RAY_ADDRESS={address}: {cause}: {advice}", code="launch.no_ray"
        ) from error
    return ray


def send_token(environ: MutableMapping[str, str]) -> None:
    """Let the client send the user's token, if there is one; a cluster without tokens ignores it.

    Ray 2.60 reads the file for the address `auto` only, whereas `ray start` asks for the token when the file exists.
    """
    names = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(environ.get(name) for name in names) or (Path.home() / ".ray" / "auth_token").is_file():
        environ.setdefault("RAY_AUTH_MODE", "token")


@contextlib.contextmanager
def _kept_handlers() -> Iterator[None]:
    """Ray sets a handler of SIGTERM when it connects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


# ----------------------------------------------------------------------------------------------------------------------
# The nodes of a Ray cluster that a run may use, and what it reserves there for each process.


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
    resources = {"CPU": max(0.001, int(cpus * 1000) / 1000), "GPU": float(gpus), "memory": float(memory)}
    return {name: amount for name, amount in resources.items() if amount}


def living_nodes(ray: Any, nodelist: str = "", exclude: str = "") -> dict[str, Machine]:
    """Nodes that run processes, by their ids: those with GPUs first, then by address. The lists have names or addresses
    (`launcher.nodelist`, `launcher.exclude`)."""
    living = [
        node
        for node in ray.nodes()
        if node["Alive"]
        and node["Resources"].get("CPU", 0) >= 1
        and is_chosen((node["NodeManagerHostname"], node["NodeManagerAddress"]), nodelist, exclude)
    ]
    living.sort(key=lambda node: (-node["Resources"].get("GPU", 0), node["NodeManagerAddress"], node["NodeID"]))
    names = Counter(node["NodeManagerHostname"] for node in living)
    nodes: dict[str, Machine] = {}
    for node in living:
        name, address, has = node["NodeManagerHostname"], node["NodeManagerAddress"], node["Resources"]
        host = Host(bind=address, advertise=address, node=name if names[name] == 1 else f"{name}-{node['NodeID'][:6]}")
        gpus = tuple(str(index) for index in range(int(has.get("GPU", 0))))
        memory = int(has.get("memory", 0))
        nodes[node["NodeID"]] = Machine(cores=int(has["CPU"]), memory_bytes=memory, gpus=gpus, host=host)
    return nodes


# ----------------------------------------------------------------------------------------------------------------------
# The Ray actor that runs one process of a run: its agent, a thread or a command, and the messages from and to it.


class AgentActor:
    """Made an actor by the launcher, which gives `send` and `receive` one thread each."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        """`command` starts the agent, for example in a container; empty = a thread of this process."""
        self._command = command
        input_read, self._input = os.pipe()
        self._output, output_write = os.pipe()
        self._failure = ""
        self._number = -1
        self._block: bytes | None = b""
        # The process dies with the thread that starts it, and this thread lives as long as the agent.
        threading.Thread(target=self._serve, args=(input_read, output_write), name="agent", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Give a message to the agent. An empty one ends it."""
        if not message:
            os.close(self._input)
        left = memoryview(message)
        while left:
            left = left[os.write(self._input, left) :]

    def receive(self, number: int, limit_s: float) -> bytes | None:
        """Messages of the agent, empty after `limit_s` without any; None after its end.

        The same `number` again returns the same block: the first answer may have been lost on its way.
        """
        if number != self._number:
            ready = select.select([self._output], [], [], limit_s)[0]
            self._block = (os.read(self._output, 1 << 16) or None) if ready else b""
            self._number = number
        if self._block is None and self._failure:
            raise RuntimeError(self._failure)
        return self._block

    def _serve(self, input_descriptor: int, output_descriptor: int) -> None:
        try:
            if not self._command:
                NodeAgent(input_descriptor, output_descriptor).run()
                return
            done = subprocess.run(
                self._command,
                stdin=input_descriptor,
                stdout=output_descriptor,
                stderr=subprocess.PIPE,
                preexec_fn=tied_to_this_process(),
                check=False,
            )
            if done.returncode:
                last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
                self._failure = f"{self._command[0]} ended with exit code {done.returncode}: {' '.join(last)}"
        except Exception:  # noqa: BLE001 - `receive` reports it to the launcher
            self._failure = traceback.format_exc()
        finally:
            os.close(input_descriptor)
            os.close(output_descriptor)


USAGE = """usage: areal run --launcher ray [SCRIPT.py] --config FILE.yaml
                 [key.sub=value ...]

Runs a configuration on cluster.n_nodes nodes of the Ray cluster at RAY_ADDRESS
(default: that of this machine). Start it on a node of the cluster, or with
`ray job submit`. The working directory, cluster.fileroot and the Python
environment must be at the same path on all nodes. Each process runs in an actor
of one placement group.
"""
_POLL_S = 0.2
_RECEIVE_S = 5.0
_KILL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bundle:
    """What Ray reserved for one process: a bundle of a placement group."""

    node_id: str
    place: Place
    """Its GPUs are numbered; Ray chooses the real ones."""
    role: Role
    resources: dict[str, float]
    group: Any
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """The actor of one process."""

    bundle: _Bundle
    transport: ActorTransport
    link: NodeLink


class ActorTransport:
    """Messages to and from the agent in an actor. Implements `Transport`."""

    def __init__(self, ray: Any, actor: Any, bundle: _Bundle) -> None:
        self._ray = ray
        self._actor = actor
        self._node_id = bundle.node_id
        output, self._output = os.pipe()
        errors, self._errors = os.pipe()
        self._files = os.fdopen(output, "rb", 0), os.fdopen(errors, "rb", 0)  # closed with this object
        self.output, self.errors = output, errors
        self._certain = False
        self._ended = threading.Event()
        self._was_killed = False
        threading.Thread(target=self._receive, name=f"actor on {bundle.place.machine.host.node}", daemon=True).start()

    def write(self, data: bytes) -> None:
        self._actor.send.options(concurrency_group="input").remote(data)

    def close_input(self) -> None:
        self.write(b"")

    def agent_ended(self, limit_s: float) -> bool:
        self._ended.wait(limit_s)
        return self._certain

    def kill(self) -> None:
        self._was_killed = True
        self._ray.kill(self._actor)
        self._ended.wait(_KILL_S)

    def _receive(self) -> None:
        exceptions = self._ray.exceptions
        number, cause = 0, ""
        try:
            while not cause and not self._was_killed:
                reply = self._actor.receive.options(concurrency_group="output").remote(number, _RECEIVE_S)
                try:
                    block = self._ray.get(reply)
                except exceptions.ActorUnavailableError:  # perhaps for a short time
                    time.sleep(_POLL_S)
                    continue
                except exceptions.ActorDiedError:
                    self._certain = self._node_id in living_nodes(self._ray)
                    cause = "the process of its Ray actor died" if self._certain else "Ray lost the node"
                except exceptions.RayTaskError as error:
                    self._certain = True
                    cause = f"the agent failed: {str(error.cause).strip()}"
                except exceptions.RayError as error:
                    cause = f"Ray: {' '.join(str(error).split())}"
                else:
                    number += 1
                    if block is None:
                        self._certain = True
                        break
                    os.write(self._output, block)
        finally:
            os.write(self._errors, cause.encode() + b"\n")
            os.close(self._output)
            os.close(self._errors)
            self._ended.set()


class RayCluster:
    """The nodes of a Ray cluster. Implements `Cluster`."""

    def __init__(self, config: ClusterSpecConfig, launcher: LauncherConfig) -> None:
        self._config = config
        self._launcher = launcher
        self._ray: Any = None
        self._planned: Mapping[str, Machine] = {}
        self._groups: list[Any] = []
        self._seats: dict[str, _Seat] = {}
        self._run: tuple[RunPaths, Mapping[str, str]] | None = None
        self._refused: set[str] = set()
        """Ids of nodes that joined later and cannot run processes of this run, for example without its folder."""
        self._say = StatusLine().say

    def machines(self) -> Sequence[Machine]:
        """Connect to Ray, and wait for enough nodes. LaunchError when there is no cluster or it stays too small."""
        self._ray = connect_ray()
        deadline = time.monotonic() + self._config.node_connect_s
        while len(nodes := self._living()) < self._config.n_nodes:
            if time.monotonic() > deadline:
                names = ", ".join(machine.host.node for machine in nodes.values()) or "none"
                message = f"cluster.n_nodes={self._config.n_nodes}, but the living Ray nodes with CPUs are: {names}"
                raise LaunchError(message, code="launch.ray_too_small")
            time.sleep(_POLL_S)
        self._planned = dict(itertools.islice(nodes.items(), self._config.n_nodes))
        return list(self._planned.values())

    def backend(self, plan: LaunchPlan, paths: RunPaths, secrets: Mapping[str, str]) -> NodesBackend:
        """Reserve the resources of all processes in one placement group, and start their actors."""
        self._run = paths, secrets
        ids = {machine.host.node: node_id for node_id, machine in self._planned.items()}
        wanted = [
            (ids[planned.host.node], resources)
            for planned, resources in demands(plan, list(self._planned.values()), self._launcher)
        ]
        group = self._reserve(wanted)
        bundles = [
            _Bundle(
                node_id=node_id,
                place=self._planned_place(process),
                role=process.role,
                resources=resources,
                group=group,
                index=index,
            )
            for index, (process, (node_id, resources)) in enumerate(zip(plan.processes, wanted, strict=True))
        ]
        actors = [self._actor(bundle) for bundle in bundles]
        for planned, bundle, actor in zip(plan.processes, bundles, actors, strict=True):
            self._seats[planned.name] = self._open(actor, bundle)
        machines = {seat.bundle.place.machine.host.node: seat for seat in self._seats.values()}
        check_ports({name: (seat.link, seat.bundle.place.machine.host.bind) for name, seat in machines.items()})
        return RayBackend(self._agent_for, self._release)

    def close(self) -> None:
        """End all actors, with their processes, and give the reserved resources back."""
        if self._ray is None:
            return
        for seat in self._seats.values():
            seat.link.close()
        for seat in self._seats.values():
            seat.transport.kill()
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._ray.shutdown()

    def _living(self) -> dict[str, Machine]:
        """The nodes that this run may use, by their ids."""
        return living_nodes(self._ray, self._launcher.nodelist, self._launcher.exclude)

    def _release(self, name: str) -> None:
        """End the actor of a process, and give back what was reserved for it after the start of the run."""
        if (seat := self._seats.pop(name, None)) is not None:
            seat.link.close()
            seat.transport.kill()
            self._give_back(seat.bundle.group)

    def _agent_for(self, planned: PlannedProcess) -> tuple[NodeLink, PlannedProcess]:
        seat = self._seats.get(planned.name)
        if seat is None or seat.link.lost:
            actor_died = seat is not None and seat.transport.agent_ended(0.0)
            before = None if seat is None else seat.bundle
            seat = self._seats[planned.name] = self._new_seat(planned, before, actor_died=actor_died)
        gpus = seat.link.facts.gpus if planned.gpus else ()
        placed = moved(planned, seat.bundle.place.machine.host, gpus)
        env = placed.env | {"RAY_ADDRESS": self._ray.get_runtime_context().gcs_address}
        if planned.role == "server":  # a trainer may move to a node that joined the cluster later
            nodes = [machine.host.advertise for machine in self._living().values()]
            known = ",".join(dict.fromkeys((*placed.env[TRAINERS_VARIABLE].split(","), *nodes)))
            env[TRAINERS_VARIABLE] = known
        return seat.link, dataclasses.replace(placed, env=env)

    def _planned_place(self, planned: PlannedProcess) -> Place:
        machine = next(node for node in self._planned.values() if node.host.node == planned.host.node)
        return Place(machine=machine, gpus=planned.gpus)

    def _new_seat(self, planned: PlannedProcess, before: _Bundle | None, *, actor_died: bool) -> _Seat:
        """An actor in the same bundle when only the last actor died there, else on a node with room."""
        if before is not None and actor_died and before.node_id in self._living():
            return self._open(self._actor(before), before)
        cpus = 1.0 if before is None else before.resources.get("CPU", 1.0)
        if before is not None:
            self._give_back(before.group)
        while True:
            try:
                return self._elsewhere(planned, before, cpus)
            except LaunchError as error:
                if error.code in ("launch.node_lost", "launch.node_unreachable"):
                    raise
                self._say(f"areal: a node that joined Ray later is not used: {error} [{error.code}]")

    def _elsewhere(self, planned: PlannedProcess, before: _Bundle | None, cpus: float) -> _Seat:
        """An actor on a node with room. LaunchError when there is none, or the node cannot run the process."""
        living = {node_id: node for node_id, node in self._living().items() if node_id not in self._refused}
        others = [seat.bundle for name, seat in self._seats.items() if name != planned.name]
        others = [bundle for bundle in others if bundle.node_id in living]
        node_id, place = self._room(planned, before, living, others)
        free = living[node_id].cores - sum(
            actor.resources.get("CPU", 0.0) for actor in others if actor.node_id == node_id
        )
        resources = resources_of(min(cpus, free), len(place.gpus))  # memory is reserved for planned places only
        if free < resources["CPU"]:  # all CPUs of the node are reserved; a bundle needs something
            del resources["CPU"]
            resources[f"node:{living[node_id].host.advertise}"] = 0.001
        try:
            group = self._reserve([(node_id, resources)])
        except LaunchError as error:
            raise LaunchError(str(error), code="launch.node_unreachable") from error
        role = planned.role
        bundle = _Bundle(node_id=node_id, place=place, role=role, resources=resources, group=group, index=0)
        try:
            return self._open(self._actor(bundle), bundle)
        except LaunchError as error:
            self._give_back(group)
            if error.code not in ("launch.node_lost", "launch.node_unreachable"):
                self._refused.add(node_id)
            raise

    def _room(
        self, planned: PlannedProcess, before: _Bundle | None, living: Mapping[str, Machine], others: Sequence[_Bundle]
    ) -> tuple[str, Place]:
        """A node for a process, if possible not the one that it lost. LaunchError when none has room."""
        in_use = [Place(machine=living[actor.node_id], gpus=actor.place.gpus) for actor in others]
        kept = {name: machine for name, machine in living.items() if before is None or name != before.node_id}
        limit = self._config.n_gpus_per_node
        for nodes in (kept, living):
            place = place_again(self._planned_place(planned), list(nodes.values()), in_use, gpu_limit=limit)
            if place is not None:
                return next(name for name, machine in nodes.items() if machine == place.machine), place
        gpus = f" with {len(planned.gpus)} free GPUs" if planned.gpus else ""
        message = f"{planned.name} needs a Ray node{gpus}, and no living one has room"
        raise LaunchError(message, code="launch.node_unreachable")

    def _give_back(self, group: Any) -> None:
        """Remove the placement group of one process; nothing when it is the one that the run began with."""
        if any(member is group for member in self._groups[1:]):
            self._groups = [member for member in self._groups if member is not group]
            self._ray.util.remove_placement_group(group)

    def _reserve(self, wanted: Sequence[tuple[str, dict[str, float]]]) -> Any:
        """A placement group with one bundle for each (node id, resources). LaunchError when it does not get them."""
        group = self._ray.util.placement_group(
            [resources for _, resources in wanted],
            bundle_label_selector=[{"ray.io/node-id": node_id} for node_id, _ in wanted],
        )
        limit_s = self._config.node_connect_s
        if not group.wait(limit_s):
            self._ray.util.remove_placement_group(group)
            needed = Counter[str]()
            for _, resources in wanted:
                needed.update(resources)
            free = {name: count for name, count in self._ray.available_resources().items() if name in ("CPU", "GPU")}
            known = self._living()
            nodes = ", ".join(
                sorted({known[node_id].host.node if node_id in known else node_id for node_id, _ in wanted})
            )
            message = (
                f"Ray did not reserve {_text(needed)} on {nodes} in {limit_s:g} s; free in the cluster: {_text(free)}"
            )
            raise LaunchError(message, code="launch.ray_busy")
        self._groups.append(group)
        return group

    def _actor(self, bundle: _Bundle) -> Any:
        strategies = self._ray.util.scheduling_strategies
        where = strategies.PlacementGroupSchedulingStrategy(bundle.group, placement_group_bundle_index=bundle.index)
        actor = self._ray.remote(
            num_cpus=bundle.resources.get("CPU", 0),
            num_gpus=bundle.resources.get("GPU", 0),
            memory=bundle.resources.get("memory"),
            resources={name: amount for name, amount in bundle.resources.items() if name.startswith("node:")},
            concurrency_groups={"input": 1, "output": 1},
            scheduling_strategy=where,
        )(AgentActor)
        slurm, command = self._launcher.slurm, list[str]()
        if image_of(slurm, bundle.role) or slurm.additional_bash_cmds:
            command = ["env", *variables_of_agent(), *agent_command(slurm, bundle.role)]
        return actor.remote(command)

    def _open(self, actor: Any, bundle: _Bundle) -> _Seat:
        """The seat of an actor that has been created, connected to the run."""
        assert self._run is not None
        transport = ActorTransport(self._ray, actor, bundle)
        hello = Hello(folder=os.getcwd(), silence_s=self._config.node_silence_s)
        name, limit_s = bundle.place.machine.host.node, self._config.node_connect_s
        link = NodeLink(name, transport, hello, connect_limit_s=limit_s)
        try:
            link.open(*self._run)
        except LaunchError:
            link.close()
            transport.kill()
            raise
        return _Seat(bundle=bundle, transport=transport, link=link)


class RayBackend(NodesBackend):
    """Processes in Ray actors."""

    def __init__(
        self, agent_for: Callable[[PlannedProcess], tuple[NodeLink, PlannedProcess]], release: Callable[[str], None]
    ) -> None:
        super().__init__(agent_for)
        self._release = release

    def forget(self, name: str) -> None:
        self._release(name)


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in sorted(resources.items()))


def run_command(words: Sequence[str]) -> int:
    """Run the words of a command line; returns the exit status."""
    help_if_asked(words, USAGE)
    request = read_command_line(words, launcher="ray")
    check_containers(request.config.launcher.slurm, has_srun=False, has_shared_agents=False)
    return launch(request, RayCluster(request.config.cluster, request.config.launcher))


if __name__ == "__main__":
    run_main(lambda: sys.exit(run_command(sys.argv[1:])))
