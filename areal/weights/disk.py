"""Weight channels over a folder v000042, complete or absent; the newest versions are kept. The servers read it on a
shared file system, or pull it from trainer rank 0 over HTTP. A `DeltaChannel` has the last version in memory.

The trainer continues once a folder is written; `wait_served` waits for the fleet to load it (each replica under
rollout.weight_update_timeout_s).
"""

import contextlib
import itertools
import re
import secrets
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from torch import Tensor

from areal.api.data import WeightUpdate
from areal.api.engine import AdapterSource, Ranks, WeightChannel, WeightSource
from areal.api.errors import WeightSyncError
from areal.api.metrics import Metrics
from areal.observe.log import get_logger
from areal.system.durable import finish_interrupted_writes, install_folder, publish_folder, writing_folder
from areal.system.folder_delta import Change, write_delta
from areal.system.folders import DELTA, DELTA_FILE, LIST, NEEDS_WHOLE, SHARED, FolderList, FolderServer, LocalFolder
from areal.system.network import Host, required_token, store_prefix
from areal.weights.control import FleetControl, send_once, succeeded
from areal.weights.published_weights import PublishedWeights, sent_metrics
from areal.weights.weight_files import MAX_FILE_BYTES, write_weights

KEPT_VERSIONS = 2
"""Folders that stay: the current version, which a restarted replica loads, and the one before, which a slow replica may
still read."""
_VERSION_FOLDER = re.compile(r"v(\d{6,})")
_COPIED = ("config.json", "generation_config.json")


