"""Confines a sandbox process before a foreign program runs in it: namespaces, resource limits, no privileges.

Only Linux has the namespaces and the filter of system calls. On other systems, and where the machine forbids them, only
the resource limits apply. A protection that cannot be set up raises OSError; it is never skipped silently.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys

TYPE_CHECKING = False  # typing itself takes longer to load than the rest of this file
if TYPE_CHECKING:
    from typing import Any

_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Mounts, host name, System V memory, users, process ids, network."""
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE, _SYS_MOUNT_SETATTR = -100, 0x8000, 442
_MNT_DETACH = 2
_INSIDE_ID = 1000
_CAPABILITY_VERSION_3 = 0x20080522


def check(result: int) -> None:
    """OSError with errno of the last call through ctypes, unless its result is 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user")]


def enter_namespaces(folder: str, folder_bytes: int) -> None:
    """Enter new namespaces: no network, no other process visible, every file system read-only except an empty `folder`
    of `folder_bytes` in memory.

    The process namespace applies to children only: fork next. OSError when the machine forbids a step; earlier steps
    then remain done.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        check(libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()))

    def set_attributes(path: str, flags: int, *, set: int = 0, clear: int = 0) -> None:
        attributes = _MountAttributes(set, clear, 0, 0)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        where = (ctypes.c_int(_AT_FDCWD), path.encode(), ctypes.c_uint(flags))
        check(libc.syscall(ctypes.c_long(_SYS_MOUNT_SETATTR), *where, ctypes.byref(attributes), size))

    user, group = os.getuid(), os.getgid()
    check(libc.unshare(ctypes.c_int(_NEW_NAMESPACES)))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INSIDE_ID} {user} 1"),
        ("gid_map", f"{_INSIDE_ID} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    mount("/dev/null", "/dev/null", "", _MS_BIND)
    # Devices are blocked too: the user who runs areal may own a disk device.
    set_attributes("/", _AT_RECURSIVE, set=_ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    set_attributes("/dev/null", 0, clear=_ATTR_RDONLY | _ATTR_NODEV)
    size = f"size={folder_bytes},nr_inodes=1000,mode=0700"
    mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, size)
    mount("tmpfs", "/proc", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "size=4096,nr_inodes=1,mode=0500")


def leave_folder(folder: str) -> None:
    """Unmount the file system in memory from its folder, so that the folder can be removed."""
    ctypes.CDLL(None).umount2(folder.encode(), _MNT_DETACH)


def remove_folder(folder: str) -> None:
    """Remove a folder that a program wrote to, when no process uses it any more.

    Folders inside are emptied by moving their contents up: shutil.rmtree recurses, so it fails on very deep folders,
    and it fails on folders without permissions. An OSError (no such folder, another owner) is ignored.
    """
    prefix, moved = os.urandom(8).hex(), 0
    with contextlib.suppress(OSError):
        while names := os.listdir(folder):
            for path in (os.path.join(folder, name) for name in names):
                if os.path.islink(path) or not os.path.isdir(path):
                    os.unlink(path)
                    continue
                os.chmod(path, 0o700)
                for inner in os.scandir(path):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)  # moving a folder writes to it
                    moved += 1
                    os.rename(inner.path, os.path.join(folder, f"{prefix}-{moved}"))
                os.rmdir(path)
        os.rmdir(folder)


def set_limits(limits: dict[str, Any]) -> None:
    """Limit processor time, memory and files of this process and its children."""
    for kind, value in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def drop_capabilities() -> None:
    """Drop all superuser privileges, on the machine and in the namespaces. OSError when refused."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    check(libc.capset(header, nothing))
