"""The configuration of an evaluation: the user's files and options over defaults for what only a training needs."""

import argparse
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from areal.api.config import (
    DatasetConfig,
    PPOConfig,
    TrainDatasetConfig,
    ValidDatasetConfig,
    check_config,
    load_experiment,
)
from areal.api.config.data import is_row_function
from areal.api.config.experiment import SERVER_SECTIONS
from areal.api.errors import ConfigError, InputError
from areal.data.row_files import dataset_files
from areal.fleet.server_backend import backend_named
from areal.system.run_paths import RunPaths, run_folder

_DEFAULTS = Path(__file__).with_name("defaults.yaml")
_POLICIES = ("actor", "model")  # Roles whose exports can be evaluated, of RL and of supervised training.
_DECIDES = (
    "seed", "tokenizer_path", "chat_template", "gconfig", "eval_gconfig", "workflow", "workflow_args", "agent",
    "reward_fn", "reward", "valid_dataset", "evaluator", "vision", *SERVER_SECTIONS,
)  # fmt: skip
"""Sections that decide what the answers and their scores are."""


def load_settings(files: Sequence[str], overrides: Sequence[str]) -> PPOConfig:
    """Read files and `key=value` words. ConfigError with every problem, or for a training without generation."""
    words = [word for path in (str(_DEFAULTS), *files) for word in ("--config", path)]
    config = load_experiment([*words, *overrides])
    if not isinstance(config, PPOConfig):
        message = f"{', '.join(files)} configures a training that generates no answers: give a PPO or GRPO file"
        raise ConfigError(message, code="evaluate.no_generation")
    return config


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", dest="files", metavar="FILE", action="append", default=[], help="several are merged in order"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the configuration")


def parsed_ks(text: str) -> list[int]:
    result = sorted({int(part) for part in text.split(",")})
    if result[0] < 1:
        raise ValueError("below 1")
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    files: Sequence[str]
    overrides: Sequence[str]
    model: str = ""  # Folder or hub name of a model, or a run; empty = that of the configuration.
    step: int | None = None  # The run's export after this number of train steps; None = the newest.
    data: Sequence[str] = ()  # [NAME=]PATH of each held-out set; empty = those of the configuration.
    num_samples: int | None = None
    greedy: bool = False
    servers: str = ""  # Such as native:d2; empty = those of the configuration.


def evaluation_config(requested: Requested, *, scores: bool) -> PPOConfig:
    """The checked configuration of an evaluation: servers and one process, in a folder of this evaluation.

    `scores` False: the workflows rlvr and vision_rlvr get no reward functions. ConfigError or InputError with what is
    missing.
    """
    model, run_config = _model(requested)
    words = [*requested.overrides, f"actor.path={model}"] if model else [*requested.overrides]
    if requested.data and any(word.startswith("valid_dataset.") for word in words):  # the section needs a path
        words.append(f"valid_dataset.path={requested.data[0].partition('=')[2] or requested.data[0]}")
    config = load_settings(requested.files or run_config, words)
    if config.actor.path == "none":
        raise ConfigError("no model is named: give --model PATH, or a run", code="evaluate.no_model")
    if model:
        config = _serving_the_actor(config)
    config = _with_data(config, requested.data)
    if scores and config.reward_model is not None and not config.reward_fn and not config.reward.names_functions:
        message = "reward_model scores in the trainers, and an evaluation has none: set reward_fn"
        raise ConfigError(message, code="reward.none_given")
    if not scores and config.workflow in (
        "rlvr",
        "vision_rlvr",
    ):  # other workflows may need the reward to decide what follows
        config = replace(config, reward_fn="none", reward=replace(config.reward, fns={}, by_source={}, filter_on=[]))
    evaluator = config.evaluator
    if requested.num_samples is not None:
        evaluator = replace(evaluator, n_samples=requested.num_samples)
    if requested.greedy:
        evaluator = replace(evaluator, modes=["greedy"])
    if (requested.num_samples or 1) > 1 and evaluator.modes == ["greedy"]:
        message = f"-n {requested.num_samples}: greedy decoding gives one answer to each row: leave out -n, or sample"
        raise ConfigError(message, code="config.conflict")
    config = replace(
        config,
        allocation_mode=f"{requested.servers or config.allocation.inference}+eval",
        strict_config=False,
        evaluator=replace(evaluator, stop_at={}),
        recover=replace(config.recover, mode="disabled"),
        rollout=replace(
            config.rollout,
            max_concurrent_rollouts=config.rollout.max_concurrent_rollouts or max(64, config.max_concurrent_rollouts),
            should_accept_fn="",
        ),
        # Updates over a collective do not reach servers elsewhere, and there are none.
        actor=replace(config.actor, weight_update_mode="disk", init_from_scratch=False, lora=None),
    )
    label = re.sub(r"[^\w.-]+", "_", "_".join(Path(config.actor.path).parts[-2:]))[-60:]
    name = f"{'eval' if scores else 'generate'}-{label}-{_fingerprint(config)[:10]}"
    config = replace(config, trial_name=name)
    check_config(config)
    return config


