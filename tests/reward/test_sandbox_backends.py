"""The choice of a sandbox backend, and its check at the start of a run."""

import os
import subprocess
import sys

import pytest

from areal.api.config import RewardConfig
from areal.api.config.rollout import SandboxConfig
from areal.api.registry import registered
from areal.reward import sandbox as sandbox_backends
from areal.reward.code import code_reward
from areal.reward.pool import RewardPool
from areal.reward.sandbox import Isolation, IsolationMissing, checked
from tests.expect import raises_code
from tests.reward.backends import BACKENDS, use_backend
from tests.reward.fake_sandbox_fusion import FakeSandboxFusion

ADD = "```python\ndef add(a, b): return a + b\n```"


@pytest.mark.parametrize("name", BACKENDS)
def test_each_backend_runs_programs(name, monkeypatch):
    with use_backend(name, monkeypatch):
        for wanted, value in ((3, 1.0), (4, 0.0)):
            assert code_reward("", ADD, [], [], tests=[f"assert add(1, 2) == {wanted}"], time_limit_s=9) == value


async def test_the_workers_of_a_pool_use_the_configured_backend():
    with FakeSandboxFusion() as server:
        sandbox = SandboxConfig(backend="remote", url=server.url)
        pool = RewardPool(RewardConfig(workers=1, timeout_s=200.0, sandbox=sandbox))
        row = {"tests": ["assert add(1, 2) == 3"], "time_limit_s": 60, "total_time_limit_s": 100}
        (result,) = await pool.score_many(registered("rewards", "code").target, "", [], [(ADD, [])], row)
        await pool.aclose()
    assert (result.status, result.value) == ("ok", 1.0)
    assert len(server.requests) == 1


def test_bubblewrap_is_refused_where_it_is_missing_or_does_not_work(monkeypatch):
    monkeypatch.setattr(sandbox_backends.shutil, "which", lambda name: None)
    with raises_code("sandbox.backend_unusable"):
        checked(SandboxConfig(backend="bubblewrap"))

    def fails(isolation):
        raise IsolationMissing("no namespaces")

    monkeypatch.setattr(sandbox_backends.shutil, "which", lambda name: "/usr/bin/bwrap")
    monkeypatch.setattr(sandbox_backends, "try_isolation", fails)
    with raises_code("sandbox.backend_unusable"):
        checked(SandboxConfig(backend="bubblewrap"))


@pytest.mark.skipif(sys.platform != "linux", reason="the local sandbox has its filter only on Linux")
def test_the_local_sandbox_is_refused_on_other_machines(monkeypatch):
    """They would need another table of system calls."""
    names = list(os.uname())
    monkeypatch.setattr(sandbox_backends.os, "uname", lambda: os.uname_result([*names[:4], "aarch64"]))
    with raises_code("sandbox.backend_unusable", "aarch64"):
        checked(SandboxConfig())


def test_what_programs_can_reach_without_a_protection_is_said_once(monkeypatch, caplog):
    result = (Isolation(namespaces=False), ["namespaces: forbidden"])
    monkeypatch.setattr(sandbox_backends, "available_isolation", lambda: result)
    isolation, warning = checked(SandboxConfig())
    assert isolation == result[0]
    for word in ("datasets", "run folder", "namespaces: forbidden", "reward.sandbox.backend"):
        assert word in warning
    sandbox_backends.log_reach(SandboxConfig())
    assert [record.getMessage() for record in caplog.records] == [warning]
    sandbox_backends._of_this_process.cache_clear()
    monkeypatch.setenv(*sandbox_backends.variable(SandboxConfig(), announced=True).popitem())
    sandbox_backends._of_this_process()
    assert len(caplog.records) == 1  # a worker does not say it again
    sandbox_backends._of_this_process.cache_clear()


def test_all_protections_are_nothing_to_say(monkeypatch):
    monkeypatch.setattr(sandbox_backends, "available_isolation", lambda: (Isolation(), []))
    assert checked(SandboxConfig()) == (Isolation(), "")


@pytest.mark.parametrize("url", ["", "10.0.0.7:8080", "ftp://10.0.0.7"])
def test_a_remote_backend_needs_an_address(url):
    problems = [*SandboxConfig(backend="remote", url=url).problems()]
    assert [problem[0] for problem in problems] == ["url"]


def test_the_check_is_a_command():
    """The launcher runs it: exit code and one line."""
    command = [sys.executable, "-m", "areal.reward.sandbox"]
    for config, code in (
        (SandboxConfig(), 0),
        (SandboxConfig(backend="remote", url="http://127.0.0.1:9", retries=0), 2),
    ):
        env = os.environ | sandbox_backends.variable(config, announced=False)
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=250)
        assert done.returncode == code
        assert bool(done.stdout) == bool(code or checked(config, sends=False)[1])
