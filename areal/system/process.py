"""Owns operating-system processes: who this one is, how children start, and that none outlives its launcher."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn, Self

import psutil

from areal.api.errors import ArealError, LaunchError, ServerUnavailable, WeightSyncError
from areal.system.network import Host
from areal.system.run_paths import RunPaths
from areal.system.stacks import register_stack_dumps

AREAL_PROCESS = "AREAL_PROCESS"
ERROR_PREFIX = "areal: error: "
"""Starts the one line that a process prints when it ends with an error a user can mend."""
MEND_EXIT = 2
"""Exit code of an error that names what the user must mend: to start again would fail the same way."""
TRANSIENT_EXIT = 75
"""Exit code of a process that lost somebody it needs (EX_TEMPFAIL of sysexits.h): to start again may well help."""

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessContext:
    """Who a process is, told by the launcher through one environment variable."""

    role: Literal["controller", "trainer", "server"]
    index: int
    world_size: int
    """Trainer ranks."""
    num_servers: int
    run_id: int
    """How often the trainer ranks were started before in this launch, 0 first."""
    run_dir: str
    num_threads: int
    """CPU threads this process may compute with."""
    recover: bool
    """Go on from the recovery checkpoint."""
    device: str
    """cpu or cuda:K, K counted among the GPUs this process sees."""
    host: Host = field(default_factory=Host)
    """Where this process listens, and how others reach it."""

    @property
    def name(self) -> str:
        return self.role if self.role == "controller" else f"{self.role}-{self.index}"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self | None:
        """The context of this process, None outside of a launcher."""
        text = (os.environ if environ is None else environ).get(AREAL_PROCESS)
        if text is None:
            return None
        try:
            fields = json.loads(text)
            return cls(**fields | {"host": Host(**fields.get("host", {}))})
        except (ValueError, TypeError, AttributeError) as error:
            raise LaunchError(f"{AREAL_PROCESS} does not hold a process context ({error}): unset it") from error

    def to_env(self) -> dict[str, str]:
        """The environment variables that carry this context; for a trainer torch's rank variables too."""
        env = {AREAL_PROCESS: json.dumps(dataclasses.asdict(self))}
        if self.role == "trainer":
            local_rank = "0" if self.device.startswith("cuda") else str(self.index)  # each rank sees one GPU only
            env |= {"RANK": str(self.index), "WORLD_SIZE": str(self.world_size), "LOCAL_RANK": local_rank}
        return env


def run_main(main: Callable[[], None]) -> NoReturn:
    """Run a process's main function and exit: 0, 130 after Ctrl-C, else 2 with the message of an ArealError.

    One that tells of another process that went away (ServerUnavailable, WeightSyncError) exits 75 instead of 2. Under
    a launcher the message is one line, which the launcher quotes. A full disk is told in one line too. Anything else
    is a fault of ours: it keeps its traceback and exits 1.
    """
    launched = AREAL_PROCESS in os.environ
    try:
        if launched:
            watch_parent()
            _write_stacks_when_asked()
        main()
    except ArealError as error:
        sys.stdout.flush()
        message = " ".join(str(error).split()) if launched else str(error)
        print(ERROR_PREFIX + message, file=sys.stderr, flush=True)  # noqa: T201 - its purpose
        sys.exit(TRANSIENT_EXIT if isinstance(error, ServerUnavailable | WeightSyncError) else MEND_EXIT)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        if launched:
            raise
        # A reader like `head` went away: say nothing, also not when the interpreter flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        with contextlib.suppress(OSError):  # standard error may be a file on the same disk
            print(f"{ERROR_PREFIX}{error.strerror}{where}: make room", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(MEND_EXIT)
    finally:
        if launched:
            _write_no_more_stacks()
    sys.exit(0)


def _write_stacks_when_asked() -> None:
    context = ProcessContext.from_env()
    if context is not None:
        path = RunPaths(Path(context.run_dir)).stacks_of(context.name)
        register_stack_dumps(path, with_tasks=context.role != "trainer")


def _write_no_more_stacks() -> None:
    """A request that comes while the interpreter ends would kill: its handler is gone before the process is."""
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def watch_parent() -> None:
    """End this process by SIGKILL as soon as its parent dies.

    Linux ties this to the *thread* that started us: start such children only from a thread that lives as long as
    its process. Elsewhere a daemon thread looks at the parent's id.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died between the two lines
            os.kill(os.getpid(), signal.SIGKILL)
        return

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=poll, name="watch-parent", daemon=True).start()


def spawn(argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    """Start a child in a process group of its own, output appended to `log_path`; it dies with this process."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(log_path, "ab") as log:
            return subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C reaches the launcher only, which then ends the children in order
                preexec_fn=tied_to_this_process(),
            )
    except OSError as error:
        raise LaunchError(f"cannot start {argv[0]}: {error.strerror or error}") from error


def tied_to_this_process() -> Callable[[], None]:
    """What a child runs before its program starts, so that it dies with this process and with the thread that started
    it. On Linux only."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up before the fork

    def die_with_parent() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return die_with_parent


def kill_tree(pid: int, grace_s: float) -> None:
    """End a process and all its descendants: politely first, by force after `grace_s`."""
    kill_trees([pid], grace_s)


def kill_trees(pids: Iterable[int], grace_s: float, *, hurry: Callable[[], bool] = lambda: False) -> None:
    """End several process trees together within one grace period. Returns when nothing of them runs.

    Only the roots get SIGTERM, since they know how to end their children; what is left gets SIGKILL. `hurry` is asked
    again and again and ends the grace period when it says True.
    """
    roots = [process for pid in pids if (process := _process(pid)) is not None]
    known = {process.pid: process for root in roots for process in [root, *_descendants(root)]}
    for root in roots:
        _send(root, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while not hurry() and time.monotonic() < deadline and any(_alive(root) for root in roots):
        known |= {process.pid: process for root in roots for process in _descendants(root)}
        time.sleep(_POLL_S)
    known |= {process.pid: process for root in roots for process in _descendants(root)}
    while alive := [process for process in known.values() if _alive(process)]:
        for process in alive:
            known |= {child.pid: child for child in _descendants(process)}
            _send(process, signal.SIGKILL)
        time.sleep(_POLL_S)


def kill_rest_of_group() -> None:
    """SIGKILL every other process of this one's group. Returns when none of them runs."""
    while others := [process for pid in psutil.pids() if (process := _fellow(pid)) is not None]:
        for process in others:
            _send(process, signal.SIGKILL)
        time.sleep(_POLL_S)


def _fellow(pid: int) -> psutil.Process | None:
    """Another living process of this one's group."""
    try:
        if pid == os.getpid() or os.getpgid(pid) != os.getpgrp():
            return None
    except (ProcessLookupError, PermissionError):
        return None
    process = _process(pid)
    return process if process is not None and _alive(process) else None


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


def _alive(process: psutil.Process) -> bool:
    """A zombie counts as ended; collecting its exit code is left to whoever started it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process.send_signal(number)
