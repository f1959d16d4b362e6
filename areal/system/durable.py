"""Owns durable files: written whole or not at all, and folders that say themselves whether they are complete."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

COMPLETE = "COMPLETE"
"""Marker file of a complete folder: JSON {"files": {relative path: bytes}, "crc32": {relative path: number}}. "crc32"
may list fewer files or be absent: what it does not list is not checked."""
_CHUNK_BYTES = 2**20
_WRITING, _REPLACED, _REMOVED = ".writing", ".old", ".removed"
"""Endings of the hidden names of a folder that is being filled, was replaced, is being deleted."""


def fsync_dir(folder: Path) -> None:
    """Make the names inside `folder` (new files, renames) survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, even after a crash, sees the old or the new content whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def checksum_of(path: Path) -> int:
    """CRC-32 of a file, read once in small pieces."""
    found, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            found = zlib.crc32(buffer[:size], found)
    return found


def seal_folder(folder: Path, checksums: Mapping[Path, int] | None = None, *, sum_up: bool = True) -> None:
    """Put everything in `folder` on disk and write its marker.

    `checksums`: of files that whoever wrote them has summed up and put on disk already. The same goes for what lies in
    a subfolder with a marker of its own; every other file is read once, unless `sum_up` is False: then it has none.
    """
    known = {folder / name: value for name, value in _marked_below(folder)} | dict(checksums or {})
    sizes: dict[str, int] = {}
    sums: dict[str, int] = {}
    folders = {folder}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            folders.add(path)
        elif path != folder / COMPLETE:
            name = path.relative_to(folder).as_posix()
            if path in known:
                sums[name] = known[path]
            else:
                _fsync_file(path)
                if sum_up:
                    sums[name] = checksum_of(path)
            sizes[name] = path.stat().st_size
    write_atomic(folder / COMPLETE, json.dumps({"files": sizes, "crc32": sums}).encode())
    for found in folders:
        fsync_dir(found)


def _marked_below(folder: Path) -> Iterator[tuple[str, int]]:
    for marker in folder.glob(f"*/**/{COMPLETE}"):
        below = marker.parent.relative_to(folder).as_posix()
        for name, value in json.loads(marker.read_bytes()).get("crc32", {}).items():
            yield f"{below}/{name}", value


def install_folder(sealed: Path, final: Path) -> None:
    """Rename a sealed folder to `final`, on the same file system.

    An older `final` is moved aside before and deleted after, so `final` is always absent or complete.
    """
    aside = _hidden(final, _REPLACED)
    if final.exists():
        _delete(aside)
        os.replace(final, aside)
    os.replace(sealed, final)
    fsync_dir(final.parent)
    _delete(aside)


def publish_folder(
    temporary: Path, final: Path, checksums: Mapping[Path, int] | None = None, *, sum_up: bool = True
) -> None:
    """Turn the filled folder `temporary` into the complete folder `final`, on the same file system."""
    seal_folder(temporary, checksums, sum_up=sum_up)
    install_folder(temporary, final)


def remove_folder(folder: Path) -> None:
    """Delete a complete folder so that a crash on the way never leaves half of it under its name."""
    hidden = _hidden(folder, _REMOVED)
    _delete(hidden)
    os.replace(folder, hidden)
    _delete(hidden)


def finish_interrupted_writes(parent: Path) -> None:
    """Bring to an end what a writer was killed in; for the one process that writes in `parent`, before it does.

    A folder that was moved aside, but not yet replaced, comes back.
    """
    for aside in parent.glob(f".*{_REPLACED}"):
        final = parent / aside.name[1 : -len(_REPLACED)]
        if not final.exists():
            os.replace(aside, final)
    for hidden in parent.glob(".*"):
        if hidden.is_dir() and hidden.suffix in (_REPLACED, _REMOVED, _WRITING):
            _delete(hidden)


def writing_folder(final: Path) -> Path:
    """Where a folder is filled before it is published as `final`."""
    return _hidden(final, _WRITING)


def _hidden(folder: Path, ending: str) -> Path:
    return folder.with_name(f".{folder.name}{ending}")


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _manifest(folder: Path) -> dict[str, Any]:
    """The marker's content; ValueError when it is none."""
    found = json.loads((folder / COMPLETE).read_bytes())
    if not isinstance(found, dict) or not isinstance(found["files"], dict):
        raise ValueError("it lists no files")
    return found


def is_complete(folder: Path) -> bool:
    """True when the marker is there and every file it lists has the size it lists. Reads no file but the marker."""
    try:
        return all((folder / name).stat().st_size == size for name, size in _manifest(folder)["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def damage_of(folder: Path, *, part: int = 0, parts: int = 1) -> str:
    """What is wrong with a published folder, "" when nothing is: reads everything and compares with the marker.

    Several readers share the work: of all files this one reads every `parts`-th, beginning with number `part`.
    """
    try:
        manifest = _manifest(folder)
        sizes, sums = manifest["files"], manifest.get("crc32", {})
        for name, size in sizes.items():
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
        for name in sorted(sums)[part::parts]:
            if checksum_of(folder / name) != sums[name]:
                return f"{name} is not what was written (its checksum differs)"
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {COMPLETE} marker cannot be read: {error}"
    return ""
