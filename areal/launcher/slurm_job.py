"""The jobs of a run: the scripts for sbatch, the resources that they request, the command of a node. Starts nothing."""

import dataclasses
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areal.api.config import BaseExperimentConfig, LauncherConfig, PPOConfig
from areal.api.errors import LaunchError
from areal.launcher.backend import ProcessBackend
from areal.launcher.job import LaunchPlan, PlannedProcess
from areal.launcher.node_link import agent_command, image_of
from areal.launcher.nodes import Node, NodeChoice, NodeCluster, NodesBackend
from areal.launcher.placement import Machine, node_names
from areal.launcher.restart_rules import Role
from areal.observe.log import get_logger
from areal.system.durable import write_atomic
from areal.system.network import Host
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# What a state of a Slurm job means: whether it has ended, how, why, and whether Slurm runs it again. Pure rules.

Phase = Literal["pending", "running", "ending", "ended"]
Outcome = Literal["", "completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """A job as `scontrol show job` or `sacct` reports it."""

    state: str
    reason: str = ""
    restarts: int = 0
    """How often Slurm has put the job back into the queue."""
    exit_code: int = 0
    """Exit code of the batch script."""
    signal: int = 0
    """The signal that ended the batch script; 0 = none."""
    requeue: bool = False
    """Slurm may put the job back into the queue after the loss of a node or a preemption."""
    is_preempted: bool = False
    """A job of higher priority takes its nodes."""
    nodes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    phase: Phase
    outcome: Outcome = ""
    """Empty while the job has not ended."""
    cause: str = ""
    """Why it ended, or why it waits."""
    requeues: bool = False
    """The end may be followed by PENDING: Slurm puts the job back into the queue a moment later."""
    never_starts: bool = False
    """It waits for something that does not happen without a change of the job."""


_ENDING = {"COMPLETING", "STAGE_OUT"}
_PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD",
            "POWER_UP_NODE", "UPDATE_DB"}  # fmt: skip
_REQUEUED = {"NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}
"""Ends after which Slurm puts a job with --requeue back into the queue."""
_CAUSES = {
    "BOOT_FAIL": "its nodes could not be started (BOOT_FAIL)",
    "DEADLINE": "its deadline passed (DEADLINE)",
    "LAUNCH_FAILED": "Slurm could not start it on its nodes (LAUNCH_FAILED)",
    "NODE_FAIL": "one of its nodes failed (NODE_FAIL)",
    "OUT_OF_MEMORY": "a node needed more memory than the job requests (OUT_OF_MEMORY): raise "
    "launcher.trainer_mem_per_gpu or launcher.inference_server_mem_per_gpu",
    "PREEMPTED": "a job of higher priority took its nodes (PREEMPTED)",
    "RECONFIG_FAIL": "its nodes could not be configured (RECONFIG_FAIL)",
    "REVOKED": "another cluster of the federation runs it (REVOKED)",
    "TIMEOUT": "it reached its time limit (TIMEOUT): raise launcher.slurm.time_limit, or set recover.mode=auto and a "
    "larger launcher.slurm.signal_s, so that it saves and continues in a new allocation",
}
_HELD = {
    "JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD",
    "ReservationDeleted", "launch_failed_requeued_held", "job_requeued_in_held_state",
}  # fmt: skip
_NEVER = {
    "AccountNotAllowed": "the account may not use the partition: change launcher.slurm.account or .partition",
    "AccountingPolicy": "the limits of the account do not allow it",
    "BadConstraints": "no node has what it requests",
    "DependencyNeverSatisfied": "a job that it depends on has failed",
    "InvalidAccount": "the account does not exist: change launcher.slurm.account",
    "InvalidQOS": "the quality of service does not exist: change launcher.slurm.qos",
    "MaxMemPerLimit": "it requests more memory than the partition allows",
    "PartitionConfig": "it requests more nodes or time than the partition has: change cluster.n_nodes, "
    "launcher.slurm.time_limit or launcher.slurm.partition",
    "PartitionNodeLimit": "it requests more nodes than the partition allows: change cluster.n_nodes or "
    "launcher.slurm.partition",
    "PartitionTimeLimit": "it requests more time than the partition allows: change launcher.slurm.time_limit",
    "QOSNotAllowed": "the quality of service may not be used here: change launcher.slurm.qos",
}
_LIMIT_OF_ONE_JOB = re.compile(r"(Assoc|QOS)\w*PerJob(Limit)?$")


def meaning_of(facts: JobFacts) -> Meaning:
    """What the facts of a job mean. A state that is not known here counts as running, so that it is followed on."""
    state = facts.state.split()[0].rstrip("+").upper() if facts.state.strip() else ""
    if state in _PENDING:
        return _waiting(state, facts.reason)
    if state in _ENDING:
        return Meaning(phase="ending", cause="its processes end")
    if state == "COMPLETED":
        return Meaning(phase="ended", outcome="completed")
    if state == "CANCELLED":
        return Meaning(phase="ended", outcome="cancelled", cause=_cancelled(facts.state))
    if state == "FAILED":
        return Meaning(phase="ended", outcome="failed", cause=_failed(facts))
    if state in _CAUSES:
        is_requeued = facts.requeue and state in _REQUEUED
        return Meaning(phase="ended", outcome="failed", cause=_CAUSES[state], requeues=is_requeued)
    return Meaning(phase="running", cause="" if state in {"RUNNING", "SIGNALING"} else f"it is {state or 'unknown'}")


def _waiting(state: str, reason: str) -> Meaning:
    if state in _HELD or reason in _HELD:
        why = reason if reason in _HELD else state
        return Meaning(phase="pending", cause=f"it is held ({why}); `scontrol release` starts it")
    if reason in _NEVER:
        return Meaning(phase="pending", cause=f"{_NEVER[reason]} ({reason})", never_starts=True)
    if _LIMIT_OF_ONE_JOB.match(reason):
        return Meaning(phase="pending", cause=f"it exceeds a limit of one job ({reason})", never_starts=True)
    if state == "CONFIGURING":
        return Meaning(phase="pending", cause="its nodes start")
    return Meaning(phase="pending", cause="" if reason in ("", "None") else reason.replace("_", " "))


def _cancelled(state: str) -> str:
    _, _, user = state.partition(" by ")
    return f"it was cancelled by user {user.strip()}" if user else "it was cancelled"


def _failed(facts: JobFacts) -> str:
    if facts.signal == 9:  # Slurm reports this as JobLaunchFailure
        return "its batch script was killed by signal 9"
    if facts.signal:
        return f"its batch script was ended by signal {facts.signal}"
    if facts.exit_code == 130:
        return "its run was interrupted"
    if facts.exit_code == 0 and facts.reason not in ("", "None"):
        return f"Slurm could not run it ({facts.reason})"
    return f"its batch script exited with {facts.exit_code}"


# ----------------------------------------------------------------------------------------------------------------------
# The commands of Slurm that a launcher needs: submit, look, cancel, requeue.

_LOG = get_logger(__name__)
_LIMIT_S = 60.0
_UNKNOWN_JOB = "Invalid job id"
_SILENT = re.compile(
    r"Unable to contact slurm controller|Could not establish a configuration source|Socket timed out|Zero Bytes were t"
)
"""What the commands of Slurm print when its controller does not answer."""


class SlurmClient:
    """Runs the commands of Slurm on this machine. Every method but `cancel` raises LaunchError with code
    `launch.slurm_silent` when they are not installed or the controller does not answer."""

    def submit(self, script: Path, environment: dict[str, str], request: str) -> str:
        """Submit a script; returns the job's id. LaunchError with code `launch.slurm_refused` when Slurm refuses it.

        `request`: what the job requests, for the error.
        """
        done = _run("sbatch", "--parsable", str(script), environment=environment)
        if done.returncode:
            raise LaunchError(f"Slurm refuses a job of {request}: {_error(done)}", code="launch.slurm_refused")
        return done.stdout.strip().partition(";")[0]

    def look(self, job: str) -> JobFacts | None:
        """The state of a job; None when Slurm does not know it any more."""
        done = _run("scontrol", "show", "job", "--oneliner", job)
        if done.returncode == 0:
            return facts_of(done.stdout)
        if _UNKNOWN_JOB not in done.stderr:
            raise LaunchError(f"Slurm does not answer: {_error(done)}", code="launch.slurm_silent")
        for source in (("-X",), ("-c",)):  # the accounting database, or the file of ended jobs
            done = _run("sacct", *source, "-n", "-P", "-j", job, "-o", "State,ExitCode")
            if done.returncode == 0 and (lines := done.stdout.split("\n")[:-1]):
                state, _, status = lines[-1].partition("|")
                code, signal = _status(status)
                return JobFacts(state=state, exit_code=code, signal=signal)
        return None

    def cancel(self, job: str) -> None:
        """Cancel a job. When that fails only a warning says so, because other things have to end too."""
        try:
            _run("scancel", job)
        except LaunchError as error:
            _LOG.warning("job %s was not cancelled: %s", job, error)

    def kill_wait_s(self) -> float | None:
        """Seconds from SIGTERM to SIGKILL at the end of a job (KillWait); None when Slurm does not say so."""
        match = re.search(r"^KillWait\s*=\s*(\d+)", _run("scontrol", "show", "config").stdout, re.MULTILINE)
        return None if match is None else float(match[1])

    def requeue(self, job: str) -> None:
        """Put a running job back into the queue, which ends its processes. LaunchError when Slurm refuses it."""
        done = _run("scontrol", "requeue", job)
        if done.returncode:
            raise LaunchError(f"job {job} cannot be requeued: {_error(done)}", code="launch.slurm_refused")

    def hostnames(self, nodes: str) -> list[str]:
        """The names in a list of nodes such as node[1-3]."""
        done = _run("scontrol", "show", "hostnames", nodes)
        if done.returncode:
            raise LaunchError(f"scontrol show hostnames {nodes}: {_error(done)}", code="launch.slurm_silent")
        return done.stdout.split()

    def excluded(self, options: LauncherConfig) -> str:
        """The nodes that a job must not use, so that Slurm chooses among those of `launcher.nodelist`.

        A job with --nodelist would use all nodes of the list, and others too. LaunchError with code
        `launch.no_node_chosen` when the list has an unknown node, or none that is not excluded.
        """
        if not options.nodelist:
            return options.exclude
        done = _run("sinfo", "--all", "--noheader", "--Node", "--format=%N")
        if done.returncode:
            raise LaunchError(f"sinfo: {_error(done)}", code="launch.slurm_silent")
        known, wanted = set(done.stdout.split()), node_names(options.nodelist)
        if unknown := wanted - known:
            message = f"launcher.nodelist={options.nodelist}: Slurm has no node {', '.join(sorted(unknown))}"
            raise LaunchError(message, code="launch.no_node_chosen")
        chosen = wanted - node_names(options.exclude)
        if not chosen:
            message = f"launcher.nodelist={options.nodelist} and launcher.exclude={options.exclude} leave no node"
            raise LaunchError(message, code="launch.no_node_chosen")
        return ",".join(sorted(known - chosen))


def facts_of(line: str) -> JobFacts:
    """The facts in a line of `scontrol show job --oneliner`."""
    fields = dict(re.findall(r"(?:^| )(JobState|Reason|Restarts|ExitCode|Requeue|NodeList|PreemptTime)=(\S*)", line))
    code, signal = _status(fields.get("ExitCode", ""))
    return JobFacts(
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        restarts=int(fields.get("Restarts") or 0),
        exit_code=code,
        signal=signal,
        requeue=fields.get("Requeue") == "1",
        is_preempted=fields.get("PreemptTime", "None") != "None",
        nodes="" if fields.get("NodeList") == "(null)" else fields.get("NodeList", ""),
    )


def _status(text: str) -> tuple[int, int]:
    """`code:signal` as Slurm writes it."""
    code, _, signal = text.strip().partition(":")
    return int(code or 0), int(signal or 0)


def _run(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env=environment,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        message = f"the command {words[0]} is not installed here: run the Slurm launcher on a login node"
        raise LaunchError(message, code="launch.slurm_silent") from None
    except subprocess.TimeoutExpired:
        message = f"{words[0]} has not ended after {time.monotonic() - began_s:.0f} s: the controller does not answer"
        raise LaunchError(message, code="launch.slurm_silent") from None
    if done.returncode and _SILENT.search(done.stderr):
        raise LaunchError(f"Slurm does not answer: {_error(done)}", code="launch.slurm_silent")
    return done


def _error(done: subprocess.CompletedProcess[str]) -> str:
    """The errors that a command printed, without its own name, in one line."""
    lines = [re.sub(r"^\w+: (error: )?", "", line) for line in done.stderr.splitlines() if line.strip()]
    return "; ".join(lines) or f"it exited with {done.returncode}"


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
    """GPUs of each node."""
    cpus: int
    """CPUs of each node: as many as the processes of the fullest one need."""
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
        wanted = [
            (name, component.needs.gpus, component.role)
            for component in components_of(config)
            for name in component.node_names
        ]
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
        start = ["env", *(f"--unset={name}" for name in sorted(foreign_variables(environ))), "srun", f"--jobid={job}"]
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
    return None if seconds is None else sum(need.nodes * need.gpus for need in needs) * seconds / 3600


def greatest(needs: Sequence[Resources]) -> Resources:
    """Resources that are enough for each of `needs`."""
    return Resources(
        nodes=max(need.nodes for need in needs),
        gpus=max(need.gpus for need in needs),
        cpus=max(need.cpus for need in needs),
        memory_mib=max(need.memory_mib for need in needs),
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


# ----------------------------------------------------------------------------------------------------------------------
# The jobs of a run with `launcher.slurm.separate_jobs`: one for each server, and one for all trainers.

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
        self._components = {name: component for component in components_of(config) for name in component.node_names}
        self._jobs: dict[str, str] = {}  # Component -> job.
        self._nodes: NodeCluster | None = None
        self._looked_s: dict[str, float] = {}  # When Slurm was last asked about the job of a lost node.

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
        self._replaced = set[str]()  # Nodes of servers that got a new job since they were last connected.

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
