"""Checks before anything starts (files, models, run folder, disk), and the lock that gives a run one launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from areal.api.config import BaseExperimentConfig, PPOConfig, TrainEngineConfig
from areal.api.config.data import is_environment_path, is_row_function
from areal.api.config.load import save_config
from areal.api.errors import ArealError, ConfigError, ConfigProblem, InputError, LaunchError
from areal.api.registry import (
    ACCEPT_CALL,
    ANSWER_CALL,
    CURRICULUM_CALL,
    MAP_CALL,
    REWARD_CALL,
    ROWS_CALL,
    CallForm,
    parse_python,
    resolve_function,
    source_signature,
)
from areal.api.workflow import constructor_problems
from areal.data.row_check import count_rows, dataset_paths, file_problem
from areal.data.row_files import READERS, dataset_files
from areal.fleet.server_backend import ServerBackend, backend_named, ignored_flags, server_python
from areal.launcher.job import LaunchPlan, NcclVersions, parse_env_vars
from areal.launcher.placement import Machine
from areal.models.adapter_files import adapter_weights, is_of_experts, prefixes, require_targets
from areal.models.checkpoint_files import stored_weights
from areal.models.mesh_rules import MEGATRON_FAMILIES, TENSOR_FAMILIES, trainer_problem
from areal.models.model_shape import ModelShape
from areal.models.vision_layout import read_vision_layout
from areal.observe.log import get_logger
from areal.observe.trackers import FIRST_REQUEST, entry_of_key, keys_on, missing_packages, mlflow_uri, wandb_id
from areal.system.device import has_bfloat16_products
from areal.system.durable import is_complete, write_problem
from areal.system.network import BACKLOG, bind_socket
from areal.system.process import AREAL_PROCESS
from areal.system.run_paths import RunPaths

if TYPE_CHECKING:
    from areal.launcher.node_link import NodeLink

# ----------------------------------------------------------------------------------------------------------------------
# Tries at the start of a run whether its nodes accept TCP connections from each other, which a firewall may forbid.

Target = tuple[str, str, int]
"""Name, address and port of a node."""
_PORT_LIMIT_S = 3.0
_PORT_POLL_S = 0.05


def check_ports(nodes: Mapping[str, tuple[NodeLink, str]]) -> None:
    """Connect each node to a free port of every other one. LaunchError when a port does not accept.

    `nodes`: by name, the agent there and the address on which the processes of the run will listen. Each port is open
    during the check only; nothing is read from its connections.
    """
    targets = [(name, address, link.open_port(address)) for name, (link, address) in nodes.items()]
    asked = [
        (link, link.send_reach([target for target in targets if target[0] != name], _PORT_LIMIT_S))
        for name, (link, _) in nodes.items()
    ]
    for link, number in asked:
        link.await_reached(number, _PORT_LIMIT_S)
    for link, _ in nodes.values():
        link.open_port("")


class PortProbe:
    """The port of one node for this check."""

    def __init__(self) -> None:
        self._bound: socket.socket | None = None

    def open_port(self, address: str) -> int:
        """Accept connections on a free port, which is returned; an empty address ends this and returns 0."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None
        if not address:
            return 0
        self._bound = bind_socket(address)
        self._bound.listen(BACKLOG)  # the system accepts; nothing reads or answers, so no token is needed
        return int(self._bound.getsockname()[1])


