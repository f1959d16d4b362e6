"""The Ray actor that runs one process of a run: its agent, a thread or a command, and the messages from and to it."""

import os
import select
import subprocess
import threading
import traceback
from collections.abc import Sequence

from areal.launcher.node_agent import NodeAgent
from areal.system.process import tied_to_this_process


class AgentActor:
    """Made an actor by the launcher, which gives `send` and `receive` one thread each."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        """`command` starts the agent, for example in a container; empty = a thread of this process."""
        self._command = command
        input_read, self._input = os.pipe()
        self._output, output_write = os.pipe()
        self._failure = ""
        self._number = -1
        self._block: bytes | None = b""
        # The process dies with the thread that starts it, and this thread lives as long as the agent.
        threading.Thread(target=self._serve, args=(input_read, output_write), name="agent", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Give a message to the agent. An empty one ends it."""
        if not message:
            os.close(self._input)
        left = memoryview(message)
        while left:
            left = left[os.write(self._input, left) :]

    def receive(self, number: int, limit_s: float) -> bytes | None:
        """Messages of the agent, empty after `limit_s` without any; None after its end.

        The same `number` again returns the same block: the first answer may have been lost on its way.
        """
        if number != self._number:
            ready = select.select([self._output], [], [], limit_s)[0]
            self._block = (os.read(self._output, 1 << 16) or None) if ready else b""
            self._number = number
        if self._block is None and self._failure:
            raise RuntimeError(self._failure)
        return self._block

    def _serve(self, input_descriptor: int, output_descriptor: int) -> None:
        try:
            if not self._command:
                NodeAgent(input_descriptor, output_descriptor).run()
                return
            done = subprocess.run(
                self._command,
                stdin=input_descriptor,
                stdout=output_descriptor,
                stderr=subprocess.PIPE,
                preexec_fn=tied_to_this_process(),
                check=False,
            )
            if done.returncode:
                last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
                self._failure = f"{self._command[0]} ended with exit code {done.returncode}: {' '.join(last)}"
        except Exception:  # noqa: BLE001 - `receive` reports it to the launcher
            self._failure = traceback.format_exc()
        finally:
            os.close(input_descriptor)
            os.close(output_descriptor)
