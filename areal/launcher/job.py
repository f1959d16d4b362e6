"""The plan of a launch, as pure data: its processes with their commands, and the numbers that a config implies."""

import dataclasses
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areal.api.allocation import ParallelDims, check_supported
from areal.api.config import BaseExperimentConfig, PPOConfig, RowsExperimentConfig, TrainEngineConfig
from areal.api.config.launcher import LauncherConfig
from areal.api.config.redaction import public_text
from areal.api.config.rollout import InferenceEngineConfig, server_url
from areal.api.errors import ConfigError
from areal.data.prompt_stream import step_limits, steps_per_epoch
from areal.fleet.server_backend import ServerBackend, ServerCommand, backend_named, prepended
from areal.launcher.placement import Demand, Machine, Place, Placement, memory_demand, place, shortages
from areal.launcher.restart_rules import Role
from areal.models.model_shape import ModelShape
from areal.models.vision_layout import read_vision_layout
from areal.observe.log import get_logger
from areal.system.device import core_ids
from areal.system.network import TRAINERS_VARIABLE, Host
from areal.system.process import ProcessContext, WeightTransport
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# Rules of a plan that depend on GPUs: how weights travel, variables of the processes, time limits. Pure functions.

_CONNECT_S = 300  # Longest wait of NCCL for the ranks of a group, in seconds: the time limit of one weight bucket.
_GPU_START_S = 1800.0
_BYTES_PER_S = 50e6  # Assumed speed of reading a checkpoint over a slow shared disk.


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPath:
    """How new weights reach the servers, and why."""

    transport: WeightTransport
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclVersions:
    """Versions of NCCL in the environments of both ends; empty = unknown."""

    trainers: str = ""
    servers: str = ""