class FolderChannel(WeightChannel):
    """The base of the channels whose versions are folders. The fleet loads one while the trainer continues."""

    _syncs = True
    """Versions survive a power failure."""

    def __init__(self, source: WeightSource | AdapterSource, ranks: Ranks, control: FleetControl, folder: Path) -> None:
        """`folder`: parent of the versions."""
        self._source, self._ranks, self._control, self._folder = source, ranks, control, folder
        self._update: WeightUpdate | None = None
        """On rank 0 what the fleet has started to load, until it was waited for."""
        self._version: int | None = None
        """The version that was sent and not waited for yet, on every rank."""

    def publish(self, version: int) -> str:
        def send(weights: Iterator[tuple[str, Tensor]]) -> None:
            with self._writes(version):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._update = self._store(version, weights)
            self._control.start_update(self._update)

        self._update = self._version = None
        checksum = send_once(self._source.named_weights(), self._ranks, version, send)
        self._version = version
        return checksum or ""

    def wait_served(self) -> None:
        update, version, error = self._update, self._version, None
        self._update = self._version = None
        if update is not None:
            try:
                self._serve(update)
            except Exception as failure:  # noqa: BLE001 - the other ranks must be notified before it is raised
                error = failure
        if version is not None:
            succeeded(self._ranks, version, error)
        if update is not None:
            with contextlib.suppress(OSError):  # what stays is removed after the next version
                self._prune(update.version)

    def _serve(self, update: WeightUpdate) -> None:
        self._control.publish(update)

    @contextlib.contextmanager
    def _writes(self, version: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"version {version} could not be written to {self._folder}: {error}"
            raise WeightSyncError(message, code="weights.not_written") from error

    def _store(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> WeightUpdate:
        finish_interrupted_writes(self._folder)
        final = self._folder / self._name(version)
        writing = writing_folder(final)
        writing.mkdir()
        self._write(writing, weights)
        publish_folder(writing, final, sum_up=False, sync=self._syncs)  # replicas load it without verifying checksums
        return self._update_from(final, version)

    def metrics(self) -> Metrics:
        return {}

    def close(self) -> None:
        """Nothing to release."""

    @abstractmethod
    def _name(self, version: int) -> str:
        """The name of the folder of a version."""

    @abstractmethod
    def _write(self, folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None: ...

    @abstractmethod
    def _update_from(self, folder: Path, version: int) -> WeightUpdate: ...

    @abstractmethod
    def _prune(self, current: int) -> None:
        """Remove the folders that no replica needs any more."""


class DiskChannel(FolderChannel):
    """Versions that trainer and servers read on a shared file system."""

    def __init__(
        self,
        engine: WeightSource,
        ranks: Ranks,
        control: FleetControl,
        folder: Path,
        *,
        model_folder: Path | None = None,
    ) -> None:
        """`model_folder`: source of config.json, which makes a version a loadable checkpoint."""
        super().__init__(engine, ranks, control, folder)
        paths = [] if model_folder is None else [model_folder / name for name in _COPIED]
        self._other_files = {path.name: path.read_bytes() for path in paths if path.is_file()}

    def _name(self, version: int) -> str:
        return f"v{version:06d}"

    def _write(self, folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        write_weights(folder, weights, MAX_FILE_BYTES)
        for name, content in self._other_files.items():
            (folder / name).write_bytes(content)

    def _update_from(self, folder: Path, version: int) -> WeightUpdate:
        return WeightUpdate(version=version, kind="disk", path=str(folder))

    def _prune(self, current: int) -> None:
        """Remove old versions, and versions above the current one, which were written before a recovery."""
        matches = ((path, _VERSION_FOLDER.fullmatch(path.name)) for path in self._folder.iterdir())
        versions = {int(match[1]): path for path, match in matches if match}
        kept = sorted(version for version in versions if version <= current)[-KEPT_VERSIONS:]
        for version, path in versions.items():
            if version not in kept:
                shutil.rmtree(path, ignore_errors=True)
        for path in itertools.chain(self._folder.glob("v*-*"), self._folder.glob(f"{DELTA}v*-*")):
            shutil.rmtree(path, ignore_errors=True)  # the run used `DiskDeltaChannel` before


class HttpChannel(DiskChannel):
    """Versions on a disk of rank 0's machine, which serves them."""

    _syncs = False

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
        if ranks.rank == 0:
            token = required_token("the weights that trainer rank 0 serves")
            self._local = LocalFolder(store_prefix(token, "published weights")[:24])
            self._server = FolderServer(host, token)
        folder = Path() if self._local is None else self._local.path
        super().__init__(engine, ranks, control, folder, model_folder=model_folder)

    def _update_from(self, folder: Path, version: int) -> WeightUpdate:
        assert self._server is not None, "only rank 0 writes versions"
        return WeightUpdate(version=version, kind="http", path=self._server.offer(folder))

    def close(self) -> None:
        """Serve no more, and remove the versions."""
        if self._server is not None:
            self._server.close()
        if self._local is not None:
            self._local.close()


class DeltaChannel(DiskChannel):
    """The base of the channels whose versions servers make from an earlier one where that takes fewer bytes.

    Each rank keeps a part of the version before in memory. The first version of a process, every `FULL_EVERY`-th one,
    one that is published again, and a server that has no version since then, take whole weights.
    """

    _published: PublishedWeights
    _base = ""
    """On rank 0: the name of the folder of the version before, with the checksum."""
    _listed: FolderList
    """On rank 0: of the version that was taken last."""
    _deltas: Mapping[str, tuple[str, int]] = MappingProxyType({})
    """As `WeightUpdate.deltas`, with sizes in bytes."""
    _sent = (0.0, 0.0)
    """Bytes of the last version that a server with the version before copies, and of all its weights."""

    def publish(self, version: int) -> str:
        self._update = self._version = None
        difference = self._folder / f"{DELTA}{self._name(version)}"
        compare, size, problem = self._published.has_base(version), 0, None

        def write(changes: Iterator[Change]) -> None:
            nonlocal size
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._base:  # of an earlier process: later a server may be waiting for a folder that is written
                finish_interrupted_writes(self._folder)
            if compare:
                size = _write_delta(difference, changes)

        def send(_: Iterator[tuple[str, Tensor]]) -> None:
            with self._writes(version):
                if problem is not None:
                    raise problem
                self._update = self._updated(version, difference, size, is_whole=not compare)
            self._control.start_update(self._update)

        try:
            self._listed = self._published.replace(self._source.named_weights(), write, compare=compare)
        except OSError as error:
            problem = error
        send_once(iter(()), self._ranks, version, send)
        self._published.keep(version)
        self._version, self._base = version, self._listed.name(self._name(version))
        return self._published.checksum()  # while servers update

    def metrics(self) -> Metrics:
        return sent_metrics(*self._sent, self._ranks)

    def close(self) -> None:
        super().close()
        self._published.close()

    def _updated(self, version: int, difference: Path, size: int, *, is_whole: bool) -> WeightUpdate:
        """Offer the version that was taken. `size`: of the difference, unless it `is_whole`."""
        base, full = self._base, self._listed.num_bytes
        if self._listed.name(self._name(version)) == base:
            self._sent = 0.0, float(full)
        else:
            is_whole |= size >= full
            deltas = {} if is_whole else {**self._deltas, base: (self._offer(difference), size)}
            self._sent = float(size if deltas else full), float(full)
            is_whole |= self._limit(deltas, full)
            self._deltas = deltas
        return self._offer_all(version, is_whole=is_whole)

    def _offer_all(self, version: int, *, is_whole: bool) -> WeightUpdate:
        url = self._offer_version(self._folder / self._name(version), self._listed, is_whole=is_whole)
        deltas = {base: url for base, (url, _) in self._deltas.items()}
        return WeightUpdate(version=version, kind="http", path=url, deltas=deltas)

    @abstractmethod
    def _offer(self, difference: Path) -> str:
        """The address at which servers find this folder from now on."""

    @abstractmethod
    def _offer_version(self, folder: Path, listed: FolderList, *, is_whole: bool) -> str:
        """The address of the version that was taken last. `is_whole`: some servers have no use for the differences."""

    @abstractmethod
    def _limit(self, deltas: dict[str, tuple[str, int]], full: int) -> bool:
        """Remove the differences that are no longer worth their bytes; returns whether the version must be whole."""


class HttpDeltaChannel(DeltaChannel, HttpChannel):
    """A whole version is written to the disk of rank 0 only when a server asks for it, and not after the next one was
    taken: such a server gets that one."""

    def __init__(
        self,
        engine: WeightSource,
        ranks: Ranks,
        control: FleetControl,
        *,
        host: Host,
        model_folder: Path | None = None,
    ) -> None:
        """`host`: where this rank listens, how rank 0 reaches it, and how the servers reach rank 0."""
        super().__init__(engine, ranks, control, host=host, model_folder=model_folder)
        self._published = PublishedWeights(engine.weight_specs(), self._other_files, ranks, host)

    def _offer(self, difference: Path) -> str:
        assert self._server is not None, "only rank 0 writes versions"
        return self._server.offer(difference)

    def _offer_version(self, folder: Path, listed: FolderList, *, is_whole: bool) -> str:
        assert self._server is not None, "only rank 0 writes versions"
        if listed.name(folder.name) != self._base:
            shutil.rmtree(folder, ignore_errors=True)  # of the same version with other weights
        return self._server.offer(folder, listed, partial(self._published.write, listed, folder))

    def _limit(self, deltas: dict[str, tuple[str, int]], full: int) -> bool:
        while sum(size for _, size in deltas.values()) >= full:
            del deltas[next(iter(deltas))]
        return False

    def _prune(self, current: int) -> None:
        super()._prune(current)
        used = {urlsplit(url).path[1:].rpartition("-")[0] for url, _ in self._deltas.values()}
        for path in self._folder.glob(f"{DELTA}v*"):
            if path.name not in used:
                shutil.rmtree(path, ignore_errors=True)


class DiskDeltaChannel(DeltaChannel):
    """Versions on a disk that the servers share, most of them only as the list of their files: a server makes them from
    the last whole version and all differences since then, or those since the version that it has."""

    _used: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    """Folders of the version before and of the last one. A slow server may still read those of the former."""
    _whole = ""
    """The last version that was written whole."""

    def __init__(
        self,
        engine: WeightSource,
        ranks: Ranks,
        control: FleetControl,
        folder: Path,
        *,
        host: Host,
        model_folder: Path | None = None,
    ) -> None:
        """`host`: where this rank listens and how rank 0 reaches it."""
        super().__init__(engine, ranks, control, folder, model_folder=model_folder)
        self._published = PublishedWeights(engine.weight_specs(), self._other_files, ranks, host)

    def _serve(self, update: WeightUpdate) -> None:
        try:
            super()._serve(update)
        except WeightSyncError as error:
            if error.code not in NEEDS_WHOLE or self._whole == self._base:
                raise
            get_logger(__name__).warning("version %d is written whole: %s", update.version, error)
            with self._writes(update.version):
                update = self._offer_all(update.version, is_whole=True)
            super()._serve(update)

    def _offer(self, difference: Path) -> str:
        return self._install(difference, FolderList.of(difference))

    def _offer_version(self, folder: Path, listed: FolderList, *, is_whole: bool) -> str:
        writing, name = writing_folder(folder, "listed"), listed.name(folder.name)
        shutil.rmtree(writing, ignore_errors=True)
        if is_whole:
            self._published.write(listed, writing)
            self._whole = name  # servers with the version before take one difference, others the whole version
            self._deltas = dict(list(self._deltas.items())[-1:])
        else:
            writing.mkdir()
        url = self._install(writing, listed, folder.name)
        used = {name, self._whole, *(Path(url).name for url, _ in self._deltas.values())}
        before, last = self._used
        self._used = before if name == self._base else last, frozenset(used)
        return url

    def _install(self, filled: Path, listed: FolderList, prefix: str = "") -> str:
        """Give a folder its list and its name with the checksum; returns its address."""
        final = filled.with_name(listed.name(prefix or filled.name))
        (filled / LIST).write_bytes(listed.to_bytes())
        install_folder(filled, final)
        return f"{SHARED}{final.absolute()}"

    def _limit(self, deltas: dict[str, tuple[str, int]], full: int) -> bool:
        bases = list(deltas)
        needed = bases[bases.index(self._whole) :] if self._whole in deltas else []
        return sum(deltas[base][1] for base in needed) >= full

    def _prune(self, current: int) -> None:
        for path in itertools.chain(self._folder.glob("v*"), self._folder.glob(f"{DELTA}v*")):
            if path.name not in self._used[0] | self._used[1]:
                shutil.rmtree(path, ignore_errors=True)


def _write_delta(folder: Path, changes: Iterable[Change]) -> int:
    writing = writing_folder(folder)
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir()
    size = write_delta(writing / DELTA_FILE, changes)
    publish_folder(writing, folder, sum_up=False, sync=False)
    return size


class AdapterChannel(FolderChannel):
    """Adapters alone, each in a separate folder with a new name, which trainer and servers share."""

    def __init__(self, adapter: AdapterSource, ranks: Ranks, control: FleetControl, folder: Path) -> None:
        super().__init__(adapter, ranks, control, folder)
        self._adapter = adapter

    def _name(self, version: int) -> str:
        # A version that is published again after a recovery can have other weights.
        return f"adapter-v{version:06d}-{secrets.token_hex(4)}"

    def _write(self, folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._adapter.write(folder, weights)

    def _update_from(self, folder: Path, version: int) -> WeightUpdate:
        return WeightUpdate(version=version, kind="adapter", path=str(folder))

    def _prune(self, current: int) -> None:
        folders = sorted(self._folder.glob("adapter-v*"), key=lambda path: path.stat().st_mtime)
        for path in folders[:-KEPT_VERSIONS]:
            shutil.rmtree(path, ignore_errors=True)
