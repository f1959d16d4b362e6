"""The scripts of docs/own_loop.md run as they are shown, on a tiny model."""

import os
import re
import subprocess
import sys

import pytest

from tests.serve.adapters import write_model
from tests.test_docs import ROOT, write_files

SHOWN = {
    "grpo": r"step 1: reward 0\.\d{3}",
    "curriculum": r"step 1: \d digits, success 0\.\d{3}",
    "self_play": r"step 1: .+ against .+",
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_script_of_the_page_runs(tmp_path, name):
    write_files("docs/own_loop.md", tmp_path)
    model = write_model(tmp_path / "model")
    command = [sys.executable, f"my/{name}.py", str(model), "2"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(SHOWN[name], done.stdout.splitlines()[1])
    assert (tmp_path / "my/policy/adapter/adapter_config.json").exists() == (name == "grpo")
