"""Everything that runs inside a sandbox. It imports the standard library only: a remote service gets just this file.

A sandbox on this machine is started as `python -m areal.reward.sandbox_inside CHANNEL PARENT_PID`; CHANNEL is the
descriptor of a socket, on which one line of JSON says what to run. It has two processes. The keeper, which the reward
worker starts, runs no foreign code: it waits for the end of the other one, for SIGTERM (also sent by the kernel when
the reward worker dies) or for the end of `keep_s`; then it kills every process below it and exits with the program's
exit code. The other process confines itself and plays a role: a whole program, a server of a program's functions, or
the assertion checker. The assertion checker never shares a process with the program. It calls the program's functions
by messages and gets plain values back, so a program can change neither the assertions nor the meaning of equality.
Messages are lines of JSON:

    to the program   {"op", "target": name or number of an object, "args", "kwargs"}
    its answer       {"value"} or {"error": [kind, text]}
    to the checker   {"test": source, "names": {name in the test: name in the program}, "modules": {name: module}}
    its answer       any number of messages to the program, then {"passed": bool}

Plain data (numbers, text, bytes, None, lists, tuples, sets, dicts, their subclasses, numpy values) arrives as plain
data. Any other object stays in its process and arrives as a number, so no message can carry code.

Only Linux has namespaces and the seccomp filter. The filter refuses new processes and programs (threads are allowed),
signals and other access to processes, sockets, mounts, namespaces and administration; every other call is allowed. A
protection that cannot be set up raises OSError; it is never skipped silently.

Without arguments (on a remote service) this file runs one test of functions: the program runs in a child process, which
is forked before this one reads the test. The child holds no descriptor of this process except a socket, and cannot
inspect it.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import importlib
import json
import operator
import os
import resource
import runpy
import signal
import struct
import sys
import time
from functools import partial
from importlib.machinery import SourceFileLoader
from types import ModuleType

TYPE_CHECKING = False  # importing typing takes longer than the rest of this file
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
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
        (_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, _AUDIT_ARCHITECTURE), (_RETURN, 0, 0, refuse),
        (_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, 0, 1, _FOREIGN_CALLS), (_RETURN, 0, 0, unknown),
    ]  # fmt: skip
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


def main(argv: list[str]) -> NoReturn:
    if not argv:
        drive()
    channel, parent = int(argv[0]), int(argv[1])
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # for sigtimedwait; the program unblocks them
    with open(channel, "rb", closefd=False) as lines:  # one line: the sender then waits for the answer
        line = lines.readline()
    if not line:
        os._exit(1)
    orders = json.loads(line)
    limits, folder = orders["limits"], orders["folder"]
    outside = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY)  # opened now: later it is hidden
    enter = partial(enter_namespaces, folder, limits["folder_bytes"], orders["visible"])
    if orders["isolate"] and (problem := _problem_of(enter)):
        _refuse(channel, f"namespaces: {problem}")
    _end_with(parent, signal.SIGTERM)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(outside)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        _end_with(keeper, signal.SIGKILL)
        _run(orders, channel)
    os.close(channel)
    status = _keep(child, until_s=time.monotonic() + orders["keep_s"])
    _sweep()
    # The reward worker removes the folder too, unless it was killed.
    if orders["isolate"]:
        with contextlib.suppress(OSError):
            os.rmdir(os.path.basename(folder), dir_fd=outside)
    else:
        remove_folder(folder)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _problem_of(step: Any) -> str:
    """Why a step of the confinement failed; empty = it succeeded."""
    if sys.platform != "linux":
        return f"not on {sys.platform}"
    try:
        step()
    except OSError as error:
        return f"{error.strerror or error}"
    return ""


def _refuse(channel: int, problem: str) -> NoReturn:
    """Report that a protection is missing, and exit without running the program."""
    os.write(channel, json.dumps({"missing": problem}).encode() + b"\n")
    os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _end_with(parent: int, number: int) -> None:
    """Get a signal when the parent process ends; exit now when it has already ended."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() not in (parent, 0):  # 0 = outside this process namespace
        os._exit(1)


