"""The list of a folder's files with a checksum of each block, by which a copy of the folder is verified."""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Self

from areal.api.errors import InputError
from areal.system.durable import COMPLETE

BLOCK_BYTES = 16 * 2**20
"""Unit of verification: a block with a wrong checksum is sent again alone."""

new_sum: Callable[[], "hashlib._Hash"] = hashlib.sha256  # pyright: ignore[reportPrivateUsage]
"""The checksum of a block, and of the list itself; hashlib releases the interpreter lock meanwhile."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    name: str
    num_bytes: int
    sums: list[str]
    """Of each block of `FolderList.block_bytes`, hexadecimal; the last block may be shorter."""


@dataclass(frozen=True, slots=True)
class FolderList:
    block_bytes: int
    files: list[ListedFile]

    @classmethod
    def of(cls, folder: Path, block_bytes: int = BLOCK_BYTES) -> Self:
        """Read every file of a folder, which has no subfolders. The marker of a complete folder is left out."""
        files: list[ListedFile] = []
        with ThreadPoolExecutor(thread_name_prefix="checksums") as pool:
            for path in sorted(path for path in folder.iterdir() if path.name != COMPLETE):
                size = path.stat().st_size
                sums = pool.map(partial(_sum_at, path, block_bytes), range(0, size, block_bytes))
                files.append(ListedFile(path.name, size, list(sums)))
        return cls(block_bytes, files)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """InputError unless it is a list whose names are those of files in one folder."""
        try:
            found = json.loads(data)
            made = cls(int(found["block_bytes"]), [ListedFile(**entry) for entry in found["files"]])
            for file in made.files:
                plain = bool(file.name) and "/" not in file.name and not file.name.startswith(".")
                if not plain or len(file.sums) != -(-file.num_bytes // made.block_bytes):
                    raise ValueError(f"the entry of {file.name[:100]!r} is not one of a file")
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
            raise InputError(f"a list of files cannot be read: {error}", code="weights.pull_failed") from error
        return made

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def sum_of(data: bytes) -> str:
    found = new_sum()
    found.update(data)
    return found.hexdigest()


def _sum_at(path: Path, block_bytes: int, start: int) -> str:
    found, rest = new_sum(), block_bytes
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while rest and (piece := file.read(min(rest, 2**20))):
            found.update(piece)
            rest -= len(piece)
    return found.hexdigest()
