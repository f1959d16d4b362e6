"""Owns publication over a shared folder: RUN/weights/v000042, whole or absent, the newest few kept.

Waits for: the fleet to load the folder (each replica under rollout.weight_update_timeout_s).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from areal.api.data import WeightUpdate
from areal.api.engine import WeightSource
from areal.api.errors import WeightSyncError
from areal.system.durable import finish_interrupted_writes, publish_folder, writing_folder
from areal.system.run_paths import RunPaths
from areal.weights.control import PublishControl, agree
from areal.weights.weight_files import MAX_FILE_BYTES, write_weights

SHARD_BYTES = MAX_FILE_BYTES
"""Largest file of a published version: what rank 0 holds in memory at a time."""
_VERSION_FOLDER = re.compile(r"v(\d{6,})")
_COPIED = ("config.json", "generation_config.json")


class DiskChannel:
    """Implements `areal.api.engine.WeightChannel`. `keep` versions stay: the current one, which a replica that comes
    back loads, and the one before, which a slow replica may still be reading."""

    def __init__(
        self,
        engine: WeightSource,
        control: PublishControl,
        paths: RunPaths,
        *,
        is_rank0: bool,
        keep: int = 2,
        model_folder: Path | None = None,
    ) -> None:
        """`model_folder`: where config.json is copied from, so that a version is a checkpoint others can load."""
        self._engine = engine
        self._control = control
        self._folder = paths.weights
        self._is_rank0 = is_rank0
        self._keep = max(keep, 2)
        self._model_folder = model_folder

    def publish(self, version: int) -> None:
        """Write the weights and make the fleet load them; every rank calls it. WeightSyncError on all when it fails."""
        error: BaseException | None = None
        weights = self._engine.named_weights()
        if self._is_rank0:
            try:
                final = self._write(version, weights)
                self._control.publish(WeightUpdate(version=version, kind="disk", path=str(final)))
                self._prune(version)
            except OSError as failure:
                error = WeightSyncError(f"version {version} could not be written to {self._folder}: {failure}")
            except Exception as failure:  # noqa: BLE001 - raised below, on all ranks together
                error = failure
        for _ in weights:  # gathering is a collective: every rank goes through to the end, also after an error
            pass
        agree(self._engine, error, version)

    def close(self) -> None:
        """Nothing is held between publications."""

    def _write(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        finish_interrupted_writes(self._folder)
        final = self._folder / f"v{version:06d}"
        writing = writing_folder(final)
        writing.mkdir()
        write_weights(writing, weights, SHARD_BYTES)
        for name in _COPIED:
            if self._model_folder is not None and (self._model_folder / name).is_file():
                shutil.copyfile(self._model_folder / name, writing / name)
        publish_folder(writing, final, sum_up=False)  # nobody reads so much again before it loads it
        return final

    def _prune(self, current: int) -> None:
        """Versions above the current one are left from before a recovery; they are not history."""
        versions: dict[int, Path] = {}
        for path in self._folder.iterdir():
            match = _VERSION_FOLDER.fullmatch(path.name)
            if match:
                versions[int(match.group(1))] = path
        kept = sorted(version for version in versions if version <= current)[-self._keep :]
        for version, path in versions.items():
            if version not in kept:
                shutil.rmtree(path, ignore_errors=True)
