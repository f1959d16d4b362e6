"""The connection to the agent of one node (`areal.launcher.node_agent`)."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import areal
from areal.api.config.launcher import SlurmConfig
from areal.api.errors import ConfigError, LaunchError
from areal.launcher import node_messages as wire
from areal.launcher.backend import LogTail
from areal.launcher.job import PlannedProcess
from areal.launcher.restart_rules import Role
from areal.system.heartbeat import Beat
from areal.system.process import ERROR_PREFIX, TRANSIENT_EXIT, tied_to_this_process
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# The command that starts the agent of a node: in its container, after the user's commands. Starts nothing.

_AGENT = "areal.launcher.node_agent"
_COMMANDS = "exec 3<&0 4>&1 </dev/null >&2\n{commands}\nexec <&3 >&4 3<&- 4>&-\nexec {agent}"
"""Shell text: the commands neither read the messages for the agent nor write between those that it sends."""


def image_of(slurm: SlurmConfig, role: Role | None) -> str:
    """The container image in which processes of a role run; None = of all roles. Empty = no container."""
    images = [slurm.trainer_image, slurm.inference_server_image]
    image = next((name for name in (images[::-1] if role == "server" else images) if name), "")
    return "" if slurm.container_type == "none" else image


def agent_command(slurm: SlurmConfig, role: Role | None, python: str = sys.executable) -> list[str]:
    """The command of an agent for processes of a role; None = of all roles. pyxis needs options of srun besides it."""
    agent = [python, "-m", _AGENT]
    if slurm.additional_bash_cmds:
        commands = "\n".join(slurm.additional_bash_cmds)
        agent = ["bash", "-c", _COMMANDS.format(commands=commands, agent=shlex.join(agent))]
    image = image_of(slurm, role)
    if image and slurm.container_type == "apptainer":
        agent = ["apptainer", "exec", "--nv", *(["--bind", slurm.mount] if slurm.mount else []), image, *agent]
    return agent


def variables_of_agent() -> list[str]:
    """NAME=value of what an agent on another machine needs to find the code of this one. No secrets: `ps` shows it."""
    return [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []


def check_containers(slurm: SlurmConfig, *, has_srun: bool, has_shared_agents: bool) -> None:
    """ConfigError when a launcher cannot start the containers. Shared agents start all roles."""
    if image_of(slurm, None) and slurm.container_type == "pyxis" and not has_srun:
        message = "launcher.slurm.container_type=pyxis: only Slurm has it; use apptainer, or none for no container"
        raise ConfigError(message, code="config.unsupported")
    if has_shared_agents and image_of(slurm, "server") != image_of(slurm, "trainer"):
        why = "differs from trainer_image: one agent per node starts both, so use one image"
        why += " or launcher.slurm.separate_jobs=true" if has_srun else ""
        raise ConfigError(f"launcher.slurm.inference_server_image {why}", code="config.conflict")


# ----------------------------------------------------------------------------------------------------------------------
# What carries messages between a launcher and the agent of a node: the protocol, and a command such as ssh.

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


_START_LIMIT_S = 20.0
_ANSWER_LIMIT_S = 3.0  # The supervisor's loop waits at most this long for log lines or stacks of a node.
_FOLDER_LIMIT_S = 20.0  # The network file system of a node must show the run folder within this time.
_SEEN_LIMIT_S = 10.0  # A shared folder must show a file that another node has renamed into place within this time.
_CLOSE_LIMIT_S = 5.0
_KEPT_LINES = 50


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    code: int
    tail: LogTail


class NodeLink:
    """The connection to the agent of one node. A thread reads its messages and sends pings."""

    facts: wire.Facts
    """What the node is; set once it is connected."""

    def __init__(
        self, node: str, transport: Transport, hello: wire.Hello, *, connect_limit_s: float, waits: bool = True
    ) -> None:
        """Connect the node with this name. LaunchError when that fails or takes too long.

        With `waits` False, `has_answered` says when `finish_connecting` does not wait.
        """
        self.node = node
        self._transport = transport
        self.lost = ""
        """Why the node is lost; empty while it is connected."""
        self.resident_bytes = 0
        self.beats: dict[str, Beat] = {}
        """The last heartbeat of each process there."""
        self.clock_s = 0.0
        """How many seconds the clock of the node is ahead of the launcher's, as seen when it connected."""
        self.folder_s = (0.0, 0.0)
        """Seconds of one synced write in the run folder there, and until the launcher saw the file."""
        self._errors: deque[bytes] = deque(maxlen=_KEPT_LINES)
        """The last lines that the transport and the agent wrote to standard error."""
        self._ping_s = hello.silence_s / 10
        self._lost_s = 1.5 * hello.silence_s  # later than the agent ends its processes
        self._ended: dict[str, Ended] = {}
        self._replies: dict[int, wire.Reply] = {}
        self._facts: wire.Facts | None = None
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._is_closing = False
        self._reader = threading.Thread(target=self._read, name=f"node {node}", daemon=True)
        self._reader.start()
        self.send(hello)
        if waits:
            self.finish_connecting(connect_limit_s)

    def has_answered(self, limit_s: float) -> bool:
        """Whether it is known, after at most `limit_s`, if the node can be used."""
        with self._changed:
            return bool(
                self._changed.wait_for(lambda: self._facts or wire.HELLO_ID in self._replies or self.lost, limit_s)
            )

    def finish_connecting(self, limit_s: float) -> None:
        """Wait for the facts of the node. LaunchError when it cannot be used; the connection is then closed."""
        self.has_answered(limit_s)
        if self._facts is not None and self._facts.areal == areal.__version__:
            self.facts = self._facts
            return
        failed, lost = self._replies.get(wire.HELLO_ID), self.lost
        self.close()
        if self._facts is not None:
            version, here = self._facts.areal, areal.__version__
            message = f"node {self.node} has areal {version}, this machine {here}: install one version"
            raise LaunchError(message, code="launch.other_version")
        if failed is not None:
            raise LaunchError(f"node {self.node}: {failed.error}", code=failed.code)
        reason = lost or f"no answer within {limit_s:g} s{self._last_error()}"
        raise LaunchError(f"node {self.node} cannot be reached: {reason}", code="launch.node_unreachable")

    def send(self, message: wire.ToAgent) -> None:
        """Send and return. A lost node receives nothing."""
        with self._sending, contextlib.suppress(OSError, ValueError):  # the reader finds out that it is lost
            self._transport.write(wire.TO_AGENT.dump_json(message) + b"\n")

    def open(self, paths: RunPaths, secrets: Mapping[str, str]) -> None:
        """Name the run, whose folder exists. LaunchError when the node does not share the folder, or is lost.

        Sets `folder_s`.
        """
        number = next(self._ids)
        text = uuid.uuid4().hex
        probe = paths.root / f".probe-{self.node}-{number}"
        probe.write_text(text)
        try:
            message = wire.Open(
                id=number,
                run_dir=str(paths.root),
                secrets=dict(secrets),
                probe=probe.name,
                probe_text=text,
                limit_s=_FOLDER_LIMIT_S,
            )
            written_s = self._answer(message, number, _START_LIMIT_S + _FOLDER_LIMIT_S).seconds
            answered_s = time.monotonic()
            while not (is_seen := [path.read_text() for path in paths.root.glob(f"{probe.name}.*")] == [text]):
                if time.monotonic() - answered_s > _SEEN_LIMIT_S:
                    break
                time.sleep(0.05)
            self.folder_s = written_s, time.monotonic() - answered_s
            if not is_seen:
                reason = f"a file that it writes to {paths.root} does not appear here: all nodes must share this folder"
                raise LaunchError(f"node {self.node}: {reason}", code="launch.folder_not_shared")
        finally:
            for path in paths.root.glob(f"{probe.name}*"):
                path.unlink()

    def open_port(self, address: str) -> int:
        """Accept connections there at a free port, which is returned. An empty address ends it. LaunchError if not."""
        number = next(self._ids)
        return self._answer(wire.Listen(id=number, address=address), number, _START_LIMIT_S).port

    def send_reach(self, targets: Sequence[tuple[str, str, int]], limit_s: float) -> int:
        """Begin to connect from there to names, addresses and ports. Returns a number for `await_reached`."""
        number = next(self._ids)
        self.send(wire.Reach(id=number, targets=tuple(targets), limit_s=limit_s))
        return number

    def await_reached(self, number: int, limit_s: float) -> None:
        """LaunchError when a target does not accept."""
        self._result(number, _START_LIMIT_S + limit_s)

    def start(self, planned: PlannedProcess) -> int:
        """Start a process; returns its id there. LaunchError when it cannot be started or the node is lost."""
        self._ended.pop(planned.name, None)
        number = next(self._ids)
        return self._answer(wire.Start(id=number, planned=planned), number, _START_LIMIT_S).pid

    def ended(self, name: str) -> Ended | None:
        """How a process ended; None while it runs. When the node is lost, all its processes have ended."""
        if (result := self._ended.get(name)) is not None or not self.lost:
            return result
        error = f"{ERROR_PREFIX}node {self.node} is lost: {self.lost} [launch.node_lost]"
        return Ended(TRANSIENT_EXIT, LogTail([error], 0))

    def last_lines(self, name: str) -> LogTail:
        if (ended := self.ended(name)) is not None:
            return ended.tail
        number = next(self._ids)
        reply = self._ask(wire.Lines(id=number, name=name), number, _ANSWER_LIMIT_S)
        return LogTail([], 0) if reply is None else LogTail(list(reply.lines), reply.written_ns)

    def request_stacks(self, name: str, reason: str) -> bool:
        number = next(self._ids)
        reply = self._ask(wire.Stacks(id=number, name=name, reason=reason), number, _ANSWER_LIMIT_S)
        return reply is not None and reply.done

    def stop(self, names: Sequence[str], grace_s: float) -> int:
        """Begin to end processes. Returns a number for `has_stopped`."""
        number = next(self._ids)
        self.send(wire.Stop(id=number, names=tuple(names), grace_s=grace_s))
        return number

    def has_stopped(self, number: int) -> bool:
        return bool(self.lost) or number in self._replies

    def close(self) -> None:
        """End the agent, which ends its processes, and the transport."""
        self._is_closing = True
        with self._sending:
            self._transport.close_input()
        if not self._transport.agent_ended(_CLOSE_LIMIT_S):
            self._transport.kill()
        self._reader.join()

    def _answer(self, message: wire.ToAgent, number: int, limit_s: float) -> wire.Reply:
        """The reply to a message. LaunchError when it is an error or does not arrive."""
        self.send(message)
        return self._result(number, limit_s)

    def _result(self, number: int, limit_s: float) -> wire.Reply:
        reply = self._reply(number, limit_s)
        if reply is None:
            text = f"node {self.node}: {self.lost or f'no answer within {limit_s:g} s'}"
            raise LaunchError(text, code="launch.node_lost")
        if reply.error:
            raise LaunchError(f"node {self.node}: {reply.error}", code=reply.code)
        return reply

    def _ask(self, message: wire.ToAgent, number: int, limit_s: float) -> wire.Reply | None:
        """The reply to a message; None when none arrives in time or the node is lost."""
        self.send(message)
        return self._reply(number, limit_s)

    def _reply(self, number: int, limit_s: float) -> wire.Reply | None:
        with self._changed:
            self._changed.wait_for(lambda: number in self._replies or self.lost, limit_s)
            return self._replies.pop(number, None)

    def _read(self) -> None:
        """Read messages until the connection ends or the agent is silent for too long."""
        output, errors = self._transport.output, self._transport.errors
        unread = {output: b"", errors: b""}
        selector = selectors.DefaultSelector()
        for descriptor in unread:
            selector.register(descriptor, selectors.EVENT_READ)
        heard_s, pinged_s, cause = time.monotonic(), 0.0, ""
        while not cause:
            now_s = time.monotonic()
            if now_s - pinged_s >= self._ping_s and not self._is_closing:
                pinged_s = now_s
                self.send(wire.Ping())
            for key, _ in selector.select(self._ping_s / 2):
                block = os.read(key.fd, 1 << 16)
                *lines, unread[key.fd] = (unread[key.fd] + block).split(b"\n")
                if key.fd == output:
                    heard_s = time.monotonic()
                    for line in lines:
                        self._take(line)
                    cause = cause or ("" if block else "its connection closed")
                else:
                    self._errors += [line for line in lines if line.strip()]
                if not block:
                    selector.unregister(key.fd)
            if self._facts is not None and time.monotonic() - heard_s > self._lost_s:
                cause = cause or f"silent for {self._lost_s:g} s"
        self._lose(cause, heard_s)

    def _take(self, line: bytes) -> None:
        try:
            message = wire.FROM_AGENT.validate_json(line)
        except ValueError:  # a login script that prints, for example; its text helps to find a failed start
            self._errors.append(line)
            return
        with self._changed:
            match message:
                case wire.Facts():
                    self._facts = message
                    self.clock_s = message.clock_s - time.time()
                case wire.Reply():
                    self._replies[message.id] = message
                case wire.Exit():
                    tail = LogTail(list(message.lines), message.written_ns)
                    self._ended[message.name] = Ended(message.code, tail)
                case wire.Alive():
                    self.resident_bytes, self.beats = message.resident_bytes, message.beats
            self._changed.notify_all()

    def _lose(self, cause: str, heard_s: float) -> None:
        """Mark the node as lost, once its processes have certainly ended."""
        agent_ended = self._transport.agent_ended(self._ping_s)
        if self._facts is not None and not agent_ended:
            while time.monotonic() - heard_s < self._lost_s and not self._is_closing:
                time.sleep(self._ping_s / 10)
        self._transport.kill()
        with self._changed:
            self.lost = f"{cause}{self._last_error()}"
            self._changed.notify_all()

    def _last_error(self) -> str:
        """The last line that the transport or the agent wrote to standard error, in parentheses."""
        return f" ({self._errors[-1].decode(errors='replace').strip()})" if self._errors else ""
