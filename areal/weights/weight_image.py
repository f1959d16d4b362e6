"""The weights that were published last, in memory, as the files of their folder."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal.api.data import WeightSpec
from areal.api.engine import Ranks
from areal.api.errors import WeightSyncError
from areal.api.metrics import Metric, Metrics
from areal.models.checkpoint_files import INDEX
from areal.system.folder_delta import Piece, encode, pieces, words
from areal.system.folders import FolderList, write_folder
from areal.weights.weight_files import MAX_FILE_BYTES, WeightsChecksum, content_of, index_of, layout, plan_files

FULL_EVERY = 50
"""Every version with a multiple of this number is copied whole."""
_AHEAD = 64
"""Blocks that are compared before the first of them is used: the most whose differences are in memory."""


class WeightImage:
    """One thread calls `take` and `seal`, others `write`."""

    def __init__(self, specs: Sequence[WeightSpec], others: Mapping[str, bytes]) -> None:
        """`others`: the other files of the folder."""
        tensors = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
        }
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        plan = plan_files(sizes, 1, min_bytes=MAX_FILE_BYTES)
        if len(plan) > 1:
            others = {**others, INDEX: index_of(plan, sizes)}
        self._files: dict[str, NDArray[np.uint8]] = {
            name: np.frombuffer(bytearray(data), np.uint8) for name, data in others.items()
        }
        self._places: dict[str, tuple[str, int, Tensor]] = {}
        """Name of a weight -> its file, where it begins there, and its shape and dtype."""
        for file, names in plan.items():
            header, places = layout({name: tensors[name] for name in names})
            content = np.empty(max((end for _, end in places.values()), default=len(header)), np.uint8)
            content[: len(header)] = np.frombuffer(header, np.uint8)
            self._files[file] = content
            self._places |= {name: (file, begin, tensors[name]) for name, (begin, _) in places.items()}
        self._lock = threading.Lock()
        self._sealed: FolderList | None = None
        """Of the weights that `write` can write."""

    def take(self, weights: Iterator[tuple[str, Tensor]], *, compare: bool) -> Iterator[tuple[str, Piece, bytes]]:
        """Replace all weights. With `compare` it yields the file, the place and the difference of each block that has
        changed. WeightSyncError, after which the image is of no version, when they are other weights."""
        with self._lock:
            self._sealed = None
        waiting: deque[tuple[str, Piece, Future[bytes]]] = deque()
        missing = set(self._places)
        with ThreadPoolExecutor(thread_name_prefix="delta") as pool:
            for name, weight in weights:
                file, begin, expected = self._places.get(name, ("", 0, weight))
                if not file or (weight.shape, weight.dtype) != (expected.shape, expected.dtype):
                    what = f"{name} {weight.dtype} {list(weight.shape)}"
                    message = f"the engine yielded {what}, which its weight_specs lack"
                    raise WeightSyncError(message, code="weights.unexpected")
                missing.discard(name)
                content = content_of(weight)
                for piece in pieces(begin, begin + len(content), weight.element_size()):
                    old = self._files[file][piece.begin : piece.end]
                    new = content[piece.begin - begin : piece.end - begin]
                    waiting.append((file, piece, pool.submit(_replace, old, new, piece.width if compare else 0)))
                    if len(waiting) == _AHEAD:
                        yield from _changed(*waiting.popleft())
            while waiting:
                yield from _changed(*waiting.popleft())
        if missing:
            raise WeightSyncError(f"the engine yielded no {min(missing)}", code="weights.unexpected")

    def seal(self) -> FolderList:
        """After `take`: the list of the folder."""
        self._sealed = FolderList.of_contents({name: data.data for name, data in self._files.items()})
        return self._sealed

    def checksum(self) -> str:
        """After `take`: the checksum of the weights."""
        sums = WeightsChecksum()
        for name, weight in self.weights():
            sums.add(name, weight)
        return sums.hexdigest()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, as tensors over the bytes of this image."""
        for name, (file, begin, expected) in self._places.items():
            content = torch.from_numpy(self._files[file][begin : begin + expected.nbytes])
            yield name, content.view(expected.dtype).view(expected.shape)

    @property
    def contents(self) -> Mapping[str, NDArray[np.uint8]]:
        """The files, in the order of their names."""
        return dict(sorted(self._files.items()))

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._files.values()))

    def write(self, sealed: FolderList, folder: Path) -> None:
        """Write the folder unless it is there; nothing when newer weights were taken since `seal` returned `sealed`."""
        with self._lock:
            if self._sealed is sealed:
                write_folder(self._files, folder)


def sent_metrics(sent: float, full: float, ranks: Ranks) -> Metrics:
    """Of an update by differences. `sent`, `full`: bytes for a server with the version before, and of all weights."""
    count = float(ranks.rank == 0)
    return {
        "update_weights/bytes": Metric(sent, count),
        "update_weights/share_of_full": Metric(sent / max(full, 1.0), count),
    }


def _replace(old: NDArray[np.uint8], new: NDArray[np.uint8], width: int) -> bytes:
    """Copy `new` to `old`; returns the difference, for a width above 0."""
    packed = encode(words(old, width), words(new, width)) if width else b""
    np.copyto(old, new)
    return packed


def _changed(file: str, piece: Piece, packed: Future[bytes]) -> Iterator[tuple[str, Piece, bytes]]:
    if data := packed.result():
        yield file, piece, data
