"""The weights that the trainer published last, in the host memory of its ranks, for differences.

Each rank keeps a part of the files (see `WeightImage`), compares it and sums it up. Rank 0 has the list of all files;
when it needs those of the other ranks, it copies them over HTTP.
"""

from __future__ import annotations

import json
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from areal.api.data import WeightSpec
from areal.api.engine import Ranks
from areal.api.metrics import Metric, Metrics
from areal.system.durable import is_complete
from areal.system.folder_delta import Change, pack, unpack
from areal.system.folders import (
    FolderList,
    FolderServer,
    ListedFile,
    LocalFolder,
    copied_folder,
    files_in,
    write_folder,
)
from areal.system.network import Host, required_token, store_prefix
from areal.weights.weight_files import WeightsChecksum
from areal.weights.weight_image import WeightImage

FULL_EVERY = 50
"""Every version with a multiple of this number is copied whole."""


class PublishedWeights:
    """The trainer ranks call `replace` and `checksum`, both collectives. Other threads may call `write`."""

    def __init__(self, specs: list[WeightSpec], others: Mapping[str, bytes], ranks: Ranks, host: Host) -> None:
        """`others`: the other files of the folder. `host`: where this rank listens and how rank 0 reaches it."""
        self._ranks = ranks
        self._image = WeightImage(specs, others, part=ranks.rank, num_parts=ranks.world_size)
        self._lock = threading.Lock()
        self._listed: FolderList | None = None
        """On rank 0 of all files, elsewhere of those of this rank; None while `replace` runs."""
        self._urls: list[str] = []
        """On rank 0: of the files of the other ranks."""
        self._num_replaced = 0
        self._kept: int | None = None
        """The version that was offered with these weights; None before that."""
        self._local: LocalFolder | None = None
        self._server: FolderServer | None = None
        if ranks.world_size > 1:
            self._token = required_token("the weights of the trainer ranks")
            # Random: the folder of a rank that was killed has the same names for other weights.
            self._local = LocalFolder(f"{store_prefix(self._token, 'parts')[:24]}-{secrets.token_hex(4)}")
            if ranks.rank > 0 and self._image.contents:
                self._server = FolderServer(host, self._token)

    def has_base(self, version: int) -> bool:
        """Whether `version` can be a difference to the weights here, which may be those of the same version."""
        return self._kept is not None and version != self._kept and version % FULL_EVERY != 0

    def keep(self, version: int) -> None:
        """The weights that `replace` took were offered as `version`."""
        self._kept = version

    def replace(
        self, weights: Iterator[tuple[str, Tensor]], write: Callable[[Iterator[Change]], None], *, compare: bool
    ) -> FolderList:
        """Take all `weights`. On rank 0 `write` gets the blocks of all ranks that have changed; none unless `compare`.

        Returns the list of the files on rank 0, elsewhere of those of this rank. Raises an OSError of `write` when all
        is taken, and WeightSyncError on all ranks when the engine has other weights: then the kept ones are of no
        version.
        """
        self._forget()
        self._kept = None
        changes, problem = self._image.take(weights, compare=compare), None
        if self._ranks.rank == 0:
            every = chain(changes, self._changes_elsewhere())
            try:
                write(every)
            except OSError as error:
                problem = error
            for _ in every:  # the other ranks send the rest
                pass
        else:
            packed = BytesIO()
            pack(packed, changes)
            self._ranks.gather(np.frombuffer(packed.getbuffer(), np.uint8))
        listed = self._list()
        if problem is not None:
            raise problem
        return listed

    def _forget(self) -> None:
        """Refuse to write what is replaced now, and remove the copies of it, whole or not."""
        with self._lock:  # no thread writes meanwhile
            self._listed = None
            for path in self._local.path.iterdir() if self._local else ():
                shutil.rmtree(path, ignore_errors=True)

    def _changes_elsewhere(self) -> Iterator[Change]:
        for packed in self._ranks.gather(np.empty(0, np.uint8)):
            yield from unpack(packed.data)

    def _list(self) -> FolderList:
        """Sum up the files of this rank and offer them; rank 0 joins the lists of all ranks."""
        self._listed, url = self._image.listed(), ""
        if self._server is not None and self._local is not None:
            self._num_replaced += 1
            folder = self._local.path / f"part_{self._num_replaced}"
            url = self._server.offer(folder, self._listed, partial(self.write, self._listed, folder))
        offer = json.dumps({"url": url, "files": [asdict(file) for file in self._listed.files]})
        offers = [json.loads(bytes(each)) for each in self._ranks.gather(_array(offer))]
        self._urls = [each["url"] for each in offers if each["url"]]
        if offers:
            files = [*self._listed.files, *(ListedFile(**file) for each in offers for file in each["files"])]
            self._listed = FolderList(self._listed.block_bytes, sorted(files, key=lambda file: file.name))
        return self._listed

    def checksum(self) -> str:
        """The checksum of the weights on rank 0, "" elsewhere."""
        sums = WeightsChecksum()
        for name, weight in self._image.weights():
            sums.add(name, weight)
        for totals in self._ranks.gather(_array(json.dumps(sums.totals()))):
            sums.merge(json.loads(bytes(totals)))
        return sums.hexdigest() if self._ranks.rank == 0 else ""

    def write(self, listed: FolderList, folder: Path) -> None:
        """Write the folder unless it is there; nothing when newer weights were taken since `replace` returned `listed`.
        WeightSyncError when the files of another rank cannot be copied; OSError."""
        with self._lock:
            if self._listed is listed and not is_complete(folder):
                write_folder(self._image.contents, folder, self._copied_parts())

    def contents(self) -> Iterator[NDArray[np.uint8]]:
        """On rank 0 the files in the order of their names, after all were copied. Raises what `write` raises."""
        assert self._listed is not None
        files = self._image.contents
        copies = {path.name: path for part in self._copied_parts() for path in files_in(part)}
        names = [file.name for file in self._listed.files]
        return (files[name] if name in files else np.fromfile(copies[name], np.uint8) for name in names)

    def _copied_parts(self) -> list[Path]:
        """Copies of the files of the other ranks, a folder for each. They stay until `replace`."""
        if self._local is None or not self._urls:
            return []
        with ThreadPoolExecutor(len(self._urls), thread_name_prefix="parts") as pool:
            return list(pool.map(partial(copied_folder, root=self._local.path, token=self._token), self._urls))

    def close(self) -> None:
        """May be repeated."""
        self._forget()
        if self._server is not None:
            self._server.close()
        local, self._local = self._local, None
        if local is not None:
            local.close()


def sent_metrics(sent: float, full: float, ranks: Ranks) -> Metrics:
    """Of an update by differences. `sent`, `full`: bytes for a server with the version before, and of all weights, on
    rank 0, which alone counts."""
    count = float(ranks.rank == 0)
    return {
        "update_weights/bytes": Metric(sent * count, count),
        "update_weights/share_of_full": Metric(sent * count / max(full, 1.0), count),
    }


def _array(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(bytearray(text.encode()), np.uint8)