def _keep(child: int, *, until_s: float) -> int:
    """Wait for the program's end; kill it on SIGTERM or at `until_s`. Returns its wait status."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    while True:
        got = signal.sigtimedwait({signal.SIGTERM, signal.SIGCHLD}, max(0.0, until_s - time.monotonic()))
        if got is None or got.si_signo == signal.SIGTERM:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return status


def _sweep() -> None:
    """Kill all descendants: the orphans of a killed process become children of this one, and are killed next."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
                children = [int(text) for text in file.read().split()]
        except OSError:
            children = []  # in namespaces no process is left, and /proc is hidden
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0 if children else os.WNOHANG)
        except ChildProcessError:
            return
        if not children:
            return


def _run(orders: dict[str, Any], channel: int) -> NoReturn:
    """Confine this process and run the program in its role; exits with the program's exit code."""
    home = "/tmp" if orders["isolate"] else orders["folder"]
    os.chdir(home)
    with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(orders["source"])
    os.environ.clear()
    os.environ.update({"HOME": home, "TMPDIR": home, "OPENBLAS_NUM_THREADS": "1"})
    sys.path[:] = [path for path in sys.path if path != orders["root"]] + orders["packages"]
    sys.dont_write_bytecode = True
    sys.set_int_max_str_digits(0)
    set_limits(orders["limits"])
    drop_capabilities()
    if orders["refuse"] and (problem := _problem_of(refuse_system_calls)):
        _refuse(channel, f"system calls: {problem}")
    if orders["role"] == "checker":
        _prctl(_PR_SET_DUMPABLE, 0)  # without namespaces the program could read the tests in this process's memory
    os.write(channel, b'{"missing": ""}\n')
    builtins.exit = builtins.quit = sys.exit  # pyright: ignore[reportAttributeAccessIssue] - as in a script
    if orders["role"] == "program":
        os.close(channel)
        sys.argv[:] = ["program.py"]
        runpy.run_path("program.py", run_name="__main__")
    elif orders["role"] == "functions":
        Functions(channel).serve()
    else:
        AssertionChecker(Lines(channel)).serve()
    sys.exit(0)


def drive() -> NoReturn:
    """Run one test of functions on a remote service: the program is program.py, the test a line of standard input."""
    import shutil
    import socket
    import tempfile

    with open("program.py", encoding="utf-8") as file:
        source = file.read()
    _prctl(_PR_SET_DUMPABLE, 0)  # before the program could open this process's memory
    ours, theirs = socket.socketpair()
    home = tempfile.mkdtemp()
    child = os.fork()
    if child == 0:
        ours.close()
        _run_remote(theirs.detach(), source, home)
    theirs.close()
    job = json.loads(sys.stdin.readline())
    result = _outcome(Lines(ours.fileno()), job)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    shutil.rmtree(home, ignore_errors=True)
    sys.stdout.write(f"\n{job['nonce']}{json.dumps(result)}\n")
    sys.exit(0)


def _outcome(lines: Lines, job: dict[str, Any]) -> dict[str, Any]:
    """The result of one test; {"failed": true} = the program does not load."""
    answer = lines.read()
    if not isinstance(answer, dict) or "value" not in answer:
        return {"failed": True}
    if "order" in job:
        return {"passed": AssertionChecker(lines).passes(job["order"])}
    lines.write(job["question"])
    return {"answer": lines.read()}


def _run_remote(channel: int, source: str, home: str) -> None:
    try:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.dup2(channel, 3)
        os.closerange(4, 1 << 16)
        os.chdir(home)
        with open("program.py", "w", encoding="utf-8") as file:
            file.write(source)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        drop_capabilities()  # root, too, can then not inspect the process above
        with contextlib.suppress(OSError):  # other machines have no table of system calls
            refuse_system_calls()
        sys.path[0] = home
        sys.argv[:] = ["program.py"]
        Functions(3).serve()
    finally:
        os._exit(0)


_LONG_INT_BITS = 10_000  # Longer integers are sent in hexadecimal: Python refuses to read them as decimals.


