"""A loop of one's own through the SDK alone learns the quickstart's task: examples/tinker/grpo.py."""

import json
import subprocess
import sys

import pytest

from tests.tinker.conftest import ROOT, serving


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        (["--max-rank", "64"], []),
        pytest.param(["--full"], ["--sft-lr", "3e-3", "--lr", "3e-4"], marks=pytest.mark.slow),
    ],
)
def test_the_sampled_reward_reaches_its_goal(recipe_folder, tmp_path, words, rates):
    data = tmp_path / "data"
    subprocess.run([sys.executable, "examples/quickstart/prepare.py", str(data)], cwd=ROOT, check=True)
    with serving(tmp_path / "run", data / "model", "digits", *words, clients=tmp_path) as served:
        result = served.python(str(ROOT / "examples/tinker/grpo.py"), str(data), *rates, limit_s=290)
        assert result.returncode == 0, result.stderr[-3000:]
        facts = json.loads(result.stdout.splitlines()[-1])
        counts = served.audit()
    assert facts["before"] < 0.45
    assert facts["after"] >= 0.80
    assert counts["optimiser_steps"] == facts["optimiser_steps"]
