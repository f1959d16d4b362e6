"""The jobs of a run with `launcher.slurm.separate_jobs`: one for each server, and one for all trainers."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence

from areal.api.config import BaseExperimentConfig
from areal.api.errors import LaunchError
from areal.launcher.backend import ProcessBackend
from areal.launcher.job import LaunchPlan, PlannedProcess
from areal.launcher.node_choice import NodeChoice
from areal.launcher.nodes import Node, NodeCluster, NodesBackend
from areal.launcher.placement import Machine
from areal.launcher.slurm_client import SlurmClient
from areal.launcher.slurm_job import Component, component_script, components_of, foreign_variables, node_of
from areal.launcher.slurm_states import meaning_of
from areal.system.durable import write_atomic
from areal.system.network import Host
from areal.system.run_paths import RunPaths

_LOOK_S = 2.0


class JobsCluster:
    """The nodes of the jobs of all components, with an agent on each. Implements `Cluster`.

    The launcher runs in the job of the controller, and submits the others. When the job of a server ends, for example
    because its node failed, a new one is submitted. When the job of the trainers ends, the run ends.
    """

    def __init__(
        self,
        slurm: SlurmClient,
        config: BaseExperimentConfig,
        *,
        main_job: str,
        main_node: str,
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """`main_job`, `main_node`: where this process runs."""
        self._slurm = slurm
        self._config = config
        self._folder = RunPaths.of(config).slurm
        self._main_job, self._main_node = main_job, main_node
        self._environ = environ
        self._say = say
        self._components = {name: one for one in components_of(config) for name in one.node_names}
        self._jobs: dict[str, str] = {}
        """By name of the component."""
        self._nodes: NodeCluster | None = None
        self._looked_s: dict[str, float] = {}
        """When Slurm was last asked about the job of a lost node."""

    def machines(self) -> Sequence[Machine]:
        """Submit all jobs, wait until they run, and connect to their nodes. LaunchError when one cannot start."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if (record := self._folder / "jobs.json").exists():  # of an earlier allocation of this job, which was killed
            for job in json.loads(record.read_bytes()).values():
                self._slurm.cancel(job)
        components = list(dict.fromkeys(self._components.values()))
        for component in components[1:]:
            self._submit(component)
        nodes: list[Node] = []
        for component in components:
            nodes += self._await(component, limit_s=None)
        self._nodes = NodeCluster(nodes, self._config.cluster, renew=self._renewed)
        return self._nodes.machines()

    def backend(self, plan: LaunchPlan, paths: RunPaths, secrets: Mapping[str, str]) -> ProcessBackend:
        assert self._nodes is not None
        return JobsBackend(self._nodes.open_run(paths, secrets), self)

    def close(self) -> None:
        """End all agents and cancel all jobs."""
        if self._nodes is not None:
            self._nodes.close()
        for job in self._jobs.values():
            self._slurm.cancel(job)

    def add_server(self, name: str) -> None:
        """One more server. Its job is submitted by `obtain`."""
        self._components[name] = dataclasses.replace(self._components["server-0"], name=name)

    def give_back(self, name: str) -> None:
        """Cancel the job of a server: `obtain` submits another one."""
        if (job := self._jobs.pop(name, None)) is not None:
            self._say(f"areal: job {job} of {name} is cancelled")
            self._slurm.cancel(job)

    def obtain(self, name: str) -> bool:
        """Whether the job of a node without agent runs; also true when it never will, which `_renewed` then says.

        Submits a job for a server that has none, or whose job has ended. Asks Slurm every 2 seconds.
        """
        component, now_s = self._components[name], time.monotonic()
        if component.role != "server":
            return True
        if now_s - self._looked_s.get(name, -_LOOK_S) < _LOOK_S:
            return False
        self._looked_s[name] = now_s
        job = self._jobs.get(component.name)
        try:
            facts = None if job is None else self._slurm.look(job)
            meaning = None if facts is None else meaning_of(facts)
            if meaning is None or meaning.phase in ("ending", "ended"):
                if meaning is not None:
                    self._say(f"areal: job {job} of {component.name} has ended: {meaning.cause}")
                self._submit(component)
                return False
        except LaunchError as error:
            self._say(f"areal: {error}")
            return True
        return meaning.phase == "running" or meaning.never_starts

    def _submit(self, component: Component) -> None:
        file = self._folder / f"{component.name}.sh"
        exclude = self._slurm.excluded(self._config.launcher)
        text = component_script(self._config, component, folder=self._folder, main_job=self._main_job, exclude=exclude)
        write_atomic(file, text.encode(), mode=0o700)
        hidden = foreign_variables(self._environ)
        environment = {name: value for name, value in self._environ.items() if name not in hidden}
        job = self._slurm.submit(file, environment, f"{component.name} with {component.needs}")
        self._jobs[component.name] = job
        write_atomic(self._folder / "jobs.json", json.dumps(self._jobs).encode())
        self._say(f"areal: job {job} is submitted for {component.name}: {file}")

    def _await(self, component: Component, *, limit_s: float | None) -> list[Node]:
        """The nodes of a component once its job runs. LaunchError when it cannot, or not within the limit."""
        if component.role == "controller":
            return [self._node(component, component.name, self._main_node, "")]
        job, began_s, shown = self._jobs[component.name], time.monotonic(), ""
        while True:
            facts = self._slurm.look(job)
            meaning = None if facts is None else meaning_of(facts)
            if facts is not None and meaning is not None and meaning.phase == "running" and facts.nodes:
                addresses = self._slurm.hostnames(facts.nodes)
                self._say(f"areal: job {job} of {component.name} runs on {facts.nodes}")
                named = zip(component.node_names, addresses, strict=True)
                return [self._node(component, name, address, job) for name, address in named]
            cause = meaning.cause if meaning is not None else "Slurm does not know it"
            if meaning is None or meaning.phase == "ended" or meaning.never_starts:
                raise LaunchError(f"job {job} of {component.name} cannot start: {cause}", code="launch.slurm_refused")
            if limit_s is not None and time.monotonic() - began_s > limit_s:
                raise LaunchError(f"job {job} of {component.name} waits: {cause}", code="launch.node_unreachable")
            waits = f"areal: job {job} of {component.name} is {meaning.phase}{f': {cause}' if cause else ''}"
            if shown != (shown := waits):
                self._say(shown)
            time.sleep(_LOOK_S)

    def _node(self, component: Component, name: str, address: str, job: str) -> Node:
        return node_of(
            name,
            address,
            self._config.launcher,
            role=component.role,
            cpus=component.needs.cpus,
            environ=self._environ,
            job=job,
        )

    def _renewed(self, name: str) -> Node:
        """The node of this name for a new agent. LaunchError while its job does not run."""
        component = self._components[name]
        if component.role == "controller":
            return self._node(component, name, self._main_node, "")
        if component.name not in self._jobs:
            raise LaunchError(f"{component.name} has no job", code="launch.node_unreachable")
        nodes = self._await(component, limit_s=0.0)
        return next(node for node in nodes if node.name == name)


class JobsBackend(NodesBackend):
    """Processes on the nodes of several jobs. An added server, and one whose job has ended, waits for a job."""

    def __init__(self, choice: NodeChoice, jobs: JobsCluster) -> None:
        super().__init__(choice.agent_for)
        self._choice = choice
        self._jobs = jobs
        self._replaced = set[str]()
        """Nodes of servers that got a new job since they were last connected."""

    def new_host(self, name: str) -> Host | None:
        self._jobs.add_server(name)
        return Host(node=name)

    def is_prepared(self, planned: PlannedProcess) -> bool:
        node = planned.host.node
        if not self._choice.is_connected(node):
            if not self._choice.is_connecting(node) and not self._jobs.obtain(node):
                return False
            if not self._choice.has_tried(node):
                return False
        if self._choice.is_connected(node) or planned.role != "server" or node in self._replaced:
            self._replaced.discard(node)
            return True
        self._replaced.add(node)
        self._jobs.give_back(node)  # of a lost node; Slurm may notice only after minutes
        return False

    def forget(self, name: str) -> None:
        self._choice.drop(name)
        self._jobs.give_back(name)
