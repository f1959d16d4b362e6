"""The check, before a run starts, of the sandbox in which programs of completions run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable

from areal.api.config import PPOConfig

_LIMIT_S = 90.0


def sandbox_problems(config: PPOConfig, say: Callable[[str], None]) -> list[str]:
    """One sentence when the sandbox cannot be used; says what programs can reach beyond its promises.

    Waits for a process of the reward package, at most `_LIMIT_S`, and only if a reward of the configuration is `code`.
    """
    functions = {config.reward_fn, *(name for _, fns in config.reward.tables() for name in fns)}
    if "code" not in functions:
        return []
    settings = {"config": dataclasses.asdict(config.reward.sandbox)}
    env = os.environ | {"AREAL_SANDBOX": json.dumps(settings), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "areal.reward.sandbox_backends"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return [f"reward.sandbox: its check did not end within {_LIMIT_S:g} s"]
    if done.returncode:
        last = (done.stdout or done.stderr).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [f"reward.sandbox: {last[0]}"]
    if done.stdout:
        say(f"areal: warning: {done.stdout}")
    return []
