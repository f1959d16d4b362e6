"""Runs the tests of a program on a SandboxFusion service: `POST /run_code`, one request for each test.

Fields as in the API reference of SandboxFusion (bytedance.github.io/SandboxFusion, "Run Code"): the request has code,
language, stdin, files (base64), run_timeout, compile_timeout and memory_limit_MB; the answer has status (Success,
Failed or SandboxError), message and run_result with status (Finished, Error or TimeLimitExceeded), return_code and
stdout.
"""

from __future__ import annotations

import base64
import http.client
import json
import secrets
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal.api.config.redaction import public_text
from areal.api.config.reward import CODE_STARTS_S, SandboxConfig
from areal.api.errors import RewardError
from areal.reward.code_tests import AssertTest, CallTest, CodeLimits
from areal.reward.sandbox_runner import Output, ProgramDoesNotLoad, SandboxEnded
from areal.reward.sandbox_values import call_question

_HERE = Path(__file__).resolve().parent
_DRIVER = "sandbox_driver.py"
_DRIVER_FILES = ("sandbox_confine.py", "sandbox_roles.py", "sandbox_values.py")
_MAX_ANSWER_BYTES = 32 << 20
_FIRST_PAUSE_S = 0.2
"""Pause before the first repetition; it doubles for each further one."""


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
        """The result of a program, or the internal error of the service."""
        try:
            found = json.loads(answer)
            status, run = found["status"], found.get("run_result") or {}
            if status == "SandboxError" or run.get("status") == "Error":
                return f"SandboxError: {str(found.get('message'))[:200]}"
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
    """One request for each test. Tests of functions run in the driver (`areal.reward.sandbox_driver`), which starts the
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
        """The result of the driver for one test."""
        files = {f"areal/reward/{name}": (_HERE / name).read_bytes() for name in _DRIVER_FILES}
        files["program.py"] = self._source.encode("utf-8", "replace")
        # The driver proves with it that a line of output is its own.
        nonce = secrets.token_hex(16)
        body = {
            "code": (_HERE / _DRIVER).read_text(encoding="utf-8"),
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
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
