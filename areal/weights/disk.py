"""Weight channel over a shared folder: RUN/weights/v000042, complete or absent; the newest versions are kept.

`publish` waits for the fleet to load the folder (each replica under rollout.weight_update_timeout_s).
"""

import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from areal.api.data import WeightUpdate
from areal.api.engine import Ranks, WeightSource
from areal.api.errors import WeightSyncError
from areal.system.durable import finish_interrupted_writes, publish_folder, writing_folder
from areal.system.run_paths import RunPaths
from areal.weights.control import FleetControl, publish_once
from areal.weights.weight_files import MAX_FILE_BYTES, write_weights

KEPT_VERSIONS = 2
"""The current version, which a restarted replica loads, and the one before, which a slow replica may still read."""
_VERSION_FOLDER = re.compile(r"v(\d{6,})")
_COPIED = ("config.json", "generation_config.json")


class DiskChannel:
    """Implements `areal.api.engine.WeightChannel`."""

    def __init__(
        self,
        engine: WeightSource,
        ranks: Ranks,
        control: FleetControl,
        paths: RunPaths,
        *,
        model_folder: Path | None = None,
    ) -> None:
        """`model_folder`: source of config.json, which makes a version a loadable checkpoint."""
        self._engine, self._ranks, self._control = engine, ranks, control
        self._folder = paths.weights
        self._model_folder = model_folder

    def publish(self, version: int) -> str:
        return publish_once(self._engine, self._ranks, version, partial(self._send, version)) or ""

    def close(self) -> None:
        """Nothing to release."""

    def _send(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> None:
        try:
            final = self._write(version, weights)
            self._control.publish(WeightUpdate(version=version, kind="disk", path=str(final)))
            self._prune(version)
        except OSError as error:
            message = f"version {version} could not be written to {self._folder}: {error}"
            raise WeightSyncError(message, code="weights.not_written") from error

    def _write(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        finish_interrupted_writes(self._folder)
        final = self._folder / f"v{version:06d}"
        writing = writing_folder(final)
        writing.mkdir()
        write_weights(writing, weights, MAX_FILE_BYTES)
        for name in _COPIED:
            if self._model_folder is not None and (self._model_folder / name).is_file():
                shutil.copyfile(self._model_folder / name, writing / name)
        publish_folder(writing, final, sum_up=False)  # replicas load it without verifying checksums
        return final

    def _prune(self, current: int) -> None:
        """Remove old versions, and versions above the current one, which were written before a recovery."""
        found = ((path, _VERSION_FOLDER.fullmatch(path.name)) for path in self._folder.iterdir())
        versions = {int(match[1]): path for path, match in found if match}
        kept = sorted(version for version in versions if version <= current)[-KEPT_VERSIONS:]
        for version, path in versions.items():
            if version not in kept:
                shutil.rmtree(path, ignore_errors=True)