def encoded(value: Any, keep: Callable[[Any], int]) -> Any:
    """`value` as JSON data; `keep` stores an object that cannot be sent and returns its number."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if number.bit_length() < _LONG_INT_BITS else {"int": hex(number)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encoded(item, keep) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"tuple": [encoded(item, keep) for item in tuple.__iter__(value)]}
    if isinstance(value, (set, frozenset)):
        return {"frozenset" if isinstance(value, frozenset) else "set": [encoded(item, keep) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encoded(key, keep), encoded(item, keep)] for key, item in dict.items(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encoded(value.tolist(), keep)
    return {"object": keep(value)}


def decoded(data: Any, find: Callable[[int], Any]) -> Any:
    """The value that `encoded` turned into `data`; `find` returns the replacement for an object that was not sent.

    ValueError, TypeError or RecursionError for invalid data, which a foreign program may send.
    """
    if isinstance(data, list):
        return [decoded(item, find) for item in data]
    if not isinstance(data, dict):
        return data
    (kind, content), *more = data.items()
    if more:
        raise ValueError("a value with two kinds")
    if kind == "object":
        return find(int(content))
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return {decoded(key, find): decoded(item, find) for key, item in content}
    collections = {"tuple": tuple, "set": set, "frozenset": frozenset}
    if kind in collections:
        return collections[kind](decoded(item, find) for item in content)
    raise ValueError(f"unknown kind of value {kind!r}")


def plain_data(data: Any) -> Any:
    """The decoded value with the types of JSON only: tuples become lists, keys of dicts become text.

    ValueError for sets, objects and other types; otherwise the errors of `decoded`. Numbers are never hashed: a program
    could return a million numbers with the same hash, which would take hours.
    """
    if isinstance(data, list):
        return [plain_data(item) for item in data]
    if not isinstance(data, dict):
        return data
    (kind, content), *more = data.items()
    if more or kind not in ("tuple", "int", "dict"):
        raise ValueError("not plain data")
    if kind == "int":
        return int(content, 16)
    if kind == "tuple":
        return [plain_data(item) for item in content]
    return {_key(key): plain_data(item) for key, item in content}


def _key(data: Any) -> str:
    is_tuple = isinstance(data, dict) and list(data) == ["tuple"]
    return str(tuple(map(plain_data, data["tuple"])) if is_tuple else plain_data(data))


def call_question(function: str, args: list[Any]) -> dict[str, Any]:
    """The message that calls a function of a program. TypeError for arguments that are not plain data."""

    def never(value: Any) -> int:
        raise TypeError(f"an argument of a test is not plain data: {value!r:.100}")

    return {"op": "call", "target": function, "args": [encoded(value, never) for value in args], "kwargs": {}}


_MAX_TEXT = 500


class Lines:
    def __init__(self, channel: int) -> None:
        self._input = open(channel, closefd=False)  # noqa: SIM115 - open until the process ends
        self._output = open(channel, "w", closefd=False)  # noqa: SIM115

    def read(self) -> Any | None:
        line = self._input.readline()
        return json.loads(line) if line else None

    def write(self, message: Any) -> None:
        self._output.write(json.dumps(message) + "\n")
        self._output.flush()


class Functions:
    """Calls and reads what program.py defined, as messages request."""

    def __init__(self, channel: int) -> None:
        self._lines = Lines(channel)
        self._objects: list[Any] = []
        self._names: dict[str, Any] = {}

    def serve(self) -> None:
        try:
            self._names = runpy.run_path("program.py", run_name="program")
            answer: Any = {"value": None}
        except BaseException as error:  # noqa: BLE001 - a program may raise anything
            answer = _described(error)
        self._lines.write(answer)
        while (question := self._lines.read()) is not None:
            try:
                answer = {"value": encoded(self._answer(question), self._keep)}
            except BaseException as error:  # noqa: BLE001
                answer = _described(error)
            self._lines.write(answer)

    def _keep(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _answer(self, question: dict[str, Any]) -> Any:
        target, op = question["target"], question["op"]
        args = [decoded(item, self._objects.__getitem__) for item in question["args"]]
        named = {name: decoded(item, self._objects.__getitem__) for name, item in question["kwargs"].items()}
        if op == "name":
            return self._names[target]
        subject = self._named(target) if isinstance(target, str) else self._objects[target]
        if op == "call":
            return subject(*args, **named)
        operations = {"get": getattr, "item": operator.getitem, "len": len, "iter": iter, "next": next, "str": str}
        return operations[op](subject, *args)

    def _named(self, name: str) -> Any:
        """A function by its name, or the method of that name of a class Solution without arguments."""
        if name not in self._names and "Solution" in self._names:
            return getattr(self._names["Solution"](), name)
        if name not in self._names:
            raise NameError(name)
        return self._names[name]


class AssertionChecker:
    """Runs assertions. What they take from the program are Remote objects, whose values stay in its process."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def serve(self) -> None:
        while (order := self._lines.read()) is not None:
            self._lines.write({"passed": self.passes(order)})

    def passes(self, order: dict[str, Any]) -> bool:
        try:
            names = {name: importlib.import_module(module) for name, module in order["modules"].items()}
            _run_test(order["test"], names | {name: self._taken(target) for name, target in order["names"].items()})
        except BaseException:  # noqa: BLE001 - a test or the program may raise anything
            return False
        return True

    def _taken(self, name: str) -> Any:
        """What the program calls `name`; a method of its class Solution has no value of its name."""
        try:
            return self.ask("name", name, (), {})
        except KeyError:
            return Remote(self, name)

    def ask(self, op: str, target: str | int, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        sent = [encoded(item, _number_of) for item in args]
        named = {name: encoded(item, _number_of) for name, item in named.items()}
        self._lines.write({"op": op, "target": target, "args": sent, "kwargs": named})
        answer = self._lines.read()
        if answer is None:
            os._exit(1)
        if "error" in answer:
            kind, text = answer["error"]
            known = getattr(builtins, str(kind), None)
            # A function's StopIteration would end the test's loops early: zip(map(f, xs), wanted), all(map(..)).
            ends_loops = op not in ("next", "item") and kind in ("StopIteration", "StopAsyncIteration")
            if isinstance(known, type) and issubclass(known, Exception) and not ends_loops:
                raise known(text)
            raise RuntimeError(f"{kind}: {text}")
        return decoded(answer["value"], partial(Remote, self))


class Remote:
    """An object of the program. It equals only itself, so a program cannot define its equality."""

    __slots__ = ("_checker", "target")

    def __init__(self, checker: AssertionChecker, target: str | int) -> None:
        self._checker, self.target = checker, target

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._checker.ask("call", self.target, args, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._checker.ask("get", self.target, (name,), {})

    def __getitem__(self, key: Any) -> Any:
        return self._checker.ask("item", self.target, (key,), {})

    def __len__(self) -> int:
        return self._checker.ask("len", self.target, (), {})

    def __iter__(self) -> Iterator[Any]:
        return self._checker.ask("iter", self.target, (), {})

    def __next__(self) -> Any:
        return self._checker.ask("next", self.target, (), {})

    def __str__(self) -> str:
        return self._checker.ask("str", self.target, (), {})


class _TextLoader(SourceFileLoader):
    def __init__(self, name: str, source: str) -> None:
        super().__init__(name, "test.py")
        self._source = source

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self._source.encode(), self.path)


def _run_test(source: str, names: dict[str, Any]) -> None:
    """Run a test as a script, so that code under `if __name__ == "__main__"` runs too.

    Not from a file: without namespaces the program could read the file, and with it the wanted results.
    """
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module).update(names)
    sys.argv[:] = ["test.py"]
    try:
        _TextLoader("__main__", source).exec_module(module)
    except SystemExit as end:  # of the test, as by unittest.main; the program's SystemExit arrives as RuntimeError
        if end.code:
            raise


def _number_of(value: Any) -> int:
    if isinstance(value, Remote) and isinstance(value.target, int):
        return value.target
    raise TypeError(f"a {type(value).__name__} cannot be sent to the program: only plain data can")


def _described(error: BaseException) -> dict[str, Any]:
    try:
        text = str(error)[:_MAX_TEXT]
    except BaseException:  # noqa: BLE001 - the program defines its exceptions
        text = ""
    return {"error": [type(error).__name__, text]}


if __name__ == "__main__":
    main(sys.argv[1:])
