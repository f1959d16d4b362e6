"""The image files of a run: PNG files named by their content, which trajectories refer to."""

import hashlib
import re
from collections.abc import Collection
from pathlib import Path

from areal.api.errors import InputError
from areal.system.durable import fsync_path, open_regular, write_atomic

_NAME = re.compile(r"[0-9a-f]{64}\.png")


class ImageFiles:
    """A folder of PNG files. Several processes may write and read it; a file that exists is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._durable: set[str] = set()
        """Of the files that this process has synced to disk: another one may have ended before it did."""

    def path(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / f"{sha256}.png"

    def put(self, png: bytes) -> str:
        """Store a file, unless it is there, and sync it to disk; returns its digest. Raises OSError."""
        digest = hashlib.sha256(png).hexdigest()
        path = self.path(digest)
        if digest in self._durable and path.exists():
            return digest
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            fsync_path(path)
            fsync_path(path.parent)
        else:
            write_atomic(path, png)
        fsync_path(self.folder)
        self._durable.add(digest)
        return digest

    def read(self, sha256: str) -> bytes:
        """The file with this digest. Raises InputError when it is missing or was changed."""
        try:
            with open_regular(self.path(sha256)) as file:
                png = file.read()
        except OSError as error:
            text = f"image {sha256} cannot be read: {error}"
            raise InputError(text, code="data.image_missing") from error
        if hashlib.sha256(png).hexdigest() != sha256:
            text = f"image file {self.path(sha256)} has changed since it was written (its digest differs)"
            raise InputError(text, code="data.image_changed")
        return png

    def unreachable(self, kept: Collection[str]) -> list[Path]:
        """The files whose digests are not in `kept`, sorted. No file that is being written."""
        files = (path for path in self.folder.glob("*/*.png") if _NAME.fullmatch(path.name))
        return sorted(path for path in files if path.stem not in kept)

    def delete_incomplete(self) -> int:
        """Delete what writers left that were killed; returns their number. Call it while no other process writes."""
        found = list(self.folder.glob("*/.*.tmp"))
        for path in found:
            path.unlink(missing_ok=True)
        return len(found)


class MemoryImages:
    """The same for images that are needed once more only, such as those of rows that the trainer reads itself."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def put(self, png: bytes) -> str:
        digest = hashlib.sha256(png).hexdigest()
        self._files[digest] = png
        return digest

    def read(self, sha256: str) -> bytes:
        """Raises InputError for an image that was not put since the last `clear`."""
        if sha256 not in self._files:
            raise InputError(f"image {sha256} is not in memory", code="data.image_missing")
        return self._files[sha256]

    def clear(self) -> None:
        self._files.clear()
