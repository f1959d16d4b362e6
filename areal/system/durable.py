"""Durable files, which are written completely or not at all, and folders with a marker that proves completeness."""

import errno
import io
import json
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

COMPLETE = "COMPLETE"
"""Marker file of a complete folder: JSON {"files": {relative path: bytes}, "crc32": {relative path: number}}.
A file without an entry in "crc32" is not checked."""
_WRITING, _REPLACED, _REMOVED = ".writing", ".old", ".removed"
"""Endings of the hidden name of a folder while it is filled, replaced or deleted."""


def fsync_path(path: Path) -> None:
    """Make a file's content, or the names in a folder (new files, renames), survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_problem(folder: Path) -> str:
    """Why a folder cannot be written, or made where it is missing; empty when it can. Leaves nothing behind."""
    try:
        folder = folder.expanduser().absolute()
        parent = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryDirectory(dir=parent):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. OSError unless it is a regular file: opening a FIFO would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def write_atomic(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace the content of `path`. A reader sees the old or the new content, also after a crash.

    `mode`: permissions of the file before the umask; 0o600 = only for its user.
    """
    temporary = path.with_name(f".{uuid4().hex}.tmp")  # on a shared folder writers on two nodes may have one pid
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def rename(source: Path, target: Path) -> None:
    """Rename as `os.replace` does. A lost answer is no error: an NFS client repeats the call, and then gets ENOENT."""
    inode = source.stat().st_ino
    try:
        os.replace(source, target)
    except FileNotFoundError:
        if not (target.exists() and target.stat().st_ino == inode):
            raise


def append_whole(file: io.FileIO, data: bytes) -> None:
    """Append all of `data` or, after an OSError, nothing. One write to a nearly full disk may append a part of it."""
    start, rest = file.seek(0, os.SEEK_END), memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(start)
        raise


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file that this process does not hold open, or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        append_whole(file, line + b"\n")


def checksum_of(path: Path) -> int:
    """CRC-32 of a file."""
    result, buffer = 0, memoryview(bytearray(2**20))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            result = zlib.crc32(buffer[:size], result)
    return result


def seal_folder(
    folder: Path, checksums: Mapping[Path, int] | None = None, *, sum_up: bool = True, sync: bool = True
) -> None:
    """Sync everything in `folder` to disk and write its marker. Without `sync` it may be damaged by a power failure.

    Files in `checksums`, and in a subfolder with a marker, are on disk already. Every other file is read for its
    checksum, unless `sum_up` is False: then it has none.
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
                if sync:
                    fsync_path(path)
                if sum_up:
                    sums[name] = checksum_of(path)
            sizes[name] = path.stat().st_size
    marker = json.dumps({"files": sizes, "crc32": sums}).encode()
    if sync:
        write_atomic(folder / COMPLETE, marker)
        for subfolder in folders:
            fsync_path(subfolder)
    else:
        (folder / COMPLETE).write_bytes(marker)


def _marked_below(folder: Path) -> Iterator[tuple[str, int]]:
    for marker in folder.glob(f"*/**/{COMPLETE}"):
        below = marker.parent.relative_to(folder).as_posix()
        for name, value in json.loads(marker.read_bytes()).get("crc32", {}).items():
            yield f"{below}/{name}", value


def install_folder(sealed: Path, final: Path) -> None:
    """Rename a sealed folder to `final`, on the same file system. At any time `final` is absent or complete."""
    aside = _hidden(final, _REPLACED)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        rename(final, aside)
    rename(sealed, final)
    fsync_path(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def publish_folder(
    temporary: Path,
    final: Path,
    checksums: Mapping[Path, int] | None = None,
    *,
    sum_up: bool = True,
    sync: bool = True,
) -> None:
    """Turn the filled folder `temporary` into the complete folder `final`, on the same file system."""
    seal_folder(temporary, checksums, sum_up=sum_up, sync=sync)
    install_folder(temporary, final)


def remove_folder(folder: Path) -> None:
    """Delete a complete folder. After a crash it is complete or absent under its name."""
    hidden = _hidden(folder, _REMOVED)
    shutil.rmtree(hidden, ignore_errors=True)
    rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def finish_interrupted_writes(parent: Path) -> None:
    """Complete or undo the folder operations that a killed process left unfinished in `parent`.

    Only for the one process that writes there. A folder that was moved aside and not yet replaced is restored.
    """
    for aside in parent.glob(f".*{_REPLACED}"):
        final = parent / aside.name[1 : -len(_REPLACED)]
        if not final.exists():
            rename(aside, final)
    for hidden in parent.glob(".*"):
        if hidden.is_dir() and hidden.suffix in (_REPLACED, _REMOVED, _WRITING):
            shutil.rmtree(hidden, ignore_errors=True)


def writing_folder(final: Path, attempt: str = "") -> Path:
    """The folder to fill before `publish_folder` makes it `final`.

    Machines that fill it together choose a new `attempt` each time: for some time an NFS client takes a known name for
    what it was before, such as the folder that was renamed.
    """
    return _hidden(final, f".{attempt}{_WRITING}" if attempt else _WRITING)


def remove_unfinished(final: Path) -> None:
    """Delete what earlier attempts to write `final` left."""
    for hidden in final.parent.glob(f".{escape(final.name)}.*"):
        if hidden.suffix == _WRITING:
            shutil.rmtree(hidden, ignore_errors=True)


def _hidden(folder: Path, ending: str) -> Path:
    return folder.with_name(f".{folder.name}{ending}")


def _manifest(folder: Path) -> dict[str, Any]:
    """The marker's content. ValueError when it is malformed."""
    with open_regular(folder / COMPLETE) as file:
        result = json.loads(file.read())
    if not isinstance(result, dict) or not isinstance(result["files"], dict):
        raise ValueError("it has no list of files")
    return result


def is_complete(folder: Path) -> bool:
    """Whether the marker exists and every listed file has the listed size. Reads only the marker."""
    try:
        return all((folder / name).stat().st_size == size for name, size in _manifest(folder)["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def damage_of(folder: Path, *, part: int = 0, parts: int = 1) -> str:
    """How a published folder differs from its marker; empty when it does not.

    Reads every `parts`-th file from number `part` on, so that several readers can share the work.
    """
    try:
        manifest = _manifest(folder)
        sizes, sums = manifest["files"], manifest.get("crc32", {})
        for name, size in sizes.items():
            size_on_disk = (folder / name).stat().st_size
            if size_on_disk != size:
                return f"{name} has {size_on_disk} bytes instead of {size}"
        for name in sorted(sums)[part::parts]:
            if checksum_of(folder / name) != sums[name]:
                return f"{name} has changed since it was written (its checksum differs)"
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {COMPLETE} marker cannot be read: {error}"
    return ""
