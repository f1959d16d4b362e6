"""Weight channels over a folder v000042, complete or absent; the newest versions are kept. The servers read it on a
shared file system, or pull it from trainer rank 0 over HTTP.

The trainer continues once a folder is written; `wait_served` waits for the fleet to load it (each replica under
rollout.weight_update_timeout_s).
"""

import contextlib
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from areal.api.data import WeightUpdate
from areal.api.engine import AdapterSource, Ranks, WeightSource
from areal.api.errors import WeightSyncError
from areal.system.durable import finish_interrupted_writes, publish_folder, writing_folder
from areal.system.folders import FolderServer, LocalFolder
from areal.system.network import Host, required_token, store_prefix
from areal.weights.control import FleetControl, StartedUpdate
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
        folder: Path,
        *,
        model_folder: Path | None = None,
        address_of: Callable[[Path], str] | None = None,
    ) -> None:
        """`folder`: parent of the versions. `model_folder`: source of config.json, which makes a version a loadable
        checkpoint. `address_of`: serves a version over HTTP; None = the servers read the folder."""
        self._engine = engine
        self._started = StartedUpdate(ranks, control)
        self._folder = folder
        self._model_folder = model_folder
        self._address_of = address_of

    def publish(self, version: int) -> str:
        return self._started.publish(self._engine, version, partial(self._send, version))

    def wait_served(self) -> None:
        if (update := self._started.wait_served()) is not None:
            with contextlib.suppress(OSError):  # what stays is removed after the next version
                self._prune(update.version)

    def close(self) -> None:
        """Nothing to release."""

    def _send(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> WeightUpdate:
        try:
            final = self._write(version, weights)
        except OSError as error:
            message = f"version {version} could not be written to {self._folder}: {error}"
            raise WeightSyncError(message, code="weights.not_written") from error
        if self._address_of is None:
            return WeightUpdate(version=version, kind="disk", path=str(final))
        return WeightUpdate(version=version, kind="http", path=self._address_of(final))

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


class AdapterChannel:
    """Implements `areal.api.engine.WeightChannel`: adapters alone, each in a separate folder with a new name."""

    def __init__(self, adapter: AdapterSource, ranks: Ranks, control: FleetControl, folder: Path) -> None:
        """`folder`: parent of the versions, which trainer and servers share."""
        self._adapter = adapter
        self._started = StartedUpdate(ranks, control)
        self._folder = folder

    def publish(self, version: int) -> str:
        return self._started.publish(self._adapter, version, partial(self._send, version))

    def wait_served(self) -> None:
        if self._started.wait_served() is not None:
            with contextlib.suppress(OSError):  # what stays is removed after the next version
                folders = sorted(self._folder.glob("adapter-v*"), key=lambda path: path.stat().st_mtime)
                for path in folders[:-KEPT_VERSIONS]:
                    shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Nothing to release."""

    def _send(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> WeightUpdate:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            finish_interrupted_writes(self._folder)
            # A version that is published again after a recovery can have other weights.
            final = self._folder / f"adapter-v{version:06d}-{secrets.token_hex(4)}"
            writing = writing_folder(final)
            writing.mkdir()
            self._adapter.write(writing, weights)
            publish_folder(writing, final, sum_up=False)
        except OSError as error:
            message = f"adapter version {version} could not be written to {self._folder}: {error}"
            raise WeightSyncError(message, code="weights.not_written") from error
        return WeightUpdate(version=version, kind="adapter", path=str(final))


class HttpChannel:
    """Implements `areal.api.engine.WeightChannel`: rank 0 writes to a disk of its machine, and serves the folder."""

    def __init__(
        self,
        engine: WeightSource,
        ranks: Ranks,
        control: FleetControl,
        *,
        host: Host,
        model_folder: Path | None = None,
    ) -> None:
        """`host`: where this process listens and how the servers reach it. `model_folder`: as in `DiskChannel`."""
        self._local: LocalFolder | None = None
        self._server: FolderServer | None = None
        folder, address_of = Path(), None
        if ranks.rank == 0:
            token = required_token("the weights that trainer rank 0 serves")
            self._local = LocalFolder(store_prefix(token, "published weights")[:24])
            self._server = FolderServer(host, token)
            folder, address_of = self._local.path, self._server.offer
        self._versions = DiskChannel(engine, ranks, control, folder, model_folder=model_folder, address_of=address_of)

    def publish(self, version: int) -> str:
        return self._versions.publish(version)

    def wait_served(self) -> None:
        self._versions.wait_served()

    def close(self) -> None:
        """Serve no more, and remove the versions."""
        if self._server is not None:
            self._server.close()
        if self._local is not None:
            self._local.close()
