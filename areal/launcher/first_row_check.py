"""The trial of the first row, before a run starts: prompt, workflow and reward functions, in a separate process."""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from areal.api.config import PPOConfig
from areal.api.config.load import save_config
from areal.api.errors import ConfigProblem

_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRow:
    """The result of `areal.trainer.first_row`."""

    prompt: str = ""
    num_tokens: int = 0
    problems: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    warnings: list[str] = field(default_factory=list[str])
    notice: str = ""


def tried_row(config: PPOConfig) -> TriedRow:
    """Try row 0 of train_dataset. Waits for the process that runs the user's code, at most for its limit."""
    with tempfile.TemporaryDirectory(prefix="areal-") as folder:
        path = Path(folder, "config.yaml")
        env = os.environ | save_config(config, path) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "areal.trainer.first_row", "--config", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, env=env, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            text = f"the trial of row 0 did not end within {_LIMIT_S:g} s, and the run starts without it"
            return TriedRow(warnings=[f"{text}: look for an endless loop in the map_fn, the workflow or the reward"])
    try:
        found = orjson.loads(done.stdout)
    except orjson.JSONDecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return TriedRow(problems=[ConfigProblem("row 0", f"its trial ended: {last[0]}", "launch.first_row")])
    return TriedRow(**found | {"problems": [ConfigProblem(**one) for one in found["problems"]]})
