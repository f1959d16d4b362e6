"""The trackers that a configuration turns on.

A dashboard that cannot start ends the start; one that fails later does not end training.
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


def build_trackers(config: BaseExperimentConfig, paths: RunPaths, *, first_step: int = 0) -> list[Tracker]:
    """All configured trackers, for rank 0. `first_step` is the first step that will be logged."""
    if missing := missing_packages(config):
        raise ConfigError("; ".join(missing), code="launch.package_missing")
    trackers: list[Tracker] = []
    chosen, images = config.stats_logger, ImageFiles(paths.images)
    if chosen.tensorboard.path is not None:
        trackers.append(TensorBoardTracker(Path(chosen.tensorboard.path), images, first_step=first_step))
    if chosen.wandb.mode != "disabled":
        trackers.append(WandBTracker(chosen.wandb, config, paths.root, images))
    if chosen.swanlab.mode not in (None, "disabled"):
        trackers.append(SwanLabTracker(chosen.swanlab, config, paths.root / "swanlog", images))
    if chosen.mlflow.mode != "disabled":
        trackers.append(MlflowTracker(chosen.mlflow, config, paths.root, images, first_step=first_step))
    if chosen.trackio.mode != "disabled":
        trackers.append(TrackioTracker(chosen.trackio, config, images))
    return [JsonlTracker(paths.metrics, first_step=first_step), *map(GuardedTracker, trackers)]


def missing_packages(config: BaseExperimentConfig) -> list[str]:
    """For each tracker that is on and has no package here: its option and how to install the package."""
    chosen = config.stats_logger
    needed = [
        (chosen.tensorboard.path is not None, "tensorboard.path", "tensorboardX", "tensorboardX", "tensorboard"),
        (chosen.wandb.mode != "disabled", "wandb.mode", "wandb", "wandb", "wandb"),
        (chosen.swanlab.mode not in (None, "disabled"), "swanlab.mode", "swanlab", "swanlab", "swanlab"),
        (chosen.mlflow.mode != "disabled", "mlflow.mode", "mlflow", "mlflow-skinny", "mlflow"),
        (chosen.trackio.mode != "disabled", "trackio.mode", "trackio", "trackio", "trackio"),
    ]
    return [
        f"stats_logger.{key} needs the package {package}: pip install -e '.[{extra}]' in the repository of areal"
        for is_on, key, module, package, extra in needed
        if is_on and find_spec(module) is None
    ]
