"""What carries messages between a launcher and the agent of a node: the protocol, and a command such as ssh."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Protocol

from areal.api.errors import LaunchError
from areal.system.process import tied_to_this_process

_AGENT_ENDED = (0, 2, -signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a command that come from the agent, whose processes end with it. 1 and 255 may be a lost network."""


class Transport(Protocol):
    """A connection to one agent. The descriptors end when it is lost."""

    @property
    def output(self) -> int:
        """Descriptor with the messages of the agent."""
        ...

    @property
    def errors(self) -> int:
        """Descriptor with lines that explain a failure."""
        ...

    def write(self, data: bytes) -> None:
        """Send a message. OSError or ValueError when the connection is closed."""
        ...

    def close_input(self) -> None:
        """Tell the agent to end."""
        ...

    def agent_ended(self, limit_s: float) -> bool:
        """Wait for the end of the connection. Whether the agent, and thus all its processes, certainly ended."""
        ...

    def kill(self) -> None:
        """End the connection. No error when it has ended."""
        ...


class CommandTransport:
    """Standard input and output of a command. Implements `Transport`."""

    def __init__(self, command: Sequence[str]) -> None:
        """LaunchError when the command cannot be started."""
        try:
            self._command = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=0,
                preexec_fn=tied_to_this_process(),
            )
        except OSError as error:
            message = f"cannot start {command[0]}: {error.strerror or error}"
            raise LaunchError(message, code="process.cannot_start") from error
        assert self._command.stdin is not None
        assert self._command.stdout is not None
        assert self._command.stderr is not None
        self._input = self._command.stdin
        self.output = self._command.stdout.fileno()
        self.errors = self._command.stderr.fileno()

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._input.write(left) :]

    def close_input(self) -> None:
        with contextlib.suppress(OSError):
            self._input.close()

    def agent_ended(self, limit_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._command.wait(limit_s) in _AGENT_ENDED
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._command.pid, signal.SIGKILL)
        self._command.wait()
