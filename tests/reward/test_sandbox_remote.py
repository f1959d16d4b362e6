"""The client of a SandboxFusion service, against a small server of the same dialect."""

import json
import threading

import pytest

from areal.api.config.rollout import SandboxConfig
from areal.reward.code import Trial
from areal.reward.code_tests import CodeLimits, Output, parse_tests
from areal.reward.sandbox import RemoteRunner, SandboxService, checked
from tests.expect import raises_code
from tests.reward import fake_sandbox_fusion
from tests.reward.fake_sandbox_fusion import FakeSandboxFusion

LIMITS = CodeLimits(time_limit_s=60, total_time_limit_s=100)
ADD = "def add(a, b):\n    return a + b"


@pytest.fixture
def server():
    with FakeSandboxFusion() as fake:
        yield fake


def passed(server, source, tests, *, entry_points=(), stop_at_failure=False, **settings):
    service = SandboxService(SandboxConfig(backend="remote", url=server.url, **settings))
    trial = Trial(RemoteRunner(source, LIMITS, service), limits=LIMITS, tolerance=1e-6)
    return trial.run(parse_tests(tests, list(entry_points)), stop_at_failure=stop_at_failure)


def test_programs_calls_and_assertions(server):
    program = "a, b = map(int, input().split())\nprint(a + b)"
    assert passed(server, program, {"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}) == 1
    assert passed(server, ADD, {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 8]}) == 1
    assert passed(server, ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]) == 1
    check = "def check(candidate):\n    assert candidate('a', 'b') == 'ab'"
    assert passed(server, ADD, check, entry_points=["add"]) == 1
    assert passed(server, "class Solution:\n    def add(self, a, b): return a + b", ["assert add(1, 2) == 3"]) == 1
    assert passed(server, "raise SystemExit(1)", {"inputs": [""], "outputs": [""]}) == 0


def test_the_request_has_the_fields_of_the_service(server):
    assert passed(server, "print(input())", {"inputs": ["1"], "outputs": ["1"]}) == 1
    ((path, body),) = server.requests
    assert path == "/run_code"
    assert (body["code"], body["stdin"], body["language"]) == ("print(input())", "1", "python")
    assert 0 < body["run_timeout"] <= 60
    assert body["memory_limit_MB"] == 1024


def test_the_wanted_result_of_a_call_is_not_sent(server):
    assert passed(server, ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [31415]}) == 0
    assert "31415" not in json.dumps(server.requests)


def test_a_token_is_sent(server, monkeypatch):
    monkeypatch.setenv("AREAL_SANDBOX_TOKEN", "hunter2")
    checked(SandboxConfig(backend="remote", url=server.url))
    assert server.headers[0]["Authorization"] == "Bearer hunter2"


BUSY = (429, b"busy")
BROKEN = (500, b"broken")
INTERNAL = (200, b'{"status": "SandboxError", "message": "no worker", "run_result": null}')


def test_failures_of_the_service_are_repeated(monkeypatch):
    monkeypatch.setattr("areal.reward.sandbox._FIRST_PAUSE_S", 0.0)
    with FakeSandboxFusion([BUSY, BROKEN, INTERNAL]) as server:
        assert passed(server, ADD, ["assert add(1, 2) == 3"]) == 1
        assert len(server.requests) == 4


@pytest.mark.parametrize("answer", [BUSY, BROKEN, INTERNAL])
def test_a_service_that_keeps_failing_is_an_error_and_not_a_wrong_answer(monkeypatch, answer):
    monkeypatch.setattr("areal.reward.sandbox._FIRST_PAUSE_S", 0.0)
    with FakeSandboxFusion([answer] * 9) as server, raises_code("sandbox.remote_unavailable", server.url):
        passed(server, ADD, ["assert add(1, 2) == 3"], retries=1)
    assert len(server.requests) == 2


def test_a_service_that_cannot_be_reached_is_an_error():
    with FakeSandboxFusion() as server:
        pass
    with raises_code("sandbox.remote_unavailable"):
        checked(SandboxConfig(backend="remote", url=server.url, retries=0))


@pytest.mark.parametrize(
    "answer",
    [
        (404, b"not found"), (401, b"no token"), (200, b"<html>"), (200, b"[]"), (200, b'{"status": "Done"}'),
        (200, b'{"status": "Success", "run_result": {"status": "Finished", "return_code": "0"}}'),
    ],
)  # fmt: skip
def test_another_kind_of_server_is_refused_at_once(answer):
    with FakeSandboxFusion([answer] * 9) as server, raises_code("sandbox.remote_refused"):
        checked(SandboxConfig(backend="remote", url=server.url))
    assert len(server.requests) == 1


def test_a_service_that_runs_programs_wrongly_is_refused():
    wrong = {"status": "Success", "message": "", "run_result": {"status": "Finished", "return_code": 0, "stdout": "41"}}
    with FakeSandboxFusion([(200, json.dumps(wrong).encode())]) as server, raises_code("sandbox.remote_refused"):
        checked(SandboxConfig(backend="remote", url=server.url))


def test_a_program_that_exceeds_its_time_fails(server):
    output = SandboxService(SandboxConfig(url=server.url)).run({"code": "while True: pass"}, limit_s=0.2)
    assert output == Output(stdout=b"", exit_code=None)


def test_requests_run_together_up_to_the_limit(server, monkeypatch):
    """Each request waits until three run at once, which a smaller limit would never reach."""
    together = threading.Barrier(3, timeout=100)

    def run(body):
        together.wait()
        result = {"status": "Finished", "return_code": 0, "stdout": "1"}
        return {"status": "Success", "message": "", "run_result": result}

    monkeypatch.setattr(fake_sandbox_fusion, "run", run)
    tests = {"inputs": [""] * 6, "outputs": ["1"] * 6}
    assert passed(server, "", tests, max_requests=3) == 6
    assert server.most_at_once == 3
