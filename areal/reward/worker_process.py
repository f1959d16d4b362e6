"""One worker process of the reward pool: its start, its channel, its time limit and its end.

Messages are lines of JSON on a socket. The event loop calls back when the socket can be read or written, and at the
time limit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import orjson

from areal.api.functions import FunctionRef
from areal.system.process import AREAL_PROCESS

_READ_BYTES = 1 << 18


class WorkerProcess:
    """A child process. The pool's callbacks get its messages, its end, and the expiry of its time limit."""

    def __init__(
        self,
        *,
        on_message: Callable[[WorkerProcess, dict[str, Any]], None],
        on_end: Callable[[WorkerProcess], None],
        on_overdue: Callable[[WorkerProcess], None],
    ) -> None:
        self._on_message, self._on_end, self._on_overdue = on_message, on_end, on_overdue
        self._loop = asyncio.get_running_loop()
        self._incomplete = b""
        """A received line without its end."""
        self.loaded: set[FunctionRef] = set()
        """Functions that it has imported."""
        self._unsent = b""
        self._deadline_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._socket: socket.socket | None = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "areal.reward.worker", str(os.getpid()), orjson.dumps(sys.path).decode()],
                stdin=theirs.fileno(),
                env=_environment(),
                process_group=0,  # killed together with the processes that the user's function starts
            )
        self._loop.add_reader(ours.fileno(), self._readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Any) -> None:
        """Send a message; data that does not fit into the socket is sent when there is room."""
        if self._socket is None:
            return
        data = orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE)
        if not self._unsent:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                return  # `_readable` reports its end
            if not data:
                return
            self._loop.add_writer(self._socket.fileno(), self._writable)
        self._unsent += data

    def limit(self, seconds: float | None) -> None:
        """Call `on_overdue` in `seconds`; None = never. Replaces the previous limit."""
        # The timer is moved only when it fires: every call sets a limit, and almost none is reached.
        self._deadline_s = None if seconds is None else time.monotonic() + seconds
        if seconds is not None:
            if self._timer is not None and self._timer.when() > self._loop.time() + seconds:
                self._timer.cancel()
                self._timer = None
            if self._timer is None:
                self._timer = self._loop.call_later(seconds, self._look_at_limit)

    def detach(self) -> None:
        """Stop all callbacks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def end(self, *, wait_s: float = 0.0) -> int:
        """Wait `wait_s` for its end, then kill it and its children. Returns its exit code. Blocks: call in a thread."""
        until = time.monotonic() + wait_s
        # It is reaped after its group is killed: until then no other process can get its id.
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while time.monotonic() < until and os.waitid(os.P_PID, self.pid, options) is None:
            time.sleep(0.002)
        self.kill()
        return self._process.wait()

    def kill(self) -> None:
        """Send SIGKILL to its process group; does nothing when it has ended."""
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.detach()
            self._on_end(self)
            return
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        for line in lines:
            self._on_message(self, orjson.loads(line))

    def _writable(self) -> None:
        assert self._socket is not None
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._unsent = b""
        if not self._unsent:
            self._loop.remove_writer(self._socket.fileno())

    def _look_at_limit(self) -> None:
        self._timer = None
        if self._deadline_s is None:
            return
        left_s = self._deadline_s - time.monotonic()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look_at_limit)
        else:
            self._deadline_s = None
            self._on_overdue(self)


def _environment() -> dict[str, str]:
    """A worker is not a process of the run, imports areal from the same place as its parent, and uses one thread."""
    env = {name: value for name, value in os.environ.items() if name != AREAL_PROCESS}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env["PYTHONPATH"] = os.pathsep.join(part for part in (root, env.get("PYTHONPATH", "")) if part)
    env.setdefault("OMP_NUM_THREADS", "1")
    return env
