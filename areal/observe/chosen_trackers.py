"""The trackers that a configuration turns on.

A run does not start when a dashboard cannot start. Later errors of a dashboard, also at a restart, do not end training.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from areal.api.config import BaseExperimentConfig
from areal.api.config.redaction import public_text
from areal.api.errors import ConfigError
from areal.observe.step_files import JsonlTracker, SampleRow
from areal.observe.trackers import (
    MlflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    Tracker,
    TrackioTracker,
    WandBTracker,
)
from areal.system.image_files import ImageFiles
from areal.system.run_paths import RunPaths

logger = logging.getLogger(__name__)

PACKAGES = {
    "tensorboard.path": ("tensorboardX", "tensorboardX", "tensorboard"),
    "wandb.mode": ("wandb", "wandb", "wandb"),
    "swanlab.mode": ("swanlab", "swanlab", "swanlab"),
    "mlflow.mode": ("mlflow", "mlflow-skinny", "mlflow"),
    "trackio.mode": ("trackio", "trackio", "trackio"),
}
"""The module, the package and the extra of areal for each option that turns a dashboard on."""


class GuardedTracker:
    """A dashboard whose errors do not end the training: metrics.jsonl has everything that it lacks."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._is_failing = False

    def log(self, step: int, values: dict[str, float]) -> None:
        self._call("the metrics", partial(self._tracker.log, step, values))

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._call("the samples", partial(self._tracker.log_samples, step, rows))

    def flush(self) -> None:
        self._call("a flush", self._tracker.flush)

    def close(self) -> None:
        self._call("the end of the run", self._tracker.close)

    def _call(self, what: str, call: Callable[[], object]) -> None:
        """Log the first error, and again after a call that succeeded."""
        try:
            call()
            self._is_failing = False
        except Exception as error:  # noqa: BLE001 - of one request to a dashboard
            if not self._is_failing:
                name, reason = type(self._tracker).__name__, public_text(str(error))
                logger.warning("%s did not take %s: %s; training continues", name, what, reason)
            self._is_failing = True


def build_trackers(
    config: BaseExperimentConfig, paths: RunPaths, *, first_step: int = 0, after_failure: bool = False
) -> list[Tracker]:
    """All configured trackers, for rank 0. `first_step` is the first step that will be logged.

    `after_failure`: the trainer restarts within a run. A dashboard that does not start is then left out with a warning.
    ConfigError when a package is missing, or without `after_failure` when a dashboard does not start.
    """
    if missing := missing_packages(config):
        raise ConfigError("; ".join(missing), code="launch.package_missing")
    chosen, images = config.stats_logger, ImageFiles(paths.images)
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard.path": partial(
            TensorBoardTracker, Path(chosen.tensorboard.path or ""), images, first_step=first_step
        ),
        "wandb.mode": partial(WandBTracker, chosen.wandb, config, paths.root, images),
        "swanlab.mode": partial(SwanLabTracker, chosen.swanlab, config, paths.root, images, first_step=first_step),
        "mlflow.mode": partial(MlflowTracker, chosen.mlflow, config, paths.root, images, first_step=first_step),
        "trackio.mode": partial(TrackioTracker, chosen.trackio, config, images),
    }
    started = [_started(key, makers[key], after_failure=after_failure) for key in keys_on(config)]
    dashboards = [tracker for tracker in started if tracker is not None]
    return [JsonlTracker(paths.metrics, first_step=first_step), *dashboards]


def missing_packages(config: BaseExperimentConfig) -> list[str]:
    """For each dashboard that is on and has no package here: its option and how to install the package."""
    return [
        f"stats_logger.{key} needs the package {package}: pip install -e '.[{extra}]' in the repository of areal"
        for key in keys_on(config)
        for module, package, extra in [PACKAGES[key]]
        if find_spec(module) is None
    ]


def keys_on(config: BaseExperimentConfig) -> list[str]:
    """The options that turn a dashboard on in this configuration."""
    chosen = config.stats_logger
    modes = {
        "tensorboard.path": "disabled" if chosen.tensorboard.path is None else "on",
        "wandb.mode": chosen.wandb.mode,
        "swanlab.mode": chosen.swanlab.mode,
        "mlflow.mode": chosen.mlflow.mode,
        "trackio.mode": chosen.trackio.mode,
    }
    return [key for key, mode in modes.items() if mode not in (None, "disabled")]


def _started(key: str, make: Callable[[], Tracker], *, after_failure: bool) -> GuardedTracker | None:
    try:
        return GuardedTracker(make())
    except ConfigError as found:
        error = found
    except Exception as found:  # noqa: BLE001 - of one dashboard
        reason = public_text(f"{type(found).__name__}: {found}")
        error = ConfigError(f"stats_logger.{key}: did not start: {reason}", code="launch.tracker_failed")
    if not after_failure:
        raise error from None
    logger.warning("%s; training continues without it", error)
    return None
