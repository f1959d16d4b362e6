"""Processes of a run in the actors of a Ray cluster."""

from __future__ import annotations

import dataclasses
import importlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.api.config.launcher import ClusterSpecConfig
from areal.api.errors import ConfigError, LaunchError
from areal.launcher.job import LaunchPlan, PlannedProcess
from areal.launcher.node_messages import Hello
from areal.launcher.nodes import NodeLink, NodesBackend
from areal.launcher.placement import Machine
from areal.launcher.ray_actor import AgentActor
from areal.launcher.ssh import FORWARDED
from areal.system.network import TRAINERS_VARIABLE, Host
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths

_POLL_S = 0.2
_RECEIVE_S = 5.0
_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A living node of the Ray cluster."""

    id: str
    machine: Machine
    """Its GPUs are numbered; Ray chooses the real ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """The actor of one process, and the bundle of the placement group that it runs in."""

    node: RayNode
    resources: dict[str, float]
    group: Any
    bundle: int
    transport: ActorTransport
    link: NodeLink


class ActorTransport:
    """Messages to and from the agent in an actor. Implements `Transport`."""

    def __init__(self, ray: Any, actor: Any, node: RayNode) -> None:
        self._ray = ray
        self._actor = actor
        self._node = node
        output, self._output = os.pipe()
        errors, self._errors = os.pipe()
        self._files = os.fdopen(output, "rb", 0), os.fdopen(errors, "rb", 0)  # closed with this object
        self.output, self.errors = output, errors
        self._certain = False
        self._ended = threading.Event()
        self._was_killed = False
        threading.Thread(target=self._receive, name=f"actor on {node.machine.host.node}", daemon=True).start()

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
        self._ended.wait(_CONNECT_S)

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
                    self._certain = any(node.id == self._node.id for node in _living(self._ray))
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

    def __init__(self, config: ClusterSpecConfig) -> None:
        self._config = config
        self._ray: Any = None
        self._nodes: Sequence[RayNode] = ()
        self._groups: list[Any] = []
        self._seats: dict[str, _Seat] = {}
        self._run: tuple[RunPaths, Mapping[str, str]] | None = None

    def machines(self) -> Sequence[Machine]:
        """Connect to Ray, and wait for enough nodes. LaunchError when there is no cluster or it stays too small."""
        self._ray = connect()
        deadline = time.monotonic() + self._config.node_connect_s
        while len(nodes := _living(self._ray)) < self._config.n_nodes:
            if time.monotonic() > deadline:
                names = ", ".join(node.machine.host.node for node in nodes) or "none"
                message = f"cluster.n_nodes={self._config.n_nodes}, but the living Ray nodes with CPUs are: {names}"
                raise LaunchError(message, code="launch.ray_too_small")
            time.sleep(_POLL_S)
        self._nodes = nodes[: self._config.n_nodes]
        return [node.machine for node in self._nodes]

    def backend(self, plan: LaunchPlan, paths: RunPaths, secrets: Mapping[str, str]) -> NodesBackend:
        """Reserve the resources of all processes in one placement group, and start their actors."""
        self._run = paths, secrets
        by_name = {node.machine.host.node: node for node in self._nodes}
        wanted = [(by_name[planned.host.node], resources) for planned, resources in demands(plan, self._nodes)]
        group = self._reserve(wanted)
        actors = [self._actor(group, index, resources) for index, (_, resources) in enumerate(wanted)]
        for index, (planned, (node, resources)) in enumerate(zip(plan.processes, wanted, strict=True)):
            self._seats[planned.name] = self._open(actors[index], node, resources, group, index)
        return NodesBackend(self._agent_for)

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

    def _agent_for(self, planned: PlannedProcess) -> tuple[NodeLink, PlannedProcess]:
        seat = self._seats.get(planned.name)
        if seat is None or seat.link.lost:
            seat = self._seats[planned.name] = self._new_seat(planned, seat)
        host = seat.node.machine.host
        context = ProcessContext.from_env(planned.env)
        assert context is not None
        forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        env = forwarded | planned.env | dataclasses.replace(context, host=host).to_env()
        if planned.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(seat.link.facts.gpus)
        if planned.role == "server":  # a trainer that moves connects from another node
            known = (*planned.env[TRAINERS_VARIABLE].split(","), *self._addresses())
            env[TRAINERS_VARIABLE] = ",".join(dict.fromkeys(known))
        return seat.link, dataclasses.replace(planned, host=host, env=env)

    def _addresses(self) -> list[str]:
        return [node.machine.host.advertise for node in _living(self._ray)]

    def _new_seat(self, planned: PlannedProcess, before: _Seat | None) -> _Seat:
        """An actor on the same node when only the last one died there, else on the node with the most room."""
        living = _living(self._ray)
        if before is not None and before.transport.agent_ended(0.0) and any(one.id == before.node.id for one in living):
            actor = self._actor(before.group, before.bundle, before.resources)
            return self._open(actor, before.node, before.resources, before.group, before.bundle)
        resources = {"CPU": 1.0} if before is None else before.resources
        if planned.gpus:
            resources = resources | {"GPU": float(len(planned.gpus))}
        others = [seat for name, seat in self._seats.items() if name != planned.name]
        node = with_room(living, resources, [(seat.node.id, seat.resources) for seat in others], before)
        if node is None:
            message = f"no living Ray node has room for {planned.name}: it needs {_text(resources)}"
            raise LaunchError(message, code="launch.node_unreachable")
        if before is not None:
            self._give_back(before.group)
        try:
            group = self._reserve([(node, resources)])
        except LaunchError as error:
            raise LaunchError(str(error), code="launch.node_unreachable") from error
        try:
            return self._open(self._actor(group, 0, resources), node, resources, group, 0)
        except LaunchError:
            self._give_back(group)
            raise

    def _give_back(self, group: Any) -> None:
        """Remove the placement group of one process; nothing when it is the one that the run began with."""
        if any(one is group for one in self._groups[1:]):
            self._groups = [one for one in self._groups if one is not group]
            self._ray.util.remove_placement_group(group)

    def _reserve(self, wanted: Sequence[tuple[RayNode, dict[str, float]]]) -> Any:
        """A placement group with one bundle for each (node, resources). LaunchError when it does not get them."""
        group = self._ray.util.placement_group(
            [resources for _, resources in wanted],
            bundle_label_selector=[{"ray.io/node-id": node.id} for node, _ in wanted],
        )
        limit_s = self._config.node_connect_s
        if not group.wait(limit_s):
            self._ray.util.remove_placement_group(group)
            needed = Counter[str]()
            for _, resources in wanted:
                needed.update(resources)
            free = {name: count for name, count in self._ray.available_resources().items() if name in ("CPU", "GPU")}
            nodes = ", ".join(sorted({node.machine.host.node for node, _ in wanted}))
            message = (
                f"Ray did not reserve {_text(needed)} on {nodes} in {limit_s:g} s; free in the cluster: {_text(free)}"
            )
            raise LaunchError(message, code="launch.ray_busy")
        self._groups.append(group)
        return group

    def _actor(self, group: Any, bundle: int, resources: Mapping[str, float]) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        where = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        actor = self._ray.remote(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            concurrency_groups={"input": 1, "output": 1},
            scheduling_strategy=where,
        )(AgentActor)
        return actor.remote()

    def _open(self, actor: Any, node: RayNode, resources: dict[str, float], group: Any, bundle: int) -> _Seat:
        """The seat of an actor that has been created, connected to the run."""
        assert self._run is not None
        transport = ActorTransport(self._ray, actor, node)
        hello = Hello(folder=os.getcwd(), silence_s=self._config.node_silence_s)
        link = NodeLink(node.machine.host.node, transport, hello, connect_limit_s=self._config.node_connect_s)
        try:
            link.open(*self._run)
        except LaunchError:
            link.close()
            transport.kill()
            raise
        return _Seat(node=node, resources=resources, group=group, bundle=bundle, transport=transport, link=link)


