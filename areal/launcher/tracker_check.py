"""The check, before a run starts, of the dashboards that rank 0 of its trainers will start."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal.api.config import BaseExperimentConfig
from areal.launcher.job import LaunchPlan, parse_env_vars
from areal.observe.chosen_trackers import PACKAGES, keys_on, missing_packages
from areal.observe.trackers import FIRST_REQUEST, mlflow_uri
from areal.system.durable import write_problem

_LIMIT_S = 90.0


def tracker_problems(config: BaseExperimentConfig, plan: LaunchPlan) -> list[str]:
    """One sentence for each dashboard that cannot start.

    Packages are checked in this environment, unless the trainers have an image. Folders, keys and servers are checked
    only when rank 0 runs on this machine.
    """
    rank = next((one for one in plan.processes if (one.role, one.index) == ("trainer", 0)), None)
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
    """Waits for a process that imports the packages, at most `_LIMIT_S`. `asks`: it looks for keys, and asks MLflow."""
    dashboards, base_url = _settings(config, environ, asks=asks), config.stats_logger.wandb.wandb_base_url
    own = {"WANDB_SILENT": "true", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env = {**FIRST_REQUEST, **environ, **own, **({"WANDB_BASE_URL": base_url} if base_url else {})}
    command, names = [sys.executable, "-m", "areal.observe.tracker_probe"], ", ".join(dashboards)
    try:
        done = subprocess.run(
            command, input=json.dumps(dashboards), capture_output=True, text=True, env=env, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return [f"stats_logger: the check of {names} did not end within {_LIMIT_S:g} s"]
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [f"stats_logger: the check of {names} failed: {last[0]}"]
    return json.loads(done.stdout)


def _settings(config: BaseExperimentConfig, environ: Mapping[str, str], *, asks: bool) -> dict[str, dict[str, Any]]:
    """What `tracker_probe` reads."""
    chosen = config.stats_logger
    wandb = {
        "run_id": "_".join(filter(None, [config.experiment_name, config.trial_name, chosen.wandb.id_suffix])),
        "project": chosen.wandb.project or config.experiment_name,
        "run_tags": chosen.wandb.tags,
    }
    uri, experiment = mlflow_uri(chosen.mlflow, environ), chosen.mlflow.experiment or config.experiment_name
    found: dict[str, dict[str, Any]] = {
        "tensorboard.path": {},
        "wandb.mode": {
            "settings": {name: value for name, value in wandb.items() if value is not None},
            "asks": asks and chosen.wandb.mode in ("online", "shared") and not chosen.wandb.wandb_api_key,
        },
        "swanlab.mode": {"asks": asks and chosen.swanlab.mode in ("online", "cloud") and not chosen.swanlab.api_key},
        "mlflow.mode": {"uri": uri, "experiment": experiment, "asks": asks},
        "trackio.mode": {"asks": asks and chosen.trackio.mode == "online"},
    }
    return {key: found[key] | {"module": PACKAGES[key][0]} for key in keys_on(config)}
