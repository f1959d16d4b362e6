"""Operating-system processes: the identity of this one, how children start, and how they end with their launcher."""

import contextlib
import ctypes
import dataclasses
import errno
import faulthandler
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn, Self, TypeVar

import psutil

from areal.api.errors import ArealError, LaunchError, ServerUnavailable, WeightSyncError
from areal.system.network import Host
from areal.system.run_paths import RunPaths
from areal.system.stacks import register_stack_dumps

# ----------------------------------------------------------------------------------------------------------------------
# Runs functions whose result or error another thread awaits.

_T = TypeVar("_T")


def run_into(future: Future[_T], function: Callable[[], _T]) -> None:
    """Run `function` and give its result or its error to `future`, unless the caller has cancelled that."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - raised where the future is awaited
        future.set_exception(error)
    else:
        future.set_result(result)


def in_daemon_thread(function: Callable[[], _T], name: str) -> Future[_T]:
    """Run a function that may wait for minutes. Unlike an executor, the thread does not delay the process's exit."""
    future: Future[_T] = Future()
    threading.Thread(target=run_into, args=(future, function), name=name, daemon=True).start()
    return future


AREAL_PROCESS = "AREAL_PROCESS"
ERROR_PREFIX = "areal: error: "
"""Begins the one line that a process prints when it ends with an error that a user can fix."""
USER_ERROR_EXIT = 2
"""Exit code after an error that the user must fix: a restart would fail in the same way."""
TRANSIENT_EXIT = 75
"""Exit code after the loss of another process (EX_TEMPFAIL of sysexits.h): a restart may succeed."""

_INTERPRETER_THRESHOLDS = gc.get_threshold()
_START_THRESHOLD = 100_000  # New objects between two passes of the cycle collector while a process starts.
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02


WeightTransport = Literal["disk", "gloo", "http", "nccl"]
"""How new weights reach the servers: by a shared folder, or in a collective of this library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessContext:
    """Identity of a process of a run. The launcher passes it in one environment variable."""

    role: Literal["controller", "trainer", "server"]
    index: int
    world_size: int
    """Trainer ranks."""
    num_servers: int
    run_id: int
    """Number of earlier starts of the trainer ranks in this launch."""
    run_dir: str
    num_threads: int
    """CPU threads for computations."""
    recover: bool
    """Continue from the recovery checkpoint."""
    device: str
    """cpu, or cuda:K, where K counts the GPUs that this process sees."""
    host: Host = field(default_factory=Host)
    """The addresses of the process."""
    weight_transport: WeightTransport = "disk"
    """How a trainer rank publishes weights."""
    part: int = 0
    """The part of a server over several machines that this is. Part 0 serves the requests."""
    num_parts: int = 1
    """Machines of each server of the run."""

    @property
    def name(self) -> str:
        if self.role == "controller":
            return self.role
        return f"{self.role}-{self.index}" + (f"-part-{self.part}" if self.part else "")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self | None:
        """The context of this process; None without a launcher."""
        text = (os.environ if environ is None else environ).get(AREAL_PROCESS)
        if text is None:
            return None
        try:
            fields = json.loads(text)
            return cls(**fields | {"host": Host(**fields.get("host", {}))})
        except (ValueError, TypeError, AttributeError) as error:
            message = f"{AREAL_PROCESS} does not contain a process context ({error}): unset it"
            raise LaunchError(message, code="process.bad_context") from error

    def to_env(self) -> dict[str, str]:
        """The environment variables with this context, and torch's rank variables for a trainer."""
        env = {AREAL_PROCESS: json.dumps(dataclasses.asdict(self))}
        if self.role == "trainer":
            local_rank = "0" if self.device.startswith("cuda") else str(self.index)  # each rank sees one GPU only
            env |= {"RANK": str(self.index), "WORLD_SIZE": str(self.world_size), "LOCAL_RANK": local_rank}
        return env


def start_is_over() -> None:
    """The cycle collector runs by the interpreter's rule again: see `run_main`."""
    gc.set_threshold(*_INTERPRETER_THRESHOLDS)


