"""The jobs of a run with `launcher.slurm.separate_jobs`: one for each server, and one for all trainers."""

import json
import time
from collections.abc import Callable, Mapping, Sequence

from areal.api.config import BaseExperimentConfig
from areal.api.errors import LaunchError
from areal.launcher.backend import ProcessBackend
from areal.launcher.job import LaunchPlan
from areal.launcher.nodes import Node, NodeCluster
from areal.launcher.placement import Machine
from areal.launcher.slurm_client import SlurmClient
from areal.launcher.slurm_job import Component, component_script, components_of, foreign_variables, node_of
from areal.launcher.slurm_states import meaning_of
from areal.system.durable import write_atomic
from areal.system.run_paths import RunPaths

_LOOK_S = 2.0
_REPLACED_WITHIN_S = 5.0
"""The supervisor's loop waits at most this long for the new job of a server; a later attempt finds it running."""


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

    def machines(self) -> Sequence[Machine]:
        """Submit all jobs, wait until they run, and connect to their nodes. LaunchError when one cannot start."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if (record := self._folder / "jobs.json").exists():  # of an earlier turn of this job, which was killed
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
        return self._nodes.backend(plan, paths, secrets)

    def close(self) -> None:
        """End all agents and cancel all jobs."""
        if self._nodes is not None:
            self._nodes.close()
        for job in self._jobs.values():
            self._slurm.cancel(job)

    def _submit(self, component: Component) -> None:
        file = self._folder / f"{component.name}.sh"
        text = component_script(self._config, component, folder=self._folder, main_job=self._main_job)
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
            if shown != (shown := f"areal: job {job} of {component.name} is {meaning.phase}: {cause}"):
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
        """The node of this name for a new agent, in a new job if the last one of a server has ended."""
        component = self._components[name]
        if component.role == "controller":
            return self._node(component, name, self._main_node, "")
        job = self._jobs[component.name]
        facts = self._slurm.look(job)
        if facts is None or meaning_of(facts).phase in ("ending", "ended"):
            cause = "Slurm does not know it any more" if facts is None else meaning_of(facts).cause
            if component.role != "server":
                raise LaunchError(f"job {job} of {component.name} has ended: {cause}", code="launch.node_lost")
            self._say(f"areal: job {job} of {component.name} has ended: {cause}")
            self._submit(component)
        nodes = self._await(component, limit_s=_REPLACED_WITHIN_S)
        return next(node for node in nodes if node.name == name)
