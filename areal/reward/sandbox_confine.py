"""Owns what a sandbox's process does to itself before a foreign program runs in it: namespaces, limits, no privileges.

Only Linux has the namespaces and the filter of system calls; elsewhere, and where the machine forbids them, the limits
alone remain. What could not be had is reported, never passed over.
"""

from __future__ import annotations

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


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user")]


def enter_namespaces(folder: str, folder_bytes: int) -> None:
    """Leave the machine behind: no network, nothing to write to but an empty `folder`, no other process to be seen.

    Process ids are new for children only: fork next. OSError when the machine forbids one of it; a part may then
    have been done.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

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
    # Devices are barred too: a disk may belong to the user whose processes these are.
    set_attributes("/", _AT_RECURSIVE, set=_ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    set_attributes("/dev/null", 0, clear=_ATTR_RDONLY | _ATTR_NODEV)
    size = f"size={folder_bytes},nr_inodes=1000,mode=0700"
    mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, size)
    mount("tmpfs", "/proc", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "size=4096,nr_inodes=1,mode=0500")


def leave_folder(folder: str) -> None:
    """Take the file system in memory off its folder, which can then be removed. Once nobody works in it."""
    ctypes.CDLL(None).umount2(folder.encode(), _MNT_DETACH)


def remove_folder(folder: str) -> None:
    """Remove a folder that a program wrote to, however deep it is and whatever may not be read in it.

    Once nobody works in it. shutil's way recurses, and gives up on folders without permissions.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

    def opened(name: str, within: int | None) -> tuple[int, list[str]]:
        """A folder without its files, and the names of the folders in it."""
        os.chmod(name, 0o700, dir_fd=within)
        here = os.open(name, flags, dir_fd=within)
        with os.scandir(here) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in found:
            if not is_folder:
                os.unlink(name, dir_fd=here)
        return here, [name for name, is_folder in found if is_folder]

    try:
        here, names = opened(folder, None)
        way = [("", names)]
        while way:
            name, names = way[-1]
            if names:
                outer, below = here, names.pop()
                here, inside = opened(below, outer)
                way.append((below, inside))
            else:
                way.pop()
                outer = here
                if way:
                    here = os.open("..", flags, dir_fd=outer)
                    os.rmdir(name, dir_fd=here)
            os.close(outer)
        os.rmdir(folder)
    except OSError:
        return  # gone already, or somebody else's by now


def set_limits(limits: dict[str, Any]) -> None:
    """Bound processor time, memory, files; for this process and all it starts."""
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
    """Give up all privileges of a superuser, of the machine or of the namespaces. OSError when refused."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc.capset(header, nothing) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
