"""Starts a program in a sandbox, exchanges messages with it, reads its output, and ends all its processes.

Waits for the program's output and answers until the deadline of each call, and for the end of the sandbox's keeper,
which is killed when it does not end in time. `areal.reward.sandbox_inside` runs on the other side.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import http.client
import json
import math
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

import orjson

from areal.api.config.redaction import public_text
from areal.api.config.rollout import CODE_STARTS_S, SandboxConfig
from areal.api.errors import ArealError, ConfigError, RewardError
from areal.observe.log import get_logger
from areal.reward.code_tests import (
    AssertTest,
    CallTest,
    CodeLimits,
    Output,
    ProgramDoesNotLoad,
    ProgramRunner,
    SandboxEnded,
)
from areal.reward.sandbox_inside import FILTERED_MACHINE, call_question, remove_folder

Role = Literal["program", "functions", "checker"]
"""What runs inside: a whole program, a server of its functions, or the assertion checker."""
_MAX_LINE_BYTES = 16 << 20
_MAX_CONTAINERS = 500_000
"""Lists and dicts in a message. More in as few bytes would take the reward worker too much time and memory."""
_END_WAIT_S = 2.0
_START_WAIT_S = 4.0
"""Limit of a sandbox's start, which usually takes 0.05 s; the program's own time limit begins afterwards."""
_READ_BYTES = 1 << 16
_SYSTEM_LIBRARIES = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store",
    "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo",
)  # fmt: skip
_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    cpu_s: float = 10.0  # Seconds of processor time of all its threads, rounded up; beyond, it is killed.
    memory_bytes: int = 1 << 30  # Address space.
    output_bytes: int = 1 << 20  # Standard output; beyond, the program is ended.
    file_bytes: int = 16 << 20  # Size of each file it writes.
    folder_bytes: int = 64 << 20  # Size of all files in its folder, where namespaces are available.


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Protections in addition to the limits. Tests switch some off, to check each of the others alone."""

    namespaces: bool = True
    """No network, no other process visible, no files except those of Python and an empty folder in memory."""
    system_calls: bool = True  # No new process, no signal, no socket, no mount.
    bubblewrap: bool = False  # The command bwrap makes the namespaces.


class IsolationMissing(Exception):
    """This machine does not offer a requested protection. The message says which, and why."""


