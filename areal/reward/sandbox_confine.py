"""Confines a sandbox process before a foreign program runs in it: namespaces, resource limits, a seccomp filter.

Only Linux has namespaces and the filter. The filter refuses new processes and programs (threads are allowed), signals
and other access to processes, sockets, mounts, namespaces and administration; every other call is allowed. A protection
that cannot be set up raises OSError; it is never skipped silently.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import struct
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

FILTERED_MACHINE = "x86_64"
"""The only machine with a table of system calls; sandboxes on others use bubblewrap or a remote service."""
_AUDIT_ARCHITECTURE = 0xC000003E
_REFUSED = {
    "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "kill": 62, "tkill": 200, "tgkill": 234,
    "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd":
    438, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "setsid": 112, "setpgid": 109,
    "process_madvise": 440, "process_mrelease": 448, "kcmp": 312, "setpriority": 141, "ioprio_set": 251,
    "sched_setparam": 142, "sched_setscheduler": 144, "sched_setattr": 314, "sched_setaffinity": 203,
    "migrate_pages": 256, "move_pages": 279, "socket": 41, "mount": 165, "umount2": 166, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "name_to_handle_at": 303, "open_by_handle_at":
    304, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "bpf": 321, "perf_event_open": 298,
    "userfaultfd": 323, "personality": 135, "add_key": 248, "request_key": 249, "keyctl": 250, "init_module": 175,
    "finit_module": 313, "delete_module": 176, "kexec_load": 246, "reboot": 169, "swapon": 167, "swapoff": 168,
    "acct": 163, "quotactl": 179, "settimeofday": 164, "clock_settime": 227, "sethostname": 170, "setdomainname":
    171,
}  # fmt: skip
_UNKNOWN = {
    "clone3": 435,  # a filter cannot read its flags, which are in memory; the C library then uses clone
    "io_uring_setup": 425,  # could make refused calls for a program
    "io_uring_enter": 426,
    "io_uring_register": 427,
}
"""Answered with ENOSYS, as by a kernel that does not have them, so that libraries use their fallback."""
_CLONE, _PRCTL, _PRLIMIT = 56, 157, 302
_CLONE_THREAD = 0x10000
_FCNTL, _IOCTL, _SOCKETPAIR = 72, 16, 53
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 8, 10, 15, 0x8901, 0x8902
"""They choose a signal and the process that gets it when a descriptor is ready, such as SIGKILL for the worker."""
_NOT_A_STREAM = 0xE
"""Bits of a socket's type that SOCK_STREAM does not set. A datagram socket could send to any other by its path."""
_FOREIGN_CALLS = 0x40000000  # Numbers from here on are the x32 versions of the calls above.

_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2


def check(result: int) -> None:
    """OSError with errno of the last call through ctypes, unless its result is 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user")]


def enter_namespaces(folder: str, folder_bytes: int, visible: list[str]) -> None:
    """Enter new namespaces: no network, no other process visible, and a new root that contains only `visible` (files
    and folders, read-only), /dev/null, an empty /proc, and /tmp of `folder_bytes` in memory. `folder` is an empty
    folder, on which the new root is mounted.

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
    maps = {"setgroups": "deny", "uid_map": f"{_INSIDE_ID} {user} 1", "gid_map": f"{_INSIDE_ID} {group} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,nr_inodes=1000,mode=0755")
    os.mkdir(f"{folder}/tmp")  # first: Python may be installed below /tmp
    mount("tmpfs", f"{folder}/tmp", "tmpfs", _MS_NOEXEC, f"size={folder_bytes},nr_inodes=1000,mode=0700")
    for path in ["/dev/null", *visible]:
        target = folder + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT, 0o600))
        mount(path, target, "", _MS_BIND | _MS_REC)
    os.makedirs(f"{folder}/proc", exist_ok=True)
    # Devices are blocked too: the user who runs areal may own a disk device.
    set_attributes(folder, _AT_RECURSIVE, set=_ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    set_attributes(f"{folder}/dev/null", 0, clear=_ATTR_RDONLY | _ATTR_NODEV)
    set_attributes(f"{folder}/tmp", 0, clear=_ATTR_RDONLY)
    os.chdir(folder)
    check(libc.pivot_root(b".", b"."))  # the old root is now mounted on top of the new one
    check(libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


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


def refuse_system_calls() -> None:
    """Install the filter for the rest of this process. OSError when this kernel or machine does not support it."""
    if (machine := os.uname().machine) != FILTERED_MACHINE:
        raise OSError(errno.ENOTSUP, f"no table of system calls for {machine}")
    program = _filter_program()
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    for option, value, pointer in (
        (_PR_SET_NO_NEW_PRIVS, 1, None),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header)),
    ):
        check(libc.prctl(option, value, pointer, 0, 0))


def _filter_program() -> bytes:
    """The filter in the kernel's classic BPF, 8 bytes an instruction."""
    refuse, unknown = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, _AUDIT_ARCHITECTURE),
        (_RETURN, 0, 0, refuse),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _FOREIGN_CALLS),
        (_RETURN, 0, 0, unknown),
    ]
    for table, answer in ((_REFUSED, refuse), (_UNKNOWN, unknown)):
        for number in table.values():
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    # Calls whose answer depends on an argument. For other calls the filter jumps over these steps.
    for number, test, value, when_true, when_false in (
        (_CLONE, _HAS_BIT, _CLONE_THREAD, _ALLOW, refuse),
        (_PRCTL, _EQUAL, _PR_SET_PDEATHSIG, refuse, _ALLOW),  # would keep it alive after its keeper
        (_PRLIMIT, _EQUAL, 0, _ALLOW, refuse),  # of itself only
    ):
        steps += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
            (test, 0, 1, value),
            (_RETURN, 0, 0, when_true),
            (_RETURN, 0, 0, when_false),
        ]
    for number, test, refused in (
        (_FCNTL, _EQUAL, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX)),
        (_IOCTL, _EQUAL, (_FIOSETOWN, _SIOCSPGRP)),
        (_SOCKETPAIR, _HAS_BIT, (_NOT_A_STREAM,)),
    ):
        steps += [(_EQUAL, 0, 2 * len(refused) + 2, number), (_LOAD, 0, 0, _SECOND_ARGUMENT_AT)]
        for value in refused:
            steps += [(test, 0, 1, value), (_RETURN, 0, 0, refuse)]
        steps.append((_RETURN, 0, 0, _ALLOW))
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