def _model(requested: Requested) -> tuple[str, list[str]]:
    """The model to evaluate, empty for that of the configuration; and, for a run, its configuration file."""
    paths = RunPaths(run_folder(requested.model).absolute()) if requested.model else None
    if paths is None or not paths.config.is_file():
        if requested.step is not None:
            message = f"--step {requested.step} chooses an export of a run, and {requested.model!r} is no run folder"
            raise ConfigError(message, code="evaluate.no_export")
        return requested.model, []
    exports = {path.name: path for path in sorted(paths.checkpoints.glob("*/step-*")) if path.parent.name in _POLICIES}
    wanted = max(exports, default="") if requested.step is None else f"step-{requested.step:06d}"
    if wanted not in exports:
        message = f"{paths.root} has no export {wanted or 'of its policy'}, only: {', '.join(exports) or 'none'}"
        raise InputError(message, code="evaluate.no_export")
    return str(exports[wanted]), [str(paths.config)]


def _serving_the_actor(config: PPOConfig) -> PPOConfig:
    """The servers load actor.path, also where their section names another model."""
    backend = backend_named(config.server_backend)
    if backend.model(config) == config.actor.path:
        return config
    options: Any = getattr(config, backend.name)
    if isinstance(options, dict):
        kept: Any = {name: value for name, value in options.items() if name not in (backend.model_key, "model")}
    else:
        kept = replace(options, **{backend.model_key: config.actor.path})
    return replace(config, **{backend.name: kept})


def _with_data(config: PPOConfig, data: Sequence[str]) -> PPOConfig:
    """The configuration with the sets of `data`, read as valid_dataset is, or else as train_dataset."""
    sets: dict[str, str] = {}
    for text in data:
        name, equals, path = text.partition("=")
        name, path = (name, path) if equals else (_set_name(text), text)
        if name in sets:
            message = f"--data {text}: there are two sets of the name {name}: write NAME={path}"
            raise ConfigError(message, code="evaluate.no_data")
        sets[name] = path
    valid = config.valid_dataset
    if not sets and valid is None:
        raise ConfigError("there is no held-out set: give --data FILE, or set valid_dataset", code="evaluate.no_data")
    if valid is None:
        valid = replace(ValidDatasetConfig(**_shared(config.train_dataset)), split="", max_rows=None)
    if sets:
        valid = replace(valid, path=next(iter(sets.values())))
        config = replace(config, evaluator=replace(config.evaluator, sets=sets))
    # Checks see it as the training set.
    train = replace(TrainDatasetConfig(**_shared(valid)), split=valid.split or "test")
    return replace(config, valid_dataset=valid, train_dataset=train)


def _shared(dataset: DatasetConfig) -> dict[str, Any]:
    return {field.name: getattr(dataset, field.name) for field in fields(DatasetConfig)}


def held_out_sets(config: PPOConfig) -> dict[str, ValidDatasetConfig]:
    """The sets of an evaluation without training, by name. valid_dataset is named by its file, unless
    evaluator.sets names it."""
    valid, named = config.valid_dataset, config.evaluator.sets
    assert valid is not None
    paths = named if valid.path in named.values() else {_set_name(valid.paths[0]): valid.path} | named
    return {name: replace(valid, path=path) for name, path in paths.items()}


def _set_name(path: str) -> str:
    """The name of a file without its ending; of a pattern its fixed characters."""
    return re.sub(r"[^\w.-]", "", Path(path).stem).strip("-") or "held_out"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _fingerprint(config: PPOConfig) -> str:
    """A checksum of everything that the answers and their scores depend on: options, and files as they are now."""
    tree = asdict(config)
    kept = {name: tree[name] for name in _DECIDES}
    kept["actor"] = {"path": str(Path(config.actor.path).absolute()), "server": config.server_backend}
    sets = held_out_sets(config)
    functions = [
        config.workflow,
        config.reward_fn,
        config.evaluator.answer_fn,
        *(part.map_fn for part in sets.values()),
    ]
    functions += [name for _, fns in config.reward.tables() for name in fns]
    words = list(_texts(config.workflow_args))  # the code of an agent: path.py:run, or a file in a command
    paths = [path for part in sets.values() for path in part.paths]
    named = [*(str(file) for path in paths for file in dataset_files(path)), config.chat_template.path, *words]
    functions += filter(is_row_function, paths)
    named += [name.rpartition(":")[0] for name in (*functions, *words)]
    files = [Path(name) for name in named if os.path.isfile(name)]  # False also for a text that is no path
    kept["files"] = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    model = Path(config.actor.path)
    kept["model"] = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(model.glob("*.safetensors"))
    ]
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