class Sandbox:
    """One program in separate processes. Use it as a context manager: at the end no process and no file remains."""

    def __init__(
        self, role: Role, source: str, *, limits: SandboxLimits, isolation: Isolation, keep_s: float, stdin: bytes = b""
    ) -> None:
        """Call `wait_started` first. The sandbox ends without `close` after `keep_s`."""
        self.isolation = isolation
        self._limits = limits
        self._folder = "/tmp" if isolation.bubblewrap else tempfile.mkdtemp(prefix="areal-sandbox-")
        packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        visible = visible_paths(packages)
        prefix = _bubblewrap(visible, limits.folder_bytes) if isolation.bubblewrap else [sys.executable]
        self._buffer = bytearray()
        self._channel, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as file:
            file.write(stdin)
            file.seek(0)
            self._process = subprocess.Popen(
                [*prefix, "-sPS", "-m", "areal.reward.sandbox_inside", str(theirs.fileno()), str(os.getpid())],
                stdin=file,
                stdout=subprocess.PIPE if role == "program" else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"PYTHONPATH": _ROOT, "PYTHONHASHSEED": "0"},
                cwd="/",
                start_new_session=True,
            )
        bounds = dataclasses.asdict(limits) | {"cpu_s": math.ceil(limits.cpu_s)}
        orders = {"role": role, "source": source, "limits": bounds, "folder": self._folder, "keep_s": keep_s}
        orders |= {"isolate": isolation.namespaces and not isolation.bubblewrap, "refuse": isolation.system_calls}
        orders |= {"root": _ROOT, "packages": packages, "visible": visible}
        with contextlib.suppress(SandboxEnded):  # wait_started reports it
            self.send(orders, until_s=time.monotonic() + _START_WAIT_S)

    def wait_started(self) -> Sandbox:
        """Wait until the process is confined and starts its program; returns self.

        IsolationMissing when a requested protection is not available, RewardError when the sandbox does not start.
        """
        try:
            report = self.receive(until_s=time.monotonic() + _START_WAIT_S)
        except SandboxEnded as error:
            raise RewardError(f"a sandbox did not start: {error.reason}", code="sandbox.not_started") from error
        if report["missing"]:
            raise IsolationMissing(report["missing"])
        return self

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: Any, *, until_s: float) -> Any:
        """Send a message and wait for the answer. SandboxEnded when there is none at `until_s` (monotonic clock)."""
        self.send(message, until_s=until_s)
        return self.receive(until_s=until_s)

    def send(self, message: Any, *, until_s: float) -> None:
        """Send a message. SandboxEnded as for `ask`."""
        try:
            self._channel.settimeout(max(1e-3, until_s - time.monotonic()))
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError:
            raise SandboxEnded("time_limit") from None
        except OSError as error:
            raise SandboxEnded("ended") from error

    def receive(self, *, until_s: float) -> Any:
        """The next message. SandboxEnded as for `ask`, or when the message is too large or invalid."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise SandboxEnded("too_large")
            try:
                self._channel.settimeout(max(1e-3, until_s - time.monotonic()))
                data = self._channel.recv(_READ_BYTES)
            except TimeoutError:
                raise SandboxEnded("time_limit") from None
            except OSError:
                data = b""
            if not data:
                raise SandboxEnded("ended")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        if line.count(b"[") + line.count(b"{") > _MAX_CONTAINERS:
            raise SandboxEnded("too_large")
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SandboxEnded("invalid_message") from error

    def output(self, *, until_s: float) -> Output:
        assert self._process.stdout is not None
        stdout, written = self._process.stdout.fileno(), bytearray()
        while len(written) <= self._limits.output_bytes:
            ready, _, _ = select.select([stdout], [], [], max(0.0, until_s - time.monotonic()))
            if not ready:
                return Output(stdout=bytes(written), exit_code=None)
            data = os.read(stdout, _READ_BYTES)
            if not data:  # the keeper holds the pipe too, so it is about to end
                return Output(stdout=bytes(written), exit_code=self._end())
            written += data
        return Output(stdout=bytes(written), exit_code=None)

    def close(self) -> None:
        """End all processes of the sandbox, wait for their end, and remove its folder."""
        self._channel.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # the keeper then kills every process below it
            self._end()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if not self.isolation.bubblewrap:
            remove_folder(self._folder)

    def _end(self) -> int | None:
        """The keeper's exit code; None when it did not end in time and was killed with its process group."""
        try:
            return self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return None