def run_main(main: Callable[[], None]) -> NoReturn:
    """Run a process's main function and exit: 0 on success, 130 after Ctrl-C, 2 after an ArealError or on a full disk.

    After the loss of another process (ServerUnavailable, WeightSyncError) the exit code is 75. An ArealError is printed
    as `areal: error: MESSAGE [CODE]`, in one line under a launcher, which quotes it. Every other exception is a defect:
    it keeps its traceback and exits with 1.

    Imports of torch and transformers create a million objects that live until the end. The cycle collector seldom
    looks at them before `start_is_over`, and not at the exit: its passes take a quarter of the imports (1 s of CPU)
    and most of the exit (0.8 s).
    """
    gc.set_threshold(_START_THRESHOLD, *gc.get_threshold()[1:])
    launched = AREAL_PROCESS in os.environ
    try:
        if launched:
            watch_parent()
        if context := ProcessContext.from_env():
            path = RunPaths(Path(context.run_dir)).stacks_of(context.name)
            register_stack_dumps(path, with_tasks=context.role != "trainer")
        main()
    except ArealError as error:
        sys.stdout.flush()
        message = " ".join(str(error).split()) if launched else str(error)
        print(f"{ERROR_PREFIX}{message} [{error.code}]", file=sys.stderr, flush=True)  # noqa: T201 - its purpose
        sys.exit(TRANSIENT_EXIT if isinstance(error, ServerUnavailable | WeightSyncError) else USER_ERROR_EXIT)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        if launched:
            raise
        # A reader like `head` ended: print nothing, also when the interpreter flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        with contextlib.suppress(OSError):  # standard error may be a file on the same disk
            print(f"{ERROR_PREFIX}{error.strerror}{where} [launch.disk_full]", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(USER_ERROR_EXIT)
    finally:
        gc.freeze()
        if launched:  # the handler is removed before the process has ended: a late request for stacks would kill it
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.exit(0)


def interrupts_notice() -> str:
    """A line for the start of a long command whose shell made it ignore Ctrl-C; empty when Ctrl-C ends it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        return ""
    why = "the shell that started it ignores it, as for a background job of a script"
    return f"areal: this command ignores Ctrl-C (SIGINT), because {why}; to end it: kill {os.getpid()}"


def watch_parent() -> None:
    """End this process by SIGKILL as soon as its parent has ended.

    On Linux the *thread* that started this process counts as the parent: start such children only from a thread that
    runs as long as its process. On other systems a daemon thread polls the parent's id.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os.kill(os.getpid(), signal.SIGKILL)
        return

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=poll, name="watch-parent", daemon=True).start()


def raise_open_file_limit(wanted: int = 65536) -> int:
    """Raise the soft limit of open files towards `wanted`, as far as the hard limit allows. Returns the new limit.

    Every request in flight is a connection, and there are thousands. Many systems start processes with 256 or 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and allowed > soft:
        with contextlib.suppress(OSError, ValueError):  # some systems cap it below the hard limit that they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    return soft


def opened_log(path: Path) -> BinaryIO:
    """The log of a process, to append to. Only its user can read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "ab", opener=partial(os.open, mode=0o600))


def spawn(
    argv: Sequence[str], env: Mapping[str, str], log_path: Path, *, descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a child as the leader of a new process group, output appended to `log_path`. It dies with this process.

    It inherits `descriptors`.
    """
    try:
        with opened_log(log_path) as log:
            return subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
                process_group=0,  # Ctrl-C reaches the launcher only, which ends the children in order
                preexec_fn=tied_to_this_process(),
            )
    except OSError as error:
        raise LaunchError(f"cannot start {argv[0]}: {error.strerror or error}", code="process.cannot_start") from error


def run_to_its_end(argv: Sequence[str], *, cwd: Path | None = None) -> int:
    """Run a command that handles Ctrl-C and SIGTERM itself, and wait for its end. Returns its exit status.

    Its output goes to standard error. The terminal sends Ctrl-C to both processes; this one ignores it, because
    `subprocess.run` would kill a launcher that saves. SIGTERM and SIGHUP are passed on.
    """
    with subprocess.Popen(argv, cwd=cwd, stdout=2) as child:

        def pass_on(number: int) -> None:
            if number != signal.SIGINT:
                child.send_signal(number)

        before = {
            number: signal.signal(number, lambda received, _: pass_on(received))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            status = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def tied_to_this_process() -> Callable[[], None]:
    """A `preexec_fn` by which a child dies with the thread that starts it. It does nothing except on Linux."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up before the fork

    def die_with_parent() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return die_with_parent


def kill_trees(pids: Iterable[int], grace_s: float, *, hurry: Callable[[], bool] = lambda: False) -> None:
    """End processes with all their descendants within one grace period. Returns when none of them runs.

    The roots get SIGTERM and end their children. After `grace_s`, or once `hurry()` is true, all get SIGKILL.
    """
    roots = [process for pid in pids if (process := _process(pid)) is not None]
    known = {process.pid: process for root in roots for process in (root, *_descendants(root))}
    for root in roots:
        _send(root, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while not hurry() and time.monotonic() < deadline and any(is_alive(root) for root in roots):
        known |= {process.pid: process for root in roots for process in _descendants(root)}
        time.sleep(_POLL_S)
    known |= {process.pid: process for root in roots for process in _descendants(root)}
    while alive := [process for process in known.values() if is_alive(process)]:
        for process in alive:
            known |= {child.pid: child for child in _descendants(process)}
            _send(process, signal.SIGKILL)
        time.sleep(_POLL_S)


def kill_rest_of_group() -> None:
    """SIGKILL all other processes of this one's group. Returns when none of them runs."""
    while others := [
        member for pid in psutil.pids() if _is_in_own_group(pid) and (member := _process(pid)) and is_alive(member)
    ]:
        for process in others:
            _send(process, signal.SIGKILL)
        time.sleep(_POLL_S)


def _is_in_own_group(pid: int) -> bool:
    try:
        return pid != os.getpid() and os.getpgid(pid) == os.getpgrp()
    except (ProcessLookupError, PermissionError):
        return False


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_alive(process: psutil.Process) -> bool:
    """A zombie counts as ended; its parent collects the exit code."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process.send_signal(number)
