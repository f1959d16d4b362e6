"""The jobs of a run: the scripts for sbatch, the resources that they request, the command of a node. Starts nothing."""

import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal.api.config import BaseExperimentConfig, LauncherConfig, PPOConfig
from areal.launcher.agent_command import agent_command, image_of
from areal.launcher.job import LaunchPlan
from areal.launcher.nodes import Node
from areal.launcher.placement import Machine
from areal.launcher.restart_rules import Role
from areal.system.network import Host
from areal.system.run_paths import RunPaths

_MODULE = "areal.launcher.slurm"
_CONTROLLER_MIB = 4096
_ENOUGH_CORES = 2**16
"""Cores of a node that Slurm has not chosen yet: a job requests what its processes need, not what this machine has."""
_HOLD_SIGNAL = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); "
    "signal.signal(signal.SIGUSR1, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Program that becomes another one, to which USR1 is delivered when that one unblocks it (`TimeLimit`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a job requests."""

    nodes: int
    gpus: int
    """Of each node."""
    cpus: int
    """Of each node: what the processes of the fullest one need."""
    memory_mib: int
    """The same."""

    def __str__(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{nodes} with {self.gpus} GPUs, {self.cpus} CPUs and {self.memory_mib} MiB each"


def _demand_of(role: Role, units: int, options: LauncherConfig) -> tuple[int, int]:
    """CPUs and MiB of a process with `units` GPUs, or of one on the CPU (1)."""
    return {
        "controller": (1, _CONTROLLER_MIB),
        "server": (units * options.inference_server_cpus_per_gpu, units * options.inference_server_mem_per_gpu),
        "trainer": (units * options.trainer_cpus_per_gpu, units * options.trainer_mem_per_gpu),
    }[role]


def resources_of(plan: LaunchPlan, config: BaseExperimentConfig) -> Resources:
    """The resources of the job in which the launcher runs."""
    if config.launcher.slurm.separate_jobs:
        return components_of(config)[0].needs
    cpus, memory_mib = Counter[str](), Counter[str]()
    for process in plan.processes:
        each_cpus, each_mib = _demand_of(process.role, max(1, len(process.gpus)), config.launcher)
        cpus[process.host.node] += each_cpus
        memory_mib[process.host.node] += each_mib
    return Resources(
        nodes=config.cluster.n_nodes,
        gpus=config.cluster.n_gpus_per_node,
        cpus=max(cpus.values()),
        memory_mib=max(memory_mib.values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A part of a run that has a separate job with `launcher.slurm.separate_jobs`."""

    name: str
    role: Role
    needs: Resources

    @property
    def node_names(self) -> list[str]:
        """Names for its nodes, known before Slurm chooses them."""
        count = self.needs.nodes
        return [self.name] if count == 1 else [f"{self.name}-{index}" for index in range(count)]


def components_of(config: BaseExperimentConfig) -> list[Component]:
    """The controller, each server, and all trainers together."""
    mode, limit = config.allocation, config.cluster.n_gpus_per_node

    def component(name: str, role: Role, processes: int, size: int) -> Component:
        nodes = max(1, math.ceil(processes / limit)) if limit and role == "trainer" else 1
        units = math.ceil(processes / nodes) * (size if limit else 1)
        cpus, memory_mib = _demand_of(role, units, config.launcher)
        gpus = 0 if role == "controller" or not limit else units
        return Component(
            name=name, role=role, needs=Resources(nodes=nodes, gpus=gpus, cpus=cpus, memory_mib=memory_mib)
        )

    attached = isinstance(config, PPOConfig) and config.rollout.server_addrs
    servers = mode.inference.num_replicas if mode.inference is not None and not attached else 0
    size = mode.inference.instance_size if mode.inference is not None else 1
    return [
        component("controller", "controller", 1, 1),
        *(component(f"server-{index}", "server", 1, size) for index in range(servers)),
        component("trainers", "trainer", mode.train[0].parallel.world_size, 1),
    ]


def machines_of(config: BaseExperimentConfig) -> list[Machine]:
    """The machines for the plan before any is known: those that the job, or the jobs of the components, request."""
    count, each = config.cluster.n_nodes, config.cluster.n_gpus_per_node
    wanted: list[tuple[str, int, Role | None]] = [(f"node{index + 1}", each, None) for index in range(count)]
    if config.launcher.slurm.separate_jobs:
        wanted = [(name, one.needs.gpus, one.role) for one in components_of(config) for name in one.node_names]
    return [
        Machine(cores=_ENOUGH_CORES, gpus=tuple(map(str, range(gpus))), host=Host(node=name), role=role)
        for name, gpus, role in wanted
    ]


def is_requeued(config: BaseExperimentConfig) -> bool:
    """Whether the job may run again after the loss of a node or the end of its time: the run must recover then."""
    return config.recover.mode in ("auto", "resume")


def run_script(
    config: BaseExperimentConfig,
    needs: Resources,
    *,
    folder: Path,
    script: str | None,
    exclude: str,
    runs: Sequence[Path] = (),
    at_once: int = 0,
) -> str:
    """The script of the job in which the launcher runs. `folder`: RUN/slurm. `script`: of the user.

    `exclude`: `SlurmClient.excluded`.
    `runs`: the run folders of a sweep, an array of such jobs; at most `at_once` of them run together (0 = all).
    """
    requeues = is_requeued(config)
    log = folder / ("job-%A_%a.log" if runs else "job-%j.log")
    signal = f"B:USR1@{config.launcher.slurm.signal_s}" if requeues else ""
    more = {"exclude": exclude, "signal": signal, "open-mode": "append"}
    lines = _directives(config, needs, name=config.trial_name, log=log, requeues=requeues, more=more)
    words = [] if script is None else [str(Path(script).absolute())]
    launcher = [sys.executable, "-m", _MODULE, "--inside", *words, "--config"]
    command = f"exec {shlex.join([sys.executable, '-S', '-c', _HOLD_SIGNAL, *launcher])}"
    file = shlex.quote(str(folder / "config.yaml"))
    if runs:
        lines.append(f"#SBATCH --array=0-{len(runs) - 1}" + (f"%{at_once}" if at_once else ""))
        files = [shlex.quote(str(RunPaths(run).slurm / "config.yaml")) for run in runs]
        command, file = "\n".join(["runs=(", *files, ")", command]), '"${runs[$SLURM_ARRAY_TASK_ID]}"'
    where = "separate jobs, which it submits" if config.launcher.slurm.separate_jobs else "this job"
    at_limit = "it saves, and puts the job back into the queue" if requeues else "not sent, because recover.mode is off"
    return "\n".join(
        [
            "#!/bin/bash",
            f"# The run {config.experiment_name}/{config.trial_name} of areal.",
            *lines,
            "",
            f"# The launcher runs on the first node. It starts one agent per node of {where}, with srun --overlap, and",
            "# the agents start the servers and trainers. All of them end with this script.",
            f"# USR1 before the time limit: {at_limit}. It is held back while the launcher starts.",
            "trap '' USR1",
            f"{command} {file}",
            "",
        ]
    )


def component_script(
    config: BaseExperimentConfig, component: Component, *, folder: Path, main_job: str, exclude: str
) -> str:
    """The script of the job of one component: it holds the resources while the job of the launcher runs.

    `exclude`: `SlurmClient.excluded`.
    """
    log = folder / f"{component.name}-%j.log"
    name = f"{config.trial_name}:{component.name}"
    return "\n".join(
        [
            "#!/bin/bash",
            f"# The nodes of {component.name} of the run {config.experiment_name}/{config.trial_name} of areal.",
            *_directives(config, component.needs, name=name, log=log, requeues=False, more={"exclude": exclude}),
            "",
            f"# The launcher in job {main_job} starts the processes here with srun, and cancels this job at its end.",
            "# Should it be killed, this script ends some seconds after its job. An unreachable controller is no end.",
            "while sleep 10; do",
            f"    if state=$(squeue --noheader --jobs={main_job} --format=%T 2>&1); then",
            "        [[ $state == RUNNING || $state == SUSPENDED ]] || exit 0",
            '    elif [[ $state == *"Invalid job id"* ]]; then',
            "        exit 0",
            "    fi",
            "done",
            "",
        ]
    )


def _directives(
    config: BaseExperimentConfig, needs: Resources, *, name: str, log: Path, requeues: bool, more: Mapping[str, str]
) -> list[str]:
    slurm = config.launcher.slurm
    options = {
        "job-name": f"{config.experiment_name}/{name}",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "nodes": needs.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": needs.cpus,
        "gpus-per-node": needs.gpus,
        "mem": f"{needs.memory_mib}M",
        "time": slurm.time_limit,
        "chdir": Path.cwd(),
        "output": log,
        "export": "ALL",
        **more,
    }
    lines = [f"#SBATCH --{option}={_quoted(str(value))}" for option, value in options.items() if value]
    lines.append("#SBATCH --requeue" if requeues else "#SBATCH --no-requeue")
    return lines + [f"#SBATCH {_quoted(word)}" for word in shlex.split(slurm.sbatch_additional_args)]


def _quoted(text: str) -> str:
    return f'"{text}"' if any(letter.isspace() for letter in text) else text


def node_of(
    name: str,
    address: str,
    options: LauncherConfig,
    *,
    role: Role | None,
    cpus: int,
    environ: Mapping[str, str],
    job: str = "",
) -> Node:
    """A node of an allocation. Its agent runs in a step that shares all resources of the job there.

    `role`: of the processes there; None = all. `job`: None = the one that this process runs in.
    """
    slurm = options.slurm
    flags = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={address}", "--mem=0", "--cpu-bind=none"]
    flags.append(f"--cpus-per-task={cpus}")  # srun does not take it from the job
    start = ["srun"]
    if job:  # variables of the other job would be options of this step
        start = ["env", *(f"--unset={found}" for found in sorted(foreign_variables(environ))), "srun", f"--jobid={job}"]
    if slurm.container_type == "pyxis" and (image := image_of(slurm, role)):
        flags += [f"--container-image={image}", *([f"--container-mounts={slurm.mount}"] if slurm.mount else [])]
    more = shlex.split(os.path.expandvars(slurm.srun_additional_args))
    return Node(name=name, address=address, command=(*start, *flags, *more, *agent_command(slurm, role)), role=role)


def foreign_variables(environ: Mapping[str, str]) -> set[str]:
    """The variables of the job that this process runs in."""
    return {name for name in environ if name.startswith("SLURM_") and name != "SLURM_CONF"}


def gpu_hours(needs: Sequence[Resources], time_limit: str) -> float | None:
    """GPU hours that jobs use at most until their time limit; None without a time limit."""
    seconds = limit_s(time_limit)
    return None if seconds is None else sum(one.nodes * one.gpus for one in needs) * seconds / 3600


def greatest(needs: Sequence[Resources]) -> Resources:
    """Resources that are enough for each of `needs`."""
    return Resources(
        nodes=max(one.nodes for one in needs),
        gpus=max(one.gpus for one in needs),
        cpus=max(one.cpus for one in needs),
        memory_mib=max(one.memory_mib for one in needs),
    )


def limit_s(text: str) -> int | None:
    """Seconds of a time limit in Slurm's forms M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None when it is empty."""
    if not text:
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # hours come first
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:
        parts = [0, *parts, 0]
    else:
        parts = [0] * (3 - len(parts)) + parts
    hours, minutes, seconds = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