def visible_paths(packages: list[str]) -> list[str]:
    """The files and folders that a program in namespaces can read, outer ones first: what Python needs, and `packages`.

    Each is listed by its name and, where that contains a symbolic link, also by its real path.
    """
    needed = [sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib", *packages, *_SYSTEM_LIBRARIES]
    existing = {form for path in needed if os.path.exists(path) for form in (path, os.path.realpath(path))}
    return [path for path in sorted(existing) if not any(path.startswith(f"{outer}/") for outer in existing)]


def _bubblewrap(visible: list[str], folder_bytes: int) -> list[str]:
    """The command that starts Python in namespaces made by bwrap, with the same contents as in `enter_namespaces`."""
    python = os.path.realpath(sys.executable)
    shown = [*visible, python, f"{_ROOT}/areal/__init__.py", f"{_ROOT}/areal/reward"]
    # /tmp first: Python may be installed below it.
    binds = ["--size", str(folder_bytes), "--tmpfs", "/tmp", "--dev-bind", "/dev/null", "/dev/null"]
    binds += [word for path in shown for word in ("--ro-bind", path, path)]
    return ["bwrap", "--unshare-all", "--die-with-parent", "--as-pid-1", *binds, "--remount-ro", "/", python]


def available_isolation() -> tuple[Isolation, list[str]]:
    """The protections that this machine offers without bubblewrap, and why others are missing."""
    missing: list[str] = []
    for isolation in (
        Isolation(),
        Isolation(namespaces=False),
        Isolation(system_calls=False),
        Isolation(namespaces=False, system_calls=False),
    ):
        try:
            try_isolation(isolation)
        except IsolationMissing as error:
            missing.append(str(error))
            continue
        return isolation, list(dict.fromkeys(missing))
    raise RewardError("no sandbox can be started", code="sandbox.not_started")


def try_isolation(isolation: Isolation) -> None:
    """Start an empty program. The errors of `Sandbox.wait_started`."""
    with Sandbox("program", "", limits=SandboxLimits(), isolation=isolation, keep_s=_START_WAIT_S) as sandbox:
        sandbox.wait_started()


# Runs the tests of a program in sandboxes on this machine, also those made by bubblewrap.

_SPARE_S = 5.0  # A sandbox ends without `close` at this time after the limit of all tests.


class LocalRunner:
    """Functions are loaded once for all tests; the assertion checker is a second sandbox."""

    num_parallel = 1

    def __init__(self, source: str, limits: CodeLimits, isolation: Isolation) -> None:
        self._source, self._limits, self._isolation = source, limits, isolation
        self._sandboxes: list[Sandbox] = []  # That of the functions and that of the checker, if they run.

    def _sandbox(self, role: Role, source: str, *, stdin: str = "") -> Sandbox:
        limit_s = self._limits.time_limit_s if role == "program" else self._limits.total_time_limit_s
        return Sandbox(
            role,
            source,
            limits=SandboxLimits(cpu_s=limit_s, memory_bytes=self._limits.memory_bytes),
            isolation=self._isolation,
            keep_s=self._limits.total_time_limit_s + _SPARE_S,
            stdin=stdin.encode("utf-8", "replace"),
        )

    def write(self, stdin: str, *, until_s: float) -> Output:
        limit_s = until_s - time.monotonic()
        with self._sandbox("program", self._source, stdin=stdin) as sandbox:
            sandbox.wait_started()
            return sandbox.output(until_s=time.monotonic() + limit_s)

    def call(self, case: CallTest, *, until_s: float) -> Any:
        with self._closed_at_failure():
            (functions, *_), until_s = self._loaded(until_s, with_checker=False)
            return functions.ask(call_question(case.function, case.args), until_s=until_s)

    def check(self, case: AssertTest, *, until_s: float) -> bool:
        with self._closed_at_failure():
            (functions, checker), until_s = self._loaded(until_s, with_checker=True)
            message: Any = {"test": case.source, "names": case.names, "modules": case.modules}
            while "passed" not in (answer := checker.ask(message, until_s=until_s)):
                message = functions.ask(answer, until_s=until_s)
            return answer["passed"] is True

    def _loaded(self, until_s: float, *, with_checker: bool) -> tuple[list[Sandbox], float]:
        """The running sandboxes, and the deadline, which starts after their start."""
        if not self._sandboxes:
            limit_s = until_s - time.monotonic()
            with contextlib.ExitStack() as started:
                sandboxes = [started.enter_context(self._sandbox("functions", self._source))]
                if with_checker:
                    sandboxes.append(started.enter_context(self._sandbox("checker", "")))
                for sandbox in sandboxes:
                    sandbox.wait_started()
                started.pop_all()
            self._sandboxes = sandboxes
            until_s = time.monotonic() + limit_s
            try:
                answer = sandboxes[0].receive(until_s=until_s)
            except SandboxEnded as error:
                raise ProgramDoesNotLoad from error
            if not isinstance(answer, dict) or "value" not in answer:
                raise ProgramDoesNotLoad
        return self._sandboxes, until_s

    @contextlib.contextmanager
    def _closed_at_failure(self) -> Iterator[None]:
        """The next test then starts new sandboxes."""
        try:
            yield
        except SandboxEnded:
            self.close()
            raise

    def close(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.close()
        self._sandboxes = []


# Runs the tests of a program on a SandboxFusion service: `POST /run_code`, one request for each test.
#
# Fields as in the API reference of SandboxFusion (bytedance.github.io/SandboxFusion, "Run Code"): the request has code,
# language, stdin, files (base64), run_timeout, compile_timeout and memory_limit_MB; the answer has status (Success,
# Failed or SandboxError), message and run_result with status (Finished, Error or TimeLimitExceeded), return_code and
# stdout.

_INSIDE = Path(__file__).with_name("sandbox_inside.py")
_MAX_ANSWER_BYTES = 32 << 20
_FIRST_PAUSE_S = 0.2  # Pause before the first repetition; it doubles for each further one.


class SandboxService:
    """The client of one service. Safe to use by several threads: each request has its own connection."""

    def __init__(self, config: SandboxConfig, *, token: str = "") -> None:
        """`token` is sent as a bearer token, for gateways in front of the service."""
        self._url, self._retries = config.url, config.retries
        self._shown = public_text(config.url)
        self.max_requests = config.max_requests
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def check(self) -> None:
        """Run a small program. RewardError when the service does not run it as expected."""
        output = self.run({"code": "print(6 * 7)"}, limit_s=10.0)
        if output != Output(stdout=b"42\n", exit_code=0):
            raise self._refused(f"a program that prints 42 gave {output}")

    def run(self, body: dict[str, Any], *, limit_s: float) -> Output:
        """Run a Python program for at most `limit_s`.

        RewardError when the service refuses the request, or does not answer it after all repetitions, or within
        CODE_STARTS_S in addition to `limit_s`: overload of the service is never a wrong answer.
        """
        until_s = time.monotonic() + limit_s + CODE_STARTS_S
        sent = json.dumps(body | {"language": "python", "run_timeout": limit_s, "compile_timeout": limit_s}).encode()
        problem, pause_s = "", _FIRST_PAUSE_S
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(max(0.0, min(pause_s, until_s - time.monotonic())))
                pause_s *= 2
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            try:
                status, answer = self._exchange(sent, left_s)
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if status == 429 or status >= 500:
                problem = f"HTTP {status}: {answer[:200]!r}"
                continue
            if status != 200:
                raise self._refused(f"HTTP {status}: {answer[:200]!r}")
            output = self._output(answer)
            if isinstance(output, Output):
                return output
            problem = output
        message = f"the sandbox service {self._shown} failed {attempt + 1} times, the last time with {problem}"
        raise RewardError(message, code="sandbox.remote_unavailable")

    def _exchange(self, sent: bytes, limit_s: float) -> tuple[int, bytes]:
        parts = urlsplit(self._url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=limit_s)
        try:
            connection.request("POST", f"{parts.path.rstrip('/')}/run_code", body=sent, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read(_MAX_ANSWER_BYTES)
        finally:
            connection.close()

    def _output(self, answer: bytes) -> Output | str:
        try:
            fields = json.loads(answer)
            status, run = fields["status"], fields.get("run_result") or {}
            if status == "SandboxError" or run.get("status") == "Error":
                return f"SandboxError: {str(fields.get('message'))[:200]}"
            stdout, code = str(run.get("stdout") or ""), run.get("return_code")
            if status not in ("Success", "Failed") or not (code is None or isinstance(code, int)):
                raise ValueError(f"status {status!r}, return_code {code!r}")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            message = f"its answer has another form ({type(error).__name__}: {error}): {answer[:200]!r}"
            raise self._refused(message) from error
        is_over_time = run.get("status") != "Finished"
        return Output(stdout=stdout.encode("utf-8", "replace"), exit_code=None if is_over_time else code)

    def _refused(self, problem: str) -> RewardError:
        return RewardError(
            f"the sandbox service {self._shown} cannot be used: {problem}", code="sandbox.remote_refused"
        )


class RemoteRunner:
    """One request for each test. Tests of functions run in the driver (`areal.reward.sandbox_inside`), which starts the
    program as a second process without privileges, and checks the assertions itself."""

    def __init__(self, source: str, limits: CodeLimits, service: SandboxService) -> None:
        self._source, self._limits, self._service = source, limits, service
        self.num_parallel = service.max_requests

    def write(self, stdin: str, *, until_s: float) -> Output:
        return self._run({"code": self._source, "stdin": stdin}, until_s)

    def call(self, case: CallTest, *, until_s: float) -> Any:
        return self._driven({"question": call_question(case.function, case.args)}, until_s)["answer"]

    def check(self, case: AssertTest, *, until_s: float) -> bool:
        order = {"test": case.source, "names": case.names, "modules": case.modules}
        return self._driven({"order": order}, until_s)["passed"] is True

    def close(self) -> None:
        """Nothing to end: each request is complete."""

    def _run(self, body: dict[str, Any], until_s: float) -> Output:
        limit_s = until_s - time.monotonic()
        if limit_s <= 0:
            raise SandboxEnded("time_limit")
        memory_mb = self._limits.memory_bytes >> 20
        return self._service.run(body | {"memory_limit_MB": memory_mb}, limit_s=round(limit_s, 3))

    def _driven(self, job: dict[str, Any], until_s: float) -> dict[str, Any]:
        nonce = secrets.token_hex(16)  # with it the driver proves that a line of output is its own
        body = {
            "code": _INSIDE.read_text(encoding="utf-8"),
            "files": {"program.py": base64.b64encode(self._source.encode("utf-8", "replace")).decode()},
            "stdin": json.dumps(job | {"nonce": nonce}) + "\n",
        }
        output = self._run(body, until_s)
        for line in reversed(output.stdout.splitlines()):
            if line.startswith(nonce.encode()):
                try:
                    result = json.loads(line[len(nonce) :])
                except (ValueError, RecursionError) as error:
                    raise SandboxEnded("invalid_message") from error
                if "failed" in result:
                    raise ProgramDoesNotLoad
                return result
        raise SandboxEnded("ended")


# Chooses where programs run (`reward.sandbox.backend`), and checks it before a run starts.
#
# The settings reach reward workers in an environment variable. Started as `python -m areal.reward.sandbox`, it
# checks the settings of its environment: standard output is a warning or empty, the exit code 2 is an error.

SANDBOX_VARIABLE = "AREAL_SANDBOX"
"""The settings as JSON: `config`, and `announced` when the missing protections were logged at the start of the run."""
_TOKEN_VARIABLE = "AREAL_SANDBOX_TOKEN"
_ADVICE = "set reward.sandbox.backend to bubblewrap or remote"


def variable(config: SandboxConfig, *, announced: bool) -> dict[str, str]:
    """The environment of processes that run programs under `config`."""
    return {SANDBOX_VARIABLE: orjson.dumps({"config": config, "announced": announced}).decode()}


def program_runner(source: str, limits: CodeLimits) -> ProgramRunner:
    """A runner of the program `source` in the configured sandbox. The errors of `checked`."""
    runner = _of_this_process()
    if isinstance(runner, SandboxService):
        return RemoteRunner(source, limits, runner)
    return LocalRunner(source, limits, runner)


@functools.cache
def _of_this_process() -> Isolation | SandboxService:
    settings = orjson.loads(os.environ.get(SANDBOX_VARIABLE) or b"{}")
    result, warning = checked(SandboxConfig(**settings.get("config", {})), sends=False)
    if warning and not settings.get("announced"):
        get_logger(__name__).warning("%s", warning)
    return result


def log_reach(config: SandboxConfig) -> None:
    """Check the backend, and log what programs can reach beyond the promises of docs/rewards.md. As `checked`."""
    _, warning = checked(config)
    if warning:
        get_logger(__name__).warning("%s", warning)


def checked(config: SandboxConfig, *, sends: bool = True) -> tuple[Isolation | SandboxService, str]:
    """What runs programs, and a warning about what they can reach ('' = nothing). `sends`: send a remote service a
    program, to test it.

    ConfigError or RewardError when the backend cannot be used.
    """
    if config.backend == "remote":
        service = SandboxService(config, token=os.environ.get(_TOKEN_VARIABLE, ""))
        if sends:
            service.check()
        return service, ""
    machine = os.uname().machine
    if config.backend == "bubblewrap":
        isolation = Isolation(bubblewrap=True, system_calls=machine == FILTERED_MACHINE)
        if shutil.which("bwrap") is None:
            raise _unusable("the command bwrap is not installed: install the package bubblewrap (0.8 or newer)")
        try:
            try_isolation(isolation)
        except (ArealError, IsolationMissing) as error:
            raise _unusable(f"bwrap does not start a sandbox here ({error}): use a backend that works here") from error
        return isolation, ""
    if sys.platform == "linux" and machine != FILTERED_MACHINE:
        raise _unusable(f"the local sandbox supports only {FILTERED_MACHINE}, this machine is {machine}: {_ADVICE}")
    isolation, missing = available_isolation()
    if not missing:
        return isolation, ""
    reach = [] if isolation.system_calls else ["start processes"]
    if not isolation.namespaces:
        readable = "read every file that your user can read (the datasets with their answers, the run folder)"
        reach += [readable, "write where your user can write", *([] if isolation.system_calls else ["use the network"])]
    reason = "; ".join(missing)
    return isolation, f"programs of completions can {', '.join(reach)}: this machine offers no {reason}; {_ADVICE}"


def _unusable(problem: str) -> ConfigError:
    return ConfigError(f"reward.sandbox.backend: {problem}", code="sandbox.backend_unusable")


def main() -> int:
    settings = orjson.loads(os.environ[SANDBOX_VARIABLE])
    try:
        _, warning = checked(SandboxConfig(**settings["config"]))
    except ArealError as error:
        sys.stdout.write(str(error))
        return 2
    sys.stdout.write(warning)
    return 0


if __name__ == "__main__":
    sys.exit(main())
