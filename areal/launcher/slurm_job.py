"""The job of a run: the script for sbatch, the resources that it requests, the command of a node. Pure rules."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal.api.config import BaseExperimentConfig, LauncherConfig
from areal.launcher.job import LaunchPlan
from areal.launcher.nodes import Node

_MODULE = "areal.launcher.slurm"
_CONTROLLER_MIB = 4096


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
        return f"{self.nodes} nodes with {self.gpus} GPUs, {self.cpus} CPUs and {self.memory_mib} MiB each"


def resources_of(plan: LaunchPlan, config: BaseExperimentConfig) -> Resources:
    """The resources for a plan over `cluster.n_nodes` equal machines."""
    options = config.launcher
    cpus, memory_mib = dict[str, int](), dict[str, int]()
    for process in plan.processes:
        units, node = max(1, len(process.gpus)), process.host.node
        each_cpus, each_mib = {
            "controller": (1, _CONTROLLER_MIB),
            "server": (units * options.inference_server_cpus_per_gpu, units * options.inference_server_mem_per_gpu),
            "trainer": (units * options.trainer_cpus_per_gpu, units * options.trainer_mem_per_gpu),
        }[process.role]
        cpus[node] = cpus.get(node, 0) + each_cpus
        memory_mib[node] = memory_mib.get(node, 0) + each_mib
    return Resources(
        nodes=config.cluster.n_nodes,
        gpus=config.cluster.n_gpus_per_node,
        cpus=max(cpus.values()),
        memory_mib=max(memory_mib.values()),
    )


def is_requeued(config: BaseExperimentConfig) -> bool:
    """Whether the job may run again after the loss of a node or the end of its time: the run must recover then."""
    return config.recover.mode in ("auto", "resume")


def script_of(
    config: BaseExperimentConfig, needs: Resources, *, folder: Path, directory: Path, words: Sequence[str], python: str
) -> str:
    """The script for sbatch. `folder`: RUN/slurm. `words`: the run's command line. `directory`: where it starts."""
    slurm = config.launcher.slurm
    requeues = is_requeued(config)
    options = {
        "job-name": f"{config.experiment_name}/{config.trial_name}",
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
        "chdir": directory,
        "output": folder / "job-%j.log",
        "open-mode": "append",
        "export": "ALL",
        "signal": f"B:USR1@{slurm.signal_s}" if requeues else "",
    }
    lines = [f"#SBATCH --{name}={_quoted(str(value))}" for name, value in options.items() if value]
    lines.append("#SBATCH --requeue" if requeues else "#SBATCH --no-requeue")
    command = shlex.join([python, "-m", _MODULE, "--inside", *words])
    lines += [f"#SBATCH {word}" for word in shlex.split(slurm.sbatch_additional_args)]
    at_limit = "it saves, and puts the job back into the queue" if requeues else "not sent, because recover.mode is off"
    return "\n".join(
        [
            "#!/bin/bash",
            f"# The run {config.experiment_name}/{config.trial_name} of areal, one job for all its processes.",
            *lines,
            "",
            "# The launcher runs on the first node. It starts one agent per node with srun --overlap, and the agents",
            "# start the servers and trainers. All of them end with this script.",
            f"# USR1 before the time limit: {at_limit}.",
            f"exec {command}",
            "",
        ]
    )


def _quoted(text: str) -> str:
    return f'"{text}"' if any(letter.isspace() for letter in text) else text


def node_of(name: str, options: LauncherConfig, *, python: str, environ: Mapping[str, str]) -> Node:
    """A node of the allocation. Its agent runs in a step that shares all resources of the job there."""
    slurm = options.slurm
    image = None if slurm.container_type == "none" else slurm.trainer_image or slurm.inference_server_image
    agent = [python, "-m", "areal.launcher.node_agent"]
    if slurm.additional_bash_cmds:
        agent = ["bash", "-c", "\n".join([*slurm.additional_bash_cmds, f"exec {shlex.join(agent)}"])]
    flags = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--mem=0", "--cpu-bind=none"]
    if cpus := environ.get("SLURM_CPUS_PER_TASK"):
        flags.append(f"--cpus-per-task={cpus}")  # srun does not take it from the job
    if image and slurm.container_type == "pyxis":
        flags += [f"--container-image={image}", *([f"--container-mounts={slurm.mount}"] if slurm.mount else [])]
    elif image:
        bind = ["--bind", slurm.mount] if slurm.mount else []
        agent = ["apptainer", "exec", "--nv", *bind, image, *agent]
    more = shlex.split(os.path.expandvars(slurm.srun_additional_args))
    return Node(name=name, address=name, command=("srun", *flags, *more, *agent))


def gpu_hours(needs: Resources, time_limit: str) -> float | None:
    """GPU hours that the job uses at most in one turn; None without a time limit."""
    seconds = limit_s(time_limit)
    return None if seconds is None else needs.nodes * needs.gpus * seconds / 3600


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
