"""Checks before anything starts (files, models, run folder, disk), and the lock that gives a run one launcher."""

import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import TextIO

from areal.api.config import BaseExperimentConfig, PPOConfig, TrainEngineConfig
from areal.api.config.data import is_row_function
from areal.api.errors import ArealError, ConfigError, ConfigProblem, InputError, LaunchError
from areal.api.functions import (
    ACCEPT_CALL,
    ACCEPT_FUNCTIONS,
    ANSWER_CALL,
    ANSWER_FUNCTIONS,
    CURRICULUM_CALL,
    MAP_CALL,
    MAP_FUNCTIONS,
    REWARD_CALL,
    REWARD_FUNCTIONS,
    ROWS_CALL,
    WORKFLOWS,
    CallForm,
    FunctionRef,
    parse_python,
    resolve_function,
    source_signature,
)
from areal.api.workflow import constructor_problems
from areal.data.row_check import count_rows, dataset_paths, file_problem
from areal.data.row_files import READERS, dataset_files
from areal.fleet.backends import backend_named
from areal.system.adapter_files import adapter_weights, prefixes, require_targets
from areal.system.checkpoint_files import stored_weights
from areal.system.durable import is_complete, write_problem
from areal.system.mesh_rules import trainer_problem
from areal.system.model_shape import ModelShape
from areal.system.run_paths import RunPaths

_BEFORE_ANY_EPISODE = (b'{"event":"group"', b'{"event":"started"')
_STEP = re.compile(r"step-(\d+)")
_HEAD = "score.weight"
_NOT_ADAPTED = ("lm_head", "embed_tokens", "wte", "wpe")
"""Endings of modules with a matrix that are no linear layer with an adapter."""
_OTHER_WAYS = "--overwrite deletes it and starts again, trial_name=NAME starts another run"
_SPARE_BYTES = 64 * 2**20
"""Free space that a run needs in addition to its weights, for ledger, logs and metrics."""
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
    given: list[tuple[str, str, Mapping[str, FunctionRef], CallForm | None]] = [
        (f"{name}.map_fn", data.map_fn, MAP_FUNCTIONS, MAP_CALL)
        for name, data in (("train_dataset", config.train_dataset), ("valid_dataset", config.valid_dataset))
        if data is not None
    ]
    given += [(key, path, {}, ROWS_CALL) for key, path in dataset_paths(config) if is_row_function(path)]
    given.append(("train_dataset.curriculum", config.train_dataset.curriculum, {}, CURRICULUM_CALL))
    if isinstance(config, PPOConfig):
        names = [("reward_fn", config.reward_fn)]
        names += [(f"reward.{path}", name) for path, functions in config.reward.tables() for name in functions]
        given += [(key, name, REWARD_FUNCTIONS, REWARD_CALL) for key, name in names]
        given.append(("workflow", config.workflow, WORKFLOWS, None))
        given.append(("evaluator.answer_fn", config.evaluator.answer_fn, ANSWER_FUNCTIONS, ANSWER_CALL))
        given.append(("rollout.should_accept_fn", config.rollout.should_accept_fn, ACCEPT_FUNCTIONS, ACCEPT_CALL))
    for key, text, registered, call in given:
        is_file, is_path = text.rpartition(":")[0].endswith(".py"), ":" in text
        is_own = has_script and registered is not ACCEPT_FUNCTIONS
        if not text or (is_own and not is_file) or (has_script and is_path and not is_file):
            continue
        try:
            ref = resolve_function(text, registered, key=key, call=None if is_own else call)
            if isinstance(config, PPOConfig) and registered is WORKFLOWS and not is_own:
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
        names = [name for name, weight in stored.items() if len(weight.shape) == 2 and not name.endswith(_NOT_ADAPTED)]
        around = sorted({one for name in stored for one in prefixes(name)})
        for text in _errors_of(partial(require_targets, lora, names, [*around, "lm_head"])):
            yield f"{key}.{text}"
        if lora.path:
            for text in _errors_of(partial(adapter_weights, Path(lora.path).expanduser(), lora, folder)):
                yield f"{key}.lora.path: {text}"


def _head_problems(config: PPOConfig) -> Iterator[str]:
    """Without a scoring head in its checkpoint a reward model would give random scores."""
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
    shapes = [(ModelShape.read(model.path), model.dtype) for model in config.models.values()]
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
    found = [name for name in ("metrics.jsonl", "checkpoints", "recover") if _holds_data(paths.root / name)]
    found += ["ledger"] if _has_episodes(paths.ledger) else []
    if found:
        raise ConfigError(
            f"{paths.root} contains an earlier run ({', '.join(found)}), which recover.mode={mode} would overwrite: "
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
    """Where trainers start. They take an earlier checkpoint when this one is damaged."""
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
        found = json.loads(text)
        return f"the launcher with pid {found['pid']} on host {found['host']}"
    except (ValueError, KeyError, TypeError):
        return "another launcher"