def demands(plan: LaunchPlan, nodes: Sequence[RayNode]) -> list[tuple[PlannedProcess, dict[str, float]]]:
    """The CPUs and GPUs that Ray reserves for each process.

    A process with GPUs gets the CPUs of its threads, others one; less when they exceed the CPUs of their node.
    """
    cpus = {planned.name: planned.num_threads if planned.gpus else 1 for planned in plan.processes}
    total = Counter[str]()
    for planned in plan.processes:
        total[planned.host.node] += cpus[planned.name]
    cores = {node.machine.host.node: node.machine.cores for node in nodes}
    found: list[tuple[PlannedProcess, dict[str, float]]] = []
    for planned in plan.processes:
        node = planned.host.node
        share = int(min(1.0, cores[node] / total[node]) * cpus[planned.name] * 1000) / 1000  # Ray counts in 0.0001
        found.append((planned, {"CPU": share} | ({"GPU": float(len(planned.gpus))} if planned.gpus else {})))
    return found


def with_room(
    living: Sequence[RayNode],
    resources: Mapping[str, float],
    used: Sequence[tuple[str, Mapping[str, float]]],
    before: _Seat | None,
) -> RayNode | None:
    """The living node with the most free CPUs that has `resources`; the node of `before` only if no other has them."""
    free = {
        node.id: Counter({"CPU": float(node.machine.cores), "GPU": float(len(node.machine.gpus))}) for node in living
    }
    for node_id, taken in used:
        if node_id in free:
            free[node_id].subtract(taken)
    fitting = [node for node in living if all(free[node.id][name] >= count for name, count in resources.items())]
    lost = None if before is None else before.node.id
    return max(fitting, key=lambda node: (node.id != lost, free[node.id]["CPU"]), default=None)


def connect() -> Any:
    """Connect to the Ray cluster at RAY_ADDRESS. Returns the package. LaunchError when there is none."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        message = "the Ray launcher needs the package ray: pip install 'areal[ray]'"
        raise ConfigError(message, code="launch.package_missing") from error
    address = os.environ.get("RAY_ADDRESS") or "auto"
    advice = "start one (ray start --head), set RAY_ADDRESS, or use ray job submit"
    if "://" in address:
        message = f"RAY_ADDRESS={address}: a launcher outside of the cluster is not supported: use ray job submit"
        raise LaunchError(message, code="launch.no_ray")
    try:
        if address != "auto":  # Ray itself tries for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        ray.init(address, log_to_driver=False, configure_logging=True, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        cause = " ".join(str(error).split())
        raise LaunchError(
            f"no Ray cluster at RAY_ADDRESS={address}: {cause}: {advice}", code="launch.no_ray"
        ) from error
    return ray


def _living(ray: Any) -> list[RayNode]:
    """Nodes that run processes: those with GPUs first, then by address."""
    found = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    found.sort(key=lambda node: (-node["Resources"].get("GPU", 0), node["NodeManagerAddress"], node["NodeID"]))
    names = Counter(node["NodeManagerHostname"] for node in found)
    nodes: list[RayNode] = []
    for node in found:
        name, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
        host = Host(bind=address, advertise=address, node=name if names[name] == 1 else f"{name}-{node['NodeID'][:6]}")
        gpus = tuple(str(index) for index in range(int(node["Resources"].get("GPU", 0))))
        machine = Machine(cores=int(node["Resources"]["CPU"]), gpus=gpus, host=host)
        nodes.append(RayNode(id=node["NodeID"], machine=machine))
    return nodes


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in sorted(resources.items()))
