"""Weights in memory as the files of their folder: all of them, or the part of one trainer rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal.api.data import WeightSpec
from areal.api.errors import WeightSyncError
from areal.models.checkpoint_files import INDEX, PUBLISHED_FILE_BYTES
from areal.system.folder_delta import Change, Piece, byte_threads, encode, pieces, words
from areal.system.folders import FolderList
from areal.weights.weight_files import content_of, index_of, layout, plan_files

_AHEAD = 64
"""Blocks that are compared before the first of them is used: the most whose differences are in memory."""


class WeightImage:
    """One thread calls `take`."""

    def __init__(
        self, specs: Sequence[WeightSpec], others: Mapping[str, bytes], *, part: int = 0, num_parts: int = 1
    ) -> None:
        """`others`: the other files of the folder. Part i of `num_parts` has the weight files i, i + `num_parts`, ...,
        and part 0 also the others."""
        self._expected = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
        }
        sizes = {name: tensor.nbytes for name, tensor in self._expected.items()}
        plan = plan_files(sizes, 1, max_file_bytes=PUBLISHED_FILE_BYTES)
        if len(plan) > 1:
            others = {**others, INDEX: index_of(plan, sizes)}
        self._files: dict[str, NDArray[np.uint8]] = {
            name: np.frombuffer(bytearray(data), np.uint8) for name, data in others.items() if part == 0
        }
        self._places: dict[str, tuple[str, int]] = {}
        """Name of a weight of this part -> its file, and where it begins there."""
        for file in list(plan)[part::num_parts]:
            header, places = layout({name: self._expected[name] for name in plan[file]})
            content = np.empty(max((end for _, end in places.values()), default=len(header)), np.uint8)
            content[: len(header)] = np.frombuffer(header, np.uint8)
            self._files[file] = content
            self._places |= {name: (file, begin) for name, (begin, _) in places.items()}

    def take(self, weights: Iterator[tuple[str, Tensor]], *, compare: bool) -> Iterator[Change]:
        """Replace all weights of this part; reads all `weights`. With `compare` it yields each block that has changed.
        WeightSyncError, after which the image is of no version, when they are other weights than `specs`."""
        waiting: deque[tuple[str, Piece, Future[bytes]]] = deque()
        missing = set(self._expected)
        with byte_threads() as pool:
            for name, weight in weights:
                expected = self._expected.get(name)
                if expected is None or (weight.shape, weight.dtype) != (expected.shape, expected.dtype):
                    what = f"{name} {weight.dtype} {list(weight.shape)}"
                    message = f"the engine yielded {what}, which its weight_specs lack"
                    raise WeightSyncError(message, code="weights.unexpected")
                missing.discard(name)
                if name not in self._places:
                    continue
                (file, begin), content = self._places[name], content_of(weight)
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

    def listed(self) -> FolderList:
        """The list of the files. It reads all of them."""
        return FolderList.of_contents({name: data.data for name, data in self._files.items()})

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of this part, as tensors over the bytes of this image."""
        for name, (file, begin) in self._places.items():
            expected = self._expected[name]
            content = torch.from_numpy(self._files[file][begin : begin + expected.nbytes])
            yield name, content.view(expected.dtype).view(expected.shape)

    @property
    def contents(self) -> Mapping[str, NDArray[np.uint8]]:
        """The files, in the order of their names."""
        return dict(sorted(self._files.items()))


def _replace(old: NDArray[np.uint8], new: NDArray[np.uint8], width: int) -> bytes:
    """Copy `new` to `old`; returns the difference, for a width above 0."""
    packed = encode(words(old, width), words(new, width)) if width else b""
    np.copyto(old, new)
    return packed


def _changed(file: str, piece: Piece, packed: Future[bytes]) -> Iterator[Change]:
    if data := packed.result():
        yield file, piece, data