def unreachable(targets: Sequence[Target], limit_s: float, meanwhile: Callable[[], None]) -> str:
    """Which of `targets` do not accept a connection within `limit_s`, and why; empty when all do.

    `meanwhile` is called again and again until then.
    """
    deadline = time.monotonic() + limit_s
    failed: dict[Target, str] = {}
    with selectors.DefaultSelector() as selector:
        for target in targets:
            probe = socket.socket(socket.AF_INET6 if ":" in target[1] else socket.AF_INET)
            probe.setblocking(False)
            code = probe.connect_ex(target[1:])
            if code in (0, errno.EINPROGRESS):
                selector.register(probe, selectors.EVENT_WRITE, target)
            else:
                failed[target] = os.strerror(code)
                probe.close()
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(_PORT_POLL_S):
                probe = key.fileobj
                assert isinstance(probe, socket.socket)
                selector.unregister(probe)
                if code := probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed[key.data] = os.strerror(code)
                probe.close()
            meanwhile()
        for key in list(selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
            failed[key.data] = f"no answer in {limit_s:g} s"
    return ", ".join(f"{name} at {address}:{port} ({why})" for (name, address, port), why in failed.items())


# ----------------------------------------------------------------------------------------------------------------------
# Checks that run code of the user or of other packages: each in a process of this interpreter, under a time limit.

_ROW_LIMIT_S = 60.0
_REWARD_LIMIT_S = 20.0
_CHECK_LIMIT_S = 90.0


class _NoAnswer(Exception):
    """The process of a check failed. The text is the last line that it printed, its exit code, or another reason."""


def _answer_of(
    module: str, *words: str, env: Mapping[str, str], limit_s: float, text: str = "", reads_output: bool = False
) -> str:
    """What `python -m MODULE WORDS` prints. TimeoutExpired after the limit.

    `text`: its standard input. `reads_output`: a reason to fail is looked for in its standard output first.
    """
    command = [sys.executable, "-m", module, *words]
    env = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, errors="replace", env=env, timeout=limit_s
    )
    if done.returncode:
        printed = (reads_output and done.stdout) or done.stderr
        raise _NoAnswer((printed.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRow:
    """The result of `areal.trainer.first_row`."""

    prompt: str = ""
    num_tokens: int = 0
    problems: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    warnings: list[str] = field(default_factory=list[str])
    notice: str = ""
    reward_time: str = ""


def _answer_about(config: BaseExperimentConfig, module: str, limit_s: float) -> str:
    with tempfile.TemporaryDirectory(prefix="areal-") as folder:
        path = Path(folder, "config.yaml")
        return _answer_of(module, "--config", str(path), env=save_config(config, path), limit_s=limit_s)


def tried_row(config: PPOConfig) -> TriedRow:
    """Try row 0 of train_dataset: prompt, workflow and reward functions."""
    try:
        answer = _answer_about(config, "areal.trainer.first_row", _ROW_LIMIT_S)
        if not answer:
            raise _NoAnswer("it printed no result")  # the user's code ended the process
    except subprocess.TimeoutExpired:
        text = f"the trial of row 0 did not end within {_ROW_LIMIT_S:g} s, and the run starts without it"
        advice = "this machine is slow or busy, or the map_fn, the workflow or the reward has an endless loop"
        return TriedRow(warnings=[f"{text}: {advice}"])
    except _NoAnswer as error:
        return TriedRow(problems=[ConfigProblem("row 0", f"its trial ended: {error}", "launch.first_row")])
    facts = json.loads(answer)
    return TriedRow(**facts | {"problems": [ConfigProblem(**problem) for problem in facts["problems"]]})


def reward_notice(config: PPOConfig) -> str:
    """What a check of a few answers says of the reward functions; empty = nothing, or no time for it."""
    try:
        return _answer_about(config, "areal.trainer.reward_check", _REWARD_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"the rewards were not checked within {_REWARD_LIMIT_S:g} s: areal check-reward has no such limit"
    except _NoAnswer as error:
        return f"the rewards were not checked: {error}"


def refused_models(config: BaseExperimentConfig) -> list[tuple[str, str]]:
    """Lines and codes with which trainers would refuse models in local folders. Imports transformers if any is new."""
    shapes = [ModelShape.read(each.path) for each in config.models.values() if Path(each.path, "config.json").is_file()]
    families = {*TENSOR_FAMILIES, *MEGATRON_FAMILIES}
    known = all(shape is not None and shape.family in families and not shape.states for shape in shapes)
    known &= all(each.fp8 is None for each in config.models.values())  # which layers it converts is of the model
    if config.train_backend != "fsdp" or not config.allocation.train or known:
        return []
    try:
        return json.loads(_answer_about(config, "areal.engine.build", _CHECK_LIMIT_S))
    except (subprocess.TimeoutExpired, _NoAnswer) as error:  # the trainers check it too
        get_logger("launcher").warning("the models were not checked before the start: %s", error)
        return []


def sandbox_problems(config: PPOConfig, say: Callable[[str], None]) -> list[str]:
    """One sentence when the sandbox of programs in answers cannot be used; says what programs can reach beyond its
    promises. Nothing is checked unless a reward of the configuration is `code`."""
    functions = {config.reward_fn, *(name for _, fns in config.reward.tables() for name in fns)}
    if "code" not in functions:
        return []
    env = {"AREAL_SANDBOX": json.dumps({"config": dataclasses.asdict(config.reward.sandbox)})}
    try:
        warning = _answer_of("areal.reward.sandbox", env=env, limit_s=_CHECK_LIMIT_S, reads_output=True)
    except subprocess.TimeoutExpired:
        return [f"reward.sandbox: its check did not end within {_CHECK_LIMIT_S:g} s"]
    except _NoAnswer as error:
        return [f"reward.sandbox: {error}"]
    if warning:
        say(f"areal: warning: {warning}")
    return []


# ----------------------------------------------------------------------------------------------------------------------
# The check, before a run starts, of the dashboards that rank 0 of its trainers will start.

_TRACKERS_LIMIT_S = 90.0


def tracker_problems(config: BaseExperimentConfig, plan: LaunchPlan) -> list[str]:
    """One sentence for each dashboard that cannot start.

    Packages are checked in this environment, unless the trainers have an image. Folders, keys and servers are checked
    only when rank 0 runs on this machine.
    """
    rank = next((process for process in plan.processes if (process.role, process.index) == ("trainer", 0)), None)
    if rank is None or config.launcher.slurm.trainer_image is not None or not keys_on(config):
        return []
    is_here = rank.host.node.partition(".")[0] == socket.gethostname().partition(".")[0]
    environ = os.environ | parse_env_vars(config.launcher.trainer_env_vars)
    problems = list(_place_problems(config, environ)) if is_here else []
    return problems + (missing_packages(config) or _package_problems(config, environ, asks=is_here))


def _place_problems(config: BaseExperimentConfig, environ: Mapping[str, str]) -> Iterator[str]:
    """Folders that cannot be written, and a missing address."""
    chosen, is_on = config.stats_logger, keys_on(config)
    uri = mlflow_uri(chosen.mlflow, environ)
    if chosen.mlflow.mode == "online" and not uri:
        yield "stats_logger.mlflow.tracking_uri: is not set, nor is MLFLOW_TRACKING_URI: set one, or use mode=local"
    folders = {
        "tensorboard.path": ("stats_logger.tensorboard.path", chosen.tensorboard.path),
        "swanlab.mode": ("stats_logger.swanlab.logdir", chosen.swanlab.logdir),
        "mlflow.mode": ("stats_logger.mlflow.tracking_uri", _sqlite_folder(uri)),
        "trackio.mode": ("TRACKIO_DIR", environ.get("TRACKIO_DIR")),
    }
    for option, folder in (folders[key] for key in is_on if key in folders):
        if folder and (problem := write_problem(Path(folder))):
            yield f"{option}: cannot write to {folder}: {problem}; choose another folder"


def _sqlite_folder(uri: str) -> str:
    """The folder of an SQLite file; empty for any other address."""
    scheme, _, file = uri.partition(":///")
    return str(Path(file).parent) if file and scheme.startswith("sqlite") else ""


def _package_problems(config: BaseExperimentConfig, environ: Mapping[str, str], *, asks: bool) -> list[str]:
    """Waits for a process that imports the packages, at most `_TRACKERS_LIMIT_S`.

    `asks`: it looks for keys, and asks MLflow.
    """
    dashboards, base_url = _settings(config, environ, asks=asks), config.stats_logger.wandb.wandb_base_url
    env = {**FIRST_REQUEST, **environ, "WANDB_SILENT": "true"} | ({"WANDB_BASE_URL": base_url} if base_url else {})
    names, text = ", ".join(dashboards), json.dumps(dashboards)
    try:
        return json.loads(_answer_of("areal.observe.trackers", env=env, limit_s=_TRACKERS_LIMIT_S, text=text))
    except subprocess.TimeoutExpired:
        return [f"stats_logger: the check of {names} did not end within {_TRACKERS_LIMIT_S:g} s"]
    except _NoAnswer as error:
        return [f"stats_logger: the check of {names} failed: {error}"]


def _settings(config: BaseExperimentConfig, environ: Mapping[str, str], *, asks: bool) -> dict[str, dict[str, Any]]:
    """What the check in `observe.trackers` reads."""
    chosen = config.stats_logger
    wandb = {
        "run_id": wandb_id(config, chosen.wandb),
        "project": chosen.wandb.project or config.experiment_name,
        "run_tags": chosen.wandb.tags,
    }
    uri, experiment = mlflow_uri(chosen.mlflow, environ), chosen.mlflow.experiment or config.experiment_name
    settings: dict[str, dict[str, Any]] = {
        "tensorboard.path": {},
        "wandb.mode": {
            "settings": {name: value for name, value in wandb.items() if value is not None},
            "asks": asks and chosen.wandb.mode in ("online", "shared") and not chosen.wandb.wandb_api_key,
        },
        "swanlab.mode": {"asks": asks and chosen.swanlab.mode in ("online", "cloud") and not chosen.swanlab.api_key},
        "mlflow.mode": {"uri": uri, "experiment": experiment, "asks": asks},
        "trackio.mode": {"asks": asks and chosen.trackio.mode == "online"},
    }
    return {
        key: settings[key] | {"module": entry_of_key(key).facts.module} for key in keys_on(config) if key in settings
    }


# ----------------------------------------------------------------------------------------------------------------------
# Checks before a start: options that the servers of a run cannot honour, and the versions in their environment.
#
# Waits for one short subprocess of the servers' interpreter, at most `_VERSIONS_LIMIT_S`.

_VERSIONS_LIMIT_S = 30.0
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_PROBE = """
import importlib.metadata, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""
Versions = dict[str, str]
"""Package -> version, empty where it is not installed."""


def fetch_vision_layout(config: PPOConfig) -> None:
    """Put the files that say how the served model takes images into the local cache: the command of a foreign server
    depends on them. A hub that does not answer is reported by the trial of row 0, or by the servers."""
    backend = backend_named(config.server_backend)
    if backend.flags is not None:
        with contextlib.suppress(InputError):
            read_vision_layout(backend.model(config), downloads=True)


def server_problems(
    config: PPOConfig, plan: LaunchPlan, say: Callable[[str], None], *, limit_s: float = _VERSIONS_LIMIT_S
) -> list[str]:
    """One sentence for every option that the servers cannot honour and for an environment that cannot run them."""
    backend = backend_named(config.server_backend)
    problems = [f"{path}: {text}" for path, text in backend.problems(config)]
    planned = next((process for process in plan.processes if process.role == "server"), None)
    if backend.flags is None or planned is None:
        return problems
    python = server_python(config)
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        text = f"{python} is not a program: set it to the Python interpreter of {backend.title}'s environment"
        return [*problems, f"server_python: {text}"]
    try:
        versions = environment_versions(python, (backend.name, "torch", *_NCCL_PACKAGES), limit_s=limit_s)
    except _NoAnswer as error:
        return [*problems, f"server_python: {python} does not report the versions of its packages: {error}"]
    if problem := _version_problem(backend, versions, on_gpu=bool(planned.gpus)):
        other = " to another interpreter" if config.server_python else ": this is the interpreter of areal itself"
        return [*problems, f"server_python: {python}: {problem}, or set server_python{other}"]
    nccl = next((f", NCCL {versions[name]}" for name in _NCCL_PACKAGES if versions[name]), "")
    say(f"areal: {backend.title} {versions[backend.name]}, torch {versions['torch']}{nccl} in {python}")
    return problems


def nccl_versions(config: PPOConfig) -> NcclVersions:
    """NCCL of the trainers' and of the servers' environment, from their metadata; empty where it is not known."""
    python = "" if backend_named(config.server_backend).flags is None else server_python(config)
    try:
        versions_here = environment_versions(sys.executable, ("torch", *_NCCL_PACKAGES))
        packages = (config.server_backend, "torch", *_NCCL_PACKAGES)
        servers = environment_versions(python, packages) if python else versions_here
    except _NoAnswer:  # `server_problems` reports it
        return NcclVersions()
    ours, theirs = (next(filter(None, map(versions.get, _NCCL_PACKAGES)), "") for versions in (versions_here, servers))
    return NcclVersions(trainers=ours or "", servers=theirs or "")


def notices(config: PPOConfig) -> list[str]:
    """Lines about flags without effect on the servers, one for each reason, about quantized weights, and about more
    minibatches than answers."""
    backend, result = backend_named(config.server_backend), list[str]()
    correction = config.actor.rollout_correction
    if config.served_quantization and not config.actor.use_decoupled_loss and (not correction or correction.only_logs):
        text = "answers come from quantized weights (batch/prox_rollout_gap_abs is the difference): weight them by"
        advice = "actor.use_decoupled_loss=true and actor.behav_imp_weight_cap=5, or actor.rollout_correction.upper=2"
        result.append(f"areal: {config.served_quantization}: {text} {advice}")
    parts, answers = config.actor.ppo_n_minibatches, config.train_dataset.batch_size * config.gconfig.n_samples
    share = answers // config.allocation.train[0].parallel.dp if config.allocation.train else parts
    if config.workflow in ("rlvr", "vision_rlvr") and share < parts:  # others may make several rows of an episode
        text = f"a rank has {share} answers of a train step: the other minibatches are empty, but the schedule of the"
        result.append(f"areal: actor.ppo_n_minibatches={parts}: {text} learning rate counts them: lower it")
    if backend.flags is None:
        return result
    if ignored := [f"{backend.name}.{key}" for key in ignored_flags(backend.flags, config.server_flags)]:
        reason = f"areal sets its own value or {backend.title} has no such flag"
        result.append(f"areal: ignored, because {reason}: {', '.join(ignored)}")
    if config.rollout.server_addrs and config.server_flags:
        result.append(f"areal: {backend.name}: this section has no effect on servers that already run")
    return result


def with_dtypes(config: BaseExperimentConfig, machines: Sequence[Machine]) -> BaseExperimentConfig:
    """The configuration in which the data type auto is float32 where bfloat16 is slow."""
    if not _is_slow_in_bfloat16(config, machines):
        return config
    changes: dict[str, Any] = {
        name: replace(model, dtype="float32") for name, model in config.models.items() if model.dtype == "auto"
    }
    if isinstance(config, PPOConfig) and config.server_backend == "native" and config.native.dtype == "auto":
        changes["native"] = replace(config.native, dtype="float32")
    return replace(config, **changes)


def _is_slow_in_bfloat16(config: BaseExperimentConfig, machines: Sequence[Machine]) -> bool:
    """Whether all processes compute on the processor of this machine, and it has no bfloat16 products."""
    on_gpu = config.cluster.n_gpus_per_node > 0 and any(machine.gpus for machine in machines)
    is_here = {machine.host.node for machine in machines} == {socket.gethostname()}
    return is_here and not on_gpu and not has_bfloat16_products()


def precision_notice(config: BaseExperimentConfig, machines: Sequence[Machine]) -> str:
    """A notice that the run computes in bfloat16 where that is slow; else empty."""
    models = {} if config.allocation.evaluation else config.models
    keys = [f"{name}.dtype" for name, model in models.items() if model.dtype == "bfloat16"]
    if isinstance(config, PPOConfig) and config.server_backend == "native" and config.native.dtype == "bfloat16":
        keys.append("native.dtype")
    if not keys or not _is_slow_in_bfloat16(config, machines):
        return ""
    text = "torch multiplies bfloat16 matrices 7 to 120 times slower than float32 ones on this processor: set"
    return f"{text} {' '.join(f'{key}=float32' for key in keys)}"


def _version_problem(backend: ServerBackend, versions: Versions, *, on_gpu: bool) -> str:
    """Why the installed versions cannot run, or ''. A version that cannot be parsed is accepted as a new one."""
    version, torch = versions[backend.name], versions["torch"]
    if not version:
        return f"{backend.title} is not installed there: install it"
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    oldest = tuple(map(int, backend.minimum_version.split(".")))
    if numbers is not None and tuple(map(int, numbers.groups())) < oldest:
        needed = f"areal needs {backend.minimum_version} or newer (tested with {backend.tested_version})"
        return f"{backend.title} {version} is too old, {needed}: upgrade it"
    if on_gpu and (version.endswith("+cpu") or torch.endswith("+cpu")):
        advice = "install a GPU build, or set cluster.n_gpus_per_node=0"
        return f"{backend.title} {version} with torch {torch} is a CPU build, but the servers get GPUs: {advice}"
    return ""


def environment_versions(python: str, packages: tuple[str, ...], *, limit_s: float = _VERSIONS_LIMIT_S) -> Versions:
    """Versions of packages in the environment of an interpreter, from its metadata: nothing is imported.

    _NoAnswer when the interpreter does not report them.
    """
    env = {name: value for name, value in os.environ.items() if name != AREAL_PROCESS}
    try:
        argv = [python, "-c", _PROBE, *packages]
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", env=env, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise _NoAnswer(f"no answer in {limit_s:g} s") from None
    except OSError as error:
        raise _NoAnswer(str(error.strerror or error)) from None
    try:
        versions = json.loads(done.stdout.splitlines()[-1])  # a script around the interpreter may print more before
        return {name: str(versions[name]) for name in packages}
    except (ValueError, TypeError, KeyError, IndexError):
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise _NoAnswer(lines[-1] if lines else f"it ended with exit code {done.returncode}") from None


_BEFORE_ANY_EPISODE = (b'{"event":"group"', b'{"event":"started"')
_STEP = re.compile(r"step-(\d+)")
_HEAD = "score.weight"
_NOT_ADAPTED = ("lm_head", "embed_tokens", "wte", "wpe")
"""Endings of modules with a matrix that are no linear layer with an adapter."""
_OTHER_WAYS = "--overwrite deletes it and starts again, trial_name=NAME starts another run"
_SPARE_BYTES = 64 * 2**20  # Free space that a run needs in addition to its weights, for ledger, logs and metrics.
_FULL_BYTES = 2**20


def missing_inputs(config: BaseExperimentConfig, script: str | None) -> list[str]:
    """One sentence for every input that is absent or unusable."""
    problems: list[str] = []
    if script is not None and not Path(script).is_file():
        problems.append(f"{script}: no such script")
    elif script is not None:
        problems += _errors_of(partial(parse_python, Path(script), key="script"))
    for key in ("actor",) if config.allocation.evaluation else config.models:
        model = config.models[key]
        problems += _model_problems(f"{key}.path", model.path, needs_weights=not model.init_from_scratch)
        problems += _adapter_problems(key, model)
        shape = ModelShape.read(model.path)
        trainer = config.allocation.train[0] if config.allocation.train else None
        text = trainer_problem(shape, trainer, model.megatron) if trainer and shape else None
        problems += [f"allocation_mode: {key}: {text}"] if text else []
        has_router = shape.experts if shape else not model.router_replay
        problems += [] if has_router or not model.router_option else [f"{key}.{model.router_option}: no local experts"]
    if isinstance(config, PPOConfig):
        backend = backend_named(config.server_backend)
        model = backend.model(config)
        if not config.rollout.server_addrs and model != config.actor.path:
            problems += _model_problems(f"{backend.name}.{backend.model_key}", model, needs_weights=True)
        problems += _head_problems(config)
    if looks_local(config.tokenizer_path) and not Path(config.tokenizer_path).is_dir():
        problems.append(f"tokenizer_path: {config.tokenizer_path} is not a folder")
    if config.chat_template.path and not Path(config.chat_template.path).expanduser().is_file():
        problems.append(f"chat_template.path: {config.chat_template.path} is not a file")
    for key, path in dataset_paths(config):
        files = [] if is_row_function(path) else dataset_files(path)
        is_local = not is_row_function(path) and (Path(path).suffix in READERS or looks_local(path))
        if is_local and not all(file.exists() for file in files or [Path(path)]):
            problems.append(f"{key}: {path} does not exist")
    if script is None:  # a script may have its own rows
        problems += _row_problems(config)
    return problems


def _row_problems(config: BaseExperimentConfig) -> Iterator[str]:
    data, rows = config.train_dataset, count_rows(config)
    if rows == 0:
        yield f"train_dataset.path: {data.path} has no rows"
    elif rows is not None and rows < data.batch_size and data.drop_last:
        yield f"train_dataset.batch_size={data.batch_size} exceeds the {rows} rows of {data.path}: lower it or add rows"
    has_prompts = isinstance(config, PPOConfig) and config.workflow in ("rlvr", "vision_rlvr", "multi_turn")
    for key, dataset in (("train_dataset", data), ("valid_dataset", config.valid_dataset)):
        kind = "" if isinstance(config, PPOConfig) and not has_prompts else dataset.type if dataset else ""
        if dataset is not None and (problem := file_problem(dataset, kind=kind)):
            yield f"{key}: {problem}"
        if dataset is not None and dataset.cache_dir and (problem := write_problem(Path(dataset.cache_dir))):
            yield f"{key}.cache_dir: cannot write to {dataset.cache_dir}: {problem}; choose another folder"


def function_problems(config: BaseExperimentConfig, *, has_script: bool) -> Iterator[ConfigProblem]:
    """Functions and classes that the configuration names and that cannot be found or called. Runs none of their code.

    A script may use these options in its own way, so with one only files and `should_accept_fn` are checked.
    """
    references: list[tuple[str, str, str, CallForm | None]] = [
        (f"{name}.map_fn", data.map_fn, "datasets", MAP_CALL)
        for name, data in (("train_dataset", config.train_dataset), ("valid_dataset", config.valid_dataset))
        if data is not None
    ]
    references += [
        (key, path, "", ROWS_CALL)
        for key, path in dataset_paths(config)
        if is_row_function(path) and not is_environment_path(path)
    ]
    references.append(("train_dataset.curriculum", config.train_dataset.curriculum, "", CURRICULUM_CALL))
    if isinstance(config, PPOConfig):
        names = [("reward_fn", config.reward_fn)]
        names += [(f"reward.{path}", name) for path, functions in config.reward.tables() for name in functions]
        references += [(key, name, "rewards", REWARD_CALL) for key, name in names]
        references.append(("workflow", config.workflow, "workflows", None))
        references.append(("evaluator.answer_fn", config.evaluator.answer_fn, "answers", ANSWER_CALL))
        references.append(("rollout.should_accept_fn", config.rollout.should_accept_fn, "filters", ACCEPT_CALL))
    for key, text, kind, call in references:
        is_file, is_path = text.rpartition(":")[0].endswith(".py"), ":" in text
        is_own = has_script and kind != "filters"
        if not text or (is_own and not is_file) or (has_script and is_path and not is_file):
            continue
        try:
            ref = resolve_function(text, kind, key=key, call=None if is_own else call)
            if isinstance(config, PPOConfig) and kind == "workflows" and not is_own:
                signature = source_signature(ref)
                yield from () if signature is None else constructor_problems(config, signature.parameters)
        except ConfigError as error:
            yield from error.problems


def _errors_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ArealError as error:
        return [str(error)]
    return []


def looks_local(path: str) -> bool:
    """Whether a model or data path means a local file; a hub name has at most one slash."""
    if not path:
        return False
    is_path = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    return is_path or Path(path).exists() or ("/" in path and Path(path).parent.is_dir())


def _model_problems(key: str, path: str, *, needs_weights: bool) -> Iterator[str]:
    if not looks_local(path):
        return
    folder = Path(path)
    if not folder.is_dir():
        yield f"{key}: {path} is not a folder; give a checkpoint folder or a hub name"
    elif not (folder / "config.json").is_file():
        yield f"{key}: {path} has no config.json, so it is not a Hugging Face checkpoint"
    elif needs_weights and not any(folder.glob("*.safetensors")):
        yield f"{key}: {path} has no *.safetensors; save the weights there, or set init_from_scratch=true"
    elif needs_weights:
        for text in _errors_of(partial(stored_weights, folder)):
            yield f"{key}: {text}; copy or download it again"


def _adapter_problems(key: str, model: TrainEngineConfig) -> Iterator[str]:
    """Adapters that do not fit the local checkpoint `model.path`, whose headers name its layers."""
    lora, folder = model.lora, Path(model.path).expanduser()
    if lora is None or not any(folder.glob("*.safetensors")):
        return
    if not _errors_of(partial(stored_weights, folder)):
        stored = {name.rpartition(".")[0]: weight for name, weight in stored_weights(folder).items()}
        matrices = [
            name for name, weight in stored.items() if len(weight.shape) == 2 and not name.endswith(_NOT_ADAPTED)
        ]
        names, has_experts = [name for name in matrices if not is_of_experts(name)], any(map(is_of_experts, stored))
        around = sorted({prefix for name in stored for prefix in prefixes(name)})
        for text in _errors_of(partial(require_targets, lora, names, [*around, "lm_head"], has_experts=has_experts)):
            yield f"{key}.{text}"
        if lora.path:
            for text in _errors_of(partial(adapter_weights, Path(lora.path).expanduser(), lora, folder)):
                yield f"{key}.lora.path: {text}"


def _head_problems(config: PPOConfig) -> Iterator[str]:
    """A reward model without a scoring head in its checkpoint would give random scores."""
    model = config.reward_model
    if model is None or model.init_from_scratch or not Path(model.path, "config.json").is_file():
        return
    try:
        weights = stored_weights(Path(model.path))
    except InputError:
        return
    if _HEAD not in weights:
        advice = "give a model trained as a reward model (see examples/preference)"
        yield f"reward_model.path: {model.path} has no scoring head ({_HEAD}): {advice}"


def make_run_folder(paths: RunPaths) -> None:
    """Make the run folder, which only its user can read. ConfigError when it cannot be written."""
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        paths.root.chmod(0o700)
        with tempfile.TemporaryFile(dir=paths.root) as probe:
            probe.write(b"x")
    except OSError as error:
        message = f"cluster.fileroot: cannot write to {paths.root}: {error.strerror or error}; choose another folder"
        raise ConfigError(message, code="launch.cannot_write") from error


def check_run_folder(config: BaseExperimentConfig, paths: RunPaths, *, overwrites: bool = False) -> None:
    """ConfigError when the disk has too little space, or the folder holds an earlier run that would be overwritten.

    `overwrites`: the user wants this.
    """
    shapes = [(ModelShape.read(model.path), model.compute_dtype) for model in config.models.values()]
    weights = sum(shape.parameters * (2 if dtype == "bfloat16" else 4) for shape, dtype in shapes if shape is not None)
    needed, free = _SPARE_BYTES + 4 * weights, shutil.disk_usage(paths.root).free
    if free < needed:
        space = f"{free / 2**20:.0f} MiB free, this run needs at least {needed / 2**20:.0f} MiB"
        message = f"cluster.fileroot: {paths.root} has {space}: free disk space or choose another folder"
        raise ConfigError(message, code="launch.disk_full")
    mode = config.recover.mode
    if mode == "resume" and newest_checkpoint(paths) is None:
        message = f"recover.mode=resume, but {paths.recover} contains no complete checkpoint: use auto"
        raise ConfigError(message, code="checkpoint.none_to_resume")
    if mode in ("auto", "resume") or overwrites:
        return
    earlier = [name for name in ("metrics.jsonl", "checkpoints", "recover") if _holds_data(paths.root / name)]
    earlier += ["ledger"] if _has_episodes(paths.ledger) else []
    if earlier:
        raise ConfigError(
            f"{paths.root} contains an earlier run ({', '.join(earlier)}), which recover.mode={mode} would overwrite: "
            f"recover.mode=auto continues it, {_OTHER_WAYS}",
            code="launch.earlier_run",
        )


def disk_problem(paths: RunPaths) -> str:
    """Why the disk of a run cannot be written; empty when it can. While it cannot, a restart does not help."""
    try:
        if shutil.disk_usage(paths.root).free < _FULL_BYTES:
            return f"the disk of {paths.root} is full (cluster.fileroot): free disk space, or choose another folder"
        with tempfile.TemporaryFile(dir=paths.root) as probe:
            probe.write(bytes(_FULL_BYTES))  # a quota or a read-only disk shows only at a write
    except OSError as error:
        cause = error.strerror or error
        return f"cannot write to {paths.root} (cluster.fileroot): {cause}: fix this, or choose another folder"
    return ""


def _holds_data(path: Path) -> bool:
    files = path.rglob("*") if path.is_dir() else [path]
    return any(file.is_file() and file.stat().st_size > 0 for file in files)


def _has_episodes(ledger: Path) -> bool:
    """Whether a ledger has more than the events of a start."""
    for path in ledger.glob("events-*"):
        with open(path, "rb") as lines:
            if not all(line.startswith(_BEFORE_ANY_EPISODE) for line in lines):
                return True
    return False


def checkpoint_text(newest: Path | None) -> str:
    """The checkpoint from which trainers start. They take an earlier one when it is damaged."""
    return f"{newest.name}, if it is intact" if newest else "the beginning"


def newest_checkpoint(paths: RunPaths) -> Path | None:
    """The newest complete recovery checkpoint of a run. The trainers check whether its files are intact."""
    numbered = {int(match[1]): path for path in paths.recover.glob("step-*") if (match := _STEP.fullmatch(path.name))}
    return next((numbered[step] for step in sorted(numbered, reverse=True) if is_complete(numbered[step])), None)


def step_of(checkpoint: Path) -> int:
    """Train steps done at a recovery checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def overwrite_run(paths: RunPaths) -> None:
    """Delete the earlier run in a run folder, whose lock is held. ConfigError when the folder holds something else."""
    files = [path for path in paths.root.iterdir() if path != paths.lock]
    if files and not paths.config.is_file():
        message = f"--overwrite: {paths.root} contains no run (config.yaml is missing): choose another trial_name"
        raise ConfigError(message, code="launch.not_a_run")
    for path in files:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def check_not_complete(
    config: BaseExperimentConfig, paths: RunPaths, *, total_steps: int | None, changes: Sequence[str]
) -> str:
    """Why nothing remains to train in this run folder; empty when something does.

    `changes`: the options that differ from the earlier run. ConfigError when there are some: they would have no effect.
    """
    newest = newest_checkpoint(paths)
    try:
        is_complete = json.loads(paths.summary.read_bytes())["status"] == "completed"
        goal = {} if newest is None else json.loads((newest / "state.json").read_bytes())["point"]["goal_reached"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    is_trained = newest is not None and total_steps is not None and step_of(newest) >= total_steps
    has_goal = config.evaluator.goals_reached(goal)
    if not is_complete or not (is_trained or has_goal):
        return ""
    way = "a higher evaluator.stop_at, or none," if has_goal and not is_trained else "a higher total_train_steps"
    text = f"the run in {paths.root} is complete: {way} continues it, {_OTHER_WAYS}"
    if changes:
        raise ConfigError("\n  ".join([text, *changes]), code="launch.earlier_run")
    return text


def earlier_run(paths: RunPaths, newest: Path | None, *, has_rollouts: bool) -> str:
    """A message about the earlier run that this launch continues; empty when there is none."""
    if newest is None and not paths.metrics.exists():
        return ""
    text = f"areal: continues the run in {paths.root}, trainers from {checkpoint_text(newest)}"
    if newest is not None and has_rollouts and not any(paths.ledger.glob("events-*.jsonl")):
        text += f"\nareal: warning: {paths.ledger} is missing: the dataset starts again from its first row"
    return f"{text}\nareal: {_OTHER_WAYS}"


def earlier_step_s(paths: RunPaths) -> float | None:
    """Median seconds of a train step in the metrics of this run folder; None without any."""
    with suppress(OSError, ValueError):
        rows = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
        return median(row["seconds/step"] for row in rows if "seconds/step" in row)
    return None


def stored_bytes(model: TrainEngineConfig) -> int:
    """Size of the weight files of a local checkpoint; 0 for a model of the hub."""
    folder = Path(model.path).expanduser()
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if looks_local(model.path) else 0


@contextmanager
def run_lock(paths: RunPaths) -> Iterator[None]:
    """Hold the run folder for this launcher. LaunchError, with pid and host of the holder, when it is taken.

    The lock ends with the process, so a killed launcher leaves none behind.
    """
    with open(paths.lock, "a+") as file:
        if not _locked(file):
            file.seek(0)
            message = f"{paths.root} is in use by {_holder(file.read())}: stop it or change trial_name"
            raise LaunchError(message, code="launch.run_in_use")
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
        file.flush()
        yield


def _locked(file: TextIO) -> bool:
    """Take the lock. Repeats, because `has_launcher` holds it for a moment."""
    for _ in range(5):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def has_launcher(paths: RunPaths) -> bool:
    """Whether a launcher runs on this run folder now."""
    try:
        with open(paths.lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _holder(text: str) -> str:
    try:
        holder = json.loads(text)
        return f"the launcher with pid {holder['pid']} on host {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another launcher"