def weight_path(config: PPOConfig, placed: Placement, *, is_attached: bool, nccl: NcclVersions) -> WeightPath:
    """What `actor.weight_update_mode` means for these places. ConfigError when xccl cannot work there.

    NCCL needs the same version on all ranks, and refuses two ranks on one GPU.
    """
    option = config.actor.weight_update_mode
    mode = option.removeprefix("delta_") if option != "delta" else "http"
    if config.publishes_adapters:
        return WeightPath(transport="disk", reason="the servers get adapters alone, see actor.adapter_update_mode")
    if mode in ("disk", "http"):
        return WeightPath(transport=mode, reason=f"actor.weight_update_mode={option}")
    is_native = config.server_backend == "native"
    if config.actor.sends_deltas and not is_native:
        return WeightPath(transport="gloo", reason=f"actor.weight_update_mode={option}, to the hosts of the servers")
    trainer_gpu = bool(placed.trainers and placed.trainers[0].gpus)
    servers_gpu = bool(placed.servers and placed.servers[0][0].gpus)
    both: Literal["nccl", "gloo"] = "nccl" if trainer_gpu else "gloo"
    if is_attached:
        if mode == "auto":
            return WeightPath(transport="disk", reason="devices and libraries of attached servers are not known")
        return WeightPath(transport=both, reason=f"actor.weight_update_mode={option}")
    problem, reason = "", "trainers and servers run on the CPU"
    if trainer_gpu != servers_gpu:
        problem = "only the servers have GPUs" if servers_gpu else "only the trainers have GPUs"
        if mode == "xccl" and (is_native or not servers_gpu):
            return WeightPath(transport="gloo", reason=problem)
    elif trainer_gpu:
        ends = [placed.trainers[0], *(place for members in placed.servers for place in members)]
        used = [(place.machine.host.node, gpu) for place in ends for gpu in place.gpus]
        ours, theirs = _numbers(nccl.trainers), _numbers(nccl.servers)
        reason = "trainers and servers have GPUs and one NCCL"
        if len(set(used)) < len(used):
            problem = "trainer-0 or a server shares a GPU with another one, which NCCL refuses"
        elif not is_native and ours and theirs and ours != theirs:
            problem = f"NCCL is {nccl.trainers} in the trainers and {nccl.servers} in the servers (server_python)"
        elif not is_native and not (ours and theirs) and mode == "auto":
            problem = "the NCCL versions of trainers and servers are not known"
    if problem and mode == "auto":
        return WeightPath(transport="disk", reason=problem)
    if problem:
        message = f"actor.weight_update_mode={option}: {problem}: use disk or auto"
        raise ConfigError(message, code="launch.no_common_transport")
    return WeightPath(transport=both, reason=reason)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def gpu_variables(role: str, gpus: Sequence[str], nccl: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process with GPUs. Without GPUs there are none; those of the launcher's environment win.

    `nccl`: variables of NCCL that the trainers share with the servers.
    """
    if not gpus:
        return {}
    # The ids in CUDA_VISIBLE_DEVICES are those of nvidia-smi, which numbers by bus.
    variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(_CONNECT_S)}
    if role == "trainer":
        # Packed rows differ in length from step to step; without this the allocator fragments the memory.
        variables |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **nccl}
    return _with_own(variables)


def with_time_limits(config: BaseExperimentConfig, *, checkpoint_bytes: int, on_gpu: bool) -> BaseExperimentConfig:
    """The configuration with limits of a start that fit the size of the checkpoint; given values stay.

    A default becomes at least 1800 s on GPUs and a second for each 50 MB of the checkpoint.
    """
    reading_s = checkpoint_bytes / _BYTES_PER_S
    start_s = max(reading_s, _GPU_START_S if on_gpu else 0.0)
    ready_s, default = config.launcher.ready_timeout_s, LauncherConfig()
    if ready_s == default.ready_timeout_s:
        launcher = dataclasses.replace(config.launcher, ready_timeout_s=max(ready_s, start_s))
        config = dataclasses.replace(config, launcher=launcher)
    if isinstance(config, PPOConfig):
        rollout, usual = config.rollout, InferenceEngineConfig()
        if rollout.setup_timeout == usual.setup_timeout:
            rollout = dataclasses.replace(rollout, setup_timeout=max(rollout.setup_timeout, start_s))
        if rollout.weight_update_timeout_s == usual.weight_update_timeout_s:
            limit_s = max(rollout.weight_update_timeout_s, reading_s)
            rollout = dataclasses.replace(rollout, weight_update_timeout_s=limit_s)
        config = dataclasses.replace(config, rollout=rollout)
    return config


def with_adapters(config: BaseExperimentConfig, *, num_machines: int, on_gpu: bool) -> BaseExperimentConfig:
    """The configuration in which native servers on the CPU of one machine get LoRA adapters alone, as auto means.

    They merge them into their checkpoint, which they read again at every update: a GPU gets whole weights sooner.
    """
    if not isinstance(config, PPOConfig) or config.server_backend != "native" or config.allocation.evaluation:
        return config
    actor, is_given = config.actor, config.native.model_path or config.rollout.server_addrs
    modes = (actor.adapter_update_mode, actor.weight_update_mode)
    if actor.lora is None or actor.init_from_scratch or is_given or modes != ("auto", "auto"):
        return config
    is_text = read_vision_layout(actor.path) is None  # the names of other checkpoints differ from those of the modules
    mode = "adapter" if is_text and not on_gpu and num_machines == 1 else "auto"
    return dataclasses.replace(config, actor=dataclasses.replace(actor, adapter_update_mode=mode))


SPINNING = {"GOMP_SPINCOUNT": "10000"}
"""After these rounds a waiting thread of OpenMP sleeps. By default it spins for milliseconds, which doubles the cost of
a product on two threads when other processes use the cores, and gains nothing on idle ones."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20)}
"""glibc raises these limits itself only when a tensor of 32 MiB is freed. Until then the memory of each step returns to
the system, and page faults fill that of the next step with zeros: 8% of the CPU time of a small model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    name: str
    role: Role
    index: int
    part: int = 0
    """Part of a server over several machines. Part 0 serves the requests."""
    host: Host
    argv: tuple[str, ...]
    env: dict[str, str]
    """Added to the launcher's own environment. It contains no token."""
    log_path: str
    device: str
    gpus: tuple[str, ...]
    """GPUs of one server or rank; empty = it runs on the CPU."""
    num_threads: int
    """CPU threads of each computing process."""
    memory_bytes: int | None
    """Weights, gradients, optimiser state and KV cache; None = unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNumbers:
    """Numbers that follow from the configuration. None = known after the dataset is read."""

    episodes_per_step: int
    samples_per_step: int
    optimizer_steps_per_train_step: int
    max_concurrent_episodes: int
    max_staleness: int | None
    """Limit of admission, in policy versions; None without rollouts."""
    on_stale: str
    rows: int | None
    steps_per_epoch: int | None
    total_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything that a launcher will start."""

    run_dir: str
    recover: bool
    allocation: str
    processes: tuple[PlannedProcess, ...]
    spare_gpus: tuple[tuple[Host, tuple[str, ...]], ...]
    """Machine and the GPUs that no process uses, for replicas that are added later."""
    attached: tuple[str, ...]
    """URLs of servers that already run and replace planned ones."""
    numbers: RunNumbers
    weight_path: WeightPath | None = None
    """How new weights reach the servers; None without servers."""
    evaluations: str = ""
    """background or blocking (`evaluator.mode`); empty without evaluations of servers."""
    warning: str = ""
    """A message for the user before the start; empty when there is none."""

    @property
    def num_servers(self) -> int:
        return len(self.attached) or sum(process.role == "server" and not process.part for process in self.processes)


def make_plan(
    config: BaseExperimentConfig,
    machines: Sequence[Machine],
    *,
    script: str | None = None,
    num_rows: int | None = None,
    nccl: NcclVersions | None = None,
) -> LaunchPlan:
    """The plan of a configuration. ConfigError when the machines or this version cannot run it.

    The controller runs on the first machine. `nccl` None: its versions are not known.
    """
    mode = config.allocation
    check_supported(mode)
    attached = tuple(server_url(text) for text in config.rollout.server_addrs) if isinstance(config, PPOConfig) else ()
    num_servers = mode.inference.num_replicas if mode.inference is not None else 0
    server_size = mode.inference.instance_size if mode.inference is not None else 1
    num_ranks = mode.num_train_ranks
    placed = _placed(config, machines, 0 if attached else num_servers, server_size, num_ranks)
    path = None
    if isinstance(config, PPOConfig) and num_servers and num_ranks:
        path = weight_path(config, placed, is_attached=bool(attached), nccl=nccl or NcclVersions())
    places = placed.by_name(Place(machine=machines[0]) if num_servers else None)
    computing = Counter[Host]()
    for (role, _, _), chosen in places.items():
        size = {"controller": 0, "server": server_size // placed.num_parts, "trainer": 1}[role]
        computing[chosen.machine.host] += size
    # All machines: a trainer whose machine is lost starts again on another one.
    trainers = ",".join(dict.fromkeys(machine.host.advertise for machine in machines))
    paths = RunPaths.of(config)
    evaluations = ""
    if path is not None and isinstance(config, PPOConfig) and config.valid_dataset is not None:
        evaluations = "background" if config.evaluates_in_background else "blocking"
    processes: list[PlannedProcess] = []
    for (role, index, part), chosen in places.items():
        context = ProcessContext(
            role=role,
            index=index,
            world_size=num_ranks,
            num_servers=num_servers,
            run_id=0,
            run_dir=str(paths.root),
            num_threads=num_threads(config, role, chosen.machine.cores, computing[chosen.machine.host]),
            recover=False,
            device="cuda:0" if chosen.gpus else "cpu",
            host=chosen.machine.host,
            weight_transport="disk" if path is None else path.transport,
            part=part,
            num_parts=placed.num_parts,
        )
        processes.append(_planned(context, config, paths, script=script, place=chosen, trainers=trainers))
    return LaunchPlan(
        run_dir=str(paths.root),
        recover=False,
        allocation=str(mode),
        processes=tuple(processes),
        spare_gpus=tuple((machine.host, gpus) for machine, gpus in placed.spare_gpus),
        attached=attached,
        numbers=_run_numbers(config, num_rows),
        weight_path=path,
        evaluations=evaluations,
        warning="; ".join(shortages(machines, computing, _memory_demands(processes, config))),
    )


def recovering(plan: LaunchPlan) -> LaunchPlan:
    """The plan of a run whose trainers continue from a recovery checkpoint."""
    processes = [start_again(planned, num_servers=plan.num_servers, recover=True) for planned in plan.processes]
    return dataclasses.replace(plan, recover=True, processes=tuple(processes))


def start_again(
    planned: PlannedProcess, *, num_servers: int, run_id: int | None = None, recover: bool | None = None
) -> PlannedProcess:
    """The same process with values that changed since it was planned; None = unchanged."""
    before = _context(planned)
    context = dataclasses.replace(
        before,
        num_servers=num_servers,
        run_id=before.run_id if run_id is None else run_id,
        recover=before.recover if recover is None else recover,
    )
    return dataclasses.replace(planned, env=planned.env | context.to_env())


def another_server(like: PlannedProcess, index: int, *, host: Host, gpus: tuple[str, ...]) -> PlannedProcess:
    """One more server of the same kind."""
    context = dataclasses.replace(_context(like), index=index)
    log_path = str(Path(like.log_path).with_name(f"{context.name}.log"))
    new = dataclasses.replace(like, name=context.name, index=index, env=like.env | context.to_env(), log_path=log_path)
    return moved(new, host, gpus)


def moved(planned: PlannedProcess, host: Host, gpus: tuple[str, ...]) -> PlannedProcess:
    """The same process on another machine, or on other GPUs."""
    context = dataclasses.replace(_context(planned), host=host)
    env = planned.env | context.to_env() | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    return dataclasses.replace(planned, host=host, env=env, gpus=gpus)


def _context(planned: PlannedProcess) -> ProcessContext:
    context = ProcessContext.from_env(planned.env)
    assert context is not None
    return context


def _placed(
    config: BaseExperimentConfig, machines: Sequence[Machine], num_servers: int, server_size: int, num_ranks: int
) -> Placement:
    """The places of the servers and trainer ranks. Without GPUs all run on the CPU."""
    gpu_limit = config.cluster.n_gpus_per_node
    has_gpus = gpu_limit > 0 and any(machine.gpus for machine in machines)
    device = "auto"
    if isinstance(config, PPOConfig) and config.server_backend == "native":
        device = config.native.device
    if device == "cuda" and not has_gpus:
        raise ConfigError("native.device=cuda, but no GPU is available: use auto or cpu", code="launch.no_gpu")
    servers = Demand(count=num_servers, gpus=server_size if has_gpus and device != "cpu" else 0)
    placed = place(machines, servers, Demand(count=num_ranks, gpus=int(has_gpus)), gpu_limit=gpu_limit)
    if isinstance(config, PPOConfig) and any(len(members) > 1 for members in placed.servers):
        cause = f"a server of {server_size} GPUs needs several machines"
        if backend_named(config.server_backend).part_words is None:
            message = f"allocation_mode={config.allocation_mode}: {cause}, which {config.server_backend} cannot use"
            raise ConfigError(message, code="launch.server_too_large")
    return placed


def _memory_demands(processes: Sequence[PlannedProcess], config: BaseExperimentConfig) -> Counter[Host]:
    demands = Counter[Host]()
    for planned in processes:
        demands[planned.host] += memory_demand(planned.role, len(planned.gpus), config.launcher)
    return demands


def num_threads(config: BaseExperimentConfig, role: Role, cores: int, num_computing: int) -> int:
    """CPU threads of one process: an equal share of its machine's cores, within the configured limits."""
    if role == "controller":
        return 1
    launcher = config.launcher
    limit = launcher.inference_server_cpus_per_gpu if role == "server" else launcher.trainer_cpus_per_gpu
    return max(1, min(limit, cores // num_computing))


def at_import() -> dict[str, str]:
    """Variables that libraries read when they are imported, of a process without a GPU."""
    fixed = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
    return fixed | ({} if "OMP_WAIT_POLICY" in os.environ else _with_own(SPINNING))


def _with_own(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, with the launcher's values where it has them."""
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def _planned(
    context: ProcessContext,
    config: BaseExperimentConfig,
    paths: RunPaths,
    *,
    script: str | None,
    place: Place,
    trainers: str,
) -> PlannedProcess:
    """`trainers`: addresses to which a server may connect for weight updates."""
    gpus, machine = place.gpus, place.machine
    more = {
        "controller": "",
        "server": config.launcher.inference_server_env_vars,
        "trainer": config.launcher.trainer_env_vars,
    }[context.role]
    backend, command = None, None
    if isinstance(config, PPOConfig):
        backend = backend_named(config.server_backend)
        command = backend.command(config, bool(gpus)) if context.role == "server" else None
    # All members of an NCCL group must have the same values, and the servers set these when they are unset.
    nccl = backend.nccl_defaults if backend is not None else {}
    env = {
        "OMP_NUM_THREADS": str(context.num_threads),
        "MKL_NUM_THREADS": str(context.num_threads),
        **at_import(),
        **({} if context.role == "controller" else _with_own(MALLOC)),
        # Also without GPUs: an actor of Ray with num_gpus=0 sees all GPUs of its node.
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        **gpu_variables(context.role, gpus, nccl),
        **({} if command is None else _server_env(context, config, command, machine)),
        **({TRAINERS_VARIABLE: trainers} if context.role == "server" else {}),
    }
    variables = parse_env_vars(more)
    return PlannedProcess(
        name=context.name,
        role=context.role,
        index=context.index,
        part=context.part,
        host=context.host,
        argv=_argv(config, paths, script, backend, command) + _part_words(context, backend),
        env=env
        | variables
        | ({} if command is None else _search_paths(command, os.environ | variables))
        | context.to_env(),
        log_path=str(paths.log_of(context.name)),
        device=context.device,
        gpus=gpus,
        num_threads=context.num_threads,
        memory_bytes=_memory(context, config) if command is None else command.memory_bytes,
    )


def _server_env(
    context: ProcessContext, config: BaseExperimentConfig, command: ServerCommand, machine: Machine
) -> dict[str, str]:
    """Variables of a server. Those of the user override them."""
    servers = config.allocation.inference
    assert servers is not None
    bindings = backend_named(servers.backend).core_bindings
    if context.device != "cpu" or bindings is None:
        return command.env
    cores = core_ids()[: machine.cores]
    return command.env | bindings(context.index, servers.instance_size, context.num_threads, cores)


def _search_paths(command: ServerCommand, environ: Mapping[str, str]) -> dict[str, str]:
    """Search paths that begin with the programs of the server's environment and with the code that areal adds."""
    firsts = {"PATH": str(Path(command.argv[0]).parent), "PYTHONPATH": command.env.get("PYTHONPATH", "")}
    return {name: prepended(environ, name, first) for name, first in firsts.items() if first}


def _argv(
    config: BaseExperimentConfig,
    paths: RunPaths,
    script: str | None,
    backend: ServerBackend | None,
    command: ServerCommand | None,
) -> tuple[str, ...]:
    """`command` is that of a server; None for the controller and the trainers."""
    if backend is None or command is None:
        scripts = () if script is None else (str(Path(script).absolute()),)
        program = "areal.evaluate" if config.allocation.evaluation else "areal.trainer"
        return (sys.executable, "-m", program, *scripts, "--config", str(paths.config))
    if backend.flags is None:
        return command.argv
    host = (sys.executable, "-m", "areal.fleet.server_host", "--backend", backend.name, "--config", str(paths.config))
    return (*host, "--", *command.argv)


def _part_words(context: ProcessContext, backend: ServerBackend | None) -> tuple[str, ...]:
    """The flags by which the parts of a server over several machines find each other."""
    is_part = context.role == "server" and context.num_parts > 1
    words = backend.part_words if is_part and backend is not None else None
    return () if words is None else words(context.part, context.num_parts)


def _memory(context: ProcessContext, config: BaseExperimentConfig) -> int | None:
    """Bytes of the models that a controller or trainer rank holds; None when one of them is not on this machine."""
    models = config.models.values() if context.role == "trainer" else ()
    dims = config.allocation.train[0].parallel if config.allocation.train else ParallelDims()
    sizes = [trained_bytes(model, num_shards(model, dims)) for model in models]
    return None if None in sizes else sum(size or 0 for size in sizes)


def num_shards(model: TrainEngineConfig, dims: ParallelDims) -> int:
    """Ranks that hold one copy of the weights."""
    return (model.fsdp.shard_size or dims.dp * dims.cp) * dims.tp * dims.pp


def trained_bytes(model: TrainEngineConfig, ranks: int) -> int | None:
    """Sharded float32 weights, gradients and optimiser state of one rank in bytes; None without a local model."""
    shape = ModelShape.read(model.path)
    if shape is None:
        return None
    # Adapters have gradients and optimiser state of a few percent of the model.
    per_parameter = 4 if model.optimizer is None or model.lora is not None else 8 + model.optimizer.state_bytes
    return int(shape.parameters * per_parameter) // ranks


def _run_numbers(config: BaseExperimentConfig, num_rows: int | None) -> RunNumbers:
    data = config.train_dataset
    samples, optimizer_steps, concurrent, staleness, on_stale = 1, 1, 0, None, ""
    if isinstance(config, PPOConfig):
        samples, optimizer_steps = config.gconfig.n_samples, config.actor.ppo_n_minibatches * config.actor.ppo_epochs
        concurrent = config.max_concurrent_rollouts
        staleness, on_stale = config.rollout.max_head_offpolicyness, config.rollout.on_stale
    elif isinstance(config, RowsExperimentConfig):
        samples = config.sequences_per_row
    per_epoch = total = None
    if num_rows is not None:
        per_epoch = math.ceil(steps_per_epoch(config, num_rows))
        limits = step_limits(config, num_rows, samples_per_row=samples)
        total = min(limits.values())
        asked = [f"{name}={limits[name]}" for name in limits if name.endswith("steps") and limits[name] > total > 0]
        if asked and not config.allocation.evaluation:
            by = next(name for name, steps in limits.items() if steps == total)
            get_logger("launcher").warning("%s is more than %s allows: the run has %d train steps", asked[0], by, total)
        profiled = config.perf_tracer.profile_steps if config.perf_tracer is not None else None
        if late := [step for step in profiled or () if step > total]:
            text = "perf_tracer.profile_steps=%s are after the last of %d train steps: no profile is written of them"
            get_logger("launcher").warning(text, late, total)
    return RunNumbers(
        episodes_per_step=data.batch_size,
        samples_per_step=data.batch_size * samples,
        optimizer_steps_per_train_step=optimizer_steps,
        max_concurrent_episodes=concurrent,
        max_staleness=staleness,
        on_stale=on_stale,
        rows=num_rows,
        steps_per_epoch=per_epoch,
        total_steps=total,
    )


def parse_env_vars(text: str) -> dict[str, str]:
    """`A=1,B=x\\,y` -> {"A": "1", "B": "x,y"}. A backslash escapes the next character."""
    pairs = [""]
    characters = iter(text)
    for character in characters:
        if character == "\\":
            pairs[-1] += next(characters, "\\")
        elif character == ",":
            pairs.append("")
        else:
            pairs[-1] += character
    result: dict[str, str] = {}
    for pair in pairs:
        if not pair.strip():
            continue
        name, equals, value = pair.partition("=")
        if not equals or not name.strip().isidentifier():
            shown = public_text(text), public_text(pair)
            message = f"environment variables {shown[0]!r}: {shown[1]!r} is not NAME=value (a comma is written \\,)"
            raise ConfigError(message, code="launch.bad_env_vars")
        result[name.strip()] = value
    return result
