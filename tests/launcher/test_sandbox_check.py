"""The check of the code sandbox before a run starts."""

import subprocess

from areal.api.config import PPOConfig, RewardConfig
from areal.api.config.rollout import SandboxConfig
from areal.launcher import preflight as sandbox_check
from areal.launcher.preflight import sandbox_problems


def config(sandbox, **reward):
    made = object.__new__(PPOConfig)
    object.__setattr__(made, "reward_fn", "" if reward else "code")
    object.__setattr__(made, "reward", RewardConfig(sandbox=sandbox, **reward))
    return made


def test_a_service_that_does_not_answer_is_a_problem():
    unreachable = SandboxConfig(backend="remote", url="http://127.0.0.1:9", retries=0)
    for made in (config(unreachable), config(unreachable, by_source={"apps": {"code": 1.0}})):
        (problem,) = sandbox_problems(made, lambda text: None)
        assert "http://127.0.0.1:9" in problem
    assert sandbox_problems(config(unreachable, fns={"gsm8k": 1.0}), lambda text: None) == []


def test_the_access_of_sandboxed_programs_is_reported(monkeypatch):
    done = subprocess.CompletedProcess([], 0, stdout="programs can read /data", stderr="")
    asked = []
    monkeypatch.setattr(
        sandbox_check.subprocess, "run", lambda *_, env, **__: asked.append(env["AREAL_SANDBOX"]) or done
    )
    said = []
    assert sandbox_problems(config(SandboxConfig(backend="bubblewrap")), said.append) == []
    assert len(said) == 1
    assert "programs can read /data" in said[0]
    assert '"backend": "bubblewrap"' in asked[0]
