"""Part 4: whole runs on one card, which server and trainer share (CUDA_VISIBLE_DEVICES=0,0), and their audit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent.parent


def run(folder: Path, *options: str) -> Path:
    """The quickstart with a GRPO stage of 20 steps on the card; returns its run folder."""
    argv = [sys.executable, "examples/quickstart/quickstart.py", "--fileroot", str(folder)]
    argv += ["cluster.n_gpus_per_node=2", "total_train_steps=20", "native.max_total_tokens=65536", *options]
    # The quickstart fails because 20 steps do not solve the task: the run itself is checked.
    subprocess.run(argv, timeout=280, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0,0"}, cwd=ROOT)
    found = folder / "quickstart" / "grpo"
    assert json.loads((found / "summary.json").read_text())["status"] == "completed"
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_server_and_trainer_share_a_card_and_the_weights_go_over_the_disk(tmp_path, dtype):
    found = run(tmp_path, "actor.weight_update_mode=auto", f"actor.dtype={dtype}", f"native.dtype={dtype}")
    assert json.loads((found / "plan.json").read_text())["weight_path"]["transport"] == "disk"
    subprocess.run([sys.executable, "-m", "areal.ledger", "audit", found], check=True, timeout=100)


def test_a_server_on_the_cpu_gets_weights_of_a_gpu_over_gloo(tmp_path):
    found = run(tmp_path, "actor.weight_update_mode=xccl", "native.device=cpu")
    assert json.loads((found / "plan.json").read_text())["weight_path"]["transport"] == "gloo"
