"""Owns durable files: written whole or not at all, and folders that say themselves whether they are complete."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from areal.api.errors import InputError

COMPLETE = "COMPLETE"
"""Marker file of a complete folder: JSON {"files": {relative path: size in bytes}}."""


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


def publish_folder(temporary: Path, final: Path) -> None:
    """Turn the filled folder `temporary` into the complete folder `final`, on the same file system.

    An older `final` is moved aside before and deleted after, so `final` is always absent or complete.
    """
    sizes: dict[str, int] = {}
    folders = {temporary}
    for path in sorted(temporary.rglob("*")):
        if path.is_dir():
            folders.add(path)
        elif path != temporary / COMPLETE:
            _fsync_file(path)
            sizes[path.relative_to(temporary).as_posix()] = path.stat().st_size
    write_atomic(temporary / COMPLETE, json.dumps({"files": sizes}).encode())
    for folder in folders:
        fsync_dir(folder)
    aside = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        os.replace(final, aside)
    os.replace(temporary, final)
    fsync_dir(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """True when the marker is there and every file it lists has the size it lists."""
    try:
        manifest = json.loads((folder / COMPLETE).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def require_complete(folder: Path) -> None:
    """Raise InputError unless `folder` is complete."""
    if not is_complete(folder):
        raise InputError(f"{folder} is not a complete folder (its {COMPLETE} marker is missing or does not match)")
